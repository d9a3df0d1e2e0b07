"""`Deliveries`: what has arrived at the server of a deployment, by which a simulation repeats it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import Cohort
from fedsim.samplers import Sampler, WrappedSampler
from fedsim.systems._records import Schedule, ServerSteps, Timeline, Totals, Updates

# What a line says of each update that a server step has aggregated. Its step is that of the line.
_OF_UPDATES = tuple(name for name in Updates._fields if name not in ("step", "staleness"))


@dataclasses.dataclass(frozen=True)
class Deliveries:
    """The record of a deployment, ``deliveries.jsonl`` in its run folder: a line for each round or server step.

    Attributes:
      lines: the lines. That of a server step has the ``updates`` that it has aggregated; that of a round, the numbers of the
        nodes that have ``answered``, of how many ``nodes``.
      path: of the file, for messages.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "deliveries.jsonl"
    >>> _ = path.write_text('{"round": 1, "nodes": 2, "answered": [1]}')
    >>> deliveries = Deliveries.read(path)
    >>> deliveries.has_server_steps
    False

    In the simulation, the clients of node 0 take no step in this round:

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
    >>> sampler = deliveries.sampler(fedsim.UniformSampler(data, clients=4, seed=0), rounds=1)
    >>> cohort = sampler.cohort(0)
    >>> cohort.clients.tolist(), cohort.work.tolist()
    ([1, 0, 3, 2], [1.0, 0.0, 1.0, 0.0])
    """

    lines: Sequence[Mapping[str, Any]]
    path: str

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Deliveries:
        """Reads the file.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no record of a deployment.
        """
        try:
            lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
            if [line["round"] for line in lines] != list(range(1, len(lines) + 1)) or not lines:
                raise ValueError("its lines are not those of rounds 1, 2 and so on")
            kinds = {"updates" in line for line in lines}
            if len(kinds) > 1 or not all("updates" in line or {"nodes", "answered"} <= line.keys() for line in lines):
                raise ValueError("its lines do not say what has arrived")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not the record of a deployment ({error}): give the file deliveries.jsonl of a run of fedsim deploy."
            ) from error
        return cls(lines, str(path))

    @property
    def has_server_steps(self) -> bool:
        """Whether a synchronization model has aggregated single updates; otherwise whole rounds were deployed."""
        return "updates" in self.lines[0]

    @property
    def synchronization(self) -> str | None:
        """The class of the synchronization model; None if whole rounds were deployed, or the record is an older one."""
        return self.lines[0].get("synchronization")

    @property
    def is_of_own_data(self) -> bool:
        """Whether the nodes had clients of their own, and not those of a dataset that a configuration names."""
        return "first" in self.lines[0]

    def schedule(self, rounds: int) -> Schedule:
        """Returns the schedule of the first server steps.

        Raises:
          ValueError: there are fewer.
        """
        lines = self._first(rounds)
        counts = [len(line["updates"]["client"]) for line in lines]
        columns = {name: np.concatenate([np.asarray(line["updates"][name]) for line in lines]) for name in _OF_UPDATES}
        step = np.repeat(np.arange(rounds), counts)
        numbers = {name: column.astype(np.int64) for name, column in columns.items() if name not in ("weight", "scale")}
        updates = Updates(
            **{**columns, **numbers, "start": columns["start"], "stop": columns["stop"]},
            step=step,
            staleness=step - numbers["version"],
        )
        steps = {name: np.array([line["steps"][name] for line in lines]) for name in ServerSteps._fields}
        known = {name: getattr(updates, name) for name in Timeline._fields if name != "outcome"}
        timeline = Timeline(**known, outcome=np.zeros(len(step), np.int8))  # All of them were aggregated.
        totals = Totals(**dict.fromkeys(Totals._fields, 0) | {"dispatched": sum(counts), "aggregated": sum(counts)})
        return Schedule(updates, ServerSteps(**steps), timeline, totals, float(steps["time"][-1]))

    def sampler(self, sampler: Sampler, rounds: int) -> Sampler:
        """Returns the cohorts of a sampler, in which clients of nodes that have not answered in a round take no step.

        Raises:
          ValueError: there are fewer rounds.
        """
        return _Answered(sampler, self._first(rounds))

    def _first(self, rounds: int) -> Sequence[Mapping[str, Any]]:
        if rounds > len(self.lines):
            raise ValueError(
                f"Expected rounds <= {len(self.lines)}, the rounds in {self.path}, got rounds={rounds}: give at most as many."
            )
        return self.lines[:rounds]


class _Answered(WrappedSampler):
    def __init__(self, sampler: Sampler, lines: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(sampler)
        self._lines = lines

    def _transform(self, cohort: Cohort) -> Cohort:
        if cohort.round >= len(self._lines):
            return cohort
        line = self._lines[cohort.round]
        of_node = cohort.clients % line["nodes"]
        if "first" in line:  # Each node has clients of its own, from this position on.
            of_node = np.searchsorted(line["first"], cohort.clients, side="right") - 1
        answered = np.isin(of_node, line["answered"])
        if answered.all():
            return cohort
        work = np.ones(len(cohort), np.float32) if cohort.work is None else cohort.work
        return dataclasses.replace(cohort, work=np.where(answered, work, 0))
