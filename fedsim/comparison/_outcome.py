"""What one run has reached: a metric after the last round, after the best one and on average, and the cost of a target."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedsim.comparison._runs import RecordedRun
from fedsim.run_files import megabytes_of, rounds_of, simulated_seconds_of, wall_seconds_of

At = Literal["last", "best", "last10"]
AT: tuple[At, ...] = ("last", "best", "last10")
Against = Literal["rounds", "bytes", "seconds"]
_AVERAGED = 10


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run has taken until an evaluation.

    Attributes:
      rounds: the number of rounds.
      megabytes: what was sent in both directions, in 1e6 bytes.
      seconds: simulated seconds of a run on a virtual clock, otherwise the wall time of its rounds.

    >>> Cost(rounds=3, megabytes=1.5, seconds=0.5).rounds
    3
    """

    rounds: float
    megabytes: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run has reached in a metric.

    Attributes:
      last: after the last round.
      best: after the round that is best by the metric that settings are selected by.
      best_round: this round; None if no value is finite.
      last10: the mean of the last ten evaluations, or of all if there are fewer.
      selection: the same three values of the metric that settings are selected by, by name.
      to_target: the cost of the first evaluation that reaches the target; None if there is none, or no target.

    >>> Outcome(last=0.8, best=0.9, best_round=3, last10=0.85, selection={"last": 0.8}, to_target=None).at("best")
    0.9
    """

    last: float
    best: float
    best_round: int | None
    last10: float
    selection: Mapping[str, float]
    to_target: Cost | None

    def at(self, at: At) -> float:
        """Returns the value that ``at`` names."""
        return {"last": self.last, "best": self.best, "last10": self.last10}[at]


def outcome_of(run: RecordedRun, metric: str, selection: str, target: tuple[str, float] | None = None) -> Outcome:
    """Returns what a run has reached.

    Args:
      run: with evaluations of the metrics.
      metric: what is reported, such as ``test_accuracy``.
      selection: by which rounds are selected, such as ``validation_accuracy``.
      target: a metric and the value it has to reach.

    >>> from pathlib import Path
    >>> history = [{"round": n, "seconds": 2.0, "test_accuracy": value} for n, value in [(1, 0.5), (2, 0.75), (3, 0.25)]]
    >>> outcome = outcome_of(RecordedRun(folder=Path("a"), fields={}, seed=0, rounds=3, history=history),
    ...                      "test_accuracy", "test_accuracy", ("test_accuracy", 0.7))
    >>> outcome.last, outcome.best, outcome.last10, outcome.to_target
    (0.25, 0.75, 0.5, Cost(rounds=2, megabytes=0.0, seconds=4.0))
    """
    values, ranks = _by_round(run, metric), _by_round(run, selection)
    sign = -1.0 if run.better(selection) == "lower" else 1.0
    finite = {round: sign * rank for round, rank in ranks.items() if math.isfinite(rank) and round in values}
    best_round = max(finite, key=lambda round: (finite[round], -round)) if finite else None
    return Outcome(
        last=list(values.values())[-1],
        best=math.nan if best_round is None else values[best_round],
        best_round=best_round,
        last10=_mean_of_last(list(values.values())),
        selection={
            "last": list(ranks.values())[-1],
            "best": math.nan if best_round is None else ranks[best_round],
            "last10": _mean_of_last(list(ranks.values())),
        },
        to_target=None if target is None else _cost_of(run, *target),
    )


def has_virtual_clock(run: RecordedRun) -> bool:
    """Returns whether the seconds of a run are simulated ones."""
    return any("simulated_seconds" in line for line in run.history)


def curve_of(run: RecordedRun, metric: str, against: Against, *, simulated: bool) -> dict[int, tuple[float, float]]:
    """Returns, by round, the rounds, megabytes or seconds until a run's evaluation, and the value of a metric, if it is finite.

    >>> from pathlib import Path
    >>> history = [{"round": 2, "seconds": 2.0}, {"round": 2, "test_accuracy": 0.5}]
    >>> curve_of(RecordedRun(folder=Path("a"), fields={}, seed=0, rounds=2, history=history), "test_accuracy", "seconds",
    ...          simulated=False)
    {2: (2.0, 0.5)}
    """
    seconds = simulated_seconds_of if simulated else wall_seconds_of
    positions = {"rounds": rounds_of, "bytes": megabytes_of, "seconds": seconds}[against](run.history)
    points = {
        line["round"]: (x, _number(line.get(metric))) for x, line in zip(positions, run.history, strict=True) if metric in line
    }
    return {round: point for round, point in points.items() if math.isfinite(point[1])}


def _by_round(run: RecordedRun, metric: str) -> dict[int, float]:
    return {line["round"]: _number(line[metric]) for line in run.history if metric in line}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _mean_of_last(values: Sequence[float]) -> float:
    some = values[-_AVERAGED:]
    return math.fsum(some) / len(some)


def _cost_of(run: RecordedRun, metric: str, value: float) -> Cost | None:
    lower = run.better(metric) == "lower"
    for i, line in enumerate(run.history):
        number = _number(line.get(metric))
        if number <= value if lower else number >= value:
            until = run.history[: i + 1]
            seconds = simulated_seconds_of if has_virtual_clock(run) else wall_seconds_of
            return Cost(rounds=line["round"], megabytes=megabytes_of(until)[-1], seconds=seconds(until)[-1])
    return None
