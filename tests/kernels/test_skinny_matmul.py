"""`skinny_matmul` against float64, every part of it alone and together, whatever way the kernel cuts the sum."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MatmulOutput, skinny_matmul, support
from pallas_kernels._dispatch import H200
from pallas_kernels.skinny_matmul import describe, pallas_triton, start
from pallas_kernels.skinny_matmul.pallas_triton import MatmulConfig, config_for, heuristic, properties
from tests.kernels.h200 import compile_for_h200, needs_compiler

D, N = 512, 128
INTERPRET = "pallas_triton_interpret"
# A result is rounded once, to the nearest: at most half of bfloat16's epsilon of 2^-7. Sums of 512 float32 products add far less.
ERROR = 2**-8


def draw(*shape, seed=0, dtype="bfloat16"):
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))


def case(rows, *parts, inputs=D, outputs=N, dtype="bfloat16"):
    """Arguments of a call with some of its parts."""
    given = dict(x=draw(rows, inputs, dtype=dtype))
    given["weight"] = draw(outputs * (1 + ("gate_up" in parts)), inputs, dtype=dtype, seed=1) * jnp.asarray(inputs**-0.5, dtype)
    if "norm" in parts:
        squares = np.square(np.asarray(given["x"], np.float32)).reshape(rows, 4, -1).sum(-1).T
        given |= dict(sum_squares=jnp.asarray(squares), eps=0.25)  # so large that nobody could leave it out
    if "gate_up" in parts:
        given["gate_up"] = True
    if "residual" in parts:
        given["residual"] = draw(rows, outputs, dtype=dtype, seed=2)
    if "next" in parts:
        given["next_norm"] = 1 + draw(outputs, dtype=dtype, seed=3) / 4
    return given


def oracle(x, weight, sum_squares=None, eps=0.0, gate_up=False, residual=None, next_norm=None):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    y = x @ weight.T
    if sum_squares is not None:
        y = y / np.sqrt(np.asarray(sum_squares, np.float64).sum(0) / x.shape[1] + eps)[:, None]
    if gate_up:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    if residual is not None:
        y = y + np.asarray(residual, np.float64)
    return y


def check(got: MatmulOutput, given):
    want = oracle(**given)
    assert got.out.dtype == given["x"].dtype
    np.testing.assert_allclose(np.asarray(got.out, np.float64), want, rtol=ERROR, atol=1e-4)
    if "next_norm" not in given:
        assert got.scaled is got.sum_squares is None
        return
    out = np.asarray(got.out, np.float64)  # the next norm is one of what was stored
    np.testing.assert_allclose(np.asarray(got.scaled, np.float64), out * np.asarray(given["next_norm"], np.float64), rtol=ERROR, atol=1e-6)
    assert got.sum_squares.dtype == jnp.float32 and got.sum_squares.shape[1] == out.shape[0]
    np.testing.assert_allclose(np.asarray(got.sum_squares, np.float64).sum(0), np.square(out).sum(1), rtol=1e-5)


ALL = ("norm", "residual", "next")


@pytest.mark.parametrize("implementation", ["reference", INTERPRET])
@pytest.mark.parametrize("parts", [(), ("norm",), ("gate_up",), ("norm", "gate_up"), ("residual",), ("next",), ALL])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_each_part(implementation, rows, parts):
    given = case(rows, *parts)
    check(skinny_matmul(**given, implementation=implementation), given)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fold", [1, 2, 4])
@pytest.mark.parametrize("rows", [5, 16])
def test_each_fold(rows, fold, dtype):
    given = case(rows, *ALL, dtype=dtype)
    check(run_with(MatmulConfig(fold=fold), given), given)


@pytest.mark.parametrize("tile_k", [32, 64, 128])
def test_a_single_row_by_number_is_what_a_dot_gives(tile_k):
    given = case(1, *ALL)
    by_number = run_with(MatmulConfig(8, tile_k, by_number=True), given)
    check(by_number, given)
    check(run_with(MatmulConfig(), given), given)
    given = case(1, "gate_up", inputs=96)  # 3 steps: unrolled whole
    check(run_with(MatmulConfig(8, 32, by_number=True), given), given)


def run_with(config, given):
    named = dict(given)
    arrays = [named.pop(name, None) for name in ("x", "weight", "sum_squares", "residual", "next_norm")]
    problem = describe(arrays[0], arrays[1], sum_squares=arrays[2], residual=arrays[3], next_norm=arrays[4], **named)
    assert config.why_not(problem) is None
    return pallas_triton.run(problem, *arrays, interpret=True, config=config)


@pytest.mark.parametrize("implementation", ["reference", INTERPRET])
def test_float32_logits_of_half_precision_weights(implementation):
    given = case(2, "norm")
    got = skinny_matmul(**given, out_dtype=jnp.float32, implementation=implementation)
    assert got.out.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got.out, np.float64), oracle(**given), rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_other_rows_of_its_bucket():
    given = case(8, *ALL)
    one = {
        name: value[:, 2:3] if name == "sum_squares" else value[2:3] if name in ("x", "residual") else value
        for name, value in given.items()
    }
    config = MatmulConfig(fold=2)
    whole, alone = run_with(config, given), run_with(config, one)
    np.testing.assert_array_equal(np.asarray(whole.out[2]), np.asarray(alone.out[0]))
    np.testing.assert_array_equal(np.asarray(whole.scaled[2]), np.asarray(alone.scaled[0]))
    np.testing.assert_array_equal(np.asarray(whole.sum_squares[:, 2]), np.asarray(alone.sum_squares[:, 0]))


def test_start_gives_what_the_norm_in_front_wants():
    x, norm, weight = draw(3, D), 1 + draw(D, seed=5) / 4, draw(N, D, seed=1) * D**-0.5
    scaled, squares = start(x, norm)
    got = skinny_matmul(scaled, weight, sum_squares=squares, eps=1e-5).out
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm, np.float64)
    want = normed @ np.asarray(weight, np.float64).T
    # x * norm was rounded too: 512 products that are off by up to 2^-8 each, at random.
    assert np.linalg.norm(np.asarray(got, np.float64) - want) < 2 * ERROR * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "fold"),
    [(3072, 2048, 8, 2), (2048, 2048, 8, 4), (8192, 2048, 8, 1), (2048, 8192, 8, 4), (128256, 2048, 8, 1), (576, 1536, 4, 4)],
)
def test_one_wave_of_programs_where_the_outputs_are_few(outputs, inputs, rows, fold):
    problem = describe(jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16), jax.ShapeDtypeStruct((outputs, inputs), jnp.bfloat16))
    config = heuristic(problem)
    assert (config.fold, config.rows, config.by_number) == (fold, 64, False)
    assert heuristic(dataclasses.replace(problem, num_rows=1)).by_number


def test_measured_settings_come_first(monkeypatch):
    problem = describe(draw(5, D), draw(2 * N, D), gate_up=True)
    measured = MatmulConfig(32, 128, num_warps=8)
    entry = {"match": dict(num_rows=8, num_inputs=D, num_outputs=N, gate_up=1, itemsize=2), "config": dataclasses.asdict(measured)}
    table = {"settings": {"skinny_matmul": {"pallas_triton": [entry]}}}
    monkeypatch.setattr("pallas_kernels.tuning.load", lambda kind: table if kind == H200.kind else {})
    assert config_for(problem, H200) == measured and properties(problem) == entry["match"]
    assert config_for(problem, dataclasses.replace(H200, kind="another")) == heuristic(problem)
    assert config_for(dataclasses.replace(problem, gate_up=False), H200) == heuristic(problem)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_rows=17), "it serves 1 to 16 rows, got 17"),
        (dict(num_rows=0), "it serves 1 to 16 rows, got 0"),
        (dict(dtype="float32"), "it serves bfloat16 and float16, got float32"),
        (dict(num_inputs=500), "500 inputs are no multiple of 32; 'reference' serves any size"),
        (dict(num_outputs=100), "100 outputs are no multiple of 16; 'reference' serves any size"),
        (dict(num_outputs=100, num_rows=1), "100 outputs are no multiple of 8"),
    ],
)
def test_why_not(changes, message):
    problem = describe(draw(4, D), draw(N, D))
    assert pallas_triton.why_not(problem, H200, interpret=False) is None
    assert message in pallas_triton.why_not(dataclasses.replace(problem, **changes), H200, interpret=False)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it runs there")
def test_a_named_kernel_runs_or_raises():
    with pytest.raises(NotImplementedError, match=r"skinny_matmul: pallas_triton does not run on .*: it needs an NVIDIA GPU"):
        skinny_matmul(draw(2, D), draw(N, D), implementation="pallas_triton")
    assert support("skinny_matmul", None, draw(2, D), draw(N, D)).implementation == "reference"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x=draw(2, 3, 4)), r"x must be \[B, D\]"),
        (dict(x=jnp.zeros((2, D), jnp.int32)), "x must be one of bfloat16, float16, float32, got int32"),
        (dict(weight=draw(N, D + 1)), f"weight must have D = {D}, got {D + 1}"),
        (dict(weight=draw(N, D, dtype="float32")), "weight must be bfloat16, got float32"),
        (dict(weight=draw(N + 1, D), gate_up=True), f"an even number of rows with gate_up, got {N + 1}"),
        (dict(sum_squares=jnp.zeros((4, 3))), "sum_squares must have B = 2, got 3"),
        (dict(eps=1e-5), "eps is 1e-05, but there are no sum_squares"),
        (dict(sum_squares=jnp.zeros((4, 2)), eps=-1.0), "eps must be at least 0, got -1.0"),
        (dict(residual=draw(2, N + 1)), f"residual must have N = {N}, got {N + 1}"),
        (dict(next_norm=draw(N + 1)), f"next_norm must have N = {N}, got {N + 1}"),
        (dict(out_dtype=jnp.int8), "out_dtype must be one of bfloat16, float16, float32, got int8"),
        (dict(implementation="cublas"), "skinny_matmul has no implementation 'cublas'"),
    ],
)
def test_arguments_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        skinny_matmul(**dict(x=draw(2, D), weight=draw(N, D)) | changes)


@needs_compiler
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("parts", [("norm",), ("norm", "gate_up"), ("residual", "next")])
def test_compiles_for_an_h200_as_one_kernel(rows, parts):
    given = case(rows, *parts, inputs=2048, outputs=2048)
    given = {name: value for name, value in given.items() if name not in ("eps", "gate_up")}
    options = dict(eps=1e-5) if "norm" in parts else {}
    call = functools.partial(skinny_matmul, implementation="pallas_triton", gate_up="gate_up" in parts, **options)
    compiled = compile_for_h200(lambda arrays: call(**arrays), given)
    assert compiled.as_text().count("custom-call(") == 1
    assert compiled.memory_analysis().temp_size_in_bytes <= 4096


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 13, 16])
@pytest.mark.parametrize("parts", [(), ("norm",), ("norm", "gate_up"), ALL])
@pytest.mark.parametrize(("outputs", "inputs"), [(3072, 2048), (2048, 8192), (576, 1536)])
def test_on_a_gpu(rows, parts, outputs, inputs):
    given = case(rows, *parts, inputs=inputs, outputs=outputs)
    got = skinny_matmul(**given, implementation="pallas_triton")
    check(got, given)
    again = skinny_matmul(**given, implementation="pallas_triton")
    np.testing.assert_array_equal(np.asarray(got.out), np.asarray(again.out))
