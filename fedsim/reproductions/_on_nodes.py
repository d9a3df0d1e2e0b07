"""A few rounds on the nodes of a deployment, beside the same rounds simulated."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from fedsim.configuration import RunConfig, Settings, build
from fedsim.deployment import deploy
from fedsim.experiment import run_experiment
from fedsim.reproductions._reproduction import Request, Row

_NODES, _ROUNDS = 4, 5


def on_nodes(request: Request, config: RunConfig, title: str) -> Iterator[Row]:
    """Deploys some rounds of a configuration on four nodes on this machine, and simulates the same rounds.

    Args:
      request: the number of rounds; if Flower is not installed, its log says so, and there are no rows.
      config: its number of rounds is replaced.
      title: of the rows.

    Returns:
      The largest difference of a parameter at the end, and the median of the seconds of a deployed round.
    """
    if importlib.util.find_spec("flwr") is None:
        request.log("The rounds on nodes are not run: pip install 'fedsim-jax[run,flower]'.")
        return
    extent, began = request.extent(seeds=1, rounds=_ROUNDS), time.perf_counter()
    config = dataclasses.replace(config, rounds=extent.rounds, evaluate_every=extent.rounds)
    with tempfile.TemporaryDirectory() as name:
        far, near = Path(name) / "far", Path(name) / "near"
        deployed = deploy(config, Settings(folder=str(far), progress=False), nodes=_NODES, table=False)
        lines = [json.loads(line) for line in (far / "deliveries.jsonl").read_text(encoding="utf-8").splitlines()]
        settings = Settings(folder=str(near), execution="jit", progress=False)
        simulated = run_experiment(build(config, settings), config, settings, progress=False)
    leaves = zip(jax.tree.leaves(deployed.state.params), jax.tree.leaves(simulated.state.params), strict=True)
    difference = max(float(np.abs(np.asarray(one) - np.asarray(other)).max()) for one, other in leaves)
    values = {
        "largest difference of a parameter from a simulation": (difference, 8),
        "seconds of a deployed round, median": (statistics.median(line["seconds"] for line in lines), 1),
    }
    seconds = time.perf_counter() - began
    for measure, (value, digits) in values.items():
        yield Row.of_seeds(
            [value],
            digits=digits,
            case=title,
            measure=measure,
            seconds=seconds,
            # Where the data are on this machine tells nothing about the result.
            settings={"nodes": _NODES, "rounds": extent.rounds, "config": dataclasses.asdict(config) | {"data": None}},
            reduced=extent.reduced(),
        )
        seconds = 0.0
