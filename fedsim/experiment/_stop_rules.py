"""Rules by which a run ends before its last round: ``fedsim run --stop-when "no_better(evaluations=5)"``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from fedsim import checks
from fedsim.algorithm import Algorithm
from fedsim.data import Cohort
from fedsim.experiment._lines import Line, is_better
from fedsim.names import make
from fedsim.run_files import megabytes_of, scalar_metrics, shown_number

_SPLIT = "validation"


@runtime_checkable
class StopRule(Protocol):
    """Says after an evaluation whether a run ends.

    >>> isinstance(NoBetter(evaluations=2), StopRule)
    True
    """

    @property
    def metric(self) -> str | None:
        """The metric of the validation data that it reads; None if it reads none."""
        ...

    def reason(self, history: Sequence[Line]) -> str | None:
        """Returns why the run ends after the last evaluation, as the end of a sentence; None if it goes on.

        Args:
          history: all lines of the metrics so far, see ``metrics.jsonl``.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoBetter:
    """Ends a run when a metric of the validation data has had no better value for a number of evaluations.

    Attributes:
      evaluations: the number, at least 1.
      metric: its name, such as ``"accuracy"``.

    >>> history = [{"round": r, "validation_loss": loss} for r, loss in ((10, 0.5), (20, 0.4), (30, 0.45))]
    >>> NoBetter(evaluations=1).reason(history), NoBetter(evaluations=2).reason(history)
    ('no better validation loss in 1 evaluation, 0.4000 after round 20 is the best', None)
    """

    evaluations: int
    metric: str = "loss"

    def __post_init__(self) -> None:
        checks.whole(1, evaluations=self.evaluations)

    def reason(self, history: Sequence[Line]) -> str | None:
        lines = _evaluations(history, self.metric)
        best = 0
        for number, line in enumerate(lines):
            if is_better(line, lines[best], f"{_SPLIT}_{self.metric}"):
                best = number
        if len(lines) - 1 - best < self.evaluations:
            return None
        some = "1 evaluation" if self.evaluations == 1 else f"{self.evaluations} evaluations"
        value = lines[best][f"{_SPLIT}_{self.metric}"]
        shown = "no finite value" if value is None else f"{shown_number(value)} after round {lines[best]['round']} is the best"
        return f"no better {_SPLIT} {self.metric} in {some}, {shown}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reached:
    """Ends a run when a metric of the validation data has a value, or a better one.

    Attributes:
      value: the value.
      metric: its name.

    >>> Reached(value=0.9).reason([{"round": 10, "validation_accuracy": 0.95}])
    'the validation accuracy reached 0.9'
    """

    value: float
    metric: str = "accuracy"

    def __post_init__(self) -> None:
        checks.number(value=self.value)

    def reason(self, history: Sequence[Line]) -> str | None:
        name = f"{_SPLIT}_{self.metric}"
        lines = _evaluations(history, self.metric)
        target = {**lines[-1], name: self.value} if lines else {}
        if not lines or lines[-1][name] is None or is_better(target, lines[-1], name):
            return None
        return f"the {_SPLIT} {self.metric} reached {self.value:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """Ends a run when its clients have sent and received a number of bytes, or its virtual clock has reached a time.

    It is decided at evaluations, so a run may spend more, at most what the rounds between two evaluations take.

    Attributes:
      megabytes: 10⁶ bytes, of all clients in both directions; None for no limit.
      seconds: simulated seconds; None for no limit. A run without a virtual clock refuses it before its first round.

    >>> Spent(megabytes=1).reason([{"round": 1, "bits_up": 8_000_000, "bits_down": 800_000}])
    'clients sent and received 1.1 MB'
    """

    megabytes: float | None = None
    seconds: float | None = None
    metric: None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        checks.positive(or_none=True, megabytes=self.megabytes, seconds=self.seconds)
        if self.megabytes is None and self.seconds is None:
            raise ValueError("Expected megabytes or seconds, got neither: write spent(megabytes=100), for example.")

    def reason(self, history: Sequence[Line]) -> str | None:
        megabytes = megabytes_of(history)[-1] if history else 0.0
        if self.megabytes is not None and megabytes >= self.megabytes:
            return f"clients sent and received {megabytes:,.1f} MB"
        times = [line["simulated_seconds"] for line in history if "simulated_seconds" in line]
        return (
            f"{times[-1]:,.1f} simulated seconds" if self.seconds is not None and times and times[-1] >= self.seconds else None
        )


STOP_RULES = {"no_better": NoBetter, "reached": Reached, "spent": Spent}


def stop_rules(text: str | None) -> list[StopRule]:
    """Returns the rules in a text, which are joined by "or".

    Raises:
      ValueError: there is no such rule, or it refuses an option.

    >>> stop_rules("no_better(evaluations=3) or spent(megabytes=100)")[1]
    Spent(megabytes=100, seconds=None, metric=None)
    """
    parts = text.split(" or ") if text is not None else []
    return [make("stop rule", part.strip(), STOP_RULES, StopRule) for part in parts]


def check_has_clock(rules: Iterable[StopRule], algorithm: Algorithm, cohort: Cohort) -> None:
    """Raises ``ValueError`` if a rule limits simulated seconds and a run with such cohorts has none."""
    limits = [rule.seconds for rule in rules if isinstance(rule, Spent) and rule.seconds is not None]
    if limits and "simulated_seconds" not in cohort.measures:
        is_simulable = not hasattr(algorithm, "topology") and type(algorithm).apply is Algorithm.apply
        clock = ", or give the run a clock, such as --step-seconds 1 (fedsim.experiment.simulate)" if is_simulable else ""
        raise ValueError(
            f"Expected a run with a virtual clock for spent(seconds={limits[0]:g}), got one without: limit megabytes or "
            f"rounds{clock}."
        )


def check_metrics(rules: Iterable[StopRule], known: Sequence[str] | None) -> None:
    """Raises ``ValueError`` if a rule reads a metric by which evaluations cannot be ranked; None if these are not known yet."""
    for rule in rules:
        if rule.metric is not None and known is not None and rule.metric not in known:
            raise ValueError(_no_metric(rule.metric, known))


def _no_metric(metric: str, known: Iterable[str]) -> str:
    return (
        "Expected a metric of the validation data with one number, of which it is known whether higher or lower values are "
        f"better, got metric={metric!r}: choose one of {', '.join(known)}."
    )


def _evaluations(history: Sequence[Line], metric: str) -> list[Line]:
    """Returns the lines of the evaluations that have a metric of the validation data."""
    name = f"{_SPLIT}_{metric}"
    lines = [line for line in history if name in line]
    if not lines and (names := [known for line in history for known in scalar_metrics(line, _SPLIT)]):
        raise ValueError(_no_metric(metric, dict.fromkeys(each.removeprefix(f"{_SPLIT}_") for each in names)))
    return lines
