"""From a decision to arrays: chunks, buckets, tables and slots, with exact numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.batch import Chunk, block_tables, bucket, engine_inputs, plan_prefill, prefill_inputs, sampling_inputs
from pagedjax.engine_config import Buckets
from pagedjax.inputs import MixedInputs, WindowInputs
from pagedjax.request import SamplingParams, make_request
from pagedjax.scheduler import PrefillChunk, ScheduledBatch
from pagedjax.sequence import TokenSequence


def test_bucket_is_the_next_power_of_two():
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 16, 17)] == [1, 1, 2, 4, 4, 8, 16, 32]
    assert bucket(3, 16) == 16


def test_plan_fills_each_step_before_the_next():
    assert plan_prefill([5, 3, 9], 8) == [[Chunk(0, 0, 5), Chunk(1, 0, 3)], [Chunk(2, 0, 8)], [Chunk(2, 8, 1)]]
    assert plan_prefill([], 8) == []


@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 50))
def test_plan_covers_every_token_once_in_order(lengths, budget):
    steps = plan_prefill(lengths, budget)
    computed = [0] * len(lengths)
    for chunks in steps:
        assert sum(c.query_len for c in chunks) <= budget
        assert len({c.row for c in chunks}) == len(chunks)
        for c in chunks:
            assert c.num_computed_tokens == computed[c.row] and c.query_len > 0
            computed[c.row] += c.query_len
    assert computed == lengths
    assert all(sum(c.query_len for c in chunks) == budget for chunks in steps[:-1])


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="token_budget is 0; a step needs at least 1 token"):
        plan_prefill([3], 0)


def test_arrays_of_a_prefill_step():
    prompts = [list(range(10, 20)), list(range(50, 56))]
    inputs = prefill_inputs([Chunk(0, 3, 2), Chunk(1, 0, 6)], prompts, [[7, 2, 9], [4, 1]], block_size=4, table_width=4, num_state_rows=2)
    pads = [0] * 8
    np.testing.assert_array_equal(inputs.token_ids, [13, 14, 50, 51, 52, 53, 54, 55, *pads])
    np.testing.assert_array_equal(inputs.positions, [3, 4, 0, 1, 2, 3, 4, 5, *pads])
    # Row 0: position 3 is the last cell of block 7, position 4 the first of block 2.
    np.testing.assert_array_equal(inputs.slot_mapping, [31, 8, 16, 17, 18, 19, 4, 5, *pads])
    np.testing.assert_array_equal(inputs.prefill_block_tables, [[7, 2, 9, 0], [4, 1, 0, 0]])
    np.testing.assert_array_equal(inputs.prefill_query_start_loc, [0, 2, 8])
    np.testing.assert_array_equal(inputs.prefill_context_lens, [5, 6])
    # Row 0 is not at its prompt's end: its logits go nowhere.
    np.testing.assert_array_equal(inputs.logit_ids, [0, 7])
    np.testing.assert_array_equal(inputs.state_ids, [2, 1])
    assert inputs.decode_block_tables.shape == (0, 4) and inputs.decode_context_lens.shape == (0,)
    assert all(leaf.dtype == np.int32 for leaf in inputs)


def test_pad_rows_are_empty():
    inputs = prefill_inputs([Chunk(r, 0, 1) for r in range(3)], [[5]] * 3, [[1], [2], [3]], block_size=4, table_width=1, num_state_rows=4)
    np.testing.assert_array_equal(inputs.prefill_query_start_loc, [0, 1, 2, 3, 3])
    np.testing.assert_array_equal(inputs.prefill_context_lens, [1, 1, 1, 0])
    np.testing.assert_array_equal(inputs.state_ids, [0, 1, 2, 4])


def test_tables_are_fresh_each_time():
    rows = [[1, 2]]
    first, second = block_tables(rows, 2, 3), block_tables(rows, 2, 3)
    first[0, 0] = 9
    np.testing.assert_array_equal(second, [[1, 2, 0], [0, 0, 0]])


def test_sampling_rows():
    params = SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, seed=2**32 - 1, max_tokens=7, stop_token_ids=(4,))
    one = make_request([1], params, eos_ids=(2, 4, 3), vocab_size=9, max_model_len=64, default_seed=0)
    rows = sampling_inputs([one], 2)
    np.testing.assert_array_equal(rows.stop_token_ids, [[4, 2, 3, -1], [-1] * 4])
    np.testing.assert_array_equal(rows.temperature, np.float32([0.5, 0]))
    np.testing.assert_array_equal(rows.top_k, [0, 0])
    np.testing.assert_array_equal(rows.top_p, np.float32([0.9, 1]))
    np.testing.assert_array_equal(rows.seed, np.uint32([2**32 - 1, 0]))
    np.testing.assert_array_equal(rows.max_new_tokens, [7, 0])


BUCKETS = Buckets(rows=(2, 4), mixed_rows=(2, 4), tokens=(16, 64), widths=(3, 8))


def running(state_id, tokens, blocks, *, new=0, max_tokens=10, stop=()):
    """A sequence as the scheduler leaves it, with its row of the table."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, temperature=0.5, seed=state_id)
    request = make_request(list(range(1, tokens + 1)), params, eos_ids=(), vocab_size=99, max_model_len=200, default_seed=0)
    seq = TokenSequence(str(state_id), request, state_id)
    seq.token_ids += [9] * new
    seq.state_id, seq.block_ids = state_id, list(blocks)
    return seq


