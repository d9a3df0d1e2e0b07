"""Pytree arithmetic in edge cases."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedsim import tree


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_squared_norm_is_finite_only_if_all_elements_are(dtype):
    """The sum is taken in float32: the largest float16 does not overflow, and NaN and infinity always show."""
    large = float(np.finfo(np.float16).max)
    for value, finite in {0.0: True, large: True, np.nan: False, np.inf: False, -np.inf: False}.items():
        a = {"w": jnp.ones([2, 3], dtype).at[1, 2].set(value), "n": jnp.int32(7), "empty": jnp.zeros(0, dtype)}
        assert bool(jnp.isfinite(tree.squared_norm(a))) is finite
    expected = np.sum(np.square(np.arange(6.0))) + 49
    assert float(tree.squared_norm({"w": jnp.arange(6, dtype=dtype).reshape(2, 3), "n": jnp.int32(7)})) == expected


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_clipping_in_half_precision_keeps_the_norm(dtype):
    """A factor that is rounded to half precision would make all elements, and so the norm, larger by up to 0.4 %."""
    draw = np.random.default_rng(0)
    for length in np.linspace(2, 4, 20):
        x = jnp.asarray(length * draw.normal(size=1000) / np.sqrt(1000), dtype)
        exact = np.asarray(x, np.float64) / max(1, np.linalg.norm(np.asarray(x, np.float64)))
        found = np.asarray(tree.clip({"w": x}, 1.0)["w"], np.float64)
        assert np.linalg.norm(found) < 1 + float(jnp.finfo(dtype).eps) / 4
        np.testing.assert_allclose(found, exact, rtol=float(jnp.finfo(dtype).eps) / 2 + 1e-6, atol=1e-7)
