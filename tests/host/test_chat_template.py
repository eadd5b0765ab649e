"""Chat templates: what they see, what the text is, what is refused, and the ids of a conversation."""

import datetime as dt
import enum

import pytest

from pagedjax.errors import CheckpointError, RequestError
from pagedjax.text import Tokenizer
from pagedjax.text.chat_template import render
from tests.host.tiny_vocabularies import CHATML, byte_level_backend, byte_level_gguf, sentencepiece_gguf, write_folder

USER = [{"role": "user", "content": "Hi"}]
DIALOGUE = [*USER, {"role": "assistant", "content": "Hello "}]


def chatty(template=CHATML, **keys):
    return Tokenizer.from_gguf(byte_level_gguf(**keys) | {"tokenizer.chat_template": template})


# ---- the text ----


def test_the_generation_prompt_is_added_unless_it_is_not_wanted():
    assert chatty().apply_chat_template(USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chatty().apply_chat_template(USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        # Blocks on lines of their own leave neither the line break nor the indentation.
        ("{% for m in messages %}\n  {% if m.role %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n", "Hi\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=True, ensure_ascii=True) }}", '{\n "a": "\\u00e9",\n "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{% generation %}{% set x = 1 %}{{ x }}{{ messages[0].content }}{% endgeneration %}{{ x }}", "1Hi"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue"),
        ("{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}{{ nothing }}", "<|im_start|><|im_end|>False"),
    ],
)
def test_the_environment_is_what_templates_are_written_for(template, text):
    assert chatty(template).apply_chat_template(USER) == text


def test_strftime_now_gives_today():
    before = dt.date.today()
    text = chatty("{{ strftime_now('%Y-%m-%d') }}").apply_chat_template(USER)
    assert before <= dt.date.fromisoformat(text) <= dt.date.today()


def test_variables_reach_the_template_and_override_token_names():
    assert chatty("{{ enable_thinking }}{{ bos_token }}").apply_chat_template(USER, enable_thinking=False, bos_token="B") == "FalseB"


def test_a_message_value_of_none_counts_as_absent():
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
    template = "{{ messages[0].content is defined }} {{ messages[0].tool_calls | tojson }}"
    assert chatty(template).apply_chat_template([message]) == 'False [{"function": {"name": "f", "arguments": {"x": null}}}]'


def test_tools_choose_the_template_made_for_them():
    tokenizer = Tokenizer(byte_level_backend(), chat_templates={"default": "plain", "tool_use": "{{ tools[0].name }}", "other": "o"})
    assert tokenizer.apply_chat_template(USER) == "plain"
    assert tokenizer.apply_chat_template(USER, tools=[{"name": "f"}]) == "f"
    assert tokenizer.apply_chat_template(USER, chat_template="other") == "o"
    assert tokenizer.apply_chat_template(USER, chat_template="{{ messages[0].content }}!") == "Hi!"
    assert chatty("{{ tools | length }}").apply_chat_template(USER, tools=[{}, {}]) == "2"


# ---- a last message to go on with ----

TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")


@pytest.mark.parametrize(("template", "end"), [(CHATML, "Hello "), (TRIMMING, "Hello")])
def test_a_continued_message_stays_open(template, end):
    text = chatty(template).apply_chat_template(DIALOGUE, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + end


def test_a_continued_message_may_repeat_an_earlier_one():
    messages = [*DIALOGUE, *USER, {"role": "assistant", "content": "Hello "}]
    assert chatty().apply_chat_template(messages, continue_final_message=True).count("Hello ") == 2


def test_a_continued_message_of_parts():
    template = "{% for m in messages %}[{% for part in m.content %}{{ part.text }}{% endfor %}]{% endfor %}"
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image"}]}]
    assert chatty(template).apply_chat_template(messages, continue_final_message=True) == "[ab"
    assert messages[0]["content"][1]["text"] == "b"  # the caller's own messages stay as they were


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}]])
def test_nothing_to_continue(content):
    with pytest.raises(RequestError, match="needs a last message whose 'content' holds text"):
        chatty().apply_chat_template([{"role": "assistant", "content": content}], continue_final_message=True)


def test_a_template_that_drops_or_alters_the_last_message_cannot_continue_it():
    for template in ("{{ messages[0].role }}", "{{ messages[-1].content | upper }}"):
        with pytest.raises(RequestError, match="the chat template alters the last message"):
            chatty(template).apply_chat_template(DIALOGUE, continue_final_message=True)


