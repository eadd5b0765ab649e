"""Log-probabilities in Pallas, Triton lowering: one program a row, which ends at once if nobody wants its numbers.

One sweep makes the largest logit, the sum of exponentials and the largest logit of every lane (see `sample_triton`); then the best
of the lanes is taken J times, the lane that it came from looked at again after each.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._dispatch import Device
from pallas_kernels.sampling import LogprobsProblem, SampleProblem, sample_triton
from pallas_kernels.sampling.noise import HALF
from pallas_kernels.sampling.sample_triton import Row, Tiles, larger, pad, pick_largest

_INF = float("inf")
TILES = Tiles(read=4, num_warps=8)


def why_not(problem: LogprobsProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Needs a CUDA device of compute capability 8.0 or the interpreter."""
    del problem
    return sample_triton.why_not(None, device, interpret=interpret)


def run(
    problem: LogprobsProblem, logits: jax.Array, token: jax.Array, wanted: jax.Array, *, interpret: bool, tiles: Tiles | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See ``pallas_kernels.token_logprobs``; ``tiles`` overrides `TILES`."""
    tiles, rows, num_top = tiles or TILES, problem.num_rows, problem.num_top
    width = pad(num_top + 1)  # at least one, for an output of no columns is none; a power of two, for a program writes no other
    shapes = ((rows,), jnp.float32), ((rows,), jnp.int32), ((rows, width), jnp.int32), ((rows, width), jnp.float32)
    if rows == 0:
        return jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.int32), jnp.zeros((0, num_top), jnp.int32), jnp.zeros((0, num_top), jnp.float32)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    logprob, rank, top_ids, top_logprobs = pl.pallas_call(
        functools.partial(_report, problem=problem, tiles=tiles, width=width),
        name="token_logprobs",
        grid=(rows,),
        in_specs=[anywhere] * 3,
        out_specs=[anywhere] * 4,
        out_shape=[jax.ShapeDtypeStruct(*each) for each in shapes],
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
    )(logits, token, wanted.astype(jnp.int32))
    return logprob, rank, top_ids[:, :num_top], top_logprobs[:, :num_top]


def _report(
    logits_ref: Any,
    token_ref: Any,
    wanted_ref: Any,
    logprob_ref: Any,
    rank_ref: Any,
    top_ids_ref: Any,
    top_logprobs_ref: Any,
    *,
    problem: LogprobsProblem,
    tiles: Tiles,
    width: int,
) -> None:
    row = pl.program_id(0)
    slot = jnp.arange(width, dtype=jnp.int32)
    wanted = plt.load(wanted_ref.at[row]) != 0
    lanes = HALF * tiles.read

    def write(logprob: jax.Array, rank: jax.Array, top_ids: jax.Array, top_logprobs: jax.Array) -> None:
        plt.store(logprob_ref.at[row], logprob)
        plt.store(rank_ref.at[row], rank)
        plt.store(top_ids_ref.at[row, slot], top_ids)
        plt.store(top_logprobs_ref.at[row, slot], top_logprobs)

    @pl.when(jnp.logical_not(wanted))
    def _() -> None:
        none = jnp.zeros((width,), jnp.int32)
        write(jnp.float32(0), jnp.int32(0), none, none.astype(jnp.float32))

    @pl.when(wanted)
    def _() -> None:
        logits = Row(logits_ref, row, SampleProblem(problem.num_rows, problem.vocab, problem.vocab_size, 0, 0))
        chosen = plt.load(logits_ref.at[row, plt.load(token_ref.at[row])])

        def body(tile: jax.Array, ids: jax.Array, x0: jax.Array, x1: jax.Array, state: Any) -> Any:
            del tile
            x, best, total, count = state
            top = jnp.maximum(x, jnp.maximum(x0, x1))
            # Every lane has a scale of its own, so that the largest logit need not be known.
            scale = jnp.where(top > -_INF, top, 0.0)
            total = total * jnp.exp(x - scale) + jnp.exp(x0 - scale) + jnp.exp(x1 - scale)
            return *larger(ids, x0, x1, (x, best)), total, count + (x0 > chosen).astype(jnp.int32) + (x1 > chosen).astype(jnp.int32)

        zeros = jnp.zeros((lanes,), jnp.int32)
        none = zeros.astype(jnp.float32)
        x, ids, total, count = logits.sweep(tiles.read, body, (none - _INF, jnp.arange(lanes, dtype=jnp.int32), none, zeros))
        most = jnp.max(x)
        log_total = jnp.log(jnp.sum(total * jnp.exp(x - jnp.where(most > -_INF, most, 0.0))))
        top_x, top_ids = pick_largest(logits, tiles.read, problem.num_top, width, x, ids)
        top_logprobs = jnp.where(slot < problem.num_top, top_x - most - log_total, 0.0)
        write(chosen - most - log_total, 1 + jnp.sum(count), top_ids, top_logprobs)
