"""What one dispatch runs on the device: a prefill step, or a loop of decode steps with early exit. Pure functions.

Both take the cache and the rows' state and return them; jit them with both donated and nothing is copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh

from pagedjax.config import ModelConfig
from pagedjax.fused_decode import fused_forward
from pagedjax.inputs import LogitTables, SamplingInputs, StepInputs
from pagedjax.kv_cache import KVCache
from pagedjax.model import forward
from pagedjax.params import Params
from pagedjax.sampling import LogitsState, Sampled, Sampler, count_tokens, sample
from pallas_kernels.sampling import SAMPLE_OP


@struct.dataclass
class RequestState:
    """What the device remembers of each row between steps.

    Attributes:
      last_token: i32[B], the newest token, whose keys and values are not in the cache yet.
      num_computed_tokens: i32[B], tokens whose keys and values are in the cache; also the position of `last_token`.
      num_generated: i32[B], new tokens so far.
      done: bool[B]; a finished row computes nothing that counts and writes nothing.
    """

    last_token: jax.Array
    num_computed_tokens: jax.Array
    num_generated: jax.Array
    done: jax.Array


def make_state(num_rows: int) -> RequestState:
    """State of `num_rows` rows that have no request yet."""
    # Four arrays, not one used thrice: a donated buffer can be given away only once.
    token, computed, generated = (jnp.zeros(num_rows, jnp.int32) for _ in range(3))
    return RequestState(last_token=token, num_computed_tokens=computed, num_generated=generated, done=jnp.ones(num_rows, bool))


def prefill_step(
    params: Params,
    cache: KVCache,
    state: RequestState,
    inputs: StepInputs,
    sampling: SamplingInputs,
    *,
    config: ModelConfig,
    mesh: Mesh | None = None,
    num_logprobs: int | None = None,
    sampler: Sampler = Sampler(),
    implementation: str | None = None,
) -> tuple[Sampled, KVCache, RequestState]:
    """Compute prompt tokens; where a prompt ends, sample its first new token and start its row.

    Args:
      params, cache, config, mesh, implementation: see `model.forward`.
      state: of all rows [B].
      inputs: a step without decode rows.
      sampling: of all rows [B].
      num_logprobs, sampler: see `sampling.sample`. Static.

    Returns:
      what was sampled at each of the `R` logit positions (meaningless where ``state_ids`` names no row), cache and state.
    """
    logits, cache = forward(params, cache, inputs, config, mesh, implementation=implementation)
    rows = inputs.state_ids
    position = inputs.positions[inputs.logit_ids] + 1
    of_rows = SamplingInputs(*(leaf.at[rows].get(mode="clip") for leaf in sampling))
    nothing = jnp.zeros_like(position)
    where = LogitsState(inputs.token_ids[inputs.logit_ids], position, nothing, of_rows.seed, of_rows.sample_index)
    chosen = sampling_implementation(implementation, mesh)
    live = rows < state.done.shape[0]
    sampled = sample(logits, of_rows, where, live, num_logprobs=num_logprobs, sampler=sampler, implementation=chosen)
    token, generated = sampled.token, nothing + 1
    state = RequestState(
        last_token=state.last_token.at[rows].set(token, mode="drop"),
        num_computed_tokens=state.num_computed_tokens.at[rows].set(position, mode="drop"),
        num_generated=state.num_generated.at[rows].set(generated, mode="drop"),
        done=state.done.at[rows].set(finished(token, generated, of_rows), mode="drop"),
    )
    return sampled, cache, state


def decode_loop(
    params: Params,
    cache: KVCache,
    state: RequestState,
    block_tables: jax.Array,
    sampling: SamplingInputs,
    *,
    config: ModelConfig,
    num_steps: int,
    window: int = 1,
    mesh: Mesh | None = None,
    num_logprobs: int | None = None,
    sampler: Sampler = Sampler(),
    implementation: str | None = None,
) -> tuple[Sampled, KVCache, RequestState]:
    """Decode up to `num_steps` tokens a row in one dispatch, leaving early when every row is done.

    Args:
      params, cache, config, mesh, implementation: see `model.forward`.
      state: of all rows [B].
      block_tables: i32[B, M], with blocks for every token that a row may still produce.
      sampling: of all rows [B].
      num_steps: static, a multiple of `window`.
      window: steps between two looks at whether all rows are done: a look costs a GPU a round trip to the host, and skipping
        it costs up to ``window - 1`` steps without effect.
      num_logprobs, sampler: see `sampling.sample`. Static.

    Returns:
      what was sampled, each leaf with a leading axis of `num_steps`; token -1 after a row is done. Then cache and state.

    Raises:
      ValueError: `num_steps` is no positive multiple of `window`, or the mesh does not divide the model.
    """
    sampled, cache, state, _ = decode_rows(
        params,
        cache,
        state,
        block_tables,
        sampling,
        None,
        None,
        config=config,
        num_steps=num_steps,
        window=window,
        mesh=mesh,
        num_logprobs=num_logprobs,
        sampler=sampler,
        implementation=implementation,
    )
    return sampled, cache, state


def decode_rows(
    params: Params,
    cache: KVCache,
    state: RequestState,
    block_tables: jax.Array,
    sampling: SamplingInputs,
    tables: LogitTables | None,
    table_rows: jax.Array | None,
    *,
    config: ModelConfig,
    num_steps: int,
    window: int,
    mesh: Mesh | None,
    num_logprobs: int | None,
    sampler: Sampler,
    implementation: str | None,
    fused: bool = False,
) -> tuple[Sampled, KVCache, RequestState, LogitTables | None]:
    """`decode_loop` with what changes logits beside `sampling`: `tables`, and each row's row of them, see `sampling.sample`.

    `fused` runs steps of few large kernels, see `fused_decode`.
    """
    if num_steps < 1 or window < 1 or num_steps % window:
        raise ValueError(f"num_steps {num_steps} must be a positive multiple of window {window}")
    num_rows = state.done.shape[0]
    chosen = sampling_implementation(implementation, mesh)

    def one_step(index: jax.Array, carry: _Carry) -> _Carry:
        cache, state, changing, out = carry
        of_step = None if tables is None else tables._replace(**changing)
        inputs = decode_inputs(state, block_tables, cache.block_size)
        if fused:
            logits, cache = fused_forward(params, cache, inputs, config, implementation=implementation)
        else:
            logits, cache = forward(params, cache, inputs, config, mesh, implementation=implementation)
        live = ~state.done
        where = LogitsState(state.last_token, state.num_computed_tokens + 1, state.num_generated, sampling.seed, sampling.sample_index)
        options = dict(tables=of_step, rows=table_rows, num_logprobs=num_logprobs, sampler=sampler, implementation=chosen)
        sampled = sample(logits, sampling, where, live, **options)  # type: ignore[arg-type]
        token = sampled.token
        if of_step is not None:
            assert table_rows is not None
            of_step = count_tokens(of_step, table_rows, sampling.flags, token, live)
            changing = dict(counts=of_step.counts, recent=of_step.recent)
        one = live.astype(jnp.int32)
        generated = state.num_generated + one
        reported = sampled._replace(token=jnp.where(live, token, -1))
        out = jax.tree.map(lambda buffer, leaf: lax.dynamic_update_index_in_dim(buffer, leaf, index, 0), out, reported)
        state = RequestState(
            last_token=jnp.where(live, token, state.last_token),
            num_computed_tokens=state.num_computed_tokens + one,
            num_generated=generated,
            done=state.done | finished(token, generated, sampling),
        )
        return cache, state, changing, out

    def one_window(start: jax.Array | int, carry: _Carry) -> _Carry:
        return lax.fori_loop(0, window, lambda i, c: one_step(start + i, c), carry)

    def unfinished(carry: tuple[jax.Array, _Carry]) -> jax.Array:
        start, (_, state, _, _) = carry
        return (start < num_steps) & ~jnp.all(state.done)

    changing = {} if tables is None else dict(counts=tables.counts, recent=tables.recent)
    carry = cache, state, changing, _buffers(num_steps, num_rows, num_logprobs)
    if num_steps == window:  # no look at all: even one would make the host wait for the device before it can launch the rest
        cache, state, changing, out = one_window(0, carry)
    else:
        _, (cache, state, changing, out) = lax.while_loop(unfinished, lambda c: (c[0] + window, one_window(*c)), (jnp.int32(0), carry))
    return out, cache, state, None if tables is None else tables._replace(**changing)


# Cache, rows, what changes of the tables, and what was sampled so far.
_Carry = tuple[KVCache, RequestState, dict[str, jax.Array], Sampled]


def sampling_implementation(implementation: str | None, mesh: Mesh | None) -> str | None:
    """The implementation of the sampling ops where the attention ops run `implementation`: they have fewer."""
    if mesh is not None:
        return "reference"  # XLA splits it over the mesh; a kernel would want all of the logits
    return implementation if implementation in SAMPLE_OP.modules else None


def decode_inputs(state: RequestState, block_tables: jax.Array, block_size: int) -> StepInputs:
    """The step that computes each live row's newest token."""
    num_rows, width = block_tables.shape
    position = jnp.where(state.done, 0, state.num_computed_tokens)
    block = jnp.take_along_axis(block_tables, (position // block_size)[:, None], axis=1, mode="clip")[:, 0]
    nothing = jnp.zeros(0, jnp.int32)
    return StepInputs(
        token_ids=state.last_token,
        positions=position,
        slot_mapping=jnp.where(state.done, 0, block * block_size + position % block_size),
        decode_block_tables=block_tables,
        decode_context_lens=jnp.where(state.done, 0, position + 1),
        prefill_block_tables=jnp.zeros((0, width), jnp.int32),
        prefill_query_start_loc=jnp.zeros(1, jnp.int32),
        prefill_context_lens=nothing,
        logit_ids=jnp.arange(num_rows, dtype=jnp.int32),
        state_ids=jnp.arange(num_rows, dtype=jnp.int32),
    )


def finished(token: jax.Array, generated: jax.Array, sampling: SamplingInputs) -> jax.Array:
    """Which rows end with `token`, their `generated`-th new one: bool[B]."""
    stopped = jnp.any(token[:, None] == sampling.stop_token_ids, axis=-1)
    return stopped | (generated >= sampling.max_new_tokens)


def _buffers(num_steps: int, num_rows: int, num_logprobs: int | None) -> Sampled:
    token = jnp.full((num_steps, num_rows), -1, jnp.int32)
    if num_logprobs is None:
        return Sampled(token)
    top = (*token.shape, num_logprobs)
    zero, none = jnp.zeros(token.shape, jnp.float32), jnp.zeros(token.shape, jnp.int32)
    return Sampled(token, zero, none, jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32))
