"""Sampling, stopping and text as a user of `LLM` sees them, on a whole tiny model folder.

Many of these tests need an answer that is known. A logits processor writes it: a request with the seed of a script follows the script.
"""

import dataclasses
import json
import math
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import LLM, EngineConfig, RequestError, SamplingParams
from pagedjax.request import MASKED_LOGPROB
from pagedjax.text import Tokenizer
from tests.host.tiny_vocabularies import CONTROL, NORMAL, UNKNOWN, gguf
from tests.tiny_model import TURN_END, TURN_START, write_model

SETTINGS = EngineConfig(
    max_num_seqs=8,
    num_kv_blocks=128,
    token_budget=64,
    window=8,
    row_buckets=(8,),
    mixed_row_buckets=(8,),
    token_buckets=(64,),
    width_buckets=(16,),
)
PROMPT = "once upon a time"
CHAT = [{"role": "user", "content": PROMPT}]
OTHERS = ["a", "two and two", "a rather longer prompt that fills more than two blocks of cells", "xyz"]
FAMILY = "👨‍👩‍👧‍👦 and 👩🏽‍🚀"
RANDOM_BYTES = [random.Random(3).randrange(256) for _ in range(60)]
SCRIPTS: list[str | list[int]] = [
    "ABCDEFGHIJ",
    "one\n\ntwo###three and so on",
    "aaaaaaaaaaaa",
    f"ab{TURN_START}cd{TURN_START}ef",
    f"the end{TURN_END}and nothing after it",
    FAMILY,
    "नमस्ते दुनिया",
    "你好，世界！",
    RANDOM_BYTES,
]
FIRST_SEED = 1000  # of the scripts
LONGEST = 64


def script_ids(script, tokenizer):
    return tokenizer.encode(script) if isinstance(script, str) else script


def follow_scripts(folder):
    """The logits processor; past the end of a script comes a line feed."""
    tokenizer = Tokenizer.from_folder(folder)
    (line_feed,) = tokenizer.encode("\n")
    table = np.full((len(SCRIPTS), 256), line_feed, np.int32)
    for row, script in zip(table, SCRIPTS, strict=True):
        ids = script_ids(script, tokenizer)
        row[: len(ids)] = ids

    def processor(logits, state):
        index = state.seed.astype(jnp.int32) - FIRST_SEED
        token = jnp.asarray(table)[jnp.clip(index, 0, len(table) - 1), jnp.clip(state.num_generated, 0, 255)]
        written = jnp.where(jnp.arange(logits.shape[1])[None] == token[:, None], 50.0, -50.0)
        return jnp.where(((index >= 0) & (index < len(table)))[:, None], written, logits)

    return processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llm") / "tiny")


@pytest.fixture(scope="module")
def processor(folder):
    return follow_scripts(folder)


@pytest.fixture(scope="module")
def llm(folder, processor):
    return LLM(folder, engine_config=SETTINGS, logits_processors=[processor])


@pytest.fixture(scope="module")
def letters(llm):
    """Ids of letters and a space: with no others, an answer is a text in which each token is a character."""
    return llm.tokenizer.encode("abcdefghijklmnopqrstuvwxyz ")


def ask(llm, prompt=PROMPT, **options):
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | options), use_tqdm=False)
    return output


def answer(llm, prompt=PROMPT, **options):
    (one,) = ask(llm, prompt, **options).outputs
    return one


def scripted(script, **options):
    """Parameters under which the answer is `script`, and goes on with line feeds."""
    values = {"temperature": 0, "seed": FIRST_SEED + SCRIPTS.index(script), "max_tokens": LONGEST} | options
    return SamplingParams(**values)


def whole(llm, script, **options):
    """The answer by `generate`, which `chat` and a stream must equal."""
    params = scripted(script, **options)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    (one,) = output.outputs
    (chat,) = llm.chat(CHAT, params, use_tqdm=False)
    assert chat.outputs[0] == one
    pieces = list(llm.stream_chat(CHAT, params))
    assert "".join(pieces) == one.text
    return one, pieces


# Samples.

SEVEN = dict(temperature=1.0, seed=7)


