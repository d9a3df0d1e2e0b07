"""Which results of a function depend on an argument, through conditions, derivatives and functions of functions."""

import jax
import jax.numpy as jnp
import pytest

from fedsim.rounds._dependence import depends


def results(x, n, y):
    _, power = jax.lax.while_loop(lambda state: state[0] < n, lambda state: (state[0] + 1, state[1] * y), (0.0, x))
    return {
        "loop that n ends": power,
        "branch that x chooses": jax.lax.cond(x > 0, lambda y: y, lambda y: 2 * y, y),
        "derivative": jax.grad(jax.jit(lambda y: y * y * n))(y),
        "rematerialized": jax.checkpoint(jnp.sin)(y),
        "one boolean": jnp.where(n > 0, x, y),
        "a boolean for each": jnp.where(jnp.arange(3.0) < n, x, y),
    }


@pytest.mark.parametrize(
    ("argument", "dependent"),
    [
        ("x", {"loop that n ends", "branch that x chooses", "one boolean", "a boolean for each"}),
        ("n", {"loop that n ends", "derivative", "a boolean for each"}),
        ("y", set(jax.eval_shape(results, 1.0, 2.0, 3.0))),
    ],
)
def test_what_depends_on_an_argument(argument, dependent):
    traced, shapes = jax.make_jaxpr(results, return_shape=True)(1.0, 2.0, 3.0)
    found = depends(traced.jaxpr, [argument == name for name in "xny"])
    assert {name for name, mark in zip(shapes, found, strict=True) if mark} == dependent
