"""Pytree arithmetic at its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim import tree


def batched(f):
    return lambda x: jax.vmap(f)(jax.tree.map(lambda leaf: leaf[None], x))[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, lambda f: lambda x: jax.vmap(f)(jax.tree.map(lambda y: y[None], x))[0]]
)
def test_all_finite_is_exact(dtype, transform):
    """Also where squares overflow although every element is finite, and with integers beside."""
    large = float(np.finfo(np.float16).max)
    cases = {0.0: True, 1.0: True, large: True, np.nan: False, np.inf: False, -np.inf: False}
    for value, finite in cases.items():
        a = {"w": jnp.ones([2, 3], dtype).at[1, 2].set(value), "n": jnp.int32(7), "empty": jnp.zeros(0, dtype)}
        assert bool(transform(tree.all_finite)(a)) is finite
    assert bool(tree.all_finite({"w": jnp.full(4, 3e38, jnp.float32)}))
    assert bool(tree.all_finite({"n": jnp.int32(1)}))
