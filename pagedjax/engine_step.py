"""What one dispatch of the engine runs: a window of decode steps, or one step of decode rows and prefill chunks. Pure functions.

They differ from `step` in that the rows of a dispatch are chosen from a larger state by `state_ids`, and that everything about a row
(newest token, position, settings) stays on the device: the host can dispatch the next step before it has seen this one's tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh

from pagedjax.config import ModelConfig
from pagedjax.inputs import (
    USES_LOGPROBS,
    LogitTables,
    MixedInputs,
    PromptInputs,
    SamplingInputs,
    StepInputs,
    TableRow,
    WindowInputs,
    neutral_sampling,
)
from pagedjax.kv_cache import KVCache
from pagedjax.model import hidden_states, unembed
from pagedjax.params import Params
from pagedjax.sampling import (
    LogitsState,
    Sampled,
    Sampler,
    count_tokens,
    make_tables,
    processed_logits,
    sample,
    set_table_row,
)
from pagedjax.step import RequestState, decode_inputs, decode_rows, finished, make_state, sampling_implementation
from pallas_kernels import token_logprobs

PROMPT_PIECE = 256  # prompt tokens whose logits exist at once


@struct.dataclass
class EngineState:
    """Every row that a request may have, ``S`` of them.

    Attributes:
      rows: leaves [S].
      sampling: leaves [S, ...], set when a row starts.
      tables: of the rows that have any, set before they start.
    """

    rows: RequestState
    sampling: SamplingInputs
    tables: LogitTables


def make_engine_state(num_rows: int, num_stops: int, vocab: int, num_words: int, word_len: int) -> EngineState:
    """State of `num_rows` rows without a request.

    Args:
      num_rows: [S].
      num_stops: stop ids of a row [E].
      vocab: of the model [V].
      num_words: sequences of tokens that a row may forbid [W].
      word_len: tokens of the longest [L].
    """
    sampling = SamplingInputs(*(jnp.asarray(leaf) for leaf in neutral_sampling(num_rows, num_stops)))
    return EngineState(make_state(num_rows), sampling, make_tables(num_rows, vocab, num_words, word_len))


def set_tables(state: EngineState, row: jax.Array, values: TableRow) -> EngineState:
    """`state` with other tables for ``row i32[]``, which a request is about to start in."""
    return state.replace(tables=set_table_row(state.tables, row, values))  # type: ignore[attr-defined]


def decode_window(
    params: Params,
    cache: KVCache,
    state: EngineState,
    inputs: WindowInputs,
    *,
    config: ModelConfig,
    num_steps: int,
    window: int,
    num_logprobs: int,
    sampler: Sampler = Sampler(),
    mesh: Mesh | None = None,
    implementation: str | None = None,
    fused_rows: int = 0,
) -> tuple[Sampled, KVCache, EngineState]:
    """Decode up to `num_steps` tokens for some rows.

    Args:
      params, cache, config, mesh, implementation: see `model.forward`.
      state: of all rows.
      inputs: which rows, and their blocks.
      num_steps: static.
      window: steps between two looks at whether all rows are done, see `step.decode_loop`. Static.
      num_logprobs: the likeliest tokens that are reported [J] for rows that ask. Static.
      sampler: see `sampling.Sampler`. Static.
      fused_rows: windows of up to so many rows run the steps of `fused_decode`. Static.

    Returns:
      what was sampled, leaves [num_steps, B, ...], token -1 after a row is done; cache and state.
    """
    rows, sampling = _pick(state, inputs.state_ids)
    sampled, cache, rows, tables = decode_rows(
        params,
        cache,
        rows,
        inputs.block_tables,
        sampling,
        state.tables,
        inputs.state_ids,
        config=config,
        num_steps=num_steps,
        window=window,
        mesh=mesh,
        num_logprobs=num_logprobs,
        sampler=sampler,
        implementation=implementation,
        fused=inputs.state_ids.shape[0] <= fused_rows,
    )
    assert tables is not None
    return sampled, cache, EngineState(_put(state.rows, inputs.state_ids, rows), state.sampling, tables)


def mixed_step(
    params: Params,
    cache: KVCache,
    state: EngineState,
    inputs: MixedInputs,
    *,
    config: ModelConfig,
    num_logprobs: int,
    sampler: Sampler = Sampler(),
    mesh: Mesh | None = None,
    implementation: str | None = None,
) -> tuple[Sampled, KVCache, EngineState]:
    """One token for each decode row, and the chunks' tokens; where a chunk ends its prompt, its row starts.

    Args:
      params, cache, config, mesh, implementation: see `model.forward`.
      state: of all rows.
      inputs: decode rows [B] and chunks [C].
      num_logprobs, sampler: see `decode_window`.

    Returns:
      what was sampled, leaves [B + C, ...], the decode rows first (token -1 where the row was done; meaningless for a chunk that does not
      end its prompt), with the prompt's log-probabilities where `inputs` asks for them; cache and state.
    """
    rows, of_rows = _pick(state, inputs.decode.state_ids)
    num_decode = rows.done.shape[0]
    decode, prefill = decode_inputs(rows, inputs.decode.block_tables, cache.block_size), inputs.prefill
    joined = _join(decode, prefill)
    x, cache = hidden_states(params, cache, joined, config, mesh, implementation=implementation)
    logits = unembed(params, x[joined.logit_ids], config, mesh)

    starts = prefill.positions[prefill.logit_ids] + 1
    positions = jnp.concatenate([rows.num_computed_tokens + 1, starts])
    sampling = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), of_rows, inputs.sampling)
    ids = jnp.concatenate([inputs.decode.state_ids, prefill.state_ids])
    live = jnp.concatenate([~rows.done, prefill.state_ids < state.rows.done.shape[0]])
    before = jnp.concatenate([rows.num_generated, jnp.zeros_like(starts)])
    where = LogitsState(joined.token_ids[joined.logit_ids], positions, before, sampling.seed, sampling.sample_index)
    chosen = sampling_implementation(implementation, mesh)
    sampled = sample(
        logits, sampling, where, live, tables=state.tables, rows=ids, num_logprobs=num_logprobs, sampler=sampler, implementation=chosen
    )
    token = sampled.token
    tables = count_tokens(state.tables, ids, sampling.flags, token, live)
    generated = before + live.astype(jnp.int32)
    new = RequestState(
        last_token=jnp.where(live, token, 0),
        num_computed_tokens=jnp.where(live, positions, positions - 1),
        num_generated=generated,
        done=~live | finished(token, generated, sampling),
    )
    of_chunks = jax.tree.map(lambda all_, some: all_.at[prefill.state_ids].set(some, mode="drop"), state.sampling, inputs.sampling)
    sampled = sampled._replace(token=jnp.where(live, token, -1))
    if inputs.prompt is not None:
        reported = _prompt_logprobs(params, x[num_decode:], inputs.prompt, inputs.sampling, config, num_logprobs, sampler, mesh, chosen)
        sampled = sampled._replace(prompt=reported)
    return sampled, cache, EngineState(_put(state.rows, ids, new), of_chunks, tables)


def _prompt_logprobs(
    params: Params,
    x: jax.Array,
    prompt: PromptInputs,
    sampling: SamplingInputs,
    config: ModelConfig,
    num_logprobs: int,
    sampler: Sampler,
    mesh: Mesh | None,
    implementation: str | None,
) -> Sampled:
    """Log-probabilities of prompt tokens from ``x [T, D]``, a piece at a time: the logits of all would not fit."""
    num_tokens = prompt.token_ids.shape[0]
    piece = min(PROMPT_PIECE, num_tokens)
    padded = -(-num_tokens // piece) * piece
    token_ids, logit_ids, chunk_ids = (jnp.pad(a, (0, padded - num_tokens)) for a in prompt[1:])
    vocab_size = sampler.vocab_size
    # Here the settings are those of the chunk that a token belongs to, and log-probabilities are wanted of every token.
    flags = jnp.full(piece, USES_LOGPROBS, jnp.int32)

    def one_piece(index: jax.Array, out: Sampled) -> Sampled:
        def cut(a: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(a, index * piece, piece)

        logits = unembed(params, x[cut(logit_ids)], config, mesh)
        size = vocab_size
        if sampler.logprobs_mode == "processed":
            settings = SamplingInputs(*(leaf[cut(chunk_ids)] for leaf in sampling))._replace(flags=flags)
            logits, size = processed_logits(logits, settings, flags > 0, vocab_size=size), None
        token = cut(token_ids)
        wanted = index * piece + jnp.arange(piece) < prompt.count
        one = Sampled(token, *token_logprobs(logits, token, wanted, num_top=num_logprobs, vocab_size=size, implementation=implementation))
        return jax.tree.map(lambda all_, some: lax.dynamic_update_slice_in_dim(all_, some, index * piece, 0), out, one)

    zero, top = jnp.zeros(padded, jnp.float32), (padded, num_logprobs)
    nothing = Sampled(token_ids, zero, jnp.zeros(padded, jnp.int32), jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32))
    return lax.fori_loop(0, -(-prompt.count // piece), one_piece, nothing)


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
