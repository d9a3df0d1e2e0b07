"""Tables over all of a registry, each in turns of less than a second.

As in `benchmarks.tables`, of whose generators these are more.
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
from benchmarks.tables import CHECKED_ROUNDS, TOLERANCE, Part
from benchmarks.worker import ContenderError, Worker

TURNS_IN = 16  # that fill --seconds: there are many rows
SETTLING = 4  # whole turns of an entry before it is timed at all
# What has no randomness is the same in both; of APFL, its global model: FedJAX leaves a factor out of the personal one's step.
EXACT = ("FedAvg", "FedProx", "Mime", "MimeLite", "AgnosticFedAvg", "HypCluster", "APFL")
QUANTIZED = ("UniformQuantizer", "UniformQuantizer, entropy", "RotatedUniformQuantizer", "Drive", "TernGrad")
NO_WORSE = 1.1  # times FedJAX's mean squared error of what arrives

Turn = dict[str, float]
Leaves = list[np.ndarray]


def algorithms(args: argparse.Namespace) -> Iterator[Part]:
    """All algorithms that train: time of a round per gradient that they need, against FedAvg's; dense and CNN by default."""
    for model in args.models or ("dense", "cnn"):
        part = within(_task(args, model, "algorithms"), "FedAvg", args)
        rows = []
        for name, pairs in part.pop("pairs").items():
            row: Part = {"model": model, "algorithm": name, "failure": part["failures"].get(name)}
            if pairs:
                gradients = [one["gradients"] / base["gradients"] for one, base in pairs]
                ratio = median(_ratio(pair) / of_it for pair, of_it in zip(pairs, gradients, strict=True))
                row |= {"gradients": median(gradients), "ms_per_round": median(one["ms_per_round"] for one, _ in pairs)}
                row |= {"to_fedavg": median(map(_ratio, pairs)), "per_gradient": ratio}
            rows.append(row)
        yield {"rows": rows, **part}


def aggregators(args: argparse.Namespace) -> Iterator[Part]:
    """FedAvg with every aggregator and compressor: time of a round against that with the plain mean; CNN."""
    for model in args.models or ("cnn",):
        part = within(_task(args, model, "aggregators"), "Mean", args)
        rows = []
        for name, pairs in part.pop("pairs").items():
            streams = name not in part["about"]["side_by_side"]
            row: Part = {"model": model, "aggregator": name, "streams": streams, "failure": part["failures"].get(name)}
            if pairs:
                ratio = median(map(_ratio, pairs))
                row |= {"ms_per_round": median(one["ms_per_round"] for one, _ in pairs), "to_mean": ratio}
            rows.append(row)
        yield {"rows": rows, **part}


def fedjax(args: argparse.Namespace) -> Iterator[Part]:
    """FedJAX's own algorithms and quantizers against the same of fedsim: time per client step; dense by default."""
    names = (*EXACT, *QUANTIZED)
    for model in args.models or ("dense",):
        checks = {} if args.unchecked else check(_task(args, model, "fedjax"))
        failures: dict[str, str] = {}
        turns: dict[str, dict[str, list[Turn]]] = {name: {"fedsim": [], "fedjax": []} for name in names}
        tasks = {library: _task(args, model, "fedjax", library) for library in ("fedsim", "fedjax")}
        with ExitStack() as stack:
            workers = {name: stack.enter_context(Worker(f"{name}_catalogue", task)) for name, task in tasks.items()}
            rounds = {}
            for name in names:
                for library, worker in workers.items():
                    try:
                        rounds[name, library] = fill(worker, name, tasks[library].per_dispatch, args)
                    except ContenderError as failure:
                        failures[name] = f"{library}: {failure}"
            for _ in range(args.repeats):
                for name in names:
                    for library, worker in workers.items() if name not in failures else ():
                        turns[name][library].append(turn(worker, name, rounds[name, library]))
        rows = []
        for name, of in turns.items():
            row: Part = {"model": model, "algorithm": name, "failure": failures.get(name), **checks.get(name, {})}
            if of["fedsim"]:
                per_step = {
                    library: [t["ms_per_round"] * t["rounds"] / t["steps"] for t in each] for library, each in of.items()
                }
                row |= {f"{library}_us_per_step": 1e3 * median(each) for library, each in per_step.items()}
                row["times_as_fast"] = median(a / b for a, b in zip(per_step["fedjax"], per_step["fedsim"], strict=True))
            rows.append(row)
        about = {library: worker.about for library, worker in workers.items()}
        if about["fedsim"]["digest"] != about["fedjax"]["digest"]:
            raise ContenderError("the contenders were given different data")
        yield {"rows": rows, "turns": turns, "about": about}


