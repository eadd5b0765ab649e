"""Paged decode attention against the float64 oracle: the reference, and the Triton kernel in Pallas's interpreter."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import describe, pallas_triton
from pallas_kernels.paged_attention.split import TileConfig
from tests.kernels.oracle import make_case, relative_error

IMPLEMENTATIONS = ("reference", "pallas_triton_interpret")
SPLIT_UP = TileConfig(tile=16, direct=16, chunk=16)  # many splits for contexts that a test can afford
_run = jax.jit(pallas_triton.run, static_argnums=0, static_argnames=("interpret", "config"))

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def float32_tolerance(context):
    """Sums of `context` products in float32, for logits within +-50."""
    return 2e-6 * max(1, context) ** 0.5


def edges(block_size, width):
    """Context lengths around the ends of blocks, and none."""
    return [0, 1, block_size - 1, block_size, block_size + 1, width * block_size, 0]


def run_split_up(*arrays, **options):
    """The interpreted kernel with every row of more than 16 tokens split."""
    return _run(describe(*arrays, return_lse=True, **options), *arrays, interpret=True, config=SPLIT_UP)


def check(out, lse, want_out, want_lse, contexts, tolerance):
    some = np.asarray(contexts) > 0
    assert not np.asarray(out)[~some].any(), "rows of context 0 give exactly 0"
    assert np.isneginf(np.asarray(lse)[~some]).all()
    assert relative_error(out, want_out) < tolerance
    # The log-sum-exp is a sum of its own, of absolute error about eps * |logits|.
    np.testing.assert_allclose(np.asarray(lse)[some], want_lse[some], rtol=2e-6, atol=1e-5)


@implementations
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_size", "block_size", "width", "options"),
    [
        (1, 3, 16, 8, 3, {}),
        (2, 2, 64, 16, 3, {"sliding_window": 17}),
        (3, 1, 80, 8, 4, {"soft_cap": 5.0}),
        (4, 2, 16, 32, 2, {"scale": 0.3}),
        (7, 1, 96, 16, 2, {"sliding_window": 1}),
        (8, 1, 32, 128, 1, {"sliding_window": 40, "soft_cap": 3.0}),
        (16, 1, 8, 8, 3, {}),
    ],
)
def test_equals_the_oracle_with_nan_in_every_unowned_cell(implementation, group, kv_heads, head_size, block_size, width, options):
    contexts = edges(block_size, width)
    case = make_case(contexts, heads=group * kv_heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size)
    out, lse = paged_attention(*case.arrays(), return_lse=True, implementation=implementation, **options)
    check(out, lse, *case.oracle(**options), contexts, float32_tolerance(width * block_size))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 37, "soft_cap": 4.0}])
def test_split_rows_equal_the_oracle(options):
    contexts = [0, 1, 16, 17, 33, 100, 128]  # whole rows and rows of 2 to 8 splits in one batch
    case = make_case(contexts, heads=4, kv_heads=2, head_size=16, block_size=8)
    out, lse = run_split_up(*case.arrays(), **options)
    check(out, lse, *case.oracle(**options), contexts, float32_tolerance(128))


def test_more_splits_than_one_merging_step_takes():
    contexts = [16 * 20, 5]
    case = make_case(contexts, heads=2, kv_heads=1, head_size=16, block_size=16)
    out, lse = run_split_up(*case.arrays())
    check(out, lse, *case.oracle(), contexts, float32_tolerance(320))


@implementations
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(implementation, dtype):
    case = make_case([30, 7, 48], heads=4, kv_heads=2, head_size=32, block_size=16)
    out = paged_attention(*case.arrays(dtype), implementation=implementation)
    assert out.dtype == jnp.dtype(dtype)
    # Output and weights round to 2**-9 (bfloat16), at random: the norm of the error stays below that of its worst term.
    assert relative_error(out, case.oracle(dtype)[0]) < 5e-3


@implementations
def test_logits_of_ten_thousand_stay_finite(implementation):
    case = make_case([40, 3], heads=2, kv_heads=1, head_size=16, block_size=8, q_scale=1e4)
    out = paged_attention(*case.arrays(), implementation=implementation)
    assert np.isfinite(np.asarray(out)).all()
    assert relative_error(out, case.oracle()[0]) < 5e-3


@implementations
def test_a_context_beyond_the_table_is_the_whole_table(implementation):
    case = make_case([16, 16], heads=2, kv_heads=1, head_size=16, block_size=8)
    q, k, v, table, lens = case.arrays()
    long = paged_attention(q, k, v, table, lens + 100, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(long), np.asarray(paged_attention(q, k, v, table, lens, implementation=implementation)))


@implementations
def test_rows_may_share_blocks(implementation):
    case = make_case([30, 40, 9], heads=4, kv_heads=2, head_size=16, block_size=8)
    tables = case.block_tables.copy()
    tables[0, :3] = tables[1, :3]  # a shared prefix of three blocks
    case = dataclasses.replace(case, block_tables=tables)
    out = paged_attention(*case.arrays(), implementation=implementation)
    assert relative_error(out, case.oracle()[0]) < float32_tolerance(40)


@pytest.mark.parametrize("run", ["reference", "split"])
def test_renaming_blocks_changes_no_bit(run):
    case = make_case([33, 5, 64], heads=4, kv_heads=2, head_size=16, block_size=8)
    names = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(case.k_pool.shape[0] - 1)]).astype(np.int32)
    renamed = dataclasses.replace(
        case, k_pool=case.k_pool[np.argsort(names)], v_pool=case.v_pool[np.argsort(names)], block_tables=names[case.block_tables]
    )
    assert (renamed.block_tables != case.block_tables).any()
    call = run_split_up if run == "split" else lambda *x: paged_attention(*x, return_lse=True, implementation=run)
    chex.assert_trees_all_equal(call(*case.arrays()), call(*renamed.arrays()))


def test_a_row_does_not_depend_on_its_batch():
    """Whole rows and split ones. Not the reference: XLA chooses by shape how it sums."""
    case = make_case([37, 5, 64, 16, 0, 23, 50], heads=2, kv_heads=1, head_size=16, block_size=8, width=8)
    together = run_split_up(*case.arrays(poison=False))
    for rows in (1, 3):
        alone = run_split_up(*case.rows(slice(0, rows)).arrays(poison=False))
        chex.assert_trees_all_equal(alone, jax.tree.map(lambda x, rows=rows: x[:rows], together))


def test_two_runs_are_bit_equal():
    case = make_case([33, 5, 64], heads=4, kv_heads=2, head_size=16, block_size=8)
    chex.assert_trees_all_equal(run_split_up(*case.arrays()), run_split_up(*case.arrays()))


def test_the_context_is_read_to_its_last_token_and_no_further():
    """The output moves with the last token's value, and not with the next one's."""
    case = make_case([19], heads=2, kv_heads=1, head_size=16, block_size=8)
    before = paged_attention(*case.arrays(poison=False), implementation="pallas_triton_interpret")
    for offset, moves in ((18 % 8, True), (19 % 8, False)):
        v_pool = case.v_pool.copy()
        v_pool[case.block_tables[0, 2], :, offset] += 100
        after = paged_attention(*dataclasses.replace(case, v_pool=v_pool).arrays(poison=False), implementation="pallas_triton_interpret")
        assert bool((after != before).all()) is moves


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9, "soft_cap": 4.0}])
def test_the_gradient_is_the_references_and_finite_beside_nan(options):
    case = make_case([0, 5, 24], heads=4, kv_heads=2, head_size=16, block_size=8)
    q, k_pool, v_pool, table, lens = case.arrays()

    def loss(implementation, q, k_pool, v_pool):
        out, lse = paged_attention(q, k_pool, v_pool, table, lens, return_lse=True, implementation=implementation, **options)
        return (out**2).sum() + jnp.where(lens[:, None] > 0, lse, 0).sum()

    gradient = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    want = gradient("reference", q, k_pool, v_pool)
    got = gradient("pallas_triton_interpret", q, k_pool, v_pool)
    chex.assert_tree_all_finite(want)
    # The cotangents start from outputs that differ by the float32 error of the two forward passes.
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_references_gradient_equals_finite_differences():
    case = make_case([5, 12], heads=2, kv_heads=1, head_size=4, block_size=8)
    q, k_pool, v_pool, table, lens = case.arrays(poison=False)

    def loss(q, k_pool, v_pool):
        return paged_attention(q, k_pool, v_pool, table, lens, implementation="reference")

    jax.test_util.check_grads(loss, (q, k_pool, v_pool), order=1, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)


@implementations
def test_it_works_under_jit_and_for_no_rows(implementation):
    case = make_case([5, 12], heads=2, kv_heads=1, head_size=16, block_size=8)
    arrays = case.arrays()

    def call(*arrays):
        return paged_attention(*arrays, return_lse=True, implementation=implementation)

    chex.assert_trees_all_equal(jax.jit(call)(*arrays), call(*arrays))
    q, k, v, table, lens = arrays
    out, lse = call(q[:0], k, v, table[:0], lens[:0])
    assert (out.shape, lse.shape) == ((0, 2, 16), (0, 2))
    assert paged_attention(q[:0], k, v, table[:0], lens[:0], implementation=implementation).shape == (0, 2, 16)
