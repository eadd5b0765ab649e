"""Paged prefill attention as one Pallas kernel through the Triton lowering: Ampere and newer, and the interpreter.

Flash attention over the paged cache. One program serves one tile of one row's queries (``tiles``) for one KV head: the
``rows`` of its matmuls are ``rows // G`` tokens times the ``G`` query heads that share the KV head, so that K and V are
read once for all of them and short chunks still fill the tile.

- Block ids of the next key tile are loaded one iteration ahead, through the loop's carry: with ids loaded in the
  body, K and V would wait for them and lose their double buffering.
- Key tiles run from the sliding window's start to the tile's own last query. Only those on a border are masked; the
  masked cells of K and V are not even loaded, so that NaN in cells that nobody owns cannot reach ``0 * V``.
- Programs start with the last tiles, which have the most keys behind them.
- Every row's arithmetic depends on the row alone, to the bit: key tiles start at multiples of ``tile_kv``, and the tile
  sizes do not depend on how much the batch holds.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._attention import AttentionOptions
from pallas_kernels._dispatch import Device
from pallas_kernels.prefill_attention import OP, PrefillProblem
from pallas_kernels.prefill_attention.tiles import num_query_tiles, query_tiles

_FLOOR = -1e30  # start of the running maximum: finite, so that exp2(-inf - maximum) is 0 and never NaN


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How the kernel cuts and runs its work; every field is static."""

    rows: int
    """Rows of the query tile, tokens times grouped heads; a power of two, at least 16."""
    tile_kv: int
    """Keys per loop iteration; a power of two, at least 16."""
    num_warps: int
    num_stages: int


def default_config(problem: PrefillProblem) -> TileConfig:
    """The tile sizes for these static sizes.

    Not a function of the number of tokens or rows, which would let a row's bits depend on its batch. Short rows leave most
    of a wide tile idle; a narrow one would read the same keys.
    """
    least = 1 << (problem.group - 1).bit_length()
    if problem.pool.dtype == "float32":  # true float32 products run on the plain cores, from registers
        return TileConfig(rows=max(32, least), tile_kv=32, num_warps=4, num_stages=2)
    if problem.pool.head_size > 128:
        return TileConfig(rows=max(128, least), tile_kv=32, num_warps=8, num_stages=2)
    return TileConfig(rows=max(128, least), tile_kv=64, num_warps=8, num_stages=3)


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    tiles_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    config: TileConfig,
    group: int,
    options: AttentionOptions,
) -> None:
    scale, sliding_window, soft_cap = options.scale, options.sliding_window, options.soft_cap
    rows, tile_kv = config.rows, config.tile_kv
    block_size, head_size = k_ref.shape[2:]
    lanes = 1 << (head_size - 1).bit_length()
    tokens = rows // group
    f32, i32 = jnp.float32, jnp.int32
    log2_scale = (scale if soft_cap is None else 1.0) * math.log2(math.e)
    precision = lax.Precision.HIGHEST if q_ref.dtype == f32 else None

    kv_head = pl.program_id(0)
    tile = pl.num_programs(1) - 1 - pl.program_id(1)
    row, start, count, position = (plt.load(tiles_ref.at[i * pl.num_programs(1) + tile]) for i in range(4))
    limit = position + count  # keys from here on are nobody's business in this tile
    lower = position - ((sliding_window or 2**30) - 1)  # neither are those before this one

    r = jnp.arange(rows, dtype=i32)
    token, head = lax.div(r, i32(group)), kv_head * group + lax.rem(r, i32(group))
    live = (token < count) & (token < tokens)
    lane = jnp.arange(lanes, dtype=i32)[None, :]
    cell = jnp.arange(tile_kv, dtype=i32)
    query_at = ((start + token)[:, None], head[:, None], lane)
    query_mask = live[:, None] & (lane < head_size)

    def block_ids(i: jax.Array) -> jax.Array:
        key = i * tile_kv + cell
        return plt.load(table_ref.at[row, lax.div(key, i32(block_size))], mask=key < limit, other=0)

    def gather(ref: Any, i: jax.Array, ids: jax.Array, border: bool) -> jax.Array:
        # Indices are all arrays: the interpreter cannot mix them with slices in a masked load.
        at = ref.at[ids[:, None], kv_head, lax.rem(i * tile_kv + cell, i32(block_size))[:, None], lane]
        if border:
            key = i * tile_kv + cell
            seen = (key < limit) & (key >= lower) if sliding_window else key < limit
            return plt.load(at, mask=seen[:, None] & (lane < head_size), other=0.0)
        if lanes != head_size:
            return plt.load(at, mask=jnp.broadcast_to(lane < head_size, (tile_kv, lanes)), other=0.0)
        return plt.load(at)

    def attend() -> None:
        q = plt.load(q_ref.at[query_at], mask=query_mask, other=0.0)

        def step(border: bool, i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ids, acc, top, total = carry
            next_ids = block_ids(i + 1)
            k = gather(k_ref, i, ids, border)
            scores = plt.dot(q, k, trans_b=True, precision=precision)
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores * (scale / soft_cap))
            if border:
                key, query = (i * tile_kv + cell)[None, :], (position + token)[:, None]
                visible = key <= query
                if sliding_window is not None:
                    visible &= key > query - sliding_window
                scores = jnp.where(visible, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1) * log2_scale)
            alpha = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores * log2_scale - new_top[:, None])
            v = gather(v_ref, i, ids, border)
            acc = acc * alpha[:, None] + plt.dot(weights.astype(v.dtype), v, precision=precision)
            return next_ids, acc, new_top, total * alpha + jnp.sum(weights, axis=1)

        end = pl.cdiv(limit, tile_kv)
        first, inner = i32(0), i32(0)
        if sliding_window is not None:
            first = lax.div(jnp.maximum(lower, 0), i32(tile_kv))
            inner = jnp.minimum(pl.cdiv(jnp.maximum(limit - sliding_window, 0), tile_kv), end)
        outer = jnp.maximum(inner, lax.div(jnp.maximum(position + 1, 0), i32(tile_kv)))
        carry = (block_ids(first), jnp.zeros((rows, lanes), f32), jnp.full((rows,), _FLOOR, f32), jnp.zeros((rows,), f32))
        if sliding_window is not None:
            carry = lax.fori_loop(first, inner, functools.partial(step, True), carry)
        carry = lax.fori_loop(inner, outer, functools.partial(step, False), carry)
        _, acc, top, total = lax.fori_loop(outer, end, functools.partial(step, True), carry)

        some = total > 0  # false for a query whose position is negative, and for rows of the tile that are not live
        total = jnp.where(some, total, 1.0)
        plt.store(out_ref.at[query_at], (acc / total[:, None]).astype(out_ref.dtype), mask=query_mask)
        lse = jnp.where(some, (top + jnp.log2(total)) * math.log(2.0), -jnp.inf)
        plt.store(lse_ref.at[start + token, head], lse, mask=live)

    def nothing() -> None:
        plt.store(out_ref.at[query_at], jnp.zeros((rows, lanes), out_ref.dtype), mask=query_mask)
        plt.store(lse_ref.at[start + token, head], jnp.full((rows,), -jnp.inf, f32), mask=live)

    pl.when((count > 0) & (limit > 0))(attend)
    pl.when((count > 0) & (limit <= 0))(nothing)


