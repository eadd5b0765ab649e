"""Adjustments of logits in Pallas, Triton lowering: rows with none are neither read nor written.

They are a kernel of their own, before `sample_triton`: that reads a row more than once, and would adjust it as often. The result is not
written over the logits, of which the model's own log-probabilities are still to be reported.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.sampling import HAS_BANNED, HAS_BIAS, HAS_COUNTS, Adjustments, SampleProblem

_TILE = 2048
_PARTS = 8  # programs of a row
_INF = float("inf")


def adjusted(problem: SampleProblem, logits: jax.Array, adjust: Adjustments, *, interpret: bool) -> jax.Array:
    """The logits f32[B, V] of rows whose ``adjust.flags`` is above 0, adjusted; what the others hold means nothing."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    result: jax.Array = pl.pallas_call(
        functools.partial(_adjust, problem=problem),
        name="adjust_logits",
        grid=(problem.num_rows, _PARTS),
        in_specs=[anywhere] * (1 + len(adjust)),
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(logits.shape, jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(logits, *adjust)
    return result


def _adjust(logits_ref: Any, *refs: Any, problem: SampleProblem) -> None:
    *adjust_refs, out_ref = refs
    adjust: Any = Adjustments(*adjust_refs)
    row, part = pl.program_id(0), pl.program_id(1)
    flags = plt.load(adjust.flags.at[row])

    @pl.when(flags > 0)
    def _() -> None:
        table = plt.load(adjust.rows.at[row])
        repetition, presence, frequency = (plt.load(ref.at[row]) for ref in (adjust.repetition, adjust.presence, adjust.frequency))
        has_bias, has_counts = flags & HAS_BIAS > 0, flags & HAS_COUNTS > 0
        num_banned = (flags & HAS_BANNED > 0).astype(jnp.int32) * problem.num_banned
        num_tiles = -(-problem.vocab_size // (_TILE * _PARTS))

        def tile(i: jax.Array, none: jax.Array) -> jax.Array:
            ids = (i * _PARTS + part) * _TILE + jnp.arange(_TILE, dtype=jnp.int32)
            there = ids < problem.vocab_size
            x = plt.load(logits_ref.at[row, ids], mask=there, other=-_INF)
            # No branches: what a row does not have is masked, and a masked load reads nothing.
            bias = plt.load(adjust.bias.at[table, ids], mask=there & has_bias, other=0.0)
            counts = plt.load(adjust.counts.at[table, ids], mask=there & has_counts, other=0)

            def ban(e: jax.Array, x: jax.Array) -> jax.Array:
                return jnp.where(ids == plt.load(adjust.banned_ids.at[row, e]), -_INF, x)

            x = lax.fori_loop(0, num_banned, ban, x) + bias
            times = (counts >> 1).astype(jnp.float32)
            x = jnp.where(counts > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
            x -= jnp.where(times > 0, presence, 0.0) + frequency * times
            plt.store(out_ref.at[row, ids], x, mask=there)
            return none

        lax.fori_loop(0, num_tiles, tile, jnp.int32(0))
