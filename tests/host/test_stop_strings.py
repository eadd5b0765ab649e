"""Stop strings: where an answer ends, what is shown before that, and what it costs."""

import random
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.errors import RequestError
from pagedjax.text import AnswerText, Tokenizer
from tests.host.tiny_vocabularies import byte_level_gguf, sentencepiece_gguf

BYTE_LEVEL = Tokenizer.from_gguf(byte_level_gguf(["Ġ #", "# #", "a Ċ", "Ċ b", "ð Ł", "ä ½"]))
# A run of bytes is text only when it ends.
BYTE_FALLBACK = Tokenizer.from_gguf(sentencepiece_gguf({"▁": -1.0, "a": -2.0, "▁a": -3.0, "你": -4.0}))
TOKENIZERS = {"byte-level": BYTE_LEVEL, "byte-fallback": BYTE_FALLBACK}


class Pieces:
    """A stream whose tokens are the indices of texts; `rest` is what it gives at its end."""

    def __init__(self, pieces, rest=""):
        self.pieces, self.rest = pieces, rest

    def step(self, token_id):
        return self.pieces[token_id]

    def finish(self):
        rest, self.rest = self.rest, ""
        return rest


def answer(pieces, stop=(), *, rest="", **options):
    """Text of each step and of the end, and the `AnswerText`, for an answer of these pieces."""
    text = AnswerText(Pieces(pieces, rest), stop, **options)
    return [*(text.step(i) for i in range(len(pieces))), text.finish()], text


# ---- what is shown, and when ----


def test_nothing_of_a_stop_string_is_shown():
    steps, text = answer("ABCDEFGHIJKL", "DEFGHIJ")
    assert steps == ["A", "B", "C", *[""] * 10]
    assert (text.stopped, text.num_tokens) == ("DEFGHIJ", 10)


def test_held_back_text_is_shown_once_it_is_no_stop_string():
    steps, text = answer("ABCDEFG", ["DEX"])
    assert steps == ["A", "B", "C", "", "", "DEF", "G", ""]
    assert (text.stopped, text.num_tokens) == (None, 7)


def test_no_more_is_held_back_than_may_still_match():
    assert answer("aabaac", "aac!")[0] == ["", "", "aab", "", "", "", "aac"]
    assert answer("aaab", "aab")[0] == ["", "", "a", "", ""]
    assert answer(["xyab", "ab", "abc!"], "abc")[0] == ["xy", "ab", "ab", ""]


def test_an_answer_without_stop_strings():
    steps, text = answer(["ab", "", "c"], rest="d")
    assert (steps, text.stopped, text.num_tokens) == (["ab", "", "c", "d"], None, 3)


def test_an_answer_that_ends_within_a_stop_string_keeps_its_text():
    assert answer(["ab", "c"], "bcd")[0] == ["a", "", "bc"]
    assert answer("\n", "\n\n", rest="!")[0] == ["", "\n!"]


@pytest.mark.parametrize(
    ("pieces", "shown", "stopped"),
    [
        (["a", " #", "##", "b"], ["a", " ", "", "", ""], "###"),
        (["##", " #", "#", "#"], ["", "## ", "", "", ""], "###"),
        (["##", "##"], ["", "", ""], "###"),  # begins with the first of four
        (["#", "a\n", "\nb"], ["", "#a", "", ""], "\n\n"),
        (["a\n", "##", "\n", "\nb"], ["a", "\n", "##", "", ""], "\n\n"),
        (["\n", "##", "#", "\n", "\n"], ["", "\n", "", "", "", ""], "###"),
        (["a\n", " #", "#", "\nb"], ["a", "\n ", "", "##\nb", ""], None),
    ],
)
def test_stop_strings_over_token_borders(pieces, shown, stopped):
    ids = [BYTE_LEVEL._backend.token_to_id(piece.replace(" ", "Ġ").replace("\n", "Ċ")) for piece in pieces]
    text = AnswerText(BYTE_LEVEL.stream(), ["\n\n", "###"])
    assert [*(text.step(i) for i in ids), text.finish()] == shown
    assert text.stopped == stopped


# ---- which one ends the answer ----


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "stopped", "num_tokens"),
    [
        (["xabcdy"], ["cd", "abcd"], "x", "abcd", 1),  # begins first
        (["xabcy"], ["abc", "ab"], "x", "ab", 1),  # begin together: the shortest
        (["xabcy"], ["ab", "abc"], "x", "ab", 1),
        (["abxcd"], ["cd", "ab"], "", "ab", 1),
        (["xabc", "dy"], ["bc", "abcd"], "xa", "bc", 1),  # the first token that completes any
        (["xab", "cdy"], ["cd", "abcd", "bcdy"], "x", "abcd", 2),
        (["xabcdz"], ["bc", "abcdy"], "xa", "bc", 1),  # one that begins first but comes to nothing
        (["zabcd"], ["ab", "abcd", "zabcx"], "z", "ab", 1),  # and leaves the shortest of those that begin together
        (["aab"], ["ab", "aac"], "a", "ab", 1),
        (["ab", "ab"], ["ab", "ab"], "", "ab", 1),
    ],
)
def test_the_first_token_then_the_first_beginning_then_the_shortest(pieces, stop, shown, stopped, num_tokens):
    steps, text = answer(pieces, stop)
    assert ("".join(steps), text.stopped, text.num_tokens) == (shown, stopped, num_tokens)


