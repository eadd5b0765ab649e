"""What `paged_attention` refuses, and what it says."""

import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import paged_attention


def arrays(**changes):
    made = {
        "q": jnp.zeros((2, 4, 16)),
        "k_pool": jnp.zeros((5, 2, 8, 16)),
        "v_pool": jnp.zeros((5, 2, 8, 16)),
        "block_tables": jnp.zeros((2, 3), jnp.int32),
        "context_lens": jnp.zeros((2,), jnp.int32),
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_pool": jnp.zeros((5, 2, 16))}, r"k_pool must be \[P, K, Z, H\] \(rank 4\), got shape \(5, 2, 16\)"),
        ({"v_pool": jnp.zeros((6, 2, 8, 16))}, r"one shape, got \(5, 2, 8, 16\) and \(6, 2, 8, 16\)"),
        ({"v_pool": jnp.zeros((5, 2, 8, 16), jnp.bfloat16)}, "one dtype, got float32 and bfloat16"),
        ({"k_pool": jnp.zeros((5, 2, 6, 16)), "v_pool": jnp.zeros((5, 2, 6, 16))}, "block_size must be a power of two, got 6"),
        (
            {"k_pool": jnp.zeros((5, 2, 8, 16), jnp.int32), "v_pool": jnp.zeros((5, 2, 8, 16), jnp.int32)},
            "bfloat16, float16, float32, got int32",
        ),
        ({"k_pool": jnp.zeros((0, 2, 8, 16)), "v_pool": jnp.zeros((0, 2, 8, 16))}, r"pools must not be empty, got shape \(0, 2, 8, 16\)"),
        ({"q": jnp.zeros((2, 64))}, r"q must be \[B, N, H\] \(rank 3\), got shape \(2, 64\)"),
        ({"q": jnp.zeros((2, 4, 32))}, "q must have H = 16, got 32"),
        ({"q": jnp.zeros((2, 4, 16), jnp.bfloat16)}, "q must be float32, got bfloat16"),
        ({"q": jnp.zeros((2, 5, 16))}, "query heads must be a multiple of key/value heads, got 5 and 2"),
        ({"block_tables": jnp.zeros((3, 3), jnp.int32)}, "block_tables must have B = 2, got 3"),
        ({"block_tables": jnp.zeros((2, 3), jnp.int16)}, "block_tables must be int32, got int16"),
        ({"block_tables": jnp.zeros((2, 0), jnp.int32)}, r"at least one column, got shape \(2, 0\)"),
        ({"context_lens": jnp.zeros((3,), jnp.int32)}, "context_lens must have B = 2, got 3"),
        ({"context_lens": jnp.zeros((2,), jnp.float32)}, "context_lens must be int32, got float32"),
        ({"scale": float("inf")}, "scale must be finite, got inf"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be positive and finite, got 0.0"),
        ({"implementation": "cutlass"}, "no implementation 'cutlass'; it has reference, pallas_triton"),
    ],
)
def test_wrong_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**arrays(**changes))


@pytest.mark.skipif(pallas_kernels.support("paged_attention").device.platform == "gpu", reason="the kernels run here")
@pytest.mark.parametrize("implementation", ["pallas_triton", "jax_triton"])
def test_a_named_kernel_never_falls_back(implementation):
    with pytest.raises(
        NotImplementedError, match=rf"paged_attention: {implementation} does not run on cpu: .*(needs an NVIDIA GPU|pip install)"
    ):
        paged_attention(**arrays(), implementation=implementation)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 34, 16))}, "at most 16 query heads per key/value head, got 17; 'reference' serves any"),
        (
            {"q": jnp.zeros((2, 2, 512)), "k_pool": jnp.zeros((5, 2, 8, 512)), "v_pool": jnp.zeros((5, 2, 8, 512))},
            "head sizes up to 256, got 512; 'reference' serves any",
        ),
    ],
)
def test_shapes_that_the_kernel_does_not_serve(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(**arrays(**changes), implementation="pallas_triton_interpret")
    assert paged_attention(**arrays(**changes), implementation="reference").shape == changes["q"].shape


def test_old_cards():
    turing = pallas_kernels.Device("gpu", (7, 5), "Tesla T4")
    with (
        pallas_kernels.compiling_for(turing),
        pytest.raises(NotImplementedError, match=r"Tesla T4 \(compute capability 7.5\): it needs .*8.0"),
    ):
        paged_attention(**arrays(), implementation="pallas_triton")
    with pallas_kernels.compiling_for(turing):
        assert pallas_kernels.support("paged_attention").implementation == "reference"
        assert pallas_kernels.support("write_kv").implementation == "reference"
