"""From a decision to arrays: chunks, buckets, tables and slots, with exact numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.batch import Chunk, block_tables, bucket, plan_prefill, prefill_inputs, sampling_inputs
from pagedjax.request import SamplingParams, make_request


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
