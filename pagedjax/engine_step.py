"""What one dispatch of the engine runs: a window of decode steps, or one step of decode rows and prefill chunks. Pure functions.

They differ from `step` in that the rows of a dispatch are chosen from a larger state by `state_ids`, and that everything about a row
(newest token, position, settings) stays on the device: the host can dispatch the next step before it has seen this one's tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from pagedjax.config import ModelConfig
from pagedjax.inputs import MixedInputs, SamplingInputs, StepInputs, WindowInputs
from pagedjax.kv_cache import KVCache
from pagedjax.model import forward
from pagedjax.params import Params
from pagedjax.sampling import Sampled, sample
from pagedjax.step import RequestState, decode_inputs, decode_loop, finished, make_state, report_sampled


@struct.dataclass
class EngineState:
    """Every row that a request may have, ``S`` of them.

    Attributes:
      rows: leaves [S].
      sampling: leaves [S, ...], set when a row starts.
    """

    rows: RequestState
    sampling: SamplingInputs


def make_engine_state(num_rows: int, num_stops: int) -> EngineState:
    """State of `num_rows` rows without a request, each with room for `num_stops` stop ids."""
    floats = [jnp.zeros(num_rows, jnp.float32) for _ in range(2)]
    ints = [jnp.zeros(num_rows, jnp.int32) for _ in range(3)]
    sampling = SamplingInputs(
        temperature=floats[0],
        top_k=ints[0],
        top_p=floats[1],
        seed=jnp.zeros(num_rows, jnp.uint32),
        sample_index=ints[1],
        max_new_tokens=ints[2],
        stop_token_ids=jnp.full((num_rows, num_stops), -1, jnp.int32),
    )
    return EngineState(make_state(num_rows), sampling)


def decode_window(
    params: Params,
    cache: KVCache,
    state: EngineState,
    inputs: WindowInputs,
    report: jax.Array,
    *,
    config: ModelConfig,
    num_steps: int,
    window: int,
    num_logprobs: int,
    mesh: Mesh | None = None,
    implementation: str | None = None,
) -> tuple[Sampled, KVCache, EngineState]:
    """Decode up to `num_steps` tokens for some rows.

    Args:
      params, cache, config, mesh, implementation: see `model.forward`.
      state: of all rows.
      inputs: which rows, and their blocks.
      report: bool[], whether log-probabilities are wanted.
      num_steps: static.
      window: steps between two looks at whether all rows are done, see `step.decode_loop`. Static.
      num_logprobs: the likeliest tokens that are reported [J]. Static.

    Returns:
      what was sampled, leaves [num_steps, B, ...], token -1 after a row is done; cache and state.
    """
    rows, sampling = _pick(state, inputs.state_ids)
    sampled, cache, rows = decode_loop(
        params,
        cache,
        rows,
        inputs.block_tables,
        sampling,
        config=config,
        num_steps=num_steps,
        window=window,
        mesh=mesh,
        num_logprobs=num_logprobs,
        implementation=implementation,
        report=report,
    )
    return sampled, cache, EngineState(_put(state.rows, inputs.state_ids, rows), state.sampling)


def mixed_step(
    params: Params,
    cache: KVCache,
    state: EngineState,
    inputs: MixedInputs,
    report: jax.Array,
    *,
    config: ModelConfig,
    num_logprobs: int,
    mesh: Mesh | None = None,
    implementation: str | None = None,
) -> tuple[Sampled, KVCache, EngineState]:
    """One token for each decode row, and the chunks' tokens; where a chunk ends its prompt, its row starts.

    Args:
      params, cache, config, mesh, implementation: see `model.forward`.
      state: of all rows.
      inputs: decode rows [B] and chunks [C].
      report, num_logprobs: see `decode_window`.

    Returns:
      what was sampled, leaves [B + C, ...], the decode rows first (token -1 where the row was done; meaningless for a chunk that does not
      end its prompt); cache and state.
    """
    rows, of_rows = _pick(state, inputs.decode.state_ids)
    num_decode = rows.done.shape[0]
    decode, prefill = decode_inputs(rows, inputs.decode.block_tables, cache.block_size), inputs.prefill
    logits, cache = forward(params, cache, _join(decode, prefill), config, mesh, implementation=implementation)

    starts = prefill.positions[prefill.logit_ids] + 1
    positions = jnp.concatenate([rows.num_computed_tokens + 1, starts])
    sampling = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), of_rows, inputs.sampling)
    live = jnp.concatenate([~rows.done, jnp.ones(starts.shape, bool)])
    token = jnp.where(live, sample(logits, sampling, positions), -1)
    generated = jnp.concatenate([rows.num_generated, jnp.zeros_like(starts)]) + live.astype(jnp.int32)
    done = ~live | finished(token, generated, sampling)
    new = RequestState(
        last_token=jnp.where(live, token, 0),
        num_computed_tokens=jnp.where(live, positions, positions - 1),
        num_generated=generated,
        done=done,
    )
    ids = jnp.concatenate([inputs.decode.state_ids, prefill.state_ids])
    of_chunks = jax.tree.map(lambda all_, some: all_.at[prefill.state_ids].set(some, mode="drop"), state.sampling, inputs.sampling)
    sampled = report_sampled(logits, jnp.maximum(token, 0), num_logprobs, report)._replace(token=token)
    assert token.shape[0] == num_decode + prefill.logit_ids.shape[0]
    return sampled, cache, EngineState(_put(state.rows, ids, new), of_chunks)


def _pick(state: EngineState, ids: jax.Array) -> tuple[RequestState, SamplingInputs]:
    """Rows `ids`; a pad is a row that is done."""
    rows, sampling = jax.tree.map(lambda leaf: leaf.at[ids].get(mode="clip"), (state.rows, state.sampling))
    return rows.replace(done=rows.done | (ids >= state.rows.done.shape[0])), sampling


def _put(rows: RequestState, ids: jax.Array, new: RequestState) -> RequestState:
    return jax.tree.map(lambda all_, some: all_.at[ids].set(some, mode="drop"), rows, new)


def _join(decode: StepInputs, prefill: StepInputs) -> StepInputs:
    """Decode rows, then the chunks' tokens."""
    num_decode = decode.decode_context_lens.shape[0]
    return StepInputs(
        token_ids=jnp.concatenate([decode.token_ids, prefill.token_ids]),
        positions=jnp.concatenate([decode.positions, prefill.positions]),
        slot_mapping=jnp.concatenate([decode.slot_mapping, prefill.slot_mapping]),
        decode_block_tables=decode.decode_block_tables,
        decode_context_lens=decode.decode_context_lens,
        prefill_block_tables=prefill.prefill_block_tables,
        prefill_query_start_loc=prefill.prefill_query_start_loc,
        prefill_context_lens=prefill.prefill_context_lens,
        logit_ids=jnp.concatenate([decode.logit_ids, prefill.logit_ids + num_decode]),
        state_ids=jnp.concatenate([decode.state_ids, prefill.state_ids]),
    )
