"""Write keys and values in Pallas, Triton lowering: one program a token, the pools aliased from input to output."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Device
from pallas_kernels.kv_write import WriteProblem

_MAX_NUMBERS = 1 << 16  # K * H of one token, padded: what one program holds in registers


def why_not(problem: WriteProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Needs a CUDA device of compute capability 8.0 or the interpreter."""
    if not interpret:
        if device.platform != "gpu" or device.compute_capability is None:
            return "it needs an NVIDIA GPU; 'pallas_triton_interpret' runs the same kernel slowly in Pallas's interpreter"
        if device.compute_capability < (8, 0):
            return "it needs compute capability 8.0 (Ampere) or newer; 'reference' runs on any device"
    if problem is not None and (numbers := _pad(problem.pool.num_kv_heads) * _pad(problem.pool.head_size)) > _MAX_NUMBERS:
        return f"it serves up to {_MAX_NUMBERS} numbers per token (heads times head size), got {numbers}; 'reference' serves any"
    return None


def _pad(n: int) -> int:
    return 1 << (n - 1).bit_length()


def run(
    problem: WriteProblem, k_pool: jax.Array, v_pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.write_kv``."""
    heads, head_size = problem.pool.num_kv_heads, problem.pool.head_size
    # The interpreter clamps indices out of range before it looks at a store's mask, and needs no powers of two: no padding there.
    tile = (heads, head_size) if interpret else (_pad(heads), _pad(head_size))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        functools.partial(_write, problem=problem, tile=tile),
        name="write_kv",
        grid=(problem.num_tokens,),
        in_specs=[anywhere] * 5,
        out_specs=[anywhere] * 2,
        out_shape=[jax.ShapeDtypeStruct(k_pool.shape, k_pool.dtype), jax.ShapeDtypeStruct(v_pool.shape, v_pool.dtype)],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=max(1, min(8, tile[0] * tile[1] // 256)), num_stages=1),
        interpret=interpret,
    )(k_pool, v_pool, k, v, slot_mapping)
    return written[0], written[1]


def _write(
    k_in: Any, v_in: Any, k_ref: Any, v_ref: Any, slot_ref: Any, k_out: Any, v_out: Any, *, problem: WriteProblem, tile: tuple[int, int]
) -> None:
    del k_in, v_in  # the same memory as the outputs
    pool = problem.pool
    token = pl.program_id(0)
    slot = plt.load(slot_ref.at[token])

    @pl.when((slot >= pool.block_size) & (lax.div(slot, jnp.int32(pool.block_size)) < pool.num_physical_blocks))
    def _() -> None:
        block, offset = lax.div(slot, jnp.int32(pool.block_size)), slot & (pool.block_size - 1)
        head = jnp.arange(tile[0], dtype=jnp.int32)[:, None]
        lane = jnp.arange(tile[1], dtype=jnp.int32)[None, :]
        mask = (head < pool.num_kv_heads) & (lane < pool.head_size)
        for source, target in ((k_ref, k_out), (v_ref, v_out)):
            plt.store(target.at[block, head, offset, lane], plt.load(source.at[token, head, lane], mask=mask), mask=mask)
