"""MOON, an algorithm whose loss reads the features of an inner layer, under the model, the server's and the client's last one.

Q. Li, B. He, D. Song, "Model-contrastive federated learning", CVPR 2021, equation 3: https://arxiv.org/abs/2103.16257. Each
client keeps the model of its last round. Its loss asks for features that are closer to the server's than to those of its last
model.
"""

import dataclasses
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import fedsim


class SharedAndLast(NamedTuple):
    params: Any
    round: jax.Array
    last: Any


def similarity(a, b):
    """Returns the cosine of the angle between the rows of ``a [n, width]`` and ``b [n, width]``, ``float32 [n]``."""
    norms = jnp.linalg.norm(a, axis=1) * jnp.linalg.norm(b, axis=1)
    return jnp.sum(a * b, axis=1) / jnp.maximum(norms, 1e-8)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MOON(fedsim.algorithms.FedAvg):
    mu: float = 1.0
    temperature: float = 0.5

    def client_memory(self, shared):
        return shared.params

    def client_update(self, shared, client):
        result = super().client_update(SharedAndLast(*shared, client.memory), client)
        return result._replace(memory=fedsim.tree.subtract(shared.params, result.update))

    def client_loss(self, shared, params, batch):
        own, server, last = (self.model.outputs(each, batch) for each in (params, shared.params, shared.last))
        closer = similarity(own["features"], last["features"]) - similarity(own["features"], server["features"])
        contrast = jax.nn.softplus(closer / self.temperature)
        return self.model.mean_loss(batch, own) + self.mu * fedsim.metrics.masked_mean(contrast, batch.mask)


def network(examples):
    pixels = examples["x"].astype(jnp.float32).reshape(-1, 64) / 16
    hidden = jax.nn.relu(hk.Linear(100)(pixels))
    features = hk.Linear(32)(hidden)
    return {"features": features, "logits": hk.Linear(10)(features)}


MODEL = fedsim.Model.from_haiku(
    hk.transform(network),
    features=fedsim.models.digits_dense().features,
    loss=lambda examples, outputs: fedsim.metrics.cross_entropy(examples, outputs["logits"]),
    metrics={"accuracy": lambda examples, outputs: fedsim.metrics.accuracy(examples, outputs["logits"])},
    num_classes=10,
)


def main(rounds=30):
    data = fedsim.datasets.load("digits")
    moon = MOON(model=MODEL, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10, epochs=2))
    state = moon.init(jax.random.key(0))
    for cohort in fedsim.UniformSampler(data.train, clients=20, seed=0).rounds(rounds):
        state, _ = moon.apply(state, cohort)
    accuracy = fedsim.evaluate(MODEL, fedsim.rounds.server_state(state).params, data.test).overall["accuracy"]
    print(f"MOON, {rounds} rounds: accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
