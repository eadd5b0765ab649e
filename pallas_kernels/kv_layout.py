"""The layout of a pool of key/value blocks, stated once for every op.

A *pool* holds the keys (or the values) of one layer: an array ``[P, K, Z, H]`` of P blocks, K heads, Z tokens and H
numbers. All Z tokens of one head are contiguous, so that a kernel that serves one head reads whole runs of ``Z * H``
numbers. A sequence owns a list of blocks; row b of a *block table* ``int32[B, M]`` names them in order, and the token at
position ``t`` of that row lives in *slot* ``table[b, t // Z] * Z + t % Z``.

Block 0 is the *null block*: no sequence owns it, nothing writes it and reads of it are masked. Unused table entries and
the slots of padding tokens name it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NULL_BLOCK = 0
POOL_DTYPES = ("bfloat16", "float16", "float32")


class Pool(NamedTuple):
    """Static description of a pair of pools (keys, values) of one layer."""

    num_physical_blocks: int  # P, the null block included
    num_kv_heads: int  # K
    block_size: int  # Z, tokens per block
    head_size: int  # H
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(P, K, Z, H)``."""
        return self.num_physical_blocks, self.num_kv_heads, self.block_size, self.head_size


def pool_shape(num_blocks: int, num_kv_heads: int, block_size: int, head_size: int) -> tuple[int, int, int, int]:
    """Shape ``[P, K, Z, H]`` of a pool with ``num_blocks`` usable blocks; the null block comes on top.

    Raises:
        ValueError: a size is not positive, or ``block_size`` is not a power of two.
    """
    for name, size in (("num_blocks", num_blocks), ("num_kv_heads", num_kv_heads), ("head_size", head_size)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    _check_block_size(block_size)
    return num_blocks + 1, num_kv_heads, block_size, head_size


def describe_pools(k_pool: jax.Array, v_pool: jax.Array) -> Pool:
    """Read the static description off ``k_pool`` and ``v_pool``, both ``[P, K, Z, H]``.

    Raises:
        ValueError: the two differ in shape or dtype, are not of rank 4, have a block size that is not a power of two, or
            a dtype other than bfloat16, float16 and float32.
    """
    if len(k_pool.shape) != 4:
        raise ValueError(f"k_pool must be [P, K, Z, H] (rank 4), got shape {tuple(k_pool.shape)}")
    if k_pool.shape != v_pool.shape:
        raise ValueError(f"k_pool and v_pool must have one shape, got {tuple(k_pool.shape)} and {tuple(v_pool.shape)}")
    dtype = np.dtype(k_pool.dtype).name
    if k_pool.dtype != v_pool.dtype:
        raise ValueError(f"k_pool and v_pool must have one dtype, got {dtype} and {np.dtype(v_pool.dtype).name}")
    if dtype not in POOL_DTYPES:
        raise ValueError(f"pools must hold one of {', '.join(POOL_DTYPES)}, got {dtype}")
    blocks, heads, block_size, head_size = k_pool.shape
    if min(blocks, heads, head_size) < 1:
        raise ValueError(f"pools must not be empty, got shape {tuple(k_pool.shape)}")
    _check_block_size(block_size)
    return Pool(blocks, heads, block_size, head_size, dtype)


def _check_block_size(block_size: int) -> None:
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size}")


def slots_of(block_table: jax.Array, positions: jax.Array, block_size: int) -> jax.Array:
    """Slots ``int32[T]`` of the tokens at ``positions`` (int32[T]) of the row that owns ``block_table`` (int32[M])."""
    return block_table[positions // block_size] * block_size + positions % block_size


def gather_blocks(pool: jax.Array, block_tables: jax.Array) -> jax.Array:
    """Dense keys or values ``[B, K, M * Z, H]`` of the rows of ``block_tables`` (int32[B, M]), token by token.

    Cells past a row's context hold whatever the pool holds there: mask them (also the values: 0 * NaN is NaN).
    """
    blocks, heads, block_size, head_size = pool.shape
    rows, width = block_tables.shape
    # One gather in the final order: gathering whole blocks and moving the head axis costs a second pass over all of it.
    cells = block_tables[:, None, :] * heads + jnp.arange(heads, dtype=block_tables.dtype)[None, :, None]
    return pool.reshape(blocks * heads, block_size, head_size)[cells].reshape(rows, heads, width * block_size, head_size)
