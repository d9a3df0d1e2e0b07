"""The structure of a reproduction: cases, which are run by name, and the rows that they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: a result of the paper and that of fedsim.

    Attributes:
      case: a description of the case.
      measure: the quantity that is compared.
      paper: the paper's result, as text; empty if there is none.
      ours: the result of fedsim, as text.
      values: the result of each seed, if it is a number; None for a run that did not reach the target.
      seeds: the number of runs.
      seconds: the wall time of all runs, compilation included. Time that several rows share is in the first of them.
      settings: the settings of the run, for the JSON file.
      details: further results for the JSON file, for example a curve or a distribution.
      reduced: how the run is smaller than the paper's; empty if it is not.
      note: a reason for a difference, or other information.
    """

    case: str
    measure: str
    paper: str = ""
    ours: str
    seeds: int
    seconds: float = 0.0
    values: Sequence[float | None] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reduced: str = ""
    note: str = ""

    @classmethod
    def of_seeds(cls, values: Sequence[float | None], *, digits: int = 3, **fields: Any) -> Row:
        """Returns a row of a number that every seed has: its mean and standard deviation, see `mean_and_std`.

        >>> row = Row.of_seeds([80.0, 90.0], digits=1, case="2NN", measure="rounds")
        >>> row.ours, row.seeds, row.paper, row.seconds
        ('85.0 ± 7.1', 2, '', 0.0)
        """
        own: dict[str, Any] = {"ours": mean_and_std(values, digits), "values": values, "seeds": len(values)}
        return cls(**own | fields)

    @classmethod
    def counted(cls, found: Sequence[bool], **fields: Any) -> Row:
        """Returns a row of something that is true in some seeds, see `count_of_seeds`.

        >>> Row.counted([True, False], case="2NN", measure="faster than FedSGD").ours
        'in 1 of 2 seeds'
        """
        own: dict[str, Any] = {"ours": count_of_seeds(found), "seeds": len(found)}
        return cls(**own | fields)


Case = Callable[[], Iterable[Row]]


@dataclasses.dataclass(frozen=True)
class Extent:
    """The size of the run of a case.

    Attributes:
      seeds: the seeds.
      rounds: the largest number of rounds.
      usual_seeds: the number of seeds in the paper, or another sufficient number.
      usual_rounds: the same for rounds.
    """

    seeds: range
    rounds: int
    usual_seeds: int
    usual_rounds: int

    def reduced(self, *, rounds: bool = True) -> str:
        """Returns a text about how this is smaller than usual, without the rounds if ``rounds`` is False.

        >>> Extent(range(1), 20, 3, 100).reduced()
        '1 of 3 seeds, 20 of 100 rounds'
        >>> Extent(range(3), 20, 3, 100).reduced(rounds=False)
        ''
        """
        parts = [f"{len(self.seeds)} of {self.usual_seeds} seeds"] if len(self.seeds) < self.usual_seeds else []
        parts += [f"{self.rounds:,} of {self.usual_rounds:,} rounds"] if rounds and self.rounds < self.usual_rounds else []
        return ", ".join(parts)


