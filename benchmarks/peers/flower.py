"""Flower's simulation: Ray, one processor per client, PyTorch clients, FedAdam on the server."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

from benchmarks import workload
from benchmarks.peers import torch_model

client_app = ClientApp()


@functools.cache
def _client_side(task_json: str) -> tuple[Any, ...]:
    """Returns task, data and model, which a Ray actor keeps between clients, so that they are loaded once."""
    task = workload.Task(**json.loads(task_json))
    data = workload.population(task)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = (tensor.to(device) for tensor in torch_model.images(data))
    return task, x, y, data.offsets, torch_model.build(task).to(device)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    task, x, y, offsets, model = _client_side(message.content["config"]["task"])
    start, stop = (int(row) for row in offsets[context.node_config["partition-id"] :][:2])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), task.client_lr)
    batches = (start + torch.randperm(stop - start, device=x.device)).split(task.batch)
    for rows in batches:
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": stop - start, "steps": len(batches)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def _total_steps(records: Iterable[RecordDict], _weight: str) -> MetricRecord:
    return MetricRecord({"steps": sum(int(record["metrics"]["steps"]) for record in records)})


class Contender:
    packages = ("flwr", "ray", "torch", "numpy")

    def __init__(self, task: workload.Task, grid: Grid) -> None:
        self.task, self.grid, self.data = task, grid, workload.population(task)
        self.model = torch_model.build(task)
        self.arrays = ArrayRecord(self.model.state_dict())
        common = {
            "fraction_train": 1e-9,  # at least min_train_nodes are sampled; with this fraction, exactly that many
            "fraction_evaluate": 0.0,
            "min_train_nodes": task.clients,
            "min_available_nodes": len(self.data.sizes),
            "train_metrics_aggr_fn": _total_steps,
        }
        adam = {"eta": task.server_lr, "beta_1": 0.9, "beta_2": task.b2, "tau": task.eps}
        self.strategy = FedAdam(**common, **adam) if task.server == "adam" else FedAvg(**common)

    def run(self, rounds: int) -> int:
        config = ConfigRecord({"task": json.dumps(vars(self.task))})
        result = self.strategy.start(self.grid, self.arrays, num_rounds=rounds, train_config=config)
        self.arrays = result.arrays
        return sum(int(record["steps"]) for record in result.train_metrics_clientapp.values())

    def save(self, path: str) -> None:
        self.model.load_state_dict(self.arrays.to_torch_state_dict())
        np.savez(path, *torch_model.leaves(self.model))


def host(task: workload.Task, serve: Callable[[Contender], None]) -> None:
    """Runs the simulation, which calls ``serve``: Flower needs the main thread."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    server_app = ServerApp()

    @server_app.main()
    def answer(grid: Grid, context: Context) -> None:
        serve(Contender(task, grid))

    resources = {"num_cpus": 1, "num_gpus": 0.5 if task.device == "gpu" else 0.0}
    nodes = len(workload.population(task).sizes)
    run_simulation(server_app, client_app, nodes, backend_config={"client_resources": resources})
