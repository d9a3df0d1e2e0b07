"""No algorithm copies the weights in every step: of what a step overwrites all else is known before."""

import re

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

import fedsim
from fedsim import algorithms
from fedsim.data import Batch
from fedsim.execution import Client

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's CPU compiler")

# What a step adds to the gradient: nothing, a constant, a pull to what it started from or keeps, a second model.
TRAINED = {
    "FedAvg": {},
    "SCAFFOLD": {},
    "FedProx": {"mu": 0.5},
    "AdaptiveFedProx": {},
    "FedNova": {"mu": 0.5},
    "FedDyn": {},
    "Ditto": {},
    "APFL": {},
    "APFL, adaptive": {"adaptive": True},
    "PFedMe": {"personal_steps": 3},
    "PerFedAvg": {},
}


def network() -> fedsim.Model:
    """Two layers: gradients of the first are computed from the second's weights, which have a shape that nothing else has."""

    def logits(examples):
        return hk.Linear(federation.NUM_CLASSES)(jax.nn.relu(hk.Linear(7)(examples["x"])))

    return fedsim.Model.from_haiku(hk.transform(logits), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)


def copies(algorithm: fedsim.Algorithm) -> list[int]:
    """In the body of each loop in which there is a second layer: how often its weights are copied, of inner loops first."""
    shared = algorithm.broadcast(algorithm.init(jax.random.key(0)))
    four = jnp.int32(4)
    client = Client(jnp.int32(0), four, four, jax.random.key(1), algorithm.client_memory(shared))
    examples = {"x": jnp.ones([4, 3]), "y": jnp.zeros(4, jnp.int32)}

    def train(shared, client):
        def step(number, state):
            return algorithm.client_step(shared, state, Batch(examples, jnp.ones(4, bool), client.key, number))

        start = algorithm.client_begin(shared, algorithm.client_init(shared, client), client)
        return jax.lax.fori_loop(0, client.num_steps, step, start)

    program = jax.jit(train).lower(shared, client).compile().as_text()
    bodies = set(re.findall(r"body=(%[\w.-]+)", program))
    weights = f"f32[7,{federation.NUM_CLASSES}]"
    found = dict(re.findall(r"^(%[\w.-]+) [^\n]*\{\n(.*?)^\}", program, re.DOTALL | re.MULTILINE))
    return [body.count(f"{weights}{{1,0}} copy(") for name, body in found.items() if name in bodies and weights in body]


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_copies_no_weights(name):
    algorithm = getattr(algorithms, name.split(",")[0])(
        model=network(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), **TRAINED[name]
    )
    assert set(copies(algorithm)) == {0}


def test_one_that_reads_the_weights_too_early_would():
    class Early(algorithms.FedAvg):
        def client_gradient(self, shared, state, batch):
            loss, slope = super().client_gradient(shared, state, batch)
            slope = fedsim.tree.pulled(slope, 0.1, state.params, shared.params)
            return loss, fedsim.tree.after(slope, slope)

    early = Early(model=network(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    assert copies(early) == [1]
