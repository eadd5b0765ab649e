"""Write keys and values by XLA's scatter, which XLA does in place when the pool is donated."""

import jax
import jax.numpy as jnp

from pallas_kernels._dispatch import Device
from pallas_kernels.kv_write import WriteProblem


def why_not(problem: WriteProblem | None, device: Device, *, interpret: bool) -> str | None:
    """It runs everywhere."""
    return None


def run(
    problem: WriteProblem, k_pool: jax.Array, v_pool: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See ``pallas_kernels.write_kv``."""
    block_size, num_blocks = problem.pool.block_size, problem.pool.num_physical_blocks
    # A scatter drops what is out of range, so that is where the slots of the null block go (a negative block would wrap).
    block = jnp.where(slot_mapping < block_size, num_blocks, slot_mapping // block_size)
    offset = slot_mapping % block_size

    def write(pool: jax.Array, new: jax.Array) -> jax.Array:
        return pool.at[block, :, offset].set(new, mode="drop")

    return write(k_pool, k), write(v_pool, v)
