"""Detects a loss that rises above its start, or that becomes enormous, during a run."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque

from fedsim.algorithm import Algorithm
from fedsim.experiment._lines import Line

_ADVICE = (
    "Try a lower client learning rate, a lower server learning rate, fewer local epochs, or clipping of the updates "
    "(`--clip 1`, `aggregators.Clipped`)."
)
_RISE = 2.0
_ENORMOUS = 100.0
# Tables have no space for losses of this size; without a warning, only a size that no loss has by its unit shows divergence.
_LARGE, _MEANINGLESS = 1e6, 1e15


class LossMonitor:
    """Watches the training loss of every round and the test loss of every evaluation.

    The start of a loss is its first value, but at least the logarithm of the number of classes, which is the cross-entropy of
    a uniform guess: clients with few classes fit them within their first round. Without classes, the start of the training
    loss is the largest of the first five rounds. A loss diverges

    - if it is more than twice its start (after ten rounds, the median of the last five training losses; after three
      evaluations, both of the last two test losses), or
    - if it is not finite or more than 100 times the logarithm of the number of classes (three training losses in a row, or one
      test loss).

    Args:
      num_classes: the number of classes of the model; None if it has none.

    >>> monitor = LossMonitor(num_classes=10)
    >>> for round, loss in enumerate([1.5, 2.0, 4.0, 9.0, 20.0, 40.0, 80.0, 90.0, 95.0, 99.0], start=1):
    ...     monitor.add({"round": round, "loss": loss})
    >>> print(monitor.warning())  # doctest: +ELLIPSIS
    The training loss rose from 1.5 in round 1 to 99 in round 10. Try a lower client learning rate, ...
    """

    def __init__(self, num_classes: int | None) -> None:
        self._uniform = math.log(num_classes) if num_classes and num_classes > 1 else 0.0
        self._series = [
            _Series("training loss", self._uniform, window=5, patience=10, repeats=3),
            _Series("test loss", self._uniform, window=2, patience=3, repeats=1),
        ]

    @classmethod
    def of(cls, algorithm: Algorithm) -> LossMonitor:
        """Returns the monitor for a run of an algorithm."""
        return cls(getattr(getattr(algorithm, "model", None), "num_classes", None))

    def add(self, line: Line) -> None:
        """Reads a line of the metrics; lines without a loss change nothing."""
        train, test = self._series
        if _is_scalar(line, "loss") and (line["loss"] is not None or line.get("dropped", 1)):  # else no client took a step
            train.add(line["round"], line["loss"])
        if _is_scalar(line, "test_loss"):
            test.add(line["round"], line["test_loss"])

    @property
    def diverged(self) -> bool:
        """Whether a loss has diverged and is still enormous or more than twice its start."""
        return any(series.is_high() for series in self._series)

    def warning(self) -> str | None:
        """One sentence per loss that has diverged, with advice; None if none has."""
        sentences = [sentence for series in self._series if (sentence := series.sentence())]
        return " ".join([*sentences, _ADVICE]) if sentences else None


def is_diverged(value: float | None, warned: bool) -> bool:
    """Returns whether a table has the word "diverged" in place of a metric.

    Args:
      value: the metric; None if it is not finite or missing.
      warned: whether `LossMonitor` has a warning for the run.

    >>> is_diverged(1e7, warned=False), is_diverged(1e7, warned=True), is_diverged(None, warned=True), is_diverged(1e20, False)
    (False, True, True, True)
    """
    size = math.inf if value is None else abs(value)
    return size >= _LARGE if warned else value is not None and size >= _MEANINGLESS


class _Series:
    """The values of one loss, of which only those are stored that the rules need."""

    def __init__(self, name: str, uniform: float, *, window: int, patience: int, repeats: int) -> None:
        self._name, self._uniform = name, uniform
        self._patience, self._repeats = patience, repeats
        self._first: list[tuple[int, float]] = []
        self._recent: deque[float] = deque(maxlen=window)
        self._last = self._largest = (0, -math.inf)
        self._count = 0
        self._diverged = False

    def add(self, round: int, value: float | None) -> None:
        value = math.inf if value is None else float(value)
        self._last = round, value
        self._largest = max(self._largest, self._last, key=lambda point: point[1])
        self._count += 1
        self._recent.append(value)
        if len(self._first) < 5:
            self._first.append(self._last)
        self._diverged = self._diverged or self._diverges()

    def is_high(self) -> bool:
        return self._diverged and self._last[1] > min(_RISE * self._start(), self._enormous())

    def sentence(self) -> str | None:
        if not self._diverged:
            return None
        (first_round, first), (last_round, last), (largest_round, largest) = self._first[0], self._last, self._largest
        now = f"; in round {last_round} it is {_shown(last)}" if last_round != largest_round else ""
        if math.isinf(last):
            now = ""
        if math.isinf(largest):
            return f"The {self._name} was {_shown(first)} in round {first_round} and not finite in round {largest_round}{now}."
        if largest > first:
            rise = f"rose from {_shown(first)} in round {first_round} to {_shown(largest)} in round {largest_round}"
            return f"The {self._name} {rise}{now}."
        return f"The {self._name} is {_shown(last)} in round {last_round}, and {_shown(self._uniform)} for a uniform guess."

    def _diverges(self) -> bool:
        latest = list(self._recent)[-self._repeats :]
        if len(latest) == self._repeats and min(latest) > self._enormous():
            return True
        # Of two values the smaller one, of five the median: one unusual cohort or evaluation is not a trend.
        return self._count >= self._patience and statistics.median_low(self._recent) > _RISE * self._start()

    def _enormous(self) -> float:
        return _ENORMOUS * self._uniform or sys.float_info.max

    def _start(self) -> float:
        if self._uniform or self._repeats == 1:
            return max(self._first[0][1], self._uniform)
        return max(value for _, value in self._first)


def _is_scalar(line: Line, name: str) -> bool:
    return name in line and (line[name] is None or isinstance(line[name], int | float))


def _shown(value: float) -> str:
    return "infinity" if math.isinf(value) else f"{value:,.0f}" if 100 <= value < 1e9 else f"{value:.3g}"
