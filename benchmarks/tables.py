"""The tables. Each is a generator of parts ``{"rows": ..., ...}``: the rows are printed, everything is recorded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks import populations, workload
from benchmarks.worker import ROOT, ContenderError, Entrant, Worker

MODELS = ("logistic", "dense", "cnn")
PEERS = ("fedjax", "pfl", "drjax", "flower")
CHECKED_ROUNDS = 3
TOLERANCE = 1e-3  # of the largest change of any parameter over the checked rounds

Record = dict[str, Any]


def rotate(entrants: Collection[Entrant], args: argparse.Namespace, turns: int = 1) -> None:
    """Runs contenders in turns (A B C A B C), so that a drift of the machine's speed affects all of them.

    A repeat may be divided into several short ``turns``. A rented core changes its speed for seconds at a time, by a third
    where it shares caches with other users. Over many short turns the speed is the same for all on average.
    """
    with ExitStack() as stack:
        for entrant in entrants:
            stack.callback(entrant.close)
        for _ in range(args.repeats * turns):
            for entrant in entrants:
                entrant.turn(args.seconds / turns)


def ratio(ours: Entrant, theirs: Entrant) -> float | None:
    """Returns the time per client step relative to ``ours``: the median over rotations of the ratio within a rotation."""
    pairs = zip(theirs.times, ours.times, strict=False)
    ratios = [a["us_per_step"] / b["us_per_step"] for a, b in pairs]
    return median(ratios) if ratios else None


def rounds(args: argparse.Namespace) -> Iterator[Record]:
    """Time of whole rounds of 10 clients, also relative to fedsim; all contenders in rotation."""
    names = [name for name in args.contenders or ("fedsim", "floor", *PEERS) if name not in args.without]
    for model in args.models or MODELS:
        yield compare(workload.Task(model=model, device=args.device), 1 if model == "cnn" else 20, names, args)


def lstm(args: argparse.Namespace) -> Iterator[Record]:
    """Time of whole rounds of next-word prediction, 10 clients, batch size 16: fedsim, floor and FedJAX in rotation."""
    task = workload.Task(model="lstm", data="sentences", batch=16, device=args.device)
    yield compare(task, 1, ["fedsim", "floor", "fedjax"], args)


def compare(task: workload.Task, several: int, names: list[str], args: argparse.Namespace) -> Record:
    """Checks that contenders compute the same, then times them in rotation.

    fedsim and the floor run ``several`` rounds per dispatch.
    """
    checks = {} if args.unchecked else check(task, names)
    many = dataclasses.replace(task, per_dispatch=several)
    entrants = {name: Entrant(name, many if name in ("fedsim", "floor") else task, restarts=name == "flower") for name in names}
    if "fedsim" in names and many != task:  # shows the gain of several rounds per dispatch
        entrants["fedsim, one round a dispatch"] = Entrant("fedsim", task)
    rotate(entrants.values(), args, turns=4)
    if len({entrant.about["digest"] for entrant in entrants.values() if entrant.about}) > 1:
        raise ContenderError("the contenders report different digests of the data: check workload.population")
    rows = []
    for label, entrant in entrants.items():
        equal = checks.get(entrant.name, {}).get("equal")
        row: Record = {"model": task.model, "contender": label, "equal": equal, "turns": len(entrant.times)}
        if entrant.times:
            row |= {key: median(t[key] for t in entrant.times) for key in ("us_per_step", "ms_per_round")}
            row["relative_to_fedsim"] = ratio(entrants["fedsim"], entrant) if "fedsim" in entrants else None
        rows.append(row | {"failure": entrant.failure})
    turns = {label: entrant.times for label, entrant in entrants.items()}
    about = {label: entrant.about for label, entrant in entrants.items()}
    return {"rows": rows, "checks": checks, "turns": turns, "about": about}


def check(task: workload.Task, names: list[str]) -> dict[str, Record]:
    """Trains the same rounds from the same parameters with each contender, and compares the results with the reference.

    `workload.population` explains why shuffling does not matter. Dropout is off, because its random draws differ between
    libraries. Flower is checked with plain averaging: its Adam corrects the bias of round r as if it were round r + 1.
    """
    checks: dict[str, Record] = {}
    references: dict[str, list[np.ndarray]] = {}
    start = workload.initial_leaves(task.model)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name == "floor":  # it trains nothing federated; its steps are those of the reference
                continue
            server, path = "average" if name == "flower" else "adam", f"{folder}/{name}.npz"
            checked = dataclasses.replace(task, data="repeated", dropout=False, server=server)
            try:
                if server not in references:
                    with Worker("floor", checked) as floor:
                        floor("reference", path=f"{folder}/{server}", rounds=CHECKED_ROUNDS)
                    references[server] = list(np.load(f"{folder}/{server}.npz").values())
                with Worker(name, checked) as worker:
                    steps = worker("run", rounds=CHECKED_ROUNDS)["result"]
                    worker("save", path=path)
            except ContenderError as failure:
                checks[name] = {"equal": False, "failure": str(failure)}
                continue
            saved, expected = list(np.load(path).values()), references[server]
            change = max(np.abs(a - b).max() for a, b in zip(expected, start, strict=True))
            error = float(max(np.abs(a - b).max() for a, b in zip(saved, expected, strict=True)) / change)
            right = steps == CHECKED_ROUNDS * sum(map(task.steps, workload.population(checked).sizes))
            checks[name] = {"equal": right and error < TOLERANCE, "error": error, "steps": steps, "server": server}
    return checks


def scale(args: argparse.Namespace) -> Iterator[Record]:
    """fedsim's time per client step and peak memory with 10 and with 1,000 clients per round; a population of 1,000."""
    for model in args.models or MODELS:
        entrants = {}
        for clients in (10, 1000):
            several = 20 if clients == 10 and model != "cnn" else 1
            task = workload.Task(model=model, population=1000, clients=clients, per_dispatch=several, device=args.device)
            entrants[clients] = Entrant("fedsim", task)
        rotate(entrants.values(), args)
        small, large = entrants.values()
        if small.failure or large.failure:
            raise ContenderError(str(small.failure or large.failure))
        rows: list[Record] = [
            {"model": model, "clients": clients, "us_per_step": median(t["us_per_step"] for t in entrant.times),
             "peak_mib": entrant.times[-1]["peak_mib"]}
            for clients, entrant in entrants.items()
        ]  # fmt: skip
        memory = rows[1]["peak_mib"] / rows[0]["peak_mib"]
        # The ratio of medians, because a turn with 1,000 clients may take so long that it is the only one.
        time = rows[1]["us_per_step"] / rows[0]["us_per_step"]
        rows.append({"model": model, "clients": "ratio", "us_per_step": time, "peak_mib": memory})
        turns = {clients: entrant.times for clients, entrant in entrants.items()}
        yield {"rows": rows, "turns": turns, "about": {"fedsim": small.about}}


