"""Times fedsim's rounds on a GPU, in at most six minutes: ``python -m benchmarks.gpu``.

It prints a table with hardware, versions and date, and writes it to ``results/gpu-fedsim.json``. Client sizes are those of
EMNIST's writers and Stack Overflow's users; examples are generated (`emnist62_like`, `stackoverflow_like`). Without a GPU
it only tests itself: it runs the same rows with a few clients on a CPU and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

import fedsim
from benchmarks import hardware
from benchmarks.__main__ import show

RESULT = Path(__file__).parent / "results" / "gpu-fedsim.json"


class Row(NamedTuple):
    """A row of the table; ``at_most`` is the target for a round on one H100 or H200, in milliseconds."""

    model: str
    clients: int
    deterministic: bool
    at_most: float | None
    batch: int = 20


ROWS = [
    Row("emnist_logistic", 10, False, 1.5),
    Row("emnist_dense", 10, False, 2.5),
    Row("emnist_dense", 1000, False, 45),
    Row("emnist_cnn", 10, False, 14),
    Row("emnist_cnn", 10, True, 20),
    Row("emnist_cnn", 50, False, None),
    Row("stackoverflow_lstm", 50, False, 200, batch=16),
]


def measured(row: Row, population: int, seconds: float) -> dict[str, Any]:
    """Times whole rounds, several per dispatch, after a dispatch that compiles. The time is the least of three."""
    name = "stackoverflow_like" if row.model.startswith("stackoverflow") else "emnist62_like"
    data = _data(name, population)
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.get(row.model),
        client_optimizer=optax.sgd(0.03),
        server_optimizer=optax.adam(0.003, b2=0.99, eps=1e-4),
        batches=fedsim.Batches(size=row.batch),
        execution=fedsim.Jit(deterministic=row.deterministic),
    )
    clients = min(row.clients, population)
    sampler = fedsim.UniformSampler(data, clients=clients, seed=0)
    state = algorithm.init(jax.random.key(0))

    def run(first: int, rounds: int, per_dispatch: int) -> float:
        nonlocal state
        start = time.perf_counter()
        cohorts = [sampler.cohort(first + i) for i in range(rounds)]
        state, _ = algorithm.apply_rounds(state, cohorts, max_rounds=per_dispatch)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / rounds

    compiled = run(0, 1, 20)
    rounds = max(1, min(20, int(seconds / run(1, 1, 20))))
    per_round = min(run(2 + turn * rounds, rounds, 20) for turn in range(3))
    steps = sum(int(algorithm.batches.num_steps(sampler.cohort(2 + i).sizes).sum()) for i in range(rounds)) / rounds
    return {
        "model": row.model,
        "clients": clients,
        "batch": row.batch,
        "deterministic": row.deterministic,
        "ms a round": 1e3 * per_round,
        "at most": row.at_most,
        "µs a client step": 1e6 * per_round / steps,
        "first round, s": compiled,
    }


def _data(name: str, clients: int) -> fedsim.FederatedData:
    key = name, clients
    if key not in _loaded:
        _loaded[key] = fedsim.datasets.load(name, clients=clients).train
    return _loaded[key]


_loaded: dict[tuple[str, int], fedsim.FederatedData] = {}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints and returns the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(ROWS)), help="indices of rows; default: all")
    chosen = parser.parse_args(arguments).rows
    on_gpu = jax.default_backend() == "gpu"
    rows = []
    for number in chosen:
        row = ROWS[number]
        rows.append(measured(row, 2000, 2.0) if on_gpu else measured(row._replace(clients=2, at_most=None), 4, 0.1))
        print(f"{row.model}, {rows[-1]['clients']} clients: {rows[-1]['ms a round']:.2f} ms a round", flush=True)
    device = jax.devices()[0]
    stamp = hardware.stamp("gpu" if on_gpu else "cpu") | {"device": device.device_kind, "jax": jax.__version__}
    print(f"{device.device_kind}, jax {jax.__version__}, {stamp['date'][:10]}\n")
    show(rows)
    if on_gpu:
        RESULT.write_text(json.dumps({"table": "gpu-fedsim", **stamp, "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
