"""Gumbel noise for every token id, from a key: the same numbers whatever reads them, XLA or a kernel.

Ids come in chunks of 1024. One run of threefry2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") at the counter
(chunk, lane) gives the bits of two ids: the first word that of id ``1024 * chunk + lane``, the second that of the id 512 after it.
"""

import jax
import jax.numpy as jnp
from jax import lax

HALF = 512  # ids of half a chunk
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_TINY = 1.1754943508222875e-38  # the smallest normal float32


def threefry2x32(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry2x32 with 20 rounds of the block ``(x0, x1)`` under ``(key0, key1)``, all u32 of shapes that broadcast."""
    keys = key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x0 ^ x1
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def exponential_of_bits(bits: jax.Array) -> jax.Array:
    """Exponentially distributed numbers above 0 from u32 bits: f32 of the same shape."""
    # 23 bits become a float in [1, 2), less 1.
    uniform = lax.bitcast_convert_type((bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
    return -jnp.log(jnp.maximum(uniform, _TINY))


def gumbel_of_bits(bits: jax.Array) -> jax.Array:
    """Standard Gumbel numbers (Gumbel-max trick: Maddison et al. 2014, arXiv:1411.0030) from u32 bits: f32 of the same shape."""
    return -jnp.log(exponential_of_bits(bits))


def gumbel(keys: jax.Array, vocab: int) -> jax.Array:
    """The noise of rows with ``keys u32[B, 2]`` for ids 0 to ``vocab - 1``: f32[B, vocab]."""
    chunks = -(-vocab // (2 * HALF))
    chunk = jnp.arange(chunks, dtype=jnp.uint32)[None, :, None]
    lane = jnp.arange(HALF, dtype=jnp.uint32)[None, None, :]
    first, second = threefry2x32(keys[:, 0, None, None], keys[:, 1, None, None], chunk, lane)
    bits = jnp.stack(jnp.broadcast_arrays(first, second), axis=2).reshape(keys.shape[0], chunks * 2 * HALF)
    return gumbel_of_bits(bits[:, :vocab])