def table(*sequences):
    out = np.zeros((5, 8), np.int32)
    for seq in sequences:
        out[seq.state_id, : len(seq.block_ids)] = seq.block_ids
    return out


def engine_step(batch, tables, window=8):
    return engine_inputs(batch, tables, BUCKETS, block_size=4, window=window, num_stops=2)


def test_a_window_names_rows_and_copies_their_tables():
    a, b, c = running(3, 5, [7, 2]), running(0, 3, [4]), running(1, 9, [1, 5, 6, 8])
    tables = table(a, b, c)
    inputs = engine_step(ScheduledBatch((a, b), (), 8, (8, 8)), tables)
    assert isinstance(inputs, WindowInputs)
    assert inputs.state_ids.tolist() == [3, 0]
    assert inputs.block_tables.tolist() == [[7, 2, 0], [4, 0, 0]]
    tables[3] = 99  # the next step's
    assert inputs.block_tables[0].tolist() == [7, 2, 0]
    inputs = engine_step(ScheduledBatch((a, b, c), (), 8, (8, 8, 8)), table(a, b, c))
    assert inputs.state_ids.tolist() == [3, 0, 1, 5]  # 5 is past the last row: a pad
    assert inputs.block_tables.shape == (4, 8) and not inputs.block_tables[3].any()
    assert inputs.block_tables.dtype == inputs.state_ids.dtype == np.int32


def test_a_single_decode_step_is_a_mixed_step_without_chunks():
    a = running(3, 5, [7, 2])
    inputs = engine_step(ScheduledBatch((a,), (), 1, (1,)), table(a))
    assert isinstance(inputs, MixedInputs)
    assert inputs.decode.state_ids.tolist() == [3, 5]
    assert inputs.prefill.token_ids.shape == (16,) and not inputs.prefill.prefill_query_start_loc.any()
    assert inputs.prefill.state_ids.tolist() == [5] and inputs.sampling.max_new_tokens.tolist() == [0]
    # Where a window is one step, it is a window.
    assert isinstance(engine_step(ScheduledBatch((a,), (), 1, (1,)), table(a), window=1), WindowInputs)


def test_chunks_beside_decode_rows():
    a = running(3, 5, [7, 2])
    b = running(0, 6, [4, 1], new=2, stop=(5, 6, 7))  # preempted after two new tokens: eight to compute
    c = running(1, 20, [3, 5, 6, 8, 9])
    chunks = (PrefillChunk(b, 4, 4, True), PrefillChunk(c, 0, 13, False))
    inputs = engine_step(ScheduledBatch((a,), chunks, 1, (1,)), table(a, b, c))
    prefill = inputs.prefill
    assert prefill.token_ids[:17].tolist() == [5, 6, 9, 9, *range(1, 14)] and prefill.token_ids.shape == (64,)
    assert prefill.positions[:17].tolist() == [4, 5, 6, 7, *range(13)]
    assert prefill.slot_mapping[:6].tolist() == [4, 5, 6, 7, 12, 13] and not prefill.slot_mapping[17:].any()
    assert prefill.prefill_query_start_loc.tolist() == [0, 4, 17, 17, 17]
    assert prefill.prefill_context_lens.tolist() == [8, 13, 0, 0]
    assert prefill.prefill_block_tables[:2].tolist() == [[4, 1, 0, 0, 0, 0, 0, 0], [3, 5, 6, 8, 9, 0, 0, 0]]
    assert prefill.state_ids.tolist() == [0, 5, 5, 5] and prefill.logit_ids[0] == 3  # only the first one gives a token
    assert inputs.sampling.max_new_tokens.tolist()[:2] == [8, 10]  # of b, two are there already
    assert inputs.sampling.stop_token_ids[0].tolist() == [5, 6]  # the host looks at the third
    assert inputs.sampling.seed.tolist()[:2] == [0, 1]
