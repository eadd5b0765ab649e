"""Paged equals dense: `forward` through scattered blocks against plain attention over the whole sequence."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.batch import Chunk
from pagedjax.config import RopeConfig
from pagedjax.kv_cache import make_cache
from pagedjax.model import forward
from tests.helpers import (
    TINY,
    decode_step,
    dense_logits,
    mixed_step,
    poisoned_cache,
    prefill,
    prompt,
    shuffled_blocks,
    tiny_params,
    variant,
)

LENGTHS = (1, 15, 16, 17, 31, 32, 33)
# float32 sums of up to 48 terms over two layers, logits up to about 30: 64 units in the last place of 32.
ATOL = 64 * 2**-23 * 32

step = jax.jit(forward, static_argnames=("config", "mesh", "implementation"))


def run_prefill(config, params, lengths, *, num_blocks=40, seed=0, width=16, cache=None):
    """One prefill step of rows of these lengths over a poisoned cache; logits of each row's last token, cache, prompts and blocks."""
    prompts = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    blocks = shuffled_blocks([n + 1 for n in lengths], 16, num_blocks, seed)
    cache = poisoned_cache(config, num_blocks) if cache is None else cache
    inputs = prefill([Chunk(row, 0, n) for row, n in enumerate(lengths)], prompts, blocks, width=width)
    logits, cache = step(params, cache, inputs, config=config)
    return logits[: len(lengths)], cache, prompts, blocks


@pytest.mark.parametrize("length", LENGTHS)
def test_one_row_equals_dense(length):
    params = tiny_params()
    logits, _, prompts, _ = run_prefill(TINY, params, [length])
    chex.assert_tree_all_finite(logits)
    chex.assert_trees_all_close(logits[0], dense_logits(params, prompts[0], TINY)[-1], atol=ATOL)


def test_packed_rows_equal_dense():
    params = tiny_params()
    logits, _, prompts, _ = run_prefill(TINY, params, LENGTHS)
    chex.assert_shape(logits, (len(LENGTHS), TINY.vocab_size))
    for row, ids in enumerate(prompts):
        chex.assert_trees_all_close(logits[row], dense_logits(params, ids, TINY)[-1], atol=ATOL)


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_heads=2, num_kv_heads=2),
        dict(num_heads=6, num_kv_heads=2),
        dict(num_heads=8, num_kv_heads=1),
        dict(head_size=64),
        dict(head_size=128),
        dict(tie_word_embeddings=True),
        dict(attention_bias=True),
        dict(mlp_bias=True),
        dict(rope=RopeConfig(theta=5e5, kind="llama3", factor=32.0, original_max_position=16)),
        dict(rope=RopeConfig(kind="linear", factor=3.0)),
    ],
    ids=lambda c: "-".join(f"{k}={v if isinstance(v, int) else v.kind}" for k, v in c.items()),
)
def test_config_corners_equal_dense(changes):
    config = variant(**changes)
    params = tiny_params(config)
    logits, _, prompts, _ = run_prefill(config, params, [17, 3])
    for row, ids in enumerate(prompts):
        # Weights ten times as large as usual make logits up to some hundreds in the wide variants: relative to the largest.
        want = dense_logits(params, ids, config)[-1]
        chex.assert_trees_all_close(logits[row], want, atol=64 * 2**-23 * float(jnp.max(jnp.abs(want))))


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_step_equals_dense(length):
    params = tiny_params()
    _, cache, prompts, blocks = run_prefill(TINY, params, [length, 20])
    tokens = [5, 6]
    logits, _ = step(params, cache, decode_step(tokens, [length, 20], blocks), config=TINY)
    for row in range(2):
        chex.assert_trees_all_close(logits[row], dense_logits(params, prompts[row] + [tokens[row]], TINY)[-1], atol=ATOL)


def test_decode_rows_beside_prefill_tokens():
    params = tiny_params()
    _, cache, prompts, blocks = run_prefill(TINY, params, [17, 33], num_blocks=40)
    new = [prompt(19, seed=8)]
    free = sorted(set(range(1, 41)) - {b for ids in blocks for b in ids})
    inputs = mixed_step(decode_step([5, 6], [17, 33], blocks, pad_to=4), prefill([Chunk(0, 0, 19)], new, [free[:2]]))
    logits, _ = step(params, cache, inputs, config=TINY)
    chex.assert_tree_all_finite(logits)
    for got, ids in ((logits[0], prompts[0] + [5]), (logits[1], prompts[1] + [6]), (logits[4], new[0])):
        chex.assert_trees_all_close(got, dense_logits(params, ids, TINY)[-1], atol=ATOL)


@pytest.mark.parametrize("cut", [1, 5, 15, 16, 17, 32])
def test_two_chunks_equal_one(cut):
    params, ids = tiny_params(), prompt(33)
    blocks = shuffled_blocks([33], 16, 10)
    cache = poisoned_cache(TINY, 10)
    whole, _ = step(params, cache, prefill([Chunk(0, 0, 33)], [ids], blocks), config=TINY)
    _, cache = step(params, poisoned_cache(TINY, 10), prefill([Chunk(0, 0, cut)], [ids], blocks), config=TINY)
    logits, _ = step(params, cache, prefill([Chunk(0, cut, 33 - cut)], [ids], blocks), config=TINY)
    chex.assert_trees_all_close(logits[0], whole[0], atol=ATOL)


