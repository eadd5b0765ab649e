"""What the host hands to the device for one step: NumPy arrays in `NamedTuple`s, which JAX reads as pytrees.

This is one of the two places where the host column and the traced column meet, so it imports neither. The sizes
`B`, `T`, `C`, `M` and `R` are buckets: a step is compiled once for each combination that occurs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array
    sample_index: Array
    max_new_tokens: Array
    stop_token_ids: Array


class WindowInputs(NamedTuple):
    """A window of decode steps for `B` rows. Everything else about them is on the device.

    Attributes:
      state_ids: i32[B], their rows of `EngineState`; a value past the last row is a pad.
      block_tables: i32[B, M], with blocks for every token that the window may compute.
    """

    state_ids: Array
    block_tables: Array


class MixedInputs(NamedTuple):
    """One step of `B` decode rows and of prefill chunks.

    Attributes:
      decode: the decode rows.
      prefill: the chunks, without decode rows.
      sampling: of the `C` chunks; a chunk that ends its prompt takes its settings to its row of `EngineState`.
    """

    decode: WindowInputs
    prefill: StepInputs
    sampling: SamplingInputs
