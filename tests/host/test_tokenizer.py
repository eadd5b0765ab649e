"""Tokenizers from Hugging Face folders; encoding, decoding, and decoding token by token."""

import json
import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend
from tokenizers import models as backend_models

from pagedjax.errors import CheckpointError, RequestError, UnsupportedModelError
from pagedjax.text import Tokenizer
from tests.host.tiny_vocabularies import CHATML, byte_level_backend, byte_level_gguf, sentencepiece_gguf, write_folder

# ---- folders ----


def test_a_folder_with_nothing_but_tokenizer_json(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend()))
    ids = tokenizer.encode("ab a")
    assert ids == [0, 259, 258]
    assert tokenizer.decode(ids) == "ab a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>ab a"
    assert tokenizer.encode("ab", add_special_tokens=False) == [259]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (None, None, 260)
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("bos", ["<s>", {"__type": "AddedToken", "content": "<s>", "lstrip": False}])
def test_names_of_special_tokens_come_from_the_config(tmp_path, bos):
    config = {"bos_token": bos, "eos_token": "</s>", "pad_token": None, "tokenizer_class": "LlamaTokenizer", "model_max_length": 8}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend(), tokenizer_config=config))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_special_tokens_map_counts_where_the_config_is_silent(tmp_path):
    files = {"tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": {"bos_token": {"content": "<s>"}, "eos_token": "<s>"}}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend(), **files))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_configs_flag_does_not_add_a_bos_that_tokenizer_json_leaves_out(tmp_path):
    # As in transformers 5: the post-processor of tokenizer.json decides.
    config = {"bos_token": "<s>", "add_bos_token": True}
    folder = write_folder(tmp_path, byte_level_backend(add_bos=False), tokenizer_config=config)
    assert Tokenizer.from_folder(folder).encode("ab") == [259]


def test_truncation_and_padding_in_tokenizer_json_are_switched_off(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(Tokenizer.from_folder(write_folder(tmp_path, backend)).encode("xyz")) == 4


def test_tokens_that_only_the_config_lists_are_added_under_their_ids(tmp_path):
    added = {
        "261": {"content": "<tool>", "special": False},
        "260": {"content": "<|eot|>", "special": True, "normalized": False},
        "0": {"content": "<s>", "special": True},
    }
    folder = write_folder(tmp_path, byte_level_backend(), tokenizer_config={"added_tokens_decoder": added})
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("a<|eot|><tool>", add_special_tokens=False)
    assert ids[1:] == [260, 261]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.vocab_size == 262


def test_a_named_token_is_special_also_where_tokenizer_json_forgets_to_say_so(tmp_path):
    backend = byte_level_backend()
    backend.add_tokens(["<|im_end|>", "<tool>", "<box>"])
    # A list makes a token special only where tokenizer.json has it as an ordinary one.
    lists = {"additional_special_tokens": ["<tool>", "Ġa", "<unknown>"], "extra_special_tokens": {"box_token": "<box>"}}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, tokenizer_config={"eos_token": "<|im_end|>", **lists}))
    assert tokenizer.decode([260, *tokenizer.encode("ab a"), 261, 262]) == "ab<tool>"
    assert tokenizer.vocab_size == 263
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "box_token": "<box>"}


def test_flags_of_a_token_survive_its_marking(tmp_path):
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, tokenizer_config={"mask_token": "<mask>"}))
    assert tokenizer.encode("ab   <mask>", add_special_tokens=False) == [259, 260]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config": {"chat_template": "A"}}, {"default": "A"}),
        (
            {"tokenizer_config": {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}},
            {"default": "A", "tool_use": "B"},
        ),
        ({"tokenizer_config": {"chat_template": {"default": "A", "rag": "B"}}}, {"default": "A", "rag": "B"}),
        ({"chat_template": "C", "tokenizer_config": {"chat_template": "A"}}, {"default": "C"}),
        ({"tokenizer_config": {}}, {}),
    ],
)
def test_where_chat_templates_are_found(tmp_path, files, expected):
    assert Tokenizer.from_folder(write_folder(tmp_path, byte_level_backend(), **files)).chat_templates == expected


