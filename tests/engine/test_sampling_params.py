"""What a request may ask of sampling and stopping, over a tiny random model: against a plain loop, and equal at any batch and window."""

import dataclasses
import itertools

import numpy as np
import pytest

from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig
from pagedjax.errors import ConfigError, RequestError
from pagedjax.request import MASKED_LOGPROB, SamplingParams
from pagedjax.text import AnswerText
from tests.helpers import dense_logits, prompt, tiny_params, variant

MODEL = variant(vocab_size=98)
KNOWN = 90  # ids of the tokenizer
SETTINGS = dict(
    max_num_seqs=8,
    num_kv_blocks=64,
    token_budget=64,
    window=8,
    row_buckets=(8,),
    mixed_row_buckets=(8,),
    token_buckets=(64,),
    width_buckets=(16,),
    max_logprobs=4,
)
EOS = (3, 5, 7)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def params():
    return tiny_params(MODEL)


@pytest.fixture
def make(params):
    def engine(eos=(), processors=(), **settings):
        return Engine(params, MODEL, EngineConfig(**SETTINGS | settings), eos_token_ids=eos, vocab_size=KNOWN, logits_processors=processors)

    return engine


class Letters:
    """A `TextStream` in which each token is a letter, or several."""

    def __init__(self, spelling=None):
        self._spelling = spelling or (lambda token: chr(0x4E00 + token))

    def step(self, token_id):
        return self._spelling(token_id)

    def finish(self):
        return ""


def one(engine, ids, asked, **options):
    return engine.generate([ids], asked, use_tqdm=False, **options)[0]


def plain(params, ids, asked, *, stops=(), num_tokens=20):
    """Greedy answer by a loop over whole sequences that knows no blocks, rows or windows."""
    out = []
    while len(out) < num_tokens:
        logits = np.array(dense_logits(params, [*ids, *out], MODEL)[-1], np.float64)[:KNOWN]
        if asked.allowed_token_ids is not None:
            logits[[i for i in range(KNOWN) if i not in asked.allowed_token_ids]] = -np.inf
        for word in asked.bad_words_token_ids:
            if out[len(out) - len(word) + 1 :] == list(word[:-1]) and len(out) >= len(word) - 1:
                logits[word[-1]] = -np.inf
        if len(out) < asked.min_tokens:
            logits[list(stops)] = -np.inf
        for token, value in (asked.logit_bias or {}).items():
            logits[token] += value
        for token in {*ids, *out}:
            if token < KNOWN:
                logits[token] = logits[token] / asked.repetition_penalty if logits[token] > 0 else logits[token] * asked.repetition_penalty
        for token in set(out):
            logits[token] -= asked.presence_penalty + asked.frequency_penalty * out.count(token)
        out.append(int(np.argmax(logits)))
        if out[-1] in stops:
            break
    return out


def variants(params, ids):
    """Settings that each change the answer."""
    free = plain(params, ids, GREEDY)
    return {
        "bias": dict(logit_bias={free[0]: -100.0, 11: 3.0}),
        "allowed": dict(allowed_token_ids=[4, 8, 15, 16, 23, 42]),
        "one bad word": dict(bad_words_token_ids=[[free[2]]]),
        "bad words": dict(bad_words_token_ids=[free[1:4], free[0:2], [88, 89]]),
        "repetition": dict(repetition_penalty=1.7),
        "presence": dict(presence_penalty=1.9),
        "frequency": dict(frequency_penalty=1.3),
        "all": dict(
            logit_bias={free[0]: -2.0, 20: 2.5},
            repetition_penalty=1.3,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            bad_words_token_ids=[[free[1]], free[2:4]],
        ),
    }


NAMES = ["bias", "allowed", "one bad word", "bad words", "repetition", "presence", "frequency", "all"]
PROMPT = prompt(21, 3)


@pytest.mark.parametrize("name", NAMES)
def test_what_changes_logits_is_what_a_plain_loop_does(make, params, name):
    asked = dataclasses.replace(GREEDY, **variants(params, PROMPT)[name])
    want = plain(params, PROMPT, asked)
    assert want != plain(params, PROMPT, GREEDY)
    assert one(make(), PROMPT, asked).token_ids == want


