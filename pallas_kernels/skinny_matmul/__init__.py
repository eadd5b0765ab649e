"""A few rows times a large weight, with what stands before and behind it in a transformer: the weight is read once."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._attention import check_array
from pallas_kernels._dispatch import INTERPRET_SUFFIX, Op, current_device

OP = Op(
    name="skinny_matmul",
    modules={
        "reference": "pallas_kernels.skinny_matmul.reference",
        "pallas_triton": "pallas_kernels.skinny_matmul.pallas_triton",
        "pallas_triton_interpret": "pallas_kernels.skinny_matmul.pallas_triton",
    },
    preference=("pallas_triton", "reference"),
)
_FLOATS = ("bfloat16", "float16", "float32")


class MatmulOutput(NamedTuple):
    """What a call gives.

    Attributes:
      out: ``[B, N]``.
      scaled: ``[B, N]``, `out` times the next norm's weight, or ``None`` where there is no next norm.
      sum_squares: ``f32[C, B]``, in C parts the sum of the squares of each row of `out`, or ``None``.
    """

    out: jax.Array
    scaled: jax.Array | None
    sum_squares: jax.Array | None


@dataclass(frozen=True)
class MatmulProblem:
    """Static description of one call."""

    num_rows: int  # B
    num_inputs: int  # D
    num_outputs: int  # N
    dtype: str
    out_dtype: str
    num_parts: int  # C of `sum_squares`, 0 without a norm in front
    gate_up: bool
    residual: bool
    next_norm: bool
    eps: float


def skinny_matmul(
    x: jax.Array,
    weight: jax.Array,
    *,
    sum_squares: jax.Array | None = None,
    eps: float = 0.0,
    gate_up: bool = False,
    residual: jax.Array | None = None,
    next_norm: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> MatmulOutput:
    """``x @ weight.T`` with an RMS norm in front, and a gate, a residual or the first half of the next norm behind.

    An RMS norm is a number a row: ``norm(x) * g @ w.T == rsqrt(mean(x^2) + eps) * ((x * g) @ w.T)``. So whoever makes x also makes
    ``x * g`` and its rows' sums of squares (`next_norm`), and whoever multiplies scales its result (`sum_squares`). Sums are float32,
    in an order that depends on the shapes alone; the result is rounded once.

    Args:
      x: ``[B, D]``, bfloat16, float16 or float32.
      weight: ``[N, D]`` of x's dtype, output-major; ``[2 N, D]`` with `gate_up`.
      sum_squares: ``f32[C, B]``: scale row b by ``rsqrt(sum(sum_squares[:, b]) / D + eps)``.
      eps: of that norm.
      gate_up: the first N outputs are gates, the others what they open: ``silu(gate) * up``.
      residual: ``[B, N]`` of x's dtype, added before rounding.
      next_norm: ``[N]`` of x's dtype, the weight of the norm that comes next.
      out_dtype: of `out`; x's by default.
      implementation: a name runs or raises; ``None`` picks the fastest that serves these shapes here.

    Returns:
      see `MatmulOutput`.

    Raises:
      ValueError: the arguments do not fit together, or there is no implementation of that name.
      NotImplementedError: the named implementation does not run here; the message says why.
    """
    problem = describe(
        x, weight, sum_squares=sum_squares, eps=eps, gate_up=gate_up, residual=residual, next_norm=next_norm, out_dtype=out_dtype
    )
    name = OP.resolve(implementation, problem, current_device())
    given = (jnp.asarray(a) for a in (x, weight, sum_squares, residual, next_norm) if a is not None)
    return MatmulOutput(*_run(name, problem, *given))


def start(x: jax.Array, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x * norm`` and ``sum_squares f32[1, B]`` of an ``x [B, D]`` that no `skinny_matmul` made, such as an embedding."""
    wide = x.astype(jnp.float32)
    return (wide * norm.astype(jnp.float32)[None]).astype(x.dtype), jnp.square(wide).sum(-1)[None]


def describe(
    x: Any,
    weight: Any,
    *,
    sum_squares: Any = None,
    eps: float = 0.0,
    gate_up: bool = False,
    residual: Any = None,
    next_norm: Any = None,
    out_dtype: Any = None,
) -> MatmulProblem:
    """Validate a call (arrays, or anything with ``shape`` and ``dtype``) and describe it.

    Raises:
      ValueError: naming both values that do not fit together.
    """
    check_array("x", x, "B D")
    rows, inputs = x.shape
    dtype = np.dtype(x.dtype).name
    if dtype not in _FLOATS:
        raise ValueError(f"x must be one of {', '.join(_FLOATS)}, got {dtype}")
    check_array("weight", weight, "N D", dtype, D=inputs)
    outputs = weight.shape[0]
    if gate_up:
        if outputs % 2:
            raise ValueError(f"weight must have an even number of rows with gate_up, got {outputs}")
        outputs //= 2
    if sum_squares is not None:
        check_array("sum_squares", sum_squares, "C B", "float32", B=rows)
    elif eps:
        raise ValueError(f"eps is {eps}, but there are no sum_squares to add it to")
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    if residual is not None:
        check_array("residual", residual, "B N", dtype, B=rows, N=outputs)
    if next_norm is not None:
        check_array("next_norm", next_norm, "N", dtype, N=outputs)
    given = np.dtype(dtype if out_dtype is None else out_dtype).name
    if given not in _FLOATS:
        raise ValueError(f"out_dtype must be one of {', '.join(_FLOATS)}, got {given}")
    parts = 0 if sum_squares is None else sum_squares.shape[0]
    return MatmulProblem(rows, inputs, outputs, dtype, given, parts, gate_up, residual is not None, next_norm is not None, float(eps))


# A jit of its own: a kernel that a model calls once a layer is traced and lowered once, not once a layer.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(name: str, problem: MatmulProblem, *arrays: jax.Array) -> Any:
    given = iter(arrays)
    x, weight = next(given), next(given)
    there = (bool(problem.num_parts), problem.residual, problem.next_norm)
    fused = [next(given) if is_there else None for is_there in there]
    return OP.load(name).run(problem, x, weight, *fused, interpret=name.endswith(INTERPRET_SUFFIX))  # type: ignore[arg-type]
