"""The block allocator: who holds which physical block, and what is in it. Plain Python, no clock, no randomness: same calls, same ids."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from pagedjax.prefix_cache import CachedBlock, PrefixIndex, PrefixRoot


class BlockAllocator:
    """Reference counts over the physical blocks ``1 .. num_blocks``, and an index of full blocks by content.

    Block 0 is the null block: never given out, never counted. Every other block is in one of three states: *used* (it has holders),
    *cached* (no holder, but its content can be found again) or *free*. Free blocks come out first, in the order in which they were
    released (first in, first out); then cached ones, those first that were released first. So a test can assert exact ids.

    Args:
      num_blocks: usable blocks, the null block not counted.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least 1 block beside the null block")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._counts = [0] * (num_blocks + 1)
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and whose content nobody can find."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content can be found; `allocate` takes them when no block is free."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - self.num_available

    def reference_count(self, block_id: int) -> int:
        """How many holders the block has."""
        self._check_id(block_id)
        return self._counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        """Whether nobody holds the block but its content can be found."""
        self._check_id(block_id)
        return block_id in self._cached

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` blocks, each with one holder, or none at all: ``None`` is the ordinary answer "not now"."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.num_available:
            return None
        ids = [self._free.popleft() if self._free else self._evict() for _ in range(n)]
        for block_id in ids:
            self._counts[block_id] = 1
        return ids

    def share(self, ids: Sequence[int]) -> None:
        """Add a holder to each block, used or cached. All are checked before any changes."""
        for block_id in ids:
            self._check_id(block_id)
            if self._counts[block_id] == 0 and block_id not in self._cached:
                raise ValueError(f"block {block_id} is free; only a held or cached block can be shared")
        for block_id in ids:
            self._cached.pop(block_id, None)
            self._counts[block_id] += 1

    def release(self, ids: Sequence[int]) -> None:
        """Take a holder from each block. All are checked before any changes.

        A block without holders is cached if its content is known, else free. Of one sequence give the last block first: it is
        then evicted first, and the prefix, which more sequences share, stays longest.
        """
        leaving: dict[int, int] = {}
        for block_id in ids:
            self._check_held(block_id)
            leaving[block_id] = leaving.get(block_id, 0) + 1
            if leaving[block_id] > self._counts[block_id]:
                raise ValueError(f"block {block_id} is released {leaving[block_id]} times but has {self._counts[block_id]} holders")
        for block_id in ids:
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                if block_id in self._index:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def publish(self, parent: CachedBlock | PrefixRoot, block_hash: bytes, token_ids: Sequence[int], block_id: int) -> CachedBlock:
        """Make a held block's content known; its holders must not write to it any more.

        Args:
          parent: the entry of the block before it, or the root.
          block_hash: of the prefix that ends here, see `prefix_cache.hash_block`.
          token_ids: the block's tokens.
          block_id: the block.

        Returns:
          the entry of this content. It names another block where another holder was first; `block_id` then stays private.
        """
        self._check_held(block_id)
        return self._index.add(parent, block_hash, token_ids, block_id)

    def find(self, root: PrefixRoot, hashes: Sequence[bytes], token_ids: Sequence[int], block_size: int) -> list[CachedBlock]:
        """The longest run of known blocks at the start of `token_ids`, one for each of `hashes` at most. Nobody holds them by that."""
        found: list[CachedBlock] = []
        for i, block_hash in enumerate(hashes):
            entry = self._index.find(found[-1] if found else root, block_hash, token_ids[i * block_size : (i + 1) * block_size])
            if entry is None:
                break
            found.append(entry)
        return found

    def num_takeable(self, entries: Sequence[CachedBlock]) -> int:
        """Blocks that `allocate` could still give once these entries are shared."""
        return self.num_available - sum(entry.block_id in self._cached for entry in entries)

    def forget_cached(self) -> None:
        """Make every content unknown: cached blocks are free, used ones stay with their holders."""
        self._index.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        self._index.drop(block_id)
        return block_id

    def _check_id(self, block_id: int) -> None:
        if block_id == 0:
            raise ValueError("block 0 is the null block; nobody holds it")
        if not 1 <= block_id <= self.num_blocks:
            raise ValueError(f"unknown block {block_id}; blocks are 1 to {self.num_blocks}")

    def _check_held(self, block_id: int) -> None:
        self._check_id(block_id)
        if self._counts[block_id] == 0:
            raise ValueError(f"block {block_id} has no holder; only a held block can be released or published")


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def total_blocks(lengths: Iterable[int], block_size: int) -> int:
    """Blocks that sequences of these lengths fill together, none shared."""
    return sum(blocks_for(n, block_size) for n in lengths)