def test_batch_windows_and_preemption_change_nothing(make, params):
    """All of them side by side, with sampled rows between: the same tokens alone, in windows of 1, and out of a tiny pool."""
    asked = [
        dataclasses.replace(params_, max_tokens=30)
        for changes in variants(params, PROMPT).values()
        for params_ in (
            dataclasses.replace(GREEDY, **changes),
            SamplingParams(temperature=1.3, top_k=30, top_p=0.95, min_p=0.02, seed=7, **changes),
        )
    ]
    prompts = [PROMPT] * len(asked)
    alone = [one(make(enable_prefix_caching=False), PROMPT, each).token_ids for each in asked]
    assert len({tuple(ids) for ids in alone}) > 12
    engine = make()
    assert [r.token_ids for r in engine.generate(prompts, asked, use_tqdm=False)] == alone
    assert engine.stats().num_windows > 0
    assert [r.token_ids for r in make(window=1).generate(prompts, asked, use_tqdm=False)] == alone
    tiny = make(num_kv_blocks=16)
    assert [r.token_ids for r in tiny.generate(prompts, asked, use_tqdm=False)] == alone
    assert tiny.stats().num_preemptions >= 3


def test_a_row_that_was_penalised_leaves_nothing_to_the_next(make, params):
    engine = make(max_num_seqs=1, row_buckets=(1,), mixed_row_buckets=(1,))
    for name in ("all", "allowed", "bad words"):
        asked = dataclasses.replace(GREEDY, **variants(params, PROMPT)[name])
        assert one(engine, PROMPT, asked).token_ids == plain(params, PROMPT, asked)
        assert one(engine, PROMPT, GREEDY).token_ids == plain(params, PROMPT, GREEDY)


# Samples and seeds.

SEVEN = SamplingParams(temperature=1.0, seed=7, max_tokens=25)


def test_seed_7_gives_the_same_whatever_runs_beside_it(make):
    alone = one(make(), PROMPT, SEVEN).token_ids
    others = [SamplingParams(temperature=0.8 + i / 5, seed=i, max_tokens=30, presence_penalty=i / 4) for i in range(5)]
    engine = make()
    results = engine.generate([prompt(30 + i, i) for i in range(5)] + [PROMPT], [*others, SEVEN], use_tqdm=False)
    assert results[-1].token_ids == alone
    tiny = make(num_kv_blocks=16)
    longer = [dataclasses.replace(each, max_tokens=90) for each in (*others[:3], SEVEN)]
    results = tiny.generate([prompt(30 + i, i) for i in range(3)] + [PROMPT], longer, use_tqdm=False)
    assert results[-1].token_ids[: len(alone)] == alone and results[-1].num_preemptions > 0
    samples = engine.generate([PROMPT] * 3, SEVEN, sample_indices=[0, 1, 2], use_tqdm=False)
    assert samples[0].token_ids == alone
    assert len({tuple(r.token_ids) for r in samples}) == 3
    reverse = engine.generate([PROMPT] * 3, SEVEN, sample_indices=[2, 1, 0], use_tqdm=False)
    assert [r.token_ids for r in reverse] == [r.token_ids for r in samples[::-1]]


def test_without_a_seed_one_is_drawn_and_reported(make):
    engine = make()
    asked = dataclasses.replace(SEVEN, seed=None)
    first, second = engine.generate([PROMPT] * 2, asked, use_tqdm=False)
    assert first.seed != second.seed and first.token_ids != second.token_ids
    assert one(engine, PROMPT, dataclasses.replace(asked, seed=second.seed)).token_ids == second.token_ids


def test_ids_beyond_the_tokenizer_never_come(make):
    hot = SamplingParams(temperature=1e6, max_tokens=60, seed=1, logprobs=4)
    results = make().generate([prompt(5, i) for i in range(8)], [dataclasses.replace(hot, seed=i) for i in range(8)], use_tqdm=False)
    seen = {token for r in results for token in r.token_ids} | {i for r in results for lp in r.logprobs for i, _ in lp.top}
    assert len(seen) == KNOWN and max(seen) < KNOWN


# Ends.


def test_min_tokens_holds_back_every_end_token(make, params):
    """Three end tokens, one of them far likelier than anything: four others come, then it."""
    asked = SamplingParams(temperature=0, min_tokens=4, max_tokens=12, logit_bias={EOS[1]: 100})
    for window in (8, 1):
        got = one(make(eos=EOS, window=window), PROMPT, asked)
        assert len(got.token_ids) == 5 and got.token_ids[-1] == EOS[1] and got.finish_reason == "stop" and got.stop_reason is None
        assert not set(got.token_ids[:4]) & set(EOS)
        assert got.token_ids == plain(params, PROMPT, asked, stops=EOS)
    sampled = dataclasses.replace(asked, temperature=1.0, seed=1)
    assert one(make(eos=EOS), PROMPT, sampled).token_ids[-1] == EOS[1]