def mnist(args: argparse.Namespace) -> Iterator[Record]:
    """Seconds for 100 rounds of softmax regression: 1,000 clients of 69 examples, 10 per round, batch size 10, averaging."""
    task = workload.Task(
        model="softmax", data="mnist", population=1000, batch=10, server="average", per_dispatch=20, device=args.device
    )
    with Worker("fedsim", task) as worker:
        worker("run", rounds=20)
        seconds = [worker("run", rounds=100)["seconds"] for _ in range(args.repeats)]
    yield {
        "rows": [{"contender": "fedsim", "rounds": 100, "seconds": median(seconds)}],
        "turns": seconds,
        "about": worker.about,
    }


def femnist(args: argparse.Namespace) -> Iterator[Record]:
    """Accuracy and time on real FEMNIST: dense, 10 clients per round, several seeds; FedJAX and fedsim in turn."""
    if args.femnist is None:
        print("femnist is left out: pass --femnist a folder with femnist_train.h5 and femnist_test.h5", file=sys.stderr)
        return
    source = str(args.femnist.resolve())
    runs: dict[str, list[Record]] = {"fedsim": [], "fedjax": []}
    with ExitStack() as stack:
        workers = {}
        for name in runs:
            several = 20 if name == "fedsim" else 1
            task = workload.Task(
                model="dense", data="femnist", source=source, b2=0.999, per_dispatch=several, device=args.device
            )
            workers[name] = stack.enter_context(Worker(name, task))
            workers[name]("run", rounds=20)  # compiles
        for seed in range(args.seeds):
            for name, worker in workers.items():
                worker("reset", seed=seed)
                seconds = worker("run", rounds=args.femnist_rounds)["seconds"]
                runs[name].append({"seed": seed, "seconds": seconds, **worker("evaluate")["result"]})
    rows = [
        {"contender": name, "rounds": args.femnist_rounds, "seeds": args.seeds}
        | {key: mean(result[key] for result in results) for key in ("accuracy", "client_mean", "seconds")}
        for name, results in runs.items()
    ]
    yield {"rows": rows, "runs": runs, "about": {name: worker.about for name, worker in workers.items()}}


def evaluation(args: argparse.Namespace) -> Iterator[Record]:
    """Seconds to evaluate 77,483 examples of 3,400 clients, global and per client, dense: FedJAX and fedsim in turn."""
    source = str(args.sizes.resolve()) if args.sizes else None
    task = workload.Task(model="dense", data="evaluation", source=source, device=args.device)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, task)) for name in ("fedsim", "fedjax")}
        results = {name: worker("evaluate")["result"] for name, worker in workers.items()}  # compiles
        times: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(args.repeats):
            for name, worker in workers.items():
                times[name].append(worker("evaluate")["seconds"])
    equal = all(abs(results["fedsim"][key] - results["fedjax"][key]) < 1e-4 for key in ("accuracy", "client_mean"))
    rows = [
        {"contender": name, "equal": equal, "seconds": median(seconds),
         "relative_to_fedsim": median(a / b for a, b in zip(seconds, times["fedsim"], strict=True))}
        for name, seconds in times.items()
    ]  # fmt: skip
    about = {name: worker.about for name, worker in workers.items()}
    yield {"rows": rows, "results": results, "turns": times, "about": about}