def why_not(problem: PrefillProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Why this kernel cannot serve the problem there; ``None`` if it can."""
    if not interpret and (device.compute_capability or (0, 0)) < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or newer (pallas_triton_interpret runs the same kernel anywhere)"
    if problem is None:
        return None
    if problem.pool.head_size > 256:
        return f"head sizes up to 256 are supported, got {problem.pool.head_size} (reference takes any)"
    if problem.group > 128:
        return f"up to 128 query heads per key/value head are supported, got {problem.group} (reference takes any)"
    if problem.options.scale <= 0:
        return f"the scale must be positive, got {problem.options.scale} (reference takes any)"
    return None


def run(
    problem: PrefillProblem,
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    context_lens: jax.Array,
    *,
    interpret: bool,
    config: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``pallas_kernels.paged_prefill_attention``."""
    num_tokens, num_heads, head_size = q.shape
    config = config or default_config(problem)
    tokens = config.rows // problem.group
    tiles = query_tiles(query_start_loc, context_lens, num_tokens=num_tokens, tile=tokens)
    # The interpreter clamps the index of a masked store into the array and writes the old value back: room behind the last
    # token keeps that off the live cells.
    room = tokens + 1 if interpret else 0
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, config=config, group=problem.group, options=problem.options),
        grid=(problem.pool.num_kv_heads, num_query_tiles(num_tokens, problem.num_rows, tokens)),
        in_specs=[anywhere] * 5,
        out_specs=[anywhere] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens + room, num_heads, head_size), q.dtype),
            jax.ShapeDtypeStruct((num_tokens + room, num_heads), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        name=f"{OP.name}_triton",
    )(q, k_pool, v_pool, block_tables, jnp.concatenate(tiles))
    if interpret:
        out, lse = out[:num_tokens], lse[:num_tokens]
    return out, lse if problem.options.return_lse else None
