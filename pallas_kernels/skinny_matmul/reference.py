"""`skinny_matmul` in plain XLA, float32 inside: what the kernel is compared with, for any number of rows."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._dispatch import Device
from pallas_kernels.skinny_matmul import MatmulOutput, MatmulProblem


def why_not(problem: MatmulProblem | None, device: Device, *, interpret: bool) -> str | None:
    """It runs everywhere."""
    return None


def run(
    problem: MatmulProblem,
    x: jax.Array,
    weight: jax.Array,
    sum_squares: jax.Array | None,
    residual: jax.Array | None,
    next_norm: jax.Array | None,
    *,
    interpret: bool,
) -> MatmulOutput:
    """See ``pallas_kernels.skinny_matmul``; `sum_squares` comes in one part."""
    f32 = jnp.float32
    dims = (((1,), (1,)), ((), ()))
    exact = lax.Precision.HIGHEST if problem.dtype == "float32" else None  # products of 16-bit numbers are exact in float32
    y = lax.dot_general(x, weight, dims, precision=exact, preferred_element_type=f32)
    if sum_squares is not None:
        y = y * lax.rsqrt(sum_squares.sum(0) / problem.num_inputs + problem.eps)[:, None]
    if problem.gate_up:
        y = jax.nn.silu(y[:, : problem.num_outputs]) * y[:, problem.num_outputs :]
    if residual is not None:
        y = y + residual.astype(f32)
    y = y.astype(problem.out_dtype)
    if next_norm is None:
        return MatmulOutput(y, None, None)
    wide = y.astype(f32)
    return MatmulOutput(y, (wide * next_norm.astype(f32)[None]).astype(problem.dtype), jnp.square(wide).sum(-1)[None])
