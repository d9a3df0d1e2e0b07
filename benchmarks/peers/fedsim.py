"""fedsim, by its public interface only."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedsim
from benchmarks import workload

MODELS = {
    "softmax": lambda: fedsim.models.emnist_logistic(num_classes=10),
    "logistic": fedsim.models.emnist_logistic,
    "dense": fedsim.models.emnist_dense,
    "cnn": fedsim.models.emnist_cnn,
    "lstm": lambda: fedsim.models.stackoverflow_lstm(tanh=True),  # FedJAX's second tanh
}


class Contender:
    packages = ("jax", "dm-haiku", "optax", "numpy")

    def __init__(self, task: workload.Task) -> None:
        fedsim.use_all_cores()
        self.task, self.data = task, workload.population(task)
        self.about = {"devices": str(jax.devices()), "fedsim": fedsim.__version__}
        self.clients = federated(self.data)
        self.test = federated(workload.population(task, "test")) if task.data == "femnist" else self.clients
        self.model = MODELS[task.model]()
        adam = optax.adam(task.server_lr, b2=task.b2, eps=task.eps)
        self.algorithm = fedsim.algorithms.FedAvg(
            model=self.model if task.dropout else without_dropout(self.model),
            client_optimizer=optax.sgd(task.client_lr),
            server_optimizer=adam if task.server == "adam" else optax.sgd(1.0),
            batches=fedsim.Batches(size=task.batch, epochs=1),
        )
        self.reset(task.seed)

    def reset(self, seed: int) -> None:
        state = self.algorithm.init(jax.random.key(seed))
        leaves = [jnp.asarray(leaf) for leaf in workload.initial_leaves(self.task.model, seed)]
        self.state = state._replace(params=jax.tree.unflatten(jax.tree.structure(state.params), leaves))
        self.cohorts = fedsim.UniformSampler(self.clients, clients=self.task.clients, seed=seed).rounds(10**9)

    def run(self, rounds: int) -> int:
        steps, per_dispatch = 0, self.task.per_dispatch
        for _ in range(rounds // per_dispatch):
            cohorts = list(itertools.islice(self.cohorts, per_dispatch))
            if per_dispatch == 1:
                self.state, _ = self.algorithm.apply(self.state, cohorts[0])
            else:
                self.state, _ = self.algorithm.apply_rounds(self.state, cohorts)
            steps += sum(self.task.steps(size) for cohort in cohorts for size in cohort.sizes)
        jax.block_until_ready(self.state)
        return steps

    def save(self, path: str) -> None:
        np.savez(path, *jax.tree.leaves(self.state.params))

    def evaluate(self) -> dict[str, float]:
        evaluation = fedsim.evaluate(self.model, self.state.params, self.test)
        per_client = np.asarray(evaluation.clients["accuracy"].result())
        return {"accuracy": float(evaluation.overall["accuracy"]), "client_mean": float(per_client.mean())}

    def convert(self, source: str, target: str) -> list[int]:
        fedsim.formats.convert(source, target, progress=False)
        data = fedsim.FederatedData.open(target)
        return [data.num_clients, data.num_examples]


def federated(data: workload.Population, **options: np.ndarray) -> fedsim.FederatedData:
    return fedsim.FederatedData.from_arrays({"x": data.x, "y": data.y, **options}, sizes=data.sizes)


def without_dropout(model: fedsim.Model) -> fedsim.Model:
    return dataclasses.replace(model, apply_for_train=lambda params, batch, _: model.apply_for_eval(params, batch))
