"""`skinny_matmul` in Pallas, Triton lowering: one program a tile of outputs, the weight streamed through it once.

The weight takes the wide side of the dot, ``weight_tile @ x.T``: 64 of its rows against 16 or more columns of x fill a tensor core,
and rows of x that are missing cost nothing that is not waiting for memory anyway. Where there are too few outputs to give every
multiprocessor a tile, a row is *folded*: ``weight.reshape(N * fold, D / fold)`` and ``x.reshape(B * fold, D / fold)`` are free, 64
folded rows are ``64 / fold`` outputs, and the diagonal blocks of the product are what is wanted, summed at the end. That splits the
sum over D inside a program: no second kernel, no atomics, an order of sums that follows from the shapes.

A single row needs no tensor core: the weight's tile is multiplied number by number, with all of its loads under way at once.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import tuning
from pallas_kernels._dispatch import Device, current_device
from pallas_kernels.skinny_matmul import MatmulOutput, MatmulProblem

MAX_ROWS = 16
_MIN_DOT = 16
_MULTIPROCESSORS = 132  # of an H100 or H200: more tiles than that would run in a second wave
_UNROLLED = 8  # loads under way at once, a single row


@dataclass(frozen=True)
class MatmulConfig:
    """How a program works.

    Attributes:
      rows: folded rows of the weight a program.
      tile_k: columns a step.
      fold: into how many parts a row is cut.
      by_number: multiply without a dot; for a single row.
      num_warps, num_stages: of Triton.
    """

    rows: int = 64
    tile_k: int = 64
    fold: int = 1
    by_number: bool = False
    num_warps: int = 4
    num_stages: int = 4

    def why_not(self, problem: MatmulProblem) -> str | None:
        """Why it does not divide a problem."""
        if problem.num_inputs % (self.fold * self.tile_k):
            return f"{problem.num_inputs} inputs are no multiple of {self.fold * self.tile_k}"
        if problem.num_outputs * self.fold % self.rows:
            return f"{problem.num_outputs} outputs are no multiple of {self.rows // self.fold}"
        return None


def properties(problem: MatmulProblem) -> dict[str, int]:
    """What settings are measured for: see ``tuning.lookup``."""
    return {
        "num_rows": pl.next_power_of_2(problem.num_rows),
        "num_inputs": problem.num_inputs,
        "num_outputs": problem.num_outputs,
        "gate_up": int(problem.gate_up),
        "itemsize": 2,
    }


def config_for(problem: MatmulProblem, device: Device) -> MatmulConfig:
    """What was measured to be fastest on this device, else `heuristic`, whose errors it has."""
    tuned = tuning.lookup(device.kind, "skinny_matmul", "pallas_triton", **properties(problem))
    return heuristic(problem) if tuned is None else MatmulConfig(**tuned)


def heuristic(problem: MatmulProblem) -> MatmulConfig:
    """The settings that the prototype of this kernel was fastest with on an H200 (jax 0.11.2): as many tiles as one wave holds.

    Raises:
      NotImplementedError: no settings divide the problem.
    """
    if problem.num_rows == 1:
        choices = [MatmulConfig(8, 256, by_number=True), MatmulConfig(8, 64, by_number=True)]
    else:
        folds = [fold for fold in (4, 2) if problem.num_outputs * fold // 64 <= _MULTIPROCESSORS]
        choices = [MatmulConfig(fold=fold) for fold in (*folds, 1)] + [MatmulConfig(rows=32), MatmulConfig(rows=16, tile_k=32)]
    for choice in choices:
        if choice.why_not(problem) is None:
            return choice
    raise NotImplementedError(choices[-1].why_not(problem))


def why_not(problem: MatmulProblem | None, device: Device, *, interpret: bool) -> str | None:
    """Needs a CUDA device of compute capability 8.0 or the interpreter, at most 16 rows, 16-bit numbers and sizes that tiles divide."""
    if not interpret:
        if device.platform != "gpu" or device.compute_capability is None:
            return "it needs an NVIDIA GPU; 'pallas_triton_interpret' runs the same kernel slowly in Pallas's interpreter"
        if device.compute_capability < (8, 0):
            return "it needs compute capability 8.0 (Ampere) or newer; 'reference' runs on any device"
    if problem is None:
        return None
    if not 1 <= problem.num_rows <= MAX_ROWS:
        return f"it serves 1 to {MAX_ROWS} rows, got {problem.num_rows}; 'reference' serves any number"
    if problem.dtype == "float32":
        return "it serves bfloat16 and float16, got float32; 'reference' serves it"
    try:
        heuristic(problem)
    except NotImplementedError as error:
        return f"{error}; 'reference' serves any size"
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
    config: MatmulConfig | None = None,
) -> MatmulOutput:
    """See ``pallas_kernels.skinny_matmul``; `config` overrides the settings."""
    config = config or config_for(problem, current_device())
    fold, rows, inputs = config.fold, problem.num_rows, problem.num_inputs
    tiles = problem.num_outputs * fold // config.rows
    # The interpreter clamps indices out of range before it looks at a store's mask: there, outputs have all of a program's columns.
    columns = _columns(problem, config) // fold if interpret else rows
    outs = [jax.ShapeDtypeStruct((columns, problem.num_outputs), jnp.dtype(problem.out_dtype))]
    if problem.next_norm:
        outs.append(jax.ShapeDtypeStruct((columns, problem.num_outputs), jnp.dtype(problem.dtype)))
        outs.append(jax.ShapeDtypeStruct((tiles, columns), jnp.float32))
    fused = [a for a in (sum_squares, residual, next_norm) if a is not None]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out, *more = pl.pallas_call(
        functools.partial(_kernel, problem=problem, config=config),
        name="skinny_matmul",
        grid=(tiles,),
        in_specs=[anywhere] * (2 + len(fused)),
        out_specs=[anywhere] * len(outs),
        out_shape=outs,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
    )(x.reshape(rows * fold, inputs // fold), weight.reshape(weight.shape[0] * fold, inputs // fold), *fused)
    if not problem.next_norm:
        return MatmulOutput(out[:rows], None, None)
    scaled, squares = more
    return MatmulOutput(out[:rows], scaled[:rows], squares[:, :rows])


def _columns(problem: MatmulProblem, config: MatmulConfig) -> int:
    """Folded rows of x that a program multiplies with, those that are missing included."""
    return 1 if config.by_number else max(_MIN_DOT, pl.next_power_of_2(problem.num_rows) * config.fold)


def _kernel(x_ref: Any, w_ref: Any, *refs: Any, problem: MatmulProblem, config: MatmulConfig) -> None:
    given = iter(refs)
    squares_ref = next(given) if problem.num_parts else None
    residual_ref = next(given) if problem.residual else None
    norm_ref = next(given) if problem.next_norm else None
    out_ref = next(given)
    f32, i32 = jnp.float32, jnp.int32
    columns, fold = _columns(problem, config), config.fold
    tile, width, height = pl.program_id(0), config.rows // fold, columns // fold
    n = tile * width + jnp.arange(width, dtype=i32)
    b = jnp.arange(height, dtype=i32)
    at, live = (b[None, :], n[:, None]), jnp.broadcast_to((b < problem.num_rows)[None, :], (width, height))

    # Small loads that are used after the loop start before it.
    added = plt.load(residual_ref.at[at], mask=live, other=0.0) if residual_ref is not None else None
    squares = None
    if squares_ref is not None:
        c = jnp.arange(pl.next_power_of_2(problem.num_parts), dtype=i32)
        seen = (c < problem.num_parts)[:, None] & (b < problem.num_rows)[None, :]
        squares = plt.load(squares_ref.at[c[:, None], b[None, :]], mask=seen, other=0.0)

    multiply = _by_number if config.by_number else _by_dot
    y, *rest = multiply(x_ref, w_ref, tile * config.rows, problem=problem, config=config)
    if squares is not None:
        scale = lax.rsqrt(squares.sum(0) * (1.0 / problem.num_inputs) + problem.eps)[None, :]
        y, rest = y * scale, [r * scale for r in rest]
    if problem.gate_up:
        y = y / (1.0 + jnp.exp(-y)) * rest[0]
    if added is not None:
        y = y + added.astype(f32)
    rounded = y.astype(problem.out_dtype)
    plt.store(out_ref.at[at], rounded, mask=live)
    if norm_ref is not None:
        scaled_ref, sums_ref = given
        wide = rounded.astype(f32)
        weight = plt.load(norm_ref.at[n]).astype(f32)[:, None]
        plt.store(scaled_ref.at[at], (wide * weight).astype(problem.dtype), mask=live)
        plt.store(sums_ref.at[tile, b], (wide * wide).sum(0), mask=b < problem.num_rows)


def _starts(problem: MatmulProblem, config: MatmulConfig, first: jax.Array) -> list[jax.Array]:
    """First folded row of the weight for what a program computes: outputs, or gates and what they open."""
    return [first, first + problem.num_outputs * config.fold] if problem.gate_up else [first]


def _by_number(x_ref: Any, w_ref: Any, first: jax.Array, *, problem: MatmulProblem, config: MatmulConfig) -> list[jax.Array]:
    r, k0 = jnp.arange(config.rows, dtype=jnp.int32), jnp.arange(config.tile_k, dtype=jnp.int32)
    starts = _starts(problem, config, first)
    steps = problem.num_inputs // config.tile_k

    def step(i: jax.Array | int, sums: list[jax.Array]) -> list[jax.Array]:
        k = i * config.tile_k + k0
        x = plt.load(x_ref.at[0, k]).astype(jnp.float32)[None, :]
        return [s + plt.load(w_ref.at[(at + r)[:, None], k[None, :]]).astype(jnp.float32) * x for s, at in zip(sums, starts, strict=True)]

    def several(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out = list(sums)
        for j in range(unrolled):
            out = step(i * unrolled + j, out)
        return tuple(out)

    unrolled = next(u for u in range(_UNROLLED, 0, -1) if steps % u == 0)
    nothing = jnp.zeros((config.rows, config.tile_k), jnp.float32)
    sums = lax.fori_loop(0, steps // unrolled, several, (nothing,) * len(starts))
    return [s.sum(1)[:, None] for s in sums]


def _by_dot(x_ref: Any, w_ref: Any, first: jax.Array, *, problem: MatmulProblem, config: MatmulConfig) -> list[jax.Array]:
    columns, fold = _columns(problem, config), config.fold
    r, c, k0 = (jnp.arange(size, dtype=jnp.int32) for size in (config.rows, columns, config.tile_k))
    live = jnp.broadcast_to((c < problem.num_rows * fold)[:, None], (columns, config.tile_k))
    starts = _starts(problem, config, first)

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        k = i * config.tile_k + k0
        x = plt.load(x_ref.at[c[:, None], k[None, :]], mask=live, other=0.0)
        return tuple(s + plt.dot(plt.load(w_ref.at[(at + r)[:, None], k[None, :]]), x.T) for s, at in zip(sums, starts, strict=True))

    nothing = jnp.zeros((config.rows, columns), jnp.float32)
    sums = lax.fori_loop(0, problem.num_inputs // fold // config.tile_k, step, (nothing,) * len(starts))
    if fold == 1:
        return list(sums)
    # Folded row n * fold + i of the weight met folded row b * fold + j of x: those with i == j are wanted, and their sum over i.
    diagonal = (r & (fold - 1))[:, None] == (c & (fold - 1))[None, :]
    width, height = config.rows // fold, columns // fold
    return [jnp.where(diagonal, s, 0.0).reshape(width, fold, columns).sum(1).reshape(width, height, fold).sum(2) for s in sums]
