"""Which block holds which tokens: full blocks found again by a chained hash, and confirmed by comparing tokens.

A block's keys and values depend on every token before it, so its name covers the whole prefix: sha256 over the parent's hash and
the block's own tokens. A hash only finds candidates; what decides is that tokens and parent are equal. Plain Python.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixRoot:
    """What a prefix starts from; blocks under different roots are never the same.

    Attributes:
      weights_version: of the weights that the keys and values come from.
      salt: keeps apart users who must not learn from a hit what others asked (`cache_salt`).
    """

    weights_version: int = 0
    salt: str = ""

    @property
    def hash(self) -> bytes:
        """The parent hash of a first block."""
        return hashlib.sha256(f"{self.weights_version}:{self.salt}".encode("utf-8", "surrogatepass")).digest()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A full block whose content is known.

    Attributes:
      hash: of the prefix that ends with this block.
      parent: the block before it, or the root. Compared by identity where it is a block: the index holds one entry for a content.
      token_ids: the block's own tokens.
      block_id: where its keys and values are.
    """

    hash: bytes
    parent: CachedBlock | PrefixRoot = dataclasses.field(repr=False)  # the chain may be thousands long
    token_ids: tuple[int, ...]
    block_id: int


Hasher = Callable[[bytes, Sequence[int]], bytes]


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """sha256 over the parent's hash and the tokens as int32."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


def hash_chain(root: PrefixRoot, token_ids: Sequence[int], block_size: int, known: list[bytes], hasher: Hasher = hash_block) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`; `known` is the start of the list, computed before. `known` is extended and returned."""
    for start in range(len(known) * block_size, len(token_ids) - block_size + 1, block_size):
        known.append(hasher(known[-1] if known else root.hash, token_ids[start : start + block_size]))
    return known


class PrefixIndex:
    """Entries by hash and by block. It counts no holders: that is the allocator's business."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, list[CachedBlock]] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def find(self, parent: CachedBlock | PrefixRoot, block_hash: bytes, token_ids: Sequence[int]) -> CachedBlock | None:
        """The entry with this parent and these tokens."""
        tokens = tuple(token_ids)
        for entry in self._by_hash.get(block_hash, ()):
            same_parent = entry.parent is parent or (isinstance(parent, PrefixRoot) and entry.parent == parent)
            if same_parent and entry.token_ids == tokens:
                return entry
        return None

    def add(self, parent: CachedBlock | PrefixRoot, block_hash: bytes, token_ids: Sequence[int], block_id: int) -> CachedBlock:
        """Name the content of a block. Where the same content is known already, that entry is returned and nothing changes."""
        known = self.find(parent, block_hash, token_ids)
        if known is not None:
            return known
        if block_id in self._by_block:
            raise ValueError(f"block {block_id} already has a content; it must be dropped before it gets another")
        entry = CachedBlock(block_hash, parent, tuple(token_ids), block_id)
        self._by_hash.setdefault(block_hash, []).append(entry)
        self._by_block[block_id] = entry
        return entry

    def drop(self, block_id: int) -> None:
        """Forget what the block holds. Blocks that continue it can no longer be found."""
        entry = self._by_block.pop(block_id)
        same_hash = self._by_hash[entry.hash]
        same_hash.remove(entry)
        if not same_hash:
            del self._by_hash[entry.hash]

    def clear(self) -> None:
        """Forget everything."""
        self._by_hash.clear()
        self._by_block.clear()
