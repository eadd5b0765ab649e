"""Choosing the next token on the device: one function for a batch in which every row has its own settings.

A row's draw depends on its own logits, settings, seed and position alone: the noise is made for every vocabulary id from
the key ``fold_in(fold_in(seed, sample_index), position)``, so neighbours, rows and batch sizes cannot change it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.inputs import SamplingInputs

# At or below this a row is greedy: dividing by less would only overflow.
GREEDY_TEMPERATURE = 1e-5


class Sampled(NamedTuple):
    """What one sampling step gives for each row. The last four are ``None`` when log-probabilities were not asked for.

    Attributes:
      token: i32[B]; -1 where the row had already finished.
      logprob: f32[B], natural log-probability of `token` under the unfiltered distribution.
      rank: i32[B], 1 for the likeliest token.
      top_ids: i32[B, J], the likeliest tokens, lower ids first among ties.
      top_logprobs: f32[B, J].
    """

    token: jax.Array
    logprob: jax.Array | None = None
    rank: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def sample(logits: jax.Array, sampling: SamplingInputs, positions: jax.Array) -> jax.Array:
    """Draw one token a row: temperature, then top-k, then top-p, each on the distribution that the one before it left.

    Args:
      logits: f32[B, V].
      sampling: the rows' settings.
      positions: i32[B], index that the new token will have in its sequence.

    Returns:
      i32[B]. Greedy rows take the lowest id among ties. Nothing is sorted when no row filters, nothing drawn when all are greedy.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_greedy = sampling.temperature <= GREEDY_TEMPERATURE

    def draw() -> jax.Array:
        temperature = jnp.where(is_greedy, 1.0, sampling.temperature)[:, None]
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
        filters = ~is_greedy & ((sampling.top_k > 0) | (sampling.top_p < 1.0))
        kept = lax.cond(jnp.any(filters), lambda: filter_logits(scaled, sampling.top_k, sampling.top_p), lambda: scaled)
        noise = jax.vmap(_gumbel, in_axes=(0, 0, 0, None))(sampling.seed, sampling.sample_index, positions, logits.shape[1])
        return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)

    drawn = lax.cond(jnp.all(is_greedy), lambda: greedy, draw)
    return jnp.where(is_greedy, greedy, drawn)


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Set what top-k and then top-p remove to minus infinity.

    top-k keeps exactly k, lowest ids first among ties. top-p then keeps the likeliest tokens, the one that crosses the
    threshold included (Holtzman et al. 2019, arXiv:1904.09751).

    Args:
      logits: f32[B, V].
      top_k: i32[B]; 0 or V and more is off.
      top_p: f32[B]; 1 is off.
    """
    num_rows, vocab = logits.shape
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    keep = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    probabilities = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A p of 1 must keep all, and any p the first: rounding in the sum may not decide either.
    keep &= (before < top_p[:, None]) | (top_p >= 1.0)[:, None] | (rank == 0)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    keep_by_id = jnp.zeros(logits.shape, bool).at[rows, order].set(keep)
    return jnp.where(keep_by_id, logits, -jnp.inf)


def log_probabilities(logits: jax.Array, token: jax.Array, num_top: int) -> Sampled:
    """Log-probabilities of the chosen tokens and of the `num_top` likeliest, from unfiltered ``logits f32[B, V]``."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)
    rank = 1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32)
    top_logprobs, top_ids = lax.top_k(logprobs, num_top)
    return Sampled(token, chosen[:, 0], rank, top_ids.astype(jnp.int32), top_logprobs)


def _gumbel(seed: jax.Array, sample_index: jax.Array, position: jax.Array, vocab: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample_index), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
