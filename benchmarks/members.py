"""`fedsim.population` beside separate calls: 16 learning rates, 2 seeds, logistic regression, 100 rounds of 10 clients.

    python -m benchmarks.members [--rounds 100]

Every separate call is made as a user makes it, with ``optax.sgd(rate)``, and its compilation is counted. The data are random
numbers in the shapes of EMNIST, a stand-in on which no accuracy is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedsim
from benchmarks.hardware import stamp
from benchmarks.primitives import population

RESULT = Path(__file__).parent / "results" / "cpu-members.json"
RATES = [float(rate) for rate in np.geomspace(0.003, 0.3, 16)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    fedsim.use_all_cores()
    sizes = np.maximum(10, np.random.default_rng(1).lognormal(4.5, 0.9, 100)).astype(int)
    data, model = population(sizes), fedsim.models.emnist_logistic()

    def make(rate: Any) -> fedsim.Algorithm:
        return fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(rate), batches=fedsim.Batches(size=20))

    def sampler(seed: int) -> fedsim.UniformSampler:
        return fedsim.UniformSampler(data, clients=10, seed=seed)

    record: dict[str, Any] = {**stamp("cpu"), "rounds": rounds}
    make(RATES[0]), fedsim.population  # which imports what the clock should not count
    start = time.perf_counter()
    for rate in RATES:
        for seed in range(2):
            algorithm, first = make(rate), sampler(seed).cohort(0)
            state = algorithm.init(fedsim.rng.stream(first.key, "init"))
            jax.block_until_ready(algorithm.apply_rounds(state, list(sampler(seed).rounds(rounds))))
    record["separate calls"] = time.perf_counter() - start
    for how in ("devices", "vmap", "sequential"):
        start = time.perf_counter()
        fedsim.population(make, {"rate": RATES}, 2, sampler=sampler, rounds=rounds, how=how, progress=False)  # type: ignore[arg-type]
        record[how] = time.perf_counter() - start
    print(record)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
