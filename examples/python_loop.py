"""An algorithm that overrides ``apply`` with a Python loop over the cohort, because its clients depend on each other.

Cyclical weight transfer: one client after another trains the model, each starting from the parameters of the one before it.
K. Chang et al., "Distributed deep learning networks among institutions for medical imaging", JAMIA 25(8), 2018.
From the command line::

    fedsim run --algorithm examples/python_loop.py:WeightTransfer --rounds 30 --client-learning-rate 0.05
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedsim
from fedsim import tree


class State(NamedTuple):
    params: Any


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WeightTransfer(fedsim.Algorithm):
    """The clients of the cohort train one model in turn; there is no server step."""

    model: fedsim.Model
    client_learning_rate: float = 0.05

    def init(self, key):
        return State(self.model.init(key))

    def apply(self, state, cohort):
        params, losses = state.params, []
        for (_client_id, dataset, key), steps in zip(cohort, cohort.num_steps(self.batches), strict=True):
            for batch in dataset.batches(self.batches, key, steps):
                params, loss = self.step(params, batch)
                losses.append(loss)
        return State(params), {"loss": jnp.stack(losses).mean()}

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, params, batch):
        loss, gradient = jax.value_and_grad(self.model.train_loss)(params, batch)
        return tree.subtract(params, tree.scale(gradient, self.client_learning_rate)), loss


def main(rounds: int = 30) -> float:
    """Trains on the digits; prints and returns the test accuracy."""
    data = fedsim.datasets.load("digits")
    algorithm = WeightTransfer(model=fedsim.models.digits_dense(), batches=fedsim.Batches(size=10))
    state = algorithm.init(jax.random.key(0))
    for cohort in fedsim.UniformSampler(data.train, clients=20, seed=0).rounds(rounds):
        state, _info = algorithm.apply(state, cohort)
    accuracy = fedsim.evaluate(algorithm.model, state.params, data.test).overall["accuracy"]
    print(f"WeightTransfer, {rounds} rounds: test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
