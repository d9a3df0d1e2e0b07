"""`replay`: one client's round of a run again, alone and in plain Python, to look at it with prints and a debugger."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim import checks
from fedsim.algorithm import Algorithm
from fedsim.configuration import Settings, build
from fedsim.data import Cohort
from fedsim.execution import call_of_updates, run_client
from fedsim.experiment._checkpoint import DEPLOYMENT, Checkpoints
from fedsim.experiment._dispatch import cohorts
from fedsim.experiment._folder import RunFolder, is_sweep, read_config, stored_run, warn_of_changed_code
from fedsim.experiment._lines import observed
from fedsim.experiment._metrics_file import read_metrics
from fedsim.experiment._run import State, newest_state
from fedsim.samplers import Sampler, checked_cohort, is_steered
from fedsim.systems import Deliveries

# So many rounds are sent to the devices at once on the way from a checkpoint to the round.
_ROUNDS_TOGETHER = 16
_MOST_NAMES = 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReplayedClient:
    """One client's round, as `replay` has run it again. Printed, it is a table.

    Attributes:
      client: the client's id.
      round: the round, from 1 as in ``metrics.jsonl``.
      version: the round after which the server had the model that the client started from; 0 is the initial model.
      staleness: how many rounds older this is than the newest model; None without a virtual clock.
      num_examples, num_steps: of the client in this round.
      weight: of the update in the aggregate; 0 if it does not count.
      metrics: what the algorithm reports of the client (``ClientUpdate.info``), and sizes of messages, by name.
      started: what the client received from the server.
      update: what the client computed, a pytree of arrays.
      received: the update as the server takes it: compressed, clipped, scaled by its staleness, or zeros if it is dropped. What
        colluding attackers send instead, the aggregator computes later.
      norm, norm_received: the Euclidean norms of both.
      finite: whether all of the update's numbers and its weight are finite.
      dropped: whether the round leaves the update out, because its squared norm, its weight or the client's memory is not
        finite.
      attacker: whether the client is an attacker.

    >>> [field.name for field in dataclasses.fields(ReplayedClient)][:3]
    ['client', 'round', 'version']
    """

    client: str
    round: int
    version: int
    staleness: int | None
    num_examples: int
    num_steps: int
    weight: float
    metrics: Mapping[str, np.ndarray]
    started: Any
    update: Any
    received: Any
    norm: float
    norm_received: float
    finite: bool
    dropped: bool
    attacker: bool

    def __str__(self) -> str:
        model = f"the model after round {self.version}" if self.version else "the initial model"
        rows = {
            "started from": model + ("" if self.staleness is None else f", staleness {self.staleness}"),
            "examples": f"{self.num_examples:,}",
            "steps": f"{self.num_steps:,}",
            "weight": f"{self.weight:.6g}",
            **{name: _shown(value) for name, value in self.metrics.items()},
            "update": f"norm {self.norm:.6g}, {'finite' if self.finite else 'not finite'}",
            "received": f"norm {self.norm_received:.6g}",
            "dropped": "yes: its squared norm, its weight or its memory is not finite" if self.dropped else "no",
        }
        if self.attacker:
            rows["attacker"] = "yes"
        width = max(map(len, rows)) + 2
        title = f"client {self.client} in round {self.round}"
        return "\n".join([title, *(f"  {name:<{width}}{text}" for name, text in rows.items())])


def replay(
    folder: str | Path, *, round: int, client: str | int, algorithm: Algorithm | None = None, sampler: Sampler | None = None
) -> ReplayedClient:
    """Runs one client's round of a run again, alone and in plain Python, as `fedsim.Debug` does.

    The state before the round comes from the newest checkpoint before it, from which the rounds in between run again, with the
    run's execution; stderr says from where. The client starts as in the run: with the same examples, batches and random draws,
    from its own version of the model if it is stale, and with its own memory. If the algorithm's round calls its clients more
    than once, all clients run in the earlier calls. Nothing is written into the folder. Prints and ``breakpoint()`` in the
    algorithm are ignored until the client starts.

    Args:
      folder: the run folder. If its configuration names Python code, that code runs.
      round: the round, from 1 as in ``metrics.jsonl``. It may be one that the run has not finished, for example because of an
        error.
      client: the client's id, or its position in the population: a number, also as a text if no client has this id.
      algorithm, sampler: those of a run that was started in Python without a `RunConfig`; by default they are built from the
        folder's configuration.

    Raises:
      ValueError: the folder holds no run, or a sweep; it has no such round; the client did not take part in it (the message
        names the clients that did); the algorithm overrides ``apply`` or its clients send no updates.
      fedsim.execution.StageError: the algorithm raises an error.

    >>> import tempfile, optax, fedsim
    >>> data = fedsim.datasets.load("digits").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> sampler, folder = fedsim.UniformSampler(data, clients=2, seed=0), tempfile.mkdtemp()
    >>> _ = fedsim.experiment.run(algorithm, sampler, rounds=3, folder=folder, progress=False)
    >>> client = replay(folder, round=1, client=sampler.cohort(0).client_ids[1], algorithm=algorithm, sampler=sampler)
    >>> client.version, client.finite, client.dropped
    (0, True, False)
    """
    return RunRound.read(folder, round, algorithm=algorithm, sampler=sampler).replay(client)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRound:
    """A round of the run in a folder.

    Attributes:
      paths: the folder.
      round: the round, from 1.
      algorithm, sampler: of the run.
      first, cohort: the cohorts of the first round and of this one.

    >>> RunRound.read("no such folder", 1)
    Traceback (most recent call last):
    ...
    ValueError: There is no run in no such folder: cannot read no such folder/config.json (FileNotFoundError).
    """

    paths: RunFolder
    round: int
    algorithm: Algorithm
    sampler: Sampler
    first: Cohort
    cohort: Cohort

    @classmethod
    def read(
        cls, folder: str | Path, round: int, settings: Settings | None = None, *,
        algorithm: Algorithm | None = None, sampler: Sampler | None = None,
    ) -> RunRound:  # fmt: skip
        """Returns a round of the run in a folder; ``settings`` replace the folder's. For the other arguments see `replay`."""
        if is_sweep(folder):
            runs = sorted(path.parent.name for path in Path(folder).glob("*/config.json"))
            raise ValueError(f"{folder} holds a sweep: give the folder of one of its runs, in {folder}: {_listed(runs)}.")
        stored = read_config(folder)
        warn_of_changed_code(folder, stored)
        rounds = stored["config"].get("rounds")
        checks.whole(1, rounds=rounds, remedy=f"restore {RunFolder(Path(folder)).config}")
        checks.whole(1, rounds, round=round, remedy="rounds count from 1, as in metrics.jsonl")
        if (algorithm is None) != (sampler is None):
            raise ValueError("Expected algorithm and sampler, or neither, got one of them: give both.")
        by_configuration = algorithm is None
        if algorithm is None or sampler is None:
            if "hyperparameters" not in stored["config"]:
                raise ValueError(f"The run in {folder} was started in Python: pass its algorithm and its sampler.")
            config, stored_settings = stored_run(folder, stored)
            with only_errors():
                experiment = build(config, settings or stored_settings)
            algorithm, sampler = experiment.algorithm, experiment.sampler
        if type(algorithm).apply is not Algorithm.apply:
            raise ValueError(f"{type(algorithm).__name__} overrides apply, so its clients cannot be run alone.")
        if (Path(folder) / DEPLOYMENT).exists():
            sampler = _answered(Path(folder), sampler, by_configuration)
        first = checked_cohort(sampler, 0)
        sampler = observed(sampler, read_metrics(RunFolder(Path(folder)).metrics)) if is_steered(sampler) else sampler
        with only_errors():
            algorithm.check(first.data)
        return cls(
            paths=RunFolder(Path(folder)),
            round=round,
            algorithm=algorithm,
            sampler=sampler,
            first=first,
            cohort=checked_cohort(sampler, round - 1, first),
        )

    def table(self) -> str:
        """Returns a table of the clients of the round."""
        cohort = self.cohort
        names = ["client", "position", "examples", "steps"] + (["started from round"] if cohort.arrivals else [])
        columns = [cohort.client_ids, cohort.clients, cohort.sizes, cohort.num_steps(self.algorithm.batches)]
        columns += [cohort.round - cohort.arrivals.staleness] if cohort.arrivals else []
        rows = [names, *([str(cell) for cell in row] for row in zip(*columns, strict=True))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def replay(self, client: str | int) -> ReplayedClient:
        """Runs one of the round's clients, see `fedsim.experiment.replay`."""
        cohort, slot = self.cohort, self._slot(client)
        with only_errors():
            state = self._state()
            call = call_of_updates(self.algorithm, state, cohort.data)
        done = run_client(self.algorithm, state, cohort, slot, call)
        entries = {name: np.asarray(value) for name, value in done.entries.items()}
        weight, dropped = float(entries.pop("weight")), bool(entries.pop("dropped") > 0)
        staleness = None if cohort.arrivals is None else int(cohort.arrivals.staleness[slot])
        return ReplayedClient(
            client=cohort.client_ids[slot],
            round=self.round,
            version=cohort.round - (staleness or 0),
            staleness=staleness,
            num_examples=int(cohort.sizes[slot]),
            num_steps=done.num_steps,
            weight=weight,
            metrics=entries,
            started=done.shared,
            update=done.result.update,
            received=done.received,
            norm=_norm(done.result.update),
            norm_received=_norm(done.received),
            finite=math.isfinite(_norm((done.result.update, done.result.weight))),
            dropped=dropped,
            attacker=cohort.attackers is not None and bool(cohort.attackers[slot]),
        )

    def _slot(self, client: str | int) -> int:
        """Returns a client's position in the cohort."""
        data = self.first.data
        try:
            position = data.index(client) if isinstance(client, str) else int(client)
        except KeyError:
            position = int(client) if str(client).isdecimal() else -1
        if (found := np.flatnonzero(self.cohort.clients == position)).size:
            return int(found[0])
        why = f"did not take part in round {self.round}" if 0 <= position < data.num_clients else "is not in the population"
        who = f"The clients of round {self.round} are: {_listed(self.cohort.client_ids)}"
        raise ValueError(f"Client {client!r} {why}. {who}.")

    def _state(self) -> State:
        """Returns the state before the round."""
        algorithm, target = self.algorithm, self.cohort.round
        checkpoints = Checkpoints(self.paths.checkpoints, {"algorithm": type(algorithm).__name__})
        available = checkpoints if Checkpoints.available() else None
        state, position = newest_state(algorithm, self.first, available, separate_rows=True, until=target)
        start = f"the checkpoint after round {position}" if position else "the initial state"
        rounds = f"round {target}" if position + 1 == target else f"rounds {position + 1} to {target}"
        print(f"Starting from {start}{f', and running {rounds} again' if position < target else ''}.", file=sys.stderr)
        while position < target:
            together = cohorts(self.sampler, position, min(_ROUNDS_TOGETHER, target - position), self.first)
            state, _ = algorithm.apply_rounds(state, together, max_rounds=_ROUNDS_TOGETHER)
            position += len(together)
        return state


def _answered(folder: Path, sampler: Sampler, by_configuration: bool) -> Sampler:
    """Returns the sampler of a deployed run, in which clients of nodes that have not answered take no step.

    Args:
      folder: of the run.
      sampler: chooses the clients.
      by_configuration: whether its population is the dataset that the configuration names.
    """
    path = folder / "deliveries.jsonl"
    if not path.exists():
        return sampler
    record = Deliveries.read(path)
    if record.is_of_own_data and by_configuration:
        raise ValueError(
            f"The nodes of the run in {folder} had data of their own (--node-data), which its configuration does not have, so "
            "its rounds cannot be repeated from the folder alone: repeat the run in Python, by "
            "fedsim.systems.Deliveries.read(...).sampler(...) and a sampler of the population of all nodes."
        )
    if record.has_server_steps:
        raise ValueError(
            f"The updates of the run in {folder} arrived when a network delivered them: repeat the run from its record, fedsim "
            f"run --from {folder} --deliveries {path} --rounds {len(record.lines)}, and give the folder of that run."
        )
    return record.sampler(sampler, len(record.lines))


@contextlib.contextmanager
def only_errors() -> Iterator[None]:
    """Ignores ``breakpoint()`` and prints of the algorithm while it is traced, and while earlier rounds run."""
    hook, sys.breakpointhook = sys.breakpointhook, lambda *_, **__: None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.breakpointhook = hook


def _norm(tree: Any) -> float:
    squares = [np.square(np.abs(np.asarray(leaf)).astype(np.float64)) for leaf in jax.tree.leaves(tree)]
    return math.sqrt(sum(float(np.sum(square)) for square in squares))


def _shown(value: np.ndarray) -> str:
    return f"{value.item():.6g}" if value.size == 1 else np.array2string(value, precision=4, threshold=8)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