def test_three_samples_of_seed_7(llm):
    three = ask(llm, n=3, **SEVEN)
    assert [o.index for o in three.outputs] == [0, 1, 2] and three.metrics["seed"] == 7
    ids = [o.token_ids for o in three.outputs]
    assert len({tuple(i) for i in ids}) == 3
    assert ask(llm, n=1, **SEVEN).outputs[0].token_ids == ids[0]
    asked = [SamplingParams(temperature=0.7 + i / 4, seed=i, max_tokens=20, n=1 + i % 2) for i in range(4)]
    asked.insert(2, SamplingParams(n=3, max_tokens=24, ignore_eos=True, **SEVEN))
    outputs = llm.generate([*OTHERS[:2], PROMPT, *OTHERS[2:]], asked, use_tqdm=False)
    assert [o.token_ids for o in outputs[2].outputs] == ids
    assert [len(o.outputs) for o in outputs] == [1, 2, 3, 1, 2]
    assert [o.prompt for o in outputs] == [*OTHERS[:2], PROMPT, *OTHERS[2:]]


def test_samples_without_a_seed_share_one_that_is_reported(llm):
    drawn = ask(llm, n=3, temperature=1.0)
    again = ask(llm, n=3, temperature=1.0, seed=drawn.metrics["seed"])
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in drawn.outputs]
    assert ask(llm, n=3, temperature=1.0).metrics["seed"] != drawn.metrics["seed"]


def test_the_best_two_of_five(llm):
    five = ask(llm, n=5, logprobs=0, **SEVEN).outputs
    ranked = sorted(five, key=lambda o: o.cumulative_logprob, reverse=True)
    assert [o.index for o in ranked[:2]] != [0, 1], "this seed tells nothing"
    best = ask(llm, n=2, best_of=5, **SEVEN).outputs
    assert [o.token_ids for o in best] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best] == [0, 1]
    assert [o.logprobs for o in best] == [None, None]  # they were needed, not asked for
    assert [o.cumulative_logprob for o in best] == [pytest.approx(o.cumulative_logprob, abs=1e-4) for o in ranked[:2]]


# What may come.


def test_bias_and_allowed_ids(llm, letters):
    first = answer(llm).token_ids[0]
    assert answer(llm, logit_bias={first: -100}).token_ids[0] != first
    assert answer(llm, logit_bias={letters[3]: 100}).text == "d" * 24
    some = answer(llm, allowed_token_ids=letters[:5], **SEVEN)
    assert set(some.text) == set("abcde") == {llm.tokenizer.decode([i]) for i in some.token_ids}
    assert answer(llm, allowed_token_ids=letters[:5], logit_bias={letters[25]: 100}, **SEVEN).text == some.text


@pytest.mark.parametrize("words", [["ab"], "ca", ["a"], ["ab", "bca", "c", " a"]])
def test_bad_words_never_occur(llm, words):
    options = dict(allowed_token_ids=llm.tokenizer.encode("abc de"), temperature=1.5, max_tokens=100)
    free = [answer(llm, seed=seed, **options).text for seed in range(4)]
    several = [words] if isinstance(words, str) else words
    assert all(any(word in text for text in free) for word in several)
    assert not any(word in answer(llm, seed=seed, bad_words=words, **options).text for seed in range(4) for word in several)


def test_a_bad_word_that_the_prompt_begins_may_be_completed(llm):
    """Only the answer counts: what was asked is not taken back."""
    a, b = llm.tokenizer.encode("ab")
    assert answer(llm, "xa", bad_words=["ab"], logit_bias={b: 100}, max_tokens=3).text == "bbb"
    assert "ab" not in answer(llm, "xa", bad_words=["ab"], allowed_token_ids=[a, b], max_tokens=30, **SEVEN).text


def test_penalties_move_an_answer(llm, letters):
    free = answer(llm, allowed_token_ids=letters, max_tokens=20).text
    for options in (dict(repetition_penalty=1.8), dict(presence_penalty=2.0), dict(frequency_penalty=2.0)):
        text = answer(llm, allowed_token_ids=letters, max_tokens=20, **options).text
        assert len(set(text)) > len(set(free)), options


# Stop strings.


