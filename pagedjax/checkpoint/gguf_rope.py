"""Llama 3's rope rule, recovered from the per-frequency divisors that a GGUF stores in its place.

llama.cpp's converter does not keep the four numbers of ``rope_type: llama3``; it stores what they give, ``rope_freqs.weight``:
for each of the H/2 rotary frequencies the number to divide it by. With wavelength w, original context O, low and high
frequency factors l and h, and factor f (transformers, `modeling_rope_utils._compute_llama3_parameters`):

    divisor = 1                                     where w < O / h
    divisor = f                                     where w > O / l
    1 / divisor = (1 - s) / f + s,  s = (O / w - l) / (h - l)     between

so the largest divisor is f, and s is a straight line in 1/w whose slope O / (h - l) and offset l / (h - l) fix the rest up to one common
factor of O, l and h, which changes no frequency. Llama 3's own numbers are tried first, then the line with l = 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

# The divisors were computed in float32 from float32 frequencies: s carries about hi/(hi-lo) * 4 eps = 6e-7, and 1/divisor no more.
_TOLERANCE = 2e-6


def recover_llama3(divisors: Floats, theta: float, head_size: int) -> dict[str, Any] | None:
    """The ``rope_scaling`` dict whose rule gives exactly these divisors (to float32 rounding), or None when no such rule does.

    Args:
      divisors: float ``[H // 2]``, the content of ``rope_freqs.weight``.
      theta: the rope base.
      head_size: H.

    Returns:
      ``{"rope_type": "llama3", ...}``; ``{"rope_type": "default"}`` when every divisor is 1; None when the divisors are no llama3 rule.
    """
    divisors = np.asarray(divisors, np.float64)
    if divisors.shape != (head_size // 2,) or not np.all(np.isfinite(divisors)) or divisors.min() < 1 - _TOLERANCE:
        return None
    if divisors.max() <= 1 + _TOLERANCE:
        return {"rope_type": "default"}
    inverse_wavelengths = theta ** (-2.0 * np.arange(head_size // 2) / head_size) / (2 * math.pi)
    factor = float(str(np.float32(divisors.max())))
    for low, high, original in ((1.0, 4.0, 8192), _fit_line(divisors, inverse_wavelengths, factor)):
        if 0 < low < high and original > 0:
            expected = _llama3_ratios(inverse_wavelengths, factor, low, high, original)
            if np.allclose(expected, 1 / divisors, rtol=_TOLERANCE, atol=_TOLERANCE / factor):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    return None


def _llama3_ratios(inverse_wavelengths: Floats, factor: float, low: float, high: float, original: int) -> Floats:
    """What each frequency is multiplied by under the rule above."""
    ramp = np.clip((original * inverse_wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 - ramp) / factor + ramp


def _fit_line(divisors: Floats, inverse_wavelengths: Floats, factor: float) -> tuple[float, float, int]:
    """(low, high, original) with low = 1 from the divisors on the ramp; zeros where fewer than two lie on it."""
    ramp = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    inside = (ramp > _TOLERANCE) & (ramp < 1 - _TOLERANCE)
    if inside.sum() < 2:
        return 0.0, 0.0, 0
    slope, offset = np.polyfit(inverse_wavelengths[inside], ramp[inside], 1)
    if not offset < 0 < slope:
        return 0.0, 0.0, 0
    high = round((1 - offset) / -offset, 3)  # published factors have few digits; the caller verifies the rounded ones
    return 1.0, float(high), round(float(slope) * (high - 1))
