"""FedJAX's algorithms and aggregators, as in its examples and notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workload
from benchmarks.peers.fedjax import MODELS, federated  # restores names that JAX has removed

import fedjax  # isort: skip
from fedjax.aggregators import compression  # isort: skip
from fedjax.algorithms import agnostic_fed_avg, apfl, fed_avg, fed_prox, hyp_cluster, mime, mime_lite  # isort: skip

CLUSTERS = 2
LEVELS = 16

AGGREGATORS: dict[str, Callable[[jax.Array], fedjax.aggregators.Aggregator]] = {
    "UniformQuantizer": lambda rng: compression.uniform_stochastic_quantizer(LEVELS, rng),
    "UniformQuantizer, entropy": lambda rng: compression.uniform_stochastic_quantizer(LEVELS, rng, "arithmetic"),
    "RotatedUniformQuantizer": lambda rng: compression.rotated_uniform_stochastic_quantizer(LEVELS, rng),
    "Drive": compression.structured_drive_quantizer,
    "TernGrad": compression.terngrad_quantizer,
}


def aggregated(gradient: Any, client: Any, server: Any, batches: Any, aggregator: Any) -> fedjax.FederatedAlgorithm:
    """Returns federated averaging with one of FedJAX's aggregators, as in its notebook on compression.

    FedJAX itself has no such algorithm.
    """
    train = fed_avg.create_train_for_each_client(gradient, client)

    def init(params: Any) -> tuple[fed_avg.ServerState, Any]:
        return fed_avg.ServerState(params, server.init(params)), aggregator.init()

    def apply(state: tuple[fed_avg.ServerState, Any], clients: Any) -> tuple[Any, dict[str, Any]]:
        before, memory = state
        sizes = {client_id: len(dataset) for client_id, dataset, _ in clients}
        batched = [(client_id, dataset.shuffle_repeat_batch(batches), rng) for client_id, dataset, rng in clients]
        sent = ((client_id, delta, sizes[client_id]) for client_id, delta in train(before.params, batched))
        mean, memory = aggregator.apply(sent, memory)
        opt_state, params = server.apply(mean, before.opt_state, before.params)
        return (fed_avg.ServerState(params, opt_state), memory), {}

    return fedjax.FederatedAlgorithm(init, apply)


def build(name: str, model: fedjax.Model, task: workload.Task) -> fedjax.FederatedAlgorithm:
    """Returns the algorithm with the hyperparameters of `benchmarks.peers.fedsim_catalogue.of_fedjax`."""
    adam = fedjax.optimizers.adam(task.server_lr, b1=0.9, b2=task.b2, eps=task.eps)
    server = adam if task.server == "adam" else fedjax.optimizers.sgd(1.0)
    client, momentum = fedjax.optimizers.sgd(task.client_lr), fedjax.optimizers.sgd(task.client_lr, momentum=0.9)
    batches, padded = fedjax.ShuffleRepeatBatchHParams(task.batch), fedjax.PaddedBatchHParams(task.batch)
    loss, gradient = fedjax.model_per_example_loss(model), fedjax.model_grad(model)
    made: dict[str, Callable[[], fedjax.FederatedAlgorithm]] = {
        "FedAvg": lambda: fed_avg.federated_averaging(gradient, client, server, batches),
        "FedProx": lambda: fed_prox.fed_prox(loss, client, server, batches, proximal_weight=0.1),
        "Mime": lambda: mime.mime(loss, momentum, batches, padded, server_learning_rate=1.0),
        "MimeLite": lambda: mime_lite.mime_lite(loss, momentum, batches, padded, server_learning_rate=1.0),
        "AgnosticFedAvg": lambda: agnostic_fed_avg.agnostic_federated_averaging(
            loss, client, server, batches, padded, init_domain_weights=jnp.array([0.5, 0.5]), domain_learning_rate=0.1
        ),
        "HypCluster": lambda: hyp_cluster.hyp_cluster(loss, client, server, padded, batches),
        "APFL": lambda: apfl.adaptive_personalized_federated_learning(gradient, client, server, batches, 0.5),
    }
    if name in made:
        return made[name]()
    return aggregated(gradient, client, server, batches, AGGREGATORS[name](jax.random.PRNGKey(task.seed)))


class Contender:
    packages = ("fedjax", "jax", "dm-haiku", "numpy")

    def __init__(self, task: workload.Task) -> None:
        self.task, self.data = task, workload.population(task)
        self.about = {"devices": str(jax.devices())}
        model = MODELS[task.model]()
        self.treedef = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
        self.model = model if task.dropout else model.replace(apply_for_train=lambda p, b, _: model.apply_for_eval(p, b))
        # Only AgnosticFedAvg reads the column of domains, so only its clients have it.
        self.clients = {
            True: federated(self.data, domain_id=workload.domains(self.data)),
            False: federated(self.data),
        }
        self.algorithms: dict[str, fedjax.FederatedAlgorithm] = {}
        self.states: dict[str, Any] = {}

    def run(self, name: str, rounds: int) -> dict[str, float]:
        """Runs the sampler's first cohorts from the entry's last state; returns the client steps."""
        if name not in self.algorithms:
            self.algorithms[name] = build(name, self.model, self.task)
            clusters = [self._start(self.task.seed + i) for i in range(CLUSTERS)]
            self.states[name] = self.algorithms[name].init(clusters if name == "HypCluster" else clusters[0])
        clients = self.clients[name == "AgnosticFedAvg"]
        sampler = fedjax.client_samplers.UniformGetClientSampler(clients, self.task.clients, self.task.seed)
        steps = 0
        for _ in range(rounds):
            cohort = sampler.sample()
            self.states[name], _ = self.algorithms[name].apply(self.states[name], cohort)
            steps += sum(self.task.steps(len(dataset)) for _, dataset, _ in cohort)
        jax.block_until_ready(self._params(name))
        return {"steps": steps}

    def save(self, name: str, path: str) -> None:
        np.savez(path, *jax.tree.leaves(self._params(name)))

    def _params(self, name: str) -> Any:
        state = self.states[name][0] if name in AGGREGATORS else self.states[name]
        return jax.tree.map(lambda *each: jnp.stack(each), *state.cluster_params) if name == "HypCluster" else state.params

    def _start(self, seed: int) -> Any:
        return jax.tree.unflatten(self.treedef, map(jnp.asarray, workload.initial_leaves(self.task.model, seed)))
