"""`rope_write_kv` in plain XLA, float32 inside."""

import jax
import jax.numpy as jnp

from pallas_kernels._dispatch import Device
from pallas_kernels.kv_write import WriteProblem
from pallas_kernels.kv_write import reference as write_reference
from pallas_kernels.rope_kv import RopeProblem


def why_not(problem: RopeProblem | None, device: Device, *, interpret: bool) -> str | None:
    """It runs everywhere."""
    return None


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
    tokens, kv_heads, _, head_size = qkv.shape
    x = qkv[:, :, : problem.group + 1].astype(jnp.float32)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = (angle.astype(jnp.float32)[:, None, None] for angle in (cos, sin))
    turned = (x * cos + jnp.concatenate([-second, first], axis=-1) * sin).astype(qkv.dtype)
    write = WriteProblem(tokens, problem.pool)
    k, v = turned[:, :, problem.group], qkv[:, :, problem.group + 1]
    k_pool, v_pool = write_reference.run(write, k_pool, v_pool, k, v, slot_mapping, interpret=interpret)
    return turned[:, :, : problem.group].reshape(tokens, kv_heads * problem.group, head_size), k_pool, v_pool