def _ignore(text: str) -> None:
    """Ignores a message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a reproduction.

    Attributes:
      data: a folder with a folder for each dataset, or with the files themselves; None downloads them, where that is possible.
      seeds: the number of seeds; None for the usual number of the case.
      rounds: the largest number of rounds; None for the usual number.
      quick: whether to run only a few rounds of one seed, as a test.
      log: a function that receives messages about the progress, one line at a time.

    Raises:
      ValueError: a number is not positive.
      FileNotFoundError: there is no folder ``data``.

    >>> Request(rounds=50).extent(seeds=3, rounds=100)
    Extent(seeds=range(0, 3), rounds=50, usual_seeds=3, usual_rounds=100)
    >>> Request(seeds=0)
    Traceback (most recent call last):
    ...
    ValueError: Expected seeds >= 1, or None, got seeds=0: give a positive whole number.
    """

    data: Path | None = None
    seeds: int | None = None
    rounds: int | None = None
    quick: bool = False
    log: Callable[[str], None] = _ignore

    def __post_init__(self) -> None:
        checks.whole(1, or_none=True, seeds=self.seeds, rounds=self.rounds)
        if self.data is not None and not self.data.is_dir():
            raise FileNotFoundError(
                f"There is no folder {self.data}. With --data, give the folder that has a folder for each dataset."
            )

    def extent(self, *, seeds: int, rounds: int, quick_rounds: int = 3) -> Extent:
        """Returns the seeds and rounds of a case with these usual numbers."""
        few = (1, min(quick_rounds, rounds)) if self.quick else (seeds, rounds)
        return Extent(range(self.seeds or few[0]), self.rounds or few[1], seeds, rounds)

    def folder(self, *names: str) -> Path | None:
        """Returns the first of these folders that exists in ``data``, otherwise ``data`` itself, which may have the files."""
        if self.data is None:
            return None
        return next((self.data / name for name in names if (self.data / name).is_dir()), self.data)

    def file(self, folder: str, pattern: str, what: str) -> Path:
        """Returns the only file in ``data/folder``, or in ``data``, whose name matches.

        Args:
          folder: the name of the folder.
          pattern: the pattern of the file's name.
          what: a description of the file for the error message.

        Raises:
          FileNotFoundError: there is no such file or there are several, or ``data`` is not given.
        """
        place = self.folder(folder)
        if place is None:
            raise FileNotFoundError(f"Cannot download {what}. Give --data DIR with a file DIR/{folder}/{pattern}.")
        found = sorted(place.glob(pattern))
        if len(found) != 1:
            files = ", ".join(sorted(path.name for path in place.iterdir())[:20]) or "no files"
            raise FileNotFoundError(f"Expected one file {pattern} with {what} in {place}, which has {files}.")
        return found[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reproduction:
    """An experiment of a paper.

    Attributes:
      name: the name on the command line.
      title: what is compared, in one line.
      paper: authors, title, venue, table or figure, and link.
      duration: a text about the time that it takes on two CPU cores.
      required_data: a text about the data that it needs.
      cases: a function from a request to a mapping of names to cases. Data is loaded only when a case runs.
      notes: the set-up, and how it differs from the paper's.
    """

    name: str
    title: str
    paper: str
    duration: str
    required_data: str
    cases: Callable[[Request], Mapping[str, Case]]
    notes: str


def mean_and_std(values: Sequence[float | None], digits: int = 3) -> str:
    """Returns mean and sample standard deviation (n - 1) as text. None is a run that did not reach its target.

    >>> mean_and_std([1.0, 2.0, 3.0], 1), mean_and_std([0.5]), mean_and_std([80.0, None], 0), mean_and_std([None])
    ('2.0 ± 1.0', '0.500', '80 (1 of 2)', 'not reached')
    """
    reached = [value for value in values if value is not None]
    if not reached:
        return "not reached"
    text = f"{np.mean(reached):,.{digits}f}"
    text += f" ± {np.std(reached, ddof=1):,.{digits}f}" if len(reached) > 1 else ""
    return text + (f" ({len(reached)} of {len(values)})" if len(reached) < len(values) else "")


def count_of_seeds(values: Sequence[bool]) -> str:
    """Returns a text with the number of runs in which something is true.

    >>> count_of_seeds([True, False, True])
    'in 2 of 3 seeds'
    """
    return f"in {sum(values)} of {len(values)} seeds"


def join_nonempty(*parts: str) -> str:
    """Joins the texts that are not empty with commas.

    >>> join_nonempty("300 of 3,400 writers", "", "1 of 3 seeds")
    '300 of 3,400 writers, 1 of 3 seeds'
    """
    return ", ".join(filter(None, parts))
