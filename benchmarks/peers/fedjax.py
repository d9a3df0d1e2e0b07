"""FedJAX as in its examples: its models, sampler, batching, federated averaging and jit backend."""

from __future__ import annotations

import jax
import numpy as np

# FedJAX 0.0.17 uses these names, which JAX has since removed.
jax.tree_map = jax.tree.map
jax.numpy.NINF = -jax.numpy.inf
_clip = jax.numpy.clip
jax.numpy.clip = lambda x, *bounds, a_min=None, a_max=None: _clip(x, *(bounds or (a_min, a_max)))

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

from benchmarks import workload  # noqa: E402

MODELS = {
    "logistic": fedjax.models.emnist.create_logistic_model,
    "dense": fedjax.models.emnist.create_dense_model,
    "cnn": fedjax.models.emnist.create_conv_model,
    "lstm": fedjax.models.stackoverflow.create_lstm_model,
}


class Contender:
    packages = ("fedjax", "jax", "dm-haiku", "numpy")

    def __init__(self, task: workload.Task) -> None:
        self.task, self.data = task, workload.population(task)
        self.about = {"devices": str(jax.devices())}
        self.model = MODELS[task.model]()
        self.treedef = jax.tree.structure(jax.eval_shape(self.model.init, jax.random.key(0)))
        model = self.model
        trained = model if task.dropout else model.replace(apply_for_train=lambda p, b, _: model.apply_for_eval(p, b))
        adam = fedjax.optimizers.adam(task.server_lr, b1=0.9, b2=task.b2, eps=task.eps)
        self.algorithm = fed_avg.federated_averaging(
            fedjax.model_grad(trained),
            fedjax.optimizers.sgd(task.client_lr),
            adam if task.server == "adam" else fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=task.batch),
        )
        self.clients = federated(self.data)
        self.test = federated(workload.population(task, "test")) if task.data == "femnist" else self.clients
        self.evaluator = fedjax.ModelEvaluator(self.model)
        self.reset(task.seed)

    def reset(self, seed: int) -> None:
        leaves = map(jax.numpy.asarray, workload.initial_leaves(self.task.model, seed))
        self.state = self.algorithm.init(jax.tree.unflatten(self.treedef, leaves))
        self.sampler = fedjax.client_samplers.UniformGetClientSampler(self.clients, self.task.clients, seed)

    def run(self, rounds: int) -> int:
        steps = 0
        for _ in range(rounds):
            cohort = self.sampler.sample()
            self.state, _ = self.algorithm.apply(self.state, cohort)
            steps += sum(self.task.steps(len(dataset)) for _, dataset, _ in cohort)
        jax.block_until_ready(self.state.params)
        return steps

    def save(self, path: str) -> None:
        np.savez(path, *jax.tree.leaves(self.state.params))

    def evaluate(self) -> dict[str, float]:
        # The fastest for FedJAX among batch sizes 20, 32, 64 and 128 with 1 and 3 buckets.
        batches = ((i, data.padded_batch(batch_size=32, num_batch_size_buckets=1)) for i, data in self.test.clients())
        results = list(self.evaluator.evaluate_global_params(self.state.params, batches))
        accuracy = np.asarray(jax.device_get([metrics["accuracy"] for _, metrics in results]))
        sizes = [size for _, size in self.test.client_sizes()]
        return {"accuracy": float(np.average(accuracy, weights=sizes)), "client_mean": float(accuracy.mean())}

    def read(self, source: str) -> list[int]:
        sizes = [len(dataset) for _, dataset in fedjax.SQLiteFederatedData.new(source).clients()]
        return [len(sizes), sum(sizes)]


def federated(data: workload.Population, **options: np.ndarray) -> fedjax.InMemoryFederatedData:
    columns = {"x": data.x if data.x.dtype == np.int32 else data.floats(), "y": data.y, **options}
    rows = [slice(*data.offsets[i : i + 2]) for i in range(len(data.sizes))]
    return fedjax.InMemoryFederatedData(
        {b"%06d" % i: {name: column[r] for name, column in columns.items()} for i, r in enumerate(rows)}
    )