def test_text_after_the_stop_string_is_dropped_also_within_its_token():
    assert answer(["one", "x\n\ntwo", "three"], "\n\n")[0] == ["one", "x", "", ""]
    assert answer(["one", "x\n\ntwo"], "\n\n", include_stop_str_in_output=True)[0] == ["one", "x\n\n", ""]


def test_nothing_changes_after_the_end():
    _, text = answer("abc", "b")
    assert (text.step(0), text.finish(), text.num_tokens, text.stopped) == ("", "", 2, "b")
    _, text = answer("abc", "bcd")
    assert (text.step(1), text.finish(), text.num_tokens, text.stopped) == ("", "", 3, None)


def test_the_stop_string_may_stay_in_the_text_and_then_nothing_is_held_back():
    assert answer("ABCDEF", "CDE", include_stop_str_in_output=True)[0] == ["A", "B", "C", "D", "E", "", ""]
    steps, text = answer(["ab", "cdy"], ["cd", "abcd"], include_stop_str_in_output=True)
    assert (steps, text.stopped) == (["ab", "cd", ""], "abcd")


def test_the_rest_can_complete_a_stop_string():
    for include, shown in ((False, ["a", "", ""]), (True, ["a", "b", "c"])):
        steps, text = answer("ab", "bc", rest="cd", include_stop_str_in_output=include)
        assert (steps, text.stopped, text.num_tokens) == (shown, "bc", 2)


def test_broken_bytes_at_the_end_can_complete_a_stop_string():
    first, *_ = BYTE_LEVEL.encode("é")
    text = AnswerText(BYTE_LEVEL.stream(), "b\ufffd")
    assert [text.step(i) for i in (*BYTE_LEVEL.encode("ab"), first)] == ["a", "", ""]
    assert (text.finish(), text.stopped, text.num_tokens) == ("", "b\ufffd", 3)


def test_the_prompt_is_not_searched():
    prompt, rest = BYTE_LEVEL.encode("a#"), BYTE_LEVEL.encode("#b")
    text = AnswerText(BYTE_LEVEL.stream(context=prompt), ["##", "a"])
    assert ("".join([*map(text.step, rest), text.finish()]), text.stopped) == ("#b", None)


# ---- min_tokens ----


@pytest.mark.parametrize(
    ("pieces", "stop", "min_tokens", "shown", "num_tokens"),
    [
        ("aaaaa", "a", 0, "", 1),
        ("aaaaa", "a", 1, "", 1),
        ("aaaaa", "a", 3, "aa", 3),
        ("aaaaa", "a", 6, "aaaaa", 5),
        ("abcabc", "abc", 3, "", 3),
        ("abcabc", "abc", 4, "abc", 6),
        ("ababab", "abab", 5, "ab", 6),  # begins within the one that came too early
        ("xabcd", ["ab", "bcd"], 4, "xa", 5),
        (["ab", "c"], ["ab", "abc"], 2, "", 2),  # goes on after the one that came too early
        (["", "", "a"], "a", 3, "", 3),  # tokens without text are tokens
    ],
)
def test_a_stop_string_that_comes_too_early_is_text(pieces, stop, min_tokens, shown, num_tokens):
    steps, text = answer(pieces, stop, min_tokens=min_tokens)
    assert ("".join(steps), text.num_tokens) == (shown, num_tokens)
    assert (text.stopped is None) == (shown == "".join(pieces))


def test_the_rest_of_an_answer_that_is_too_short_is_text():
    steps, text = answer("ab", "bc", rest="c", min_tokens=3)
    assert (steps, text.stopped) == (["a", "", "bc"], None)


def test_text_that_came_too_early_is_shown_at_once():
    assert answer("aab", "aa", min_tokens=9)[0] == ["", "a", "ab", ""]  # its last letter may begin another
    assert answer("ab", "b", min_tokens=9)[0] == ["a", "b", ""]


# ---- against an oracle ----


def first_match(text, known, stops):
    """Begin and text of the match that ends the answer when all but the first `known` characters are new; else None."""
    found = [(b, len(s), s) for s in stops for b in range(len(text)) if text.startswith(s, b) and b + len(s) > known]
    return min(found, default=None)


def oracle(pieces, rest, stops, include, min_tokens):
    """What is shown up to each step and in all, the stop string, the number of tokens: from the whole text after each token."""
    text, shown = "", []
    for n, piece in [*enumerate(pieces, 1), (len(pieces), rest)]:
        known, text = len(text), text + piece
        match = first_match(text, known, stops) if n >= min_tokens else None
        if match is not None:
            begin, length, stop = match
            return shown, text[: begin + length * include], stop, n
        if len(shown) < len(pieces):
            held = max((k for s in stops for k in range(len(s)) if text.endswith(s[:k])), default=0)
            shown.append(text if include else text[: len(text) - held])
    return shown, text, None, len(pieces)


