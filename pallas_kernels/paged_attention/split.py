"""How one row's context is split over programs, and the tile settings of the Triton kernels.

The rule sees nothing but the row's own number of tokens: a row's result is then the same bits whatever else is in the
batch, and a short row is not cut up because a long one shares its batch.
"""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import tuning
from pallas_kernels._dispatch import Device
from pallas_kernels.paged_attention import DecodeProblem

MIN_DOT = 16  # the least size of a Triton dot's dimensions


@dataclass(frozen=True)
class TileConfig:
    """Settings of the Triton decode kernels.

    Attributes:
        tile: tokens per loop step, a power of two.
        direct: rows of at most this many tokens are not split and need no combining.
        chunk: longer rows get one split for this many tokens ...
        max_splits: ... but not more than this.
        num_warps: warps per program.
        num_stages: loop steps whose loads are in flight.
    """

    tile: int = 64
    direct: int = 512
    chunk: int = 512
    max_splits: int = 64
    num_warps: int = 4
    num_stages: int = 4


def next_power_of_two(n: int) -> int:
    """Least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def tile_config(problem: DecodeProblem, device: Device, implementation: str) -> TileConfig:
    """The tuned settings for this device and head size, else a heuristic."""
    pool = problem.pool
    itemsize = 4 if pool.dtype == "float32" else 2
    head = next_power_of_two(pool.head_size)
    tuned = tuning.lookup(device.kind, "paged_attention", implementation, head_size=head, itemsize=itemsize)
    if tuned is not None:
        return TileConfig(**tuned)
    # K and V of every stage lie in shared memory: keep to 96 KiB, what an Ampere multiprocessor of either kind can give.
    tile = max(MIN_DOT, min(64, (16 << 10) // (head * itemsize)))
    stages = max(2, min(4, (96 << 10) // (2 * tile * head * itemsize)))
    return TileConfig(tile=tile, num_stages=stages)


def shrink(config: TileConfig, max_tokens: int) -> TileConfig:
    """The same settings with a tile no longer than any row can be."""
    return dataclasses.replace(config, tile=max(MIN_DOT, min(config.tile, next_power_of_two(max_tokens))))


def tokens_per_split(num_tokens: Array | int, config: TileConfig) -> Array:
    """Tokens that each split of a row of ``num_tokens`` takes: a multiple of the tile. int32, same shape."""

    def over(a: Array, b: Array | int) -> Array:
        return lax.div(a + b - jnp.int32(1), jnp.asarray(b, jnp.int32))

    tokens = jnp.asarray(num_tokens, jnp.int32)
    tile = jnp.int32(config.tile)
    splits = jnp.clip(over(tokens, jnp.int32(config.chunk)), 1, config.max_splits).astype(jnp.int32)
    splits = jnp.where(tokens <= config.direct, jnp.int32(1), splits)
    return jnp.maximum(over(over(tokens, splits), tile) * tile, tile)


def num_splits(num_tokens: Array | int, config: TileConfig) -> Array:
    """Splits of a row of ``num_tokens``: 0 for none, 1 if it is taken whole."""
    tokens, share = jnp.asarray(num_tokens, jnp.int32), tokens_per_split(num_tokens, config)
    return lax.div(tokens + share - jnp.int32(1), share)


def most_splits(max_tokens: int, config: TileConfig) -> int:
    """The most splits that any row of up to ``max_tokens`` has: the size of the grid."""
    return 1 if max_tokens <= config.direct else min(config.max_splits, -(-max_tokens // config.chunk))


def most_tokens(problem: DecodeProblem) -> int:
    """The most tokens that any row can attend to, the start of a sliding window rounded down to a block."""
    window, capacity = problem.options.sliding_window, problem.table_width * problem.pool.block_size
    return capacity if window is None else min(capacity, window + problem.pool.block_size)
