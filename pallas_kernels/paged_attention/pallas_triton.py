"""Paged decode attention in Pallas, Triton lowering: NVIDIA cards from Ampere on.

One program serves one (key/value head, split, row): the G query heads of that head, padded to the 16 rows that a dot
needs, against the split's tokens, with the softmax carried along (Milakov and Gimelshein, arXiv:1805.02867; splits as in
Flash-Decoding, Dao et al. 2023). Block ids of the next loop step travel in the loop's carry: loaded inside the step they would
stall it, and the compiler would not overlap the loads of K and V. Rows of one split write their output directly; the
others leave normalised float32 partial results with base-2 log-sum-exps, which a second, small kernel merges in a fixed order.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Device, current_device
from pallas_kernels.paged_attention import DecodeProblem
from pallas_kernels.paged_attention.split import (
    MIN_DOT,
    TileConfig,
    most_splits,
    most_tokens,
    next_power_of_two,
    num_splits,
    shrink,
    tile_config,
    tokens_per_split,
)

_LOG2E = math.log2(math.e)
_LN2 = math.log(2)
_NEG = -1e30  # a logit that loses against every real one, yet keeps exp2 and differences finite
_MERGE = 16  # partial results per step of the merging loop: a constant, so that the order of sums is one too
MAX_GROUP = 16
MAX_HEAD = 256


def why_not(problem: DecodeProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Needs a CUDA device of compute capability 8.0 or the interpreter, a group of at most 16 and a head of at most 256."""
    if not interpret:
        if device.platform != "gpu" or device.compute_capability is None:
            return "it needs an NVIDIA GPU; 'pallas_triton_interpret' runs the same kernel slowly in Pallas's interpreter"
        if device.compute_capability < (8, 0):
            return "it needs compute capability 8.0 (Ampere) or newer; 'reference' runs on any device"
    if problem is None:
        return None
    if problem.group > MAX_GROUP:
        return f"it serves at most {MAX_GROUP} query heads per key/value head, got {problem.group}; 'reference' serves any number"
    if problem.pool.head_size > MAX_HEAD:
        return f"it serves head sizes up to {MAX_HEAD}, got {problem.pool.head_size}; 'reference' serves any size"
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
    config: TileConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See ``pallas_kernels.paged_attention``; ``config`` overrides the tuned settings."""
    rows, heads, head_size = q.shape
    pool, group = problem.pool, problem.group
    max_tokens = most_tokens(problem)
    config = shrink(config or tile_config(problem, current_device(), "pallas_triton"), max_tokens)
    splits = most_splits(max_tokens, config)
    # The interpreter clamps indices out of range before it looks at a store's mask: there, outputs are as large as a program's
    # padded tile. On a device the masks do it.
    width = next_power_of_two(max(head_size, MIN_DOT)) if interpret else head_size
    padded = MIN_DOT if interpret else group
    f32, kv_heads = jnp.float32, pool.num_kv_heads
    outs = [jax.ShapeDtypeStruct((rows, kv_heads, padded, width), q.dtype), jax.ShapeDtypeStruct((rows, kv_heads, padded), f32)]
    if splits > 1:
        outs.append(jax.ShapeDtypeStruct((rows, kv_heads, splits, padded, width), f32))
        outs.append(jax.ShapeDtypeStruct((rows, kv_heads, splits, padded), f32))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    params = plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    out, lse, *parts = pl.pallas_call(
        functools.partial(_attend, problem=problem, config=config),
        name="paged_attention",
        grid=(kv_heads, splits, rows),  # the first axis is the fastest: neighbouring programs read the heads of the same blocks
        in_specs=[anywhere] * 5,
        out_specs=[anywhere] * len(outs),
        out_shape=outs,
        compiler_params=params,
        interpret=interpret,
    )(q.reshape(rows, kv_heads, group, head_size), k_pool, v_pool, block_tables, context_lens)
    if splits > 1:
        out, lse = pl.pallas_call(
            functools.partial(_merge, problem=problem, config=config),
            name="paged_attention_merge",
            grid=(kv_heads, group, rows),
            in_specs=[anywhere] * 5,
            out_specs=[anywhere] * 2,
            out_shape=outs[:2],
            input_output_aliases={3: 0, 4: 1},
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
        )(*parts, context_lens, out, lse)
    out = out[:, :, :group, :head_size].reshape(rows, heads, head_size)
    return out, lse[:, :, :group].reshape(rows, heads) if problem.options.return_lse else None


def _span(lens_ref: Any, row: jax.Array, problem: DecodeProblem, config: TileConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First visible token, first token to read (the start of a block or tile) and the context length of a row."""
    block_size, window = problem.pool.block_size, problem.options.sliding_window
    context_len = jnp.minimum(plt.load(lens_ref.at[row]), problem.table_width * block_size)
    if window is None:
        return jnp.int32(0), jnp.int32(0), context_len
    first = jnp.maximum(context_len - window, 0)
    step = min(block_size, config.tile)  # so that the first tile has a visible token: a tile without one has no maximum
    return first, first & ~(step - 1), context_len


