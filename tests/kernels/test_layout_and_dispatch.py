"""The pool's layout, the choice of an implementation, and what `support` says about it."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import kv_layout
from pallas_kernels._dispatch import H200, Device, Op, current_device

AMPERE = Device("gpu", (8, 0), "NVIDIA A100")


def test_pool_shape_counts_the_null_block_on_top():
    assert pallas_kernels.pool_shape(10, 2, 16, 64) == (11, 2, 16, 64)
    pools = jnp.zeros(pallas_kernels.pool_shape(10, 2, 16, 64), jnp.bfloat16)
    described = kv_layout.describe_pools(pools, pools)
    assert described == kv_layout.Pool(11, 2, 16, 64, "bfloat16")
    assert described.shape == pools.shape


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2, 16, 64), "num_blocks must be at least 1, got 0"),
        ((1, 0, 16, 64), "num_kv_heads must be at least 1, got 0"),
        ((1, 2, 16, -1), "head_size must be at least 1, got -1"),
        ((1, 2, 12, 64), "block_size must be a power of two, got 12"),
        ((1, 2, 0, 64), "block_size must be a power of two, got 0"),
    ],
)
def test_pool_shape_refuses(sizes, message):
    with pytest.raises(ValueError, match=message):
        pallas_kernels.pool_shape(*sizes)


def test_slots_address_what_gather_blocks_reads():
    pool = jnp.arange(5 * 2 * 4 * 3, dtype=jnp.float32).reshape(5, 2, 4, 3)
    table = jnp.asarray([3, 1], jnp.int32)
    positions = jnp.arange(8, dtype=jnp.int32)
    slots = pallas_kernels.slots_of(table, positions, 4)
    np.testing.assert_array_equal(np.asarray(slots), [12, 13, 14, 15, 4, 5, 6, 7])
    dense = kv_layout.gather_blocks(pool, table[None])
    assert dense.shape == (1, 2, 8, 3)
    np.testing.assert_array_equal(np.asarray(dense[0].swapaxes(0, 1)), np.asarray(pool)[np.asarray(slots) // 4, :, np.asarray(slots) % 4])


def fake_op(monkeypatch, **reasons):
    """An op whose implementations answer with these reasons (None: runs); one more cannot be imported."""
    for name, reason in reasons.items():
        module = type(sys)(f"fake_{name}")
        module.why_not = lambda problem, device, *, interpret, reason=reason: reason
        monkeypatch.setitem(sys.modules, f"fake_{name}", module)
    modules = {name: f"fake_{name}" for name in reasons} | {"absent": "no_such_module"}
    return Op("fake", modules, preference=("absent", *reasons))


def test_none_takes_the_first_that_runs_and_names_are_taken_at_their_word(monkeypatch):
    op = fake_op(monkeypatch, fast="too odd", slow=None)
    assert op.resolve(None, None, AMPERE) == "slow"
    assert op.resolve("slow", None, AMPERE) == "slow"
    with pytest.raises(NotImplementedError, match=r"fake: fast does not run on NVIDIA A100 \(compute capability 8\.0\): too odd"):
        op.resolve("fast", None, AMPERE)
    with pytest.raises(NotImplementedError, match=r"absent does not run .* it cannot be imported here: No module named 'no_such_module'"):
        op.resolve("absent", None, AMPERE)
    with pytest.raises(ValueError, match="fake has no implementation 'other'; it has fast, slow, absent"):
        op.resolve("other", None, AMPERE)


def test_none_says_all_reasons_when_nothing_runs(monkeypatch):
    op = fake_op(monkeypatch, fast="too odd", slow="too big")
    with pytest.raises(NotImplementedError, match=r"nothing serves this call on .*: absent: .*; fast: too odd; slow: too big"):
        op.resolve(None, None, AMPERE)


def test_the_device_is_jaxs_default_unless_another_is_assumed():
    assert current_device().platform == jax.default_backend()
    with pallas_kernels.compiling_for(H200):
        assert current_device() == H200
        with jax.default_device(jax.devices("cpu")[0]):
            assert current_device() == H200
    with jax.default_device(jax.devices("cpu")[0]):
        assert current_device().platform == "cpu"


@pytest.mark.parametrize("op", ["paged_attention", "paged_prefill_attention", "write_kv"])
def test_a_cpu_takes_the_reference_and_an_ampere_card_the_triton_kernel(op):
    with pallas_kernels.compiling_for(Device("cpu")):
        assert pallas_kernels.support(op).implementation == "reference"
    with pallas_kernels.compiling_for(AMPERE):
        assert pallas_kernels.support(op).implementation == "pallas_triton"


def test_support_reports_reasons_and_takes_the_ops_arguments():
    shapes = ((2, 34, 16), (5, 2, 8, 16), (5, 2, 8, 16))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arrays += [jax.ShapeDtypeStruct((2, 3), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)]
    with pallas_kernels.compiling_for(AMPERE):
        support = pallas_kernels.support("paged_attention", None, *arrays, sliding_window=4)
        assert support.implementation == "reference"  # the kernels serve groups of up to 16
        assert support.reasons["reference"] is None
        assert "at most 16 query heads" in support.reasons["pallas_triton"]
        assert pallas_kernels.support("paged_attention", "pallas_triton", *arrays).implementation is None
    assert "paged_attention on NVIDIA A100 (compute capability 8.0): reference runs\n  reference: yes\n" in str(support)
    ops = "paged_attention, paged_prefill_attention, rope_write_kv, sample_tokens, skinny_matmul, token_logprobs, write_kv"
    with pytest.raises(ValueError, match=f"no op 'attention'; there are {ops}$"):
        pallas_kernels.support("attention")
    with pytest.raises(ValueError, match="no implementation 'nothing'"):
        pallas_kernels.support("write_kv", "nothing")
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        pallas_kernels.support("paged_attention", None, *arrays, sliding_window=0)


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is not None, reason="jax-triton is installed")
def test_what_is_not_installed_says_what_to_install():
    with pallas_kernels.compiling_for(H200):
        assert "pip install jax-triton==0.3.1 triton==3.6.0" in pallas_kernels.support("paged_attention").reasons["jax_triton"]


def test_importing_the_package_loads_no_kernel():
    import subprocess

    code = "import sys, pallas_kernels; print([m for m in sys.modules if 'pallas_kernels' in m and ('triton' in m or 'mosaic' in m)])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
