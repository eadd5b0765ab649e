"""Names of blocks: the chained hash against one made by hand, and an index in which tokens decide and not the hash."""

import hashlib
import struct

import pytest

from pagedjax.prefix_cache import PrefixIndex, PrefixRoot, hash_block, hash_chain

ROOT = PrefixRoot()


def test_the_hash_by_hand():
    root = hashlib.sha256(b"0:").digest()
    assert ROOT.hash == root
    first = hashlib.sha256(root + struct.pack("<2i", 7, 70_000)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 1, 2)).digest()
    assert hash_chain(ROOT, [7, 70_000, 1, 2, 9], 2, []) == [first, second]
    assert PrefixRoot(3, "user").hash == hashlib.sha256(b"3:user").digest()


def test_a_chain_goes_on_from_what_is_known():
    calls = []

    def count(parent, tokens):
        calls.append(list(tokens))
        return hash_block(parent, tokens)

    known = hash_chain(ROOT, [1, 2, 3, 4], 2, [], count)
    assert hash_chain(ROOT, [1, 2, 3, 4, 5, 6, 7], 2, known, count) is known
    assert calls == [[1, 2], [3, 4], [5, 6]]
    assert known == hash_chain(ROOT, [1, 2, 3, 4, 5, 6], 2, [])
    assert hash_chain(ROOT, [1], 2, []) == []


def test_tokens_and_parent_decide_where_all_hashes_are_equal():
    index = PrefixIndex()
    first = index.add(ROOT, b"h", [1, 2], 1)
    other = index.add(ROOT, b"h", [3, 4], 2)
    child = index.add(first, b"h", [3, 4], 3)
    assert len({first.block_id, other.block_id, child.block_id}) == len(index) == 3
    assert index.find(ROOT, b"h", [1, 2]) is first
    assert index.find(ROOT, b"h", [3, 4]) is other
    assert index.find(first, b"h", [3, 4]) is child
    assert index.find(other, b"h", [3, 4]) is None
    assert index.find(ROOT, b"h", [1, 2, 3]) is None
    assert index.find(ROOT, b"another", [1, 2]) is None


def test_weights_and_salts_have_roots_of_their_own():
    roots = [PrefixRoot(), PrefixRoot(1), PrefixRoot(0, "a"), PrefixRoot(1, "a")]
    assert len({root.hash for root in roots}) == 4
    index = PrefixIndex()
    entries = [index.add(root, b"h", [1, 2], i + 1) for i, root in enumerate(roots)]
    assert [index.find(root, b"h", [1, 2]) for root in roots] == entries
    assert index.find(PrefixRoot(1, "a"), b"h", [1, 2]) is entries[3]  # an equal root is the same root


def test_equal_content_is_kept_once():
    index = PrefixIndex()
    first = index.add(ROOT, b"h", [1, 2], 1)
    assert index.add(ROOT, b"h", [1, 2], 2) is first
    assert 1 in index and 2 not in index and len(index) == 1


def test_a_block_has_one_content():
    index = PrefixIndex()
    index.add(ROOT, b"h", [1, 2], 1)
    with pytest.raises(ValueError, match="block 1 already has a content; it must be dropped before it gets another"):
        index.add(ROOT, b"g", [3, 4], 1)
    index.drop(1)
    assert index.add(ROOT, b"g", [3, 4], 1).token_ids == (3, 4)


def test_without_its_parent_a_child_is_not_found():
    index = PrefixIndex()
    parent = index.add(ROOT, b"p", [1, 2], 1)
    child = index.add(parent, b"c", [3, 4], 2)
    index.drop(1)
    assert index.find(ROOT, b"p", [1, 2]) is None
    again = index.add(ROOT, b"p", [1, 2], 3)
    assert index.find(again, b"c", [3, 4]) is None  # the child belongs to the block that is gone
    assert index.add(again, b"c", [3, 4], 4) is not child
    assert 2 in index  # until it is evicted itself


def test_nothing_is_left_after_dropping_or_clearing():
    index = PrefixIndex()
    for block in range(1, 4):
        index.add(ROOT, b"h", [block], block)
    index.drop(2)
    assert (1 in index, 2 in index, 3 in index) == (True, False, True)
    index.drop(1)
    index.drop(3)
    assert not index._by_hash
    index.add(ROOT, b"h", [1], 1)
    index.clear()
    assert len(index) == 0 and index.find(ROOT, b"h", [1]) is None
