"""Compiles rounds for TPUs, which needs no TPU: ``python -m benchmarks.tpu [--only lm_350m] [--compiler DIR]``.

Each round is lowered from shapes and compiled by libtpu, in a process of its own with a time limit. The compiler says how many
operations and how much memory a chip needs, and which messages are between clients. No round runs, so times of rounds are
estimates, see `seconds`. The results are added to ``results/tpu-compile.json``. ``make test-all`` installs libtpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedsim
from benchmarks import hardware
from benchmarks.__main__ import show

RESULT = Path(__file__).parent / "results" / "tpu-compile.json"
TOPOLOGIES = {"v5e:2x4": 8, "v5e:4x8": 32, "v5e:8x8": 64, "v5e:16x16": 256, "v5p:4x4x4": 64}  # with numbers of chips
POPULATION = 512  # Every chip has the examples of all clients.


class Chip(NamedTuple):
    """Published figures of a chip: FLOP/s in bfloat16, and bytes/s of its memory."""

    flops: float
    bandwidth: float


CHIPS = {"v5e": Chip(197e12, 819e9), "v5p": Chip(459e12, 2765e9)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A round to compile: ``clients`` groups of ``chips`` train a cohort, where each client takes ``steps`` local steps.

    At most ``lanes`` clients train side by side on a chip. ``loop`` is ``"fedsim"``, or ``"python"`` for the contrast: two
    Python loops, over clients and over their steps, on one chip. With ``topology="cpu"`` the round is timed, on virtual
    devices.
    """

    table: str
    model: str
    topology: str
    clients: int = 1
    chips: int = 1
    cohort: int
    batch: int
    steps: int = 2
    lanes: int = 1
    loop: str = "fedsim"


def cases() -> list[Case]:
    """Returns all rounds; on all topologies, a cohort has two clients for each chip."""
    large, small = {"lm_350m": 4, "lm_1b": 8}, {"emnist_cnn": 20, "stackoverflow_lstm": 16}
    sizes = [(model, chips, 4, 1) for model, chips in large.items()] + [(model, 1, batch, 2) for model, batch in small.items()]
    found = [
        Case(
            table="topologies",
            model=model,
            topology=topology,
            clients=n // chips,
            chips=chips,
            cohort=2 * n,
            batch=batch,
            lanes=lanes,
        )
        for model, chips, batch, lanes in sizes
        for topology, n in TOPOLOGIES.items()
    ]
    found += [
        Case(table="topologies", model="lm_8b", topology=topology, clients=64 // chips, chips=chips, cohort=128, batch=4)
        for topology, chips in {"v5e:8x8": 32, "v5p:4x4x4": 8}.items()
    ]
    found += [
        Case(table="cohorts", model="lm_350m", topology="v5e:4x8", clients=8, chips=4, cohort=cohort, batch=4)
        for cohort in (8, 64, 512)
    ]
    found += [
        Case(table="loops", model="emnist_cnn", topology="v5e:2x4", cohort=cohort, batch=20, loop=loop)
        for loop in ("fedsim", "python")
        for cohort in (1, 2, 4, 8)
    ]
    found += [
        Case(table="FedJAX", model="stackoverflow_lstm", topology="v5e:2x4", clients=n, cohort=cohort, batch=16, lanes=8)
        for n in (1, 8)
        for cohort in (8, 64)
    ]
    found += [
        dataclasses.replace(case, topology="cpu", cohort=cohort, steps=1, lanes=1)
        for case in found
        if case.table == "FedJAX" and case.cohort == 8
        for cohort in (8, 16, 32, 64)
    ]
    return found


def measured(case: Case) -> dict[str, Any]:
    """Compiles one round; returns what the compiler says, or on virtual devices how long it takes."""
    if on_cpu := case.topology == "cpu":
        fedsim.use_all_cores(case.clients * case.chips)
    devices = None if on_cpu else fedsim.execution.described_tpus(case.topology)
    model = fedsim.models.get(case.model)
    sizes = [case.batch * case.steps] * POPULATION
    columns = {
        name: np.broadcast_to(np.zeros((), x.dtype), (sum(sizes), *x.shape[1:])) for name, x in model.dummy_examples(1).items()
    }  # They take no memory.
    data = fedsim.FederatedData.from_arrays(columns, sizes=sizes)
    execution = fedsim.Sharded(devices=devices, clients=case.clients, model=case.chips, lanes=case.lanes)
    settings = dict(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=case.batch))
    algorithm = fedsim.algorithms.FedAvg(**settings, execution=execution)
    cohort = fedsim.UniformSampler(data, clients=case.cohort, seed=0).cohort(0)
    if devices is None:
        return dataclasses.asdict(case) | _timed(algorithm, cohort)
    start = time.perf_counter()
    lowered = execution.lower(algorithm, cohort) if case.loop == "fedsim" else _two_loops(model, case, devices[0])
    traced, busy = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    ended, after = time.perf_counter(), time.process_time()
    memory: Any = compiled.memory_analysis()
    costs: Any = compiled.cost_analysis()
    between = [each for each in fedsim.planning.collectives_in(compiled.as_text() or "") if each.between(case.chips)]
    axes = {"model": case.chips, "data": 1}
    division = model.division(axes)  # `Sharded.division` leaves out parameters that are on one chip.
    share = sum(
        4 * int(np.prod(shape, dtype=np.int64)) // int(np.prod([axes[axis] for axis in spec if axis], dtype=int))
        for _, shape, spec in division.parameters
    )
    return {
        **dataclasses.asdict(case),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))),
        "lower_s": round(traced - start, 2),
        "compile_s": round(ended - traced, 2),
        "compile_processor_s": round(after - busy, 2),  # which other work on the machine disturbs less
        # XLA counts the body of a loop once.
        "flops_of_program": costs["flops"],
        # Without the examples, which a run streams or keeps on every chip.
        "bytes_of_chip": share + memory.output_size_in_bytes + memory.temp_size_in_bytes,
        "bytes_of_temporaries": memory.temp_size_in_bytes,
        "bytes_of_arguments": memory.argument_size_in_bytes,
        "bytes_of_share": share,
        "all_reduced_over_clients": sum(each.bytes for each in between if not each.in_loop and each.kind == "all-reduce"),
        "others_over_clients": sum(each.in_loop or each.kind != "all-reduce" for each in between),
        "flops_of_step": _flops_of_step(model, case.batch) / case.chips,
    }


