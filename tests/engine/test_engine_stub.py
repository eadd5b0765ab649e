"""The engine on a device without a transformer: who gets which blocks, what happens at the edges and when things go wrong.

Right is what `stub_runner.answer` says: it knows neither blocks nor neighbours.
"""

import logging
import math

import numpy as np
import pytest

from pagedjax.allocator import BlockAllocator
from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig
from pagedjax.errors import ConfigError, RequestError
from pagedjax.request import SamplingParams
from pagedjax.runner import warmup_inputs
from pagedjax.sequence import Status
from tests.engine.stub_runner import VOCAB, StubRunner, Violation, answer
from tests.helpers import prompt as random_prompt
from tests.helpers import variant

MODEL = variant(vocab_size=VOCAB, max_model_len=4096)
SMALL = dict(
    max_num_seqs=8,
    num_kv_blocks=64,
    token_budget=64,
    row_buckets=(1, 8),
    mixed_row_buckets=(8,),
    token_buckets=(16, 64),
    width_buckets=(4, 16, 256),
    max_logprobs=4,
)


def prompt(length, seed=0):
    return random_prompt(length, seed, VOCAB)


def greedy(max_tokens=16, **more):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def seeded(seed, max_tokens=16, **more):
    return SamplingParams(**dict(temperature=0.7, top_k=5, top_p=0.9) | dict(seed=seed, max_tokens=max_tokens) | more)


def make_engine(*, hasher=None, eos=(), runner=StubRunner, **settings):
    more = {} if hasher is None else {"hasher": hasher}
    engine = Engine(None, MODEL, EngineConfig(**SMALL | settings), runner=runner, eos_token_ids=eos, **more)
    engine._runner.allocator = engine._allocator
    return engine


def run(engine, deltas=None, *, most=10_000):
    """Step until nothing is left; the deltas of every request, in order."""
    got = {} if deltas is None else deltas
    for _ in range(most):
        if not engine.has_unfinished_requests:
            return got
        step(engine, got)
    raise AssertionError(f"not finished after {most} steps: {engine.stats()}")


def step(engine, deltas):
    for delta in engine.step():
        deltas.setdefault(delta.request_id, []).append(delta)


def tokens(deltas):
    return [token for delta in deltas for token in delta.token_ids]


def reason(deltas):
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return deltas[-1].finish_reason


def assert_nothing_held(engine):
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == engine.num_kv_blocks
    assert not engine.has_unfinished_requests
    assert (engine._live, engine._results, engine._kept) == ({}, {}, set())
    assert sorted(engine._scheduler._state_ids) == list(range(engine.engine_config.max_num_seqs))
    assert not engine._scheduler.tables.any()
    # Blocks were looked at whenever anything ran.
    assert engine._runner.num_checked_blocks > 0


def assert_works(engine):
    """A follow-up request is answered rightly, and afterwards nothing is held."""
    follow_up = prompt(21, 99)
    assert engine.generate([follow_up], greedy(12), use_tqdm=False)[0].token_ids == answer(follow_up, greedy(12))
    assert_nothing_held(engine)


def mixed_requests(num, *, longest=60, seed=0, **more):
    """Prompts, some of which begin alike, and parameters, greedy and seeded."""
    random = np.random.default_rng(seed)
    shared = prompt(48, 1000)
    prompts, params = [], []
    for i in range(num):
        own = prompt(int(random.integers(1, longest)), i + 1)
        prompts.append(shared[: int(random.integers(0, 49))] + own if i % 3 == 0 else own)
        length = int(random.integers(1, 40))
        params.append(greedy(length, **more) if i % 2 else seeded(i, length, top_k=i, top_p=1 - i / 100, **more))
    return prompts, params


# Equalities.


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("token_budget", [1, 7, 64, 2048])
def test_any_budget_and_window_equals_alone(token_budget, window):
    prompts, params = mixed_requests(20)
    engine = make_engine(token_budget=token_budget, window=window)
    results = engine.generate(prompts, params, use_tqdm=False)
    for one, ids, asked in zip(results, prompts, params, strict=True):
        assert one.token_ids == answer(ids, asked)
        assert (one.finish_reason, one.prompt_token_ids, one.seed) == ("length", ids, asked.seed if asked.seed is not None else one.seed)
    stats = engine.stats()
    assert stats.num_cached_tokens > 0
    assert stats.num_mixed_steps > 0 or token_budget == 1
    assert (stats.num_windows > 0) == (window > 1)
    assert_nothing_held(engine)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_admission_and_arrivals_between_steps(seed):
    prompts, params = mixed_requests(24)
    random = np.random.default_rng(seed)
    engine, deltas = make_engine(), {}
    for i in random.permutation(len(prompts)):
        engine.add_request(prompts[i], params[i], request_id=f"r{i}", priority=int(random.integers(-1, 2)))
        for _ in range(random.integers(0, 4)):
            step(engine, deltas)
    run(engine, deltas)
    for i, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
        assert tokens(deltas[f"r{i}"]) == answer(ids, asked)
    assert engine.stats().num_mixed_steps > 0
    assert_nothing_held(engine)


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_tiny_pool_equals_an_ample_one(window, prefix_caching):
    prompts, params = mixed_requests(30, longest=40)
    engine = make_engine(num_kv_blocks=8, window=window, enable_prefix_caching=prefix_caching)
    results = engine.generate(prompts, params, use_tqdm=False)
    assert [one.token_ids for one in results] == [answer(*both) for both in zip(prompts, params, strict=True)]
    stats = engine.stats()
    assert 3 <= stats.num_preemptions <= 4 * len(prompts)  # bounded: no thrash
    assert sum(one.num_preemptions for one in results) == stats.num_preemptions
    assert (stats.num_cached_tokens > 0) == prefix_caching
    assert_nothing_held(engine)


