"""Turns one step's decision into the arrays of `StepInputs`. NumPy only; every array is built fresh.

Fresh matters: `jax.device_put` may share memory with a NumPy array, so an array that is edited later would change a step
that is still running.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pagedjax.engine_config import Buckets, at_least
from pagedjax.inputs import (
    USES_BAD_WORDS,
    USES_BIAS,
    USES_COUNTS,
    USES_LOGPROBS,
    USES_MIN_TOKENS,
    MixedInputs,
    PromptInputs,
    SamplingInputs,
    StepInputs,
    TableRow,
    WindowInputs,
    neutral_sampling,
)
from pagedjax.request import Request
from pagedjax.scheduler import PrefillChunk, ScheduledBatch
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
    inputs = neutral_sampling(num_rows, num_stops)
    for row, request in enumerate(requests):
        params = request.params
        given = 0 if num_given is None else num_given[row]
        inputs.temperature[row], inputs.top_p[row], inputs.min_p[row] = params.temperature, params.top_p, params.min_p
        inputs.top_k[row] = min(max(params.top_k, 0), _MAX_TOP_K)
        inputs.seed[row] = 0 if params.seed is None else params.seed
        inputs.sample_index[row] = request.sample_index
        inputs.max_new_tokens[row] = request.max_new_tokens - given
        inputs.min_new_tokens[row] = max(params.min_tokens - given, 0)
        inputs.repetition[row] = params.repetition_penalty
        inputs.presence[row], inputs.frequency[row] = params.presence_penalty, params.frequency_penalty
        inputs.flags[row] = flags_of(request)
        known = request.stop_token_ids[:num_stops]
        inputs.stop_token_ids[row, : len(known)] = known
    return inputs


def flags_of(request: Request) -> int:
    """`SamplingInputs.flags` of a request."""
    params = request.params
    counts = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return (
        USES_BIAS * (params.allowed_token_ids is not None or bool(params.logit_bias) or bool(request.banned_token_ids))
        + USES_COUNTS * counts
        + USES_BAD_WORDS * bool(request.bad_words)
        + USES_MIN_TOKENS * (params.min_tokens > 0)
        + USES_LOGPROBS * (params.logprobs is not None)
    )


def table_row(request: Request, new_token_ids: Sequence[int], vocab: int, num_words: int, word_len: int) -> TableRow | None:
    """What `LogitTables` hold for a request that has given `new_token_ids` so far; ``None`` where it uses nothing of them.

    Args:
      request: the request.
      new_token_ids: its output.
      vocab, num_words, word_len: columns `V`, `W` and `L` of the tables.
    """
    params, flags = request.params, flags_of(request)
    if not flags & (USES_BIAS | USES_COUNTS | USES_BAD_WORDS):
        return None
    bias = np.zeros(vocab, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    for token, value in (params.logit_bias or {}).items():
        bias[token] += value
    bias[list(request.banned_token_ids)] = -np.inf
    counts = np.zeros(vocab, np.int32)
    if flags & USES_COUNTS:
        np.add.at(counts, np.asarray(new_token_ids, np.int64), 2)
        counts[np.unique(np.asarray(request.prompt_token_ids, np.int64))] += 1
    words = np.full((num_words, word_len), -1, np.int32)
    for i, word in enumerate(request.bad_words):
        words[i, word_len - len(word) :] = word
    recent = np.full(word_len - 1, -1, np.int32)
    last = list(new_token_ids)[-(word_len - 1) :] if word_len > 1 else []
    recent[len(recent) - len(last) :] = last
    return TableRow(bias, counts, words, recent)


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
    num_decode = at_least(buckets.mixed_rows, len(batch.decodes))
    prompt = None
    if any(chunk.sequence.wants_prompt_logprobs for chunk in batch.prefills):
        # One size is compiled of such a step, the largest.
        num_tokens, num_decode, width = buckets.tokens[-1], buckets.mixed_rows[-1], buckets.widths[-1]
        prompt = prompt_inputs(batch.prefills, num_tokens)
    num_rows = buckets.prefill_rows(num_tokens)
    rows = [chunk.sequence for chunk in batch.prefills]
    return MixedInputs(
        window_inputs(batch.decodes, tables, num_decode, width),
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
        prompt,
    )


def prompt_range(chunk: PrefillChunk) -> range:
    """Positions of the prompt tokens whose log-probabilities a chunk gives, where its sequence wants them.

    They are those after each of its own: logits say how likely the next token is.
    """
    if not chunk.sequence.wants_prompt_logprobs:
        return range(0)
    start = chunk.num_computed_tokens
    return range(start + 1, min(start + chunk.query_len + 1, len(chunk.sequence.request.prompt_token_ids)))


def prompt_inputs(chunks: Sequence[PrefillChunk], num_tokens: int) -> PromptInputs:
    """`PromptInputs` of a step of these chunks, in their order, padded to `num_tokens`."""
    token_ids, logit_ids, chunk_ids = (np.zeros(num_tokens, np.int32) for _ in range(3))
    count = at = 0
    for c, chunk in enumerate(chunks):
        positions = prompt_range(chunk)
        end = count + len(positions)
        token_ids[count:end] = chunk.sequence.request.prompt_token_ids[positions.start : positions.stop]
        logit_ids[count:end] = at + np.arange(len(positions))
        chunk_ids[count:end] = c
        count, at = end, at + chunk.query_len
    return PromptInputs(np.asarray(count, np.int32), token_ids, logit_ids, chunk_ids)
