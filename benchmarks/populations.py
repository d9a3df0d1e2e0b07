"""Measurements of fedsim on large populations, one per process: ``python -m benchmarks.populations NAME ARGUMENTS_JSON``."""

from __future__ import annotations

import csv
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

Figures = dict[str, Any]

STACK_OVERFLOW = {"clients": 342_477, "sequences": 10_000_000, "length": 20}


def write_tokens(path: str, clients: int, sequences: int, length: int) -> Figures:
    """Writes a packed file of token sequences; many clients have few sequences, and few have many."""
    from fedsim.data import FederatedData  # before the clock, because fedsim imports its packages when they are used

    draw = np.random.default_rng(0)
    sizes = 1 + draw.multinomial(sequences - clients, draw.dirichlet(np.full(clients, 0.5)))
    tokens = draw.integers(1, 10_004, (sequences, length), np.int16)
    ids = [f"{i:08d}" for i in range(clients)]
    start = time.perf_counter()
    FederatedData.from_arrays({"x": tokens, "y": tokens}, sizes=sizes, client_ids=ids).save(path)
    return {"seconds": time.perf_counter() - start, "mb": Path(path).stat().st_size / 1e6}


def open_tokens(path: str, clients: int) -> Figures:
    """Measures the time and the resident memory to open the file and find one client in it."""
    import psutil

    from fedsim.data import FederatedData

    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    data = FederatedData.open(path)
    assert data.index(f"{clients - 1:08d}") == clients - 1
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "resident_mb": (psutil.Process().memory_info().rss - before) / 1e6}


def gather(path: str, cohort: int, repeats: int) -> Figures:
    """Measures the time to sample a cohort and to gather its rows from pages that are in memory."""
    import fedsim

    data = fedsim.FederatedData.open(path)
    sampler = fedsim.UniformSampler(data, clients=cohort, seed=0)
    sampling, gathering, size = [], [], 0
    for turn in range(repeats + 1):
        for timed in (False, True):  # The first pass may read pages from the disk.
            start = time.perf_counter()
            clients = sampler.cohort(turn).clients
            middle = time.perf_counter()
            size = sum(data.gather(name, clients).nbytes for name in data.columns)
            if timed and turn:
                sampling.append(middle - start)
                gathering.append(time.perf_counter() - middle)
    seconds = median(gathering)
    return {"sample_ms": 1e3 * median(sampling), "gather_ms": 1e3 * seconds, "mb": size / 1e6, "gb_per_s": size / seconds / 1e9}


def rounds(populations: list[int], cohort: int, turns: int, rounds: int) -> list[Figures]:
    """Measures rounds of clients with 20 digits each: all populations in turn, resident and streamed from a packed file."""
    import fedsim

    fedsim.use_all_cores()
    ways = ("resident", "stream")
    with tempfile.TemporaryDirectory() as folder:
        runs = {(memory, clients): _digits(memory, clients, cohort, folder) for memory in ways for clients in populations}
        times: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
        for _ in range(turns):
            for run, rounds_of in runs.items():
                times[run].append(rounds_of(rounds) / rounds)
    rows = []
    for memory, clients in runs:
        mine, smallest = times[memory, clients], times[memory, populations[0]]
        row = {"memory": memory, "population": clients, "ms_per_round": 1e3 * median(mine)}
        rows.append(row | {"relative_to_smallest": median(a / b for a, b in zip(mine, smallest, strict=True))})
    return rows


def cohort(model: str, clients: int, devices: int, population: int, steps: int) -> Figures:
    """Measures rounds of ``clients`` of a population with 20 images each, at least one of them and ``steps`` local steps."""
    import fedsim

    fedsim.use_all_cores(devices)
    draw = np.random.default_rng(0)
    columns = {
        "x": draw.integers(0, 256, (population * 20, 28, 28, 1), np.uint8),
        "y": draw.integers(0, 62, population * 20, np.int32),
    }
    data = fedsim.FederatedData.from_arrays(columns, sizes=np.full(population, 20))
    network = {"logistic": fedsim.models.emnist_logistic, "cnn": fedsim.models.emnist_cnn}[model]()
    run, _ = _timed_rounds(network, data, "resident", clients, size=10, untimed=1)
    rounds = max(1, steps // (2 * clients))
    seconds = run(rounds)
    figures = {"ms_per_round": 1e3 * seconds / rounds, "us_per_step": 1e6 * seconds / (rounds * 2 * clients)}
    return {"model": model, "clients": clients, "devices": devices} | figures | {"peak_mib": _peak_mib()}


def write_images(path: str, clients: int) -> Figures:
    """Writes a packed file of clients with one to three images of 8 by 8 pixels."""
    import fedsim

    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 4, clients)
    columns = {"x": draw.integers(0, 17, (sizes.sum(), 8, 8, 1), np.uint8), "y": draw.integers(0, 10, sizes.sum(), np.int32)}
    fedsim.FederatedData.from_arrays(columns, sizes=sizes).save(path)
    return {"clients": clients, "file_mb": Path(path).stat().st_size / 1e6}


