"""Choosing the next token on the device: one function for a batch in which every row has its own settings.

A row's draw depends on its own logits, settings, seed and position alone: the noise is made for every vocabulary id from
the key ``fold_in(fold_in(seed, sample_index), position)``, so neighbours, rows and batch sizes cannot change it. The arithmetic is
`pallas_kernels.sample_tokens`; here is what it needs to know of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.inputs import USES_BAD_WORDS, USES_BIAS, USES_COUNTS, USES_LOGPROBS, USES_MIN_TOKENS, LogitTables, SamplingInputs, TableRow
from pallas_kernels import GREEDY_TEMPERATURE, Adjustments, adjusted_logits, filter_logits, sample_tokens, scaled_logits, token_logprobs

LogprobsMode = Literal["raw", "processed"]


class LogitsState(NamedTuple):
    """What a logits processor is told of the rows.

    Attributes:
      last_token: i32[B], the token before the one that is chosen.
      positions: i32[B], index that the new token will have in its sequence.
      num_generated: i32[B], new tokens before this one, since the row was last started.
      seed: u32[B].
      sample_index: i32[B].
    """

    last_token: jax.Array
    positions: jax.Array
    num_generated: jax.Array
    seed: jax.Array
    sample_index: jax.Array


LogitsProcessor = Callable[[jax.Array, LogitsState], jax.Array]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What is the same for all rows of an engine. Static.

    Attributes:
      vocab_size: ids from here on are never chosen and count in no sum; ``None`` is all of the logits.
      logprobs_mode: whether log-probabilities are ``"raw"``, of the model's own distribution, or ``"processed"``, of the one that a
        token was drawn from.
      logits_processors: traced functions of ``(logits f32[B, V], LogitsState)`` that give logits; they come before everything else.
    """

    vocab_size: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    logits_processors: tuple[LogitsProcessor, ...] = ()


class Sampled(NamedTuple):
    """What one step of sampling gave, per row.

    Attributes:
      token: i32[B].
      logprob: f32[B], natural log-probability of `token`.
      rank: i32[B], 1 for the likeliest token.
      top_ids: i32[B, J], the J likeliest tokens, the likeliest first.
      top_logprobs: f32[B, J].
      prompt: the same of prompt tokens, leaves [T, ...], where a step was asked for them.
    """

    token: jax.Array
    logprob: jax.Array | None = None
    rank: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    prompt: Sampled | None = None


def sample(
    logits: jax.Array,
    sampling: SamplingInputs,
    state: LogitsState,
    live: jax.Array,
    *,
    tables: LogitTables | None = None,
    rows: jax.Array | None = None,
    num_logprobs: int | None = None,
    sampler: Sampler = Sampler(),
    implementation: str | None = None,
) -> Sampled:
    """Choose one token a row: allowed ids, bad words and min_tokens; bias; penalties; temperature; top-k; top-p; min-p.

    Args:
      logits: f32[B, V].
      sampling: the rows' settings.
      state: where the rows stand.
      live: bool[B]; what comes out for the others means nothing.
      tables: of all rows [S]; ``None`` where no row has one.
      rows: i32[B], their rows of `tables`; past the last for a pad.
      num_logprobs: how many of the likeliest tokens to report [J]; ``None`` for no log-probabilities. Static.
      sampler: see `Sampler`. Static.
      implementation: of `pallas_kernels.sample_tokens`. Static.

    Returns:
      what was sampled; the log-probabilities of rows that do not ask for them are zeros and cost nothing.
    """
    flags = jnp.where(live, sampling.flags, 0)
    sampling = sampling._replace(flags=flags, temperature=jnp.where(live, sampling.temperature, 0.0))
    raw, vocab_size = logits, sampler.vocab_size
    for processor in sampler.logits_processors:
        logits = processor(logits, state)
    adjust = None
    if tables is not None:
        assert rows is not None
        adjust = adjustments(sampling, tables, rows, state.num_generated)
    token = sample_tokens(
        logits,
        row_keys(sampling.seed, sampling.sample_index, state.positions),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        adjust=adjust,
        vocab_size=vocab_size,
        implementation=implementation,
    )
    if num_logprobs is None:
        return Sampled(token)
    wanted = flags & USES_LOGPROBS > 0
    if sampler.logprobs_mode == "processed":
        raw = processed_logits(logits, sampling, wanted, adjust=adjust, vocab_size=vocab_size)
        vocab_size = None
    return Sampled(token, *token_logprobs(raw, token, wanted, num_top=num_logprobs, vocab_size=vocab_size, implementation=implementation))


