"""The model's small pieces: norms, rotary embedding, projections. Casts stand where Llama's reference has them."""

from __future__ import annotations

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


def project(pattern: str, x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """``einsum(pattern, x, weight)`` accumulated in float32; true float32 where the inputs are (GPUs default to TF32 there)."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(pattern, x, weight, precision=precision, preferred_element_type=x.dtype if out_dtype is None else out_dtype)
