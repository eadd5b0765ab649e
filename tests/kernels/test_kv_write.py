"""`write_kv`: every slot gets its token, padding is dropped, nothing else moves, and nothing of the pool's size is copied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import write_kv

P, K, Z, H = 6, 3, 8, 20
implementations = pytest.mark.parametrize("implementation", ["reference", "pallas_triton_interpret"])


def data(tokens, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((P, K, Z, H), (P, K, Z, H), (tokens, K, H), (tokens, K, H))
    return [jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype)) for shape in shapes]


def oracle(pool, new, slots):
    pool = np.asarray(pool).copy()
    for token, slot in enumerate(slots):
        if Z <= slot < P * Z:
            pool[slot // Z, :, slot % Z] = np.asarray(new)[token]
    return pool


@implementations
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tokens_land_in_their_slots_and_padding_nowhere(implementation, dtype):
    # first and last cell of a block, the pool's first and last usable cell, then what is dropped: the null block's cells, a
    # negative slot (it would wrap) and slots past the pool
    slots = [2 * Z, 3 * Z - 1, Z, P * Z - 1, 4 * Z + 3, 0, 0, Z - 1, -1, -Z, P * Z, P * Z + 7]
    k_pool, v_pool, k, v = data(len(slots), dtype)
    got = write_kv(k_pool, v_pool, k, v, jnp.asarray(slots, jnp.int32), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(got[0]), oracle(k_pool, k, slots))
    np.testing.assert_array_equal(np.asarray(got[1]), oracle(v_pool, v, slots))


@implementations
def test_no_tokens(implementation):
    k_pool, v_pool, k, v = data(0)
    got = write_kv(k_pool, v_pool, k, v, jnp.zeros((0,), jnp.int32), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(k_pool))


def memory(blocks, dtype):
    shapes = ((blocks, K, Z, H), (blocks, K, Z, H), (4, K, H), (4, K, H))
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    write = jax.jit(functools.partial(write_kv, implementation="reference"), donate_argnums=(0, 1))
    compiled = write.lower(*args, jax.ShapeDtypeStruct((4,), jnp.int32)).compile()
    return compiled.memory_analysis(), 2 * blocks * K * Z * H * jnp.dtype(dtype).itemsize


# Not bfloat16: XLA's CPU scatter of jax 0.10 widens such a pool to float32 (and a bitcast to integers is a copy as well).
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_donated_pools_are_written_in_place(dtype):
    small, _ = memory(10, dtype)
    large, pool_bytes = memory(1000, dtype)
    assert large.alias_size_in_bytes == pool_bytes
    assert large.temp_size_in_bytes == small.temp_size_in_bytes < 4096


def test_pools_that_are_not_donated_stay():
    k_pool, v_pool, k, v = data(1)
    before = np.asarray(k_pool).copy()
    write_kv(k_pool, v_pool, k, v, jnp.asarray([Z], jnp.int32), implementation="pallas_triton_interpret")
    np.testing.assert_array_equal(np.asarray(k_pool), before)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (1, jnp.zeros((P + 1, K, Z, H)), r"one shape, got \(6, 3, 8, 20\) and \(7, 3, 8, 20\)"),
        (2, jnp.zeros((2, K + 1, H)), "k must have K = 3, got 4"),
        (2, jnp.zeros((2, K, H), jnp.bfloat16), "k must be float32, got bfloat16"),
        (3, jnp.zeros((3, K, H)), "v must have T = 2, got 3"),
        (4, jnp.zeros((2,), jnp.int16), "slot_mapping must be int32, got int16"),
        (4, jnp.zeros((3,), jnp.int32), "slot_mapping must have T = 2, got 3"),
        (4, jnp.zeros((2, 1), jnp.int32), r"slot_mapping must be \[T\] \(rank 1\), got shape \(2, 1\)"),
    ],
)
def test_wrong_arguments(index, value, message):
    args = [*data(2), jnp.zeros((2,), jnp.int32)]
    args[index] = value
    with pytest.raises(ValueError, match=message):
        write_kv(*args)


def test_unknown_and_unsupported_implementations():
    args = [*data(2), jnp.zeros((2,), jnp.int32)]
    with pytest.raises(ValueError, match="write_kv has no implementation 'mosaic_gpu'; it has reference, pallas_triton"):
        write_kv(*args, implementation="mosaic_gpu")
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="write_kv: pallas_triton does not run on cpu: it needs an NVIDIA GPU"):
            write_kv(*args, implementation="pallas_triton")


def test_tokens_too_wide_for_a_program():
    pools, new = jnp.zeros((2, 300, 8, 256)), jnp.zeros((1, 300, 256))
    with pytest.raises(NotImplementedError, match=r"65536 numbers per token .* got 131072; 'reference' serves any"):
        write_kv(pools, pools, new, new, jnp.zeros((1,), jnp.int32), implementation="pallas_triton_interpret")
