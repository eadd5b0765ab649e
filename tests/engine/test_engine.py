"""The engine over a real model, tiny and random: a ladder of equalities, exact ids in float32, and what its compiled steps cost.

All engines here have the same few sizes, so that they share what was compiled.
"""

import dataclasses
import re
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType

import pagedjax.engine as engine_module
import pagedjax.runner as runner_module
from pagedjax import generate
from pagedjax.allocator import BlockAllocator
from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig, make_buckets
from pagedjax.errors import ConfigError
from pagedjax.generation import Run
from pagedjax.inputs import WindowInputs
from pagedjax.kv_cache import make_cache
from pagedjax.params import MESH_AXIS, declare, sharding_of
from pagedjax.request import SamplingParams, make_request
from pagedjax.runner import warmup_inputs
from pagedjax.sampling import Sampler
from tests.helpers import dense_greedy, prompt, tiny_params, variant

MODEL = variant(vocab_size=98)  # even, so that two devices can share it
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
TINY_POOL = 16  # blocks: one request of the model's whole length

SHARED = prompt(40, 100)
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 70)
PROMPTS = [prompt(n, seed=i) for i, n in enumerate(LENGTHS)] + [SHARED[:n] + prompt(5, n) for n in (16, 33, 40, 40)]
LIMITS = (40, 3, 29, 17, 64, 33, 50, 21, 30, 45, 1, 37)
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=limit, logprobs=3)
    if i % 2 == 0
    else SamplingParams(
        temperature=(0.7, 1.5, 3.0)[i % 3], top_k=(0, 5, 20, 1)[i // 2 % 4], top_p=(1.0, 0.9, 0.5)[i // 3 % 3], seed=i, max_tokens=limit
    )
    for i, limit in enumerate(LIMITS)
]


class Shuffled(BlockAllocator):
    """Gives blocks out in an order that no row would notice unless it forgot the table."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self._free = deque(int(i) for i in np.random.default_rng(0).permutation(self._free))


@pytest.fixture(scope="module", autouse=True)
def scattered_blocks_among_nan():
    """Every engine here has its blocks in random order, and a cache that holds NaN wherever nothing was written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "BlockAllocator", Shuffled)
        patch.setattr(runner_module, "make_cache", lambda *args: jax.tree.map(lambda pool: pool + jnp.nan, make_cache(*args)))
        yield


@pytest.fixture(scope="module")
def params():
    return tiny_params(MODEL)


@pytest.fixture(scope="module")
def want(params):
    """What `generate()` gives, whose cache is another one: `GeneratedRow`s."""
    requests = [
        make_request(ids, asked, eos_ids=(), vocab_size=98, max_model_len=256, default_seed=0)
        for ids, asked in zip(PROMPTS, ASKED, strict=True)
    ]
    return Run(params, MODEL, requests).finish()


@pytest.fixture
def make(params):
    def engine(weights=params, **settings):
        return Engine(weights, MODEL, EngineConfig(**SETTINGS | settings))

    return engine


def run(engine, prompts=PROMPTS, asked=ASKED):
    results = engine.generate(prompts, asked, use_tqdm=False)
    assert all(one.finish_reason == "length" and one.error is None for one in results)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    return results


def ids(results):
    return [one.token_ids for one in results]


# Equalities.


def test_the_reference_is_the_dense_one(params, want):
    """Where these tests start from: greedy rows follow the dense model, seeded ones do not."""
    for index in (0, 6, 8):
        assert want[index].token_ids[:20] == dense_greedy(params, PROMPTS[index], 20, MODEL)
    assert want[1].token_ids != dense_greedy(params, PROMPTS[1], 3, MODEL)
    assert [len(row.token_ids) for row in want] == list(LIMITS)