def first_rounds(path: str, clients: int) -> Figures:
    """Measures the seconds from opening the file to the end of two rounds of 1,000 clients, the time of a round, and memory."""
    import fedsim

    fedsim.use_all_cores()
    model, _ = fedsim.models.digits_logistic(), fedsim.algorithms.FedAvg  # which imports what the clock should not count
    start = time.perf_counter()
    data = fedsim.FederatedData.open(path)
    run, _ = _timed_rounds(model, data, "stream", 1_000, size=10)
    seconds = time.perf_counter() - start
    assert data.num_clients == clients
    return {"seconds_to_first_rounds": seconds, "ms_per_round": 100 * run(10), "peak_mib": _peak_mib()}


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _digits(memory: Any, clients: int, cohort: int, folder: str) -> Callable[[int], float]:
    import fedsim

    draw = np.random.default_rng(0)
    columns = {"x": draw.integers(0, 17, (clients * 20, 8, 8, 1), np.uint8), "y": draw.integers(0, 10, clients * 20, np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=np.full(clients, 20))
    if memory == "stream":
        path = f"{folder}/{clients}.h5"
        data.save(path)
        data = fedsim.FederatedData.open(path)
    return _timed_rounds(fedsim.models.digits_dense(), data, memory, cohort, size=10)[0]


def _timed_rounds(
    model: Any, data: Any, memory: Any, cohort: int, size: int, untimed: int = 2
) -> tuple[Callable[[int], float], Any]:
    """Returns a compiled function that runs rounds and returns their seconds, and the state after the first, untimed rounds."""
    import jax
    import optax

    import fedsim

    algorithm = fedsim.algorithms.FedAvg(
        model=model,
        client_optimizer=optax.sgd(10**-1.5),
        server_optimizer=optax.adam(10**-2.5),
        batches=fedsim.Batches(size=size),
        execution=fedsim.execution.Auto(memory=memory),
    )
    state = algorithm.init(jax.random.key(0))
    cohorts: Iterator[Any] = fedsim.UniformSampler(data, clients=cohort, seed=0).rounds(10**9)

    def run(rounds: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(rounds):
            state, _ = algorithm.apply(state, next(cohorts))
        jax.block_until_ready(state)
        return time.perf_counter() - start

    run(untimed)
    return run, state


def memory(source: str, cohort: int, turns: int, rounds: int) -> list[Figures]:
    """Measures rounds and full evaluations, CNN, clients of EMNIST's true sizes: streamed and resident in turn."""
    import fedsim

    fedsim.use_all_cores()
    train, test = emnist(Path(source), "train"), emnist(Path(source), "test")
    model = fedsim.models.emnist_cnn()
    times: dict[str, dict[str, list[float]]] = {}
    runs = {how: _timed_rounds(model, train, how, cohort, size=20) for how in ("resident", "stream")}
    params = runs["resident"][1].params

    def evaluate(how: Any) -> float:
        start = time.perf_counter()
        fedsim.evaluate(model, params, test, execution=fedsim.execution.Auto(memory=how))
        return time.perf_counter() - start

    for how in runs:
        times[how] = {"round": [], "evaluation": []}
        evaluate(how)
    for _ in range(turns):
        # Both run the same cohorts.
        for how, (run, _) in runs.items():
            times[how]["round"].append(run(rounds) / rounds)
        for how in runs:
            times[how]["evaluation"].append(evaluate(how))
    for of in times.values():
        of["both"] = [sum(pair) for pair in zip(of["round"], of["evaluation"], strict=True)]
    return [
        {"what": what, "resident_s": median(times["resident"][what]), "stream_s": median(times["stream"][what]),
         "stream_to_resident": median(a / b for a, b in zip(times["stream"][what], times["resident"][what], strict=True))}
        for what in ("round", "evaluation", "both")
    ]  # fmt: skip


def emnist(folder: Path, split: str) -> Any:
    """Returns 3,400 clients of their true sizes, with images drawn from EMNIST byclass."""
    import fedsim

    with open(folder / "client_sizes" / f"emnist_{split}_num_examples.csv", newline="") as file:
        sizes = {row["client_id"]: int(row["num_examples"]) for row in csv.DictReader(file)}
    images = np.load(folder / "emnist_byclass" / "emnist_byclass_test.npz")
    chosen = np.random.default_rng(0).integers(len(images["y"]), size=sum(sizes.values()))
    columns = {"x": images["x"][chosen][..., None], "y": images["y"][chosen].astype(np.int32)}
    return fedsim.FederatedData.from_arrays(columns, sizes=list(sizes.values()), client_ids=list(sizes))


def row_transfer(floats: int, leaves: int, cohort: int, turns: int) -> list[Figures]:
    """Measures gathering a cohort's rows, sending them to the device, and writing them back, in memory and in a file."""
    import jax

    from fedsim.data import ClientRows
    from fedsim.data._row_store import MemoryRows, RowFile, RowStore

    like = [jax.ShapeDtypeStruct((floats // leaves,), np.float32) for _ in range(leaves)]
    draw, figures = np.random.default_rng(0), []
    for where, store in {"memory": MemoryRows(like, 100 * cohort), "file": RowFile(like)}.items():
        assert isinstance(store, RowStore)
        rows = ClientRows(store, np.full(100 * cohort, -1, np.int64))
        new = jax.block_until_ready(jax.device_put([np.ones((cohort, *x.shape), x.dtype) for x in like]))
        for start in range(0, len(rows.index), cohort):
            rows = rows.written(np.arange(start, start + cohort), new)
        times: dict[str, list[float]] = {"gather_ms": [], "send_ms": [], "write_ms": []}
        for _ in range(turns):
            clients, marks = draw.permutation(len(rows.index))[:cohort], [time.perf_counter()]
            gathered, _ = rows.gather(clients)
            marks.append(time.perf_counter())
            jax.block_until_ready(jax.device_put(gathered))
            marks.append(time.perf_counter())
            rows = rows.written(clients, new)
            marks.append(time.perf_counter())
            for of, seconds in zip(times.values(), np.diff(marks), strict=True):
                of.append(1e3 * float(seconds))
        figures.append({"where": where, "cohort": cohort, "row_kb": 4 * floats / 1e3, "leaves": leaves})
        figures[-1] |= {name: median(of) for name, of in times.items()}
    return figures


def client_memories(clients: int, floats: int, cohort: int, rounds: int, chunk_bytes: int | None = None) -> Figures:
    """Measures rounds of SCAFFOLD whose clients keep ``floats`` floats each, in a run that is resumed halfway.

    The loss costs almost nothing, so the time is that of storing the memories. The disk budget is that of
    `fedsim.data._row_store.RowFile`: 1.25 times the rows in use, and a chunk. In use are one row of every client that has
    participated, one of each client of the rounds between the checkpoints that are kept, and of the rounds that are running.
    """
    import tempfile

    import haiku as hk
    import jax
    import jax.numpy as jnp
    import optax
    import psutil

    import fedsim
    from fedsim.data import _row_store

    _row_store._CHUNK_BYTES = chunk_bytes or _row_store._CHUNK_BYTES
    start = psutil.Process().memory_info().rss
    columns, ids = {"x": np.ones(clients, np.float32)}, np.char.mod("%08d", np.arange(clients)).tolist()
    data = fedsim.FederatedData(columns, np.arange(clients + 1), ids)
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("w", [floats], init=jnp.ones)[None, :8] * examples["x"][:, None]),
        features={"x": jax.ShapeDtypeStruct((), np.float32)},
        loss=lambda examples, outputs: jnp.sum(jnp.square(outputs), -1),
        metrics={},
    )
    algorithm = fedsim.algorithms.SCAFFOLD(
        model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=1), execution=fedsim.Jit()
    )
    sampler = fedsim.UniformSampler(data, clients=cohort, seed=0)
    every = max(1, rounds // 6)
    with tempfile.TemporaryDirectory() as folder:

        def run(**options: Any) -> Any:
            options = options | dict(folder=f"{folder}/run", config={}, checkpoint_every=every, progress=False)
            return fedsim.experiment.run(algorithm, sampler, rounds=rounds, **options)

        class HalfWayError(Exception):
            pass

        def stop(line: Any, _: Any) -> None:
            if line["round"] >= rounds // 2:
                raise HalfWayError

        seconds = [time.perf_counter()]
        try:
            run(callbacks=[stop])
        except HalfWayError:
            seconds.append(time.perf_counter())
        first: list[float] = []
        result = run(callbacks=[lambda line, state: first.append(time.perf_counter())])
        seconds.append(time.perf_counter())
        stored, seen = result.state.clients.store, len(result.state.clients)
        disk = 512 * stored.path.stat().st_blocks
    budget = 1.25 * (seen + (3 * every + 4) * cohort) * stored.row_bytes + stored.rows_per_chunk * stored.row_bytes
    # VmHWM is the peak memory of this program alone. The value of getrusage may be that of the parent process.
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    return {
        "clients": clients, "seen": seen, "row_mb": stored.row_bytes / 1e6, "cohort": cohort, "rounds": rounds,
        "ms_per_round": 1e3 * median(line["seconds"] for line in result.history),
        "resume_s": first[0] - seconds[1], "start_mb": start / 1e6, "peak_mb": peak / 1e6,
        "disk_mb": disk / 1e6, "budget_mb": budget / 1e6,
    }  # fmt: skip


MEASUREMENTS: dict[str, Callable[..., Any]] = {
    measurement.__name__: measurement
    for measurement in (
        *(write_tokens, open_tokens, gather, rounds, cohort, write_images, first_rounds),
        *(memory, client_memories, row_transfer),
    )
}

if __name__ == "__main__":
    print(json.dumps(MEASUREMENTS[sys.argv[1]](**json.loads(sys.argv[2]))))