def test_cold_equals_hot():
    prompts, params = mixed_requests(12)
    engine = make_engine(num_kv_blocks=256)
    cold = engine.generate(prompts, params, use_tqdm=False)
    before = engine.stats()
    hot = engine.generate(prompts, params, use_tqdm=False)
    assert (
        [one.token_ids for one in hot] == [one.token_ids for one in cold] == [answer(*both) for both in zip(prompts, params, strict=True)]
    )
    for one in hot:
        assert one.num_cached_tokens == (len(one.prompt_token_ids) - 1) // 16 * 16
    assert engine.stats().num_cached_tokens - before.num_cached_tokens == sum(one.num_cached_tokens for one in hot) > 0
    assert_nothing_held(engine)


def test_an_answer_is_found_as_a_prompt():
    engine = make_engine()
    ids = prompt(20)
    new = engine.generate([ids], greedy(40), use_tqdm=False)[0].token_ids
    longer = ids + new
    again = engine.generate([longer], greedy(10), use_tqdm=False)[0]
    assert again.token_ids == answer(longer, greedy(10))
    assert again.num_cached_tokens == 48  # the newest of the 60 tokens is not in the cache, and 59 fill 3 blocks


def ends_at(at, window_of, seed=0, length=20):
    """A prompt and its answer, whose token `at` occurs there first."""
    for i in range(1000):
        ids = prompt(length, seed + i)
        new = answer(ids, window_of)
        if new.index(new[at]) == at:
            return ids, new
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("stop_by", ["eos", "stop_token_ids"])
# 12 + 4 and 29 + 3 put the border of a block inside the window; "fills" lets the end token itself fill a block.
@pytest.mark.parametrize("length", [5, 12, 16, 29, "fills"])
@pytest.mark.parametrize("inner", [1, 3, 8])
def test_an_end_inside_a_window(inner, length, stop_by):
    """The first token comes from the prompt's step; inner step 1 of the second window is then token 1 + 8 + 1."""
    at = 8 + inner  # counted from 0
    length = 48 - (at + 1) if length == "fills" else length
    ids, new = ends_at(at, greedy(40), length=length)
    others, params = [prompt(n, n) for n in (3, 14, 33)], greedy(29)  # no multiple of 8
    got = {}
    for window in (1, 8):
        asked = greedy(40, **({"stop_token_ids": (new[at],)} if stop_by == "stop_token_ids" else {}))
        engine = make_engine(window=window, eos=(new[at],) if stop_by == "eos" else ())
        some = greedy(29, ignore_eos=True) if stop_by == "eos" else params
        results = engine.generate([ids, *others], [asked, some, some, some], use_tqdm=False)
        got[window] = [(one.token_ids, one.finish_reason) for one in results]
        assert (engine.stats().num_windows > 0) == (window > 1)
        # What the row computed after its end, if anything, is found by nobody: a prompt that goes on where it ended is answered rightly.
        longer = ids + new[: at + 1]
        assert engine.generate([longer + prompt(20, 5)], greedy(4, ignore_eos=True), use_tqdm=False)[0].token_ids == answer(
            longer + prompt(20, 5), greedy(4)
        )
        assert_nothing_held(engine)
    assert got[1] == got[8]
    assert got[8] == [(new[: at + 1], "stop"), *((answer(one, params), "length") for one in others)]


def test_more_stop_ids_than_the_device_looks_at():
    ids, new = ends_at(10, greedy(40))
    unseen = [i for i in range(VOCAB) if i not in new][:30]
    stops = (*unseen, new[10])
    engine = make_engine(max_device_stop_ids=2)
    deltas = {}
    engine.add_request(ids, greedy(40, stop_token_ids=stops), request_id="many")
    engine.add_request(prompt(9), greedy(40), request_id="other")
    run(engine, deltas)
    assert tokens(deltas["many"]) == new[:11] and reason(deltas["many"]) == "stop"
    assert tokens(deltas["other"]) == answer(prompt(9), greedy(40))
    assert_works(engine)


def test_two_equal_prompts_in_one_step_and_a_different_one_right_after():
    for length in (32, 40, 16):
        same, other = prompt(length), [*prompt(length)[:-1], 3]
        engine, deltas = make_engine(token_budget=128), {}
        engine.add_request(same, greedy(30), request_id="a")
        engine.add_request(same, seeded(4, 30), request_id="b")
        step(engine, deltas)
        assert engine.stats().num_running == 2 and engine.stats().num_dispatches == 1
        assert engine.stats().num_cached_tokens == 0  # nothing that the same step computes is shared
        engine.add_request(other, greedy(30), request_id="c")
        run(engine, deltas)
        assert tokens(deltas["a"]) == answer(same, greedy(30))
        assert tokens(deltas["b"]) == answer(same, seeded(4, 30))
        assert tokens(deltas["c"]) == answer(other, greedy(30))
        assert engine.stats().num_cached_tokens == (length - 1) // 16 * 16
        assert_nothing_held(engine)


def test_blocks_are_shared_while_others_hold_them():
    engine, deltas = make_engine(), {}
    same = prompt(40)
    engine.add_request(same, greedy(30), request_id="a")
    step(engine, deltas)
    engine.add_request(same, greedy(30), request_id="b")
    step(engine, deltas)
    a, b = engine.snapshot().requests
    assert a.block_ids[:2] == b.block_ids[:2] and a.block_ids[2] != b.block_ids[2]
    assert engine.snapshot().blocks.count("shared") == 2
    run(engine, deltas)
    assert tokens(deltas["a"]) == tokens(deltas["b"]) == answer(same, greedy(30))
    assert_nothing_held(engine)


