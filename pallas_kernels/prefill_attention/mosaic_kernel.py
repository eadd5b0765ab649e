"""What one CTA of the Mosaic GPU prefill kernel does.

It serves 64 queries of one row for two query heads that share a KV head; where a KV head has an odd number of query
heads, 128 queries for one of them. Its three warpgroups:

- two compute, each with 64 rows of queries: ``S = Q K^T`` and ``O += P V`` by wgmma, P straight from the registers. They
  take turns on the tensor cores (a barrier hands them over), so that one's softmax hides behind the other's products;
- one copies K and V into a ring in shared memory, one TMA copy a block, its four warps a quarter of the tile each, with
  the block ids of the next tile loaded one iteration ahead.

Ping-pong, ring and register split follow FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608). What paging adds: blocks
behind the row's last key are replaced by the last one that holds any; and cells of V that nobody owns, behind that key or
left behind by the sliding window, are zeroed in shared memory, for 0 * NaN is NaN. Only tiles on a border are masked. A
tile that ends inside the row (or at its end) must not write its neighbours' outputs, which a TMA copy cannot mask: such a
tile is written in power-of-two pieces.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._attention import AttentionOptions

ROWS = 64  # queries of a warpgroup: wgmma's M
COPY_WARPS = 4  # of the warpgroup that copies
_FLOOR = -1e30  # start of the running maximum: finite, so that exp2(-inf - maximum) is 0 and never NaN


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """The shared-memory ring; static."""

    tile_kv: int
    """Keys per loop iteration, a multiple of 64."""
    stages: int
    """Tiles of K and of V in flight, at least 2."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a launch."""

    config: RingConfig
    num_tiles: int
    heads: int
    """Query heads of a CTA, 1 or 2."""
    group: int
    block_size: int
    options: AttentionOptions


def _load(ref: Any, layout: Any) -> jax.Array:
    """The whole of a shared-memory ref in registers; jax before 0.11 wants an index, and finds no way without bank conflicts."""
    load: Any = plgpu.load
    return load(ref, (), layout=layout, optimized=False) if jax.__version_info__ < (0, 11) else load(ref, layout=layout)