def test_only_owned_cells_are_written():
    params = tiny_params()
    _, cache, _, blocks = run_prefill(TINY, params, [17, 3], num_blocks=12)
    _, cache = step(params, cache, decode_step([1, 2], [17, 3], blocks, pad_to=4), config=TINY)
    owned = np.zeros((13, 16), bool)
    for ids, length in zip(blocks, (18, 4), strict=True):
        for t in range(length):
            owned[ids[t // 16], t % 16] = True
    for pool in cache.keys + cache.values:
        finite = np.isfinite(np.asarray(pool)).all(axis=(1, 3))
        np.testing.assert_array_equal(finite, owned)


def test_renaming_blocks_changes_no_bit():
    params = tiny_params()
    one, _, _, _ = run_prefill(TINY, params, LENGTHS, seed=1)
    two, _, _, _ = run_prefill(TINY, params, LENGTHS, seed=2)
    np.testing.assert_array_equal(one, two)


def test_poison_changes_no_bit():
    params = tiny_params()
    poisoned, _, _, _ = run_prefill(TINY, params, LENGTHS)
    clean, _, _, _ = run_prefill(TINY, params, LENGTHS, cache=make_cache(TINY, 40))
    np.testing.assert_array_equal(poisoned, clean)


def test_logits_only_where_asked():
    params = tiny_params()
    ids = prompt(20)
    inputs = prefill([Chunk(0, 0, 20)], [ids], shuffled_blocks([20], 16, 4), width=4)
    everywhere = inputs._replace(logit_ids=np.arange(20, dtype=np.int32), state_ids=np.zeros(20, np.int32))
    logits, _ = step(params, poisoned_cache(TINY, 4), everywhere, config=TINY)
    chex.assert_type(logits, jnp.float32)
    chex.assert_trees_all_close(logits, dense_logits(params, ids, TINY), atol=ATOL)


def test_bfloat16_stays_near_float32():
    config = variant(dtype="bfloat16")
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), tiny_params())
    logits, _, prompts, _ = run_prefill(config, params, [33])
    want = dense_logits(jax.tree.map(lambda w: w.astype(jnp.float32), params), prompts[0], TINY)[-1]
    # About 20 roundings of 2^-9 relative in a row.
    assert float(jnp.linalg.norm(logits[0] - want) / jnp.linalg.norm(want)) < 20 * 2**-9


def test_forward_is_pure():
    params = tiny_params()
    inputs = prefill([Chunk(0, 0, 7)], [prompt(7)], [[3]], width=1)
    cache = make_cache(TINY, 4)
    before = jax.tree.map(np.array, (params, cache))
    first, _ = forward(params, cache, inputs, TINY)
    second, _ = forward(params, cache, inputs, TINY)
    np.testing.assert_array_equal(first, second)
    jax.tree.map(np.testing.assert_array_equal, before, (params, cache))


def test_gradient_through_the_step():
    params = tiny_params()
    inputs = prefill([Chunk(0, 0, 17)], [prompt(17)], [[2, 1]], width=2)

    def loss(logits):
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 3])

    paged = jax.jit(jax.grad(lambda p: loss(forward(p, make_cache(TINY, 3), inputs, TINY)[0][0])))(params)
    dense = jax.jit(jax.grad(lambda p: loss(dense_logits(p, prompt(17), TINY)[-1])))(params)
    # Same sums in another order; gradients here reach some tens.
    largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(dense))
    chex.assert_trees_all_close(paged, dense, atol=256 * 2**-23 * largest)


def test_order_of_rows_does_not_matter():
    params = tiny_params()
    order = np.random.default_rng(1).permutation(len(LENGTHS))
    logits, _, _, _ = run_prefill(TINY, params, LENGTHS)
    prompts = [prompt(n, seed=i) for i, n in enumerate(LENGTHS)]
    blocks = shuffled_blocks([n + 1 for n in LENGTHS], 16, 40)
    inputs = prefill([Chunk(int(r), 0, LENGTHS[r]) for r in order], prompts, blocks)
    again, _ = step(params, poisoned_cache(TINY, 40), inputs, config=TINY)
    chex.assert_trees_all_close(again[: len(LENGTHS)], logits[order], atol=ATOL)


def test_traces_once_a_bucket():
    @jax.jit
    @chex.assert_max_traces(n=1)  # inside the jit: it counts traces, not calls
    def run(params, cache, inputs):
        return forward(params, cache, inputs, TINY)

    params = tiny_params()
    for length in (17, 20, 31, 32):  # one bucket of tokens, one of rows, one of width
        run(params, make_cache(TINY, 4), prefill([Chunk(0, 0, length)], [prompt(length)], [[4, 2]], width=2))
    with pytest.raises(AssertionError, match="traced"):
        run(params, make_cache(TINY, 4), prefill([Chunk(0, 0, 33)], [prompt(33)], [[4, 2, 1]], width=4))