def test_a_hash_that_says_nothing():
    prompts, params = mixed_requests(16)
    engine = make_engine(hasher=lambda parent, ids: b"same")
    for _ in range(2):
        results = engine.generate(prompts, params, use_tqdm=False)
        assert [one.token_ids for one in results] == [answer(*both) for both in zip(prompts, params, strict=True)]
    assert engine.stats().num_cached_tokens > 0
    assert_nothing_held(engine)


def test_equal_tokens_after_different_ones_are_not_equal():
    """The first block of the last prompt is known, and so are the tokens of its second block, but after another first one."""
    a, b, tail = prompt(16, 1), prompt(16, 2), prompt(20, 3)
    engine = make_engine(hasher=lambda parent, ids: b"same")
    for ids, num_cached in ((b + tail, 0), (a + prompt(20, 4), 0), (a + tail, 16), (b + tail, 32)):
        one = engine.generate([ids], greedy(8), use_tqdm=False)[0]
        assert (one.token_ids, one.num_cached_tokens) == (answer(ids, greedy(8)), num_cached)


def test_salts_keep_apart():
    engine, deltas = make_engine(), {}
    for name, salt in (("a", "x"), ("b", "y"), ("c", ""), ("d", "y")):
        engine.add_request(prompt(40), greedy(8), request_id=name, cache_salt=salt)
        before = engine.stats().num_cached_tokens
        run(engine, deltas)
        assert tokens(deltas[name]) == answer(prompt(40), greedy(8))
        assert engine.stats().num_cached_tokens - before == (32 if name == "d" else 0)


@pytest.mark.parametrize("first", ["full", "two blocks"])
def test_a_prompt_of_two_blocks_takes_sixteen_tokens_from_the_cache(first):
    engine = make_engine()
    ids = prompt(32)
    results = [engine.generate([ids], greedy(20 if first == "full" else 1), use_tqdm=False)[0] for _ in range(2)]
    assert [one.num_cached_tokens for one in results] == [0, 16]
    assert results[0].token_ids == results[1].token_ids == answer(ids, greedy(20 if first == "full" else 1))


def test_prefix_caching_can_be_turned_off():
    engine = make_engine(enable_prefix_caching=False)
    for _ in range(2):
        assert engine.generate([prompt(40)], greedy(5), use_tqdm=False)[0].num_cached_tokens == 0
    assert engine.stats().num_cached_blocks == 0
    assert_nothing_held(engine)


# Little room.


@pytest.mark.parametrize("window", [1, 8])
def test_ten_blocks_and_two_requests_that_need_eight(window):
    engine, deltas = make_engine(num_kv_blocks=10, window=window), {}
    for i in range(2):
        engine.add_request(prompt(40, i), greedy(88), request_id=str(i))  # 128 tokens
    run(engine, deltas)
    for i in range(2):
        assert tokens(deltas[str(i)]) == answer(prompt(40, i), greedy(88)) and reason(deltas[str(i)]) == "length"
    assert 1 <= engine.stats().num_preemptions <= 3
    assert_nothing_held(engine)


def test_a_prompt_that_fits_runs_to_the_end_of_the_pool():
    engine, deltas = make_engine(num_kv_blocks=4), {}
    assert engine.max_model_len == 64
    engine.add_request(prompt(50), greedy(100), request_id="long")
    for i in range(4):
        engine.add_request(prompt(10, i + 1), greedy(20), request_id=f"short{i}")
    run(engine, deltas)
    assert tokens(deltas["long"]) == answer(prompt(50), greedy(14)) and reason(deltas["long"]) == "length"
    for i in range(4):
        assert tokens(deltas[f"short{i}"]) == answer(prompt(10, i + 1), greedy(20))
    assert_nothing_held(engine)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers():
    engine = make_engine(num_kv_blocks=4)
    with pytest.raises(RequestError, match="the prompt has 64 tokens; with a KV cache of 4 blocks of 16 tokens it may have at most 63"):
        engine.add_request(prompt(64), greedy(1))
    assert engine.generate([prompt(63)], greedy(5), use_tqdm=False)[0].token_ids == answer(prompt(63), greedy(1))


def test_the_model_length_is_the_limit():
    engine = make_engine(max_model_len=32)
    one = engine.generate([prompt(30)], greedy(100), use_tqdm=False)[0]
    assert (one.token_ids, one.finish_reason) == (answer(prompt(30), greedy(2)), "length")
    assert len(one.token_ids) == 2
    assert len(engine.generate([prompt(30)], SamplingParams(max_tokens=None), use_tqdm=False)[0].token_ids) == 2


def test_more_requests_than_rows():
    engine = make_engine(max_num_seqs=2, row_buckets=(2,), mixed_row_buckets=(2,))
    prompts, params = mixed_requests(9)
    results = engine.generate(prompts, params, use_tqdm=False)
    assert [one.token_ids for one in results] == [answer(*both) for both in zip(prompts, params, strict=True)]
    assert max(engine._runner.live_rows) == 2
    assert_nothing_held(engine)


# Dispatches.


@pytest.mark.parametrize("window", [1, 4, 8, 32])
def test_dispatches_of_an_idle_queue(window):
    engine = make_engine(window=window)
    one = engine.generate([prompt(10)], greedy(256), use_tqdm=False)[0]
    assert one.token_ids == answer(prompt(10), greedy(256))
    assert engine.stats().num_dispatches == engine._runner.num_dispatches <= 256 / window + 2
    # One transfer for each.
    assert engine._runner.num_fetches == engine._runner.num_dispatches


def test_the_next_step_is_dispatched_before_the_last_one_is_fetched():
    engine = make_engine()
    engine.add_request(prompt(10), greedy(100))
    ahead = []
    while engine.has_unfinished_requests:
        engine.step()
        ahead.append(engine._runner.num_dispatches - engine._runner.num_fetches)
    assert set(ahead[:-1]) == {1} and ahead[-1] == 0