def test_min_tokens_after_a_preemption(make, params):
    asked = SamplingParams(temperature=0, min_tokens=60, max_tokens=80, logit_bias={EOS[1]: 100})
    engine = make(eos=EOS, num_kv_blocks=16)
    results = engine.generate([PROMPT] * 4, asked, use_tqdm=False)
    assert engine.stats().num_preemptions > 0
    want = plain(params, PROMPT, asked, stops=EOS, num_tokens=80)
    assert len(want) == 61 and [r.token_ids for r in results] == [want] * 4


@pytest.mark.parametrize("end", [10, 11, 12, 17])
def test_a_stop_string_within_a_window_equals_windows_of_one(make, params, end):
    """The first window gives tokens 2 to 9 of the answer, so token 12 is the third of the second one."""
    free = plain(params, PROMPT, dataclasses.replace(GREEDY, presence_penalty=1.5), num_tokens=30)
    stop = "".join(map(Letters().step, free[end - 2 : end]))
    asked = SamplingParams(temperature=0, max_tokens=30, presence_penalty=1.5, logprobs=2, stop=[stop])
    results = [one(make(window=window), PROMPT, asked, texts=[AnswerText(Letters(), asked.stop)]) for window in (1, 8)]
    for got in results:
        assert got.token_ids == free[:end] and (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert got.text == "".join(map(Letters().step, free[: end - 2]))
        assert len(got.logprobs) == end
        assert [lp.top for lp in got.logprobs] == [lp.top for lp in results[0].logprobs]


def test_min_tokens_and_a_stop_string(make, params):
    """Every token spells an a."""
    for minimum, window in itertools.product((0, 3), (1, 8)):
        asked = SamplingParams(temperature=0, max_tokens=10, min_tokens=minimum, stop=["a"])
        text = AnswerText(Letters(lambda _: "a"), asked.stop, min_tokens=minimum)
        got = one(make(window=window), PROMPT, asked, texts=[text])
        assert len(got.token_ids) == max(minimum, 1) and got.text == "a" * (max(minimum, 1) - 1) and got.stop_reason == "a"


def test_deltas_hold_back_what_may_become_a_stop_string(make, params):
    engine = make(window=1)
    free = plain(params, PROMPT, dataclasses.replace(GREEDY, presence_penalty=1.5), num_tokens=10)
    letters = "ABCDEFGHIJ"
    spelling = dict(zip(free, letters, strict=True))
    for stop, shown in (("DEFGHIJ", "ABC"), ("DEX", letters)):
        asked = SamplingParams(temperature=0, max_tokens=10, presence_penalty=1.5, stop=[stop])
        engine.add_request(PROMPT, asked, text=AnswerText(Letters(spelling.get), asked.stop))
        pieces = []
        while engine.has_unfinished_requests:
            pieces += [delta.text for delta in engine.step()]
        assert "".join(pieces) == shown
        assert ("D" in pieces) == (stop == "DEX") or "DE" in "".join(pieces)


def test_a_stop_token_named_by_the_user_is_the_reason(make, params):
    free = plain(params, PROMPT, GREEDY)
    first = next(i for i, token in enumerate(free) if free.index(token) == i and i > 1)
    got = one(make(), PROMPT, dataclasses.replace(GREEDY, stop_token_ids=[free[first]]))
    assert (got.token_ids, got.finish_reason, got.stop_reason) == (free[: first + 1], "stop", free[first])


# Log-probabilities.


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 100])
def test_prompt_logprobs(make, params, length):
    ids = prompt(length, length, vocab_size=KNOWN)
    logits = np.asarray(dense_logits(params, ids, MODEL))[:, :KNOWN].astype(np.float64)
    want = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    asked = dataclasses.replace(GREEDY, prompt_logprobs=3, max_tokens=3)
    free = one(make(), ids, dataclasses.replace(GREEDY, max_tokens=3)).token_ids
    engine = make()
    for budget, cold in ((64, True), (64, False), (9, True)):
        if not cold:
            assert one(engine, ids, dataclasses.replace(GREEDY, max_tokens=3)).num_cached_tokens == (length - 1) // 16 * 16
        if budget == 9:
            engine = make(token_budget=9, token_buckets=(16,), max_num_seqs=8)
        got = one(engine, ids, asked)
        assert got.token_ids == free and got.num_cached_tokens == 0
        assert got.prompt_logprobs[0] is None and len(got.prompt_logprobs) == length
        for i, lp in enumerate(got.prompt_logprobs[1:]):
            assert lp.logprob == pytest.approx(want[i, ids[i + 1]], abs=2e-4)
            assert lp.rank == 1 + (logits[i] > logits[i, ids[i + 1]]).sum()
            assert [t for t, _ in lp.top] == np.argsort(-logits[i], kind="stable")[:3].tolist()


