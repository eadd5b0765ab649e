"""The Triton kernels compile for an H200 without one, and XLA adds no copy of a pool around them."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Adjustments, paged_attention, sample_tokens, token_logprobs, write_kv
from tests.kernels.h200 import compile_for_h200, lower_for_h200, needs_compiler

pytestmark = [
    needs_compiler,
    # JAX announces since 0.11 that Pallas will drop this lowering: the reason why each op has another backend too.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
P, Z, M, B = 4096, 16, 128, 8


def shape(*dims, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_size", "block_size", "dtype", "options"),
    [
        (4, 8, 64, 16, jnp.bfloat16, {}),
        (4, 8, 128, 8, jnp.bfloat16, {"return_lse": True}),
        (3, 2, 80, 32, jnp.float16, {"sliding_window": 100, "soft_cap": 30.0}),
        (16, 1, 256, 128, jnp.bfloat16, {}),
        (1, 4, 96, 16, jnp.float32, {"soft_cap": 30.0}),
    ],
)
def test_decode(group, kv_heads, head_size, block_size, dtype, options):
    q, pool = shape(B, group * kv_heads, head_size, dtype=dtype), shape(P, kv_heads, block_size, head_size, dtype=dtype)
    attend = functools.partial(paged_attention, implementation="pallas_triton", **options)
    compiled = compile_for_h200(attend, q, pool, pool, shape(B, M), shape(B))
    # Partial results of at most 64 splits in float32; a copied pool would be 4096 * Z / (64 * G) times as large or more.
    assert compiled.memory_analysis().temp_size_in_bytes <= 64 * 4 * B * group * kv_heads * (head_size + 1) + 4096


def test_rows_that_are_never_split_take_one_kernel():
    q, pool = shape(B, 32, 64, dtype=jnp.bfloat16), shape(P, 8, Z, 64, dtype=jnp.bfloat16)
    attend = functools.partial(paged_attention, implementation="pallas_triton")
    for width, kernels in ((16, 1), (512, 2)):
        text = compile_for_h200(attend, q, pool, pool, shape(B, width), shape(B)).as_text()
        assert text.count("custom-call(") == kernels


@pytest.mark.parametrize(("tokens", "kv_heads", "head_size", "dtype"), [(256, 8, 128, jnp.bfloat16), (8192, 3, 80, jnp.float32)])
def test_write_kv_is_in_place(tokens, kv_heads, head_size, dtype):
    pool, new = shape(P, kv_heads, Z, head_size, dtype=dtype), shape(tokens, kv_heads, head_size, dtype=dtype)
    write = functools.partial(write_kv, implementation="pallas_triton")
    compiled = compile_for_h200(write, pool, pool, new, new, shape(tokens), donate_argnums=(0, 1))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * P * kv_heads * Z * head_size * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes == 0


def test_more_layers_lower_no_more_kernels():
    q, pool = shape(B, 32, 64, dtype=jnp.bfloat16), shape(P, 8, Z, 64, dtype=jnp.bfloat16)

    def layers(q, pools, table, lens):
        for k_pool, v_pool in pools:
            q = paged_attention(q, k_pool, v_pool, table, lens, implementation="pallas_triton")
        return q

    def kernels(num_layers):
        text = lower_for_h200(layers, q, ((pool, pool),) * num_layers, shape(B, M), shape(B)).as_text()
        return text.count("stablehlo.custom_call @__gpu$xla.gpu.triton")

    assert kernels(6) == kernels(3)


def compile_sampling(rows, vocab, vocab_size, adjusted, num_top=None):
    """Compiles one of the sampling kernels."""
    logits, some, other = shape(rows, vocab, dtype=jnp.float32), shape(rows, dtype=jnp.float32), shape(rows)
    options = {"vocab_size": vocab_size, "implementation": "pallas_triton"}
    if num_top is not None:
        report = functools.partial(token_logprobs, num_top=num_top, **options)
        return compile_for_h200(report, logits, other, shape(rows, dtype=jnp.bool_))
    tables = shape(rows, vocab, dtype=jnp.float32), shape(rows, vocab)
    adjust = Adjustments(other, other, *tables, some, some, some, shape(rows, 16)) if adjusted else None

    def sample(*arrays):
        return sample_tokens(*arrays[:6], adjust=arrays[6], **options)

    return compile_for_h200(sample, logits, shape(rows, 2, dtype=jnp.uint32), some, other, some, some, adjust)


SAMPLING = [(256, 128256, 128256, False), (256, 128256, 128000, True), (8, 49152, 49152, True), (1, 100, 97, False)]
REPORTS = [(256, 128256, 128000, False, 20), (1, 100, 97, False, 0)]


def test_sampling():
    for case in SAMPLING:
        rows, vocab, _, adjusted = case
        # Of rows that are adjusted there is a copy; nothing else, least of all a sorted vocabulary.
        assert compile_sampling(*case).memory_analysis().temp_size_in_bytes <= 4 * rows * vocab * adjusted + 4096
    for case in REPORTS:
        assert compile_sampling(*case).memory_analysis().temp_size_in_bytes <= 2 * 4 * 32 * case[0] + 4096


def test_compiling_sampling_reads_no_freed_memory():
    """Triton's layout pass does that in some kernels with a while loop, and sometimes lives: filled with junk, the memory ends it."""
    code = f"""
import warnings
warnings.simplefilter("ignore")
from tests.kernels.test_compile_for_h200 import compile_sampling
for case in {SAMPLING + REPORTS}:
    compile_sampling(*case)
    print("compiled")
"""
    environment = os.environ | {"MALLOC_PERTURB_": "165", "JAX_PLATFORMS": "cpu"}
    root = pathlib.Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root, check=False)
    assert (result.returncode, result.stdout.split()) == (0, ["compiled"] * len(SAMPLING + REPORTS)), result.stderr[-2000:]