def attend(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    tiles_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    q_s: Any,
    stage_s: Any,
    k_s: Any,
    v_s: Any,
    q_full: Any,
    k_full: Any,
    v_full: Any,
    k_free: Any,
    v_free: Any,
    v_clean: Any,
    turn: Any,
    lse_s: Any = None,
    plan: Plan,
) -> None:
    """The kernel's body.

    Refs in device memory: q and out ``[T, N, H]``, K and V cells ``[P * K * Z, H]``, the block table ``[C, M]``, the fields
    of ``QueryTiles`` end to end, and lse f32 ``[N, num_tiles * tile_q]`` or ``None``.

    In shared memory, ``_s``: per warpgroup its queries, a stage for what a copy brings or takes, and its log-sum-exps;
    the rings of K and V. ``_full`` barriers say that a copy has arrived, ``_free`` that both warpgroups are done with it,
    ``v_clean`` that the first and the last tile of V are without NaN, ``turn`` whose turn it is on the tensor cores.
    """
    tile_kv, stages = plan.config.tile_kv, plan.config.stages
    heads, group, block_size, options = plan.heads, plan.group, plan.block_size, plan.options
    head_size, dtype = q_ref.shape[2], q_ref.dtype
    num_heads = q_ref.shape[1]
    num_kv_heads = num_heads // group
    per_tile = num_heads // heads
    f32, i32 = jnp.float32, jnp.int32
    window, soft_cap = options.sliding_window, options.soft_cap
    log2_scale = (options.scale if soft_cap is None else 1.0) * math.log2(math.e)
    accumulator: Any = getattr(plgpu, "ACC")  # noqa: B009  (not exported for type checkers)
    wgmma, by_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)

    wg = lax.axis_index("wg")
    item = lax.axis_index("item")
    # Last tiles first: they have the most keys behind them. Neighbours share a tile, so that they share K and V in the L2.
    tile = plan.num_tiles - 1 - lax.div(item, i32(per_tile))
    first_head = lax.rem(item, i32(per_tile)) * heads
    kv_head = lax.div(first_head, i32(group))
    row, start, num_queries, position, context_len = (tiles_ref[i * plan.num_tiles + tile] for i in range(5))
    limit = position + num_queries  # no query of this tile sees keys from here on
    end = lax.div(jnp.maximum(limit, 0) + (tile_kv - 1), i32(tile_kv))
    # Without a window this is 0, but must not be a constant: Mosaic GPU cannot capture one in the product below.
    lower = jnp.maximum(position - ((window or 2**30) - 1), 0)  # nor keys before this one
    first = jnp.minimum(lax.div(lower, i32(tile_kv)), end)

    def hand_over() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        head = first_head + (wg if heads == 2 else 0)
        offset = wg * (0 if heads == 2 else ROWS)
        q_tile, staged = q_s.at[wg], stage_s.at[wg]
        columns = staged.shape[1]
        for lane in range(0, head_size, columns):
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(start + offset, ROWS), head, pl.ds(lane, columns)], staged, q_full.at[wg])
            plgpu.barrier_wait(q_full.at[wg])
            q_tile.at[:, pl.ds(lane, columns)][...] = _load(staged, wgmma)
            plgpu.commit_smem()

        def spread(x: jax.Array, columns: int) -> jax.Array:  # [64] -> [64, columns]
            return lax.broadcast_in_dim(x, (ROWS, columns), (0,))

        def clean(slot: jax.Array, base: jax.Array, cleaned: Any) -> None:
            """Zeroes the cells of V that nobody owns: one warpgroup does, the other waits for it."""

            @pl.when(wg == 0)
            def _() -> None:
                for at in range(0, tile_kv, 64):
                    key = base + at + plgpu.broadcasted_iota(i32, (64, 64), 0, layout=wgmma)
                    owned = key < context_len
                    if window is not None:
                        owned = owned & (key >= lower)
                    for lane in range(0, head_size, 64):
                        piece = v_s.at[slot, pl.ds(at, 64), pl.ds(lane, 64)]
                        piece[...] = jnp.where(owned, _load(piece, wgmma).astype(f32), 0.0).astype(dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(cleaned)

            @pl.when(wg == 1)
            def _() -> None:
                plgpu.barrier_wait(cleaned)

        def clean_at_ends(i: jax.Array, slot: jax.Array) -> None:
            unowned = (i == end - 1) & (context_len < (i + 1) * tile_kv)
            if window is not None:
                unowned = unowned | ((i == first) & (lower > i * tile_kv))
            # Each barrier is used once, so that a slow warpgroup cannot miss a phase.
            cleaned = v_clean.at[jnp.where(i == end - 1, 1, 0)]
            pl.when(unowned)(lambda: clean(slot, i * tile_kv, cleaned))

        def step(border: bool, i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            slot = lax.rem(i - first, i32(stages))

            def product(s: Any) -> jax.Array:
                plgpu.wgmma(s, q_tile, k_s.at[slot].T)
                hand_over()
                return s[...]

            scores = pl.run_scoped(product, accumulator((ROWS, tile_kv), f32))
            plgpu.barrier_arrive(k_free.at[slot])
            if soft_cap is not None:  # tanh(x) = 1 - 2 / (1 + exp(2x)), exact where the hardware's own is good to 11 bits only
                scores = soft_cap - (2 * soft_cap) / (1 + jnp.exp2(scores * (2 * math.log2(math.e) * options.scale / soft_cap)))
            if border:
                key = i * tile_kv + plgpu.broadcasted_iota(i32, (ROWS, tile_kv), 1, layout=wgmma)
                query = position + offset + plgpu.broadcasted_iota(i32, (ROWS, tile_kv), 0, layout=wgmma)
                visible = key <= query
                if window is not None:
                    visible = visible & (key > query - window)
                scores = jnp.where(visible, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(axis=1) * log2_scale)
            alpha = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores * log2_scale - spread(new_top, tile_kv))
            acc = acc * spread(alpha, head_size)
            total = total * alpha
            narrow = weights.astype(dtype)

            def to_product() -> None:
                plgpu.barrier_arrive(turn)  # the softmax is done
                plgpu.barrier_wait(v_full.at[slot])
                if border:
                    clean_at_ends(i, slot)
                plgpu.barrier_wait(turn)  # the tensor cores are free

            if head_size <= 128:
                total = total + weights.sum(axis=1)
                acc, total, new_top, narrow = lax.optimization_barrier((acc, total, new_top, narrow))
                to_product()
            else:
                to_product()
                total = total + weights.sum(axis=1)

            def accumulate(o: Any) -> None:
                plgpu.wgmma(o, narrow, v_s.at[slot])

                @pl.when(i + 1 < end)
                def _() -> None:
                    plgpu.barrier_wait(k_full.at[lax.rem(i + 1 - first, i32(stages))])

            acc = pl.run_state(accumulate)(accumulator.init(acc))
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, new_top, total

        pl.when(end > first)(lambda: plgpu.barrier_wait(k_full.at[0]))
        pl.when(wg == 1)(hand_over)
        cast = plgpu.layout_cast
        carry = (
            cast(jnp.zeros((ROWS, head_size), f32), wgmma),
            cast(jnp.full((ROWS,), _FLOOR, f32), by_row),
            cast(jnp.zeros((ROWS,), f32), by_row),
        )
        inner = first
        if window is not None:  # tiles that the window of some query leaves within
            inner = jnp.clip(lax.div(jnp.maximum(limit - window, 0) + (tile_kv - 1), i32(tile_kv)), first, end)
            carry = lax.fori_loop(first, inner, functools.partial(step, True), carry)
        outer = jnp.clip(lax.div(jnp.maximum(position + 1, 0), i32(tile_kv)), inner, end)
        carry = lax.fori_loop(inner, outer, functools.partial(step, False), carry)
        acc, top, total = lax.fori_loop(outer, end, functools.partial(step, True), carry)
        pl.when(wg == 0)(hand_over)

        some = total > 0  # false without keys: pads, rows without context
        safe = jnp.where(some, total, 1.0)
        if lse_ref is not None:
            lse_s.at[wg][...] = jnp.where(some, top * math.log(2.0) + jnp.log(safe), -jnp.inf)
        result = (acc * spread(1.0 / safe, head_size)).astype(dtype)
        mine = num_queries - offset  # the queries of this warpgroup that exist
        for lane in range(0, head_size, columns):
            to = out_ref.at[:, head, pl.ds(lane, columns)]
            staged[...] = result[:, lane : lane + columns]
            plgpu.commit_smem()

            @pl.when(mine >= ROWS)
            def _(to: Any = to) -> None:
                plgpu.copy_smem_to_gmem(staged, to.at[pl.ds(start + offset, ROWS)])

            for size in (32, 16, 8, 4, 2, 1):  # the binary digits of a smaller number
                rest = lax.rem(jnp.maximum(mine, 0), i32(2 * size))

                @pl.when((mine < ROWS) & (rest >= size))
                def _(to: Any = to, rest: jax.Array = rest, size: int = size) -> None:
                    done = mine - rest
                    plgpu.copy_smem_to_gmem(staged.at[pl.ds(done, size)], to.at[pl.ds(start + offset + done, size)])

            plgpu.wait_smem_to_gmem(0)

        if lse_ref is not None:
            plgpu.commit_smem()
            at = (tile * (3 - heads) + (0 if heads == 2 else wg)) * ROWS
            plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_ref.at[head, pl.ds(at, ROWS)])
            plgpu.wait_smem_to_gmem(0)

    def copy(warp: jax.Array) -> None:
        cells = tile_kv // COPY_WARPS  # of each warp
        chunk = min(cells, block_size)
        last = lax.div(jnp.maximum(context_len - 1, 0), i32(block_size))

        def key_of(i: jax.Array, at: int) -> jax.Array:
            return i * tile_kv + warp * cells + at

        def blocks(i: jax.Array) -> tuple[jax.Array, ...]:
            logical = (lax.div(key_of(i, at), i32(block_size)) for at in range(0, cells, chunk))
            return tuple(table_ref[row, jnp.minimum(x, last)] for x in logical)

        def body(i: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ahead = blocks(i + 1)
            step = i - first
            slot = lax.rem(step, i32(stages))
            for source, ring, full, free in ((k_ref, k_s, k_full, k_free), (v_ref, v_s, v_full, v_free)):
                pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                for block, at in zip(now, range(0, cells, chunk), strict=True):
                    cell = (block * num_kv_heads + kv_head) * block_size
                    if chunk < block_size:  # a product, for the compiler must see that TMA's 8-row tiles are kept
                        cell += lax.rem(lax.div(key_of(i, at), i32(chunk)), i32(block_size // chunk)) * chunk
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(cell, chunk)], ring.at[slot, pl.ds(warp * cells + at, chunk)], full.at[slot])
            return ahead

        lax.fori_loop(first, end, body, blocks(first))

    def produce() -> None:
        plgpu.set_max_registers(40, action="decrease")
        plgpu.warp_map(copy)

    # A spare tile has no queries: its CTA leaves at once.
    pl.when((wg < 2) & (num_queries > 0))(compute)
    pl.when((wg == 2) & (num_queries > 0))(produce)
