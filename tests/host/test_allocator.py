"""The allocator: exact ids, misuse, and under random use a plain model that predicts every id beside a five-line invariant."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedjax.allocator import BlockAllocator, blocks_for, total_blocks
from pagedjax.prefix_cache import CachedBlock, PrefixRoot, hash_block

ROOT = PrefixRoot()


def publish_chain(allocator: BlockAllocator, blocks: list[int], tokens: list[int], root: PrefixRoot = ROOT) -> list[CachedBlock]:
    """Publish blocks of one token each, every block the child of the one before."""
    parent, entries = root, []
    for block_id, token in zip(blocks, tokens, strict=True):
        parent = allocator.publish(parent, hash_block(parent.hash, [token]), [token], block_id)
        entries.append(parent)
    return entries


def found_blocks(allocator: BlockAllocator, tokens: list[int], root: PrefixRoot = ROOT) -> list[int]:
    hashes, parent = [], root.hash
    for token in tokens:
        parent = hash_block(parent, [token])
        hashes.append(parent)
    return [entry.block_id for entry in allocator.find(root, hashes, tokens, 1)]


def state(allocator: BlockAllocator) -> tuple[int, int, int]:
    assert allocator.num_available == allocator.num_free + allocator.num_cached
    return allocator.num_free, allocator.num_used, allocator.num_cached


def test_exact_ids_in_free_order():
    allocator = BlockAllocator(5)
    assert allocator.allocate(2) == [1, 2]
    assert allocator.allocate(2) == [3, 4]
    allocator.release([2, 1])
    assert allocator.allocate(3) == [5, 2, 1]
    assert allocator.num_free == 0


def test_all_or_nothing():
    allocator = BlockAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3
    assert allocator.allocate(0) == []


def test_shared_blocks_stay_until_the_last_holder_leaves():
    allocator = BlockAllocator(2)
    ids = allocator.allocate(2)
    allocator.share([1])
    allocator.release(ids)
    assert (allocator.num_free, allocator.reference_count(1), allocator.reference_count(2)) == (1, 1, 0)
    allocator.release([1])
    assert allocator.allocate(2) == [2, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.release([0]), "block 0 is the null block"),
        (lambda a: a.share([0]), "block 0 is the null block"),
        (lambda a: a.release([9]), "unknown block 9; blocks are 1 to 4"),
        (lambda a: a.reference_count(-1), "unknown block -1"),
        (lambda a: a.release([3]), "block 3 has no holder"),
        (lambda a: a.share([3]), "block 3 is free"),
        (lambda a: a.release([1, 1]), "block 1 is released 2 times but has 1 holders"),
        (lambda a: a.allocate(-1), "cannot allocate -1 blocks"),
        (lambda a: a.is_cached(5), "unknown block 5; blocks are 1 to 4"),
        (lambda a: a.is_cached(0), "block 0 is the null block"),
        (lambda a: publish_chain(a, [0], [7]), "block 0 is the null block"),
        (lambda a: publish_chain(a, [5], [7]), "unknown block 5"),
        (lambda a: publish_chain(a, [3], [7]), "block 3 has no holder; only a held block can be released or published"),
    ],
)
def test_misuse_raises_and_changes_nothing(call, message):
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=message):
        call(allocator)
    assert [allocator.reference_count(i) for i in range(1, 5)] == [1, 1, 0, 0]
    assert allocator.allocate(2) == [3, 4]


def test_a_partly_wrong_call_changes_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    for call, message in ((allocator.release, "block 4 has no holder"), (allocator.share, "block 4 is free")):
        with pytest.raises(ValueError, match=message):
            call([1, 4])
        assert allocator.reference_count(1) == 1


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 0; the pool needs at least 1 block"):
        BlockAllocator(0)


def test_blocks_for_lengths():
    assert [blocks_for(n, 16) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]
    assert total_blocks([1, 16, 17], 16) == 4


def test_released_blocks_with_known_content_are_cached_and_come_out_last():
    allocator = BlockAllocator(6)
    assert allocator.allocate(4) == [1, 2, 3, 4]
    publish_chain(allocator, [1, 2, 3], [10, 11, 12])
    assert state(allocator) == (2, 4, 0)
    allocator.release([4, 3, 2, 1])
    assert state(allocator) == (3, 0, 3)
    assert [allocator.is_cached(i) for i in range(1, 7)] == [True, True, True, False, False, False]
    assert found_blocks(allocator, [10, 11, 12, 13]) == [1, 2, 3]
    # Free blocks first, in the order of their release; then the tail of the chain, which was released first.
    assert allocator.allocate(4) == [5, 6, 4, 3]
    assert found_blocks(allocator, [10, 11, 12]) == [1, 2]
    assert state(allocator) == (0, 4, 2)
    assert allocator.allocate(3) is None and found_blocks(allocator, [10, 11]) == [1, 2]
    assert allocator.allocate(2) == [2, 1]
    assert found_blocks(allocator, [10]) == [] and state(allocator) == (0, 6, 0)


def test_finding_holds_nothing_and_sharing_takes_a_block_out_of_the_cached():
    allocator = BlockAllocator(4)
    publish_chain(allocator, allocator.allocate(3), [1, 2, 3])
    allocator.release([3, 2, 1])
    assert found_blocks(allocator, [1, 2]) == [1, 2] and state(allocator) == (1, 0, 3)
    allocator.share([1, 2])
    assert state(allocator) == (1, 2, 1) and not allocator.is_cached(1)
    allocator.share([1])
    assert [allocator.reference_count(i) for i in (1, 2, 3, 4)] == [2, 1, 0, 0]
    allocator.release([2, 1])
    assert state(allocator) == (1, 1, 2)
    allocator.release([1])
    # Block 3 was released before 2 and 1, and has not been used since.
    assert allocator.allocate(4) == [4, 3, 2, 1]


def test_use_makes_a_cached_block_young_again():
    allocator = BlockAllocator(3)
    ids = allocator.allocate(3)
    for block_id in ids:
        publish_chain(allocator, [block_id], [block_id])
    allocator.release(ids)
    allocator.share([1])
    allocator.release([1])
    assert allocator.allocate(2) == [2, 3]
    assert found_blocks(allocator, [1]) == [1]


def test_entries_that_are_cached_cannot_be_taken_twice():
    allocator = BlockAllocator(5)
    entries = publish_chain(allocator, allocator.allocate(3), [1, 2, 3])
    assert allocator.num_takeable(entries) == 2  # all of them are held: sharing costs nothing
    allocator.release([3, 2])
    assert allocator.num_takeable([]) == 4 and allocator.num_takeable(entries) == 2 and allocator.num_takeable(entries[:2]) == 3


def test_the_second_block_with_a_content_stays_private():
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    (first,) = publish_chain(allocator, [1], [5])
    (second,) = publish_chain(allocator, [2], [5])
    assert second is first and first.block_id == 1
    allocator.release([2])
    assert state(allocator) == (2, 1, 0) and not allocator.is_cached(2)
    # Under another root it is another content.
    assert allocator.allocate(2) == [3, 2]
    (other,) = publish_chain(allocator, [2], [5], PrefixRoot(salt="x"))
    assert other.block_id == 2
    assert found_blocks(allocator, [5]) == [1] and found_blocks(allocator, [5], PrefixRoot(salt="x")) == [2]


def test_a_block_gets_no_second_content():
    allocator = BlockAllocator(2)
    allocator.allocate(1)
    publish_chain(allocator, [1], [5])
    with pytest.raises(ValueError, match="block 1 already has a content; it must be dropped before it gets another"):
        publish_chain(allocator, [1], [6])
    assert found_blocks(allocator, [5]) == [1] and found_blocks(allocator, [6]) == []


def test_forgetting_frees_the_cached_and_leaves_the_used():
    allocator = BlockAllocator(5)
    publish_chain(allocator, allocator.allocate(4), [1, 2, 3, 4])
    allocator.release([4, 3])
    assert state(allocator) == (1, 2, 2)
    allocator.forget_cached()
    assert state(allocator) == (3, 2, 0) and found_blocks(allocator, [1, 2, 3, 4]) == []
    # A block that was known and held has no content any more: it is free when it comes back, and may get another one.
    allocator.release([2])
    assert state(allocator) == (4, 1, 0)
    publish_chain(allocator, [1], [9])
    assert found_blocks(allocator, [9]) == [1]
    assert allocator.allocate(4) == [5, 4, 3, 2]


class AllocatorMachine(RuleBasedStateMachine):
    """Blocks of one token out of two, so that contents meet often; the model keeps plain lists in the promised order."""

    SIZE = 7

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(self.SIZE)
        self.held: list[int] = []  # one entry a holder
        self.free = list(range(1, self.SIZE + 1))
        self.cached: list[int] = []
        self.known: dict[tuple[CachedBlock | PrefixRoot, int], CachedBlock] = {}
        self.parents: list[CachedBlock | PrefixRoot] = [PrefixRoot(), PrefixRoot(1), PrefixRoot(0, "salt")]

    def drop(self, block_id: int) -> int:
        self.known = {key: entry for key, entry in self.known.items() if entry.block_id != block_id}
        return block_id

    @rule(n=st.integers(0, SIZE + 1))
    def allocate(self, n: int) -> None:
        ids = self.allocator.allocate(n)
        if n > len(self.free) + len(self.cached):
            assert ids is None
            return
        assert ids == [self.free.pop(0) if self.free else self.drop(self.cached.pop(0)) for _ in range(n)]
        assert not set(ids) & set(self.held)
        self.held += ids

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(range(len(self.held))), unique=True, min_size=1))
        leaving = [self.held[i] for i in ids]
        self.allocator.release(leaving)
        for block_id in leaving:
            self.held.remove(block_id)
            if block_id not in self.held:
                named = any(entry.block_id == block_id for entry in self.known.values())
                (self.cached if named else self.free).append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=4))
        self.allocator.share(ids)
        self.held += ids

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 1))
    def publish(self, data: st.DataObject, token: int) -> None:
        named = {entry.block_id for entry in self.known.values()}
        parent = data.draw(st.sampled_from(self.parents))
        free_to_name = [i for i in self.held if i not in named]
        if not free_to_name:
            return
        block_id = data.draw(st.sampled_from(free_to_name))
        entry = self.allocator.publish(parent, hash_block(parent.hash, [token]), [token], block_id)
        if (parent, token) in self.known:
            assert entry is self.known[parent, token]
        else:
            assert entry.block_id == block_id
            self.known[parent, token] = entry
            self.parents.append(entry)

    @rule(root=st.sampled_from([PrefixRoot(), PrefixRoot(1), PrefixRoot(0, "salt")]), tokens=st.lists(st.integers(0, 1), max_size=4))
    def find_and_share(self, root: PrefixRoot, tokens: list[int]) -> None:
        expected, parent = [], root
        for token in tokens:
            if (parent, token) not in self.known:
                break
            parent = self.known[parent, token]
            expected.append(parent.block_id)
        assert found_blocks(self.allocator, tokens, root) == expected
        self.allocator.share(expected)
        self.cached = [i for i in self.cached if i not in expected]
        self.held += expected

    @rule()
    def forget(self) -> None:
        self.allocator.forget_cached()
        self.free += self.cached
        self.cached.clear()
        self.known.clear()

    @invariant()
    def counts_are_holders(self) -> None:
        holders = Counter(self.held)
        assert 0 not in holders
        assert state(self.allocator) == (len(self.free), len(holders), len(self.cached))
        assert self.allocator.num_free + self.allocator.num_used + self.allocator.num_cached == self.SIZE
        assert all(self.allocator.reference_count(i) == holders[i] for i in range(1, self.SIZE + 1))
        assert [i for i in range(1, self.SIZE + 1) if self.allocator.is_cached(i)] == sorted(self.cached)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
