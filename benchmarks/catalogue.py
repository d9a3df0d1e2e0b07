"""Tables over whole registries, measured in turns of less than a second.

The generators have the same form as those of `benchmarks.tables`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import workload
from benchmarks.tables import CHECKED_ROUNDS, TOLERANCE, Record
from benchmarks.worker import ContenderError, Worker

TURNS_PER_SECONDS = 16  # turns in the time of --seconds, because there are many rows
WARMUP_TURNS = 4  # turns of an entry before the first that is timed
# Entries without randomness, whose parameters must agree. For APFL the global model is compared, because FedJAX leaves a factor
# out of the personal model's step.
EXACT = ("FedAvg", "FedProx", "Mime", "MimeLite", "AgnosticFedAvg", "HypCluster", "APFL")
QUANTIZED = ("UniformQuantizer", "UniformQuantizer, entropy", "RotatedUniformQuantizer", "Drive", "TernGrad")
MOST_ERROR = 1.1  # largest mean squared error of quantized updates, relative to FedJAX's

Timing = dict[str, float]
Leaves = list[np.ndarray]


def algorithms(args: argparse.Namespace) -> Iterator[Record]:
    """Every algorithm that trains a model: time of a round per gradient, relative to FedAvg; default: dense and CNN."""
    for model in args.models or ("dense", "cnn"):
        part = compare_all(_task(args, model, "algorithms"), "FedAvg", args)
        rows = []
        for name, pairs in part.pop("pairs").items():
            row: Record = {"model": model, "algorithm": name, "failure": part["failures"].get(name)}
            if pairs:
                gradients = [one["gradients"] / base["gradients"] for one, base in pairs]
                ratio = median(_ratio(pair) / count for pair, count in zip(pairs, gradients, strict=True))
                row |= {"gradients": median(gradients), "ms_per_round": median(one["ms_per_round"] for one, _ in pairs)}
                row |= {"to_fedavg": median(map(_ratio, pairs)), "per_gradient": ratio}
            rows.append(row)
        yield {"rows": rows, **part}


def aggregators(args: argparse.Namespace) -> Iterator[Record]:
    """FedAvg with every aggregator and compressor: time of a round relative to the plain mean; default: CNN."""
    for model in args.models or ("cnn",):
        part = compare_all(_task(args, model, "aggregators"), "Mean", args)
        rows = []
        for name, pairs in part.pop("pairs").items():
            streams = name not in part["about"]["side_by_side"]
            row: Record = {"model": model, "aggregator": name, "streams": streams, "failure": part["failures"].get(name)}
            if pairs:
                ratio = median(map(_ratio, pairs))
                row |= {"ms_per_round": median(one["ms_per_round"] for one, _ in pairs), "to_mean": ratio}
            rows.append(row)
        yield {"rows": rows, **part}


def fedjax(args: argparse.Namespace) -> Iterator[Record]:
    """FedJAX's algorithms and quantizers and the same of fedsim: time per client step; default: dense."""
    names = (*EXACT, *QUANTIZED)
    for model in args.models or ("dense",):
        checks = {} if args.unchecked else check(_task(args, model, "fedjax"))
        failures: dict[str, str] = {}
        turns: dict[str, dict[str, list[Timing]]] = {name: {"fedsim": [], "fedjax": []} for name in names}
        tasks = {library: _task(args, model, "fedjax", library) for library in ("fedsim", "fedjax")}
        with ExitStack() as stack:
            workers = {name: stack.enter_context(Worker(f"{name}_catalogue", task)) for name, task in tasks.items()}
            rounds = {}
            for name in names:
                for library, worker in workers.items():
                    try:
                        rounds[name, library] = rounds_per_turn(worker, name, tasks[library].per_dispatch, args)
                    except ContenderError as failure:
                        failures[name] = f"{library}: {failure}"
            for _ in range(args.repeats):
                for name in names:
                    for library, worker in workers.items() if name not in failures else ():
                        turns[name][library].append(turn(worker, name, rounds[name, library]))
        rows = []
        for name, of in turns.items():
            row: Record = {"model": model, "algorithm": name, "failure": failures.get(name), **checks.get(name, {})}
            if of["fedsim"]:
                per_step = {
                    library: [t["ms_per_round"] * t["rounds"] / t["steps"] for t in each] for library, each in of.items()
                }
                row |= {f"{library}_us_per_step": 1e3 * median(each) for library, each in per_step.items()}
                row["times_as_fast"] = median(a / b for a, b in zip(per_step["fedjax"], per_step["fedsim"], strict=True))
            rows.append(row)
        about = {library: worker.about for library, worker in workers.items()}
        if about["fedsim"]["digest"] != about["fedjax"]["digest"]:
            raise ContenderError("the contenders report different digests of the data: check workload.population")
        yield {"rows": rows, "turns": turns, "about": about}


def compare_all(task: workload.Task, baseline: str, args: argparse.Namespace) -> Record:
    """Times all entries of a catalogue and, between every two of them, the baseline, on the same cohorts."""
    failures: dict[str, str] = {}
    with Worker("fedsim_catalogue", task) as worker:
        rounds = rounds_per_turn(worker, baseline, task.per_dispatch, args)
        pairs: dict[str, list[tuple[Timing, Timing]]] = {name: [] for name in worker.about["names"] if name != baseline}
        for name in pairs:
            try:
                warm_up(worker, name, rounds)
            except ContenderError as failure:
                failures[name] = str(failure)
                print(f"  {name}: {failure}", file=sys.stderr)
        names = [name for name in pairs if name not in failures]
        for _ in range(args.repeats):
            for first, second in zip(names[::2], [*names[1::2], None], strict=False):
                before, base = turn(worker, first, rounds), turn(worker, baseline, rounds)
                pairs[first].append((before, base))
                if second:
                    pairs[second].append((turn(worker, second, rounds), base))
        return {"pairs": pairs, "turns": pairs, "failures": failures, "about": worker.about}


