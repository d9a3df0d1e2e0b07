"""What a reproduction is made of: cases that can be asked for by name, and the rows that they give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: what the paper says, and what came out here.

    Attributes:
      case: what was run.
      measure: what is compared.
      paper: the paper's figure, as text; empty if it has none.
      ours: ours, as text.
      values: ours, a number a seed, where it is one; None where a run did not get there.
      seeds: how many runs ``ours`` stands for.
      seconds: wall time of all of them, compilation included; what several rows share is counted with the first.
      settings: what the run depends on, for the JSON file.
      details: what else came out, for the JSON file: a curve, a distribution.
      reduced: in what it is less than what the paper did; empty: in nothing.
      note: why ours differs, or what else must be known.
    """

    case: str
    measure: str
    paper: str
    ours: str
    seeds: int
    seconds: float
    values: Sequence[float | None] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reduced: str = ""
    note: str = ""


Case = Callable[[], Iterable[Row]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much of a case is run.

    Attributes:
      seeds: the seeds.
      rounds: at most this many rounds.
      usual_seeds, usual_rounds: what the paper did, or what is thought enough.
    """

    seeds: range
    rounds: int
    usual_seeds: int
    usual_rounds: int

    def reduced(self, *, rounds: bool = True) -> str:
        """In words, in what this is less than usual; ``rounds=False`` where fewer rounds did.

        >>> Plan(range(1), 20, 3, 100).reduced()
        '1 of 3 seeds, 20 of 100 rounds'
        >>> Plan(range(3), 20, 3, 100).reduced(rounds=False)
        ''
        """
        parts = [f"{len(self.seeds)} of {self.usual_seeds} seeds"] if len(self.seeds) < self.usual_seeds else []
        parts += [f"{self.rounds:,} of {self.usual_rounds:,} rounds"] if rounds and self.rounds < self.usual_rounds else []
        return ", ".join(parts)


def _nothing(text: str) -> None:
    """Says nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks for.

    Attributes:
      data: folder of the datasets' folders, or of the files themselves; None: they are fetched, where that can be.
      seeds: how many; None: as many as is usual for the case.
      rounds: at most this many; None: as usual.
      quick: a few rounds of one seed, to see that it runs.
      say: what is told of the progress goes there, a line at a time.

    Raises:
      ValueError: a number is not positive.

    >>> Request(rounds=50).plan(seeds=3, rounds=100)
    Plan(seeds=range(0, 3), rounds=50, usual_seeds=3, usual_rounds=100)
    >>> Request(seeds=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected seeds >= 1, or None, got seeds=0: give a positive whole number.
    """

    data: Path | None = None
    seeds: int | None = None
    rounds: int | None = None
    quick: bool = False
    say: Callable[[str], None] = _nothing

    def __post_init__(self) -> None:
        checks.whole(1, or_none=True, seeds=self.seeds, rounds=self.rounds)
        if self.data is not None and not self.data.is_dir():
            raise FileNotFoundError(f"No folder {self.data}: give --data the folder that the datasets' folders are in.")

    def plan(self, *, seeds: int, rounds: int, quick_rounds: int = 3) -> Plan:
        """Seeds and rounds of a case of which these are the usual ones."""
        few = (1, min(quick_rounds, rounds)) if self.quick else (seeds, rounds)
        return Plan(range(self.seeds or few[0]), self.rounds or few[1], seeds, rounds)

    def folder(self, *names: str) -> Path | None:
        """The first of these folders that ``data`` has, else ``data`` itself, which may hold the files."""
        if self.data is None:
            return None
        return next((self.data / name for name in names if (self.data / name).is_dir()), self.data)

    def file(self, folder: str, pattern: str, what: str) -> Path:
        """The one file in ``data/folder``, or in ``data``, whose name matches.

        Raises:
          FileNotFoundError: there is none, or ``data`` is not given; the message says what is looked for.
        """
        place = self.folder(folder)
        if place is None:
            raise FileNotFoundError(f"{what} are not for download: give --data DIR, where DIR/{folder}/{pattern} is.")
        found = sorted(place.glob(pattern))
        if len(found) != 1:
            there = ", ".join(sorted(path.name for path in place.iterdir())[:20]) or "nothing"
            raise FileNotFoundError(f"Expected one file {pattern} with {what} in {place}, which holds {there}.")
        return found[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A paper's experiment.

    Attributes:
      name: what the command line calls it.
      title: what is compared, in a line.
      paper: authors, title, venue, table or figure, link.
      takes: how long, in words, on two CPU cores.
      needs: which data, in words.
      cases: of a request, name to what runs the case. Nothing is loaded before a case runs.
      about: how it is done and where that differs from the paper.
    """

    name: str
    title: str
    paper: str
    takes: str
    needs: str
    cases: Callable[[Request], Mapping[str, Case]]
    about: str


def spread(values: Sequence[float | None], digits: int = 3) -> str:
    """Mean and standard deviation (that of the sample, n - 1) as text; a value of None did not get there.

    >>> spread([1.0, 2.0, 3.0], 1), spread([0.5]), spread([80.0, None], 0), spread([None])
    ('2.0 ± 1.0', '0.500', '80 (1 of 2)', 'not reached')
    """
    there = [value for value in values if value is not None]
    if not there:
        return "not reached"
    text = f"{np.mean(there):,.{digits}f}"
    text += f" ± {np.std(there, ddof=1):,.{digits}f}" if len(there) > 1 else ""
    return text + (f" ({len(there)} of {len(values)})" if len(there) < len(values) else "")


def holds(values: Sequence[bool]) -> str:
    """In how many of the runs something holds.

    >>> holds([True, False, True])
    'in 2 of 3 seeds'
    """
    return f"in {sum(values)} of {len(values)} seeds"


def joined(*parts: str) -> str:
    """What is not empty, with commas.

    >>> joined("300 of 3,400 writers", "", "1 of 3 seeds")
    '300 of 3,400 writers, 1 of 3 seeds'
    """
    return ", ".join(filter(None, parts))
