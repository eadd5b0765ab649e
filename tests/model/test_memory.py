"""Nothing copied: the compiled step writes the cache in place, and what it needs beside it does not grow with the pool."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.batch import Chunk, sampling_inputs
from pagedjax.kv_cache import make_cache
from pagedjax.request import SamplingParams, make_request
from pagedjax.step import decode_loop, make_state, prefill_step
from tests.helpers import TINY, prefill, prompt, tiny_params

ROWS, WIDTH = 4, 4


def compiled(which, num_blocks):
    params, cache, state = tiny_params(), make_cache(TINY, num_blocks), make_state(ROWS)
    one = make_request(prompt(5), SamplingParams(max_tokens=8), eos_ids=(), vocab_size=97, max_model_len=64, default_seed=0)
    sampling = sampling_inputs([one] * ROWS, ROWS)
    if which == "prefill":
        blocks = [[1, 2], [3], [4], [5]]
        inputs = prefill([Chunk(r, 0, 5) for r in range(ROWS)], [prompt(5)] * ROWS, blocks, width=WIDTH)
        run = jax.jit(functools.partial(prefill_step, config=TINY), donate_argnums=(1, 2))
        return run.lower(params, cache, state, inputs, sampling).compile(), (params, cache, state, inputs, sampling)
    table = np.arange(1, ROWS * WIDTH + 1, dtype=np.int32).reshape(ROWS, WIDTH)
    run = jax.jit(functools.partial(decode_loop, config=TINY, num_steps=8, window=2), donate_argnums=(1, 2))
    return run.lower(params, cache, state, table, sampling).compile(), (params, cache, state, table, sampling)


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_the_whole_cache_is_aliased_and_nothing_grows_with_it(which):
    small, args = compiled(which, 4 * ROWS * WIDTH)
    large, _ = compiled(which, 32 * ROWS * WIDTH)
    assert small.memory_analysis().alias_size_in_bytes >= bytes_of(args[1])
    assert large.memory_analysis().alias_size_in_bytes >= bytes_of(make_cache(TINY, 32 * ROWS * WIDTH))
    assert large.memory_analysis().temp_size_in_bytes == small.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_no_weight_is_copied_or_transposed(which):
    """A weight is a large part of what a step reads; bringing it into another layout first would double that."""
    run, (params, *_) = compiled(which, 20)
    moved = re.findall(r"= f32\[([\d,]+)\]\{[\d,]*\} (?:copy|transpose)\(", run.as_text())
    shapes = {tuple(sorted(map(int, shape.split(",")))) for shape in moved}  # in any order of axes
    assert not shapes & {tuple(sorted(leaf.shape)) for leaf in jax.tree.leaves(params) if leaf.ndim > 1}


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_the_donated_cache_is_gone(which):
    run, (params, cache, state, inputs, sampling) = compiled(which, 20)
    inputs, sampling = jax.tree.map(jnp.asarray, (inputs, sampling))
    _, new_cache, _ = run(params, cache, state, inputs, sampling)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((cache, state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, new_cache)))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(cache.keys[0])


def test_one_trace_a_bucket_in_generate(monkeypatch):
    import pagedjax.generation as generation
    from pagedjax import step

    statics = ("config", "mesh", "num_logprobs", "implementation")
    # assert_max_traces sits inside the jit: it counts traces, not calls.
    traced_prefill = chex.assert_max_traces(step.prefill_step, n=1)
    traced_loop = chex.assert_max_traces(step.decode_loop, n=1)
    monkeypatch.setattr(generation, "_prefill_step", jax.jit(traced_prefill, static_argnames=statics, donate_argnames=("cache", "state")))
    monkeypatch.setattr(
        generation,
        "_decode_loop",
        jax.jit(traced_loop, static_argnames=(*statics, "num_steps", "window"), donate_argnames=("cache", "state")),
    )
    params = tiny_params()
    for lengths in ((17, 20), (18, 19), (30, 29)):
        generation.generate(params, TINY, [prompt(n) for n in lengths], 20, temperature=0.5, top_k=3, seed=lengths[0])
    with pytest.raises(AssertionError, match="traced"):
        generation.generate(params, TINY, [prompt(17)] * 5, 20)
