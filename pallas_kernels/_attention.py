"""What the attention ops share: their options, and how a call becomes a differentiable function of its arrays."""

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._dispatch import INTERPRET_SUFFIX, Op


@dataclass(frozen=True)
class AttentionOptions:
    """Static options of an attention call.

    Attributes:
        scale: factor on the logits ``q @ k``.
        sliding_window: a query sees itself and the ``sliding_window - 1`` tokens before it; ``None`` for no limit.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``; ``None`` for none.
        return_lse: also return the natural logarithm of the sum of the exponentials of the logits.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    return_lse: bool = False


def attention_options(
    head_size: int, scale: float | None, sliding_window: int | None, soft_cap: float | None, return_lse: bool
) -> AttentionOptions:
    """Validated options; ``scale=None`` means ``head_size ** -0.5``.

    Raises:
        ValueError: a value that is not finite or not positive where it must be.
    """
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if soft_cap is not None and not (soft_cap > 0 and math.isfinite(soft_cap)):
        raise ValueError(f"soft_cap must be positive and finite, got {soft_cap}")
    return AttentionOptions(
        scale=head_size**-0.5 if scale is None else float(scale),
        sliding_window=None if sliding_window is None else int(sliding_window),
        soft_cap=None if soft_cap is None else float(soft_cap),
        return_lse=bool(return_lse),
    )


def check_array(name: str, x: jax.Array, dims: str, dtype: str | None = None, **sizes: int) -> None:
    """Check the rank, sizes and dtype of an argument: ``check_array("q", q, "B N H", "float32", H=64)``.

    Raises:
        ValueError: naming what was expected and what came.
    """
    letters = dims.split()
    if len(x.shape) != len(letters):
        raise ValueError(f"{name} must be [{', '.join(letters)}] (rank {len(letters)}), got shape {tuple(x.shape)}")
    for letter, size in zip(letters, x.shape, strict=True):
        if letter in sizes and sizes[letter] != size:
            raise ValueError(f"{name} must have {letter} = {sizes[letter]}, got {size} in shape {tuple(x.shape)} [{', '.join(letters)}]")
    if dtype is not None and np.dtype(x.dtype).name != dtype:
        raise ValueError(f"{name} must be {dtype}, got {np.dtype(x.dtype).name}")


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Check that N query heads share K key/value heads evenly.

    Raises:
        ValueError: naming both.
    """
    if num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {num_heads} and {num_kv_heads}")


def run_differentiable(op: Op, name: str, problem: Hashable, *arrays: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Run implementation ``name``; its gradient is that of the op's ``reference`` (for q and the pools; the rest are integers)."""
    if name == "reference":  # plain XLA differentiates by itself, forwards too
        return _run(op, name, problem, *arrays)
    return _run_with_reference_gradient(op, name, problem, *arrays)


# A jit of its own: a kernel that a model calls once a layer is traced and lowered once, not once a layer.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(op: Op, name: str, problem: Hashable, *arrays: jax.Array) -> Any:
    return op.load(name).run(problem, *arrays, interpret=name.endswith(INTERPRET_SUFFIX))


def _with_reference_gradient() -> Callable[..., Any]:
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
    def call(op: Op, name: str, problem: Hashable, *arrays: jax.Array) -> Any:
        return _run(op, name, problem, *arrays)

    def forward(op: Op, name: str, problem: Hashable, *arrays: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        return _run(op, name, problem, *arrays), arrays

    def backward(op: Op, name: str, problem: Hashable, arrays: tuple[jax.Array, ...], cotangent: Any) -> tuple[Any, ...]:
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

        def reference(*floats: jax.Array) -> Any:
            given = iter(floats)
            return _run(op, "reference", problem, *(next(given) if f else x for f, x in zip(is_float, arrays, strict=True)))

        _, vjp = jax.vjp(reference, *(x for f, x in zip(is_float, arrays, strict=True) if f))
        gradients = iter(vjp(cotangent))
        return tuple(next(gradients) if f else None for f in is_float)

    call.defvjp(forward, backward)
    return call


_run_with_reference_gradient = _with_reference_gradient()
