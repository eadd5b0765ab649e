"""The KV cache: per layer one pool of keys and one of values, each ``[P, K, Z, H]``.

Per-layer arrays, not one stacked array: XLA then updates each in place, while a stacked pool sliced per layer for an
opaque kernel would be copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pagedjax.config import ModelConfig


@struct.dataclass
class KVCache:
    """Keys and values of every layer, `L` arrays ``[P, K, Z, H]`` each; physical block 0 is the null block."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def num_blocks(self) -> int:
        """Usable blocks, the null block not counted."""
        return self.keys[0].shape[0] - 1

    @property
    def block_size(self) -> int:
        """Tokens a block [Z]."""
        return self.keys[0].shape[2]


def make_cache(
    config: ModelConfig, num_blocks: int, block_size: int = 16, sharding: jax.sharding.Sharding | None = None, dtype: str | None = None
) -> KVCache:
    """A cache of zeros with `num_blocks` usable blocks of `block_size` tokens.

    Args:
      config: gives layers, KV heads, head size and dtype.
      num_blocks: usable blocks; the null block is added.
      block_size: tokens a block, a power of two.
      sharding: of each pool; by default the default device.
      dtype: of the pools; by default the model's.

    Raises:
      ValueError: a size that is not positive, or a block size that is no power of two.
    """
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size is {block_size}; it must be a power of two")
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
    shape = (num_blocks + 1, config.num_kv_heads, block_size, config.head_size)

    def pools() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, config.dtype if dtype is None else dtype, device=sharding) for _ in range(config.num_layers))

    return KVCache(pools(), pools())