def _attend(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    lens_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *part_refs: Any,
    problem: DecodeProblem,
    config: TileConfig,
) -> None:
    kv_head, split, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    pool, options, group, tile = problem.pool, problem.options, problem.group, config.tile
    width = next_power_of_two(max(pool.head_size, MIN_DOT))
    first_seen, origin, context_len = _span(lens_ref, row, problem, config)
    share = tokens_per_split(context_len - origin, config)
    start = origin + split * share
    end = jnp.minimum(start + share, context_len)
    lane = jnp.arange(width, dtype=jnp.int32)[None, :]
    g = jnp.arange(MIN_DOT, dtype=jnp.int32)
    cell = jnp.arange(tile, dtype=jnp.int32)
    in_head = lane < pool.head_size
    live = (g < group)[:, None] & in_head
    precision = lax.Precision.HIGHEST if pool.dtype == "float32" else lax.Precision.DEFAULT

    def block_ids(i: jax.Array | int) -> jax.Array:
        token = start + i * tile + cell
        return plt.load(table_ref.at[row, lax.div(token, jnp.int32(pool.block_size))], mask=token < end, other=0)

    def write(out: jax.Array, lse2: jax.Array) -> None:
        whole = (end - origin >= context_len - origin) & (split == 0)

        @pl.when(whole)
        def _() -> None:
            plt.store(out_ref.at[row, kv_head, g[:, None], lane], out.astype(out_ref.dtype), mask=live)
            plt.store(lse_ref.at[row, kv_head, g], lse2 * _LN2, mask=g < group)

        if part_refs:

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                part_ref, part_lse_ref = part_refs
                plt.store(part_ref.at[row, kv_head, split, g[:, None], lane], out, mask=live)
                plt.store(part_lse_ref.at[row, kv_head, split, g], lse2, mask=g < group)

    @pl.when(start < context_len)
    def _() -> None:
        q = plt.load(q_ref.at[row, kv_head, g[:, None], lane], mask=live, other=0.0)

        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ids, acc, top, total = carry
            next_ids = block_ids(i + 1)
            token = start + i * tile + cell
            seen = (token >= first_seen) & (token < end)
            # All-array indices: the interpreter's masked loads cannot mix arrays and slices. Masked cells are never read, so
            # that a NaN in one cannot meet a weight of 0.
            at = (ids[:, None], kv_head, (token & (pool.block_size - 1))[:, None], lane)
            mask = seen[:, None] & in_head
            k = plt.load(k_ref.at[at], mask=mask, other=0.0)
            logits = plt.dot(q, k.T, precision=precision) * options.scale
            if options.soft_cap is not None:
                logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
            logits = jnp.where(seen[None, :], logits * _LOG2E, _NEG)
            new_top = jnp.maximum(top, logits.max(-1))
            decay, p = jnp.exp2(top - new_top), jnp.exp2(logits - new_top[:, None])
            v = plt.load(v_ref.at[at], mask=mask, other=0.0)
            acc = acc * decay[:, None] + plt.dot(p.astype(v.dtype), v, precision=precision)
            return next_ids, acc, new_top, total * decay + p.sum(-1)

        zeros = jnp.zeros((MIN_DOT,), jnp.float32)
        init = (block_ids(0), jnp.zeros((MIN_DOT, width), jnp.float32), zeros + _NEG, zeros)
        _, acc, top, total = lax.fori_loop(0, lax.div(end - start + (tile - 1), jnp.int32(tile)), body, init)
        write(acc / total[:, None], top + jnp.log2(total))

    @pl.when((context_len <= 0) & (split == 0))
    def _() -> None:
        plt.store(out_ref.at[row, kv_head, g[:, None], lane], jnp.zeros((MIN_DOT, width), out_ref.dtype), mask=live)
        plt.store(lse_ref.at[row, kv_head, g], jnp.full((MIN_DOT,), -jnp.inf, jnp.float32), mask=g < group)


def _merge(
    part_ref: Any,
    part_lse_ref: Any,
    lens_ref: Any,
    out_in_ref: Any,
    lse_in_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    problem: DecodeProblem,
    config: TileConfig,
) -> None:
    del out_in_ref, lse_in_ref  # the same memory as the outputs: rows of one split are there already
    kv_head, g, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    width = next_power_of_two(max(problem.pool.head_size, MIN_DOT))
    _, origin, context_len = _span(lens_ref, row, problem, config)
    splits = num_splits(context_len - origin, config)
    lane = jnp.arange(width, dtype=jnp.int32)
    in_head = lane < problem.pool.head_size
    step = jnp.arange(_MERGE, dtype=jnp.int32)

    @pl.when(splits > 1)
    def merge() -> None:
        def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, top, total = carry
            split = i * _MERGE + step
            there = split < splits
            lse2 = plt.load(part_lse_ref.at[row, kv_head, split, g], mask=there, other=_NEG)
            part = plt.load(part_ref.at[row, kv_head, split[:, None], g, lane[None, :]], mask=there[:, None] & in_head[None, :], other=0.0)
            new_top = jnp.maximum(top, lse2.max())
            decay, weight = jnp.exp2(top - new_top), jnp.exp2(lse2 - new_top)
            return acc * decay + (weight[:, None] * part).sum(0), new_top, total * decay + weight.sum()

        init = (jnp.zeros((width,), jnp.float32), jnp.float32(_NEG), jnp.float32(0))
        acc, top, total = lax.fori_loop(0, lax.div(splits + (_MERGE - 1), jnp.int32(_MERGE)), body, init)
        plt.store(out_ref.at[row, kv_head, g, lane], (acc / total).astype(out_ref.dtype), mask=in_head)
        plt.store(lse_ref.at[row, kv_head, g], (top + jnp.log2(total)) * _LN2)
