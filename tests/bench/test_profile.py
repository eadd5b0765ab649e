"""From kernels on a timeline to microseconds a step."""

import jax
import pytest

from pagedjax.bench.profile import kernel_kind, profile_decode, profile_prefill, summarize
from pagedjax.bench.shapes import shape_config
from pagedjax.cli.bench import kernel_records
from pagedjax.engine import Engine
from pagedjax.engine_config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.params import init_params


def step(start):
    """100 us, of which the last 10 the sampler's; 8 idle."""
    return [
        (start, 40.0, "loop_add_fusion_12"),
        (start + 43, 20.0, "loop_add_fusion_7_0"),
        (start + 63, 20.0, "paged_attention_mosaic"),
        (start + 78, 7.0, "on_another_stream"),  # 2 of them on its own
        (start + 90, 10.0, "sample_tokens"),
    ]


def test_whole_steps_count():
    events = [(-3.0, 1.0, "MemcpyH2D"), *step(0), *step(100), *step(260), (360.0, 900.0, "loop_add_fusion_1")]
    profile = summarize(events)
    # From the end of the first step to the end of the last: two steps and a pause of 60.
    assert (profile.num_steps, profile.us_per_step) == (2, 130.0)
    assert profile.idle_share == pytest.approx((60 + 2 * 8) / 260)
    assert profile.pause_share == pytest.approx(60 / 260)  # gaps of 3 and 5 us are the kernels' own
    assert [(k.name, k.calls_per_step, k.us_per_step) for k in profile.kernels] == [
        ("loop_add_fusion", 2, 60),
        ("paged_attention_mosaic", 1, 20),
        ("sample_tokens", 1, 10),
        ("on_another_stream", 1, 7),
    ]
    assert sum(k.share for k in profile.kernels) == pytest.approx(1)
    whole, *each = kernel_records("decode", profile)
    assert (whole["kernel"], whole["us_per_step"], whole["step"], "kernels" in whole) == ("all", 130.0, "decode", False)
    assert [record["kernel"] for record in each] == [k.name for k in profile.kernels]


@pytest.mark.parametrize("events", [[], step(0)])
def test_one_step_is_nothing_to_measure_between(events):
    with pytest.raises(ConfigError, match=rf"the profile has {len(events) // 5} kernels named sample_tokens, .* at least 2"):
        summarize(events)


@pytest.mark.parametrize(
    ("name", "kind"), [("fusion.3", "fusion"), ("loop_add_fusion_12_0", "loop_add_fusion"), ("nvjet_tst_64x8_h_bz", "nvjet_tst_64x8_h_bz")]
)
def test_kinds_of_kernels(name, kind):
    assert kernel_kind(name) == kind


@pytest.fixture(scope="module")
def engine():
    config = shape_config("tiny")
    settings = EngineConfig(
        max_num_seqs=4, num_kv_blocks=128, row_buckets=(4,), mixed_row_buckets=(4,), token_buckets=(64,), width_buckets=(16,)
    )
    return Engine(init_params(config, jax.random.key(0)), config, settings)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has a profile")
@pytest.mark.parametrize("profile", [profile_decode, profile_prefill])
def test_a_profile_without_kernels_says_so_and_leaves_the_engine_empty(engine, profile):
    with pytest.raises(ConfigError, match="the profile has 0 kernels named sample_tokens"):
        profile(engine, 3, 12)
    assert not engine.has_unfinished_requests


@pytest.mark.gpu
def test_a_decode_step_on_a_gpu(engine):
    profile = profile_decode(engine, 3, 12)
    window = engine.engine_config.window
    assert profile.num_steps >= 4 * window
    names = {k.name: k.calls_per_step for k in profile.kernels}
    assert sum(calls for name, calls in names.items() if "sample_tokens" in name) == 1
    assert profile_prefill(engine, 4, 32).num_steps >= 1