def row_keys(seed: jax.Array, sample_index: jax.Array, positions: jax.Array) -> jax.Array:
    """The key data of ``fold_in(fold_in(key(seed), sample_index), position)``: u32[B, 2]."""

    def one(seed: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index), position)
        return jax.random.key_data(key)

    return jax.vmap(one)(seed, sample_index, positions)


def adjustments(sampling: SamplingInputs, tables: LogitTables, rows: jax.Array, num_generated: jax.Array) -> Adjustments:
    """What `pallas_kernels.sample_tokens` does to the logits of ``rows i32[B]``; arguments as of `sample`."""
    flags = sampling.flags
    words = tables.bad_words.at[rows].get(mode="clip")  # [B, W, L]
    recent = tables.recent.at[rows].get(mode="clip")[:, None]  # [B, 1, L - 1]
    follows = jnp.all((words[:, :, :-1] < 0) | (words[:, :, :-1] == recent), axis=-1)
    uses_words = (flags & USES_BAD_WORDS > 0)[:, None]
    banned_words = jnp.where(follows & uses_words, words[:, :, -1], -1)
    too_early = (flags & USES_MIN_TOKENS > 0) & (num_generated < sampling.min_new_tokens)
    banned = jnp.concatenate([banned_words, jnp.where(too_early[:, None], sampling.stop_token_ids, -1)], axis=1)
    bits = (flags & (USES_BIAS | USES_COUNTS)) | jnp.where(jnp.any(banned >= 0, axis=1), 4, 0)
    return Adjustments(
        flags=bits,
        rows=jnp.minimum(rows, tables.bias.shape[0] - 1),
        bias=tables.bias,
        counts=tables.counts,
        repetition=sampling.repetition,
        presence=sampling.presence,
        frequency=sampling.frequency,
        banned_ids=banned,
    )


def make_tables(num_rows: int, vocab: int, num_words: int, word_len: int) -> LogitTables:
    """Tables that change nothing; arguments are `S`, `V`, `W` and `L`."""
    return LogitTables(
        bias=jnp.zeros((num_rows, vocab), jnp.float32),
        counts=jnp.zeros((num_rows, vocab), jnp.int32),
        bad_words=jnp.full((num_rows, num_words, word_len), -1, jnp.int32),
        recent=jnp.full((num_rows, word_len - 1), -1, jnp.int32),
    )


def set_table_row(tables: LogitTables, row: jax.Array, values: TableRow) -> LogitTables:
    """`tables` with other values in ``row i32[]``; a row past the last changes nothing."""
    return LogitTables(*(table.at[row].set(value, mode="drop") for table, value in zip(tables, values, strict=True)))


def count_tokens(tables: LogitTables, rows: jax.Array, flags: jax.Array, token: jax.Array, live: jax.Array) -> LogitTables:
    """`tables` after ``token i32[B]`` came out for those of ``rows i32[B]`` that are `live`."""
    nowhere = tables.counts.shape[0]
    counted = jnp.where(live & (flags & USES_COUNTS > 0), rows, nowhere)
    shifted = jnp.concatenate([tables.recent.at[rows].get(mode="clip"), token[:, None]], axis=1)[:, 1:]
    return tables._replace(
        counts=tables.counts.at[counted, token].add(2, mode="drop"),
        recent=tables.recent.at[jnp.where(live, rows, nowhere)].set(shifted, mode="drop"),
    )


def processed_logits(
    logits: jax.Array,
    sampling: SamplingInputs,
    wanted: jax.Array,
    *,
    adjust: Adjustments | None = None,
    vocab_size: int | None = None,
) -> jax.Array:
    """The logits that tokens are drawn from, f32[B, vocab_size], if any row is ``wanted bool[B]``. A greedy row has no filters.

    It sorts the vocabulary, and on a GPU the choice whether to costs a round trip to the host: for `logprobs_mode` ``"processed"`` alone.
    """
    logits = logits[:, :vocab_size]
    greedy = sampling.temperature <= GREEDY_TEMPERATURE

    def processed() -> jax.Array:
        scaled = scaled_logits(adjusted_logits(logits, adjust), jnp.where(greedy, 1.0, sampling.temperature))
        filters = sampling.top_k, sampling.top_p, sampling.min_p
        return filter_logits(scaled, *(jnp.where(greedy, off, value) for off, value in zip((0, 1.0, 0.0), filters, strict=True)))

    return lax.cond(jnp.any(wanted), processed, lambda: logits)