def test_batch_equals_generate_and_so_do_logprobs(make, want):
    engine = make()
    results = run(engine)
    assert ids(results) == [row.token_ids for row in want]
    for one, row in zip(results, want, strict=True):
        assert (one.logprobs is None) == (row.logprobs is None)
        for got, expected in zip(one.logprobs or (), row.logprobs or (), strict=True):
            # Logits of up to about 30 in float32.
            assert got.logprob == pytest.approx(expected.logprob, abs=64 * 2**-23 * 32)
            assert got.rank == expected.rank and [i for i, _ in got.top] == [i for i, _ in expected.top]
            assert [p for _, p in got.top] == pytest.approx([p for _, p in expected.top], abs=64 * 2**-23 * 32)
    assert sum(one.logprobs is not None for one in results) == 6 and len(results[0].logprobs[0].top) == 3
    stats = engine.stats()
    assert stats.num_mixed_steps > 0 and stats.num_windows > 0 and stats.num_cached_tokens > 0


@pytest.mark.parametrize("asked", [dict(temperature=0.0), dict(temperature=1.5, top_k=20, top_p=0.9, seed=7)], ids=["greedy", "seeded"])
def test_equals_the_function_generate(make, params, asked):
    got = run(make(), PROMPTS, [SamplingParams(max_tokens=limit, **asked) for limit in LIMITS])
    assert ids(got) == generate(params, MODEL, PROMPTS, LIMITS, logprobs=3, **asked).token_ids


def test_batch_equals_alone(make, want):
    for one, asked, row in zip(PROMPTS, ASKED, want, strict=True):
        assert ids(run(make(), [one], [asked])) == [row.token_ids]


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_admission(make, want, seed):
    order = np.random.default_rng(seed).permutation(len(PROMPTS)).tolist()
    got = run(make(), [PROMPTS[i] for i in order], [ASKED[i] for i in order])
    assert ids(got) == [want[i].token_ids for i in order]


def test_arrivals_between_steps(make, want):
    engine, got = make(), {str(i): [] for i in range(len(PROMPTS))}

    def step():
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids

    for i in np.random.default_rng(5).permutation(len(PROMPTS)):
        engine.add_request(PROMPTS[i], ASKED[i], request_id=str(i), priority=int(i) % 3)
        for _ in range(2):
            step()
    while engine.has_unfinished_requests:
        step()
    assert list(got.values()) == [row.token_ids for row in want]
    assert engine.stats().num_mixed_steps > 5


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("token_budget", [1, 7, 64, 2048])
def test_any_token_budget(make, want, token_budget, prefix_caching):
    engine = make(token_budget=token_budget, enable_prefix_caching=prefix_caching)
    assert ids(run(engine)) == [row.token_ids for row in want]
    stats = engine.stats()
    assert stats.num_dispatches >= sum(map(len, PROMPTS)) // token_budget - stats.num_cached_tokens
    assert (stats.num_mixed_steps > 0) == (token_budget > 1)
    assert (stats.num_cached_tokens > 0) == prefix_caching or token_budget == 2048  # where all prompts start at once


def test_a_tiny_pool_equals_an_ample_one(make):
    longer = [dataclasses.replace(asked, max_tokens=80) for asked in ASKED[:8]]
    ample, tiny = make(), make(num_kv_blocks=TINY_POOL)
    want = run(ample, PROMPTS[:8], longer)
    got = run(tiny, PROMPTS[:8], longer)
    assert ids(got) == ids(want)
    assert ample.stats().num_preemptions == 0
    assert 3 <= tiny.stats().num_preemptions == sum(one.num_preemptions for one in got) <= 4 * 8


