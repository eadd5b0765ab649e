"""What the host hands to the device for one step: NumPy arrays in `NamedTuple`s, which JAX reads as pytrees.

This is one of the two places where the host column and the traced column meet, so it imports neither. The sizes
`B`, `T`, `C`, `M` and `R` are buckets: a step is compiled once for each combination that occurs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# Built by the host as np.ndarray, read on the device as jax.Array; NamedTuple fields of both kinds share these types.
Array = Any


class StepInputs(NamedTuple):
    """One step: `B` decode rows of one token each, then `T` prefill tokens of `C` rows, packed end to end.

    Attributes:
      token_ids: i32[B + T]; pads hold 0.
      positions: i32[B + T], each token's index in its own sequence; pads hold 0.
      slot_mapping: i32[B + T], the cell that receives the token's keys and values; a pad's slot lies in the null block.
      decode_block_tables: i32[B, M], logical block to physical block; unused entries name the null block.
      decode_context_lens: i32[B], tokens to attend to after this step's write; 0 for a pad row.
      prefill_block_tables: i32[C, M].
      prefill_query_start_loc: i32[C + 1], where each row's tokens start among the `T`; pad rows are empty.
      prefill_context_lens: i32[C].
      logit_ids: i32[R], which of the `B + T` tokens need logits.
      state_ids: i32[R], the row of `RequestState` that each of them belongs to; a value past the last row means none.
    """

    token_ids: Array
    positions: Array
    slot_mapping: Array
    decode_block_tables: Array
    decode_context_lens: Array
    prefill_block_tables: Array
    prefill_query_start_loc: Array
    prefill_context_lens: Array
    logit_ids: Array
    state_ids: Array


class SamplingInputs(NamedTuple):
    """How each row of `RequestState` samples and stops.

    Attributes:
      temperature: f32[B]; at or below `sampling.GREEDY_TEMPERATURE` the row is greedy.
      top_k: i32[B]; 0 is off.
      top_p: f32[B] in (0, 1]; 1 is off.
      seed: u32[B].
      sample_index: i32[B], tells apart several samples of one request.
      max_new_tokens: i32[B]; 0 for a pad row.
      stop_token_ids: i32[B, E], any of which ends the row; padded with -1.
      min_p: f32[B] in [0, 1]; 0 is off.
      repetition, presence, frequency: f32[B], the penalties; 1, 0 and 0 are off.
      min_new_tokens: i32[B], no stop id before so many new tokens.
      flags: i32[B], what a row uses: `USES_BIAS`, `USES_COUNTS` and `USES_BAD_WORDS` of its `LogitTables`, `USES_MIN_TOKENS`, and
        `USES_LOGPROBS` where its log-probabilities are reported.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    sample_index: Array
    max_new_tokens: Array
    stop_token_ids: Array
    min_p: Array
    repetition: Array
    presence: Array
    frequency: Array
    min_new_tokens: Array
    flags: Array


USES_BIAS, USES_COUNTS, USES_BAD_WORDS, USES_MIN_TOKENS, USES_LOGPROBS = 1, 2, 4, 8, 16


class LogitTables(NamedTuple):
    """What changes the logits of a row beside its settings. A row without the flag for a table never reads it.

    Attributes:
      bias: f32[S, V], added; minus infinity for an id that is not allowed.
      counts: i32[S, V], twice how often the id is in the output, and 1 more if it is in the prompt.
      bad_words: i32[S, W, L], sequences of ids, padded with -1 in front; a word's last id may not follow its others.
      recent: i32[S, L - 1], the newest output tokens, the newest last; -1 where there are fewer.
    """

    bias: Array
    counts: Array
    bad_words: Array
    recent: Array


def neutral_sampling(num_rows: int, num_stops: int) -> SamplingInputs:
    """Settings of rows without a request: greedy, and no token may come."""

    def zeros(dtype: Any) -> np.ndarray:
        return np.zeros(num_rows, dtype)

    def ones() -> np.ndarray:
        return np.ones(num_rows, np.float32)

    return SamplingInputs(
        temperature=zeros(np.float32),
        top_k=zeros(np.int32),
        top_p=ones(),
        seed=zeros(np.uint32),
        sample_index=zeros(np.int32),
        max_new_tokens=zeros(np.int32),
        stop_token_ids=np.full((num_rows, num_stops), -1, np.int32),
        min_p=zeros(np.float32),
        repetition=ones(),
        presence=zeros(np.float32),
        frequency=zeros(np.float32),
        min_new_tokens=zeros(np.int32),
        flags=zeros(np.int32),
    )


class WindowInputs(NamedTuple):
    """A window of decode steps for `B` rows. Everything else about them is on the device.

    Attributes:
      state_ids: i32[B], their rows of `EngineState`; a value past the last row is a pad.
      block_tables: i32[B, M], with blocks for every token that the window may compute.
    """

    state_ids: Array
    block_tables: Array


class PromptInputs(NamedTuple):
    """Prompt tokens whose log-probabilities are reported, at most as many as there are prefill tokens.

    Attributes:
      count: i32[], how many.
      token_ids: i32[T], the tokens.
      logit_ids: i32[T], for each the prefill token before it, whose logits say how likely it was.
      chunk_ids: i32[T], for each its chunk.
    """

    count: Array
    token_ids: Array
    logit_ids: Array
    chunk_ids: Array


class MixedInputs(NamedTuple):
    """One step of `B` decode rows and of prefill chunks.

    Attributes:
      decode: the decode rows.
      prefill: the chunks, without decode rows.
      sampling: of the `C` chunks; a chunk that ends its prompt takes its settings to its row of `EngineState`.
      prompt: where log-probabilities of prompt tokens are wanted: such a step is compiled apart.
    """

    decode: WindowInputs
    prefill: StepInputs
    sampling: SamplingInputs
    prompt: PromptInputs | None = None


class TableRow(NamedTuple):
    """One row of `LogitTables`.

    Attributes:
      bias: f32[V]. counts: i32[V]. bad_words: i32[W, L]. recent: i32[L - 1].
    """

    bias: Array
    counts: Array
    bad_words: Array
    recent: Array
