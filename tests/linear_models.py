"""A linear model and two quadratics in float64 NumPy, for tests that recompute rounds of algorithms."""

import dataclasses

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedsim
from fedsim.algorithms import SCAFFOLD

RATE, SERVER_RATE = 0.3, 0.7
BATCHES = fedsim.Batches(size=4, epochs=2)
ONE_STEP = fedsim.Batches(size=16, shuffle=False)


def gradient(theta, x, y):
    """Returns the gradient of the mean softmax cross-entropy of the linear model [x 1] theta."""
    p = np.exp(x @ theta)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y)


def with_ones(x):
    return np.concatenate([x, np.ones([len(x), 1])], axis=1).astype(np.float64)


def clients(cohort, batches=BATCHES):
    """Yields the position, the examples and the list of batches of every client that has examples."""
    for position, (_, dataset, key) in zip(cohort.clients.tolist(), cohort, strict=True):
        rows = [(b.examples["x"][b.mask], b.examples["y"][b.mask]) for b in dataset.batches(batches, key)]
        if rows:
            yield position, (with_ones(dataset["x"]), dataset["y"]), [(with_ones(x), y) for x, y in rows]


def settings(**overrides):
    return {"model": federation.model(), "batches": BATCHES, "client_optimizer": optax.sgd(RATE)} | overrides


def theta(state):
    linear = state.params["linear"]
    return np.concatenate([np.asarray(linear["w"], np.float64), np.asarray(linear["b"], np.float64)[None]])


def run(algorithm, cohorts):
    """Returns the parameters before and after training, and the state after it."""
    state = algorithm.init(jax.random.key(1))
    start = theta(state)
    for cohort in cohorts:
        state, _ = algorithm.apply(state, cohort)
    return start, theta(state), state


def cohorts(population=None, count=4, size=4):
    """Yields cohorts of some of the clients, so that clients with memory take part again."""
    population = population or federation.data()
    draw = np.random.default_rng(5)
    for r in range(count):
        yield fedsim.Cohort(population, draw.permutation(population.num_clients)[:size], r, fedsim.rng.root(0))


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def assert_differ(one, other):
    assert np.abs(one - other).max() > 1e-3


# The two quadratics of SCAFFOLD's section 7.1, with the functions of its theorem II for mu = 1: f_1 = x^2 + G x and f_2 = -G x.
# Hence f = x^2 / 2 and beta = delta = 1, and G is the dissimilarity. Gradients are full, both clients take part in every round,
# and c_i = g_i(x) at the start, as in its theorems. The paper does not state its step size; it is 0.1 here for all algorithms.

STEP, START = 0.1, 1.0


def two_quadratics(G):
    columns = {"curvature": np.array([2, 0], np.float32), "slope": np.array([G, -G], np.float32)}
    return fedsim.FederatedData.from_arrays(columns, sizes=(1, 1))


def on_quadratics(cls, steps, **options):
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("x", [1], init=lambda *_: jnp.full([1], START))),
        features={name: jax.ShapeDtypeStruct((), jnp.float32) for name in ("curvature", "slope")},
        loss=lambda examples, x: examples["curvature"] * jnp.square(x) / 2 + examples["slope"] * x,
        metrics={},
    )
    batches = fedsim.Batches(size=1, steps=steps)
    return cls(model=model, batches=batches, client_optimizer=optax.sgd(STEP), execution=fedsim.Jit(), **options)


def curve(algorithm, G, rounds=90):
    """Returns f before each round."""
    both = two_quadratics(G)
    state, f = algorithm.init(jax.random.key(0)), []
    if isinstance(algorithm, SCAFFOLD):
        warm, _ = dataclasses.replace(algorithm, control_variate="I").apply(state, federation.cohort(both))
        state = warm._replace(server=warm.server._replace(params=state.params))
    for r in range(rounds):
        f.append(float(jax.tree.leaves(state.params)[0][0]) ** 2 / 2)
        state, _ = algorithm.apply(state, federation.cohort(both, round=r))
    return np.array(f)


def rounds_to(f, level=1e-6):
    return len(f) - np.argmax(np.array(f)[::-1] > level)