def test_a_waiting_prompt_makes_steps_short_and_rows_go_on_beside_its_chunks():
    engine, deltas = make_engine(token_budget=8), {}
    engine.add_request(prompt(4), greedy(60), request_id="first")
    for _ in range(4):
        step(engine, deltas)
    assert engine.stats().num_windows > 0
    seen = len(tokens(deltas["first"]))
    engine.add_request(prompt(70, 1), greedy(5), request_id="second")
    windows = engine.stats().num_windows
    for _ in range(10):
        step(engine, deltas)
    assert engine.stats().num_mixed_steps >= 10 and engine.stats().num_windows == windows  # 70 tokens, 7 a step
    assert len(tokens(deltas["first"])) >= seen + 10
    run(engine, deltas)
    assert tokens(deltas["first"]) == answer(prompt(4), greedy(60))
    assert tokens(deltas["second"]) == answer(prompt(70, 1), greedy(5))


def test_warmup_covers_what_runs():
    engine = make_engine(num_kv_blocks=20)
    engine.warmup(use_tqdm=False)
    compiled = engine.stats().num_compilations
    assert compiled == engine.buckets.num_executables == 3 * (2 + 1 * 2) + 2
    assert len(warmup_inputs(engine.buckets, engine.engine_config)) == compiled - 1  # and tables
    prompts, params = mixed_requests(40, longest=200)
    engine.generate(prompts, params, use_tqdm=False)
    assert engine.stats().num_compilations == compiled
    assert engine.stats().num_preemptions > 0
    assert_nothing_held(engine)


# Abort.


def start(engine, deltas, **asked):
    engine.add_request(prompt(40), greedy(30), request_id="victim", **asked)
    engine.add_request(prompt(25, 1), greedy(30), request_id="other", **asked)


def until(engine, deltas, condition):
    """Step until the victim is as it should be."""
    for _ in range(1000):
        if condition(engine._live["victim"].row):
            return
        step(engine, deltas)
    raise AssertionError("never")


def waiting(engine, deltas):
    start(engine, deltas)
    assert engine._live["victim"].row.status is Status.WAITING


def mid_chunk(engine, deltas):
    start(engine, deltas)
    until(engine, deltas, lambda row: 0 < row.num_computed_tokens < 40 and not row.decoding)


def decoding(engine, deltas):
    start(engine, deltas)
    until(engine, deltas, lambda row: row.num_new_tokens > 8)
    assert engine._flights


def preempted(engine, deltas):
    engine.add_request(prompt(25, 1), greedy(30), request_id="other")
    engine.add_request(prompt(25, 2), greedy(100), request_id="first")
    engine.add_request(prompt(40), greedy(60), request_id="victim")
    until(engine, deltas, lambda row: row.status is Status.PREEMPTED)
    assert engine.stats().num_preempted == 1


def last_step(engine, deltas):
    start(engine, deltas)
    until(engine, deltas, lambda row: row.num_left == 0 and row.num_in_flight > 0)


@pytest.mark.parametrize("state", [waiting, mid_chunk, decoding, preempted, last_step])
@pytest.mark.parametrize("window", [1, 8])
def test_abort(state, window):
    engine, deltas = make_engine(num_kv_blocks=10, token_budget=16, window=window), {}
    state(engine, deltas)
    expected = answer(prompt(40), greedy(60 if state is preempted else 30))
    row = engine._live["victim"].row
    engine.abort("victim")
    assert row.block_ids == [] and row.status is Status.FINISHED
    engine.abort("victim")
    engine.abort(["victim", "nobody"])
    run(engine, deltas)
    assert reason(deltas["victim"]) == "abort" and deltas["victim"][-1].token_ids == []
    got = tokens(deltas["victim"])
    assert got == expected[: len(got)]
    assert tokens(deltas["other"]) == answer(prompt(25, 1), greedy(30))
    assert_nothing_held(engine)
    assert_works(engine)


def test_abort_of_a_finished_request_and_an_id_used_again():
    engine, deltas = make_engine(), {}
    engine.add_request(prompt(5), greedy(3), request_id="a")
    run(engine, deltas)
    engine.abort("a")
    assert engine.step() == []
    # While the step of the aborted one is still in flight.
    engine.add_request(prompt(40, 1), greedy(30), request_id="a")
    for _ in range(3):
        step(engine, {})
    engine.abort("a")
    # Its end has not been told yet: a reader could not tell one "a" from the other.
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request(prompt(41, 2), greedy(30), request_id="a")
    assert [delta.finish_reason for delta in engine.step()] == ["abort"]
    engine.add_request(prompt(41, 2), greedy(30), request_id="a")
    deltas = run(engine)["a"]
    assert tokens(deltas) == answer(prompt(41, 2), greedy(30)) and reason(deltas) == "length"
    assert_nothing_held(engine)


def test_abort_at_random():
    random = np.random.default_rng(0)
    prompts, params = mixed_requests(60)
    engine, deltas, aborted = make_engine(num_kv_blocks=8), {}, set()
    for i, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(ids, asked, request_id=str(i))
        for _ in range(random.integers(0, 3)):
            step(engine, deltas)
        if i % 4 == 3:
            victim = str(random.choice(list(engine._live)))
            engine.abort(victim)
            aborted.add(victim)
    run(engine, deltas)
    assert len(aborted) == 15 and engine.stats().num_preemptions > 3
    for i, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
        got, want = tokens(deltas[str(i)]), answer(ids, asked)
        assert got == want[: len(got)] and (got == want or str(i) in aborted)
        assert reason(deltas[str(i)]) == ("abort" if str(i) in aborted else "length")
    assert_works(engine)


# Who goes first.


