"""Federated averaging by Flower's own strategy: the apps that `unus_peers` compares with a deployment of fedsim.

Flower starts a process for each message, and this file is copied into the folder of the app: it imports JAX and Flower alone. A
node is a client, and takes full-batch gradient steps, so that no order of the examples matters.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def loss(params: list[Any], x: Any, y: Any) -> Any:
    """Returns the mean cross entropy of a multilayer perceptron, whose parameters are biases and weights in turn."""
    layers = list(zip(params[::2], params[1::2], strict=True))
    for bias, weight in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    bias, weight = layers[-1]
    return -jnp.mean(jax.nn.log_softmax(x @ weight + bias)[jnp.arange(len(y)), y])


def trained(params: list[Any], x: Any, y: Any, *, steps: int, rate: float) -> list[Any]:
    """Returns the parameters after some steps of gradient descent."""
    gradient = jax.jit(jax.grad(loss))
    for _ in range(steps):
        params = [param - rate * each for param, each in zip(params, gradient(params, x, y), strict=True)]
    return params


def server_app() -> Any:
    """Returns the ``ServerApp``. It reads ``job.json`` and ``first.npz`` in Flower's home, and writes ``done.npz`` there."""
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        home = Path(os.environ["FLWR_HOME"])
        job = json.loads((home / "job.json").read_text())
        with np.load(home / "first.npz") as file:
            first = [file[name] for name in file.files]
        times: list[float] = []
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=job["nodes"], min_available_nodes=job["nodes"])
        found = strategy.start(
            grid, ArrayRecord(first), num_rounds=job["rounds"], evaluate_fn=lambda *_: times.append(time.monotonic())
        )
        arrays = found.arrays.to_numpy_ndarrays()
        bytes_of_round = 2 * job["nodes"] * ArrayRecord(arrays).count_bytes()
        np.savez(home / "done.part.npz", *arrays, seconds=np.diff(times), bytes=bytes_of_round)
        os.replace(home / "done.part.npz", home / "done.npz")

    return app


def client_app() -> Any:
    """Returns the ``ClientApp``. Its examples are beside the path ``worker`` of the node's configuration."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        place = Path(str(context.node_config["worker"]))
        job = json.loads((place.parent / "job.json").read_text())
        with np.load(place.parent / f"data-{place.name}.npz") as file:
            x, y = file["x"], file["y"]
        params = message.content["arrays"].to_numpy_ndarrays()
        params = trained(params, x, y, steps=job["steps"], rate=job["rate"])
        content = {
            "arrays": ArrayRecord([np.asarray(each) for each in params]),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app
