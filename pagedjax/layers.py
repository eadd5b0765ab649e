"""The model's small pieces: norms, rotary embedding, projections. Casts stand where Llama's reference has them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.config import RopeConfig

_MANTISSA = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Cast float32 to `dtype` with a rounding that XLA keeps.

    A plain cast down and up again inside one fusion is dropped under XLA's default of allowing excess precision.
    """
    exponent_bits, mantissa_bits = _MANTISSA[jnp.dtype(dtype).name]
    return lax.reduce_precision(x, exponent_bits, mantissa_bits).astype(dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of ``x [..., D]`` in float32, rounded to x's dtype, then times ``weight [D]`` in that dtype.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467); the order of casts is Llama's.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return round_to(normed, x.dtype) * jnp.expand_dims(weight, range(x.ndim - 1))


def rope_angles(positions: jax.Array, rope: RopeConfig, head_size: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine ``[T, H]`` of each position's angles, computed in float32; the two halves of H are equal.

    Source: Su et al. 2021 (arXiv:2104.09864), in the rotate-half form of Llama's Hugging Face checkpoints.
    """
    inverse = jnp.asarray(rope.inverse_frequencies(head_size), jnp.float32)
    angle = positions.astype(jnp.float32)[:, None] * inverse[None, :]
    angle = jnp.concatenate([angle, angle], axis=-1)
    return round_to(jnp.cos(angle), dtype), round_to(jnp.sin(angle), dtype)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn ``x [T, ..., H]`` by the angles ``cos, sin [T, H]``."""
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1],)
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * cos.reshape(shape) + turned * sin.reshape(shape)


def project(x: jax.Array, weight: jax.Array, out_axes: int, *, flat: bool, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Multiply with an output-major weight, accumulating in float32; true float32 where x is (GPUs default to TF32 there).

    Args:
      x: [T, *inputs].
      weight: [*outputs, *inputs].
      out_axes: how many axes `outputs` has.
      flat: see the weight as a matrix ``[outputs, inputs]``. XLA would bring a weight of more axes into that form by itself, but
        through a transposed copy of it on every call (jax 0.10.2 on a CPU: 318 MB for SmolLM2). Not where the weight is sharded over
        an inner axis, which a matrix cannot say.
      out_dtype: of the result; x's by default.

    Returns:
      [T, *outputs].
    """
    outputs, inputs = weight.shape[:out_axes], weight.shape[out_axes:]
    if flat:
        x, weight = x.reshape(x.shape[0], -1), weight.reshape(math.prod(outputs), math.prod(inputs))
    contracted = (tuple(range(1, x.ndim)), tuple(range(1 if flat else out_axes, weight.ndim)))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dtype = x.dtype if out_dtype is None else out_dtype
    y = lax.dot_general(x, weight, (contracted, ((), ())), precision=precision, preferred_element_type=dtype)
    return y.reshape(x.shape[0], *outputs)
