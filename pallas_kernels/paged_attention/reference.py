"""Paged decode attention in plain XLA, float32 inside: what the kernels are compared with, and the CPU's own path."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._dispatch import Device
from pallas_kernels.kv_layout import gather_blocks
from pallas_kernels.paged_attention import DecodeProblem


def why_not(problem: DecodeProblem | None, device: Device, *, interpret: bool) -> str | None:
    """It runs everywhere."""
    return None


def run(
    problem: DecodeProblem,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``pallas_kernels.paged_attention``. Gathers every block of the table, so its cost follows ``M``, not the contexts."""
    options, pool = problem.options, problem.pool
    rows, heads, head_size = q.shape
    position = jnp.arange(problem.table_width * pool.block_size, dtype=jnp.int32)[None, :]
    seen = position < context_lens[:, None]
    if options.sliding_window is not None:
        seen &= position >= context_lens[:, None] - options.sliding_window

    def dense(pool: jax.Array) -> jax.Array:
        # Both are masked: a weight of 0 times NaN is NaN, in the output (values) and in q's gradient (keys).
        return jnp.where(seen[:, None, :, None], gather_blocks(pool, block_tables), 0).astype(jnp.float32)

    grouped = jnp.where((context_lens > 0)[:, None, None], q, 0).astype(jnp.float32) * options.scale
    grouped = grouped.reshape(rows, pool.num_kv_heads, problem.group, head_size)
    logits = jnp.einsum("bkgh,bksh->bkgs", grouped, dense(k_pool), precision=lax.Precision.HIGHEST)
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    logits = jnp.where(seen[:, None, None, :], logits, -jnp.inf)
    # The maximum only keeps exp in range, the result does not depend on it: no gradient through it. 0 for rows that see nothing.
    top = lax.stop_gradient(logits.max(-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    some = total > 0
    safe_total = jnp.where(some, total, 1)
    out = jnp.einsum("bkgs,bksh->bkgh", weights, dense(v_pool), precision=lax.Precision.HIGHEST) / safe_total
    out = out.reshape(rows, heads, head_size).astype(q.dtype)
    if not options.return_lse:
        return out, None
    return out, jnp.where(some, top + jnp.log(safe_total), -jnp.inf).reshape(rows, heads)
