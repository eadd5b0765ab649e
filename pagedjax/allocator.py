"""The block allocator: who holds which physical block. Plain Python, no clock, no randomness: same calls, same ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class BlockAllocator:
    """Free list and reference counts over the physical blocks ``1 .. num_blocks``.

    Block 0 is the null block: never given out, never counted. Blocks come out in the order in which they were released
    (first in, first out), so that a test can assert exact ids.

    Args:
      num_blocks: usable blocks, the null block not counted.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least 1 block beside the null block")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._counts = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def reference_count(self, block_id: int) -> int:
        """How many holders the block has."""
        self._check_id(block_id)
        return self._counts[block_id]

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` blocks, each with one holder, or none at all: ``None`` is the ordinary answer "not now"."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > len(self._free):
            return None
        ids = [self._free.popleft() for _ in range(n)]
        for block_id in ids:
            self._counts[block_id] = 1
        return ids

    def share(self, ids: Sequence[int]) -> None:
        """Add a holder to each block. All are checked before any changes."""
        for block_id in ids:
            self._check_held(block_id)
        for block_id in ids:
            self._counts[block_id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """Take a holder from each block; a block without holders is free again. All are checked before any changes."""
        leaving: dict[int, int] = {}
        for block_id in ids:
            self._check_held(block_id)
            leaving[block_id] = leaving.get(block_id, 0) + 1
            if leaving[block_id] > self._counts[block_id]:
                raise ValueError(f"block {block_id} is released {leaving[block_id]} times but has {self._counts[block_id]} holders")
        for block_id in ids:
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                self._free.append(block_id)

    def _check_id(self, block_id: int) -> None:
        if block_id == 0:
            raise ValueError("block 0 is the null block; nobody holds it")
        if not 1 <= block_id <= self.num_blocks:
            raise ValueError(f"unknown block {block_id}; blocks are 1 to {self.num_blocks}")

    def _check_held(self, block_id: int) -> None:
        self._check_id(block_id)
        if self._counts[block_id] == 0:
            raise ValueError(f"block {block_id} is free; only a held block can be shared or released")


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def total_blocks(lengths: Iterable[int], block_size: int) -> int:
    """Blocks that sequences of these lengths fill together, none shared."""
    return sum(blocks_for(n, block_size) for n in lengths)
