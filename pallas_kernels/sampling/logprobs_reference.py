"""Log-probabilities in plain JAX: the definition, and what runs where no kernel does. Nothing is computed if no row wants any."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._dispatch import Device
from pallas_kernels.sampling import LogprobsProblem


def why_not(problem: LogprobsProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Runs anywhere."""
    del problem, device, interpret
    return None


def run(
    problem: LogprobsProblem, logits: jax.Array, token: jax.Array, wanted: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.token_logprobs``."""
    del interpret
    num_rows, num_top = problem.num_rows, problem.num_top

    def nothing() -> tuple[jax.Array, ...]:
        zero, none = jnp.zeros(num_rows, jnp.float32), jnp.zeros(num_rows, jnp.int32)
        return zero, none, jnp.zeros((num_rows, num_top), jnp.int32), jnp.zeros((num_rows, num_top), jnp.float32)

    def something() -> tuple[jax.Array, ...]:
        some = logits[:, : problem.vocab_size]
        logprobs = jax.nn.log_softmax(some, axis=-1)
        # Ranks are of the logits: rounding makes ties among log-probabilities.
        rank = 1 + jnp.sum(some > jnp.take_along_axis(some, token[:, None], axis=-1), axis=-1, dtype=jnp.int32)
        _, top_ids = lax.top_k(some, num_top)
        chosen, top_logprobs = (jnp.take_along_axis(logprobs, ids, axis=-1) for ids in (token[:, None], top_ids))
        reported = chosen[:, 0], rank, top_ids.astype(jnp.int32), top_logprobs
        return tuple(jnp.where(wanted.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in reported)

    logprob, rank, top_ids, top_logprobs = lax.cond(jnp.any(wanted), something, nothing)
    return logprob, rank, top_ids, top_logprobs
