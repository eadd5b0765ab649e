"""`rope_write_kv` in Pallas, Triton lowering: one program a token and KV head, the pools aliased from input to output."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Device
from pallas_kernels.rope_kv import RopeProblem

_MAX_NUMBERS = 1 << 14  # queries of one KV head, padded: what one program holds in registers


def why_not(problem: RopeProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Needs a CUDA device of compute capability 8.0 or the interpreter."""
    if not interpret:
        if device.platform != "gpu" or device.compute_capability is None:
            return "it needs an NVIDIA GPU; 'pallas_triton_interpret' runs the same kernel slowly in Pallas's interpreter"
        if device.compute_capability < (8, 0):
            return "it needs compute capability 8.0 (Ampere) or newer; 'reference' runs on any device"
    if problem is not None and (numbers := _pad(problem.group) * _pad(problem.pool.head_size)) > _MAX_NUMBERS:
        return f"it serves up to {_MAX_NUMBERS} numbers in the queries of a KV head, got {numbers}; 'reference' serves any"
    return None


def _pad(n: int) -> int:
    return 1 << (n - 1).bit_length()


def run(
    problem: RopeProblem,
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    slot_mapping: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.rope_write_kv``."""
    pool, group = problem.pool, problem.group
    # The interpreter clamps indices out of range before it looks at a store's mask, and needs no powers of two: no padding there.
    tile = (group, pool.head_size) if interpret else (_pad(group), _pad(pool.head_size))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    q, k_pool, v_pool = pl.pallas_call(
        functools.partial(_kernel, problem=problem, tile=tile),
        name="rope_write_kv",
        grid=(pool.num_kv_heads, problem.num_tokens),
        in_specs=[anywhere] * 6,
        out_specs=[anywhere] * 3,
        out_shape=[
            jax.ShapeDtypeStruct((problem.num_tokens, pool.num_kv_heads * group, pool.head_size), k_pool.dtype),
            jax.ShapeDtypeStruct(k_pool.shape, k_pool.dtype),
            jax.ShapeDtypeStruct(v_pool.shape, v_pool.dtype),
        ],
        input_output_aliases={3: 1, 4: 2},
        compiler_params=plt.CompilerParams(num_warps=max(1, min(4, tile[0] * tile[1] // 128)), num_stages=1),
        interpret=interpret,
    )(qkv, cos, sin, k_pool, v_pool, slot_mapping)
    return q, k_pool, v_pool


def _kernel(
    qkv_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    k_in: Any,
    v_in: Any,
    slot_ref: Any,
    q_out: Any,
    k_out: Any,
    v_out: Any,
    *,
    problem: RopeProblem,
    tile: tuple[int, int],
) -> None:
    del k_in, v_in  # the same memory as the outputs
    pool, group = problem.pool, problem.group
    head, token = pl.program_id(0), pl.program_id(1)
    half = pool.head_size // 2
    g, d = jnp.arange(tile[0], dtype=jnp.int32)[:, None], jnp.arange(tile[1], dtype=jnp.int32)
    there = d < pool.head_size
    # A number and the one in the other half turn together; the second half's partner comes with its sign, the first half's against it.
    partner = jnp.where(d < half, d + half, d - half)
    cos = plt.load(cos_ref.at[token, d], mask=there, other=0).astype(jnp.float32)
    sin = plt.load(sin_ref.at[token, d], mask=there, other=0).astype(jnp.float32)
    sin = jnp.where(d < half, -sin, sin)

    def load(at: Any, lane: jax.Array, mask: jax.Array) -> jax.Array:
        return plt.load(qkv_ref.at[token, head, at, lane], mask=mask, other=0).astype(jnp.float32)

    live = (g < group) & there[None, :]
    q = load(g, d[None, :], live) * cos[None, :] + load(g, partner[None, :], live) * sin[None, :]
    plt.store(q_out.at[token, head * group + g, d[None, :]], q.astype(q_out.dtype), mask=live)

    slot = plt.load(slot_ref.at[token])

    @pl.when((slot >= pool.block_size) & (lax.div(slot, jnp.int32(pool.block_size)) < pool.num_physical_blocks))
    def _() -> None:
        block, offset = lax.div(slot, jnp.int32(pool.block_size)), slot & (pool.block_size - 1)
        key, value = jnp.full(d.shape, group, jnp.int32), jnp.full(d.shape, group + 1, jnp.int32)
        k = load(key, d, there) * cos + load(key, partner, there) * sin
        plt.store(k_out.at[block, head, offset, d], k.astype(k_out.dtype), mask=there)
        plt.store(v_out.at[block, head, offset, d], plt.load(qkv_ref.at[token, head, value, d], mask=there, other=0), mask=there)