def turn(worker: Worker, name: str, rounds: int) -> Timing:
    """Times whole rounds of one entry, after as many untimed ones, because the host may have reclaimed the entry's memory."""
    worker("run", name=name, rounds=rounds)
    reply = worker("run", name=name, rounds=rounds)
    each = {
        f"{kind}_per_round": 1e3 * reply[seconds] / rounds for kind, seconds in (("ms", "seconds"), ("cpu_ms", "cpu_seconds"))
    }
    return {"rounds": rounds, **each, **reply["result"]}


def warm_up(worker: Worker, name: str, rounds: int) -> None:
    """Runs turns that are not timed. They compile, and they write the memory for the clients' rows for the first time.

    The operating system provides memory page by page at the first write. On a rented machine this can take longer than the
    computation of a round. After some turns every client has participated, and the store of rows has reached its final size.
    """
    for _ in range(WARMUP_TURNS):
        worker("run", name=name, rounds=rounds)


def rounds_per_turn(worker: Worker, name: str, chunk: int, args: argparse.Namespace) -> int:
    """Compiles an entry, warms it up, and returns how many rounds fill a turn."""
    for _ in range(2):
        worker("run", name=name, rounds=chunk)
    took = worker("run", name=name, rounds=chunk)["seconds"]
    rounds = chunk * max(1, round(args.seconds / TURNS_PER_SECONDS / took))
    warm_up(worker, name, rounds)
    return rounds


def check(task: workload.Task) -> dict[str, Record]:
    """Trains with both libraries from the same parameters, as in `benchmarks.tables.check`, and compares the results.

    Without randomness, parameters must agree after some rounds. Quantizers draw at random; there the mean squared error of
    a round with quantized updates, relative to one without, must be at most `MOST_ERROR` times FedJAX's.
    """
    checks: dict[str, Record] = {}
    start = workload.initial_leaves(task.model)
    with tempfile.TemporaryDirectory() as folder:
        for data, exact in (("repeated", set(EXACT) - {"AgnosticFedAvg"}), ("even", {"AgnosticFedAvg"})):
            equal = dataclasses.replace(task, data=data, dropout=False, server="average", per_dispatch=1)
            results = {library: _results(library, equal, exact, Path(folder)) for library in ("fedsim", "fedjax")}
            for name in exact:
                if not all((name, CHECKED_ROUNDS) in of for of in results.values()):
                    checks[name] = {"equal": False}
                    continue
                ours, theirs = (of[name, CHECKED_ROUNDS] for of in results.values())
                began = [np.stack([a, b]) for a, b in zip(start, workload.initial_leaves(task.model, 1), strict=True)]
                change = _largest(theirs, began if name == "HypCluster" else start)
                error = _largest(ours, theirs) / change
                checks[name] = {"equal": error < TOLERANCE, "error": error}
            for name in QUANTIZED if data == "repeated" else ():
                ours, theirs = (
                    _squares(of[name, 1], of["FedAvg", 1]) / _squares(start, of["FedAvg", 1]) for of in results.values()
                )
                # FedJAX pads tensors to powers of two before it rotates them, and sends a bit for each padded coordinate.
                theirs *= _padding(start) if name == "Drive" else 1
                checks[name] = {"equal": ours <= MOST_ERROR * theirs, "nmse": ours, "fedjax_nmse": theirs}
    return checks


def _results(
    library: str, task: workload.Task, exact: Collection[str], folder: Path
) -> dict[tuple[str, int], list[np.ndarray]]:
    """Returns the parameters of each entry by its name and the number of rounds."""
    results = {}
    with Worker(f"{library}_catalogue", task) as worker:
        for name in (*exact, *QUANTIZED) if task.data == "repeated" else exact:
            done = 0
            for rounds in (1, CHECKED_ROUNDS) if name in exact else (1,):
                try:
                    worker("run", name=name, rounds=rounds - done)
                    worker("save", name=name, path=str(folder / "saved.npz"))
                except ContenderError as failure:
                    print(f"  {library}, {name}: {failure}", file=sys.stderr)
                    break
                results[name, rounds] = list(np.load(folder / "saved.npz").values())
                done = rounds
    return results


def _task(args: argparse.Namespace, model: str, catalogue: str, library: str = "fedsim") -> workload.Task:
    several = 20 if model != "cnn" and library == "fedsim" else 1
    return workload.Task(model=model, device=args.device, per_dispatch=several, catalogue=catalogue)


def _ratio(pair: tuple[Timing, Timing]) -> float:
    return pair[0]["ms_per_round"] / pair[1]["ms_per_round"]


def _padding(leaves: Leaves) -> float:
    """Returns the number of coordinates with every tensor padded to a power of two, relative to the number without padding."""
    return sum(1 << (leaf.size - 1).bit_length() for leaf in leaves) / sum(leaf.size for leaf in leaves)


def _largest(a: Leaves, b: Leaves) -> float:
    return float(max(np.abs(x - y).max() for x, y in zip(a, b, strict=True)))


def _squares(a: Leaves, b: Leaves) -> float:
    return float(sum(np.square(x - y, dtype=np.float64).sum() for x, y in zip(a, b, strict=True)))


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[Any]]] = {
    "algorithms": algorithms,
    "aggregators": aggregators,
    "fedjax-algorithms": fedjax,
}
