"""Both prefill kernels on a GPU, on real shapes, against the float64 oracle and the reference."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import paged_prefill_attention
from pallas_kernels.prefill_attention import describe, mosaic_gpu, pallas_triton
from pallas_kernels.prefill_attention.mosaic_kernel import RingConfig
from pallas_kernels.prefill_attention.pallas_triton import TileConfig
from tests.kernels.prefill_cases import NARROW_TOLERANCE, check, make_case, oracle

pytestmark = [
    pytest.mark.gpu,
    # JAX announces since 0.11 that Pallas will drop this lowering: the reason why each op has another backend too.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
implementations = pytest.mark.parametrize("implementation", ["pallas_triton", "mosaic_gpu"])
# First chunks, later chunks, a prefix hit with one query, idle rows; ends on and off the borders of blocks and of tiles.
REAL = {"query_lens": [130, 0, 1, 64, 300, 5, 0, 70, 63], "context_lens": [130, 0, 700, 1000, 1024, 5, 9, 70, 255], "num_tokens": 700}


def served(implementation, case, **options):
    """Skip, with the reason, what this implementation says that it does not serve here."""
    reason = pallas_kernels.support("paged_prefill_attention", None, *case.arrays, **options).reasons[implementation]
    if reason is not None:
        pytest.skip(f"{implementation}: {reason}")
    return jax.jit(functools.partial(paged_prefill_attention, implementation=implementation, **options))


def test_the_fastest_is_chosen():
    support = pallas_kernels.support("paged_prefill_attention", None, *make_case([64], [64], head_size=128, dtype="bfloat16").arrays)
    assert support.implementation == ("mosaic_gpu" if support.device.compute_capability == (9, 0) else "pallas_triton")


@implementations
@pytest.mark.parametrize(
    ("head_size", "group", "block_size", "dtype", "options"),
    [
        (128, 4, 16, "bfloat16", {}),
        (64, 7, 8, "float16", {"sliding_window": 100, "soft_cap": 20.0}),
        (256, 2, 128, "bfloat16", {}),
        (256, 3, 16, "float16", {"sliding_window": 65}),
        (64, 1, 64, "bfloat16", {"sliding_window": 300}),
        (64, 8, 16, "bfloat16", {"scale": 0.3}),
        (128, 16, 32, "bfloat16", {"sliding_window": 1}),
        (128, 2, 16, "bfloat16", {"sliding_window": 129}),
        (80, 3, 32, "bfloat16", {"sliding_window": 33}),
        (96, 4, 8, "float16", {}),
        (128, 4, 16, "float32", {"soft_cap": 30.0}),
        (64, 4, 16, "float32", {"sliding_window": 50}),
    ],
)
def test_equals_the_oracle_with_nan_wherever_nobody_looks(implementation, head_size, group, block_size, dtype, options):
    window = options.get("sliding_window")
    case = make_case(**REAL, head_size=head_size, group=group, block_size=block_size, dtype=dtype, factor=2.0, left_behind=window)
    served(implementation, case, **options)
    check(case, implementation, **options)


def test_the_reference_claims_float32_and_not_tf32():
    check(make_case(**REAL, head_size=64, block_size=16), "reference")


@implementations
@pytest.mark.parametrize(("block_size", "group"), [(8, 1), (16, 2), (32, 1), (64, 2), (128, 1)])
def test_edges_of_blocks_and_tiles(implementation, block_size, group):
    """One row of each context around the borders: as a first chunk, with one new query, and after a cached part."""
    contexts = sorted({0, 1, block_size - 1, block_size, block_size + 1, 63, 64, 65, 127, 128, 129, 255, 256, 257})
    rows = [(n, n) for n in contexts] + [(1, n) for n in contexts if n] + [(n - n // 3, n) for n in contexts]
    queries, contexts = zip(*rows, strict=True)
    case = make_case(queries, contexts, group=group, head_size=128, block_size=block_size, dtype="bfloat16")
    served(implementation, case)
    check(case, implementation)


@implementations
@pytest.mark.parametrize(("tokens", "pads"), [(1, 0), (17, 46), (65, 1)])
def test_few_tokens(implementation, tokens, pads):
    case = make_case([tokens], [tokens + 200], num_tokens=tokens + pads, head_size=128, block_size=16, dtype="bfloat16")
    served(implementation, case)
    check(case, implementation)


@implementations
def test_nothing_to_do(implementation):
    case = make_case([0, 0], [0, 90], num_tokens=200, head_size=128, block_size=16, dtype="bfloat16")
    out, lse = served(implementation, case, return_lse=True)(*case.arrays)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize(
    ("module", "config", "head_size"),
    [(mosaic_gpu, RingConfig(tile, stages), 128) for tile, stages in ((64, 2), (64, 3), (64, 4), (128, 2))]
    + [(mosaic_gpu, RingConfig(128, 3), 64)]
    + [(pallas_triton, TileConfig(rows, tile, warps, 2), 128) for rows, tile, warps in ((16, 16, 4), (64, 32, 4), (128, 128, 8))],
    ids=str,
)
def test_every_tile_configuration(module, config, head_size):
    case = make_case(**REAL, head_size=head_size, block_size=32, group=4, dtype="bfloat16", left_behind=200)
    options = {"sliding_window": 200}
    served(module.__name__.rpartition(".")[2], case, **options)
    problem = describe(*case.arrays, **options)
    out, _ = jax.jit(lambda *arrays: module.run(problem, *arrays, interpret=False, config=config))(*case.arrays)
    want, _ = oracle(case, **options)
    assert np.linalg.norm(np.asarray(out.astype(jnp.float32)) - want) <= NARROW_TOLERANCE * np.linalg.norm(want)


@implementations
def test_logits_of_ten_thousand_stay_finite(implementation):
    case = make_case(**REAL, head_size=64, block_size=16, dtype="bfloat16", factor=3e3)
    out = served(implementation, case)(*case.arrays)
    want, _ = oracle(case)
    assert np.linalg.norm(np.asarray(out.astype(jnp.float32)) - want) <= NARROW_TOLERANCE * np.linalg.norm(want)


@implementations
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_does_not_depend_on_its_batch_nor_on_the_names_of_blocks(implementation, dtype):
    rng = np.random.default_rng(0)
    queries = rng.integers(1, 200, 64)
    case = make_case(queries.tolist(), (queries + rng.integers(0, 800, 64)).tolist(), head_size=128, block_size=16, dtype=dtype)
    call = served(implementation, case)
    q, k, v, tables, start, contexts = case.arrays
    together = call(*case.arrays)
    for rows in (1, 2, 7):
        end = int(start[rows])
        np.testing.assert_array_equal(call(q[:end], k, v, tables[:rows], start[: rows + 1], contexts[:rows]), together[:end])
    names = np.concatenate([[0], 1 + rng.permutation(k.shape[0] - 1)]).astype(np.int32)
    back = np.argsort(names)
    np.testing.assert_array_equal(call(q, k[back], v[back], jnp.asarray(names[case.block_tables]), start, contexts), together)


@implementations
def test_many_runs_are_bit_equal(implementation):
    """A race between the warpgroups or with the copies would show as bits that come and go."""
    rng = np.random.default_rng(2)
    queries = rng.integers(1, 300, 40)
    case = make_case(
        queries.tolist(), (queries + rng.integers(0, 900, 40)).tolist(), head_size=128, group=4, block_size=16, dtype="bfloat16"
    )
    call = served(implementation, case)
    arrays = case.arrays
    first = call(*arrays)
    check(case, implementation)
    different = jax.jit(lambda a, b: jnp.sum(a != b))
    assert sum(int(different(first, call(*arrays))) for _ in range(50)) == 0


@implementations
def test_the_gradient_is_the_reference_s(implementation):
    case = make_case([50, 0, 100], [90, 0, 100], num_tokens=160, head_size=64, block_size=16, dtype="bfloat16")
    q, k_pool, v_pool, *rest = case.arrays
    served(implementation, case)

    def gradient(implementation):
        def loss(*x):
            return paged_prefill_attention(*x, *rest, implementation=implementation).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k_pool, v_pool)

    got = gradient(implementation)
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_equal(got, gradient("reference"))


@implementations
def test_pools_beyond_32_bit_offsets(implementation):
    """Blocks at the far end of a pool of more than 2**31 numbers: an offset that wrapped would read elsewhere."""
    small = make_case([100], [200], head_size=128, kv_heads=8, block_size=16, dtype="bfloat16")
    blocks = 2**31 // (8 * 16 * 128) + small.k_pool.shape[0]
    at = blocks - small.k_pool.shape[0]
    grow = jax.jit(lambda pool: jnp.zeros((blocks, *pool.shape[1:]), pool.dtype).at[at:].set(pool))
    large = dataclasses.replace(small, k_pool=grow(small.k_pool), v_pool=grow(small.v_pool), block_tables=small.block_tables + np.int32(at))
    assert large.k_pool.size > 2**31
    call = served(implementation, small)
    near, far = (call(*c.arrays) for c in (small, large))
    assert np.isfinite(np.asarray(near.astype(jnp.float32))).all()
    np.testing.assert_array_equal(near, far)
