"""The sampler, against distributions worked out by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.inputs import USES_LOGPROBS, SamplingInputs, neutral_sampling
from pagedjax.sampling import LogitsState, sample
from pallas_kernels import filter_logits


def choose(logits, sampling, positions, num_logprobs=None):
    rows = len(logits)
    nothing = jnp.zeros(rows, jnp.int32)
    state = LogitsState(nothing, positions, nothing, sampling.seed, sampling.sample_index)
    return sample(logits, sampling, state, jnp.ones(rows, bool), num_logprobs=num_logprobs)


@jax.jit
def draw(logits, sampling, positions):
    return choose(logits, sampling, positions).token


def settings(rows, **asked):
    neutral = neutral_sampling(rows, 1)
    asked = dict(temperature=1.0, max_new_tokens=9) | asked
    columns = {name: jnp.broadcast_to(jnp.asarray(value, getattr(neutral, name).dtype), (rows,)) for name, value in asked.items()}
    return SamplingInputs(*map(jnp.asarray, neutral))._replace(**columns)


def support(logits, draws=400, **asked):
    """Every token that comes up in many draws."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    tokens = draw(rows, settings(draws, **asked, seed=np.arange(draws)), jnp.zeros(draws, jnp.int32))
    return set(np.asarray(tokens).tolist())


LOG = np.log([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("logits", "asked", "expected"),
    [
        ([3, 2, 1], dict(temperature=0.5, top_p=0.8), {0}),  # softmax of [6, 4, 2] is [.867, .117, .016]
        (LOG, dict(top_k=2, top_p=0.5), {3}),  # the two left are .571 and .429
        (LOG, dict(top_p=0.6), {3, 2}),
        (LOG, dict(top_p=1e-9), {3}),
        (LOG, dict(top_k=3), {1, 2, 3}),
        (LOG, {}, {0, 1, 2, 3}),
        (LOG, dict(top_k=4), {0, 1, 2, 3}),
        (LOG, dict(top_k=9), {0, 1, 2, 3}),
        ([1, 2, 2, 2, 3], dict(top_k=3), {1, 2, 4}),  # exactly three, lower ids first among ties
        ([1, 2, 2, 2, 3], dict(top_k=1), {4}),
        ([2, 1, 0, -1], dict(min_p=0.2), {0, 1}),  # relative to the likeliest: 1, .37, .14, .05
        (LOG, dict(top_k=3, top_p=0.7, min_p=0.9), {3}),
    ],
)
def test_support(logits, asked, expected):
    assert support(logits, **asked) == expected


def test_top_k_is_the_same_at_any_batch_size_and_padding():
    logits = jnp.asarray([[1.0, 2, 2, 2, 3]])
    for rows in (1, 3):
        for pad in (0, 3):
            padded = jnp.pad(jnp.tile(logits, (rows, 1)), ((0, 0), (0, pad)), constant_values=-jnp.inf)
            kept = jnp.isfinite(filter_logits(padded, jnp.full(rows, 3), jnp.ones(rows), jnp.zeros(rows)))
            np.testing.assert_array_equal(kept[:, :5], [[False, True, True, False, True]] * rows)


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-4, 1e-2])
def test_cold_rows_are_the_argmax_and_never_nan(temperature):
    logits = jnp.asarray([[1e4, 9e3, -1e4, 0.0]], jnp.bfloat16).astype(jnp.float32)
    assert int(draw(logits, settings(1, temperature=temperature), jnp.zeros(1, jnp.int32))[0]) == 0


def test_greedy_takes_the_lowest_id_among_ties():
    assert int(draw(jnp.asarray([[1.0, 3, 3, 2]]), settings(1, temperature=0.0), jnp.zeros(1, jnp.int32))[0]) == 1


@pytest.mark.parametrize("top_k", [0, -1, 8, 100])
def test_flat_logits_are_uniform(top_k):
    draws = 4000
    tokens = draw(jnp.zeros((draws, 8)), settings(draws, top_k=top_k, seed=np.arange(draws)), jnp.zeros(draws, jnp.int32))
    counts = np.bincount(np.asarray(tokens), minlength=8)
    # Chi-square with 7 degrees of freedom exceeds 24.3 once in a thousand.
    assert ((counts - draws / 8) ** 2 / (draws / 8)).sum() < 24.3


def test_frequencies_follow_the_probabilities():
    draws = 4000
    rows = jnp.broadcast_to(jnp.asarray(LOG, jnp.float32), (draws, 4))
    tokens = draw(rows, settings(draws, seed=np.arange(draws)), jnp.zeros(draws, jnp.int32))
    counts, expected = np.bincount(np.asarray(tokens), minlength=4), draws * np.exp(LOG)
    # Chi-square with 3 degrees of freedom exceeds 16.3 once in a thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


def test_a_row_does_not_see_its_neighbours():
    logits = jax.random.normal(jax.random.key(1), (6, 50)) * 3
    asked = settings(6, temperature=[0.0, 1, 2, 1, 1, 0.7], top_k=[0, 0, 5, 0, 3, 0], top_p=[1, 1, 1, 0.9, 0.5, 1], seed=[1, 2, 3, 4, 5, 6])
    positions = jnp.arange(6, dtype=jnp.int32)
    together = draw(logits, asked, positions)
    for row in range(6):
        alone = draw(logits[row : row + 1], SamplingInputs(*(leaf[row : row + 1] for leaf in asked)), positions[row : row + 1])
        assert int(alone[0]) == int(together[row])


def test_seed_and_position_decide():
    logits = jnp.zeros((1, 1000))
    got = {(s, p): int(draw(logits, settings(1, seed=s), jnp.asarray([p], jnp.int32))[0]) for s in (0, 1, 2**32 - 1) for p in (0, 1)}
    assert len(set(got.values())) > 4
    assert got == {(s, p): int(draw(logits, settings(1, seed=s), jnp.asarray([p], jnp.int32))[0]) for s, p in got}


def test_nothing_is_sorted_when_nobody_filters():
    asked = settings(4, temperature=[0.0, 1, 1, 1])

    def sorts(asked):
        # A cond runs one branch only; with every row's settings known, XLA drops the other one, sort and all.
        run = jax.jit(lambda logits: draw(logits, asked, jnp.zeros(4, jnp.int32)))
        return "sort(" in run.lower(jnp.zeros((4, 50))).compile().as_text()

    assert sorts(asked._replace(top_k=jnp.full(4, 3)))
    assert not sorts(asked)


def test_log_probabilities():
    logits = jnp.asarray([[0.0, 1, 2, 2], [5, 0, 0, 0], [5, 0, 0, 0]])
    asked = settings(3, temperature=0, flags=[USES_LOGPROBS, USES_LOGPROBS, 0])
    got = choose(logits, asked, jnp.zeros(3, jnp.int32), 2)
    want = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    chex.assert_trees_all_close(got.logprob, np.asarray([want[0, 2], want[1, 0], 0]), rtol=1e-6)
    np.testing.assert_array_equal(got.rank, [1, 1, 0])
    np.testing.assert_array_equal(got.top_ids, [[2, 3], [0, 1], [0, 0]])  # lower ids first among ties
    chex.assert_shape(choose(logits, asked, jnp.zeros(3, jnp.int32), 0).top_ids, (3, 0))
