"""Tokenizers from GGUF metadata: the pre-tokenizers' words, merges by rank and by score, special tokens, refusals."""

import functools
import io
import itertools
import random
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import CheckpointError, UnsupportedModelError
from pagedjax.text import Tokenizer
from tests.host.tiny_vocabularies import BYTE, CHATML, CONTROL, NORMAL, UNUSED, USER_DEFINED, byte_level_gguf, gguf, sentencepiece_gguf


def pieces(metadata, text, **options):
    """The tokens of `text` as the vocabulary spells them."""
    return [metadata["tokenizer.ggml.tokens"][i] for i in Tokenizer.from_gguf(metadata).encode(text, **options)]


# ---- byte level ----

DIGITS = ["1 2", "12 3", "123 4"]


@pytest.mark.parametrize(
    ("pre", "expected"), [("smollm", ["1", "2", "3", "4"]), ("qwen2", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"])]
)
def test_each_pre_tokenizer_keeps_its_number_of_digits_together(pre, expected):
    assert pieces(byte_level_gguf(DIGITS, pre=pre), "1234", add_special_tokens=False) == expected


def test_smollm_parts_a_number_from_the_space_before_it():
    # GPT-2's own rule would keep " 1" together: the digits are split off first.
    assert pieces(byte_level_gguf(["Ġ 1", "Ġ a"]), " 1 a") == ["Ġ", "1", "Ġa"]
    # Also digits of other scripts, and numbers that are not digits.
    assert len(pieces(byte_level_gguf(["Â ½"]), "½½")) == 2


@pytest.mark.parametrize(("pre", "expected"), [("smollm", ["!", "Ċ"]), ("qwen2", ["!Ċ"]), ("llama-bpe", ["!Ċ"])])
def test_a_line_break_stays_with_punctuation_only_in_the_newer_rules(pre, expected):
    assert pieces(byte_level_gguf(["! Ċ"], pre=pre), "!\n", add_special_tokens=False) == expected


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_the_newer_rules_put_one_sign_before_a_word_and_ignore_the_case_of_contractions(pre):
    metadata = byte_level_gguf(["( a", "' L", "'L L"], pre=pre)
    assert pieces(metadata, "(a", add_special_tokens=False) == ["(a"]
    assert pieces(metadata, "I'LL", add_special_tokens=False) == ["I", "'LL"]
    assert pieces(byte_level_gguf(["( a", "' L", "'L L"]), "(aI'LL") == ["(", "a", "I", "'", "L", "L"]


def test_merges_go_by_rank_and_not_from_left_to_right():
    assert pieces(byte_level_gguf(["b c", "a b"]), "abc") == ["a", "bc"]
    assert pieces(byte_level_gguf(["a b", "b c"]), "abc") == ["ab", "c"]


def test_llama_bpe_takes_a_word_of_the_vocabulary_without_merges():
    metadata = {pre: byte_level_gguf(["h e"], pre=pre, extra={"hey": NORMAL}) for pre in ("llama-bpe", "smollm")}
    assert pieces(metadata["llama-bpe"], "hey", add_special_tokens=False) == ["hey"]
    assert pieces(metadata["smollm"], "hey", add_special_tokens=False) == ["he", "y"]


def test_qwen2_composes_characters_and_the_others_do_not():
    decomposed = "e\N{COMBINING ACUTE ACCENT}"
    for pre, text in (("qwen2", "é"), ("smollm", decomposed), ("llama-bpe", decomposed)):
        tokenizer = Tokenizer.from_gguf(byte_level_gguf(pre=pre))
        assert tokenizer.decode(tokenizer.encode(decomposed)) == text


@functools.cache
def byte_level_tokenizer(pre):
    return Tokenizer.from_gguf(byte_level_gguf(["Ġ a", "a b", *DIGITS, "Ċ Ċ", "Ã ©"], pre=pre))


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
@given(text=st.text())
def test_byte_level_returns_every_text(pre, text):
    tokenizer = byte_level_tokenizer(pre)
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


# ---- the tokens around a text ----


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "a"),  # a byte-level file adds nothing unless it says so ...
        ({"pre": "llama-bpe"}, "<|im_start|>a"),  # ... except Llama 3's
        ({"pre": "llama-bpe", "add_bos_token": False}, "a"),
        ({"add_bos_token": True}, "<|im_start|>a"),
        ({"add_bos_token": True, "add_eos_token": True}, "<|im_start|>a<|im_end|>"),
        ({"add_eos_token": True}, "a<|im_end|>"),
    ],
)
def test_which_tokens_stand_around_a_text(keys, expected):
    tokenizer = Tokenizer.from_gguf(byte_level_gguf(**keys))
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == expected
    assert tokenizer.decode(tokenizer.encode("a")) == "a"
    assert tokenizer.decode(tokenizer.encode("a", add_special_tokens=False), skip_special_tokens=False) == "a"
    assert len(tokenizer.encode("", add_special_tokens=False)) == 0