def test_prompt_logprobs_beside_others_and_after_preemption(make, params):
    asked = dataclasses.replace(GREEDY, prompt_logprobs=2, logprobs=1, max_tokens=70)
    prompts = [prompt(20 + 5 * i, i, vocab_size=KNOWN) for i in range(6)]
    each = [asked if i % 2 else dataclasses.replace(asked, prompt_logprobs=None) for i in range(6)]
    alone = [one(make(), ids, params_) for ids, params_ in zip(prompts, each, strict=True)]
    engine = make(num_kv_blocks=16, token_budget=23)
    for got, want in zip(engine.generate(prompts, each, use_tqdm=False), alone, strict=True):
        assert got.token_ids == want.token_ids
        assert (got.prompt_logprobs is None) == (want.prompt_logprobs is None)
        for a, b in zip(got.prompt_logprobs or [], want.prompt_logprobs or [], strict=True):
            assert a is b is None or (a.logprob == pytest.approx(b.logprob, abs=1e-4) and [i for i, _ in a.top] == [i for i, _ in b.top])
    assert engine.stats().num_preemptions > 0


def test_raw_and_processed_logprobs(make, params):
    asked = SamplingParams(temperature=0.6, top_k=2, logit_bias={11: 4.0}, seed=3, max_tokens=12, logprobs=4, prompt_logprobs=4)
    ids = prompt(10, 5, vocab_size=KNOWN)
    raw, processed = one(make(), ids, asked), one(make(logprobs_mode="processed"), ids, asked)
    assert raw.token_ids == processed.token_ids
    logits = np.asarray(dense_logits(params, [*ids, *raw.token_ids], MODEL))[:, :KNOWN].astype(np.float64)
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()  # noqa: E731
    for i, token in enumerate(raw.token_ids):
        row = logits[len(ids) - 1 + i]
        assert raw.logprobs[i].logprob == pytest.approx(np.log(softmax(row)[token]), abs=2e-4)
        row[11] += 4
        kept = np.argsort(-row, kind="stable")[:2]
        want = softmax(row[kept] / 0.6)
        got = processed.logprobs[i]
        assert [t for t, _ in got.top] == kept.tolist()  # what is masked is left out
        assert got.logprob == pytest.approx(np.log(want[kept.tolist().index(token)]), abs=5e-4)
    for i, lp in enumerate(processed.prompt_logprobs[1:]):
        row = logits[i]
        kept = np.argsort(-row, kind="stable")[:2].tolist()
        want = softmax(row[kept] / 0.6)
        token = ids[i + 1]
        assert [t for t, _ in lp.top] == kept
        assert lp.logprob == (pytest.approx(np.log(want[kept.index(token)]), abs=5e-4) if token in kept else MASKED_LOGPROB)
    assert all(np.isfinite(lp.logprob) for lp in processed.prompt_logprobs[1:])


# Processors, warm-up, and what is refused.


def test_a_logits_processor_comes_before_everything_else(make, params):
    def only_even(logits, state):
        import jax.numpy as jnp

        ids = jnp.arange(logits.shape[1])
        allowed = (ids + state.positions[:, None]) % 2 == 0
        return jnp.where(allowed, logits, -jnp.inf)

    results = make(processors=(only_even,)).generate([PROMPT, prompt(8, 1)], [GREEDY, SEVEN], use_tqdm=False)
    for ids, got in zip((PROMPT, prompt(8, 1)), results, strict=True):
        assert all((len(ids) + i + token) % 2 == 0 for i, token in enumerate(got.token_ids))