def conversion(args: argparse.Namespace) -> Iterator[Record]:
    """Seconds for FedJAX to read its SQLite file of 3,400 clients, and for fedsim to convert it to a packed file; in turn."""
    if args.sqlite is None:
        print("conversion is left out: pass --sqlite a file that FedJAX wrote; its clients are repeated", file=sys.stderr)
        return
    task = workload.Task(model="logistic", population=10, device=args.device)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        source, target = f"{folder}/large.sqlite", f"{folder}/packed.h5"
        workload.repeat_sqlite(args.sqlite, source, clients=3400)
        workers = {name: stack.enter_context(Worker(name, task)) for name in ("fedsim", "fedjax")}
        replies: dict[str, list[Record]] = {"fedsim": [], "fedjax": []}
        for _ in range(args.repeats):
            Path(target).unlink(missing_ok=True)
            replies["fedsim"].append(workers["fedsim"]("convert", source=source, target=target))
            replies["fedjax"].append(workers["fedjax"]("read", source=source))
        equal = replies["fedsim"][0]["result"] == replies["fedjax"][0]["result"]
        packed = Path(target).stat().st_size
    times = {name: [reply["seconds"] for reply in each] for name, each in replies.items()}
    rows = [
        {"contender": name, "equal": equal, "seconds": median(seconds), "mb_per_s": packed / 1e6 / median(seconds),
         "relative_to_fedsim": median(a / b for a, b in zip(seconds, times["fedsim"], strict=True)),
         "peak_mib": replies[name][-1]["peak_mib"]}
        for name, seconds in times.items()
    ]  # fmt: skip
    about = {name: worker.about for name, worker in workers.items()}
    yield {"rows": rows, "turns": times, "bytes": packed, "about": about}


def data(args: argparse.Namespace) -> Iterator[Record]:
    """Large populations: opening and reading a packed file, rounds by population size, streamed and resident data."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = {"path": f"{folder}/tokens.h5"}
        written = measured(args, "write_tokens", **tokens, **populations.STACK_OVERFLOW)
        opened = measured(args, "open_tokens", **tokens, clients=populations.STACK_OVERFLOW["clients"])
        gathered = measured(args, "gather", **tokens, cohort=1000, repeats=4 * args.repeats)
    yield {"rows": [populations.STACK_OVERFLOW | {"file_mb": written["mb"]} | opened | gathered], "written": written}
    yield {"rows": measured(args, "rounds", populations=[1_000, 1_000_000], cohort=100, turns=args.repeats, rounds=20)}
    if args.emnist is None:
        print("the rest of data is left out: pass --emnist a folder with client_sizes and emnist_byclass", file=sys.stderr)
        return
    yield {"rows": measured(args, "memory", source=str(args.emnist.resolve()), cohort=10, turns=args.repeats, rounds=2)}


def cohorts(args: argparse.Namespace) -> Iterator[Record]:
    """Cohorts of many sizes, each in a process of its own, of clients with 20 random images; and a file of ten million clients.

    The last row of a model compares its largest cohort with one of 1,000 clients.
    """
    for model, devices, sizes in (
        ("logistic", 1, (10, 100, 1_000, 10_000, 100_000)),
        ("logistic", 2, (10, 100, 1_000, 10_000, 100_000)),
        ("cnn", 2, (100, 1_000, 10_000)),
    ):
        options = {"model": model, "devices": devices, "population": sizes[-1], "steps": sizes[-1]}
        found = {clients: measured(args, "cohort", clients=clients, **options) for clients in sizes}
        ratio = {name: found[sizes[-1]][name] / found[1_000][name] for name in ("us_per_step", "peak_mib")}
        yield {"rows": [*found.values(), {"model": model, "clients": "ratio", "devices": devices} | ratio]}
    with tempfile.TemporaryDirectory() as folder:
        file = {"path": f"{folder}/clients.fedsim", "clients": 10_000_000}
        yield {"rows": [measured(args, "write_images", **file) | measured(args, "first_rounds", **file)]}


def memory(args: argparse.Namespace) -> Iterator[Record]:
    """Client memories: SCAFFOLD over 342,477 clients, 1 MB each: time, memory, disk; gathering and writing a cohort's rows."""
    population = populations.STACK_OVERFLOW["clients"]
    sizes = {10: 200, 50: 100}
    yield {
        "rows": [
            measured(args, "client_memories", clients=population, floats=2**18, cohort=cohort, rounds=rounds)
            for cohort, rounds in sizes.items()
        ]
    }
    yield {"rows": measured(args, "row_transfer", floats=50_000, leaves=8, cohort=10, turns=100 * args.repeats)}


def measured(args: argparse.Namespace, name: str, **arguments: Any) -> Any:
    """Runs a function of `benchmarks.populations` in its own process, so that only its memory is measured."""
    command = [sys.executable, "-m", "benchmarks.populations", name, json.dumps(arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cuda" if args.device == "gpu" else "cpu"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise ContenderError(f"benchmarks.populations {name} ended with status {done.returncode}: see its output above")
    return json.loads(done.stdout)


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[Record]]] = {
    table.__name__: table for table in (rounds, lstm, scale, mnist, femnist, evaluation, data, cohorts, conversion, memory)
}
