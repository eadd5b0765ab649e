"""Paged prefill attention in plain XLA: the reference, the CPU path and everybody's backward.

One tile of one row's queries at a time (``tiles``), so that memory is one tile's scores and not the step's. A tile gathers
its row's K and V through the block table once, and no more of it than a few static widths allow: most rows are far
shorter than the table, and a tile needs only the blocks between its sliding window's start and its own last query.
Scores, softmax and sums are float32 at precision HIGHEST. Each tile is a ``jax.checkpoint``: the backward keeps queries
and outputs, and computes a tile's scores again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._attention import AttentionOptions
from pallas_kernels._dispatch import Device
from pallas_kernels.prefill_attention import PrefillProblem
from pallas_kernels.prefill_attention.tiles import packed_index, query_tiles

_MAX_TILE = 128
_LEAST_TOKENS = 64  # below this many gathered tokens a narrower width saves nothing


def _choose_tile(num_tokens: int, num_rows: int) -> int:
    """About one tile an average row, a power of two: short rows should not compute mostly pads."""
    average = -(-num_tokens // num_rows)
    return min(_MAX_TILE, max(1 << (average - 1).bit_length(), min(16, 1 << (num_tokens - 1).bit_length())))


def _widths(num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Ascending numbers of blocks for which a branch is compiled; the last is the whole table."""
    least = -(-_LEAST_TOKENS // block_size)
    widths = {num_blocks}
    for shift in (1, 2, 4, 6):
        if (width := -(-num_blocks >> shift)) >= least:
            widths.add(width)
    return tuple(sorted(widths))


def _attend_tile(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    table_row: jax.Array,
    position: jax.Array,
    count: jax.Array,
    first_block: jax.Array,
    *,
    width: int,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """One tile: q ``[t, N, H]`` against ``width`` blocks from ``first_block`` on -> out f32 ``[t, N, H]``, lse f32 ``[t, N]``."""
    tile, num_heads, head_size = q.shape
    _, num_kv_heads, block_size, _ = k_pool.shape
    group, num_keys = num_heads // num_kv_heads, width * block_size
    dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    logical = first_block + jnp.arange(width, dtype=jnp.int32)
    ids = table_row.at[logical].get(mode="clip")
    key_position = first_block * block_size + jnp.arange(num_keys, dtype=jnp.int32)
    # Cells that no query of this tile may see can hold NaN. K too is masked: in the backward it is multiplied by zeros.
    seen = key_position < position + count
    if options.sliding_window is not None:
        seen &= key_position > position - options.sliding_window
    seen = seen[None, :, None]

    def gather(pool: jax.Array) -> jax.Array:
        cells = jnp.swapaxes(pool.at[ids].get(mode="clip"), 0, 1).reshape(num_kv_heads, num_keys, head_size)
        return jnp.where(seen, cells.astype(jnp.float32), 0.0)

    k, v = gather(k_pool), gather(v_pool)
    index = jnp.arange(tile, dtype=jnp.int32)
    q = jnp.where((index < count)[:, None, None], q.astype(jnp.float32) * options.scale, 0.0)
    q = q.reshape(tile, num_kv_heads, group, head_size).transpose(1, 2, 0, 3)

    scores = dot("kgth,ksh->kgts", q, k)
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    query_position = (position + index)[:, None]
    visible = (key_position[None, :] <= query_position) & (index < count)[:, None]
    if options.sliding_window is not None:
        visible &= key_position[None, :] > query_position - options.sliding_window
    scores = jnp.where(visible[None, None], scores, -jnp.inf)

    top = jnp.max(scores, axis=-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1.0)  # also keeps log and the division out of a pad's gradient
    out = dot("kgts,ksh->kgth", weights, v) / total
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]
    return out.transpose(2, 0, 1, 3).reshape(q.shape[2], num_heads, head_size), lse.transpose(2, 0, 1).reshape(tile, num_heads)


def why_not(problem: PrefillProblem | None, device: Device, *, interpret: bool) -> str | None:
    """It runs everywhere."""
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
) -> tuple[jax.Array, jax.Array | None]:
    """See ``pallas_kernels.paged_prefill_attention``."""
    num_tokens, num_heads, head_size = q.shape
    block_size, options = problem.pool.block_size, problem.options
    sliding_window = options.sliding_window
    tile = _choose_tile(num_tokens, problem.num_rows)
    tiles = query_tiles(query_start_loc, context_lens, num_tokens=num_tokens, tile=tile)
    widths = _widths(problem.table_width, block_size)

    def attend(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, what: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        row, start, count, position, _ = what
        first = jnp.zeros_like(position) if sliding_window is None else jnp.maximum(position - (sliding_window - 1), 0)
        first_block = first // block_size
        needed = (position + count - 1) // block_size + 1 - first_block
        q_tile = q.at[start + jnp.arange(tile, dtype=jnp.int32)].get(mode="clip")
        branches = [functools.partial(_attend_tile, width=width, options=options) for width in widths]

        def nothing(q_tile: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.zeros(q_tile.shape, jnp.float32), jnp.full(q_tile.shape[:2], -jnp.inf, jnp.float32)

        fits = jnp.sum(needed > jnp.asarray(widths[:-1], jnp.int32), dtype=jnp.int32)
        branch = jnp.where((count > 0) & (position + count > 0), 1 + fits, 0)
        out, lse = lax.switch(branch, [nothing, *branches], q_tile, k_pool, v_pool, block_tables[row], position, count, first_block)
        return out.astype(q.dtype), lse

    attend_again = jax.checkpoint(attend, prevent_cse=False)  # inside a loop: XLA cannot merge it with the forward anyway
    out, lse = lax.map(lambda what: attend_again(q, k_pool, v_pool, what), tuple(tiles))

    place = packed_index(query_start_loc, num_tokens=num_tokens, tile=tile)
    out = out.reshape(-1, num_heads, head_size)[place]
    return out, lse.reshape(-1, num_heads)[place] if options.return_lse else None
