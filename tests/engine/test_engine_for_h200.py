"""The engine's steps, compiled for an H200 without one: the cache is updated in place and nothing beside it grows with the pool."""

import collections
import functools

import jax
import pytest

from pagedjax.engine_config import EngineConfig, make_buckets
from pagedjax.engine_step import decode_window, mixed_step
from pagedjax.inputs import WindowInputs
from pagedjax.kv_cache import make_cache
from pagedjax.runner import _new_state, warmup_inputs
from tests.helpers import tiny_params, variant
from tests.kernels.h200 import compile_for_h200, needs_compiler

pytestmark = [needs_compiler, pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")]
# Two layers of a Llama-3.2-1B with a small vocabulary.
MODEL = variant(
    vocab_size=512,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    max_model_len=2048,
    dtype="bfloat16",
    tie_word_embeddings=True,
)
SETTINGS = EngineConfig(max_num_seqs=64, token_budget=512)


@functools.cache
def compiled(kind, num_blocks):
    buckets = make_buckets(SETTINGS, MODEL.max_model_len, "gpu")
    steps = dict(warmup_inputs(buckets, SETTINGS))
    windows = {len(inputs.state_ids): inputs for inputs in steps.values() if isinstance(inputs, WindowInputs)}
    mixed = next(inputs for inputs in steps.values() if not isinstance(inputs, WindowInputs))
    inputs = mixed if kind == "mixed" else windows[8 if kind == "fused" else 64]
    params, cache, state = jax.eval_shape(lambda: (tiny_params(MODEL), make_cache(MODEL, num_blocks), _new_state(MODEL, SETTINGS)))
    if kind != "mixed":
        rows = 8 if kind == "fused" else 0
        step = functools.partial(decode_window, config=MODEL, num_logprobs=SETTINGS.max_logprobs, num_steps=8, window=8, fused_rows=rows)
    else:
        step = functools.partial(mixed_step, config=MODEL, num_logprobs=SETTINGS.max_logprobs)
    # Without a device XLA cannot choose among the tilings of its own Triton matmuls; cuBLAS has a default.
    options = {"xla_gpu_enable_triton_gemm": False}
    return compile_for_h200(step, params, cache, state, inputs, donate_argnums=(1, 2), compiler_options=options)


@pytest.mark.parametrize("kind", ["window", "fused", "mixed"])
def test_the_cache_is_updated_in_place(kind):
    small, large = compiled(kind, 2000), compiled(kind, 8000)
    block = MODEL.kv_bytes_per_token * 16
    for step, num_blocks in ((small, 2001), (large, 8001)):
        assert step.memory_analysis().alias_size_in_bytes >= num_blocks * block
    assert large.memory_analysis().temp_size_in_bytes == small.memory_analysis().temp_size_in_bytes


def test_a_fused_step_is_six_kernels_a_layer():
    """And those of the output head and the sampler, and a few of XLA's for embedding, angles and the rows' state."""
    calls = [line for line in compiled("fused", 2000).as_text().splitlines() if "custom-call(" in line]
    of = collections.Counter(
        name for line in calls for name in ("skinny_matmul", "rope_write_kv", "paged_attention", "cublas") if name in line
    )
    assert of == {"skinny_matmul": 4 * MODEL.num_layers + 1, "rope_write_kv": MODEL.num_layers, "paged_attention": MODEL.num_layers}
