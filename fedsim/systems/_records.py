"""What a simulation records: the schedule of its server steps, and counts."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedsim.systems._dispatch import Dispatch

OUTCOMES = ("aggregated", "late", "lost", "dropped")


class Updates(NamedTuple):
    """The aggregated updates, in the order of their aggregation; every field has one entry per update.

    Attributes:
      step: ``int32``, the server step that aggregated it, from 0. Its result is version ``step + 1``.
      number: ``int64``, the number of the dispatch.
      client: ``int32``, position in the population.
      round: ``int32``, the round of the sampler; (round, client) determines the keys of the client's training.
      version: ``int32``, the version of the model that the client started from.
      staleness: ``int32``, ``step - version``: the server steps since then, before this one.
      weight, scale: ``float64``; the server step's update is the sum of weight * scale * update over the sum of weight, where
        the weights are multiplied by those of the algorithm.
      start: ``float64``, when the server sent the model, in seconds.
      stop: ``float64``, when the update arrived.
    """

    step: np.ndarray
    number: np.ndarray
    client: np.ndarray
    round: np.ndarray
    version: np.ndarray
    staleness: np.ndarray
    weight: np.ndarray
    scale: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class ServerSteps(NamedTuple):
    """The server steps; every field has one entry per step.

    The fields after ``in_flight`` are those of `Totals` with the same names, counted since the step before.

    Attributes:
      time: ``float64``, in seconds.
      updates: ``int32``, the number of updates that were aggregated.
      in_flight: ``int32``, the dispatches without an answer so far, before the server sends the new version to other clients.
      late, lost, dropped, downloads, uploads, bytes_down, bytes_up, messages_lost, messages_doubled, steps, steps_wasted:
        ``int64``.
    """

    time: np.ndarray
    updates: np.ndarray
    in_flight: np.ndarray
    late: np.ndarray
    lost: np.ndarray
    dropped: np.ndarray
    downloads: np.ndarray
    uploads: np.ndarray
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    messages_lost: np.ndarray
    messages_doubled: np.ndarray
    steps: np.ndarray
    steps_wasted: np.ndarray


class Timeline(NamedTuple):
    """The dispatches whose outcome is known, in the order in which it became known; every field has one entry per dispatch.

    Attributes:
      number: ``int64``, the number of the dispatch.
      client: ``int32``, position in the population.
      start, stop: ``float64``, from the dispatch until the update arrived or was lost, in seconds.
      version: ``int32``, the version of the model that the client started from.
      outcome: ``int8``, an index of `OUTCOMES`: aggregated, late, lost or dropped.
    """

    number: np.ndarray
    client: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    version: np.ndarray
    outcome: np.ndarray


class Totals(NamedTuple):
    """What happened since the start of the run. ``dispatched`` is the sum of the six numbers after it.

    Messages, bytes and steps are those of the dispatches whose outcome is known: aggregated, late, lost or dropped.

    Attributes:
      dispatched: the models that were sent to clients.
      aggregated: the updates that were aggregated.
      late: the updates that arrived after the server had stopped waiting for them, and were not used.
      lost: the dispatches of which no update came.
      dropped: the updates that the synchronization model dropped.
      buffered: the updates that were received and are not yet aggregated.
      in_flight: the dispatches without an answer so far.
      downloads, uploads: the messages that were sent, including those that were repeated or doubled.
      bytes_down, bytes_up: their bytes.
      messages_lost: the messages that were lost.
      messages_doubled: the second copies of messages, which the receiver ignored.
      steps: the local steps that clients took.
      steps_wasted: those for updates that were not aggregated.
    """

    dispatched: int
    aggregated: int
    late: int
    lost: int
    dropped: int
    buffered: int
    in_flight: int
    downloads: int
    uploads: int
    bytes_down: int
    bytes_up: int
    messages_lost: int
    messages_doubled: int
    steps: int
    steps_wasted: int


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The events of a stretch of server steps.

    Attributes:
      updates: the updates that were aggregated in these server steps.
      steps: the server steps.
      timeline: the dispatches whose outcome became known.
      totals: the counts at the end, since the start of the run.
      seconds: the time of the last event.
      arguments: a text of each argument of the simulation, by name.
    """

    updates: Updates
    steps: ServerSteps
    timeline: Timeline
    totals: Totals
    seconds: float
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def largest_staleness(self) -> int:
        """The largest staleness of an update: one less than the number of versions that must be kept."""
        return int(self.updates.staleness.max(initial=0))

    @classmethod
    def joined(cls, parts: Sequence[Schedule]) -> Schedule:
        """Returns the events of stretches that follow one another.

        >>> import fedsim
        >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1] * 4)
        >>> simulator = fedsim.systems.Simulator(fedsim.UniformSampler(data, clients=2, seed=0), steps=np.ones(4, int))
        >>> Schedule.joined([simulator.advance(1), simulator.advance(3)]).steps.time
        array([1., 2., 3.])
        """
        columns = [zip(*events, strict=True) for events in zip(*((p.updates, p.steps, p.timeline) for p in parts), strict=True)]
        updates, steps, timeline = ([np.concatenate(column) for column in of] for of in columns)
        last = parts[-1]
        return dataclasses.replace(
            last, updates=Updates(*updates), steps=ServerSteps(*steps), timeline=Timeline(*timeline)
        )  # fmt: skip