def test_200_requests_of_every_kind_compile_nothing_after_warmup(make, tmp_path):
    import jax

    rng = np.random.default_rng(0)
    before = jax.config.jax_compilation_cache_dir
    engine = make(eos=EOS)
    try:
        engine.warmup(cache_dir=tmp_path, use_tqdm=False)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    compiled = engine.stats().num_compilations

    def maybe(value, share=0.4):
        return value if rng.random() < share else None

    prompts, asked, texts = [], [], []
    for i in range(200):
        options = dict(
            top_k=maybe(int(rng.integers(1, 120))),
            top_p=maybe(float(rng.uniform(0.05, 1))),
            min_p=maybe(float(rng.uniform(0, 0.5))),
            repetition_penalty=maybe(float(rng.uniform(0.5, 2))),
            presence_penalty=maybe(float(rng.uniform(-2, 2))),
            frequency_penalty=maybe(float(rng.uniform(-2, 2))),
            logit_bias=maybe({int(k): float(rng.uniform(-100, 100)) for k in rng.integers(0, KNOWN, 5)}),
            allowed_token_ids=maybe([int(k) for k in rng.integers(10, KNOWN, 30)], 0.2),
            bad_words_token_ids=maybe([[int(k) for k in rng.integers(0, 9, n)] for n in (1, 2, 3)]),
            min_tokens=maybe(int(rng.integers(0, 5))),
            logprobs=maybe(int(rng.integers(0, 5))),
            prompt_logprobs=maybe(int(rng.integers(0, 5)), 0.2),
            stop_token_ids=maybe([int(rng.integers(0, KNOWN))]),
            stop=maybe(["ab", "c"]),
            ignore_eos=maybe(True),
        )
        options = {name: value for name, value in options.items() if value is not None}
        asked.append(SamplingParams(temperature=float(rng.choice([0, 0.5, 1, 2])), seed=i, max_tokens=int(rng.integers(5, 25)), **options))
        prompts.append(prompt(int(rng.integers(1, 90)), i))
        least = options.get("min_tokens", 0)
        text = AnswerText(Letters(lambda token: "abcdefghij"[token % 10]), ["ab", "c"], min_tokens=least)
        texts.append(text if "stop" in options else None)
    results = engine.generate(prompts, asked, texts=texts, use_tqdm=False)
    assert all(r.error is None for r in results)
    assert {r.finish_reason for r in results} == {"stop", "length"}
    assert engine.stats().num_compilations == compiled
    assert sum(r.prompt_logprobs is not None for r in results) > 20
    for r, each in zip(results, asked, strict=True):
        assert len(r.token_ids) >= each.min_tokens
        assert each.allowed_token_ids is None or set(r.token_ids) <= set(each.allowed_token_ids)


def test_what_an_engine_refuses(make):
    engine = make(eos=EOS, max_bad_words=2, max_bad_word_tokens=3)
    for asked, message in (
        (dict(stop=["x"]), "an engine sees tokens alone"),
        (dict(bad_words=["x"]), "an engine sees tokens alone"),
        (dict(n=2, temperature=1), "an engine draws one"),
        (dict(bad_words_token_ids=[[1, 2, 3, 4]]), "max_bad_word_tokens = 3"),
        (dict(bad_words_token_ids=[[1, 2], [2, 3], [3, 4]]), "max_bad_words = 2"),
        (dict(min_tokens=1, stop_token_ids=list(range(10, 20))), "max_device_stop_ids = 8"),
        (dict(logit_bias={98: 1}), "token id 98 of logit_bias"),
        (dict(allowed_token_ids=[98]), "token id 98 of allowed_token_ids"),
        (dict(allowed_token_ids=[1, 2], bad_words_token_ids=[[1], [2]]), "leave none"),
        (dict(allowed_token_ids=[*EOS], min_tokens=1), "leave none"),
        (dict(prompt_logprobs=5), "max_logprobs = 4"),
    ):
        with pytest.raises(RequestError, match=message):
            one(engine, PROMPT, SamplingParams(**{"temperature": 0, **asked}))
    with pytest.raises(ConfigError, match="vocab_size is 99"):
        Engine(None, MODEL, runner=lambda *_: None, vocab_size=99)
    with pytest.raises(ConfigError, match="logprobs_mode is 'both'"):
        EngineConfig(logprobs_mode="both")