def test_cold_equals_hot(make, want):
    engine = make()
    cold = run(engine)
    hot = run(engine)
    assert ids(cold) == ids(hot) == [row.token_ids for row in want]
    assert [one.num_cached_tokens for one in hot] == [(len(one) - 1) // 16 * 16 for one in PROMPTS]


def test_a_prefix_that_others_hold(make, want):
    """The second request reads blocks that the first one still uses, and that it goes on from."""
    engine, got = make(), {"a": [], "b": []}
    engine.add_request(PROMPTS[10], dataclasses.replace(ASKED[9], max_tokens=60), request_id="a")
    for _ in range(3):
        engine.step()
    engine.add_request(PROMPTS[11], ASKED[11], request_id="b")
    shared = 0
    while engine.has_unfinished_requests:
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids
        shared = max(shared, engine.snapshot().blocks.count("shared"))
    assert got["b"] == want[11].token_ids
    assert shared == 2


def test_a_hash_that_says_nothing(params, want):
    engine = Engine(params, MODEL, EngineConfig(**SETTINGS), hasher=lambda parent, tokens: b"same")
    for _ in range(2):
        assert ids(run(engine)) == [row.token_ids for row in want]
    assert engine.stats().num_cached_tokens > 0


def test_a_window_of_one_equals_a_window_of_eight(make, want):
    engines = [make(window=window) for window in (1, 8)]
    assert [ids(run(engine)) for engine in engines] == [[row.token_ids for row in want]] * 2
    assert engines[0].stats().num_windows == 0 and engines[1].stats().num_windows > 0
    assert engines[0].stats().num_dispatches > 4 * engines[1].stats().num_dispatches


@pytest.mark.parametrize("at", [1, 7, 8, 9, 11, 16, 20])
def test_end_tokens(params, make, want, at):
    """The first token comes from the prompt's step; token 8 + i is inner step i of the second window."""
    ends = (want[4].token_ids[at], 97)
    got = {}
    for window in (1, 8):
        engine = Engine(params, MODEL, EngineConfig(**SETTINGS | {"window": window}), eos_token_ids=ends)
        results = engine.generate(PROMPTS, ASKED, use_tqdm=False)
        got[window] = [(one.token_ids, one.finish_reason) for one in results]
        # Every block that is known now holds what it should: prompts that go on from the answers find them, and give the same again.
        longer = [one.prompt_token_ids + one.token_ids + [3, 5] for one in results]
        greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        hot = run(engine, longer, greedy)
        assert any(again.num_cached_tokens > len(one.prompt_token_ids) for again, one in zip(hot, results, strict=True))
        assert ids(hot) == ids(run(make(enable_prefix_caching=False), longer, greedy))
    assert got[1] == got[8]
    stopped = 0
    for (tokens, reason), row in zip(got[8], want, strict=True):
        first = next((i for i, token in enumerate(row.token_ids) if token in ends), None)
        assert tokens == (row.token_ids if first is None else row.token_ids[: first + 1])
        assert reason == ("length" if first is None else "stop")
        stopped += first is not None
    assert stopped


# Other weights.


def test_update_params(make):
    other = tiny_params(MODEL, seed=1)
    engine, got = make(), {str(i): [] for i in range(len(PROMPTS))}
    for i in range(6):
        engine.add_request(PROMPTS[i], ASKED[i], request_id=str(i))
    while len(got["5"]) < 9:
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids
    engine.update_params(other)
    for delta in engine.step():  # what the old weights had given already
        got[delta.request_id] += delta.token_ids
    given = {name: list(tokens) for name, tokens in got.items()}
    assert engine.stats().num_preemptions >= 3
    for i in range(6, len(PROMPTS)):
        engine.add_request(PROMPTS[i], ASKED[i], request_id=str(i))
    while engine.has_unfinished_requests:
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids
    fresh = make(other)
    new = run(fresh)
    changed = 0
    for i, (one, asked) in enumerate(zip(PROMPTS, ASKED, strict=True)):
        tokens, before = got[str(i)], given[str(i)]
        if i >= 6:
            assert tokens == new[i].token_ids
        elif len(before) < LIMITS[i]:
            # The rest is what the new weights give after the prompt and the tokens given out.
            rest = run(make(other), [one + before], [dataclasses.replace(asked, max_tokens=LIMITS[i] - len(before))])[0].token_ids
            assert tokens == before + rest
            changed += len(before) > 0
    assert changed >= 3
    # Blocks of the new weights are found, those of the old ones are not: equal answers, and hits.
    hot = run(engine)
    assert ids(hot) == ids(new) and sum(one.num_cached_tokens for one in hot) > 0


def test_update_params_refuses_other_shapes(make, want):
    engine = make()
    got = {str(i): [] for i in range(3)}
    for i in range(3):
        engine.add_request(PROMPTS[i], ASKED[i], request_id=str(i))
    for delta in (*engine.step(), *engine.step()):
        got[delta.request_id] += delta.token_ids

    def other(**changes):
        return jax.eval_shape(lambda: tiny_params(dataclasses.replace(MODEL, **changes)))  # shapes alone are looked at

    embedding = rf"embedding is float32\[98, 16\]; the engine runs with float32\[98, {MODEL.hidden_size}\]"
    with pytest.raises(ConfigError, match=f"update_params: {embedding}"):
        engine.update_params(other(hidden_size=16))
    with pytest.raises(ConfigError, match=r"update_params: .* is bfloat16\[.*; the engine runs with float32"):
        engine.update_params(other(dtype="bfloat16"))
    with pytest.raises(ConfigError, match="update_params: these are weights of another architecture"):
        engine.update_params(other(attention_bias=True))
    while engine.has_unfinished_requests:
        for delta in engine.step():
            got[delta.request_id] += delta.token_ids
    assert list(got.values()) == [want[i].token_ids for i in range(3)]
    assert engine.stats().num_preemptions == 0


# When a step fails.


@pytest.mark.parametrize("lost", [False, True])
def test_a_step_that_fails_on_the_device(make, want, monkeypatch, caplog, lost):
    """A step that fails after it was given the cache has taken it along."""
    engine = make()
    runner, calls = engine._runner, []
    true_run = runner._run

    def fails_once(inputs):
        calls.append(inputs)
        if len(calls) == 4:
            if lost:
                for leaf in jax.tree.leaves((runner._cache, runner._state)):
                    leaf.delete()
            raise RuntimeError("the device has gone")
        return true_run(inputs)

    monkeypatch.setattr(runner, "_run", fails_once)
    results = engine.generate(PROMPTS, ASKED, use_tqdm=False)
    failed = [one for one in results if one.finish_reason == "error"]
    assert 0 < len(failed) < len(PROMPTS)
    assert {one.error for one in failed} == {"a step failed: RuntimeError: the device has gone"}
    assert "the device has gone" in caplog.text
    for one, row in zip(results, want, strict=True):
        assert one.token_ids == row.token_ids if one not in failed else one.token_ids == row.token_ids[: len(one.token_ids)]
    assert ids(run(engine)) == [row.token_ids for row in want]


# Compiled once.


def test_after_warmup_nothing_is_compiled(make, tmp_path):
    engine = make(row_buckets=(2, 8), token_buckets=(16, 64), num_kv_blocks=TINY_POOL)
    before = jax.config.jax_compilation_cache_dir
    engine.warmup(cache_dir=tmp_path, use_tqdm=False)
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()  # the other tests compile for themselves
    assert engine.buckets.num_executables == 6
    assert engine.stats().num_compilations > 0  # no other engine here has a window of 2 rows
    compiled = []
    watching = [True]

    def listen(event, duration, **kwargs):
        if watching[0] and "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    before = engine.stats()
    random = np.random.default_rng(0)
    sent = {}
    aborted = 0
    for i in range(200):
        asked = SamplingParams(
            temperature=float(random.choice([0.0, 0.5, 2.0])),
            top_k=int(random.integers(-1, 50)),
            top_p=float(random.uniform(0.05, 1.0)),
            seed=None if random.random() < 0.3 else int(random.integers(2**32)),
            max_tokens=None if random.random() < 0.05 else int(random.integers(1, 40)),
            stop_token_ids=tuple(int(t) for t in random.integers(0, 98, random.integers(0, 12))),
            ignore_eos=bool(random.integers(0, 2)),
            logprobs=None if random.random() < 0.6 else int(random.integers(0, 5)),
        )
        start = SHARED[: random.integers(0, 40)] if i % 4 == 0 else []
        name = engine.add_request(
            start + prompt(int(random.integers(1, 150)), i), asked, priority=int(random.integers(0, 3)), cache_salt="ab"[i % 2]
        )
        sent[name] = None
        for _ in range(random.integers(0, 3)):
            for delta in engine.step():
                sent[delta.request_id] = delta.finish_reason
        if i % 25 == 0:
            engine.abort(name)
            aborted += 1
    while engine.has_unfinished_requests:
        for delta in engine.step():
            sent[delta.request_id] = delta.finish_reason
    watching[0] = False
    after = engine.stats()
    assert after.num_compilations == before.num_compilations
    assert compiled == []
    assert {reason: list(sent.values()).count(reason) for reason in set(sent.values())}.keys() == {"stop", "length", "abort"}
    assert list(sent.values()).count("abort") == aborted and len(sent) == 200
    assert after.num_preemptions > 0 and after.num_cached_tokens > 0 and after.num_windows > 0 and after.num_mixed_steps > 0
    watching[0] = True
    jax.jit(lambda x: x * 3 + 1)(np.ones(3, np.float32))
    watching[0] = False
    assert compiled  # the listener would have heard it


# What a step costs in memory.


def compiled_steps(num_blocks):
    """Every size of step compiled for a pool of this many blocks, with the bytes of that pool."""
    settings = EngineConfig(**SETTINGS)
    buckets = make_buckets(settings, 256, "cpu")
    cache = make_cache(MODEL, num_blocks, 16)
    state = runner_module._new_state(MODEL, settings)
    jitted, steps = runner_module.jitted_steps(MODEL, None, 4, None, 8, Sampler()), {}
    for _, inputs in warmup_inputs(buckets, settings):
        args = (tiny_params(MODEL), cache, state, inputs)
        if isinstance(inputs, WindowInputs):
            steps["window"] = jitted.window.lower(*args).compile()
        else:
            steps["mixed" if inputs.prompt is None else "prompt log-probabilities"] = jitted.mixed.lower(*args).compile()
    return steps, sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_the_whole_cache_is_aliased_and_nothing_grows_with_it():
    small, small_bytes = compiled_steps(32)
    large, large_bytes = compiled_steps(1024)
    assert set(small) == {"window", "mixed", "prompt log-probabilities"} and large_bytes > 10 * small_bytes
    for name in small:
        assert small[name].memory_analysis().alias_size_in_bytes >= small_bytes
        assert large[name].memory_analysis().alias_size_in_bytes >= large_bytes
        assert large[name].memory_analysis().temp_size_in_bytes == small[name].memory_analysis().temp_size_in_bytes
    shapes = {tuple(sorted(leaf.shape)) for leaf in jax.tree.leaves(tiny_params(MODEL)) if leaf.ndim > 1}
    for step in large.values():
        moved = re.findall(r"= f32\[([\d,]+)\]\{[\d,]*\} (?:copy|transpose)\(", step.as_text())
        assert not {tuple(sorted(map(int, shape.split(",")))) for shape in moved} & shapes  # no weight is copied or transposed


def test_cache_and_state_are_given_from_step_to_step(make):
    engine = make()
    before = jax.tree.leaves((engine._runner._cache, engine._runner._state))
    run(engine, PROMPTS[:2], ASKED[:2])
    assert all(leaf.is_deleted() for leaf in before)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((engine._runner._cache, engine._runner._params)))


# Two devices.


def test_sharded_equals_unsharded(params, want):
    if jax.device_count() < 2:
        # The CPU always has two here (tests/conftest.py), unless XLA_FLAGS says otherwise: then this must not pass unseen.
        (pytest.fail if jax.default_backend() == "cpu" else pytest.skip)("needs two devices")
    mesh = jax.make_mesh((2,), (MESH_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    shards = jax.tree.map(lambda weight, value: jax.device_put(value, sharding_of(weight, mesh)), declare(MODEL), params)
    engine = Engine(shards, MODEL, EngineConfig(**SETTINGS), mesh)
    assert ids(run(engine)) == [row.token_ids for row in want]
    assert ids(run(engine)) == [row.token_ids for row in want]
    assert engine.stats().num_cached_tokens > 0 and engine.stats().num_mixed_steps > 0
    pool = engine._runner._cache.keys[0]
    assert {shard.data.shape[1] for shard in pool.addressable_shards} == {1} and len(pool.addressable_shards) == 2
