"""The same job by `fedsim deploy` and by Flower's own strategy: time of a round, bytes and memory.

Two nodes on this machine have half of the digits each. A round is a full-batch gradient step at each node and the mean of
the results, so that both compute the same (a row compares the parameters). The thesis on UNUS compares with PaddleFL, which
cannot run here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from fedsim import datasets, rng
from fedsim.configuration import RunConfig, Settings, build
from fedsim.deployment import FlowerProcesses, deploy
from fedsim.reproductions import _flower_peer
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row
from fedsim.saved_arrays import write_params

_NODES, _RATE, _ROUNDS = 2, 0.1, 10
_DATASET = f"digits(clients={_NODES}, partition='iid')"


class _Memory:
    """A context that measures the most memory of the processes at the nodes, in bytes for each node."""

    def __enter__(self) -> _Memory:
        self.most, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.2):
            now = 0
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    line = [child.cmdline(), *(parent.cmdline() for parent in child.parents())]
                    if any("flower-supernode" in part or part == "fedsim.deployment" for parts in line for part in parts):
                        now += child.memory_info().rss
            self.most = max(self.most, now / _NODES)


def _cases(request: Request) -> Mapping[str, Case]:
    return {"fedavg": functools.partial(_run, request), "paddlefl": _paddlefl}


def _run(request: Request) -> Iterator[Row]:
    if importlib.util.find_spec("flwr") is None:
        request.log("The case on Flower's network is not run: pip install 'fedsim-jax[run,flower]'.")
        return
    extent = request.extent(seeds=1, rounds=_ROUNDS)
    config = RunConfig(
        dataset=_DATASET, model="digits_dense", rounds=extent.rounds, clients=_NODES, batch_size=10_000,
        client_learning_rate=_RATE, evaluate_every=extent.rounds,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    first = build(config, Settings()).algorithm.init(rng.root(0)).params
    write_params(folder / "first.npz", first)
    config = dataclasses.replace(config, init_from=str(folder / "first.npz"))
    began = time.perf_counter()
    try:
        with _Memory() as own_memory:
            settings = Settings(folder=str(folder / "run"), progress=False, checkpoint_every=extent.rounds)
            params = deploy(config, settings, nodes=_NODES, table=False).state.params
        lines = [json.loads(line) for line in (folder / "run" / "deliveries.jsonl").read_text().splitlines()]
        with _Memory() as peer_memory:
            found = _flowers(first, extent.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    shared: dict[str, Any] = {
        "settings": {"nodes": _NODES, "rounds": extent.rounds, "rate": _RATE, "dataset": _DATASET},
        "reduced": extent.reduced(),
    }
    own, peer = [line["seconds"] for line in lines], found["seconds"].tolist()
    rows = {
        "seconds of a round, median": (statistics.median(own), statistics.median(peer), 1),
        "seconds of the first round": (own[0], peer[0], 1),
        "bytes of a round": (lines[-1]["bytes_down"] + lines[-1]["bytes_up"], float(found["bytes"]), 0),
        "memory of a node, most, MB": (own_memory.most / 1e6, peer_memory.most / 1e6, 0),
        "largest difference of a parameter": (0.0, _difference(params, found), 7),
    }
    seconds = time.perf_counter() - began
    for measure, (ours, theirs, digits) in rows.items():
        for case, value in (("fedsim deploy", ours), ("FedAvg of Flower", theirs)):
            yield Row.of_seeds([value], digits=digits, case=case, measure=measure, seconds=seconds, **shared)
            seconds = 0.0


def _flowers(first: Any, rounds: int) -> Mapping[str, np.ndarray]:
    """Runs the job by Flower's strategy; returns what its server has written."""
    data = datasets.load(_DATASET).train
    job = {"nodes": _NODES, "rounds": rounds, "steps": 1, "rate": _RATE}
    arrays: dict[str, dict[str, Any]] = {
        "first.npz": {f"{i:02}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(first))}
    }
    worker = "import socket, sys, time; it = socket.socket(socket.AF_UNIX); it.bind(sys.argv[1]); time.sleep(3600)"
    for number in range(_NODES):
        own = data.client(number)
        x = np.asarray(own["x"], np.float32).reshape(len(own["y"]), -1) / 16
        arrays[f"data-{number}.npz"] = {"x": x, "y": np.asarray(own["y"])}
    with FlowerProcesses([[sys.executable, "-c", worker]] * _NODES) as network:  # Flower's ClientApps need no worker.
        (network.folder / "job.json").write_text(json.dumps(job))
        for name, values in arrays.items():
            np.savez(network.folder / name, **values)
        network.run_app(Path(_flower_peer.__file__), seconds=60 + 60 * rounds)
        done = network.folder / "done.npz"
        if not done.exists():
            raise ConnectionError(f"Flower's strategy has not finished. {network.logs()}")
        with np.load(done) as file:
            return {name: file[name] for name in file.files}


def _difference(params: Any, found: Mapping[str, np.ndarray]) -> float:
    leaves = jax.tree.leaves(params)
    return max(float(np.abs(np.asarray(leaf) - found[f"arr_{i}"]).max()) for i, leaf in enumerate(leaves))


def _paddlefl() -> Iterator[Row]:
    yield Row(
        case="PaddleFL", measure="seconds of a round, median", ours="not run", seeds=1,
        note="its package needs Python 3.6 or older, and cannot be installed beside JAX",
    )  # fmt: skip


UNUS_PEERS = Reproduction(
    name="unus_peers",
    title="A deployed round of FedAvg beside that of Flower's own strategy: seconds, bytes and memory",
    paper="D. J. Beutel, T. Topal, A. Mathur, X. Qiu, J. Fernandez-Marques, Y. Gao, L. Sani, K. H. Li, T. Parcollet, P. P. B. "
    "de Gusmão, N. D. Lane. Flower: a friendly federated learning research framework. 2020. https://arxiv.org/abs/2007.14390",
    duration="5 min, mostly waiting for Flower's processes",
    required_data="none; Flower: pip install 'fedsim-jax[run,flower]'",
    cases=_cases,
    notes="Two nodes on one machine have half of the digits each. In a round each node takes one full-batch gradient step "
    "with learning rate 0.1 on the dense model (17,226 parameters), and the server takes the mean by the number of examples. "
    "Flower starts a process for each message, in which its own strategy's ClientApp imports JAX and compiles again, while a "
    "node of fedsim has a worker that stays. There are no published numbers. The thesis on UNUS compares with PaddleFL.",
)
