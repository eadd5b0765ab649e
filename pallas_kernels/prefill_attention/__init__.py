"""Paged prefill attention: ragged rows packed end to end, each causal against its own paged context.

First chunks, later chunks and prefix hits differ only in how far ``context_lens`` stands ahead of the row's number of
queries.
"""

from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from pallas_kernels._attention import AttentionOptions, attention_options, check_array, check_heads, run_differentiable
from pallas_kernels._dispatch import Op, current_device
from pallas_kernels.kv_layout import Pool, describe_pools

OP = Op(
    name="paged_prefill_attention",
    modules={
        "reference": "pallas_kernels.prefill_attention.reference",
        "pallas_triton": "pallas_kernels.prefill_attention.pallas_triton",
        "pallas_triton_interpret": "pallas_kernels.prefill_attention.pallas_triton",
        "mosaic_gpu": "pallas_kernels.prefill_attention.mosaic_gpu",
    },
    preference=("mosaic_gpu", "pallas_triton", "reference"),
)


@dataclass(frozen=True)
class PrefillProblem:
    """Static description of one call."""

    num_tokens: int  # T
    num_rows: int  # C
    num_heads: int  # N
    table_width: int  # M
    pool: Pool
    options: AttentionOptions

    @property
    def group(self) -> int:
        """Query heads per key/value head, G."""
        return self.num_heads // self.pool.num_kv_heads


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
    """Causal attention of packed query tokens over a paged KV cache that already holds this step's keys and values.

    Row ``c`` owns queries ``query_start_loc[c]:query_start_loc[c + 1]``; its last query stands at position
    ``context_lens[c] - 1``, and every query sees the keys of its row at its own position and before. Cells that no row
    owns, or that all its queries' sliding windows have left behind, may hold anything, NaN included. A row's result does
    not depend on the rows beside it. Differentiable in ``q``, ``k_pool`` and ``v_pool``.

    Args:
        q: ``[T, N, H]`` queries, of the pools' dtype; tokens from ``query_start_loc[-1]`` on are pads.
        k_pool: ``[P, K, Z, H]`` keys, bfloat16, float16 or float32; ``N`` is a multiple of ``K``.
        v_pool: ``[P, K, Z, H]`` values.
        block_tables: ``int32[C, M]``, the physical block of each logical block. Entries that the context does not reach,
            or that the sliding windows have left behind, may name any block, the null block by convention.
        query_start_loc: ``int32[C + 1]``, ascending from 0 and at most ``T``; equal neighbours are a row without queries.
        context_lens: ``int32[C]``, how many tokens each row holds, its queries included; at most ``M * Z``, and read as
            that if it is more.
        scale: factor on the logits; ``H ** -0.5`` by default.
        sliding_window: a query sees itself and the ``sliding_window - 1`` tokens before it.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
        return_lse: also return the natural logarithm of the softmax's denominator.
        implementation: a name runs or raises; ``None`` picks the fastest that serves these shapes here.

    Returns:
        ``[T, N, H]`` in q's dtype, or that and ``float32[T, N]``. Pads and queries without keys give exactly 0 and ``-inf``.

    Raises:
        ValueError: the arguments do not fit together, or there is no implementation of that name.
        NotImplementedError: the named implementation does not run here; the message says why.
    """
    problem = describe(
        q,
        k_pool,
        v_pool,
        block_tables,
        query_start_loc,
        context_lens,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        return_lse=return_lse,
    )
    name = OP.resolve(implementation, problem, current_device())
    lens = jnp.minimum(jnp.asarray(context_lens), problem.table_width * problem.pool.block_size)  # no kernel reads past a table
    arrays = (*(jnp.asarray(x) for x in (q, k_pool, v_pool, block_tables, query_start_loc)), lens)
    if problem.num_tokens == 0 or problem.num_rows == 0:
        out = jnp.zeros(q.shape, q.dtype)
        return (out, jnp.full(q.shape[:2], -jnp.inf, jnp.float32)) if return_lse else out
    out, lse = run_differentiable(OP, name, problem, *arrays)
    return out if lse is None else (out, lse)


def describe(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_tables: Any,
    query_start_loc: Any,
    context_lens: Any,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> PrefillProblem:
    """Validate a call (arrays, or anything with ``shape`` and ``dtype``) and describe it.

    Raises:
        ValueError: naming both values that do not fit together.
    """
    pool = describe_pools(k_pool, v_pool)
    check_array("q", q, "T N H", pool.dtype, H=pool.head_size)
    tokens, heads, _ = q.shape
    check_heads(heads, pool.num_kv_heads)
    check_array("block_tables", block_tables, "C M", "int32")
    rows, width = block_tables.shape
    if width < 1:
        raise ValueError(f"block_tables must have at least one column, got shape {tuple(block_tables.shape)}")
    check_array("context_lens", context_lens, "C", "int32", C=rows)
    check_array("query_start_loc", query_start_loc, "C1", "int32", C1=rows + 1)
    options = attention_options(pool.head_size, scale, sliding_window, soft_cap, return_lse)
    return PrefillProblem(tokens, rows, heads, width, pool, options)
