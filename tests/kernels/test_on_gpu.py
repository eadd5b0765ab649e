"""Every decode and write kernel that runs on this GPU, on real shapes, against the float64 oracle and the reference."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import paged_attention, write_kv
from tests.kernels.oracle import decode, make_case, relative_error

pytestmark = [
    pytest.mark.gpu,
    # JAX announces since 0.11 that Pallas will drop this lowering: the reason why each op has another backend too.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
implementations = pytest.mark.parametrize("implementation", ["pallas_triton", "mosaic_gpu", "jax_triton"])


def served(implementation, *arrays, **options):
    """Skip, with the reason, what this implementation says that it does not serve here."""
    reason = pallas_kernels.support("paged_attention", None, *arrays, **options).reasons[implementation]
    if reason is not None:
        pytest.skip(f"{implementation}: {reason}")
    return jax.jit(functools.partial(paged_attention, implementation=implementation, **options))


def test_the_fastest_is_chosen():
    capability = pallas_kernels.support("paged_attention").device.compute_capability
    case = make_case([100], heads=4, kv_heads=1, head_size=128, block_size=16).arrays("bfloat16")
    chosen = pallas_kernels.support("paged_attention", None, *case).implementation
    assert chosen == ("mosaic_gpu" if capability == (9, 0) else "pallas_triton")
    assert pallas_kernels.support("write_kv").implementation == "pallas_triton"


@implementations
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_size", "block_size", "dtype", "options"),
    [
        (1, 8, 64, 16, "bfloat16", {}),
        (2, 4, 128, 16, "float16", {"soft_cap": 20.0}),
        (3, 2, 80, 8, "bfloat16", {"sliding_window": 100}),
        (4, 8, 64, 16, "bfloat16", {"sliding_window": 700, "soft_cap": 8.0}),
        (4, 8, 128, 32, "bfloat16", {}),
        (7, 4, 128, 64, "bfloat16", {"scale": 0.2}),
        (8, 2, 96, 128, "float16", {}),
        (16, 1, 256, 16, "bfloat16", {"sliding_window": 33}),
        (4, 2, 64, 16, "float32", {}),
        (3, 2, 80, 32, "float32", {"sliding_window": 300, "soft_cap": 30.0}),
        (8, 1, 256, 16, "float32", {}),
    ],
)
def test_equals_the_oracle_with_nan_in_every_unowned_cell(implementation, group, kv_heads, head_size, block_size, dtype, options):
    contexts = [0, 1, block_size - 1, block_size, block_size + 1, 512, 513, 1024, 2000, 0]
    case = make_case(contexts, heads=group * kv_heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size)
    arrays = case.arrays(dtype)
    call = served(implementation, *arrays, return_lse=True, **options)
    out, lse = call(*arrays)
    want, want_lse = case.oracle(dtype, **options)
    some = np.asarray(contexts) > 0
    assert not np.asarray(out)[~some].any()
    assert np.isneginf(np.asarray(lse)[~some]).all()
    assert relative_error(out, want) < (2e-6 * 2000**0.5 if dtype == "float32" else 5e-3)
    # Logits have an error of their dot products' rounding: about eps(float32) * |logit| * sqrt(H), however K is stored.
    np.testing.assert_allclose(np.asarray(lse)[some], want_lse[some], rtol=1e-4, atol=1e-3)
    chex.assert_trees_all_equal(call(*arrays), (out, lse))  # two runs, bit-equal


@implementations
def test_logits_of_ten_thousand_stay_finite(implementation):
    case = make_case([3000, 3], heads=8, kv_heads=2, head_size=64, block_size=16, q_scale=1e4)
    arrays = case.arrays("bfloat16")
    assert relative_error(served(implementation, *arrays)(*arrays), case.oracle("bfloat16")[0]) < 5e-3


@implementations
def test_a_row_does_not_depend_on_its_batch_nor_on_the_names_of_blocks(implementation):
    contexts = np.random.default_rng(0).integers(0, 3000, 64)
    case = make_case(contexts, heads=32, kv_heads=8, head_size=64, block_size=16, width=200)
    arrays = case.arrays("bfloat16", poison=False)
    call = served(implementation, *arrays)
    together = np.asarray(call(*arrays))
    for rows in (1, 2, 7):
        alone = call(*case.rows(slice(0, rows)).arrays("bfloat16", poison=False))
        np.testing.assert_array_equal(np.asarray(alone), together[:rows])
    names = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(case.k_pool.shape[0] - 1)]).astype(np.int32)
    back = np.argsort(names)
    renamed = dataclasses.replace(case, k_pool=case.k_pool[back], v_pool=case.v_pool[back], block_tables=names[case.block_tables])
    np.testing.assert_array_equal(np.asarray(call(*renamed.arrays("bfloat16", poison=False))), together)


@implementations
def test_pools_of_more_than_2_to_the_31_elements(implementation):
    """Blocks at both ends of a pool whose last element no 32-bit number addresses."""
    kv_heads, block_size, head_size, contexts = 8, 16, 128, np.asarray([300, 64], np.int32)
    num_blocks = 2**31 // (kv_heads * block_size * head_size) + 64
    small = make_case(contexts, heads=32, kv_heads=kv_heads, head_size=head_size, block_size=block_size, width=19)
    ids = np.concatenate([[0], num_blocks - 1 - np.arange(small.k_pool.shape[0] - 1)]).astype(np.int32)
    ids[3::4] = np.arange(len(ids[3::4])) + 1
    place = jax.jit(lambda x: jnp.zeros((num_blocks, *x.shape[1:]), x.dtype).at[ids].set(x))
    q, k_pool, v_pool, _, lens = small.arrays("bfloat16", poison=False)
    arrays = q, place(k_pool), place(v_pool), jnp.asarray(ids[small.block_tables]), lens
    assert arrays[1].size > 2**31
    assert relative_error(served(implementation, *arrays)(*arrays), small.oracle("bfloat16")[0]) < 5e-3


@implementations
def test_the_gradient_is_finite_beside_nan(implementation):
    case = make_case([0, 50, 240], heads=8, kv_heads=2, head_size=64, block_size=16)
    q, k_pool, v_pool, table, lens = arrays = case.arrays("bfloat16")
    attend = served(implementation, *arrays)
    gradients = jax.grad(lambda *x: attend(*x, table, lens).astype(jnp.float32).sum(), (0, 1, 2))(q, k_pool, v_pool)
    chex.assert_tree_all_finite(gradients)
    assert float(jnp.abs(gradients[0].astype(jnp.float32)).max()) > 0


def test_the_reference_claims_float32_and_not_tf32():
    case = make_case([500, 33], heads=8, kv_heads=2, head_size=64, block_size=16)
    out = paged_attention(*case.arrays(), implementation="reference")
    assert relative_error(out, case.oracle()[0]) < 2e-6 * 500**0.5


@pytest.mark.parametrize("implementation", ["pallas_triton", "reference"])
@pytest.mark.parametrize(
    ("kv_heads", "head_size", "block_size", "dtype"), [(8, 128, 16, "bfloat16"), (3, 80, 32, "float32"), (1, 96, 8, "float16")]
)
def test_write_kv(implementation, kv_heads, head_size, block_size, dtype):
    rng, blocks = np.random.default_rng(0), 200
    slots = rng.permutation(blocks * block_size)[:1000].astype(np.int32)  # some in the null block
    slots = np.concatenate([slots, [-1, blocks * block_size, 0]]).astype(np.int32)
    pools = [jnp.asarray(rng.standard_normal((blocks, kv_heads, block_size, head_size)), dtype) for _ in range(2)]
    new = [jnp.asarray(rng.standard_normal((len(slots), kv_heads, head_size)), dtype) for _ in range(2)]
    want = [np.asarray(pool.astype(jnp.float32)).copy() for pool in pools]
    for token, slot in enumerate(slots):
        if block_size <= slot < blocks * block_size:
            for pool, x in zip(want, new, strict=True):
                pool[slot // block_size, :, slot % block_size] = np.asarray(x[token].astype(jnp.float32))
    write = jax.jit(functools.partial(write_kv, implementation=implementation), donate_argnums=(0, 1))
    addresses = [pool.unsafe_buffer_pointer() for pool in pools]
    got = write(*pools, *new, jnp.asarray(slots))
    assert [pool.unsafe_buffer_pointer() for pool in got] == addresses, "in place"
    for pool, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(pool.astype(jnp.float32)), expected)


def test_write_kv_beyond_2_to_the_31_elements():
    kv_heads, block_size, head_size = 8, 16, 128
    blocks = 2**31 // (kv_heads * block_size * head_size) + 8
    pools = [jnp.zeros((blocks, kv_heads, block_size, head_size), jnp.bfloat16) for _ in range(2)]
    new = [jax.random.normal(jax.random.key(i), (2, kv_heads, head_size), jnp.bfloat16) for i in range(2)]
    slots = jnp.asarray([blocks * block_size - 1, block_size], jnp.int32)
    got = jax.jit(functools.partial(write_kv, implementation="pallas_triton"), donate_argnums=(0, 1))(*pools, *new, slots)
    for pool, x in zip(got, new, strict=True):
        np.testing.assert_array_equal(np.asarray(pool[blocks - 1, :, -1]), np.asarray(x[0]))
        np.testing.assert_array_equal(np.asarray(pool[1, :, 0]), np.asarray(x[1]))
        assert int(jnp.count_nonzero(pool)) == 2 * kv_heads * head_size


def test_contexts_come_from_the_shape_table_too():
    """One shape of the benchmark's, whole: 64 rows of many lengths."""
    from pallas_kernels.tuning.shapes import DecodeShape

    shape = DecodeShape(64, 0, 64)
    case = make_case(shape.contexts, heads=32, kv_heads=8, head_size=64, block_size=16)
    arrays = case.arrays("bfloat16")
    rows = case.rows(slice(0, 6)).rounded("bfloat16")
    want, _ = decode(rows.q, rows.k_pool, rows.v_pool, rows.block_tables, rows.context_lens)
    assert relative_error(paged_attention(*arrays)[:6], want) < 5e-3
