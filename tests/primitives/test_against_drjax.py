"""Programs of DrJAX 0.2.1 (`pip install --no-deps drjax==0.2.1`) and their counterparts give the same values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim import primitives as fed

drjax = pytest.importorskip("drjax")
pytestmark = pytest.mark.filterwarnings("ignore:jax.interpreters.pxla.thread_resources:DeprecationWarning")
CLIENTS = fed.Placement("clients", 4)


def in_drjax(function):
    return drjax.program(placements={"clients": 4})(function)


def at_clients(x):
    return fed.place(x, CLIENTS)


X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5], np.float32)
PARAMS = np.array([0.5, -1.0, 2.0], np.float32)


def local_sgd(params, x):
    return jax.lax.scan(lambda p, _: (p - 0.1 * jax.grad(lambda p: jnp.sum((p - x) ** 2))(p), None), params, length=3)[0]


PAIRS = {
    "sum of a broadcast": (
        lambda params, x: drjax.reduce_sum(drjax.broadcast(params)),
        lambda params, x: fed.sum(fed.broadcast(params, CLIENTS)),
    ),
    "mean of squares": (
        lambda params, x: drjax.reduce_mean(drjax.map_fn(lambda a: a**2, x)),
        lambda params, x: fed.mean(fed.map(lambda a: a**2, at_clients(x))),
    ),
    "weighted mean": (
        lambda params, x: drjax.reduce_weighted_mean(x, jnp.asarray(WEIGHTS)),
        lambda params, x: fed.weighted_mean(at_clients(x), at_clients(WEIGHTS)),
    ),
    "federated averaging": (
        lambda params, x: drjax.reduce_mean(drjax.map_fn(local_sgd, (drjax.broadcast(params), x))),
        lambda params, x: fed.mean(fed.map(local_sgd, fed.broadcast(params, CLIENTS), at_clients(x))),
    ),
    "sum of squared distances to the mean": (
        lambda params, x: drjax.reduce_sum(drjax.map_fn(lambda a, m: (a - m) ** 2, (x, drjax.broadcast(drjax.reduce_mean(x))))),
        lambda params, x: fed.sum(
            fed.map(lambda a, m: (a - m) ** 2, at_clients(x), fed.broadcast(fed.mean(at_clients(x)), CLIENTS))
        ),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_gradients(name, fused):
    theirs, ours = PAIRS[name]
    theirs, ours = in_drjax(theirs), fed.program(ours) if fused else ours
    np.testing.assert_allclose(ours(PARAMS, X), theirs(PARAMS, X), rtol=1e-6)
    gradients = [
        jax.grad(lambda params, x, f=f: jnp.sum(f(params, x) ** 2), (0, 1))(jnp.asarray(PARAMS), jnp.asarray(X))
        for f in (ours, theirs)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *gradients)