def test_priorities():
    engine, deltas = make_engine(max_num_seqs=1, row_buckets=(1,), mixed_row_buckets=(1,)), {}
    order = []
    for name, priority in (("late", 5), ("middle", 0), ("also middle", 0), ("first", -3)):
        engine.add_request(prompt(10), greedy(4), request_id=name, priority=priority)
    while engine.has_unfinished_requests:
        order += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert order == ["first", "middle", "also middle", "late"]
    assert deltas == {}


def test_the_last_to_come_of_the_lowest_priority_is_preempted():
    engine, deltas = make_engine(num_kv_blocks=14), {}
    for name, priority in (("a", 1), ("b", 1), ("c", 0)):
        engine.add_request(prompt(30, ord(name)), greedy(60), request_id=name, priority=priority)
    lost = set()
    while engine.has_unfinished_requests:
        step(engine, deltas)
        lost |= {one.request_id for one in engine.snapshot().requests if one.num_preemptions}
    assert lost == {"b"}
    for name in "abc":
        assert tokens(deltas[name]) == answer(prompt(30, ord(name)), greedy(60))


def test_a_short_request_behind_a_preempted_one_is_not_starved():
    engine, deltas = make_engine(num_kv_blocks=10), {}
    for i in range(12):
        engine.add_request(prompt(30, i), greedy(90 if i < 3 else 2), request_id=str(i))
    run(engine, deltas)
    assert {reason(one) for one in deltas.values()} == {"length"} and len(deltas) == 12
    assert engine.stats().num_preemptions > 0


# What goes wrong.


@pytest.mark.parametrize(
    ("ids", "asked", "more", "message"),
    [
        ([VOCAB], {}, {}, f"token id {VOCAB} at position 0 of the prompt is out of range; ids are 0 to {VOCAB - 1}"),
        ([5, -1], {}, {}, "token id -1 at position 1 of the prompt is out of range"),
        ([], {}, {}, "the prompt is empty; it needs at least one token"),
        ([1.5], {}, {}, "a token id of the prompt is 1.5; it must be an integer"),
        (7, {}, {}, "the prompt is 7; it must be a sequence of token ids"),
        ([1] * 1024, {}, {}, "the prompt has 1024 tokens; with a KV cache of 64 blocks of 16 tokens it may have at most 1023"),
        ([1], dict(temperature=math.nan), {}, "temperature is nan; it must be a finite number"),
        ([1], dict(top_p=math.nan), {}, "top_p is nan; it must be a finite number"),
        ([1], dict(max_tokens=0), {}, "max_tokens is 0; it must be at least 1"),
        ([1], dict(logprobs=5), {}, "logprobs is 5; this engine reports at most max_logprobs = 4"),
        ([1], {}, dict(request_id="running"), "request_id 'running' is in use by a request that has not finished"),
        ([1], {}, dict(request_id=""), "request_id is ''; it must be a text"),
        ([1], {}, dict(request_id=3), "request_id is 3; it must be a text"),
        ([1], {}, dict(cache_salt=3), "cache_salt is 3; it must be a text"),
        ([1], {}, dict(priority=0.5), "priority is 0.5; it must be an integer"),
        ([1], None, {}, "sampling_params is None; it must be a SamplingParams"),
    ],
)
def test_a_bad_request_fails_alone(ids, asked, more, message):
    engine, deltas = make_engine(), {}
    engine.add_request(prompt(20), greedy(30), request_id="running")
    step(engine, deltas)
    with pytest.raises(RequestError, match=message):
        engine.add_request(ids, None if asked is None else SamplingParams(**asked), **more)
    assert engine.stats().num_waiting == 0
    run(engine, deltas)
    assert list(deltas) == ["running"] and tokens(deltas["running"]) == answer(prompt(20), greedy(30))
    assert_works(engine)


def test_a_bad_prompt_among_good_ones_queues_none():
    engine = make_engine()
    with pytest.raises(RequestError, match=r"token id -2 at position 1 of prompts\[1\] is out of range"):
        engine.generate([prompt(5), [1, -2]], greedy(5), use_tqdm=False)
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 prompts"):
        engine.generate([prompt(5), prompt(6)], [greedy(5)], use_tqdm=False)
    assert not engine.has_unfinished_requests
    assert engine.step() == []
    assert_works(engine)


