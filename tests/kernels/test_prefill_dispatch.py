"""Which prefill arguments are refused, which kernel serves which shapes, and that the kernels compile for an H200."""

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import paged_prefill_attention
from pallas_kernels.prefill_attention import describe
from tests.kernels.h200 import compile_for_h200, needs_compiler
from tests.kernels.prefill_cases import make_case


def bad(**changes):
    q, k, v, tables, start, contexts = make_case([3, 2], [9, 2]).arrays
    arguments = {"q": q, "k_pool": k, "v_pool": v, "block_tables": tables, "query_start_loc": start, "context_lens": contexts}
    return {**arguments, **{name: change(arguments[name]) if callable(change) else change for name, change in changes.items()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda q: q[0]}, r"q must be \[T, N, H\] \(rank 3\), got shape \(4, 16\)"),
        ({"q": lambda q: q[..., :8]}, r"q must have H = 16, got 8"),
        ({"q": lambda q: q[:, :3]}, r"query heads must be a multiple of key/value heads, got 3 and 2"),
        ({"q": lambda q: q.astype(jnp.bfloat16)}, r"q must be float32, got bfloat16"),
        ({"v_pool": lambda v: v[:-1]}, r"k_pool and v_pool must have one shape"),
        ({"block_tables": lambda t: t.astype(jnp.int16)}, r"block_tables must be int32, got int16"),
        ({"block_tables": lambda t: t[:, :0]}, r"block_tables must have at least one column, got shape \(2, 0\)"),
        ({"query_start_loc": lambda s: s[:-1]}, r"query_start_loc must have C1 = 3, got 2"),
        ({"context_lens": lambda c: c[:-1]}, r"context_lens must have C = 2, got 1"),
        ({"sliding_window": 0}, r"sliding_window must be at least 1, got 0"),
        ({"soft_cap": 0.0}, r"soft_cap must be positive and finite, got 0.0"),
        ({"scale": float("nan")}, r"scale must be finite, got nan"),
        ({"implementation": "flash"}, r"has no implementation 'flash'; it has reference, pallas_triton"),
    ],
)
def test_wrong_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        paged_prefill_attention(**bad(**changes))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="asks for what a CPU cannot do")
@pytest.mark.parametrize(
    ("implementation", "message"),
    [("pallas_triton", "needs an NVIDIA GPU of compute capability 8.0"), ("mosaic_gpu", "needs a Hopper GPU")],
)
def test_kernels_need_their_device(implementation, message):
    with pytest.raises(NotImplementedError, match=message):
        paged_prefill_attention(**bad(), implementation=implementation)


def specs(*, dtype="bfloat16", head_size=128, block_size=16, group=4, tokens=256, **options):
    spec = jax.ShapeDtypeStruct
    pool = spec((64, 2, block_size, head_size), dtype)
    q = spec((tokens, 2 * group, head_size), dtype)
    return (q, pool, pool, spec((3, 8), jnp.int32), spec((4,), jnp.int32), spec((3,), jnp.int32)), options


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mosaic_gpu", {"dtype": "float32"}, "computes in bfloat16 or float16, got float32"),
        ("mosaic_gpu", {"head_size": 80}, "head sizes 64, 128 and 256 are supported, got 80"),
        ("mosaic_gpu", {"block_size": 4}, "block sizes 8 to 128 are supported, got 4"),
        ("mosaic_gpu", {"scale": -1.0}, "the scale must be positive, got -1.0"),
        ("pallas_triton", {"scale": 0.0}, "the scale must be positive, got 0.0"),
        ("pallas_triton", {"head_size": 512}, "head sizes up to 256 are supported, got 512"),
        ("pallas_triton", {"group": 256}, "up to 128 query heads per key/value head are supported, got 256"),
    ],
)
def test_what_a_kernel_does_not_serve(name, changes, message):
    arrays, options = specs(**changes)
    with pallas_kernels.compiling_for(pallas_kernels.H200):
        assert message in pallas_kernels.support("paged_prefill_attention", None, *arrays, **options).reasons[name]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "mosaic_gpu"),
        ({"tokens": 8}, "mosaic_gpu"),
        ({"head_size": 80}, "pallas_triton"),
        ({"dtype": "float32"}, "pallas_triton"),
        ({"scale": -1.0}, "reference"),
    ],
)
def test_the_choice_for_an_h200(changes, name):
    arrays, options = specs(**changes)
    with pallas_kernels.compiling_for(pallas_kernels.H200):
        assert pallas_kernels.support("paged_prefill_attention", None, *arrays, **options).implementation == name
    assert describe(*arrays, **options).group == 4


MOSAIC = [
    {"head_size": 128},
    {"head_size": 64, "block_size": 64, "group": 7, "sliding_window": 100, "soft_cap": 20.0, "dtype": "float16"},
    {"head_size": 256, "block_size": 8, "group": 1, "tokens": 10},
    {"head_size": 128, "block_size": 128, "group": 16, "sliding_window": 4096},
]


@pytest.mark.parametrize("changes", MOSAIC)
def test_mosaic_gpu_lowers_with_every_jax(changes):
    arrays, options = specs(**changes)
    with pallas_kernels.compiling_for(pallas_kernels.H200):
        attend = jax.jit(lambda *a: paged_prefill_attention(*a, return_lse=True, implementation="mosaic_gpu", **options))
        assert "mosaic_gpu" in attend.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@needs_compiler
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {"implementation": "pallas_triton", "head_size": 80, "group": 3, "sliding_window": 100, "soft_cap": 20.0},
        {"implementation": "pallas_triton", "head_size": 256, "group": 16, "block_size": 128},
        {"implementation": "pallas_triton", "dtype": "float32"},
        *({"implementation": "mosaic_gpu", **changes} for changes in MOSAIC),
    ],
)
def test_kernels_compile_for_an_h200(changes):
    arrays, options = specs(**changes)
    compile_for_h200(lambda *a: paged_prefill_attention(*a, return_lse=True, **options), *arrays)