def test_a_sentencepiece_file_adds_bos_unless_it_says_otherwise():
    assert Tokenizer.from_gguf(sentencepiece_gguf({"a": -1.0})).encode("")[:1] == [1]
    assert Tokenizer.from_gguf(sentencepiece_gguf({"a": -1.0}, add_bos_token=False)).encode("") == []


def test_an_old_sentencepiece_file_without_ids_means_the_usual_ones():
    tokenizer = Tokenizer.from_gguf(sentencepiece_gguf({"a": -1.0}, bos_token_id=None, eos_token_id=None, unknown_token_id=None))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_named_tokens_and_vocabulary_size():
    tokenizer = Tokenizer.from_gguf(byte_level_gguf(padding_token_id=1))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (0, 1, 258)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    assert tokenizer.special_ids == {0, 1}
    nameless = Tokenizer.from_gguf(byte_level_gguf(bos_token_id=None, eos_token_id=None))
    assert (nameless.bos_token_id, nameless.eos_token_id) == (None, None)


# ---- tokens that are matched whole ----


def test_control_tokens_are_found_in_a_text_and_left_out_of_it():
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], len(ids), ids[-1]) == (0, 3, 1)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_user_defined_tokens_are_found_whole_and_stay_in_the_text():
    metadata = byte_level_gguf(extra={"<think>": USER_DEFINED})
    assert pieces(metadata, "a<think>b") == ["a", "<think>", "b"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "a<think>b"


def test_a_special_token_may_use_any_character():
    metadata = byte_level_gguf(extra={"<｜Assistant▁ｘ｜>": CONTROL})
    assert pieces(metadata, "a<｜Assistant▁ｘ｜>b") == ["a", "<｜Assistant▁ｘ｜>", "b"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("a<｜Assistant▁ｘ｜>b"), skip_special_tokens=False) == "a<｜Assistant▁ｘ｜>b"


def test_an_end_token_that_the_file_forgot_to_mark_is_special_all_the_same():
    metadata = byte_level_gguf(extra={"<|eot_id|>": NORMAL, "[end]": NORMAL}, eos_token_id=258, eot_token_id=259)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("a<|eot_id|>[end]")[1:] == [258, 259]
    assert tokenizer.decode(tokenizer.encode("a<|eot_id|>[end]")) == "a"


def test_an_ordinary_token_named_as_bos_stays_ordinary():
    # llama.cpp's default BOS of byte-level files is id 11, a comma in GPT-2's vocabulary.
    comma = byte_level_gguf()["tokenizer.ggml.tokens"].index(",")
    tokenizer = Tokenizer.from_gguf(byte_level_gguf(bos_token_id=comma))
    assert tokenizer.decode(tokenizer.encode("a, b")) == "a, b"


# ---- SentencePiece ----

SCORED = {
    "▁": -1.0,
    "a": -2.0,
    "b": -3.0,
    "é": -4.0,
    "ab": -5.0,
    "ba": -6.0,
    "▁a": -7.0,
    "aba": -8.0,
    "▁ab": -9.0,
    "▁▁": -10.0,
    "aa": -11.0,
}


def by_score(text, scores):
    """SentencePiece's rule in its own words: merge the neighbours whose union scores highest, the leftmost of equals, until none does."""
    symbols = list(text)
    while True:
        joined = [(-scores[left + right], i) for i, (left, right) in enumerate(itertools.pairwise(symbols)) if left + right in scores]
        if not joined:
            return symbols
        i = min(joined)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@functools.cache
def scored_tokenizer(seed):
    """The pieces of `SCORED` in its order of ids, with their scores dealt out anew."""
    scores = dict(zip(SCORED, random.Random(seed).sample(list(SCORED.values()), len(SCORED)), strict=True))
    return Tokenizer.from_gguf(sentencepiece_gguf(scores)), scores


@settings(max_examples=300)
@given(text=st.text("ab  é"), seed=st.integers(0, 5))
def test_pieces_merge_by_score(text, seed):
    tokenizer, scores = scored_tokenizer(seed)
    expected = by_score(("▁" + text if text else "").replace(" ", "▁"), scores)
    first = 3 + 256  # the id of the first piece
    assert [list(scores)[i - first] for i in tokenizer.encode(text, add_special_tokens=False)] == expected


def test_scores_decide_and_not_the_order_of_ids():
    metadata = sentencepiece_gguf({"a": -1.0, "b": -2.0, "c": -3.0, "ab": -9.0, "bc": -4.0}, add_space_prefix=False)
    assert pieces(metadata, "abc", add_special_tokens=False) == ["a", "bc"]


def test_unknown_characters_become_bytes_and_come_back():
    metadata = sentencepiece_gguf(SCORED)
    assert pieces(metadata, "a👍", add_special_tokens=False) == ["▁a", "<0xF0>", "<0x9F>", "<0x91>", "<0x8D>"]
    assert pieces(metadata, "\n", add_special_tokens=False) == ["▁", "<0x0A>"]
    # The bytes' own spelling is ordinary text.
    assert "<0x0A>" not in pieces(metadata, "<0x0A>")


@given(text=st.text())
def test_sentencepiece_returns_every_text(text):
    tokenizer, _ = scored_tokenizer(0)
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


def test_without_bytes_unknown_characters_become_one_unknown_token():
    metadata = gguf("llama", [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁", 1), ("a", 1), ("▁a", 1)], scores=[0, 0, 0, -1, -2, -3])
    assert pieces(metadata, "a??a") == ["<s>", "▁a", "<unk>", "a"]


def test_a_space_stands_before_a_text_and_after_each_special_token():
    metadata = sentencepiece_gguf(SCORED, extra={"[T]": USER_DEFINED})
    assert pieces(metadata, "a</s>a[T]a") == ["<s>", "▁a", "</s>", "▁a", "[T]", "▁a"]
    assert pieces(metadata, " a") == ["<s>", "▁", "▁a"]  # besides the text's own
    assert pieces(metadata, "") == ["<s>"]


def test_no_space_stands_before_a_text_where_the_file_says_so():
    metadata = sentencepiece_gguf(SCORED, add_space_prefix=False)
    assert pieces(metadata, "a a") == ["<s>", "a", "▁a"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_control_unknown_unused_and_byte_tokens_take_no_part_in_merges():
    kinds = {"xy": CONTROL, "yx": UNUSED, "xx": BYTE}
    metadata = sentencepiece_gguf({"x": -1.0, "y": -2.0}, extra=kinds, add_space_prefix=False, add_bos_token=False)
    assert pieces(metadata, "yxxyyx") == ["y", "x", "xy", "y", "x"]  # a control token is found whole, the others never
    assert pieces(metadata, "xxx") == ["x", "x", "x"]


def test_merges_in_the_file_count_before_scores():
    metadata = sentencepiece_gguf({"a": 0.0, "b": 0.0, "c": 0.0, "ab": 0.0, "bc": 0.0}, merges=["b c", "a b"], add_space_prefix=False)
    assert pieces(metadata, "abc", add_special_tokens=False) == ["a", "bc"]


# ---- chat templates ----


def test_chat_templates_by_name():
    metadata = byte_level_gguf() | {"tokenizer.chat_template": CHATML, "tokenizer.chat_template.tool_use": "tools!"}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.chat_templates == {"default": CHATML, "tool_use": "tools!"}
    assert Tokenizer.from_gguf(byte_level_gguf()).chat_template is None


# ---- refusals ----


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedModelError, "tokenizer.ggml.model is 'bert', which is not built; gpt2, llama are"),
        ({"pre": "tekken"}, UnsupportedModelError, "tokenizer.ggml.pre is 'tekken', which is not built; smollm, llama-bpe, qwen2 are"),
        ({"add_space_prefix": True}, UnsupportedModelError, "add_space_prefix is true for a byte-level vocabulary"),
        ({"model": None}, CheckpointError, "has no tokenizer.ggml.model"),
        ({"pre": None}, CheckpointError, "has no tokenizer.ggml.pre"),
        ({"merges": None}, CheckpointError, "has no tokenizer.ggml.merges"),
        ({"tokens": None}, CheckpointError, "has no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, CheckpointError, "tokens holds 'a' 2 times"),
        ({"token_type": [1, 2]}, CheckpointError, "token_type has 2 entries for 258 tokens"),
        ({"token_type": [9] * 258}, CheckpointError, "token_type: 9 is not a valid TokenType"),
        ({"merges": ["ab"]}, CheckpointError, "merges holds 'ab', which is not two tokens"),
        ({"merges": ["a b"]}, CheckpointError, "merges joins 'a' and 'b', but 'ab' is not among the tokens"),
        ({"bos_token_id": 258}, CheckpointError, "bos_token_id is 258, but there are 258 tokens"),
        (
            {"bos_token_id": None, "add_bos_token": True},
            CheckpointError,
            "to get a BOS token, but the metadata has no tokenizer.ggml.bos_token_id",
        ),
    ],
)
def test_unusable_byte_level_metadata_is_refused_by_name(keys, error, message):
    metadata = byte_level_gguf() | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None})


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"scores": None}, CheckpointError, "has no tokenizer.ggml.scores"),
        ({"scores": [0.0]}, CheckpointError, "scores has 1 entries for 270 tokens"),
        ({"scores": [-1000.0] * 270}, CheckpointError, "scores gives every piece the same score"),
        ({"remove_extra_whitespaces": True}, UnsupportedModelError, "remove_extra_whitespaces is set"),
        ({"precompiled_charsmap": [1, 2]}, UnsupportedModelError, "precompiled_charsmap is set"),
        ({"token_type": [1] * 270, "unknown_token_id": None}, CheckpointError, "neither an unknown token nor bytes"),
    ],
)
def test_unusable_sentencepiece_metadata_is_refused_by_name(keys, error, message):
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(sentencepiece_gguf(SCORED, **keys))