def test_a_stop_string_is_held_back_and_never_leaks(llm):
    one, pieces = whole(llm, "ABCDEFGHIJ", stop=["DEFGHIJ"])
    assert (one.text, one.finish_reason, one.stop_reason) == ("ABC", "stop", "DEFGHIJ")
    assert one.token_ids == llm.tokenizer.encode("ABCDEFGHIJ")
    assert not any("D" in piece for piece in pieces)
    one, pieces = whole(llm, "ABCDEFGHIJ", stop="DEFGHIJ", include_stop_str_in_output=True)
    assert (one.text, one.stop_reason) == ("ABCDEFGHIJ", "DEFGHIJ")
    one, pieces = whole(llm, "ABCDEFGHIJ", stop=["DEX", "FGY"], max_tokens=12)
    assert (one.text, one.finish_reason, one.stop_reason) == ("ABCDEFGHIJ\n\n", "length", None)
    one, _ = whole(llm, "ABCDEFGHIJ", stop=["DEX"], max_tokens=5)  # what was held back comes at the end
    assert one.text == "ABCDE"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["\n\n", "###"], "one", "\n\n"),
        (["###"], "one\n\ntwo", "###"),
        (["three", "two###t", "###thr"], "one\n\n", "two###t"),
        (["o"], "", "o"),
        (["no such"], None, None),
    ],
)
def test_stop_strings_over_token_borders(llm, stop, text, reason):
    script = "one\n\ntwo###three and so on"
    full = script + "\n" * (LONGEST - len(script))
    for include in (False, True):
        one, pieces = whole(llm, script, stop=stop, include_stop_str_in_output=include)
        assert one.stop_reason == reason and one.finish_reason == ("length" if reason is None else "stop")
        assert one.text == (full if text is None else text + reason * include)
        for n in range(len(pieces)):  # nothing that was shown is taken back
            assert one.text.startswith("".join(pieces[:n]))


def test_a_stop_string_is_not_looked_for_in_the_prompt(llm):
    for prompt, stop in (("x###y", "###"), ("x#", "##"), (PROMPT, "time")):
        params = scripted("one\n\ntwo###three and so on", stop=[stop], max_tokens=8)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("one\n\ntwo", "length")
    (output,) = llm.generate("one#", scripted("one\n\ntwo###three and so on", stop=["#one"]), use_tqdm=False)
    assert output.outputs[0].stop_reason is None


def test_min_tokens_and_stop_strings(llm):
    one, _ = whole(llm, "aaaaaaaaaaaa", stop="a", min_tokens=3)
    assert (one.text, len(one.token_ids), one.stop_reason) == ("aa", 3, "a")
    one, _ = whole(llm, "aaaaaaaaaaaa", stop="a")
    assert (one.text, len(one.token_ids), one.stop_reason) == ("", 1, "a")
    one, _ = whole(llm, "ABCDEFGHIJ", stop=["BC"], min_tokens=4, max_tokens=6)
    assert (one.text, one.finish_reason) == ("ABCDEF", "length")


def test_every_sample_ends_by_its_own_stop_string(llm, letters):
    options = dict(allowed_token_ids=letters[:4], n=3, max_tokens=40, **SEVEN)
    free = [o.text for o in ask(llm, **options).outputs]
    for text, one in zip(free, ask(llm, stop=["ab", "dc"], **options).outputs, strict=True):
        ends = {text.index(stop): stop for stop in ("ab", "dc") if stop in text}
        assert one.text == (text[: min(ends)] if ends else text)
        assert one.stop_reason == (ends[min(ends)] if ends else None)
        assert llm.tokenizer.decode(one.token_ids) == one.text + (one.stop_reason or "")


# Text.


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: ascii(script)[:16])
def test_a_stream_is_the_whole_text(llm, script):
    ids = script_ids(script, llm.tokenizer)
    for options in ({}, {"skip_special_tokens": False}, {"stop": ["no such"]}, {"stop_token_ids": [ids[-1]]}):
        one, pieces = whole(llm, script, max_tokens=len(ids), ignore_eos=True, **options)
        if "stop_token_ids" not in options:
            assert one.token_ids == ids
            assert one.text == llm.tokenizer.decode(ids, skip_special_tokens=options.get("skip_special_tokens", True))
            if isinstance(script, str):
                assert not any("\ufffd" in piece for piece in pieces)


def test_an_answer_that_ends_within_a_character(llm):
    ids = llm.tokenizer.encode(FAMILY)
    for end in range(1, 8):
        one, _ = whole(llm, FAMILY, max_tokens=end)
        assert one.text == llm.tokenizer.decode(ids[:end]) == bytes(FAMILY.encode()[:end]).decode(errors="replace")


def test_a_prompt_that_ends_within_a_character(llm):
    """The answer's text is what it adds to the prompt's; that it is broken there is the prompt's affair."""
    ids = llm.tokenizer.encode("👨")
    (output,) = llm.generate({"prompt_token_ids": ids[:2]}, scripted(FAMILY), use_tqdm=False)
    assert output.outputs[0].text.startswith(FAMILY)
    for stop in ((), ["\n"]):
        (output,) = llm.generate("broken \ufffd", scripted(FAMILY, stop=stop, max_tokens=len(FAMILY.encode())), use_tqdm=False)
        assert output.outputs[0].text == FAMILY


