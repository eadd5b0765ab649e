"""The sums by hand: numbers worked out on paper, not by this code."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import RopeConfig
from pagedjax.layers import apply_rope, project, rms_norm, rope_angles, round_to


def test_rms_norm_rounds_before_it_multiplies():
    # 3 / sqrt(7.5) = 1.0954 -> bf16 1.09375; times bf16(.3) = .30078125 gives .32898 -> bf16 .328125. Rounded once, it is .330078.
    x, weight = jnp.asarray([[1, 2, 3, 4]], jnp.bfloat16), jnp.full((4,), 0.3, jnp.bfloat16)
    for norm in (rms_norm, jax.jit(rms_norm, static_argnums=2)):
        assert float(norm(x, weight, 1e-5)[0, 2]) == 0.328125


def test_llama3_rope_ratios():
    plain = RopeConfig(theta=5e5).inverse_frequencies(64)
    scaled = RopeConfig(theta=5e5, kind="llama3", factor=32.0).inverse_frequencies(64)
    ratios = np.asarray(scaled) / np.asarray(plain)
    expected = [1.0] * 15 + [0.605573, 0.303743, 0.103448] + [1 / 32] * 14
    # The three values on the ramp are given to six digits.
    np.testing.assert_allclose(ratios, expected, atol=5e-7)


def test_linear_rope_divides_positions():
    plain, linear = RopeConfig(theta=1e4), RopeConfig(theta=1e4, kind="linear", factor=4.0)
    # Angles up to 12 rad in float32: one unit in the last place of the angle, and one of the result.
    chex.assert_trees_all_close(
        rope_angles(jnp.asarray([4, 12]), linear, 8, jnp.float32), rope_angles(jnp.asarray([1, 3]), plain, 8, jnp.float32), atol=12 * 2**-23
    )


def test_rope_turns_a_pair_by_its_angle():
    # head size 2 has one pair and frequency 1: position 1 turns (1, 0) by one radian.
    cos, sin = rope_angles(jnp.asarray([0, 1]), RopeConfig(), 2, jnp.float32)
    turned = apply_rope(jnp.asarray([[[1.0, 0.0]], [[1.0, 0.0]]]), cos, sin)
    np.testing.assert_allclose(turned, [[[1, 0]], [[np.cos(1), np.sin(1)]]], rtol=1e-6)


def test_rope_angles_are_float32_whatever_the_dtype():
    # bf16 positions would make 1001 into 1000; float32 angles rounded at the end do not.
    cos, _ = rope_angles(jnp.asarray([1001]), RopeConfig(), 4, jnp.bfloat16)
    assert cos.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(cos[0, 0]), np.cos(1001.0), atol=2**-8)


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 1.0078125), ("float16", 1.0009765625), ("float32", 1.001)])
def test_round_to_survives_a_fusion(dtype, value):
    back = jax.jit(lambda x: round_to(x, jnp.dtype(dtype)).astype(jnp.float32))(jnp.float32(1.001 if dtype != "bfloat16" else 1.006))
    assert float(back) == np.float32(value)


def test_project_accumulates_in_float32():
    # 4096 ones in bf16 would stall at 256 if the sum were kept in bf16.
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((1, 4096), jnp.bfloat16)
    assert float(project(x, w, 1, flat=True)[0, 0]) == 4096
    chex.assert_type(project(x, w, 1, flat=True, out_dtype=jnp.dtype(jnp.float32)), jnp.float32)


@pytest.mark.parametrize("flat", [True, False])
def test_project_over_several_axes(flat):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 2, 3)).astype(np.float32), rng.normal(size=(4, 6, 2, 3)).astype(np.float32)
    got = project(jnp.asarray(x), jnp.asarray(w), 2, flat=flat)
    chex.assert_shape(got, (5, 4, 6))
    np.testing.assert_allclose(got, np.einsum("tab,ghab->tgh", x, w), rtol=1e-5, atol=1e-6)
