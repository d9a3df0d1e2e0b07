"""Rounds with clients that start from older models beside synchronous rounds, per client step.

    python -m benchmarks.clock [--rounds 40]

FedBuff (ten updates a server step, 30 clients in flight, log-normal speeds) and synchronous rounds of ten clients run by turns
on one device. The data are random numbers in the shapes of EMNIST, a stand-in on which no accuracy is measured. The last lines
time the simulation of the events alone, without faults and with a fault model that has none.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedsim
from benchmarks.hardware import stamp
from benchmarks.primitives import population
from fedsim import systems
from fedsim.configuration import scheduled

RESULT = Path(__file__).parent / "results" / "cpu-clock.json"
MODELS = {
    "logistic": (fedsim.models.emnist_logistic, 1),
    "dense": (fedsim.models.emnist_dense, 1),
    "cnn": (fedsim.models.emnist_cnn, 8),
}
PHONES = systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0))
FEDBUFF = systems.Buffered(size=10, concurrency=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    sizes = np.maximum(10, np.random.default_rng(1).lognormal(4.5, 0.9, 100)).astype(int)
    data = population(sizes)
    sampler = fedsim.UniformSampler(data, clients=10, seed=0)
    record: dict[str, Any] = {**stamp("cpu"), "rounds": rounds, "us_per_step": {}}
    for name, (make, factor) in MODELS.items():
        algorithm = fedsim.algorithms.FedAvg(
            model=make(), client_optimizer=optax.sgd(0.05), batches=fedsim.Batches(size=20), execution=fedsim.Jit()
        )
        count = max(3, rounds // factor)
        made = scheduled(algorithm, sampler, rounds=count, synchronization=FEDBUFF, devices=PHONES)
        runs = {"synchronous": timed(algorithm, sampler, count), "FedBuff": timed(made.algorithm, made.sampler, count)}
        record["us_per_step"][name] = {kind: min(times) * 1e6 for kind, times in by_turns(runs, 5).items()}
        print(f"{name}: {record['us_per_step'][name]}", flush=True)

    def simulate(faults: systems.Faults | None) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            steps = fedsim.Batches(size=20).num_steps(sizes)
            systems.schedule(sampler, 2000, steps=steps, synchronization=FEDBUFF, devices=PHONES, faults=faults)
            return time.perf_counter() - start

        return run

    times = by_turns({"without": simulate(None), "with Faults()": simulate(systems.Faults())}, 5)
    record["seconds of 2,000 simulated server steps"] = {kind: min(found) for kind, found in times.items()}
    print(record)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


def timed(algorithm: Any, sampler: Any, rounds: int) -> Callable[[], float]:
    """Returns a function that runs the rounds and returns the seconds per client step."""
    cohorts = list(sampler.rounds(rounds))
    steps = sum(int(cohort.num_steps(algorithm.batches).sum()) for cohort in cohorts)
    state = algorithm.with_memory(algorithm.init(jax.random.key(0)), cohorts[0].data)
    jax.block_until_ready(algorithm.apply_rounds(state, cohorts))

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(algorithm.apply_rounds(state, cohorts))
        return (time.perf_counter() - start) / steps

    return run


def by_turns(runs: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            found[name].append(run())
    return found


if __name__ == "__main__":
    main()
