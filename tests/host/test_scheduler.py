"""The scheduler's decisions, exactly in small cases and at random over a device that knows what every cell holds."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedjax.allocator import BlockAllocator
from pagedjax.prefix_cache import hash_block
from pagedjax.request import SamplingParams, make_request
from pagedjax.scheduler import Scheduler, WaitingQueue
from pagedjax.sequence import Status, TokenSequence

Z = 4  # tokens a block


def scheduler(num_blocks=20, **changes):
    limits = dict(block_size=Z, max_num_seqs=4, max_blocks=num_blocks, token_budget=32, max_prefill_rows=4, window=8)
    return Scheduler(BlockAllocator(num_blocks), **limits | changes)


def sequence(arrival, tokens, max_tokens=8, *, priority=0, salt="", stop=(), capacity=10_000):
    ids = list(range(100 * arrival, 100 * arrival + tokens)) if isinstance(tokens, int) else tokens
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
    request = make_request(ids, params, eos_ids=(), vocab_size=10**6, max_model_len=capacity, default_seed=0)
    return TokenSequence(str(arrival), request, arrival, priority, salt)


def shown(batch):
    """What a batch does, short: decode rows with their tokens, then chunks as (who, from, count), then the steps."""
    decodes = {seq.request_id: count for seq, count in zip(batch.decodes, batch.num_tokens, strict=True)}
    return decodes, [(c.sequence.request_id, c.num_computed_tokens, c.query_len) for c in batch.prefills], batch.num_steps


class Device:
    """Runs what the scheduler decides, in order. A cell remembers the token in it and all tokens before that one.

    Every read goes through the scheduler's block table as it was at the dispatch, and must see the row's own tokens, no others.
    The next token is a number made from the whole context, so a wrong cell also changes the answer.
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.cells = {}
        self.rows = {}  # state id -> tokens, new tokens left, done
        self.flights = []

    @staticmethod
    def next_token(context):
        return random.Random(hash(tuple(context))).randrange(50)

    def slot(self, table, position):
        block = int(table[position // Z])
        assert block != 0, "a token without a block"
        return block * Z + position % Z

    def write(self, table, context, position):
        block = int(table[position // Z])
        assert self.scheduler.allocator.reference_count(block) == 1, f"block {block} has several holders and is written"
        self.cells[self.slot(table, position)] = tuple(context[: position + 1])

    def read(self, table, context):
        for position in range(len(context)):
            assert self.cells.get(self.slot(table, position)) == tuple(context[: position + 1]), "a cell holds something else"

    def dispatch(self, batch):
        tables = self.scheduler.tables.copy()
        for row in (*batch.decodes, *(chunk.sequence for chunk in batch.prefills)):
            held = [int(b) for b in tables[row.state_id] if b]
            assert held == row.block_ids
            assert all(self.scheduler.allocator.reference_count(b) >= 1 for b in held)
        given = {}
        for row in batch.decodes:
            state = self.rows[row.state_id]
            given[row] = []
            for _ in range(batch.num_steps):
                if not state["done"]:
                    self.compute(tables[row.state_id], state)
                    given[row].append(state["tokens"][-1])
        for chunk in batch.prefills:
            seq, end = chunk.sequence, chunk.num_computed_tokens + chunk.query_len
            table = tables[seq.state_id]
            for position in range(chunk.num_computed_tokens, end):
                self.write(table, seq.token_ids, position)
            self.read(table, seq.token_ids[:end])
            if chunk.is_last:
                left = seq.request.max_new_tokens - seq.num_new_tokens
                state = dict(tokens=list(seq.token_ids), left=left, done=False, stop=seq.request.stop_token_ids)
                self.rows[seq.state_id] = state
                self.sample(state)
                given[seq] = [state["tokens"][-1]]
        self.flights.append((batch, given))

    def compute(self, table, state):
        position = len(state["tokens"]) - 1
        self.write(table, state["tokens"], position)
        self.read(table, state["tokens"])
        self.sample(state)

    def sample(self, state):
        token = self.next_token(state["tokens"])
        state["tokens"].append(token)
        state["left"] -= 1
        state["done"] = state["left"] == 0 or token in state["stop"]

    def take(self, finished):
        """Bring the oldest dispatch's tokens to the scheduler; sequences in `finished` are gone."""
        batch, given = self.flights.pop(0)
        expected = dict(zip(batch.decodes, batch.num_tokens, strict=True)) | {c.sequence: 1 for c in batch.prefills if c.is_last}
        for seq, count in expected.items():
            if seq in finished:
                continue
            tokens = given[seq]
            self.scheduler.update(seq, count, tokens)
            if tokens and (seq.num_new_tokens == seq.request.max_new_tokens or tokens[-1] in seq.request.stop_token_ids):
                self.scheduler.finish(seq)
                finished.add(seq)


def alone(seq):
    """The answer of a sequence that has the device to itself."""
    tokens = list(seq.request.prompt_token_ids)
    for _ in range(seq.request.max_new_tokens):
        tokens.append(Device.next_token(tokens))
        if tokens[-1] in seq.request.stop_token_ids:
            break
    return tokens


def run(scheduler, sequences, *, ahead=True):
    """To the end, a step ahead of the results as the engine is; the batches. Every answer is as alone."""
    device = getattr(scheduler, "device", None) or Device(scheduler)
    scheduler.device = device  # its cells outlive this run
    finished, batches = set(), []
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_work or device.flights:
        batch = scheduler.schedule(drained=not device.flights)
        if batch is not None:
            batches.append(shown(batch))
            device.dispatch(batch)
        if device.flights and (batch is None or not ahead or len(device.flights) > 1):
            device.take(finished)
        assert len(batches) < 10_000
    assert [seq.token_ids for seq in sequences] == [alone(seq) for seq in sequences]
    nothing_left(scheduler)
    return batches


def nothing_left(scheduler):
    assert not scheduler.running and scheduler.num_waiting == scheduler.num_preempted == 0
    assert scheduler.allocator.num_available == scheduler.allocator.num_blocks
    assert not scheduler.tables.any()
    assert len(scheduler._state_ids) == scheduler.tables.shape[0]


def test_a_prompt_then_windows_then_the_rest():
    assert run(scheduler(), [sequence(1, 5, max_tokens=18)]) == [
        ({}, [("1", 0, 5)], 1),
        ({"1": 8}, [], 8),
        ({"1": 8}, [], 8),
        ({"1": 1}, [], 1),
    ]


def test_long_prompts_are_cut_and_rows_that_run_come_first():
    one, two = sequence(1, 6, max_tokens=3), sequence(2, 20, max_tokens=2)
    assert run(scheduler(token_budget=8), [one, two]) == [
        ({}, [("1", 0, 6), ("2", 0, 2)], 1),
        ({"1": 1}, [("2", 2, 7)], 1),
        ({"1": 1}, [("2", 9, 7)], 1),
        ({}, [("2", 16, 4)], 1),
        ({"2": 1}, [], 1),
    ]


def test_no_more_chunks_than_a_step_has_room_for():
    several = [sequence(i, 2, max_tokens=1) for i in range(4)]
    assert [len(chunks) for _, chunks, _ in run(scheduler(max_prefill_rows=3), several)] == [3, 1]


def test_first_come_first_and_lower_priorities_before():
    order = [sequence(1, 3), sequence(2, 3, priority=1), sequence(3, 3), sequence(4, 3, priority=-5)]
    batches = run(scheduler(max_num_seqs=1, window=1), order)
    assert [chunks[0][0] for _, chunks, _ in batches if chunks] == ["4", "1", "3", "2"]


def test_the_window_is_one_only_while_a_prompt_can_be_admitted():
    s = scheduler(max_num_seqs=2)
    device, finished = Device(s), set()
    for i in range(2):
        s.add(sequence(i, 3, max_tokens=20))

    def step():
        batch = s.schedule()
        device.dispatch(batch)
        device.take(finished)
        return shown(batch)

    step()
    assert step()[2] == 8
    s.add(sequence(2, 3, max_tokens=20))  # no row is free for it
    assert step()[2] == 8
    s.finish(next(seq for seq in s.running if seq.request_id == "0"))
    decodes, chunks, steps = step()
    assert (list(decodes), [c[0] for c in chunks], steps) == (["1"], ["2"], 1)


def test_windows_go_on_where_rows_take_the_whole_budget():
    batches = run(scheduler(token_budget=2, max_prefill_rows=1), [sequence(i, 1, max_tokens=17) for i in range(3)])
    assert [steps for decodes, _, steps in batches if len(decodes) == 2] == [8, 8]


def test_two_that_need_most_of_the_pool_both_finish():
    """10 blocks, each needs 8: the later one gives its blocks back once, and waits until the first has finished."""
    s = scheduler(10, window=8)
    run(s, [sequence(1, 2 * Z, max_tokens=6 * Z), sequence(2, 2 * Z, max_tokens=6 * Z)])
    assert s.stats.num_preemptions == 1


def test_who_came_last_is_preempted_first_and_nobody_thrashes():
    s = scheduler(12, max_num_seqs=3, window=2)
    sequences = [sequence(i, Z, max_tokens=7 * Z) for i in range(3)]
    run(s, sequences)
    assert [seq.num_preemptions for seq in sequences] == [0, 1, 1]


def test_a_lower_priority_is_preempted_before_who_came_later():
    s = scheduler(10, window=1)
    sequences = [sequence(1, 2 * Z, max_tokens=6 * Z, priority=1), sequence(2, 2 * Z, max_tokens=6 * Z)]
    run(s, sequences)
    assert [seq.num_preemptions for seq in sequences] == [1, 0]


def test_nothing_is_preempted_while_results_are_on_their_way():
    s = scheduler(6, max_num_seqs=2, window=1)
    device = Device(s)
    for i in range(2):
        s.add(sequence(i, 2 * Z, max_tokens=4 * Z, stop=(10**5,)))
    while (batch := s.schedule(drained=False)) is not None:
        device.dispatch(batch)
    assert len(s.running) == 2 and s.stats.num_preemptions == 0
    finished = set()
    while device.flights:
        device.take(finished)
    assert s.schedule(drained=True) is not None
    assert s.stats.num_preemptions == 1


def test_admission_leaves_a_block_for_everyone_who_runs():
    s = scheduler(5)
    first, second = sequence(1, 2 * Z), sequence(2, 3 * Z)
    s.add(first)
    s.schedule()
    s.add(second)
    assert [c.sequence for c in s.schedule().prefills] == []  # 3 blocks are free and 3 are needed: the first would starve at once
    assert run(scheduler(6), [sequence(1, 2 * Z, max_tokens=1), sequence(2, 3 * Z, max_tokens=1)])[0][1] == [("1", 0, 8), ("2", 0, 12)]


def test_two_whole_blocks_twice_take_one_from_the_cache():
    s = scheduler()
    prompt = list(range(2 * Z))
    run(s, [sequence(1, prompt)])
    again = sequence(2, prompt)
    assert run(s, [again])[0] == ({}, [("2", Z, Z)], 1)
    assert again.num_cached_tokens == Z


def test_equal_prompts_in_one_step_share_nothing_and_the_next_one_does():
    s = scheduler()
    prompt = list(range(3 * Z))
    twins = [sequence(1, prompt, max_tokens=9), sequence(2, prompt, max_tokens=9)]
    third = sequence(3, [*prompt[: 2 * Z], 77], max_tokens=9)
    device, finished = Device(s), set()
    for seq in twins:
        s.add(seq)
    device.dispatch(s.schedule())
    s.add(third)
    batch = s.schedule(drained=False)  # the first step is still running
    device.dispatch(batch)
    assert shown(batch)[1] == [("3", 2 * Z, 1)]
    assert [seq.num_cached_tokens for seq in (*twins, third)] == [0, 0, 2 * Z]
    assert s.allocator.reference_count(third.block_ids[0]) == 2
    while s.has_work or device.flights:
        if device.flights:
            device.take(finished)
        if (batch := s.schedule(drained=not device.flights)) is not None:
            device.dispatch(batch)
    assert [seq.token_ids for seq in (*twins, third)] == [alone(seq) for seq in (*twins, third)]
    nothing_left(s)


def test_answers_are_found_too():
    s = scheduler()
    first = sequence(1, 3, max_tokens=14)
    run(s, [first])
    more = sequence(2, [*first.token_ids, 5, 6])
    run(s, [more])
    assert more.num_cached_tokens == 16 == (len(first.token_ids) - 1) // Z * Z


def test_what_follows_a_stop_is_never_found():
    """The row stops inside a window whose other cells are reserved; its last token was never computed."""
    probe = alone(sequence(1, 3, max_tokens=30))
    stop = probe[3 + 4]  # the fifth new token: 8 tokens, two blocks if the last one counted
    first = sequence(1, 3, max_tokens=30, stop=(stop,))
    s = scheduler()
    run(s, [first])
    assert len(first.token_ids) == 3 + probe[3:].index(stop) + 1
    more = sequence(2, [*first.token_ids, 5, 6])
    run(s, [more])
    assert more.num_cached_tokens == (len(first.token_ids) - 1) // Z * Z


def test_salts_weights_and_the_switch_keep_prompts_apart():
    s = scheduler()
    prompt = list(range(10))
    run(s, [sequence(1, prompt, salt="a")])
    other, same = sequence(2, prompt, salt="b"), sequence(3, prompt, salt="a")
    run(s, [other, same])
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 2 * Z)
    s.preempt_all()
    s.new_weights()
    assert s.allocator.num_cached == 0
    late = sequence(4, prompt, salt="a")
    run(s, [late])
    assert late.num_cached_tokens == 0
    off = scheduler(prefix_caching=False)
    run(off, [sequence(1, prompt)])
    late = sequence(2, prompt)
    run(off, [late])
    assert late.num_cached_tokens == 0 and off.allocator.num_cached == 0


@pytest.mark.parametrize("hasher", [hash_block, lambda parent, tokens: b"same"])
def test_a_hash_that_says_nothing_changes_nothing(hasher):
    s = scheduler(hasher=hasher)
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9, 9], [5, 6, 7, 8, 1, 2, 3, 4, 9]]
    run(s, [sequence(i, text) for i, text in enumerate(texts)])
    hot = [sequence(10 + i, text) for i, text in enumerate(texts)]
    run(s, hot)
    assert [seq.num_cached_tokens for seq in hot] == [8, 8, 8]


def test_preempt_all_starts_everything_again_at_once():
    s = scheduler(window=1)
    sequences = [sequence(i, 6, max_tokens=10) for i in range(3)]
    device, finished = Device(s), set()
    for seq in sequences:
        s.add(seq)
    for _ in range(3):
        device.dispatch(s.schedule())
        device.take(finished)
    s.preempt_all()
    s.new_weights()
    assert s.num_preempted == 3 and s.allocator.num_available == 20
    assert [c[0] for c in shown(s.schedule())[1]] == ["0", "1", "2"]  # nobody waits for another to finish


def test_finishing_in_every_state_gives_all_back():
    for steps in range(6):
        s = scheduler(6, max_num_seqs=2, window=1, token_budget=5)
        device, finished = Device(s), set()
        sequences = [sequence(i, 2 * Z, max_tokens=3 * Z) for i in range(3)]
        for seq in sequences:
            s.add(seq)
        for _ in range(4 * steps):
            if (batch := s.schedule()) is None:
                break
            device.dispatch(batch)
            device.take(finished)
        for seq in sequences:
            s.finish(seq)
            s.finish(seq)  # twice is no error
        nothing_left(s)
        run(s, [sequence(9, 3)])


def test_a_long_queue_is_kept_in_order_and_forgets_who_left():
    queue = WaitingQueue()
    sequences = [sequence(i, 1, priority=i % 3) for i in range(300)]
    for seq in sequences:
        queue.push(seq)
    for seq in sequences[::2]:
        seq.status = Status.FINISHED
        queue.forget_finished(1)
    left = sorted((seq for seq in sequences[1::2]), key=lambda seq: seq.order)
    assert len(queue) == 150 and queue.in_order() == left
    assert len(queue._heap) <= 300
    got = []
    while (first := queue.first()) is not None:
        got.append(first)
        queue.pop()
    assert got == left and len(queue) == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, aborts, steps, results, lost caches and new weights in any order."""

    def __init__(self):
        super().__init__()
        self.scheduler = scheduler(9, max_num_seqs=3, token_budget=6, max_prefill_rows=2, window=4)
        self.device = Device(self.scheduler)
        self.finished, self.aborted, self.all = set(), set(), []
        self.steps_without_progress = 0

    @rule(
        start=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 16),
        stop=st.lists(st.integers(0, 49), max_size=8),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "s"]),
    )
    def add(self, start, max_tokens, stop, priority, salt):
        if len(self.all) - len(self.finished) < 6:
            seq = sequence(len(self.all), start, max_tokens, priority=priority, salt=salt, stop=tuple(stop), capacity=9 * Z)
            self.all.append(seq)
            self.scheduler.add(seq)

    @rule()
    def step(self):
        drained = not self.device.flights
        waiting = self.scheduler.has_work
        batch = self.scheduler.schedule(drained=drained)
        if batch is not None:
            self.device.dispatch(batch)
        else:
            assert not (drained and waiting), "there is work, nothing is in flight, and nothing is done"

    @precondition(lambda self: self.device.flights)
    @rule()
    def take(self):
        self.device.take(self.finished)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def abort(self, data):
        seq = data.draw(st.sampled_from(self.all))
        if seq not in self.finished:
            self.aborted.add(seq)
        self.scheduler.finish(seq)
        self.finished.add(seq)

    @precondition(lambda self: not self.device.flights)
    @rule()
    def new_weights(self):
        self.scheduler.preempt_all()
        self.scheduler.new_weights()
        self.device.cells.clear()
        self.device.rows.clear()

    @invariant()
    def blocks_are_held_by_who_runs(self):
        s = self.scheduler
        holders = [block for seq in s.running for block in seq.block_ids]
        assert 0 not in holders
        assert all(s.allocator.reference_count(b) == holders.count(b) for b in range(1, 10))
        assert s.allocator.num_free + s.allocator.num_used + s.allocator.num_cached == 9
        assert {seq.state_id for seq in s.running}.isdisjoint(s._state_ids)
        assert s.num_preempted == sum(seq.status is Status.PREEMPTED for seq in s.waiting)
        assert len(s.running) + s.num_waiting == len(self.all) - len(self.finished)

    def teardown(self):
        """Nobody starves: without new arrivals everything ends soon, and as alone."""
        for _ in range(2000):
            if not (self.scheduler.has_work or self.device.flights):
                break
            self.step()
            if self.device.flights:
                self.take()
        nothing_left(self.scheduler)
        for seq in self.all:
            if seq not in self.aborted:
                assert seq.token_ids == alone(seq)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)  # 10,000 steps