def test_special_tokens_in_the_text(llm):
    script = f"ab{TURN_START}cd{TURN_START}ef"
    assert whole(llm, script, max_tokens=8)[0].text == "abcdef"
    assert whole(llm, script, max_tokens=8, skip_special_tokens=False)[0].text == script
    assert whole(llm, script, max_tokens=8, stop=[TURN_START])[0].stop_reason is None
    one = whole(llm, script, stop=[TURN_START], skip_special_tokens=False)[0]
    assert (one.text, one.stop_reason, len(one.token_ids)) == ("ab", TURN_START, 3)


def test_an_end_token_says_nothing_unless_it_is_asked_for(llm):
    script = f"the end{TURN_END}and nothing after it"
    end = llm.tokenizer.eos_token_id
    for options, text in (({}, "the end"), ({"include_stop_str_in_output": True}, f"the end{TURN_END}")):
        for stop in ((), ["no such"]):
            one, _ = whole(llm, script, skip_special_tokens=False, stop=stop, **options)
            assert (one.text, one.finish_reason, one.stop_reason) == (text, "stop", None)
            assert one.token_ids[-1] == end and len(one.token_ids) == 8
    assert whole(llm, script, stop_token_ids=[end])[0].stop_reason == end
    assert whole(llm, script, ignore_eos=True, max_tokens=11)[0].text == "the endand"
    with_others = whole(llm, script, min_tokens=9, skip_special_tokens=False, max_tokens=9)[0]
    assert end not in with_others.token_ids and with_others.finish_reason == "length"


def test_no_text_on_request(llm):
    (output,) = llm.generate(PROMPT, scripted("ABCDEFGHIJ", detokenize=False, max_tokens=5, logprobs=1), use_tqdm=False)
    (one,) = output.outputs
    assert (one.text, one.token_ids, len(one.logprobs)) == ("", llm.tokenizer.encode("ABCDE"), 5)
    with pytest.raises(RequestError, match="detokenize is False; a stream gives text"):
        llm.stream_chat(CHAT, scripted("ABCDEFGHIJ", detokenize=False))
    with pytest.raises(RequestError, match="detokenize is False; stop strings are looked for in the text"):
        scripted("ABCDEFGHIJ", detokenize=False, stop=["D"])


