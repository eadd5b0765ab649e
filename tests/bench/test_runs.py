"""Measured runs on a tiny engine: what they count, and what they refuse to call a measurement."""

import dataclasses

import jax
import pytest

from pagedjax.bench.roofline import Limits
from pagedjax.bench.runs import latency, throughput
from pagedjax.bench.shapes import shape_config
from pagedjax.bench.workload import uniform
from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.params import init_params

LIMITS = Limits(1e9, 1e10)


@pytest.fixture(scope="module")
def engine():
    config = shape_config("tiny")
    settings = EngineConfig(
        max_num_seqs=4,
        max_model_len=256,
        num_kv_blocks=64,
        token_budget=64,
        row_buckets=(4,),
        mixed_row_buckets=(4,),
        token_buckets=(64,),
        width_buckets=(16,),
    )
    return Engine(init_params(config, jax.random.key(0)), config, settings)


def test_throughput_counts_all_runs_but_the_first(engine):
    calls, seeds = [], []

    def make(seed):
        seeds.append(seed)
        return uniform(3, 20, 10, 512, seed)

    before = engine.stats()
    record = throughput(engine, make, LIMITS, repeats=2, settings={"temperature": 0.5}, progress=lambda: calls.append(None))
    after = engine.stats()
    assert len(calls) == 3 and set(seeds) == {0, 1, 2}
    assert after.num_generated_tokens - before.num_generated_tokens == 3 * 30
    assert (record["workload"], record["prompt_tokens"], record["output_tokens"]) == ("3 x 20 + 10", 60, 30)
    low, high = sorted(record["tokens_per_s_all"])
    assert record["tokens_per_s"] == pytest.approx((low + high) / 2)
    assert record["spread"] == pytest.approx((high - low) / record["tokens_per_s"])
    assert record["padding"] == pytest.approx(1 - 60 / 64)
    assert record["fraction_of_roofline"] == pytest.approx(record["floor_s"] * record["tokens_per_s"] / 30)
    assert record["limit"] == pytest.approx(30 / record["floor_s"])
    # The first token comes before the last; the host's time is part of the call's.
    call_us = 30 / low * 1e6
    assert 0 < record["first_token_ms"] * 1e3 < call_us and 0 < record["host_us_per_token"] * 30 < call_us
    assert record["host_us_per_dispatch"] > record["host_us_per_token"]
    assert record["first_run_s"] > 0
    assert "limit" not in throughput(engine, lambda seed: make(100 + seed), None, repeats=1)


def test_prompts_that_are_found_again_are_no_measurement(engine):
    with pytest.raises(ConfigError, match=r"3 x 40 \+ 2: a prompt was found in the prefix cache"):
        throughput(engine, lambda seed: uniform(3, 40, 2, 512, 77), None)


def test_an_answer_that_ends_early_is_no_measurement(engine):
    with pytest.raises(ConfigError, match=r"5 \+ 300: an answer ended with length after 251 tokens"):
        throughput(engine, lambda seed: uniform(1, 5, 300, 512, seed), None)


def test_latency(engine):
    calls = []
    record = latency(engine, 20, 9, LIMITS, repeats=3, progress=lambda: calls.append(None))
    assert len(calls) == 4 and record["workload"] == "1 x 20 + 9"
    for name in ("first_token_ms", "per_token_ms"):
        assert 0 < record[name] <= record[f"{name}_p95"] <= record[f"{name}_p99"]
        assert record[name.replace("_ms", "_floor_ms")] > 0
    with pytest.raises(ConfigError, match="an answer has 251 tokens; 300 were asked for"):
        latency(engine, 5, 300, None, repeats=1)


def test_the_engine_counts_its_time_and_its_padding(engine):
    before = engine.stats()
    engine.generate(uniform(2, 50, 6, 512, 5).prompts, uniform(2, 50, 6, 512, 5).sampling_params(), use_tqdm=False)
    after = engine.stats()
    # A budget of 64: the prompts' 100 tokens take two steps of 64.
    assert after.num_prefill_tokens - before.num_prefill_tokens == 100
    assert after.num_padded_prefill_tokens - before.num_padded_prefill_tokens == 128
    assert 0 <= after.wait_s - before.wait_s < after.step_s - before.step_s
    assert dataclasses.asdict(after)["step_s"] == after.step_s
