"""The scheduler: who runs in the next step, with which blocks. No clock, no randomness, no device: same calls, same result.

There is no prefill mode and no decode mode. Each sequence has `num_computed_tokens` and catches up to its length under a token budget;
chunked prefill, prefix hits and recompute after a preemption are all that one sentence.

The host may be a step behind: `schedule` counts what dispatched steps will have done, and `update` brings the tokens that they gave.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from pagedjax.allocator import BlockAllocator, blocks_for
from pagedjax.prefix_cache import CachedBlock, Hasher, PrefixRoot, hash_block, hash_chain
from pagedjax.sequence import Status, TokenSequence


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Tokens of a sequence that one step computes: `query_len` of them after the `num_computed_tokens` before.

    `is_last` says that it ends with the newest token, so that the step gives the next one.
    """

    sequence: TokenSequence
    num_computed_tokens: int
    query_len: int
    is_last: bool


@dataclasses.dataclass(frozen=True)
class ScheduledBatch:
    """One dispatch: `num_steps` decode steps of the `decodes`, or one step of them and of the `prefills`.

    Attributes:
      decodes: rows that compute their newest token, which may be known to the device alone.
      prefills: rows that catch up.
      num_steps: 1 where there are prefills.
      num_tokens: for each of the decodes, how many new tokens it may get.
    """

    decodes: tuple[TokenSequence, ...]
    prefills: tuple[PrefillChunk, ...]
    num_steps: int
    num_tokens: tuple[int, ...]


@dataclasses.dataclass
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
    num_finished: int = 0
    num_mixed_steps: int = 0
    num_windows: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class WaitingQueue:
    """Waiting sequences, the one that goes first in front. A million of them cost no more each than a few.

    A sequence that is finished while it waits stays inside, unseen, until it comes to the front or there are too many of its kind.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], TokenSequence]] = []
        self._num_finished = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def push(self, sequence: TokenSequence) -> None:
        """Add a sequence; no two have the same `order`."""
        heapq.heappush(self._heap, (sequence.order, sequence))

    def first(self) -> TokenSequence | None:
        """Who goes first; ``None`` where nobody waits."""
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
            self._num_finished -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out `first()`."""
        heapq.heappop(self._heap)

    def forget_finished(self, count: int) -> None:
        """`count` of the sequences inside have been finished."""
        self._num_finished += count
        if self._num_finished * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is not Status.FINISHED]
            heapq.heapify(self._heap)
            self._num_finished = 0

    def in_order(self) -> list[TokenSequence]:
        """All of them, sorted."""
        return [seq for _, seq in sorted(self._heap, key=lambda entry: entry[0]) if seq.status is not Status.FINISHED]