SMALL_TEXT = st.text("ab#", max_size=4)


@settings(max_examples=400)
@given(
    pieces=st.lists(SMALL_TEXT, max_size=14),
    rest=SMALL_TEXT,
    stops=st.lists(st.text("ab#", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 9),
)
@example(pieces=["abc", "d"], rest="", stops=["bcx", "abcd"], include=False, min_tokens=0)
@example(pieces=["ab"] * 4, rest="", stops=["abab", "bab"], include=False, min_tokens=3)
def test_any_answer_is_what_a_look_at_the_whole_text_gives(pieces, rest, stops, include, min_tokens):
    expected, whole, stopped, num_tokens = oracle(pieces, rest, stops, include, min_tokens)
    text = AnswerText(Pieces(pieces, rest), stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    shown = ""
    for i in range(len(pieces)):
        shown += text.step(i)
        assert whole.startswith(shown)
        # The oracle holds back the longest end that begins a stop string, and no more.
        assert shown == (expected[i] if i < len(expected) else whole)
    assert shown + text.finish() == whole
    assert (text.stopped, text.num_tokens) == (stopped, num_tokens)


# ---- with tokenizers ----

TEXTS = ["👨‍👩‍👧‍👦 hi 👨‍👩‍👧", "नमस्ते दुनिया", "你好，世界！", "a 👍🏽a\n\n##", "\ufffda"]
RANDOM = random.Random(0)
SEQUENCES = [
    *((name, TOKENIZERS[name].encode(text, add_special_tokens=False)) for name in TOKENIZERS for text in TEXTS),
    *(("byte-level", [RANDOM.randrange(2, 260) for _ in range(60)]) for _ in range(4)),
    *(("byte-fallback", [RANDOM.randrange(3, 262) for _ in range(60)]) for _ in range(4)),
]


@pytest.mark.parametrize(("name", "ids"), SEQUENCES)
def test_steps_join_to_the_decoded_text_cut_at_the_match(name, ids):
    tokenizer = TOKENIZERS[name]
    whole = tokenizer.decode(ids)
    texts = [whole[begin : begin + length] for begin in range(0, len(whole), 3) for length in (1, 2, 5)]
    for stop in [(), ["no such text"], *([text] for text in texts), texts[-4:], ["\u200d", "्", "世"]]:
        for include in (False, True):
            text = AnswerText(tokenizer.stream(), stop, include_stop_str_in_output=include)
            steps = [*map(text.step, ids), text.finish()]
            stream = tokenizer.stream()
            _, expected, stopped, num_tokens = oracle([stream.step(i) for i in ids], stream.finish(), stop, include, 0)
            assert ("".join(steps), text.stopped, text.num_tokens) == (expected, stopped, num_tokens)
            assert whole.startswith(expected) and (stopped is not None or expected == whole)
            if len(stop) == 1 and stop[0] in whole:
                assert expected == whole[: whole.index(stop[0]) + len(stop[0]) * include]
            if "\ufffd" not in whole:
                assert not any("\ufffd" in step for step in steps)


# ---- cost ----


@pytest.mark.parametrize(
    "stop",
    ["a" * 99 + "b", "a" * 20_000 + "b", ["a" * k + "b" for k in range(1, 100)], ["\n\n", "###"]],
    ids=["long", "very-long", "many", "usual"],
)
@pytest.mark.parametrize("include", [False, True])
def test_the_cost_of_a_token_does_not_grow(stop, include):
    # A second look at the text, or at the beginning of the stop string, at each token would take minutes.
    num_tokens = 200_000
    text = AnswerText(Pieces(["a"]), stop, include_stop_str_in_output=include)
    began = time.process_time()
    shown = sum(len(text.step(0)) for _ in range(num_tokens))
    shown += len(text.finish())
    assert time.process_time() - began < 10
    assert (shown, text.num_tokens) == (num_tokens, num_tokens)


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ""}, "stop is empty; it must have at least one character"),
        ({"stop": ["a", ""]}, r"stop\[1\] is empty; it must have at least one character"),
        ({"stop": ["a", 3]}, r"stop\[1\] is 3; it must be a string"),
        ({"stop": [b"a"]}, r"stop\[0\] is b'a'; it must be a string"),
        ({"stop": b"a"}, r"stop\[0\] is 97; it must be a string"),
        ({"stop": None}, "stop is a NoneType; it must be a string or a list of strings"),
        ({"stop": 3}, "stop is a int; it must be a string or a list of strings"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be an integer of 0 or more"),
        ({"min_tokens": 1.0}, "min_tokens is 1.0; it must be an integer of 0 or more"),
        ({"min_tokens": True}, "min_tokens is True; it must be an integer of 0 or more"),
    ],
)
def test_unusable_arguments(options, message):
    with pytest.raises(RequestError, match=message):
        AnswerText(Pieces([]), **options)
