"""Cuts ragged packed queries into tiles that each belong to one row.

Rows of very different lengths lie end to end in ``q [T, N, H]``. Every backend wants rectangular work with one block
table row each, so row ``c`` with ``query_len`` tokens becomes ``ceil(query_len / tile)`` tiles of at most ``tile``
queries. The pads behind the last row are cut like one more row, without any keys: so each packed query lies in exactly
one tile, and a kernel that writes its tiles leaves no output unwritten. Over ``C + 1`` rows that is at most
``ceil(T / tile) + C`` tiles, a static number: no shape depends on the lengths. Tiles that are left over have ``num_queries == 0``.

Everything here depends on integers only, so that XLA computes it once a step however many layers ask for it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class QueryTiles(NamedTuple):
    """Where each tile lies; every field i32 ``[num_tiles]``."""

    row: jax.Array
    """The row whose table the tile reads."""
    start: jax.Array
    """Packed index of the tile's first query."""
    num_queries: jax.Array
    """Queries in the tile; 0 in a spare tile."""
    position: jax.Array
    """Absolute position of the tile's first query within its row. The tile sees keys before ``position + num_queries``,
    which is at most 0 for pads and for rows without context."""
    context_len: jax.Array
    """Tokens of the tile's row; 0 for pads. Keys from here on belong to nobody."""


def num_query_tiles(num_tokens: int, num_rows: int, tile: int) -> int:
    """The static number of tiles that is enough for any split of ``num_tokens`` packed queries over ``num_rows`` rows."""
    return -(-num_tokens // tile) + num_rows


def _bounds(query_start_loc: jax.Array, num_tokens: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """Ends of the ``C`` rows and of the pads, i32 ``[C + 1]``; and the first tile of each and the end of all, i32 ``[C + 2]``."""
    ends = jnp.concatenate([query_start_loc[1:], jnp.full((1,), num_tokens, jnp.int32)])
    per_row = (ends - query_start_loc + (tile - 1)) // tile
    return ends, jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(per_row, dtype=jnp.int32)])


def query_tiles(query_start_loc: jax.Array, context_lens: jax.Array, *, num_tokens: int, tile: int) -> QueryTiles:
    """The tiles of a packed batch.

    Args:
        query_start_loc: i32 ``[C + 1]``, row ``c`` owns packed queries ``query_start_loc[c]:query_start_loc[c + 1]``.
        context_lens: i32 ``[C]``; the last query of row ``c`` stands at position ``context_lens[c] - 1``.
        num_tokens: ``T``, the padded number of packed queries (static).
        tile: most queries in a tile (static).
    """
    num_rows = context_lens.shape[0]
    index = jnp.arange(num_query_tiles(num_tokens, num_rows, tile), dtype=jnp.int32)
    ends, first = _bounds(query_start_loc, num_tokens, tile)
    contexts = jnp.concatenate([context_lens, jnp.zeros((1,), jnp.int32)])
    # A row's tiles start where those of the rows before it end; a row without queries has none and is stepped over.
    row = jnp.sum(index[:, None] >= first[None, 1:], axis=1, dtype=jnp.int32)
    used = row <= num_rows
    row = jnp.minimum(row, num_rows)
    start = query_start_loc[row] + (index - first[row]) * tile
    count = jnp.where(used, jnp.clip(ends[row] - start, 0, tile), 0)
    position = contexts[row] - (ends[row] - start)
    return QueryTiles(
        row=jnp.minimum(row, num_rows - 1),
        start=jnp.where(used, start, 0),
        num_queries=count,
        position=position,
        context_len=contexts[row],
    )


def packed_index(query_start_loc: jax.Array, *, num_tokens: int, tile: int) -> jax.Array:
    """i32 ``[T]``: the place of each packed query, pads included, in the flattened ``[num_tiles * tile]`` tiles."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    _, first = _bounds(query_start_loc, num_tokens, tile)
    row = jnp.sum(token[:, None] >= query_start_loc[None, 1:], axis=1, dtype=jnp.int32)
    return first[row] * tile + token - query_start_loc[row]