@pytest.mark.parametrize("lose_cache", [False, True], ids=["cache kept", "cache lost"])
@pytest.mark.parametrize("where", ["dispatch", "fetch"])
@pytest.mark.parametrize("number", [0, 1, 4, 9])
def test_an_exception_in_a_step(where, number, lose_cache, caplog):
    """The requests of that step fail; those that wait, and those that come later, are answered rightly."""
    prompts, params = mixed_requests(12)
    engine, deltas = make_engine(max_num_seqs=4, row_buckets=(4,), mixed_row_buckets=(4,), num_kv_blocks=30), {}
    runner = engine._runner
    getattr(runner, f"{where}_errors")[number] = RuntimeError("out of luck")
    runner.lose_cache = lose_cache
    for i, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(ids, asked, request_id=str(i))
    with caplog.at_level(logging.ERROR, "pagedjax.engine"):
        run(engine, deltas)
    failed = {name for name, one in deltas.items() if reason(one) == "error"}
    assert failed and len(failed) <= 4 * (2 if lose_cache else 1)  # a lost cache takes the step that was dispatched meanwhile with it
    assert "a step failed: RuntimeError: out of luck" in caplog.text
    for i, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
        one, got, want = deltas[str(i)], tokens(deltas[str(i)]), answer(ids, asked)
        if str(i) in failed:
            assert one[-1].error.startswith("a step failed: RuntimeError:") and got == want[: len(got)]
        else:
            assert got == want and reason(one) == "length" and one[-1].error is None
    assert runner.num_recoveries >= 1
    assert_works(engine)
    again = engine.generate(prompts, params, use_tqdm=False)
    assert [one.token_ids for one in again] == [answer(*both) for both in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("where", ["dispatch", "fetch"])
def test_rows_outside_of_a_failed_step_go_on_when_the_cache_is_lost(where):
    """Chunks of the first prompt take all of the budget, and the second one, whose answer has begun, waits beside them with its blocks."""
    engine, deltas = make_engine(token_budget=16), {}
    runner = engine._runner
    engine.add_request(prompt(20), greedy(40), request_id="beside", priority=1)
    step(engine, deltas)
    engine.add_request(prompt(100, 1), greedy(6), request_id="failing")
    for _ in range(4):
        step(engine, deltas)
    assert [one.request_id for one in engine.snapshot().requests if one.status is Status.RUNNING] == ["beside", "failing"]
    assert tokens(deltas["beside"]) == answer(prompt(20), greedy(2))
    assert not engine._flights[-1].batch.decodes
    runner.lose_cache = True
    now = runner.num_dispatches if where == "dispatch" else runner.num_fetches
    getattr(runner, f"{where}_errors")[now] = OSError("gone")
    run(engine, deltas)
    assert reason(deltas["failing"]) == "error" and deltas["failing"][-1].error == "a step failed: OSError: gone"
    assert tokens(deltas["beside"]) == answer(prompt(20), greedy(40)) and reason(deltas["beside"]) == "length"
    assert engine.stats().num_preemptions == 1 and runner.num_dispatches < 25  # at once, and not when the pool is full
    assert_works(engine)


def test_every_step_fails():
    engine, deltas = make_engine(), {}
    engine._runner.dispatch_errors = {i: ValueError(f"no {i}") for i in range(3)}
    engine._runner.lose_cache = True
    for i in range(10):
        engine.add_request(prompt(40, i), greedy(5), request_id=str(i))
    run(engine, deltas)
    errors = [one[-1].error for one in deltas.values() if reason(one) == "error"]
    assert len(errors) >= 3 and all(error.startswith("a step failed: ValueError: no ") for error in errors)
    assert_works(engine)


def test_generate_reports_the_error_of_a_step():
    engine = make_engine()
    engine._runner.fetch_errors[1] = RuntimeError("out of luck")
    one = engine.generate([prompt(10)], greedy(30), use_tqdm=False)[0]
    assert (one.finish_reason, one.error) == ("error", "a step failed: RuntimeError: out of luck")
    assert one.token_ids == answer(prompt(10), greedy(1))
    assert_works(engine)


def test_the_stub_finds_faults_out():
    """What these tests rest on: a device that is asked for nonsense says so, and no engine takes that for a failed step."""

    def cells_gone(engine):
        engine._runner._cells[:] = -1

    def table_gone(engine):
        engine._scheduler.tables[:] = 0

    def nobody_holds(engine):
        engine._runner.allocator = BlockAllocator(engine.num_kv_blocks)

    def two_hold(engine):
        engine._allocator.share(engine.snapshot().requests[0].block_ids)

    for spoil, message in (
        (cells_gone, "a cell is read that was never written"),
        (table_gone, "a live row (reads|writes to) the null block"),
        (nobody_holds, "is in a live table and nobody holds it"),
        (two_hold, "is written and has several holders"),
    ):
        engine, deltas = make_engine(), {}
        engine.add_request(prompt(40), greedy(30))
        for _ in range(3):
            step(engine, deltas)
        spoil(engine)
        with pytest.raises(Violation, match=message):
            run(engine, deltas)


@pytest.mark.parametrize("where", ["dispatch", "fetch"])
@pytest.mark.parametrize("number", [0, 1, 3, 6])
def test_an_interrupted_generate_leaves_nothing_behind(where, number):
    engine, deltas = make_engine(), {}
    getattr(engine._runner, f"{where}_errors")[number] = KeyboardInterrupt()
    engine.add_request(prompt(12), greedy(3), request_id="before")
    prompts, params = mixed_requests(12)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, params, use_tqdm=False)
    run(engine, deltas)
    assert list(deltas) == ["before"]
    assert_works(engine)


@pytest.mark.parametrize("where", ["dispatch", "fetch"])
def test_an_interrupted_generate_does_not_harm_other_requests(where):
    engine, deltas = make_engine(), {}
    getattr(engine._runner, f"{where}_errors")[4] = KeyboardInterrupt()
    engine.add_request(prompt(12), greedy(60), request_id="before")
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(20, 1)], greedy(60), use_tqdm=False)
    run(engine, deltas)
    got, want = tokens(deltas["before"]), answer(prompt(12), greedy(60))
    if where == "fetch":
        assert got == want
    else:
        assert got == want[: len(got)] and (got == want or reason(deltas["before"]) == "error")
    assert_works(engine)


# Other weights.


@pytest.mark.parametrize("window", [1, 8])
def test_update_params(window):
    engine, deltas = make_engine(window=window), {}
    engine.add_request(prompt(40), greedy(30), request_id="flying")
    engine.add_request(prompt(40, 1), seeded(3, 50), request_id="flying too")
    while len(tokens(deltas.get("flying too", []))) < 12:
        step(engine, deltas)
    engine.update_params(5)
    assert engine.stats().num_preempted == 2
    assert engine.stats().num_cached_blocks == 0
    # Tokens that had been computed come out of the next step; none of the new weights can be among them.
    step(engine, deltas)
    given = {name: tokens(one) for name, one in deltas.items()}
    run(engine, deltas)
    for name, ids, asked in (("flying", prompt(40), greedy(30)), ("flying too", prompt(40, 1), seeded(3, 50))):
        assert 0 < len(given[name]) < asked.max_tokens
        assert given[name] == answer(ids, asked)[: len(given[name])]
        assert tokens(deltas[name]) == answer(ids, asked, weights=5, given=given[name])
        assert tokens(deltas[name]) != answer(ids, asked)
    # Two blocks of each prompt are known, computed by the new weights.
    after = engine.generate([prompt(40), prompt(40, 9)], greedy(20), use_tqdm=False)
    assert after[0].num_cached_tokens == 32
    fresh = make_engine(window=window)
    fresh.update_params(5)
    assert [one.token_ids for one in after] == [
        one.token_ids for one in fresh.generate([prompt(40), prompt(40, 9)], greedy(20), use_tqdm=False)
    ]
    assert_nothing_held(engine)