class Scheduler:
    """Decides one step after the other over a `BlockAllocator`.

    Args:
      allocator: of the pool.
      block_size: tokens a block.
      max_num_seqs: the most sequences that run at once; also the rows of the device's state.
      max_blocks: columns of the block table: the most blocks that a sequence may hold.
      token_budget: the most tokens in a step, a decode row counting 1.
      max_prefill_rows: the most prefill chunks in a step.
      window: decode steps in a dispatch while no prefill can run.
      prefix_caching: whether full blocks are found again.
      hasher: of a block; see `prefix_cache.hash_block`.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_num_seqs: int,
        max_blocks: int,
        token_budget: int,
        max_prefill_rows: int,
        window: int,
        prefix_caching: bool = True,
        hasher: Hasher = hash_block,
    ) -> None:
        self.allocator = allocator
        self.stats = SchedulerStats()
        self.weights_version = 0
        self.num_preempted = 0  # of the waiting, those that lost their blocks
        self._queue = WaitingQueue()
        self.running: list[TokenSequence] = []  # sorted by `order`
        # Row `state_id` is the block table of the sequence that runs there; unused entries name the null block.
        self.tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._state_ids = list(range(max_num_seqs - 1, -1, -1))  # the lowest comes out first
        self._block_size, self._max_num_seqs, self._token_budget = block_size, max_num_seqs, token_budget
        self._max_prefill_rows, self._window = max_prefill_rows, window
        self._prefix_caching, self._hasher = prefix_caching, hasher

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, the preempted ones among them."""
        return len(self._queue)

    @property
    def waiting(self) -> list[TokenSequence]:
        """The waiting sequences, who goes first first. Sorts them all: a view, not for every step."""
        return self._queue.in_order()

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._queue or self.running)

    def add(self, sequence: TokenSequence) -> None:
        """Queue a sequence."""
        self._queue.push(sequence)

    def schedule(self, *, drained: bool = True) -> ScheduledBatch | None:
        """Decide the next dispatch and count it as done; ``None`` where nothing can run before more results are there.

        Args:
          drained: whether the results of all dispatches have been brought by `update`. Only then is anything preempted: a row in
            flight may have ended already, and the tokens that it got must be known before they can be computed again.
        """
        # Where rows take the whole budget, a prompt cannot begin either.
        prefills_wait = any(seq.lag for seq in self.running) or (len(self.running) < self._token_budget and self._first_can_start())
        num_steps = 1 if prefills_wait else self._longest_window()
        while True:
            planned = self._plan_running(num_steps)
            if planned is not None:
                break
            if num_steps > 1:
                num_steps = 1
            elif not drained:
                return None
            else:
                self._preempt(self.running[-1])
        decodes, prefills = planned
        if prefills_wait:
            budget = self._token_budget - len(decodes) - sum(chunk.query_len for chunk in prefills)
            prefills += self._admit(budget, self._max_prefill_rows - len(prefills))
        if not decodes and not prefills:
            return None
        return self._commit(decodes, prefills, num_steps)

    def update(self, sequence: TokenSequence, num_expected: int, token_ids: Sequence[int]) -> None:
        """Bring the tokens that a dispatch gave to a running sequence.

        Args:
          sequence: a running sequence of that dispatch.
          num_expected: how many the dispatch was counted for.
          token_ids: those that it gave; fewer where the sequence ended.
        """
        sequence.num_in_flight -= num_expected
        sequence.token_ids.extend(token_ids)
        if len(sequence.token_ids) > (sequence.num_published + 1) * self._block_size:  # else no further block can be full
            self._publish(sequence)

    def finish(self, sequence: TokenSequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back."""
        if sequence.status is Status.FINISHED:
            return
        self.num_preempted -= sequence.status is Status.PREEMPTED
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
            sequence.status = Status.FINISHED
        else:
            sequence.status = Status.FINISHED
            self._queue.forget_finished(1)
        self.stats.num_finished += 1

    def preempt_all(self) -> None:
        """Preempt everything that runs. The results of all dispatches must have been brought."""
        while self.running:
            self._preempt(self.running[-1])

    def new_weights(self) -> None:
        """Make every block that was computed so far unreachable; what runs must have been preempted."""
        self.weights_version += 1
        self.allocator.forget_cached()

    # What runs.

    def _longest_window(self) -> int:
        """`window`, or 1 where no row may get more."""
        return self._window if any(seq.num_left > 1 for seq in self.running) else 1

    def _plan_running(self, num_steps: int) -> tuple[list[tuple[TokenSequence, int]], list[PrefillChunk]] | None:
        """What the running sequences do in the next dispatch, with blocks for all of it; ``None`` where the blocks do not suffice.

        Blocks that were taken before that stay reserved: the same sequence needs them a little later.
        """
        decodes: list[tuple[TokenSequence, int]] = []
        prefills: list[PrefillChunk] = []
        budget = self._token_budget
        for seq in self.running:
            if budget == 0:
                break
            if seq.decoding:
                count = min(num_steps, seq.num_left)
                if count <= 0:
                    continue  # its last tokens are in flight
                if not self._reserve(seq, seq.num_computed_tokens + count):
                    return None
                decodes.append((seq, count))
                budget -= 1
            elif len(prefills) < self._max_prefill_rows:
                chunk = _chunk(seq, budget)
                prefills.append(chunk)
                budget -= chunk.query_len
        return decodes, prefills

    def _reserve(self, seq: TokenSequence, num_tokens: int) -> bool:
        missing = blocks_for(num_tokens, self._block_size) - len(seq.block_ids)
        if missing <= 0:
            return True
        ids = self.allocator.allocate(missing)
        if ids is None:
            return False
        self._append_blocks(seq, ids)
        return True

    def _append_blocks(self, seq: TokenSequence, ids: Sequence[int]) -> None:
        start = len(seq.block_ids)
        seq.block_ids.extend(ids)
        self.tables[seq.state_id, start : start + len(ids)] = ids

    def _commit(self, decodes: Sequence[tuple[TokenSequence, int]], prefills: Sequence[PrefillChunk], num_steps: int) -> ScheduledBatch:
        for seq, count in decodes:
            seq.num_computed_tokens += count
            seq.num_in_flight += count
        for chunk in prefills:
            seq = chunk.sequence
            seq.num_computed_tokens += chunk.query_len
            if chunk.is_last:
                seq.decoding = True
                seq.num_in_flight += 1
            # Nothing is planned any more for this step, so a block found from now on is read by a later one.
            self._publish(seq)
        self.stats.num_mixed_steps += bool(decodes and prefills)
        self.stats.num_windows += num_steps > 1
        return ScheduledBatch(tuple(seq for seq, _ in decodes), tuple(prefills), num_steps, tuple(count for _, count in decodes))

    # Who comes and goes.

    def _first_can_start(self) -> bool:
        first = self._queue.first()
        return first is not None and bool(self._state_ids) and self._can_start(first, self._find(first))

    def _can_start(self, seq: TokenSequence, found: Sequence[CachedBlock]) -> bool:
        if not self._state_ids:
            return False
        missing = blocks_for(len(seq.token_ids), self._block_size) - len(found)
        # A block for each running sequence is left, which it will ask for before long. So who was preempted, and would be so again,
        # waits until somebody has finished: what it gave back is one block short at least.
        return missing + len(self.running) <= self.allocator.num_takeable(found)

    def _admit(self, budget: int, num_rows: int) -> list[PrefillChunk]:
        """Start waiting sequences, first come first, each with all the blocks that its known tokens need."""
        chunks: list[PrefillChunk] = []
        while (seq := self._queue.first()) is not None and budget > 0 and len(chunks) < num_rows:
            found = self._find(seq)
            if not self._can_start(seq, found):
                break
            self._queue.pop()
            self.num_preempted -= seq.status is Status.PREEMPTED
            self.allocator.share([entry.block_id for entry in found])
            ids = self.allocator.allocate(blocks_for(len(seq.token_ids), self._block_size) - len(found))
            assert ids is not None, "counted before"
            seq.state_id = self._state_ids.pop()
            self._append_blocks(seq, [entry.block_id for entry in found])
            self._append_blocks(seq, ids)
            seq.num_computed_tokens = len(found) * self._block_size
            seq.published, seq.num_published = found[-1] if found else self._root(seq), len(found)
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
            self.stats.num_prompt_tokens += len(seq.token_ids)
            self.stats.num_cached_tokens += seq.num_computed_tokens
            seq.status = Status.RUNNING
            bisect.insort(self.running, seq, key=lambda s: s.order)
            chunk = _chunk(seq, budget)
            chunks.append(chunk)
            budget -= chunk.query_len
        return chunks

    def _preempt(self, seq: TokenSequence) -> None:
        assert seq.num_in_flight == 0, "a row in flight cannot be preempted"
        self._leave(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.num_preempted += 1
        self._queue.push(seq)

    def _leave(self, seq: TokenSequence) -> None:
        self.running.remove(seq)
        self.allocator.release(seq.block_ids[::-1])
        self.tables[seq.state_id] = 0
        bisect.insort(self._state_ids, seq.state_id, key=lambda i: -i)
        seq.state_id, seq.decoding, seq.num_computed_tokens, seq.num_in_flight = -1, False, 0, 0
        seq.block_ids.clear()
        seq.published, seq.num_published = None, 0

    # The prefix cache.

    def _root(self, seq: TokenSequence) -> PrefixRoot:
        return PrefixRoot(self.weights_version, seq.salt)

    def _hashes(self, seq: TokenSequence) -> list[bytes]:
        root = self._root(seq)
        if seq.hashes_root != root:
            seq.hashes_root, seq.hashes = root, []
        return hash_chain(root, seq.token_ids, self._block_size, seq.hashes, self._hasher)

    def _find(self, seq: TokenSequence) -> list[CachedBlock]:
        """Known blocks at the start of a waiting sequence. Its last token is computed in any case: somebody has to give the logits."""
        if not self._prefix_caching or seq.wants_prompt_logprobs:
            return []
        usable = (len(seq.token_ids) - 1) // self._block_size
        return self.allocator.find(self._root(seq), self._hashes(seq)[:usable], seq.token_ids, self._block_size)

    def _publish(self, seq: TokenSequence) -> None:
        """Make known the full blocks whose tokens the host has seen and whose keys and values every later step will find."""
        if not self._prefix_caching or seq.published is None:
            return
        # The newest token of a decoding row may be a stop, and the row then never computed it.
        known = min(seq.num_computed_tokens, len(seq.token_ids) - 1) if seq.decoding else seq.num_computed_tokens
        if known // self._block_size <= seq.num_published:
            return
        hashes = self._hashes(seq)
        for i in range(seq.num_published, known // self._block_size):
            tokens = seq.token_ids[i * self._block_size : (i + 1) * self._block_size]
            seq.published = self.allocator.publish(seq.published, hashes[i], tokens, seq.block_ids[i])
            seq.num_published = i + 1


def _chunk(seq: TokenSequence, budget: int) -> PrefillChunk:
    return PrefillChunk(seq, seq.num_computed_tokens, min(seq.lag, budget), seq.lag <= budget)
