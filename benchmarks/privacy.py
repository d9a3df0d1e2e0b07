"""A round with differential privacy beside one without.

    python -m benchmarks.privacy [--models dense cnn] [--turns 5]

Ten clients in turns, one epoch of batches of 20, on random numbers in the shapes of EMNIST, a stand-in on which no accuracy is
measured. *to mean* is the median over turns of the time of a round relative to that with the plain mean in the same turn; the
processor time is that of all cores, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import optax

import fedsim
from benchmarks.hardware import stamp
from benchmarks.primitives import population
from fedsim import privacy
from fedsim.aggregators import AdaptiveClip, Aggregator, GaussianMechanism, MatrixMechanism, Mean

RESULT = Path(__file__).parent / "results" / "cpu-privacy.json"
# The models, with the number of rounds of a turn, all of them dispatched at once.
MODELS = {"dense": (fedsim.models.emnist_dense, 20), "cnn": (fedsim.models.emnist_cnn, 4)}
CLIENTS = 10
# Their limits are 1.1 times a round without privacy for independent noise, and 1.25 times for noise that is correlated.
MATRICES = ("tree", "banded", "buffered")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    fedsim.use_all_cores()
    sizes = np.maximum(10, np.random.default_rng(1).lognormal(4.5, 0.9, 100)).astype(int)
    sampler = fedsim.samplers.CyclicSampler(population(sizes), clients=CLIENTS, seed=0)
    record: dict[str, Any] = {**stamp("cpu"), "turns": args.turns, "rows": []}
    for model in args.models:
        make, rounds = MODELS[model]
        runs = {name: timed(make(), aggregator, sampler, rounds) for name, aggregator in aggregators(sampler, rounds)}
        turns = [{name: run() for name, run in runs.items()} for _ in range(args.turns)]
        for name in runs:
            pairs = [(turn[name], turn["mean"]) for turn in turns]
            row = {"model": model, "aggregator": name, "ms_per_round": 1e3 * median(one[0] for one, _ in pairs) / rounds}
            row |= {"to_mean": median(one[0] / base[0] for one, base in pairs)}
            row |= {"processor_to_mean": median(one[1] / base[1] for one, base in pairs)}
            print(row, flush=True)
            record["rows"].append(row)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


def aggregators(sampler: fedsim.Sampler, rounds: int) -> list[tuple[str, Aggregator]]:
    """Returns the plain mean, and the mechanisms by name."""
    options: dict[str, Any] = {"clip": 0.5, "denominator": CLIENTS}
    found: list[tuple[str, Aggregator]] = [
        ("mean", Mean()),
        ("independent", GaussianMechanism(1.0, **options)),
        ("adaptive", GaussianMechanism(1.0, clip=AdaptiveClip(), denominator=CLIENTS)),
    ]
    for name in MATRICES:
        matrix = privacy.noise_matrix(name, sampler, rounds=rounds)
        found.append((name, MatrixMechanism(1.0, **options, matrix=matrix)))
    return found


def timed(
    model: fedsim.Model, aggregator: Aggregator, sampler: fedsim.Sampler, rounds: int
) -> Callable[[], tuple[float, float]]:
    """Returns a function that runs the rounds and returns their seconds, and those of the processor."""
    algorithm = fedsim.algorithms.FedAvg(
        model=model,
        client_optimizer=optax.sgd(0.03),
        batches=fedsim.Batches(size=20),
        weighting="uniform",
        aggregator=aggregator,
    )
    cohorts, state = list(sampler.rounds(rounds)), algorithm.init(jax.random.key(0))
    jax.block_until_ready(algorithm.apply_rounds(state, cohorts))

    def run() -> tuple[float, float]:
        start, start_cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(algorithm.apply_rounds(state, cohorts))
        return time.perf_counter() - start, time.process_time() - start_cpu

    return run


if __name__ == "__main__":
    main()
