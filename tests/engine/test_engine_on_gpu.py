"""The engine on a GPU, a tiny random model in float32: exact ids whatever runs beside a request, nothing compiled late, memory as asked.

The model has heads of 64, so that the steps run the kernels of real models. Every matmul of the model and of the dense reference asks for
full float32 itself (`layers.linear`, `tests.helpers`), so TF32 needs no switching off here.
"""

import gc

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pagedjax.engine import Engine, xla_memory_fraction
from pagedjax.engine_config import EngineConfig, kv_block_bytes
from pagedjax.errors import ConfigError
from pagedjax.request import SamplingParams
from tests.helpers import dense_greedy, prompt, tiny_params, variant

pytestmark = [
    pytest.mark.gpu,
    # JAX announces since 0.11 that Pallas will drop this lowering: the reason why each op has another backend too.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
MODEL = variant(vocab_size=98, head_size=64)
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
PROMPTS = [prompt(n, seed=n) for n in (1, 15, 16, 17, 33, 70)] + [SHARED[:n] + prompt(5, n) for n in (16, 33, 40, 40)]
LIMITS = (80, 70, 90, 61, 75, 65, 85, 55, 72, 77)
ASKED = [
    dict(temperature=0.0, logprobs=3),
    dict(temperature=0.7, top_k=20, top_p=0.9, seed=1),
    dict(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
    dict(temperature=1.5, top_k=80, top_p=0.8, seed=3, logprobs=1),  # more than the kernel takes id by id
    dict(temperature=1.0, seed=4),
    dict(temperature=1.2, min_p=0.1, frequency_penalty=0.7, seed=5),
    dict(temperature=0.0, logit_bias={7: 5.0, 11: -100.0}, bad_words_token_ids=[[3], [5, 9]]),
    dict(temperature=0.9, top_p=0.5, allowed_token_ids=list(range(0, 98, 2)), seed=7),
    dict(temperature=0.0, stop_token_ids=(96,), min_tokens=20),
    dict(temperature=3.0, top_p=0.95, repetition_penalty=0.8, seed=9),
]
PARAMS = [SamplingParams(max_tokens=limit, **asked) for limit, asked in zip(LIMITS, ASKED, strict=True)]


@pytest.fixture(scope="module")
def params():
    return tiny_params(MODEL)


@pytest.fixture(scope="module")
def make(params):
    def engine(**settings):
        return Engine(params, MODEL, EngineConfig(**SETTINGS | settings))

    return engine


@pytest.fixture(scope="module")
def want(make):
    """Ids of each request, all of them together in an ample pool."""
    engine = make()
    got = run(engine)
    stats = engine.stats()
    assert stats.num_mixed_steps > 0 and stats.num_windows > 0 and stats.num_preemptions == 0
    return got


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """A persistent compilation cache that is gone, JAX's settings included, when the test is over."""
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    yield tmp_path / "xla"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def run(engine, prompts=PROMPTS, asked=PARAMS):
    results = engine.generate(prompts, asked, use_tqdm=False)
    assert all(one.finish_reason in ("length", "stop") and one.error is None for one in results), [one.error for one in results]
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    return [one.token_ids for one in results]


def test_greedy_rows_follow_the_dense_model(params, want):
    """Where these tests start from: the other equalities would hold for a wrong model, too."""
    assert want[0][:20] == dense_greedy(params, PROMPTS[0], 20, MODEL)
    asked = SamplingParams(temperature=0.0, max_tokens=12)
    engine = Engine(params, MODEL, EngineConfig(**SETTINGS))
    assert run(engine, PROMPTS[5:7], [asked] * 2) == [dense_greedy(params, one, 12, MODEL) for one in PROMPTS[5:7]]


def test_batch_equals_alone(make, want):
    engine = make(row_buckets=(1, 8), enable_prefix_caching=False)  # one row is another compiled window, with other matmuls
    assert [run(engine, [one], [asked])[0] for one, asked in zip(PROMPTS, PARAMS, strict=True)] == want
    assert engine.stats().num_mixed_steps == 0 and engine.stats().num_windows > 0


def test_any_order_of_admission(make, want):
    order = np.random.default_rng(0).permutation(len(PROMPTS)).tolist()
    assert run(make(), [PROMPTS[i] for i in order], [PARAMS[i] for i in order]) == [want[i] for i in order]


def test_a_window_of_one_equals_a_window_of_eight(make, want):
    engine = make(window=1)
    assert run(engine) == want
    assert engine.stats().num_windows == 0


def test_a_tiny_pool_equals_an_ample_one(make, want):
    engine = make(num_kv_blocks=TINY_POOL)
    assert run(engine) == want
    assert 3 <= engine.stats().num_preemptions <= 4 * len(PROMPTS)


def test_cold_equals_hot(make, want):
    engine = make()
    assert run(engine) == want
    cold = engine.stats().num_cached_tokens
    assert run(engine) == want
    assert engine.stats().num_cached_tokens - cold == sum((len(one) - 1) // 16 * 16 for one in PROMPTS) > 0


def test_after_warmup_nothing_is_compiled(make, want, cache_dir):
    """Neither by the engine nor by anybody on its way."""
    # A pool size that no other engine here has: its steps are compiled by this warm-up.
    engine = make(row_buckets=(1, 8), token_buckets=(16, 64), num_kv_blocks=TINY_POOL + 1)
    engine.warmup(cache_dir=cache_dir, use_tqdm=False)
    before = engine.stats()
    assert engine.buckets.num_executables == 6
    assert before.num_compilations >= 5  # tables are set the same way in every engine here, so that may have been compiled before
    assert any(cache_dir.iterdir())
    compiled, watching = [], [True]

    def listen(event, duration, **kwargs):
        if watching[0] and "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert run(engine, PROMPTS[:1], PARAMS[:1]) == want[:1]
        for _ in range(2):
            assert run(engine) == want
        prompt_logprobs = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
        run(engine, PROMPTS[4:6], [prompt_logprobs] * 2)
        after = engine.stats()
        assert after.num_compilations == before.num_compilations
        assert compiled == []
        jax.jit(lambda x: x * 3 + 1)(np.ones(3, np.float32)).block_until_ready()
        assert compiled  # the listener would have heard it
    finally:
        watching[0] = False
    assert after.num_preemptions > 0 and after.num_cached_tokens > 0 and after.num_windows > 0 and after.num_mixed_steps > 0


@pytest.mark.usefixtures("cache_dir")
def test_the_cache_takes_its_share_of_the_memory_and_no_more():
    """JAX's statistics count what is in use, whether it reserved memory at its start or not."""
    device = jax.devices()[0]
    if not device.memory_stats():
        pytest.skip("this allocator keeps no statistics (XLA_CLIENT_ALLOCATOR=platform, or a CPU)")
    # Large blocks: half of a large GPU in blocks of the tiny model would be millions of them, and the host keeps a list.
    model = variant(vocab_size=98, num_heads=8, num_kv_heads=8, head_size=128)
    params = jax.block_until_ready(tiny_params(model))
    gc.collect()
    before = device.memory_stats()
    total = before["bytes_limit"] / xla_memory_fraction()
    share = min(0.5 * total, before["bytes_limit"])
    with pytest.raises(ConfigError, match="Raise gpu_memory_utilization or XLA_CLIENT_MEM_FRACTION"):
        Engine(params, model, EngineConfig(max_num_seqs=8, gpu_memory_utilization=1e-5))
    engine = Engine(params, model, EngineConfig(max_num_seqs=8, gpu_memory_utilization=0.5))
    jax.block_until_ready(engine._runner._cache)
    after = device.memory_stats()
    pools = (engine.num_kv_blocks + 1) * kv_block_bytes(model, 16, "float32")
    assert pools == sum(leaf.nbytes for leaf in jax.tree.leaves(engine._runner._cache))
    assert pools <= after["bytes_in_use"] - before["bytes_in_use"] <= 1.01 * pools
    assert 0.9 * share < after["bytes_in_use"] <= share
    run(engine, [prompt(200, i) for i in range(8)], [SamplingParams(temperature=0.0, max_tokens=20)] * 8)
    peak = device.memory_stats()["peak_bytes_in_use"]
    assert peak <= max(1.01 * share, before["peak_bytes_in_use"])
