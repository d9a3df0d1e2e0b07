"""A custom algorithm with `init`, `client_update` and `server_update`: FedNova, for clients with unequal step counts.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, "Tackling the objective inconsistency problem in heterogeneous federated
optimization", NeurIPS 2020: https://arxiv.org/abs/2007.07481. Clients use plain SGD here; `fedsim.algorithms.FedNova`
also supports other optimizers.
From the command line: fedsim run --algorithm examples/custom_algorithm.py:FedNova --client-learning-rate 0.1
"""

import dataclasses
from collections import namedtuple

import jax
import jax.numpy as jnp

import fedsim
from fedsim import experiment, tree

State = namedtuple("State", ["params"])  # a pytree; states with params can be evaluated


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedNova(fedsim.Algorithm):
    """Clients send their mean change per step. The server multiplies the average by the mean number of steps."""

    model: fedsim.Model
    client_learning_rate: float = 0.2

    def init(self, key):
        return State(self.model.init(key))

    def client_update(self, shared, client):
        def step(state, batch):
            params, _ = state
            loss, gradient = jax.value_and_grad(self.model.train_loss)(params, batch)
            return tree.subtract(params, tree.scale(gradient, self.client_learning_rate)), loss

        params, last_loss = client.for_each_batch(self.batches, step, (shared.params, jnp.float32(0)))
        num_steps = jnp.maximum(client.num_steps, 1).astype(jnp.float32)
        per_step = tree.scale(tree.subtract(params, shared.params), 1 / num_steps)
        weight = client.num_examples.astype(jnp.float32)
        return fedsim.ClientUpdate((per_step, num_steps), weight, info={"loss": last_loss})

    def server_update(self, state, update, info):
        per_step, num_steps = update  # the weighted means over the clients
        return State(tree.add(state.params, tree.scale(per_step, num_steps)))


def main(rounds: int = 60) -> float:
    """Trains on the digits; prints and returns the test accuracy."""
    data = fedsim.datasets.load("digits")
    algorithm = FedNova(model=fedsim.models.digits_dense(), batches=fedsim.Batches(size=10, epochs=5))
    sampler = fedsim.UniformSampler(data.train, clients=20, seed=0)
    result = experiment.run(algorithm, sampler, rounds=rounds, test_data=data.test, progress=False)
    print(f"FedNova, {rounds} rounds: test accuracy {result.evaluation.overall['accuracy']:.3f}")
    return result.evaluation.overall["accuracy"]


if __name__ == "__main__":
    main()
