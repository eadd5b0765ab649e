"""The engine over the demo model in float32: exact token ids, whoever runs beside them and however little room there is.

All engines here have the same sizes, so that they share what was compiled: a mixed step and a window for each pool, and a window of 1.
"""

import pytest

from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig
from pagedjax.request import SamplingParams

SETTINGS = dict(
    max_num_seqs=4,
    max_model_len=64,
    block_size=8,
    num_kv_blocks=64,
    token_budget=32,
    window=8,
    row_buckets=(4,),
    mixed_row_buckets=(4,),
    token_buckets=(32,),
    width_buckets=(8,),
    max_logprobs=0,
)
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had never caught a single fish. One day",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "Water boils at",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had never caught a single fish. But",
]
LIMITS = (24, 20, 30, 28, 16, 24)
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=limit)
    if i % 2 == 0
    else SamplingParams(
        temperature=(0.6, 0.8, 1.0)[i // 2], top_k=(0, 40, 50)[i // 2], top_p=(0.9, 1.0, 0.95)[i // 2], seed=i, max_tokens=limit
    )
    for i, limit in enumerate(LIMITS)
]


@pytest.fixture(scope="module")
def make(llm):
    def engine(**settings):
        return Engine(llm.params, llm.config, EngineConfig(**SETTINGS | settings))

    return engine


@pytest.fixture(scope="module")
def prompts(llm):
    return [llm.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def alone(make, prompts):
    """Each prompt in an engine of its own."""
    answers = []
    for one, asked in zip(prompts, ASKED, strict=True):
        engine = make(enable_prefix_caching=False)
        answers += run(engine, [one], [asked])
        assert engine.stats().num_mixed_steps == 0
    return answers


def run(engine, prompts, asked=ASKED):
    results = engine.generate(prompts, asked, use_tqdm=False)
    assert engine.stats().num_used_blocks == 0
    return [(one.token_ids, one.finish_reason) for one in results]


def test_a_batch_equals_each_alone(make, prompts, alone, llm):
    engine = make()
    assert run(engine, prompts) == alone
    stats = engine.stats()
    assert stats.num_mixed_steps > 0 and stats.num_windows > 0 and stats.num_cached_tokens > 0
    assert "Paris" in llm.tokenizer.decode(alone[0][0])
    assert len({tuple(tokens) for tokens, _ in alone}) == len(alone)


def test_cold_equals_hot(make, prompts, alone):
    engine = make()
    run(engine, prompts)
    cold = engine.stats().num_cached_tokens
    assert run(engine, prompts) == alone
    assert engine.stats().num_cached_tokens - cold == sum((len(one) - 1) // 8 * 8 for one in prompts) > 0


def test_chunked_equals_whole_in_any_order(make, prompts, alone):
    engine = make()
    # A step has room for 32 tokens in any case, so that nothing is compiled anew; the scheduler gives it fewer.
    engine._scheduler._token_budget = 9
    assert run(engine, prompts[::-1], ASKED[::-1]) == alone[::-1]
    assert engine.stats().num_mixed_steps >= 4  # and 2 with whole prompts


def test_a_window_of_one_equals_a_window_of_eight(make, prompts, alone):
    engine = make(window=1)
    assert run(engine, prompts) == alone
    assert engine.stats().num_windows == 0


def test_a_tiny_pool_equals_an_ample_one(make, prompts, alone):
    engine = make(num_kv_blocks=8)
    assert engine.max_model_len == 64
    assert run(engine, prompts) == alone
    assert engine.stats().num_preemptions >= 3
