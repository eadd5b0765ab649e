"""`rope_write_kv`: queries turned, keys turned and written, values written, padding dropped, nothing else moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rope_write_kv, support
from tests.kernels.h200 import compile_for_h200, needs_compiler

P, Z = 6, 8
implementations = pytest.mark.parametrize("implementation", ["reference", "pallas_triton_interpret"])


def data(tokens, *, kv_heads=2, group=3, head_size=20, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    angle = np.tile(rng.uniform(-3, 3, (tokens, head_size // 2)), (1, 2))
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))  # noqa: E731
    pools = draw(P, kv_heads, Z, head_size), draw(P, kv_heads, Z, head_size)
    return [draw(tokens, kv_heads, group + 2, head_size), *(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin)), *pools]


def oracle(qkv, cos, sin, k_pool, v_pool, slots):
    qkv, cos, sin, k_pool, v_pool = (np.asarray(a, np.float64) for a in (qkv, cos, sin, k_pool, v_pool))
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    half = qkv.shape[-1] // 2
    turned = np.empty_like(qkv)
    # The pair (a, b) of the two halves turns like a complex number.
    for i in range(half):
        a, b = qkv[..., i], qkv[..., i + half]
        c, s = cos[:, None, None, i], sin[:, None, None, i]
        turned[..., i], turned[..., i + half] = a * c - b * s, b * c + a * s
    for t, slot in enumerate(slots):
        if Z <= slot < P * Z:
            k_pool[slot // Z, :, slot % Z] = turned[t, :, -2]
            v_pool[slot // Z, :, slot % Z] = qkv[t, :, -1]
    return turned[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[-1]), k_pool, v_pool


@implementations
@pytest.mark.parametrize(("kv_heads", "group", "head_size"), [(2, 3, 20), (1, 4, 64), (3, 1, 8), (2, 8, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_turned_and_written(implementation, kv_heads, group, head_size, dtype):
    slots = [2 * Z, 3 * Z - 1, Z, P * Z - 1, 4 * Z + 3, 0, Z - 1, -1, P * Z, P * Z + 7]
    arrays = data(len(slots), kv_heads=kv_heads, group=group, head_size=head_size, dtype=dtype)
    got = rope_write_kv(*arrays, jnp.asarray(slots, jnp.int32), implementation=implementation)
    eps = float(jnp.finfo(dtype).eps)  # one rounding, of sums of two products below 8 in all
    for one, want in zip(got, oracle(*arrays, slots), strict=True):
        assert one.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(np.asarray(one, np.float64), want, rtol=eps, atol=eps)
    # What no slot names is the same bits as before.
    untouched = np.ones((P, Z), bool)
    untouched.reshape(-1)[[s for s in slots if Z <= s < P * Z]] = False
    for pool, before in zip(got[1:], arrays[3:], strict=True):
        moved = np.swapaxes(np.asarray(pool, np.float32), 1, 2), np.swapaxes(np.asarray(before, np.float32), 1, 2)
        np.testing.assert_array_equal(moved[0][untouched], moved[1][untouched])


@implementations
def test_no_tokens(implementation):
    arrays = data(0)
    q, k_pool, _ = rope_write_kv(*arrays, jnp.zeros(0, jnp.int32), implementation=implementation)
    assert q.shape == (0, 6, 20)
    np.testing.assert_array_equal(np.asarray(k_pool), np.asarray(arrays[3]))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, jnp.zeros((2, 3, 5, 20)), "qkv must have K = 2, got 3"),
        (0, jnp.zeros((2, 2, 2, 20)), "at least 3 heads a KV head .*, got 2"),
        (0, jnp.zeros((2, 2, 5, 20), jnp.bfloat16), "qkv must be float32, got bfloat16"),
        (1, jnp.zeros((3, 20)), "cos must have T = 2, got 3"),
        (2, jnp.zeros((2, 10)), "sin must have H = 20, got 10"),
        (5, jnp.zeros(3, jnp.int32), "slot_mapping must have T = 2, got 3"),
    ],
)
def test_arguments_that_do_not_fit(index, value, message):
    arrays = [*data(2), jnp.zeros(2, jnp.int32)]
    arrays[index] = value
    with pytest.raises(ValueError, match=message):
        rope_write_kv(*arrays)
    odd = [*data(2, head_size=20), jnp.zeros(2, jnp.int32)]
    odd = [a[..., :-1] if a.ndim > 1 else a for a in odd]
    with pytest.raises(ValueError, match="the head size must be even for halves to turn, got 19"):
        rope_write_kv(*odd)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it runs there")
def test_a_named_kernel_runs_or_raises():
    arrays = [*data(2), jnp.zeros(2, jnp.int32)]
    with pytest.raises(NotImplementedError, match=r"rope_write_kv: pallas_triton does not run on .*: it needs an NVIDIA GPU"):
        rope_write_kv(*arrays, implementation="pallas_triton")
    wide = [*data(1, kv_heads=1, group=64, head_size=512), jnp.zeros(1, jnp.int32)]
    reasons = support("rope_write_kv", None, *wide).reasons
    assert "up to 16384 numbers in the queries of a KV head, got 32768" in reasons["pallas_triton_interpret"]


@needs_compiler
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("tokens", "kv_heads", "group", "head_size"), [(8, 8, 4, 64), (2048, 3, 3, 80)])
def test_compiles_for_an_h200_in_place(tokens, kv_heads, group, head_size):
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    pool, angle = shape(4096, kv_heads, 16, head_size), shape(tokens, head_size, dtype=jnp.float32)
    call = functools.partial(rope_write_kv, implementation="pallas_triton")
    compiled = compile_for_h200(
        call, shape(tokens, kv_heads, group + 2, head_size), angle, angle, pool, pool, shape(tokens, dtype=jnp.int32), donate_argnums=(3, 4)
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * 2 * 4096 * kv_heads * 16 * head_size
    assert memory.temp_size_in_bytes <= 4096
    assert compiled.as_text().count("custom-call(") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "group", "head_size"), [(8, 4, 64), (2, 3, 20)])
def test_on_a_gpu(kv_heads, group, head_size):
    slots = [2 * Z, 3 * Z - 1, Z, P * Z - 1, 0, -1, P * Z]
    arrays = data(len(slots), kv_heads=kv_heads, group=group, head_size=head_size, dtype="bfloat16")
    got = rope_write_kv(*arrays, jnp.asarray(slots, jnp.int32), implementation="pallas_triton")
    for one, want in zip(got, oracle(*arrays, slots), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), want, rtol=2**-7, atol=2**-7)
