"""Cohorts that somebody wrote down."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from fedsim.data import FederatedData
from fedsim.samplers._sampler import SeededSampler


class ScheduleSampler(SeededSampler):
    """A fixed schedule: which clients take part in round 0, in round 1, and so on. A round may have nobody.

    Args:
      data: the population.
      schedule: client ids, per round.
      seed: the run's seed, or its root key: the clients' own randomness comes from it.
      repeat: begin again after the last round, instead of an error.

    Attributes:
      clients: the slots: those of the longest round.

    Guarantees:
      - Round r has the clients of the schedule's entry r, in its order.

    Raises:
      ValueError: an empty schedule, a client that the population lacks or that comes twice in a round (the round, or the
        file's line, is named), a round beyond the schedule.

    >>> data = FederatedData.from_clients({"ann": {"x": np.zeros(2)}, "bob": {"x": np.zeros(3)}})
    >>> sampler = ScheduleSampler(data, [["bob"], [], ["bob", "ann"]], seed=0)
    >>> [cohort.client_ids for cohort in sampler.rounds(3)]
    [['bob'], [], ['bob', 'ann']]
    """

    def __init__(
        self, data: FederatedData, schedule: Sequence[Sequence[str]], *, seed: int | jax.Array, repeat: bool = False
    ) -> None:
        places = [f"Round {round} of the schedule" for round in range(len(schedule))]
        self._schedule = [_positions(data, ids, place) for ids, place in zip(schedule, places, strict=True)]
        longest = max(map(len, self._schedule), default=0)
        if not longest:
            raise ValueError("The schedule names no clients: expected at least one round with a client.")
        super().__init__(data, clients=longest, seed=seed)
        self.repeat = repeat

    @classmethod
    def from_file(
        cls, data: FederatedData, path: str | os.PathLike[str], *, seed: int | jax.Array, repeat: bool = False
    ) -> ScheduleSampler:
        """A schedule with a round a line: client ids as CSV, or as a JSON list (``.json``, ``.jsonl``, ``.ndjson``).

        An empty line of CSV, or ``[]`` in JSON, is a round without anybody. A ``.json`` file may also be one list of lists.

        Raises:
          FileNotFoundError: no such file.
          ValueError: a line that is not that, or with a client that is unknown or comes twice; file and line are named.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "schedule.csv"
        >>> _ = path.write_text("ann,bob\\nbob\\n")
        >>> data = FederatedData.from_clients({"ann": {"x": np.zeros(2)}, "bob": {"x": np.zeros(3)}})
        >>> [len(cohort) for cohort in ScheduleSampler.from_file(data, path, seed=0).rounds(2)]
        [2, 1]
        """
        path = Path(path)
        schedule = []
        for place, ids in _read(path):
            _positions(data, ids, place)  # Said with the line, rather than the round.
            schedule.append(ids)
        return cls(data, schedule, seed=seed, repeat=repeat)

    def _draw(self, round: int) -> np.ndarray:
        if round >= len(self._schedule) and not self.repeat:
            raise ValueError(
                f"The schedule has {len(self._schedule)} rounds, from 0, and no round {round}: ask for fewer rounds, or give "
                "repeat=True to begin again."
            )
        return self._schedule[round % len(self._schedule)]


def _positions(data: FederatedData, ids: Sequence[str], place: str) -> np.ndarray:
    if isinstance(ids, str):
        raise ValueError(f"{place} is the text {ids!r}: expected a list of client ids.")
    unknown = next((client_id for client_id in ids if client_id not in data), None)
    if unknown is not None:
        raise ValueError(f"{place} names client {unknown!r}, which is not among the {data.num_clients} clients.")
    if len(set(ids)) < len(ids):
        twice = next(client_id for client_id in ids if list(ids).count(client_id) > 1)
        raise ValueError(f"{place} names client {twice!r} more than once: each may take part once a round.")
    return np.array([data.index(client_id) for client_id in ids], np.int32)


def _read(path: Path) -> list[tuple[str, list[str]]]:
    """Where each round is written, in words, and its client ids."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {number} is not UTF-8 text: save the file as UTF-8.") from error
    suffix = path.suffix.lower()
    if suffix not in (".json", ".jsonl", ".ndjson"):
        return _read_csv(path, text)
    if suffix == ".json":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None  # Perhaps a list a line.
        if isinstance(whole, list) and all(isinstance(ids, list) for ids in whole):
            return [_checked(f"{path}, entry {number}", ids) for number, ids in enumerate(whole, 1)]
    rounds = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        place = f"{path}, line {number}"
        try:
            ids = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'{place} is not JSON ({error}): expected a list of client ids, ["a", "b"].') from None
        rounds.append(_checked(place, ids))
    return rounds


def _read_csv(path: Path, text: str) -> list[tuple[str, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    rounds = []
    try:
        for row in reader:
            rounds.append(_checked(f"{path}, line {reader.line_num}", [client_id.strip() for client_id in row]))
    except csv.Error as error:
        place = f"{path}, line {reader.line_num}"
        raise ValueError(f"{place} is not CSV ({error}): expected client ids with commas between.") from None
    return rounds


def _checked(place: str, ids: object) -> tuple[str, list[str]]:
    if not isinstance(ids, list) or not all(isinstance(client_id, str) for client_id in ids):
        raise ValueError(f'{place} is not a list of client ids: expected ["a", "b"].')
    if "" in ids:
        raise ValueError(f"{place} has an empty client id: leave out the extra comma.")
    return place, ids
