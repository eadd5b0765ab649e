"""Settings of an engine: what is refused, and which padded sizes come of them."""

import math

import pytest

from pagedjax.config import ModelConfig
from pagedjax.engine_config import EngineConfig, at_least, cache_dtype, kv_block_bytes, make_buckets
from pagedjax.errors import ConfigError

LLAMA_1B = ModelConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    max_model_len=131072,
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(max_num_seqs=0), "max_num_seqs is 0; it must be a positive integer"),
        (dict(block_size=24), "block_size is 24; it must be a power of two"),
        (dict(token_budget=-1), "token_budget is -1; it must be a positive integer"),
        (dict(window=True), "window is True; it must be a positive integer"),
        (dict(window=2.0), "window is 2.0; it must be a positive integer"),
        (dict(max_device_stop_ids=0), "max_device_stop_ids is 0; it must be a positive integer"),
        (dict(max_model_len=0), "max_model_len is 0; it must be a positive integer"),
        (dict(num_kv_blocks="9"), "num_kv_blocks is '9'; it must be a positive integer"),
        (dict(kv_cache_bytes=1e9), "kv_cache_bytes is 1000000000.0; it must be a positive integer"),
        (dict(kv_cache_dtype="int8"), "kv_cache_dtype is 'int8'; it must be one of auto, float32, bfloat16, float16"),
        (dict(max_logprobs=65), "max_logprobs is 65; it must be an integer from 0 to 64"),
        (dict(max_logprobs=-1), "max_logprobs is -1; it must be an integer from 0 to 64"),
        (dict(gpu_memory_utilization=0), "gpu_memory_utilization is 0; it must be above 0 and at most 1"),
        (dict(gpu_memory_utilization=1.01), "gpu_memory_utilization is 1.01"),
        (dict(gpu_memory_utilization=math.nan), "gpu_memory_utilization is nan"),
        (dict(gpu_memory_utilization="0.9"), "gpu_memory_utilization is '0.9'"),
        (dict(row_buckets=8), "row_buckets is 8; it must be a tuple of positive integers"),
        (dict(row_buckets=()), r"row_buckets is \(\); it must be a tuple of positive integers, each larger than the one before"),
        (dict(mixed_row_buckets=(4, 4)), r"mixed_row_buckets is \(4, 4\); it must be a tuple of positive integers, each larger"),
        (dict(token_buckets=(16, 8)), r"token_buckets is \(16, 8\)"),
        (dict(width_buckets=(0, 8)), r"width_buckets is \(0, 8\)"),
    ],
)
def test_a_bad_setting_is_named(setting, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**setting)


@pytest.mark.parametrize(("length", "num_executables"), [(131072, 22), (8192, 12), (2048, 12)])
def test_llama_1b_needs_few_executables_on_a_gpu(length, num_executables):
    for rows in (64, 256):
        buckets = make_buckets(EngineConfig(max_num_seqs=rows), length, "gpu")
        assert buckets.num_executables <= 24
    assert buckets.num_executables == num_executables


def test_default_sizes():
    gpu = make_buckets(EngineConfig(), 131072, "gpu")
    assert (gpu.rows, gpu.mixed_rows, gpu.tokens, gpu.widths) == ((1, 8, 32, 64, 128, 256), (32, 256), (256, 2048), (512, 8192))
    cpu = make_buckets(EngineConfig(max_num_seqs=20, token_budget=100), 500, "cpu")
    assert (cpu.rows, cpu.mixed_rows, cpu.tokens, cpu.widths) == ((1, 4, 16, 20), (1, 4, 16, 20), (16, 64, 100), (16, 32))


def test_sizes_that_are_given_are_completed_by_the_largest():
    config = EngineConfig(
        max_num_seqs=6, token_budget=50, row_buckets=(2, 100), mixed_row_buckets=(6,), token_buckets=(32,), width_buckets=(3,)
    )
    buckets = make_buckets(config, 100, "gpu")
    assert (buckets.rows, buckets.mixed_rows, buckets.tokens, buckets.widths) == ((2, 6), (6,), (32, 50), (3, 7))
    assert buckets.num_executables == 2 * (2 + 1 * 2) + 2


def test_chunks_have_room_in_a_step():
    buckets = make_buckets(EngineConfig(max_num_seqs=10, token_budget=1), 100, "cpu")
    assert buckets.tokens == (16,) and buckets.prefill_rows(16) == 1
    buckets = make_buckets(EngineConfig(max_num_seqs=10, token_budget=512), 100, "cpu")
    assert [buckets.prefill_rows(t) for t in buckets.tokens] == [1, 4, 10, 10]
    assert buckets.prefill_size(16, 1) == 16
    assert buckets.prefill_size(17, 1) == 64
    assert buckets.prefill_size(10, 2) == 64  # few tokens, but two chunks
    assert buckets.prefill_size(10, 5) == 256


def test_at_least():
    assert [at_least((1, 4, 16), n) for n in (0, 1, 2, 4, 5, 16)] == [1, 1, 4, 4, 16, 16]


def test_dtype_and_bytes_of_the_cache():
    assert cache_dtype("auto", "bfloat16", "gpu") == "bfloat16"
    assert cache_dtype("auto", "bfloat16", "cpu") == "float32"
    assert cache_dtype("auto", "float16", "cpu") == "float16"
    assert cache_dtype("bfloat16", "float32", "cpu") == "bfloat16"
    assert kv_block_bytes(LLAMA_1B, 1, "bfloat16") == 32_768 == LLAMA_1B.kv_bytes_per_token
    assert kv_block_bytes(LLAMA_1B, 16, "float32") == 16 * 2 * 32_768
