"""The allocator: exact ids, misuse, and a five-line invariant under random use."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedjax.allocator import BlockAllocator, blocks_for, total_blocks


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


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(7)
        self.held: list[int] = []  # one entry a holder

    @rule(n=st.integers(0, 8))
    def allocate(self, n: int) -> None:
        free = self.allocator.num_free
        ids = self.allocator.allocate(n)
        assert (ids is None) == (n > free)
        if ids is not None:
            assert len(ids) == n and not set(ids) & set(self.held)
            self.held += ids

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(range(len(self.held))), unique=True, min_size=1))
        leaving = [self.held[i] for i in ids]
        self.allocator.release(leaving)
        self.held = list((Counter(self.held) - Counter(leaving)).elements())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=4))
        self.allocator.share(ids)
        self.held += ids

    @invariant()
    def counts_are_holders(self) -> None:
        holders = Counter(self.held)
        assert 0 not in holders
        assert self.allocator.num_free + len(holders) == 7
        assert all(self.allocator.reference_count(i) == holders[i] for i in range(1, 8))


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
