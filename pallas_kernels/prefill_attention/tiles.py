"""Cuts ragged packed queries into tiles that each belong to one row.

Rows of very different lengths lie end to end in ``q [T, N, H]``. Every backend wants rectangular work with one block
table row each, so row ``c`` with ``query_len`` tokens becomes ``ceil(query_len / tile)`` tiles of at most ``tile``
queries. Summed over rows that is at most ``ceil(T / tile) + C`` tiles, a static number: no shape depends on the lengths,
and the tiles that are left over have ``count == 0``.

Everything here depends on integers only, so that XLA computes it once a step however many layers ask for it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class QueryTiles(NamedTuple):
    """Where each tile lies; every field i32 ``[num_tiles]``."""

    row: jax.Array
    """The row that owns the tile."""
    start: jax.Array
    """Packed index of the tile's first query."""
    count: jax.Array
    """Live queries in the tile; 0 in a spare tile."""
    position: jax.Array
    """Absolute position of the tile's first query within its row."""


def num_query_tiles(num_tokens: int, num_rows: int, tile: int) -> int:
    """The static number of tiles that is enough for any split of ``num_tokens`` packed queries over ``num_rows`` rows."""
    return -(-num_tokens // tile) + num_rows


def _first_tiles(query_start_loc: jax.Array, tile: int) -> jax.Array:
    """i32 ``[C + 1]``: index of each row's first tile, and the number of used tiles at the end."""
    per_row = (query_start_loc[1:] - query_start_loc[:-1] + (tile - 1)) // tile
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(per_row, dtype=jnp.int32)])


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
    first = _first_tiles(query_start_loc, tile)
    # The last row whose first tile is not behind this one; rows without queries share a first tile with their successor.
    row = jnp.sum(index[:, None] >= first[None, 1:], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    start = query_start_loc[row] + (index - first[row]) * tile
    end = query_start_loc[row + 1]
    count = jnp.where(index < first[-1], jnp.clip(end - start, 0, tile), 0)
    return QueryTiles(row=row, start=start, count=count, position=context_lens[row] - (end - start))


def packed_index(query_start_loc: jax.Array, *, num_tokens: int, tile: int) -> jax.Array:
    """i32 ``[T]``: the place of each packed query in the flattened ``[num_tiles * tile]`` tiles, or -1 for a pad."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.sum(token[:, None] >= query_start_loc[None, 1:], axis=1, dtype=jnp.int32)
    live = row < query_start_loc.shape[0] - 1
    row = jnp.where(live, row, 0)
    return jnp.where(live, _first_tiles(query_start_loc, tile)[row] * tile + token - query_start_loc[row], -1)
