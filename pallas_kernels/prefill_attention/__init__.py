"""Paged prefill attention: ragged rows packed end to end, each causal against its own paged context.

One op, `paged_prefill_attention`. First chunks, later chunks and prefix hits differ only in how far ``context_lens``
stands ahead of the row's number of queries. Backends: ``reference`` (XLA, any platform).
"""

from typing import Literal, overload

import jax
import jax.numpy as jnp

from pallas_kernels.prefill_attention.reference import prefill_attention_reference

__all__ = ["paged_prefill_attention"]

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def _check(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_tables: jax.Array, query_start_loc: jax.Array, context_lens: jax.Array
) -> None:
    """Raises `ValueError` naming both values for arguments that do not fit together."""
    for name, x, letters in (("q", q, "[T, N, H]"), ("k_pool", k_pool, "[P, K, Z, H]"), ("block_tables", block_tables, "[C, M]")):
        if x.ndim != letters.count(",") + 1:
            raise ValueError(f"{name} must be {letters}, got shape {x.shape}")
        if 0 in x.shape:
            raise ValueError(f"{name} must not be empty, got shape {x.shape}")
    if k_pool.shape != v_pool.shape:
        raise ValueError(f"k_pool and v_pool must have one shape, got {k_pool.shape} and {v_pool.shape}")
    if q.shape[2] != k_pool.shape[3]:
        raise ValueError(f"q and k_pool must have one head size, got {q.shape[2]} and {k_pool.shape[3]}")
    if q.shape[1] % k_pool.shape[1]:
        raise ValueError(f"the number of query heads must be a multiple of the number of KV heads, got {q.shape[1]} and {k_pool.shape[1]}")
    if q.dtype not in _FLOATS:
        raise ValueError(f"q must be bfloat16, float16 or float32, got {q.dtype}")
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {pool.dtype}")
    num_rows = block_tables.shape[0]
    for name, x, shape in (("query_start_loc", query_start_loc, (num_rows + 1,)), ("context_lens", context_lens, (num_rows,))):
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape} for block_tables of {num_rows} rows, got {x.shape}")
    for name, x in (("block_tables", block_tables), ("query_start_loc", query_start_loc), ("context_lens", context_lens)):
        if x.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {x.dtype}")


@overload
def paged_prefill_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def paged_prefill_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def paged_prefill_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of packed query tokens over a paged KV cache that already holds this step's K and V.

    Row ``c`` owns queries ``query_start_loc[c]:query_start_loc[c + 1]``; its last query stands at absolute position
    ``context_lens[c] - 1``, and every query sees the keys of its row at its own position and before. Cells that no row
    owns may hold anything, NaN included. Differentiable in ``q``, ``k_pool`` and ``v_pool``.

    Args:
        q: ``[T, N, H]`` bfloat16, float16 or float32; tokens from ``query_start_loc[-1]`` on are pads.
        k_pool: ``[P, K, Z, H]`` in ``q.dtype``, ``N`` a multiple of ``K``.
        v_pool: like ``k_pool``.
        block_tables: i32 ``[C, M]``, physical block of each row's logical blocks; entries behind the context are ignored.
        query_start_loc: i32 ``[C + 1]``, ascending from 0; equal neighbours are a row without queries.
        context_lens: i32 ``[C]``, at least the row's number of queries.
        scale: factor on the logits, ``H ** -0.5`` by default.
        sliding_window: a query sees itself and the ``sliding_window - 1`` tokens before it.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
        return_lse: also return the log-sum-exp of the logits.
        implementation: a backend's name, or `None` for the fastest one that supports these arguments here.

    Returns:
        out ``[T, N, H]`` in ``q.dtype``, 0 for pads; with ``return_lse`` also the natural log-sum-exp f32 ``[T, N]``,
        -inf for pads.

    Raises:
        ValueError: arguments that do not fit together, or an unknown implementation.
    """
    q, k_pool, v_pool = jnp.asarray(q), jnp.asarray(k_pool), jnp.asarray(v_pool)
    block_tables, query_start_loc, context_lens = jnp.asarray(block_tables), jnp.asarray(query_start_loc), jnp.asarray(context_lens)
    _check(q, k_pool, v_pool, block_tables, query_start_loc, context_lens)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    if implementation not in (None, "reference"):
        raise ValueError(f"implementation must be None or one of ('reference',), got {implementation!r}")
    out, lse = prefill_attention_reference(
        q,
        k_pool,
        v_pool,
        block_tables,
        query_start_loc,
        context_lens,
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    return (out, lse) if return_lse else out
