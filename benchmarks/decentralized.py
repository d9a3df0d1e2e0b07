"""D-PSGD over 64 nodes on a ring, beside a plain loop over the nodes in PyTorch; and a round of 10,000 nodes beside FedAvg.

    python -m benchmarks.decentralized [--rounds 30] [--python INTERPRETER]

On the ring both run the same job: the dense models of EMNIST (210,000 parameters) and of the digits (55,000), 20 random images
per node, and one step of SGD on all of them per round. The parameters of all nodes at the end are compared. The data are random
numbers, on which no accuracy is measured. Memory traffic limits the larger model: the models of all nodes have 54 MB.
``--python`` is an interpreter that has PyTorch; without it, an environment is created once under ``benchmarks/.envs``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedsim
from benchmarks import environments
from benchmarks.hardware import stamp
from fedsim import decentralized

NODES, BATCH, RATE, REPEATS = 64, 20, 0.05, 5
MANY = 10_000
MODELS = {
    "EMNIST's dense model": ((28, 28, 1), fedsim.models.emnist_dense),
    "the digits' dense model": ((8, 8, 1), fedsim.models.digits_dense),
}
RESULT = Path(__file__).parent / "results" / "cpu-decentralized.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--python", help="an interpreter that has PyTorch")
    arguments = parser.parse_args()
    fedsim.use_all_cores()
    rings = {name: ring(name, arguments.rounds, arguments.python) for name in MODELS}
    record = {**stamp("cpu"), "devices": len(jax.devices()), "ring": rings, "many": many()}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


def ring(name: str, rounds: int, python: str | None) -> dict[str, Any]:
    shape, model = MODELS[name]
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(NODES * BATCH, *shape)).astype(np.float32), draw.integers(0, 10, NODES * BATCH).astype(np.int32)
    data = fedsim.FederatedData.from_arrays({"x": x, "y": y}, sizes=np.full(NODES, BATCH))
    algorithm = decentralized.DPSGD(
        model=model(), client_optimizer=optax.sgd(RATE), batches=fedsim.Batches(size=BATCH, steps=1),
        topology=decentralized.ring(NODES),
    )  # fmt: skip
    start = algorithm.init(jax.random.key(0))
    seconds: dict[str, list[float]] = {}
    for execution in (fedsim.Jit(), fedsim.Pmap()):
        runs = [_run(dataclasses.replace(algorithm, execution=execution), start, data, rounds) for _ in range(REPEATS)]
        state, seconds[type(execution).__name__] = runs[0][0], [took for _, took in runs]
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder, "job.npz"), Path(folder, "result.npz")
        layers = [{name: np.asarray(x[0]) for name, x in layer.items()} for layer in start.models.values()]
        parameters = {f"{name}{i}": layer[name] for i, layer in enumerate(layers) for name in ("w", "b")}
        columns = {name: column.reshape(NODES, BATCH, *column.shape[1:]) for name, column in data.columns.items()}
        np.savez(job, layers=len(layers), rate=RATE, rounds=rounds, repeats=REPEATS, **parameters, **columns)
        command = [
            python or environments.python("torch", "cpu"),
            Path(__file__).parent / "peers" / "torch_gossip.py",
            job,
            result,
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
        theirs, final = json.loads(done.stdout), np.load(result)
    ours = [part for layer in state.models.values() for part in (np.swapaxes(layer["w"], 1, 2), layer["b"])]
    difference = max(float(np.abs(a - final[name]).max()) for a, name in zip(ours, final.files, strict=True))
    torch = min(theirs["seconds"])
    print(f"D-PSGD, ring of {NODES} nodes, {name}: a loop in PyTorch takes {torch * 1e3:.1f} ms a round")
    for execution_name, found in seconds.items():
        print(f"  fedsim, {execution_name}: {min(found) * 1e3:.1f} ms, {torch / min(found):.1f} times as fast")
    print(f"  largest difference of the parameters at the end: {difference:.1e}", flush=True)
    return {"rounds": rounds, "torch": theirs, "fedsim": seconds, "largest_difference": difference}


def many() -> dict[str, Any]:
    """Measures a round of 10,000 nodes on a random 4-regular graph, with the logistic model of the digits, beside FedAvg."""
    draw = np.random.default_rng(0)
    columns = {"x": draw.integers(0, 17, (MANY * BATCH, 8, 8, 1), np.uint8), "y": draw.integers(0, 10, MANY * BATCH, np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=np.full(MANY, BATCH))
    settings = {"model": fedsim.models.digits_logistic(), "client_optimizer": optax.sgd(RATE), "execution": fedsim.Jit()}
    settings["batches"] = fedsim.Batches(size=BATCH // 4)
    both = {
        "FedAvg": fedsim.algorithms.FedAvg(**settings),
        "DFedAvg": decentralized.DFedAvg(**settings, topology=decentralized.random_regular(MANY, degree=4)),
    }
    found = {
        name: [_run(algorithm, algorithm.init(jax.random.key(0)), data, 1)[1] for _ in range(REPEATS)]
        for name, algorithm in both.items()
    }
    ratio = min(found["DFedAvg"]) / min(found["FedAvg"])
    print(
        f"{MANY:,} nodes, logistic model: {min(found['DFedAvg']):.2f} s a round, {ratio:.2f} times FedAvg's of the same clients"
    )
    return {"seconds": found, "ratio": ratio}


def _run(algorithm: Any, start: Any, data: fedsim.FederatedData, rounds: int) -> tuple[Any, float]:
    """Returns the state after the rounds, and the seconds of a round without compilation."""
    everyone = np.arange(data.num_clients)
    cohorts = [fedsim.Cohort(data, everyone, round, fedsim.rng.root(0)) for round in range(rounds)]
    jax.block_until_ready(algorithm.apply_rounds(start, cohorts))
    begin = time.perf_counter()
    state, _ = jax.block_until_ready(algorithm.apply_rounds(start, cohorts))
    return state, (time.perf_counter() - begin) / rounds


if __name__ == "__main__":
    main()