def test_no_tokenizer_metadata_at_all():
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.ggml\.tokens"):
        Tokenizer.from_gguf({"general.architecture": "llama"})


# ---- against sentencepiece itself ----


def test_equals_sentencepiece():
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed (it is in no extra)")
    corpus = ["the cat sat on the mat", "the hat and the cat", "banana bandana aaaa aaa", "hello  world 12 34", "é ü ñ 中文"] * 10
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=model, vocab_size=330, model_type="bpe", byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    kinds = (("is_unknown", 2), ("is_control", 3), ("is_unused", 5), ("is_byte", 6))
    ids = range(theirs.vocab_size())
    typed = [(theirs.id_to_piece(i), next((kind for name, kind in kinds if getattr(theirs, name)(i)), NORMAL)) for i in ids]
    ours = Tokenizer.from_gguf(gguf("llama", typed, scores=[theirs.get_score(i) for i in ids]))
    choose = random.Random(0)
    alphabets = ("abn the  ", "a ", " ", "éü中x👍\n")
    texts = ["".join(choose.choices(alphabet, k=choose.randrange(1, 40))) for alphabet in alphabets for _ in range(100)]
    for text in [*corpus[:5], *texts]:
        ids = ours.encode(text)
        assert ids == [theirs.bos_id(), *theirs.encode(text)]
        assert ours.decode(ids) == theirs.decode(ids)