# The type codes of Python's arrays, which grow without an object per entry: int8, int32, int64 and float64.
_CODES: dict[type, str] = {Updates: "iqiiiidddd", ServerSteps: "dii" + 11 * "q", Timeline: "qiddib"}
_COUNTED = ("aggregated", *ServerSteps._fields[3:])


class Records:
    """What happened since `take` was called last, and the counts since the start of the run.

    Args:
      bytes_down, bytes_up: the sizes of the messages.

    Attributes:
      counts: the fields of `Totals` that are counted when the outcome of a dispatch is known, by name.
      before: these counts at the last server step.

    >>> records = Records(bytes_down=10, bytes_up=10)
    >>> records.step(3.0, 2, in_flight=5)
    >>> records.take()[1].in_flight
    array([5], dtype=int32)
    """

    def __init__(self, bytes_down: int, bytes_up: int) -> None:
        self._bytes_down, self._bytes_up = bytes_down, bytes_up
        self.counts, self.before = dict.fromkeys(_COUNTED, 0), dict.fromkeys(_COUNTED, 0)
        self._columns = _empty_columns()

    def update(self, update: Dispatch, step: int, weight: float, scale: float) -> None:
        """Records an update that a server step aggregates."""
        number, client, round, version, start, stop = update[:6]
        self._append(Updates, step, number, client, round, version, step - version, weight, scale, start, stop)
        self.outcome(update, "aggregated")

    def step(self, time: float, updates: int, in_flight: int) -> None:
        """Records a server step."""
        since = [self.counts[name] - self.before[name] for name in _COUNTED[1:]]
        self._append(ServerSteps, time, updates, in_flight, *since)
        self.before = dict(self.counts)

    def outcome(self, dispatch: Dispatch, outcome: str) -> None:
        """Records the outcome of a dispatch."""
        counts = self.counts
        counts[outcome] += 1
        counts["downloads"] += dispatch.downloads
        counts["uploads"] += dispatch.uploads
        counts["bytes_down"] += dispatch.downloads * self._bytes_down
        counts["bytes_up"] += dispatch.uploads * self._bytes_up
        counts["messages_lost"] += dispatch.lost
        counts["messages_doubled"] += dispatch.doubled
        counts["steps"] += dispatch.steps
        counts["steps_wasted"] += dispatch.steps * (outcome != "aggregated")
        number, client, _, version, start, stop = dispatch[:6]
        self._append(Timeline, number, client, start, stop, version, OUTCOMES.index(outcome))

    def take(self) -> tuple[Updates, ServerSteps, Timeline]:
        """Returns what was recorded since the last call."""
        updates, steps, timeline = ([np.array(column) for column in columns] for columns in self._columns.values())
        self._columns = _empty_columns()
        return Updates(*updates), ServerSteps(*steps), Timeline(*timeline)

    def _append(self, kind: type, *values: float) -> None:
        for column, value in zip(self._columns[kind], values, strict=True):
            column.append(value)


def _empty_columns() -> dict[type, list[array.array[Any]]]:
    return {kind: [array.array(code) for code in codes] for kind, codes in _CODES.items()}
