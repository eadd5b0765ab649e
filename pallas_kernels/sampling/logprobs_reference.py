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
        logprobs = jax.nn.log_softmax(logits[:, : problem.vocab_size], axis=-1)
        chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)
        rank = 1 + jnp.sum(logprobs > chosen, axis=-1, dtype=jnp.int32)
        top_logprobs, top_ids = lax.top_k(logprobs, num_top)
        reported = chosen[:, 0], rank, top_ids.astype(jnp.int32), top_logprobs
        return tuple(jnp.where(wanted.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in reported)

    logprob, rank, top_ids, top_logprobs = lax.cond(jnp.any(wanted), something, nothing)
    return logprob, rank, top_ids, top_logprobs
