"""Paged decode attention: one query token a row, keys and values behind a block table."""

from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from pallas_kernels._attention import AttentionOptions, attention_options, check_array, check_heads, run_differentiable
from pallas_kernels._dispatch import Op, current_device
from pallas_kernels.kv_layout import Pool, describe_pools

OP = Op(
    name="paged_attention",
    modules={
        "reference": "pallas_kernels.paged_attention.reference",
        "pallas_triton": "pallas_kernels.paged_attention.pallas_triton",
        "pallas_triton_interpret": "pallas_kernels.paged_attention.pallas_triton",
        "mosaic_gpu": "pallas_kernels.paged_attention.mosaic_gpu",
        "jax_triton": "pallas_kernels.paged_attention.jax_triton",
    },
    preference=("mosaic_gpu", "pallas_triton", "reference"),
)


@dataclass(frozen=True)
class DecodeProblem:
    """Static description of one call."""

    num_rows: int  # B
    num_heads: int  # N
    table_width: int  # M
    pool: Pool
    options: AttentionOptions

    @property
    def group(self) -> int:
        """Query heads per key/value head, G."""
        return self.num_heads // self.pool.num_kv_heads


@overload
def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one query token a row over the row's cached tokens.

    Args:
        q: ``[B, N, H]`` queries, of the pools' dtype.
        k_pool: ``[P, K, Z, H]`` keys, bfloat16, float16 or float32; ``N`` is a multiple of ``K``.
        v_pool: ``[P, K, Z, H]`` values.
        block_tables: ``int32[B, M]``, the physical block of each logical block. Entries that the context does not reach
            may name any block, the null block by convention.
        context_lens: ``int32[B]``, how many tokens each row attends to, the query's own included; at most ``M * Z``.
        scale: factor on the logits; ``H ** -0.5`` by default.
        sliding_window: attend to the last ``sliding_window`` tokens of the context only.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
        return_lse: also return the natural logarithm of the softmax's denominator.
        implementation: a name runs or raises; ``None`` picks the fastest that serves these shapes here.

    Returns:
        ``[B, N, H]`` in q's dtype, or that and ``float32[B, N]``. A row of context 0 gives exactly 0 and ``-inf``. Cells
        that the context does not reach may hold anything, NaN included.

    Raises:
        ValueError: the arguments do not fit together, or there is no implementation of that name.
        NotImplementedError: the named implementation does not run here; the message says why.
    """
    problem = describe(
        q, k_pool, v_pool, block_tables, context_lens, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, return_lse=return_lse
    )
    name = OP.resolve(implementation, problem, current_device())
    arrays = (jnp.asarray(x) for x in (q, k_pool, v_pool, block_tables, context_lens))
    if problem.num_rows == 0:
        out = jnp.zeros(q.shape, q.dtype)
        return (out, jnp.zeros(q.shape[:2], jnp.float32)) if return_lse else out
    out, lse = run_differentiable(OP, name, problem, *arrays)
    return out if lse is None else (out, lse)


def describe(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> DecodeProblem:
    """Validate a call (arrays, or anything with ``shape`` and ``dtype``) and describe it.

    Raises:
        ValueError: naming both values that do not fit together.
    """
    pool = describe_pools(k_pool, v_pool)
    check_array("q", q, "B N H", pool.dtype, H=pool.head_size)
    rows, heads, _ = q.shape
    check_heads(heads, pool.num_kv_heads)
    check_array("block_tables", block_tables, "B M", "int32", B=rows)
    check_array("context_lens", context_lens, "B", "int32", B=rows)
    if block_tables.shape[1] < 1:
        raise ValueError(f"block_tables must have at least one column, got shape {tuple(block_tables.shape)}")
    options = attention_options(pool.head_size, scale, sliding_window, soft_cap, return_lse)
    return DecodeProblem(rows, heads, block_tables.shape[1], pool, options)
