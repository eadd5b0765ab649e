"""Turns one step's decision into the arrays of `StepInputs`. NumPy only; every array is built fresh.

Fresh matters: `jax.device_put` may share memory with a NumPy array, so an array that is edited later would change a step
that is still running.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pagedjax.engine_config import Buckets, at_least
from pagedjax.inputs import MixedInputs, SamplingInputs, StepInputs, WindowInputs
from pagedjax.request import Request
from pagedjax.scheduler import ScheduledBatch
from pagedjax.sequence import TokenSequence

_MAX_TOP_K = 2**31 - 1  # keeps everything, as any number above the vocabulary does
_MIN_TOKENS = 16  # the smallest token bucket of a prefill


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The prompt tokens of row `row` that one step computes: `query_len` tokens after the `num_computed_tokens` before them."""

    row: int
    num_computed_tokens: int
    query_len: int


def bucket(n: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least `n` and `minimum`: the padded size that a step is compiled for."""
    return max(minimum, 1 << max(n - 1, 0).bit_length())


def plan_prefill(prompt_lens: Sequence[int], token_budget: int) -> list[list[Chunk]]:
    """Cut prompts into steps of at most `token_budget` tokens, rows in order, each step filled before the next begins."""
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; a step needs at least 1 token")
    steps: list[list[Chunk]] = []
    room = 0
    for row, length in enumerate(prompt_lens):
        start = 0
        while start < length:
            if room == 0:
                steps.append([])
                room = token_budget
            take = min(room, length - start)
            steps[-1].append(Chunk(row, start, take))
            start, room = start + take, room - take
    return steps


def block_tables(rows: Sequence[Sequence[int]], num_rows: int, width: int) -> np.ndarray:
    """A fresh i32[num_rows, width] table; unused entries name the null block."""
    table = np.zeros((num_rows, width), np.int32)
    for row, ids in enumerate(rows):
        table[row, : len(ids)] = ids
    return table


def prefill_inputs(
    chunks: Sequence[Chunk],
    prompts: Sequence[Sequence[int]],
    blocks: Sequence[Sequence[int]],
    *,
    block_size: int,
    table_width: int,
    num_state_rows: int,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    state_ids_of: Sequence[int] | None = None,
) -> StepInputs:
    """`StepInputs` of a step without decode rows.

    Args:
      chunks: what to compute, at most one chunk a row.
      prompts: token ids of every row.
      blocks: physical block ids of every row, enough for its chunk.
      block_size: tokens a block [Z].
      table_width: columns of the block table [M].
      num_state_rows: rows of `RequestState`; a chunk that does not end its prompt gets this number as state row, which is none.
      num_tokens: the padded tokens [T]; by default ``bucket(tokens)``.
      num_rows: the padded chunks [C]; by default ``bucket(chunks)``.
      state_ids_of: for every row its row of `RequestState`; by default its own number.

    Returns:
      inputs with ``R = C`` and ``B = 0``.
    """
    num_rows = bucket(len(chunks)) if num_rows is None else num_rows
    num_tokens = bucket(sum(chunk.query_len for chunk in chunks), _MIN_TOKENS) if num_tokens is None else num_tokens
    token_ids, positions, slots = (np.zeros(num_tokens, np.int32) for _ in range(3))
    start_loc = np.zeros(num_rows + 1, np.int32)
    context_lens = np.zeros(num_rows, np.int32)
    logit_ids = np.zeros(num_rows, np.int32)
    state_ids = np.full(num_rows, num_state_rows, np.int32)
    at = 0
    for c, chunk in enumerate(chunks):
        end, stop = at + chunk.query_len, chunk.num_computed_tokens + chunk.query_len
        position = np.arange(chunk.num_computed_tokens, stop, dtype=np.int32)
        ids = np.asarray(blocks[chunk.row], np.int32)
        token_ids[at:end] = prompts[chunk.row][chunk.num_computed_tokens : stop]
        positions[at:end] = position
        slots[at:end] = ids[position // block_size] * block_size + position % block_size
        context_lens[c] = stop
        if stop == len(prompts[chunk.row]):
            logit_ids[c], state_ids[c] = end - 1, chunk.row if state_ids_of is None else state_ids_of[chunk.row]
        start_loc[c + 1 :] = at = end
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        decode_block_tables=np.zeros((0, table_width), np.int32),
        decode_context_lens=np.zeros(0, np.int32),
        prefill_block_tables=block_tables([blocks[chunk.row] for chunk in chunks], num_rows, table_width),
        prefill_query_start_loc=start_loc,
        prefill_context_lens=context_lens,
        logit_ids=logit_ids,
        state_ids=state_ids,
    )


def sampling_inputs(
    requests: Sequence[Request], num_rows: int, *, num_stops: int | None = None, num_given: Sequence[int] | None = None
) -> SamplingInputs:
    """`SamplingInputs` of `num_rows` rows, the first of them the requests; pad rows are greedy and may not produce a token.

    Args:
      requests: the first rows.
      num_rows: rows in all.
      num_stops: stop ids a row [E]; further ones of a request are left out. By default as many as are needed.
      num_given: for each request the new tokens that it has already, which count against its maximum; by default none.
    """
    if num_stops is None:
        num_stops = bucket(max((len(r.stop_token_ids) for r in requests), default=1), 1)
    temperature, top_p = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
    top_k, sample_index, max_new = (np.zeros(num_rows, np.int32) for _ in range(3))
    seed = np.zeros(num_rows, np.uint32)
    stops = np.full((num_rows, num_stops), -1, np.int32)
    for row, request in enumerate(requests):
        params = request.params
        temperature[row], top_p[row], top_k[row] = params.temperature, params.top_p, min(max(params.top_k, 0), _MAX_TOP_K)
        seed[row] = 0 if params.seed is None else params.seed
        max_new[row] = request.max_new_tokens - (0 if num_given is None else num_given[row])
        known = request.stop_token_ids[:num_stops]
        stops[row, : len(known)] = known
    return SamplingInputs(temperature, top_k, top_p, seed, sample_index, max_new, stops)


def window_inputs(rows: Sequence[TokenSequence], tables: np.ndarray, num_rows: int, width: int) -> WindowInputs:
    """Decode rows as a step reads them.

    Args:
      rows: running sequences.
      tables: i32[S, max blocks], the block table of every state row.
      num_rows: padded rows [B].
      width: padded columns of the block table [M].
    """
    state_ids = np.full(num_rows, tables.shape[0], np.int32)
    state_ids[: len(rows)] = [seq.state_id for seq in rows]
    block_tables = np.zeros((num_rows, width), np.int32)
    # The table of all rows is edited in place from step to step; what a step reads is its own copy.
    columns = min(width, tables.shape[1])
    block_tables[: len(rows), :columns] = tables[state_ids[: len(rows)], :columns]
    return WindowInputs(state_ids, block_tables)


def engine_inputs(
    batch: ScheduledBatch, tables: np.ndarray, buckets: Buckets, *, block_size: int, window: int, num_stops: int
) -> WindowInputs | MixedInputs:
    """A scheduled batch as the device reads it: a window where it is one, else a mixed step, perhaps without chunks.

    Args:
      batch: the decision.
      tables: see `window_inputs`.
      buckets: the padded sizes.
      block_size: tokens a block.
      window: steps of a window.
      num_stops: stop ids that the device looks at.
    """
    longest = max(len(seq.block_ids) for seq in (*batch.decodes, *(chunk.sequence for chunk in batch.prefills)))
    width = at_least(buckets.widths, longest)
    if not batch.prefills and batch.num_steps == window:
        return window_inputs(batch.decodes, tables, at_least(buckets.rows, len(batch.decodes)), width)
    num_tokens = buckets.prefill_size(sum(chunk.query_len for chunk in batch.prefills), len(batch.prefills))
    num_rows = buckets.prefill_rows(num_tokens)
    rows = [chunk.sequence for chunk in batch.prefills]
    return MixedInputs(
        window_inputs(batch.decodes, tables, at_least(buckets.mixed_rows, len(batch.decodes)), width),
        prefill_inputs(
            [Chunk(row, chunk.num_computed_tokens, chunk.query_len) for row, chunk in enumerate(batch.prefills)],
            [seq.token_ids for seq in rows],
            [seq.block_ids for seq in rows],
            block_size=block_size,
            table_width=width,
            num_state_rows=tables.shape[0],
            num_tokens=num_tokens,
            num_rows=num_rows,
            state_ids_of=[seq.state_id for seq in rows],
        ),
        sampling_inputs([seq.request for seq in rows], num_rows, num_stops=num_stops, num_given=[seq.num_new_tokens for seq in rows]),
    )