def test_a_message_is_either_continued_or_followed():
    with pytest.raises(RequestError, match="choose one"):
        chatty().apply_chat_template(DIALOGUE, continue_final_message=True, add_generation_prompt=True)


# ---- ids ----


def test_ids_of_a_conversation_hold_each_special_token_once():
    tokenizer = Tokenizer.from_gguf(
        sentencepiece_gguf({"▁": -1.0, "a": -2.0, "▁a": -3.0})
        | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    )
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id  # this vocabulary adds it to plain text
    ids = tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert ids == [1, 261, 2]


def test_a_folder_whose_tokenizer_adds_a_bos_adds_none_to_a_conversation(tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend(), tokenizer_config=config))
    assert tokenizer.encode("ab") == [0, 259]
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [0, 259, 1]


def test_ids_and_text_of_a_conversation_agree():
    tokenizer = chatty(add_bos_token=True)
    for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        text = tokenizer.apply_chat_template(DIALOGUE, **options)
        assert tokenizer.decode(tokenizer.encode_chat(DIALOGUE, **options), skip_special_tokens=False) == text


# ---- refusals ----


def test_no_chat_template():
    with pytest.raises(RequestError, match="the model has no chat template: it was made to continue text"):
        Tokenizer(byte_level_backend()).apply_chat_template(USER)
    with pytest.raises(RequestError, match="the model has no chat template"):
        Tokenizer(byte_level_backend()).encode_chat(USER)


def test_several_chat_templates_and_no_default():
    tokenizer = Tokenizer(byte_level_backend(), chat_templates={"rag": "a", "tool_use": "b"})
    assert tokenizer.chat_template is None
    with pytest.raises(RequestError, match=r"no default chat template; name one of \['rag', 'tool_use'\]"):
        tokenizer.apply_chat_template(USER)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0]['content'] + none }}", "refuses these messages: can only concatenate str"),
        ("{{ nothing + 'a' }}", "refuses these messages: 'nothing' is undefined"),
        ("{{ messages[0].content.x.y }}", "refuses these messages: 'str object' has no attribute 'x'"),
        ("{{ 1 / 0 }}", "refuses these messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "refuses these messages: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ (''|attr('__class__')).__mro__ }}", "refuses these messages: access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "refuses these messages: access to attribute '__init__' of 'type' object is unsafe"),
        ("{% set x = messages.append(1) %}", "refuses these messages: access to attribute 'append' of 'list' object is unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses these messages: Range too big"),
    ],
)
def test_a_template_that_refuses_or_misbehaves(template, message):
    with pytest.raises(RequestError, match=message):
        chatty(template).apply_chat_template(USER)


def test_a_template_that_is_not_jinja():
    with pytest.raises(CheckpointError, match="the chat template is not valid jinja2: line 2: "):
        chatty("\n{% if %}").apply_chat_template(USER)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("Hi", "messages is a str; it must be a list"),
        (USER[0], "messages is a dict; it must be a list"),
        (["Hi"], r"messages\[0\] is 'Hi'; it must be a mapping with a 'role'"),
        ([USER], r"messages\[0\] is \[.*\]; it must be a mapping with a 'role'"),
        ([*USER, {"content": "Hi"}], r"messages\[1\] is .*; it must be a mapping with a 'role'"),
        (
            [{"role": "user", "content": [{"image": object()}]}],
            r"messages\[0\]\['content'\]\[0\]\['image'\] holds a object; a chat template takes",
        ),
    ],
)
def test_unusable_messages(messages, message):
    with pytest.raises(RequestError, match=message):
        chatty().apply_chat_template(messages)


def test_unusable_tools_documents_and_variables():
    for options in ({"tools": [print]}, {"tools": {"name": "f"}}, {"documents": ["text"]}, {"tools": "f"}):
        with pytest.raises(RequestError, match=f"{next(iter(options))} must be a list of mappings"):
            chatty().apply_chat_template(USER, **options)
    with pytest.raises(RequestError, match=r"variables\['x'\] holds a builtin_function_or_method"):
        chatty().apply_chat_template(USER, x=print)


def test_values_of_subclasses_reach_the_template_as_plain_values():
    class Role(enum.StrEnum):
        USER = "user"

    class Count(enum.IntEnum):
        TWO = 2

    class Share(float):
        pass

    template = "{{ messages[0].role }} {{ messages[0].n }} {{ messages[0].s }} {{ messages[0].role.name is defined }}"
    assert render(template, [{"role": Role.USER, "n": Count.TWO, "s": Share(0.5)}]) == "user 2 0.5 False"