@pytest.fixture(scope="module")
def spaced(tmp_path_factory):
    """The model under a SentencePiece vocabulary, in which a word's first letter has the space before it."""
    folder = write_model(tmp_path_factory.mktemp("llm") / "spaced")
    words = ["▁", *"abc", "▁a", "▁b", "▁c"]
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(words, NORMAL)}
    scores = [-float(i) for i in range(len(tokens))]
    named = dict(bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    Tokenizer.from_gguf(gguf("llama", tokens.items(), scores=scores, **named))._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    return LLM(folder, engine_config=SETTINGS)


def test_an_answer_keeps_the_space_before_its_first_word(spaced):
    """Its text is what it adds to the prompt's, and a SentencePiece decoder drops the space before the first word of a text alone."""
    tokenizer = spaced.tokenizer
    (a, b, space_a) = (tokenizer._backend.token_to_id(piece) for piece in ("a", "b", "▁a"))
    assert tokenizer.decode([space_a, b]) == "ab"
    prompt = "ab c"
    for first, begins in ((space_a, " a"), (a, "a")):
        options = dict(allowed_token_ids=[first, b], logit_bias={first: 5.0}, temperature=0, max_tokens=8)
        for stop in ((), ["no such"]):
            params = SamplingParams(**options, stop=stop)
            (output,) = spaced.generate(prompt, params, use_tqdm=False)
            (one,) = output.outputs
            assert one.token_ids[0] == first and one.text.startswith(begins)
            joined = tokenizer.decode([*output.prompt_token_ids, *one.token_ids])
            assert tokenizer.decode(output.prompt_token_ids) + one.text == joined
            chat = [{"role": "user", "content": prompt}]
            (same,) = spaced.chat(chat, params, use_tqdm=False)
            assert "".join(spaced.stream_chat(chat, params)) == same.outputs[0].text and same.outputs[0].text.startswith(begins)
        if first == space_a:
            (stopped,) = spaced.generate(prompt, SamplingParams(**options, stop=[" a"]), use_tqdm=False)
            assert (stopped.outputs[0].text, len(stopped.outputs[0].token_ids)) == ("", 1)


def test_a_vocabulary_smaller_than_max_logprobs(spaced):
    """The engine reports at most 20, and there are 10 tokens."""
    (output,) = spaced.generate("ab c", SamplingParams(temperature=0, max_tokens=3, logprobs=10), use_tqdm=False)
    for at in output.outputs[0].logprobs:
        assert sorted(at) == list(range(10))
        assert sum(math.exp(p.logprob) for p in at.values()) == pytest.approx(1, abs=1e-5)
    with pytest.raises(RequestError, match="prompt_logprobs is 11; the vocabulary has 10 tokens"):
        spaced.generate("a", SamplingParams(prompt_logprobs=11))


# Log-probabilities.


def test_prompt_logprobs(llm):
    for prompt in (PROMPT, "p" * 70):
        output = ask(llm, prompt, prompt_logprobs=3, logprobs=2, max_tokens=4)
        ids = output.prompt_token_ids
        assert len(output.prompt_logprobs) == len(ids) and output.prompt_logprobs[0] is None
        for token, at in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
            assert token in at and len(at) in (3, 4)
            assert sorted(p.rank for i, p in at.items() if i != token or len(at) == 3)[:3] == [1, 2, 3]
            assert at[token].decoded_token == llm.tokenizer.decode([token], skip_special_tokens=False)
            by_rank = sorted(at.values(), key=lambda p: p.rank)
            assert [p.logprob for p in by_rank] == sorted((p.logprob for p in at.values()), reverse=True)
            assert all(-40 < p.logprob <= 0 for p in by_rank)
        # The same by continuing: what comes after the prompt, and then is part of it.
        grown = ask(llm, {"prompt_token_ids": [*ids, *output.outputs[0].token_ids]}, prompt_logprobs=0)
        for got, want in zip(grown.prompt_logprobs[len(ids) :], output.outputs[0].logprobs, strict=True):
            ((token, lp),) = got.items()
            assert lp.rank == want[token].rank and lp.logprob == pytest.approx(want[token].logprob, abs=1e-4)
    assert ask(llm, "x", prompt_logprobs=2).prompt_logprobs == [None]
    several = ask(llm, n=2, prompt_logprobs=1, **SEVEN)
    assert len(several.prompt_logprobs) == len(several.prompt_token_ids) and len(several.outputs) == 2
    assert ask(llm).prompt_logprobs is None


def test_what_is_masked_can_be_said_in_json(folder, letters):
    processed = LLM(folder, engine_config=dataclasses.replace(SETTINGS, logprobs_mode="processed"))
    output = ask(
        processed,
        allowed_token_ids=letters[:3],
        top_k=2,
        bad_words=["aa"],
        logprobs=5,
        prompt_logprobs=5,
        n=2,
        **SEVEN,
    )
    every = [p for at in output.prompt_logprobs[1:] for p in at.values()]
    every += [p for one in output.outputs for at in one.logprobs for p in at.values()]
    values = json.loads(json.dumps([p.logprob for p in every], allow_nan=False))
    assert all(math.isfinite(value) for value in values) and MASKED_LOGPROB in values
    json.dumps(dataclasses.asdict(output), allow_nan=False)
    for one in output.outputs:
        for at in one.logprobs:  # the two that were left, whose probabilities make one
            assert set(at) <= set(letters[:3]) and 1 <= len(at) <= 2
            assert sum(math.exp(p.logprob) for p in at.values()) == pytest.approx(1, abs=1e-5)


# The model's own settings.


def test_the_generation_config_is_honoured_and_may_be_overridden(folder, processor, letters, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "m")
    a, b, c, d = letters[:4]
    asked = {
        "eos_token_id": [257, 3],
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 200,
        "top_p": 0.99,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "min_new_tokens": 20,
        "max_new_tokens": 90,
        "suppress_tokens": [a, b],
        "bad_words_ids": [[c], [d, d]],
    }
    (copy / "generation_config.json").write_text(json.dumps(asked))
    model = LLM(copy, engine_config=SETTINGS, logits_processors=[processor])  # as the other one, so that nothing is compiled again
    want = SamplingParams(
        temperature=0.9,
        top_k=200,
        top_p=0.99,
        min_p=0.001,
        repetition_penalty=1.1,
        min_tokens=20,
        max_tokens=90,
        bad_words_token_ids=[[a], [b], [c], [d, d]],
    )
    assert model.default_sampling_params == want
    outputs = model.generate([PROMPT] * 8, use_tqdm=False)
    again = [dataclasses.replace(want, seed=o.metrics["seed"]) for o in outputs]
    assert [o.outputs[0] for o in model.generate([PROMPT] * 8, again, use_tqdm=False)] == [o.outputs[0] for o in outputs]
    seen = [i for o in outputs for i in o.outputs[0].token_ids]
    assert not {a, b, c} & set(seen)
    assert all(20 <= len(o.outputs[0].token_ids) <= 90 for o in outputs)
    assert {o.outputs[0].token_ids[-1] for o in outputs if o.outputs[0].finish_reason == "stop"} <= {257, 3}
    # Parameters that are given are all that counts.
    assert answer(model, logit_bias={a: 100}, max_tokens=3).token_ids == [a, a, a]
    (short,) = model.generate(PROMPT, dataclasses.replace(model.default_sampling_params, min_tokens=0, max_tokens=2), use_tqdm=False)
    assert len(short.outputs[0].token_ids) <= 2


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(n=2), r"temperature is 0: 2 samples would all be the same; use n = 1"),
        (dict(n=1, best_of=3), r"temperature is 0: 3 samples would all be the same"),
        (dict(n=3, best_of=2, temperature=1), "best_of is 2; it must be at least n, 3"),
        (dict(n=0), "n is 0; it must be from 1"),
        (dict(logit_bias={258: 1}), "token id 258 of logit_bias is out of range; ids are 0 to 257"),
        (dict(logit_bias={-1: 1}), "token ids are 0 to"),
        (dict(logit_bias={1: 101}), r"logit_bias\[1\] is 101.0; it must be from -100 to 100"),
        (dict(logit_bias=[1]), r"logit_bias is \[1\]; it must be a mapping"),
        (dict(allowed_token_ids=[]), "allowed_token_ids is empty; at least one token must be allowed"),
        (dict(allowed_token_ids=[258]), "token id 258 of allowed_token_ids is out of range; ids are 0 to 257"),
        (dict(allowed_token_ids=[64], bad_words_token_ids=[[64]]), "bad words and min_tokens leave none of them"),
        (dict(bad_words=[""]), "bad_words has an empty text in it"),
        (dict(bad_words=["a bad word of many letters"]), "max_bad_word_tokens = "),
        (dict(prompt_logprobs=21), "prompt_logprobs is 21; this engine reports at most max_logprobs = 20"),
        (dict(logprobs=21), "logprobs is 21; this engine reports at most max_logprobs = 20"),
        (dict(prompt_logprobs=65), "prompt_logprobs is 65; it must be from 0 to 64"),
        (dict(stop=""), "stop has an empty text in it; an empty text is everywhere"),
        (dict(stop=["a", ""]), "stop has an empty text in it"),
        (dict(stop=[3]), r"stop is \[3\]; it must be a text or several"),
        (dict(min_tokens=25), "min_tokens is 25; it must be from 0 to max_tokens, 24"),
        (dict(min_p=1.5), r"min_p is 1\.5; it must be from 0 \(off\) to 1"),
        (dict(repetition_penalty=0), "repetition_penalty is 0; it must be above 0"),
        (dict(presence_penalty=3), "presence_penalty is 3; it must be from -2 to 2"),
    ],
)
def test_what_is_refused(llm, options, message):
    with pytest.raises(RequestError, match=message):
        ask(llm, **options)


def test_a_refusal_names_the_prompt_and_leaves_nothing_behind(llm):
    good = SamplingParams(n=3, temperature=1.0, max_tokens=4, stop=["x"])
    for bad, message in (
        ({"prompt_token_ids": [5, 258]}, r"token id 258 at position 1 of prompts\[1\] is out of range"),
        ({"prompt_token_ids": [5, -1]}, r"token id -1 at position 1 of prompts\[1\] is out of range"),
        ({"prompt_token_ids": ["x"]}, r"a token id of prompts\[1\] is 'x'; it must be an integer"),
        ({"prompt_token_ids": 5}, r"prompts\[1\] is 5; it must be a sequence of token ids"),
        ("", r"prompts\[1\] is empty"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([PROMPT, bad, PROMPT], good, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests
    with pytest.raises(RequestError, match="2 samples are asked for; a stream is one answer"):
        llm.stream_chat(CHAT, SamplingParams(n=2, temperature=1.0))
