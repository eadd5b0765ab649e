"""Sampling in plain JAX: the definition, and what runs where no kernel does. Sorts only if a row filters, draws only if one samples."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._dispatch import Device
from pallas_kernels.sampling import GREEDY_TEMPERATURE, HAS_BANNED, HAS_BIAS, HAS_COUNTS, Adjustments, SampleProblem
from pallas_kernels.sampling.noise import gumbel


def why_not(problem: SampleProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Runs anywhere."""
    del problem, device, interpret
    return None


def run(
    problem: SampleProblem,
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    adjust: Adjustments | None,
    *,
    interpret: bool,
) -> jax.Array:
    """See ``pallas_kernels.sample_tokens``."""
    del interpret
    logits = adjusted_logits(logits[:, : problem.vocab_size], adjust)
    is_greedy = temperature <= GREEDY_TEMPERATURE
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        scaled = scaled_logits(logits, jnp.where(is_greedy, 1.0, temperature))
        filters = ~is_greedy & (((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1) | (min_p > 0))
        kept = lax.cond(jnp.any(filters), lambda: filter_logits(scaled, top_k, top_p, min_p), lambda: scaled)
        return jnp.argmax(kept + gumbel(keys, logits.shape[1]), axis=-1).astype(jnp.int32)

    drawn = lax.cond(jnp.all(is_greedy), lambda: greedy, draw)
    return jnp.where(is_greedy, greedy, drawn)


def adjusted_logits(logits: jax.Array, adjust: Adjustments | None) -> jax.Array:
    """Banned ids, bias and penalties on ``logits f32[B, V']``, the first columns of the `V` that `adjust` is for."""
    if adjust is None:
        return logits

    def adjusted() -> jax.Array:
        assert adjust is not None
        vocab = logits.shape[1]
        ids = jnp.arange(vocab, dtype=jnp.int32)[None, None, :]
        has = [(adjust.flags & bit > 0)[:, None] for bit in (HAS_BANNED, HAS_BIAS, HAS_COUNTS)]
        banned = jnp.any(adjust.banned_ids[:, :, None] == ids, axis=1)
        x = jnp.where(has[0] & banned, -jnp.inf, logits)
        x = jnp.where(has[1], x + adjust.bias[adjust.rows, :vocab], x)
        counts = adjust.counts[adjust.rows, :vocab]
        times = (counts >> 1).astype(jnp.float32)
        repetition = adjust.repetition[:, None]
        penalised = jnp.where(counts > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
        penalised -= jnp.where(times > 0, adjust.presence[:, None], 0) + adjust.frequency[:, None] * times
        return jnp.where(has[2], penalised, x)

    return lax.cond(jnp.any(adjust.flags > 0), adjusted, lambda: logits)


def scaled_logits(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits over ``temperature f32[B]``, the likeliest at 0, so that nothing overflows."""
    most = jnp.max(logits, axis=-1, keepdims=True)
    # A row of which nothing is left: minus infinity less itself would be no number.
    most = jnp.where(jnp.isfinite(most), most, 0.0)
    return (logits - most) / temperature[:, None]


def filter_logits(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Set what top-k, then top-p, then min-p remove to minus infinity; ``logits f32[B, V]``, after temperature."""
    num_rows, vocab = logits.shape
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    keep = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    weights = jnp.where(keep, jnp.exp(ranked - ranked[:, :1]), 0.0)
    before = jnp.cumsum(weights, axis=-1) - weights
    # A p of 1 must keep all, and any p the first: rounding in the sum may not decide either.
    keep &= (before < top_p[:, None] * jnp.sum(weights, axis=-1, keepdims=True)) | (top_p >= 1.0)[:, None] | (rank == 0)
    keep &= (jnp.exp(ranked - ranked[:, :1]) >= min_p[:, None]) | (rank == 0)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    keep_by_id = jnp.zeros(logits.shape, bool).at[rows, order].set(keep)
    return jnp.where(keep_by_id, logits, -jnp.inf)
