"""The same folder and conversations through transformers, live."""

import pytest

from pagedjax.text import Tokenizer
from tests.host.tiny_vocabularies import CHATML, byte_level_backend, write_folder

pytestmark = pytest.mark.parity

# Written here in the manner of well-known models: trimming, dates, tools, alternating roles, white-space control.
LLAMA_3_LIKE = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<s>system\\n\\nToday " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "</s>" }}
{%- for message in messages %}
    {{- '<s>' + message['role'] + '\\n\\n'+ message['content'] | trim + '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<s>assistant\\n\\n' }}
{%- endif %}
"""
LLAMA_2_LIKE = """{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must alternate') }}
  {% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}
{% endfor %}
"""  # noqa: E501

CONVERSATIONS = [
    [{"role": "user", "content": " Hi <é> 你好 "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b  "}, {"role": "user", "content": "c\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b \n"}],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é <b>", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("template", [CHATML, LLAMA_3_LIKE, LLAMA_2_LIKE], ids=["chatml", "llama-3", "llama-2"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_text_and_ids_equal_transformers(tmp_path, template, messages):
    transformers = pytest.importorskip("transformers")
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = write_folder(tmp_path, byte_level_backend(), tokenizer_config=config, chat_template=template)
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    options = [{"add_generation_prompt": True}, {"add_generation_prompt": False}, {"tools": TOOLS, "add_generation_prompt": True}]
    if messages[-1]["role"] == "assistant":
        options.append({"continue_final_message": True})
    for chosen in options:
        assert ours.apply_chat_template(messages, **chosen) == theirs.apply_chat_template(messages, tokenize=False, **chosen)
        assert ours.encode_chat(messages, **chosen) == theirs.apply_chat_template(messages, return_dict=False, **chosen)


TEXTS = ["", "ab a", "<s>ab</s>", " \n ab<mask>", "👨‍👩‍👧‍👦 नमस्ते 你好", "<extra>a<new>", "x</s>[T]"]
FOLDERS = {
    "bare": (True, {}),
    "named": (True, {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}),
    "no post-processor, flag set": (False, {"bos_token": "<s>", "add_bos_token": True}),
    "post-processor, flag unset": (True, {"bos_token": "<s>", "add_bos_token": False}),
    "named but not marked": (True, {"mask_token": "<mask>", "additional_special_tokens": ["<extra>", "ab"]}),
    "clean-up asked for": (True, {"clean_up_tokenization_spaces": True}),
    "added in the config": (True, {"added_tokens_decoder": {"262": {"content": "<new>", "special": True}}}),
}


@pytest.mark.filterwarnings("ignore:.*clean_up_tokenization.*")
@pytest.mark.parametrize("name", FOLDERS)
def test_folders_mean_what_they_mean_to_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    add_bos, config = FOLDERS[name]
    backend = byte_level_backend(add_bos=add_bos)
    backend.add_tokens(["<mask>", "<extra>"])
    folder = write_folder(tmp_path, backend, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **config})
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