def test_old_blocks_are_unreachable_after_update_params():
    engine = make_engine()
    engine.generate([prompt(40)], greedy(10), use_tqdm=False)
    assert engine.stats().num_cached_blocks > 0
    engine.update_params(5)
    assert engine.stats().num_cached_blocks == 0
    one = engine.generate([prompt(40)], greedy(10), use_tqdm=False)[0]
    assert one.num_cached_tokens == 0 and one.token_ids == answer(prompt(40), greedy(10), weights=5)
    assert_nothing_held(engine)


# What can be seen.


def test_deltas_add_up_to_the_result():
    engine, deltas = make_engine(), {}
    prompts = [prompt(10), prompt(40, 1)]
    params = [greedy(20, logprobs=3), seeded(1, 21)]
    results = engine.generate(prompts, params, use_tqdm=False)
    for i in range(2):
        engine.add_request(prompts[i], params[i], request_id=str(i))
    run(engine, deltas)
    for i, result in enumerate(results):
        assert tokens(deltas[str(i)]) == result.token_ids and reason(deltas[str(i)]) == result.finish_reason
        assert len(deltas[str(i)]) > 2
    assert deltas["1"][0].logprobs is None and results[1].logprobs is None
    given = [one for delta in deltas["0"] for one in delta.logprobs]
    assert given == results[0].logprobs and len(given) == 20
    for token, one in zip(results[0].token_ids, given, strict=True):
        assert one.logprob == pytest.approx(-token / VOCAB) and one.rank == token % 5 + 1
        assert [i for i, _ in one.top] == [token, token + 1, token + 2]


def test_results_say_how_it_went():
    engine = make_engine()
    first, second = (engine.generate([prompt(40)], SamplingParams(max_tokens=9), use_tqdm=False)[0] for _ in range(2))
    assert first.seed != second.seed  # drawn
    assert second.token_ids == answer(prompt(40), SamplingParams(max_tokens=9, seed=second.seed))
    assert (first.num_cached_tokens, second.num_cached_tokens, second.num_preemptions) == (0, 32, 0)
    assert second.prefill_s >= 0 and second.decode_s >= 0
    assert make_engine().generate([prompt(40)], SamplingParams(max_tokens=9), use_tqdm=False)[0].seed == first.seed


def test_generate_takes_priorities_and_salts():
    engine = make_engine()
    results = engine.generate([prompt(40)] * 3, greedy(4), priorities=[1, 0, 2], cache_salts=["a", "", "a"], use_tqdm=False)
    assert [one.token_ids for one in results] == [answer(prompt(40), greedy(4))] * 3
    with pytest.raises(RequestError, match="priorities has 1 entries for 2 prompts"):
        engine.generate([[1], [2]], greedy(4), priorities=[1], use_tqdm=False)
    with pytest.raises(RequestError, match="cache_salts has 1 entries for 2 prompts"):
        engine.generate([[1], [2]], greedy(4), cache_salts=["a"], use_tqdm=False)
    assert_nothing_held(engine)


def test_generate_beside_other_requests_loses_none_of_their_tokens():
    engine, deltas = make_engine(), {}
    engine.add_request(prompt(12), greedy(50), request_id="other")
    for _ in range(3):
        step(engine, deltas)
    assert engine.generate([prompt(20, 1)], greedy(20), use_tqdm=False)[0].token_ids == answer(prompt(20, 1), greedy(20))
    run(engine, deltas)
    assert list(deltas) == ["other"] and tokens(deltas["other"]) == answer(prompt(12), greedy(50))
    assert_nothing_held(engine)


def test_stats_add_up():
    engine, deltas = make_engine(num_kv_blocks=10), {}
    prompts, params = mixed_requests(20)
    for i, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(ids, asked, request_id=str(i))
    before = engine.stats()
    assert (before.num_waiting, before.num_running, before.prefix_hit_rate, before.time_to_first_token_s) == (20, 0, 0.0, None)
    while engine.has_unfinished_requests:
        step(engine, deltas)
        now = engine.stats()
        assert now.num_running + now.num_waiting + now.num_finished == 20
        assert now.num_preempted <= now.num_waiting
        assert now.num_free_blocks + now.num_used_blocks + now.num_cached_blocks == 10
        states = engine.snapshot().blocks
        assert len(states) == 11 and states[0] == "null"
        assert (states.count("free"), states.count("cached")) == (now.num_free_blocks, now.num_cached_blocks)
        assert states.count("used") + states.count("shared") == now.num_used_blocks
        assert now.num_generated_tokens >= sum(len(tokens(one)) for one in deltas.values())
    assert now.num_generated_tokens == sum(len(answer(*both)) for both in zip(prompts, params, strict=True))
    assert now.num_prompt_tokens >= sum(map(len, prompts)) and now.num_preemptions > 0
    assert now.prefix_hit_rate == now.num_cached_tokens / now.num_prompt_tokens > 0
    assert now.num_dispatches == engine._runner.num_dispatches > now.num_windows + now.num_mixed_steps
    assert now.num_compilations == engine._runner.num_compilations > 0
    assert now.tokens_per_s > 0 and now.time_to_first_token_s > 0 and now.time_per_token_s > 0
    assert now.table_bytes > 0


