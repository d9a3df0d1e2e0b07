"""Compares DiLoCo with a plain loop over workers, in optax alone, which uses nothing of fedsim but the indices of batches."""

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import rng

STEPS, ROUNDS = 3, 4
INNER = optax.adamw(optax.cosine_decay_schedule(0.1, STEPS * ROUNDS), weight_decay=0.1)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
BATCHES = fedsim.Batches(size=4, steps=STEPS)


@pytest.fixture(autouse=True, scope="module")
def _dtype_promotion():
    with jax.numpy_dtype_promotion("standard"):  # which optax.adamw requires
        yield


def diloco(cls=fedsim.algorithms.DiLoCo, **options):
    settings = {"model": federation.model(), "client_optimizer": INNER, "batches": BATCHES, "execution": fedsim.Jit()}
    return cls(**settings | options)


def run(algorithm, population, rounds=ROUNDS):
    state, infos = algorithm.init(jax.random.key(1)), []
    for cohort in (federation.cohort(population, round=r) for r in range(rounds)):
        state, info = algorithm.apply(state, cohort)
        infos.append(info)
    return federation.plain(state), jax.device_get(infos)


def loss(params, x, y):
    logits = x @ params["linear"]["w"] + params["linear"]["b"][None]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


class PlainWorkers:
    """Workers with data of their own, which they read in the order of their first round without an end."""

    def __init__(self, population, params):
        self.cohort = federation.cohort(population)
        self.data = [dataset for _, dataset, _ in self.cohort]
        self.words = [rng.words(rng.stream(key, "shuffle")) for _, _, key in self.cohort]
        self.states, self.steps = [INNER.init(params) for _ in self.data], [0] * len(self.data)
        self.gradient = jax.jit(jax.grad(loss))

    def step(self, i, params):
        """Takes a step of worker i from these parameters."""
        index, _ = BATCHES.indices(self.words[i], len(self.data[i]), self.steps[i])
        x, y = (self.data[i].examples[name][np.asarray(index)] for name in ("x", "y"))
        updates, self.states[i] = INNER.update(self.gradient(params, x, y), self.states[i], params)
        self.steps[i] += 1
        return optax.apply_updates(params, updates)


def mean(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def test_diloco_is_a_plain_loop_over_workers():
    population = federation.data(sizes=(7, 12, 5))
    state, _ = run(diloco(), population)
    params = diloco().init(jax.random.key(1)).params
    workers, outer = PlainWorkers(population, params), OUTER.init(params)
    for _ in range(ROUNDS):
        gradients = []
        for i in range(3):
            own = params
            for _ in range(STEPS):
                own = workers.step(i, own)
            gradients.append(jax.tree.map(jnp.subtract, params, own))
        updates, outer = OUTER.update(mean(gradients), outer, params)
        params = optax.apply_updates(params, updates)
    federation.assert_trees_close(federation.plain(state.server.params), jax.device_get(params), rtol=1e-5, atol=1e-6)


def test_one_worker_whose_server_adds_its_movement_trains_centrally_whatever_the_number_of_steps():
    population = federation.data(sizes=(10,))
    server = {"server_learning_rate": 1.0, "momentum": 0.0}
    few, _ = run(diloco(**server), population)
    many, _ = run(diloco(**server, batches=fedsim.Batches(size=4, steps=STEPS * ROUNDS)), population, 1)
    federation.assert_trees_close(few.server.params, many.server.params)


def test_the_order_of_examples_continues_in_any_execution():
    population = federation.data(sizes=(7, 0, 5))
    expected, infos = run(diloco(), population, 2)
    for execution in (fedsim.Pmap(devices=2, memory="stream"), fedsim.Debug()):
        state, others = run(diloco(execution=execution), population, 2)
        federation.assert_trees_close(state, expected)
        federation.assert_trees_close(others, infos)