def test_further_chat_templates_in_files_of_their_own(tmp_path):
    folder = write_folder(tmp_path, byte_level_backend(), chat_template="A")
    write_folder(folder / "additional_chat_templates", tool_use="B")
    assert Tokenizer.from_folder(folder).chat_templates == {"default": "A", "tool_use": "B"}


def test_the_old_chat_template_json(tmp_path):
    folder = write_folder(tmp_path, byte_level_backend())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
    assert Tokenizer.from_folder(folder).chat_template == "D"


# ---- unusable folders ----


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_a_folder_without_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, so the folder has no tokenizer"):
        Tokenizer.from_folder(write_folder(tmp_path, config={}))


def test_a_folder_with_another_kind_of_tokenizer(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.model: a SentencePiece or tiktoken model without a tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model": ', "not json"])
def test_a_damaged_tokenizer_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": ', r"tokenizer_config\.json: not JSON"),
        (b"[]", r"tokenizer_config\.json: holds a list, not an object"),
        (b"\xff", r"tokenizer_config\.json: cannot be read"),
        (b'{"eos_token": "<end>"}', "eos_token is '<end>', which tokenizer.json does not know"),
        (b'{"added_tokens_decoder": {"260": {}}}', r"added_tokens_decoder\['260'\] has no content"),
        (b'{"added_tokens_decoder": {"300": {"content": "<x>"}}}', "'<x>' has id 300 in tokenizer_config.json, but 260 with"),
        (b'{"added_tokens_decoder": {"one": {"content": "<x>"}}}', "added_tokens_decoder is not an object whose keys are ids"),
        (b'{"added_tokens_decoder": [1]}', "added_tokens_decoder is not an object whose keys are ids"),
        (b'{"chat_template": 3}', "chat_template is neither a text nor a list of named templates"),
        (b'{"chat_template": [{"name": "default"}]}', "chat_template is neither a text nor a list of named templates"),
    ],
)
def test_a_damaged_config(tmp_path, content, message):
    write_folder(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_clean_up_is_refused_where_it_would_change_the_text(tmp_path):
    config = {"clean_up_tokenization_spaces": True}
    Tokenizer.from_folder(write_folder(tmp_path / "bpe", byte_level_backend(), tokenizer_config=config))  # as in transformers: no effect
    words = Backend(backend_models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(UnsupportedModelError, match="clean_up_tokenization_spaces is not built for a WordLevel tokenizer"):
        Tokenizer.from_folder(write_folder(tmp_path / "words", words, tokenizer_config=config))


# ---- encode and decode ----


def test_unusable_text_and_ids():
    tokenizer = Tokenizer(byte_level_backend())
    with pytest.raises(RequestError, match="text is a bytes; it must be a str"):
        tokenizer.encode(b"a")
    with pytest.raises(RequestError, match="half a surrogate pair at index 1"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(RequestError, match="token id -1 is negative"):
        tokenizer.decode([5, -1])


def test_ids_beyond_the_vocabulary_add_nothing():
    tokenizer = Tokenizer(byte_level_backend())
    assert tokenizer.decode([259, 260, 100_000]) == "ab"
    assert tokenizer.decode([]) == ""


# ---- stream ----

BYTE_LEVEL = Tokenizer.from_gguf(byte_level_gguf(["Ġ a", "a b", "ð Ł", "ä ½"], extra={"<think>": 4}))
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece_gguf({"▁": -1.0, "a": -2.0, "▁a": -3.0, "你": -4.0, "\N{REPLACEMENT CHARACTER}": -5.0}))
NO_PREFIX = Tokenizer.from_gguf(sentencepiece_gguf({"▁": -1.0, "a": -2.0, "▁a": -3.0}, add_space_prefix=False))
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "no-prefix": NO_PREFIX}

# One family of seven code points, a flag, Devanagari with combining signs, Chinese, Arabic, a skin tone, control characters.
TEXTS = [
    "👨‍👩‍👧‍👦 hi",
    "🇮🇳",
    "नमस्ते दुनिया",
    "你好，世界！",
    "مرحبا",
    "👍🏽a 👍🏽",
    "a\n\n\ta",
    " a",
    "  ",
    "a</s>a<|im_end|>b<think>",
    "\ufffda",
]


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    return [*(stream.step(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_steps_join_to_the_text(tokenizer, text):
    for skip in (True, False):
        ids = tokenizer.encode(text)
        steps = streamed(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(steps) == tokenizer.decode(ids, skip)
        assert not any("\ufffd" in step for step in steps) or "\ufffd" in text
        assert steps[-1] == "" or tokenizer is not BYTE_LEVEL


# Bytes of broken characters are the hard part: most ids are bytes (their ids differ by one between the vocabularies), many of them from
# one character. Ids just past the vocabulary are unknown.
SOME_ID = st.one_of(st.integers(2, 258), st.sampled_from([*BYTE_LEVEL.encode("👍a"), *SENTENCEPIECE.encode("👍a 你")]), st.integers(0, 268))


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=80)
@given(before=st.lists(SOME_ID, max_size=6), ids=st.lists(SOME_ID, max_size=12), skip=st.booleans())
@example(before=[], ids=[128, 257], skip=True)  # what made tokenizers' DecodeStream raise
@example(before=[0, 0, 0, 3], ids=[3, 200], skip=False)
@example(before=[3 + 0x0A], ids=[3 + 0x0A, 260], skip=True)
def test_any_ids_join_to_their_decoding(tokenizer, before, ids, skip):
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)
    known, whole = tokenizer.decode(before, skip), tokenizer.decode([*before, *ids], skip)
    rest = "".join(streamed(tokenizer, ids, skip_special_tokens=skip, context=before))
    # What differs from the context's own text: a character that it left unfinished comes whole, what was broken there does not come again.
    assert rest == beyond(known, whole)
    stream = tokenizer.stream(skip, context=before)
    assert "".join(map(stream.step, ids[:5])) + stream.finish(ids[5:]) == rest


def beyond(known, whole):
    """The end of a text from the first character on that differs from a known beginning."""
    at = 0
    while at < min(len(known), len(whole)) and known[at] == whole[at]:
        at += 1
    return whole[at:]


def byte_ids(tokenizer):
    """The ids of all single bytes. GPT-2 spells a printable one as itself, and the others from U+0100 on."""
    if tokenizer is not BYTE_LEVEL:
        return range(3, 259)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [tokenizer._backend.token_to_id(chr(i if i in printable else next(others))) for i in range(256)]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_long_texts_and_contexts_join_to_their_decoding(tokenizer):
    """Long enough for windows to be cut within runs of broken bytes, and for all but the end of a context to be left out."""
    rng = random.Random(0)
    of_bytes = byte_ids(tokenizer)
    broken = [of_bytes[i] for i in (0xE2, 0x80, 0xF0, 0xFF)]
    kinds = [range(268), broken, broken[1:2], broken[:1], tokenizer.encode("👍🚀你a"), of_bytes]
    several = [[token for kind in rng.choices(kinds, k=4) for token in rng.choices(kind, k=rng.randrange(60))] for _ in range(60)]
    thumbs = [of_bytes[byte] for byte in "👍".encode()]
    several += [[*broken[1:2] * n, *thumbs * 8, *tokenizer.encode("a", add_special_tokens=False)] for n in range(40)]
    for ids in several:
        whole = tokenizer.decode(ids)
        assert "".join(streamed(tokenizer, ids)) == whole
        for at in (1, len(ids) // 3, len(ids) // 2, len(ids) - 4, len(ids) - 1):
            known = tokenizer.decode(ids[:at])
            rest = beyond(known, whole)
            assert "".join(streamed(tokenizer, ids[at:], context=ids[:at])) == rest


@pytest.mark.parametrize("broken", [0xF0, 0x80, 0xFF, None], ids=["beginnings", "continuations", "never", "random"])
def test_broken_bytes_take_linear_time(broken):
    """Such a text never ends between two characters. 20,000 of them at a cost that grows would take 15 s."""
    rng = random.Random(0)
    spelled = bytes(rng.randrange(256) if broken is None else broken for _ in range(20_000))
    of_bytes = byte_ids(BYTE_LEVEL)
    ids = [of_bytes[byte] for byte in spelled]
    began = time.process_time()
    steps = streamed(BYTE_LEVEL, ids)
    assert time.process_time() - began < 3
    assert "".join(steps) == spelled.decode(errors="replace")


def test_a_long_context_takes_no_time():
    long = BYTE_LEVEL.encode("ab ") * 100_000
    began = time.process_time()
    assert "".join(streamed(BYTE_LEVEL, BYTE_LEVEL.encode("b"), context=long)) == "b"
    assert time.process_time() - began < 0.5


def test_a_broken_character_of_the_context_is_not_shown_again():
    for tokenizer in TOKENIZERS.values():
        prompt = tokenizer.encode("a\ufffd")
        assert "".join(streamed(tokenizer, tokenizer.encode("a", add_special_tokens=False)[-1:], context=prompt)).strip() == "a"
        assert streamed(tokenizer, [], context=prompt) == [""]


def test_at_most_one_character_is_held_back():
    rocket = BYTE_LEVEL.encode("🚀")
    assert len(rocket) == 3  # its first two bytes are one token
    continuation = rocket[-1]  # a byte that begins no character
    assert streamed(BYTE_LEVEL, [*rocket, *rocket[:2], *rocket]) == ["", "", "🚀", "", "", "\ufffd", "", "🚀", ""]
    assert streamed(BYTE_LEVEL, [continuation] * 3) == ["", "\ufffd", "\ufffd", "\ufffd"]


def test_text_comes_as_soon_as_it_is_certain():
    ids = BYTE_LEVEL.encode("a👍b")
    assert streamed(BYTE_LEVEL, ids) == ["a", "", "", "👍", "b", ""]
    # A run of byte tokens is text only as a whole: transformers turns all of it into U+FFFD when one character in it is broken.
    ids = SENTENCEPIECE.encode("a👍a", add_special_tokens=False)
    assert streamed(SENTENCEPIECE, ids) == ["a", "", "", "", "", "👍a", ""]
    assert streamed(SENTENCEPIECE, ids[:-1]) == ["a", "", "", "", "", "👍"]
    assert streamed(SENTENCEPIECE, [*ids[:-1], ids[1]])[-1] == "\ufffd" * 5


def test_broken_bytes_are_shown_when_another_character_starts():
    broken = BYTE_LEVEL.encode("👍")[:2]
    assert streamed(BYTE_LEVEL, [*broken, *BYTE_LEVEL.encode("ab")]) == ["", "", "\ufffdab", ""]
    assert streamed(BYTE_LEVEL, broken) == ["", "", "\ufffd"]


def test_context_keeps_the_space_before_the_first_word():
    prompt, answer = SENTENCEPIECE.encode("a"), SENTENCEPIECE.encode("a a", add_special_tokens=False)
    assert "".join(streamed(SENTENCEPIECE, answer)) == SENTENCEPIECE.decode(answer) == "a a"
    assert "".join(streamed(SENTENCEPIECE, answer, context=prompt)) == " a a"


def test_context_may_end_in_the_middle_of_a_character():
    ids = BYTE_LEVEL.encode("👍")
    assert streamed(BYTE_LEVEL, ids[2:], context=ids[:2]) == ["👍", ""] if len(ids) == 3 else ["", "👍", ""]


def test_a_finished_stream_is_empty():
    stream = BYTE_LEVEL.stream()
    stream.step(BYTE_LEVEL.encode("👍")[0])
    assert (stream.finish(), stream.finish()) == ("\ufffd", "")
    assert stream.step(BYTE_LEVEL.encode("b")[0]) == "b"


def test_stream_without_a_decoder_puts_spaces_between_words():
    backend = Backend(backend_models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert backend.decoder is None
    assert streamed(Tokenizer(backend), [0, 1, 0]) == ["a", " b", " a", ""]
    backend.decoder = decoders.Fuse()
    assert streamed(Tokenizer(backend), [0, 1, 0]) == ["a", "b", "a", ""]


def test_folder_and_gguf_of_one_vocabulary_agree(tmp_path):
    folder = write_folder(tmp_path, SENTENCEPIECE._backend, chat_template=CHATML, tokenizer_config={"bos_token": "<s>"})
    again = Tokenizer.from_folder(folder)
    for text in TEXTS:
        assert again.encode(text) == SENTENCEPIECE.encode(text)
        assert streamed(again, again.encode(text)) == streamed(SENTENCEPIECE, SENTENCEPIECE.encode(text))