def _timed(algorithm: fedsim.Algorithm, cohort: fedsim.Cohort) -> dict[str, Any]:
    """Returns the times of three rounds, after one that compiles."""
    state, times = algorithm.init(jax.random.key(0)), []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(algorithm.apply(state, cohort))
        times.append(round(time.perf_counter() - start, 3))
    return {"round_s": times[1:]}


def _step(model: Any, params: Any, batch: Any) -> Any:
    return jax.tree.map(lambda x, gradient: x - 0.1 * gradient, params, jax.grad(model.train_loss)(params, batch))


def _shapes(model: Any, size: int) -> tuple[Any, Any]:
    batch = fedsim.Batch(model.dummy_examples(size), jnp.ones(size, bool), jax.random.key(0), jnp.int32(0))
    return jax.eval_shape(lambda: (model.init(jax.random.key(0)), batch))


def _flops_of_step(model: Any, size: int) -> float:
    """Returns the operations of a local step, with the loops inside of it for all of their steps."""
    return fedsim.planning.flops_of(jax.make_jaxpr(lambda *args: _step(model, *args))(*_shapes(model, size)).jaxpr)


def _two_loops(model: Any, case: Case, device: jax.Device) -> jax.stages.Lowered:
    """Lowers a round that consists of two Python loops, over the clients and over their steps, for one chip."""

    def round(params: Any, batches: Any) -> Any:
        ends = []
        for client in range(case.cohort):
            local = params
            for step in range(case.steps):
                local = _step(model, local, jax.tree.map(lambda x, at=(client, step): x[at], batches))
            ends.append(local)
        return jax.tree.map(lambda *xs: sum(xs) / len(xs), *ends)

    params, batch = _shapes(model, case.batch)
    batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct((case.cohort, case.steps, *x.shape), x.dtype), batch)
    place = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(round, in_shardings=place, out_shardings=place).lower(params, batches)


def seconds(row: dict[str, Any]) -> float:
    """Estimates a round by a roofline: the published figures of the chip, as if it reached them.

    A step takes the longer of two times: that of its operations, and that of passing four times over the chip's share of the
    parameters, for the forward pass, the backward pass, and to read and to write them in the optimizer's step. Activations and
    messages do not count, so this is a lower bound.
    """
    chip = CHIPS[row["topology"].partition(":")[0]]
    steps = -(-row["cohort"] // row["clients"]) * row["steps"]
    return steps * max(row["flops_of_step"] / chip.flops, 4 * row["bytes_of_share"] / chip.bandwidth)


def in_own_process(case: Case, compiler: Path, limit: float) -> dict[str, Any]:
    """Compiles a round in another process; returns its result, or why there is none."""
    library = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TPU_LIBRARY_PATH": str(compiler / "libtpu" / "libtpu.so")}
    command = [sys.executable, "-m", "benchmarks.tpu", "--case", json.dumps(dataclasses.asdict(case))]
    start = time.perf_counter()
    try:
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **library}, timeout=limit)
        lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines() or ["nothing was printed"]
        found = json.loads(lines[-1]) if run.returncode == 0 else {"failed": lines[-1][:300]}
    except subprocess.TimeoutExpired:
        found = {"failed": f"more than {limit:.0f} s"}
    return {**dataclasses.asdict(case), **found, "process_s": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="a table, a model or both; default: all")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each round")
    parser.add_argument("--compiler", type=Path, default=Path(sys.prefix) / "tpu-compiler", help="the folder of libtpu")
    parser.add_argument("--beside-other-work", action="store_true", help="record that the machine was not idle")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(Case(**args.case))))
        return
    if not (args.compiler / "libtpu").exists():
        parser.error(f"Expected libtpu in {args.compiler}: install it with make test-all, or name its folder with --compiler.")
    record: dict[str, Any] = {"table": "tpu-compile", "rows": []}
    if RESULT.exists():
        record = json.loads(RESULT.read_text())
    libtpu = next(args.compiler.glob("libtpu-*.dist-info")).name.removeprefix("libtpu-").removesuffix(".dist-info")
    stamp = hardware.stamp("cpu") | {"jax": jax.__version__, "jaxlib": version("jaxlib"), "libtpu": libtpu}
    for case in cases():
        if not set(args.only) <= {case.table, case.model}:
            continue
        row = in_own_process(case, args.compiler, args.limit) | stamp | {"beside other work": args.beside_other_work}
        mine = dataclasses.asdict(case)
        others = [other for other in record["rows"] if any(other[name] != value for name, value in mine.items())]
        record["rows"] = [*others, row]
        show(
            [
                {
                    name: row.get(name)
                    for name in ("model", "topology", "cohort", "compile_s", "flops_of_program", "round_s", "failed")
                }
            ]
        )
        RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