def test_bytes_of_tables_follow_the_buckets():
    engine = make_engine(window=8)
    engine.generate([prompt(10)], greedy(1 + 16), use_tqdm=False)
    # A mixed step of 8 decode rows and 1 chunk (16 tokens), then two windows of 1 row; 4 columns, and a number for each decode row.
    assert engine.stats().table_bytes == 4 * (8 * 4 + 8 + 1 * 4) + 2 * 4 * (4 + 1)


def test_a_log_line_for_each_request(caplog):
    engine = make_engine()
    with caplog.at_level(logging.DEBUG, "pagedjax.engine"):
        engine.add_request(prompt(33), greedy(9), request_id="seen")
        run(engine)
        engine.add_request(prompt(33), greedy(9), request_id="gone")
        engine.abort("gone")
    lines = [record.getMessage() for record in caplog.records if record.name == "pagedjax.engine"]
    assert len(lines) == 2
    assert lines[0].startswith("request_id=seen reason=length prompt_tokens=33 cached_tokens=0 new_tokens=9 preemptions=0 first_token_s=0.")
    assert lines[1].startswith(
        "request_id=gone reason=abort prompt_tokens=33 cached_tokens=0 new_tokens=0 preemptions=0 first_token_s=none"
    )


class EndsAtOnce(StubRunner):
    """Gives token 0 to whoever asks: the host's work alone is left."""

    def _write(self, step, table, position, ids):
        pass

    def _next(self, step, table, num_tokens, settings):
        return 0


def test_a_long_queue_is_worked_off_in_order():
    """Lengths of queues are no time limit here; see the benchmark for those."""
    engine = make_engine(runner=EndsAtOnce, enable_prefix_caching=False)
    num = 2000
    for i in range(num):
        engine.add_request([i % VOCAB], greedy(1), request_id=str(i))
    order = []
    while engine.has_unfinished_requests:
        order += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert order == [str(i) for i in range(num)]
    assert_nothing_held(engine)


# Who comes between two steps.


def test_any_text_is_a_salt():
    engine = make_engine(num_kv_blocks=20)
    good = engine.add_request(prompt(20), greedy(5))
    engine.add_request(prompt(20), greedy(5), cache_salt="\ud800")
    assert finish(engine)[good] == "length"


def test_an_id_is_taken_until_step_has_said_that_it_ended():
    engine = make_engine(num_kv_blocks=20)
    first = engine.add_request(prompt(4), greedy(5), request_id="0")
    engine.abort(first)
    with pytest.raises(RequestError, match="request_id '0' is in use"):
        engine.add_request(prompt(4), greedy(5), request_id="0")
    (got,) = engine.generate([prompt(4)], greedy(5), use_tqdm=False)
    assert got.finish_reason == "length" and got.request_id != "0"
    assert [(d.request_id, d.finish_reason) for d in engine.step()] == [("0", "abort")]
    assert engine.add_request(prompt(4), greedy(5), request_id="0") == "0"


def test_deltas_can_be_given_back():
    engine = make_engine(num_kv_blocks=20)
    name = engine.add_request(prompt(4), greedy(1))
    while not (deltas := engine.step()):
        pass
    engine.give_back(deltas)
    assert engine.has_unfinished_requests
    with pytest.raises(RequestError, match="in use"):
        engine.add_request(prompt(4), greedy(1), request_id=name)
    assert engine.step() == deltas
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("where", ["engine_inputs", "_give"])
def test_an_interrupt_anywhere_in_a_step_leaves_no_request_half_served(monkeypatch, where):
    import pagedjax.engine as module

    engine = make_engine(num_kv_blocks=40)
    names = [engine.add_request(prompt(6, i), greedy(30)) for i in range(2)]
    calls = []
    target, attribute = (module, "engine_inputs") if where == "engine_inputs" else (engine, "_give")
    real = getattr(target, attribute)

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(target, attribute, interrupted)
    reasons = {}
    with pytest.raises(KeyboardInterrupt):
        finish(engine, reasons)
    finish(engine, reasons)
    assert set(reasons) == set(names) and set(reasons.values()) <= {"error", "length"} and "error" in reasons.values()
    assert engine.stats().num_used_blocks == 0
    (after,) = engine.generate([prompt(6)], greedy(10), use_tqdm=False)
    assert after.token_ids == answer(prompt(6), greedy(10))


def finish(engine, reasons=None):
    """Step to the end; the finish reason of each request that ended meanwhile, also put into `reasons` as they come."""
    reasons = {} if reasons is None else reasons
    while engine.has_unfinished_requests:
        for delta in engine.step():
            if delta.finish_reason is not None:
                reasons[delta.request_id] = delta.finish_reason
    return reasons


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.abort(5), RequestError, "request_id is 5; it must be a text or several"),
        (lambda e: e.generate([[1]], None), RequestError, "sampling_params is None; it must be one for each prompt"),
        (lambda e: e.generate([[1]], greedy(3), priorities=3), RequestError, "priorities is 3; it must be one for each prompt"),
        (lambda e: SamplingParams(temperature=10**400), RequestError, "temperature is 1000.*; it must be a finite number"),
        (lambda e: Engine(None, e.config), ConfigError, "params is None; without weights"),
        (lambda e: Engine(None, e.config, runner=StubRunner, eos_token_ids=None), ConfigError, "eos_token_ids is None"),
        (lambda e: Engine(None, e.config, runner=StubRunner, seed=-1), ConfigError, "seed is -1; it must be 0 or more"),
        (lambda e: Engine(None, e.config, EngineConfig(implementation="nope"), runner=StubRunner), ConfigError, "implementation is 'nope'"),
    ],
)
def test_what_is_no_argument_is_refused_by_name(call, error, message):
    engine = make_engine(num_kv_blocks=20)
    with pytest.raises(error, match=message):
        call(engine)
    assert engine.generate([prompt(4)], greedy(3), use_tqdm=False)[0].finish_reason == "length"
