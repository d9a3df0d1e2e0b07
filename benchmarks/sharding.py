"""Time of a round on a mesh against `fedsim.Pmap`, and of two processes against one with as many devices.

    python -m benchmarks.sharding

Clients train a dense network on random images. The two processes run on this machine, each on one core, as a scheduler such as
SLURM starts them, and exchange messages on loopback.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import optax

import fedsim
from benchmarks.clock import by_turns, timed
from benchmarks.hardware import stamp

RESULT = Path(__file__).parent / "results" / "cpu-sharding.json"
ROUNDS, TURNS = 5, 9


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(process(*sys.argv[1:])))
        return
    record: dict[str, Any] = stamp("cpu")
    fedsim.use_all_cores(4)
    ways = {"Pmap(devices=4)": fedsim.Pmap(devices=4), "Sharded(clients=4)": fedsim.Sharded(clients=4)}
    times = by_turns({name: timed(*federation(execution), ROUNDS) for name, execution in ways.items()}, TURNS)
    record["us_per_step"] = {name: 1e6 * median(of) for name, of in times.items()}
    pmap, sharded = times.values()
    record["Sharded(clients=4) to Pmap(devices=4)"] = median(b / a for a, b in zip(pmap, sharded, strict=True))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    # They take turns: one process, two, and one again.
    before, two, after = started(["1", ""]), started(["2", address]), started(["1", ""])
    record["us_per_step of processes"] = {"1": [before, after], "2": two}
    record["2 processes to 1"] = 2 * two / (before + after)
    print(json.dumps(record, indent=1))
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


def started(arguments: list[str]) -> float:
    """Returns the microseconds of a local step in so many processes."""
    command = [sys.executable, "-m", "benchmarks.sharding", *arguments]
    running = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True) for n in range(int(arguments[0]))]
    outputs = [process.communicate()[0] for process in running]
    return json.loads(outputs[0].splitlines()[-1])


def process(processes: str, address: str, number: str) -> float:
    if address:
        # Otherwise each process would divide its products over the cores of both.
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(number)]})
    fedsim.use_all_cores(2 // int(processes))
    if address:
        fedsim.distributed.initialize(address, int(processes), int(number))
    run = timed(*federation(fedsim.Pmap(devices=2)), ROUNDS)
    return 1e6 * median(by_turns({"": run}, TURNS)[""])


def federation(execution: fedsim.Execution) -> tuple[fedsim.Algorithm, Any]:
    draw = np.random.default_rng(0)
    columns = {
        "x": draw.integers(0, 256, (100 * 100, 28, 28, 1)).astype(np.uint8),
        "y": draw.integers(0, 62, 100 * 100).astype(np.int32),
    }
    data = fedsim.FederatedData.from_arrays(columns, sizes=[100] * 100)
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.emnist_dense(),
        client_optimizer=optax.sgd(0.03),
        batches=fedsim.Batches(size=20),
        execution=execution,
    )
    return algorithm, fedsim.UniformSampler(data, clients=20, seed=0)


if __name__ == "__main__":
    main()