def within(task: workload.Task, baseline: str, args: argparse.Namespace) -> Part:
    """Times all of fedsim's catalogue against one of it, whose turns lie between those of every two, on the same cohorts."""
    failures: dict[str, str] = {}
    with Worker("fedsim_catalogue", task) as worker:
        rounds = fill(worker, baseline, task.per_dispatch, args)
        pairs: dict[str, list[tuple[Turn, Turn]]] = {name: [] for name in worker.about["names"] if name != baseline}
        for name in pairs:
            try:
                settle(worker, name, rounds)
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


def turn(worker: Worker, name: str, rounds: int) -> Turn:
    """Whole rounds of one entry, after as many that are not timed: while the others had theirs, its memory may have gone."""
    worker("run", name=name, rounds=rounds)
    reply = worker("run", name=name, rounds=rounds)
    each = {
        f"{kind}_per_round": 1e3 * reply[seconds] / rounds for kind, seconds in (("ms", "seconds"), ("cpu_ms", "cpu_seconds"))
    }
    return {"rounds": rounds, **each, **reply["result"]}


def settle(worker: Worker, name: str, rounds: int) -> None:
    """Whole turns that are not timed: they compile, and take the memory that what clients keep will have from then on.

    A system gives memory page by page when it is written first, which on a rented machine, whose host must find it, too, can
    take longer than all that a round computes; rows lie in memory that was written before once every client has come and the
    store of rows has grown to what it needs, some turns later.
    """
    for _ in range(SETTLING):
        worker("run", name=name, rounds=rounds)


def fill(worker: Worker, name: str, chunk: int, args: argparse.Namespace) -> int:
    """Compiles an entry, finds how many rounds fill a turn, and settles it."""
    for _ in range(2):
        worker("run", name=name, rounds=chunk)
    took = worker("run", name=name, rounds=chunk)["seconds"]
    rounds = chunk * max(1, round(args.seconds / TURNS_IN / took))
    settle(worker, name, rounds)
    return rounds


def check(task: workload.Task) -> dict[str, Part]:
    """Has both train from the same parameters, as in `benchmarks.tables.check`, and compares them.

    Where nothing is random, parameters must agree after some rounds. Where it is, the mean squared error of a round with
    quantized updates, relative to one without, must not be larger than FedJAX's: the draws cannot agree.
    """
    checks: dict[str, Part] = {}
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
                moved = _largest(theirs, began if name == "HypCluster" else start)
                error = _largest(ours, theirs) / moved
                checks[name] = {"equal": error < TOLERANCE, "error": error}
            for name in QUANTIZED if data == "repeated" else ():
                ours, theirs = (
                    _squares(of[name, 1], of["FedAvg", 1]) / _squares(start, of["FedAvg", 1]) for of in results.values()
                )
                # FedJAX rotates tensors padded to powers of two, and sends a bit for each coordinate of these.
                theirs *= _padding(start) if name == "Drive" else 1
                checks[name] = {"equal": ours <= NO_WORSE * theirs, "nmse": ours, "fedjax_nmse": theirs}
    return checks


def _results(
    library: str, task: workload.Task, exact: Collection[str], folder: Path
) -> dict[tuple[str, int], list[np.ndarray]]:
    """Parameters of each entry after so many rounds."""
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


def _ratio(pair: tuple[Turn, Turn]) -> float:
    return pair[0]["ms_per_round"] / pair[1]["ms_per_round"]


def _padding(leaves: Leaves) -> float:
    """How many times as many coordinates there are if every tensor is padded to a power of two."""
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
