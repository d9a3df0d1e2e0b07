"""A network in float64 NumPy and helper functions, for tests that recompute rounds of algorithms."""

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedsim
from fedsim.rounds import ClientTable

RATE = 0.3
BATCHES = fedsim.Batches(size=4, epochs=2)


def network() -> fedsim.Model:
    def logits(examples):
        hidden = jnp.tanh(hk.Linear(5)(examples["x"]))
        return hk.Linear(federation.NUM_CLASSES)(hidden)

    return fedsim.Model.from_haiku(hk.transform(logits), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)


def numpy_gradient(params, x, y):
    """Returns the gradient of the mean softmax cross-entropy of `network`."""
    (w, b), (v, c) = ((params[name]["w"], params[name]["b"]) for name in ("linear", "linear_1"))
    hidden = np.tanh(x @ w + b)
    logits = hidden @ v + c
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    back = (p @ v.T) * (1 - hidden**2)
    gradients = {"linear": {"w": x.T @ back, "b": back.sum(0)}, "linear_1": {"w": hidden.T @ p, "b": p.sum(0)}}
    return jax.tree.map(lambda g: g / len(y), gradients)


def plus(a, factor, b):
    """Returns a + factor b for pytrees of NumPy arrays."""
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def weighted_mean(pairs):
    total = sum(weight for weight, _ in pairs)
    return jax.tree.map(lambda *x: sum(w * leaf for (w, _), leaf in zip(pairs, x, strict=True)) / total, *[p for _, p in pairs])


def real_examples(dataset, key, batches=BATCHES):
    for batch in dataset.batches(batches, key):
        yield batch.examples["x"][batch.mask].astype(np.float64), batch.examples["y"][batch.mask]


def make(cls, **overrides):
    settings = {"model": network(), "batches": BATCHES, "client_optimizer": optax.sgd(RATE), "execution": fedsim.Jit()}
    return cls(**(settings | overrides))


def cohorts(population, rounds=3):
    """Returns cohorts that differ and overlap."""
    draw = np.random.default_rng(5)
    return [fedsim.Cohort(population, draw.permutation(8)[:5], r, fedsim.rng.root(0)) for r in range(rounds)]


def run(algorithm, rounds=3, seed=1):
    population = federation.data()
    state = algorithm.init(jax.random.key(seed))
    for cohort in cohorts(population, rounds):
        state, info = algorithm.apply(state, cohort)
    return state, info


def client_memories(state, population=None):
    """Returns the memory of each client by id."""
    population = population or federation.data()
    if isinstance(state.clients, ClientTable):
        rows, seen = jax.device_get(state.clients)
    else:
        rows, seen = state.clients.gather(np.arange(population.num_clients))
    return {population.client_ids[i]: jax.tree.map(lambda leaf, i=i: leaf[i], rows[0]) for i in np.flatnonzero(seen)}


def start(algorithm, seed=1):
    """Returns the parameters before the first round in float64."""
    return jax.tree.map(lambda p: np.asarray(p, np.float64), algorithm.init(jax.random.key(seed)).params)


def numpy_rounds(w, train):
    """Averages the results of ``train(client_id, dataset, key, w)``, weighted by examples; empty clients are skipped."""
    for cohort in cohorts(federation.data()):
        trained = [(len(dataset), train(i, dataset, key, w)) for i, dataset, key in cohort if len(dataset)]
        w = weighted_mean(trained)
    return w
