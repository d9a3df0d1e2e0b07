"""A sampler that follows a fixed schedule."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from fedsim.data import FederatedData, FormatError
from fedsim.samplers._sampler import SeededSampler
from fedsim.text_files import parse_json_lines, read_csv, read_text


class ScheduleSampler(SeededSampler):
    """Follows a fixed schedule, which lists the clients of every round. A round may have no clients.

    Args:
      data: the population.
      schedule: the client ids of round 0, of round 1, and so on.
      seed: the run's seed, or its root key. The clients' randomness is derived from it.
      repeat: whether to start again after the last round. Otherwise a round beyond the schedule is an error.

    Attributes:
      clients: the number of slots, which is that of the round with the most clients.

    Guarantees:
      - Round r has the clients of the schedule's entry r, in the same order.

    Raises:
      ValueError: the schedule is empty; the population has no client of a given id; a client occurs twice in a round; a round
        is beyond the schedule. The message names the round, or the line of the file.

    >>> data = FederatedData.from_clients({"ann": {"x": np.zeros(2)}, "bob": {"x": np.zeros(3)}})
    >>> sampler = ScheduleSampler(data, [["bob"], [], ["bob", "ann"]], seed=0)
    >>> [cohort.client_ids for cohort in sampler.rounds(3)]
    [['bob'], [], ['bob', 'ann']]
    """

    def __init__(
        self, data: FederatedData, schedule: Sequence[Sequence[str]], *, seed: int | jax.Array, repeat: bool = False
    ) -> None:
        self._schedule = [_positions(data, ids, f"Round {round} of the schedule") for round, ids in enumerate(schedule)]
        longest = max(map(len, self._schedule), default=0)
        if not longest:
            raise ValueError("The schedule names no clients: expected at least one round with a client.")
        super().__init__(data, clients=longest, seed=seed)
        self.repeat = repeat

    @classmethod
    def from_file(
        cls, data: FederatedData, path: str | os.PathLike[str], *, seed: int | jax.Array, repeat: bool = False
    ) -> ScheduleSampler:
        """Reads a schedule with one round per line: client ids as CSV, or as a JSON list (``.json``, ``.jsonl``, ``.ndjson``).

        An empty line in CSV, or ``[]`` in JSON, is a round without clients. A ``.json`` file may also be one list of lists.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: a line has another form, or names an unknown client or one client twice. The message names file and line.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "schedule.csv"
        >>> _ = path.write_text("ann,bob\\nbob\\n")
        >>> data = FederatedData.from_clients({"ann": {"x": np.zeros(2)}, "bob": {"x": np.zeros(3)}})
        >>> [len(cohort) for cohort in ScheduleSampler.from_file(data, path, seed=0).rounds(2)]
        [2, 1]
        """
        path = Path(path)
        schedule = []
        for location, ids in _read(path):
            _positions(data, ids, location)  # An error then names the line of the file, not the round.
            schedule.append(ids)
        if not any(schedule):
            raise FormatError(f"{path} names no clients: write at least one round with a client.")
        return cls(data, schedule, seed=seed, repeat=repeat)

    def _draw(self, round: int) -> np.ndarray:
        if round >= len(self._schedule) and not self.repeat:
            raise ValueError(
                f"The schedule has {len(self._schedule)} rounds, counted from 0, so there is no round {round}: run fewer "
                "rounds, or give repeat=True to start again after the last one."
            )
        return self._schedule[round % len(self._schedule)]


def _positions(data: FederatedData, ids: Sequence[str], location: str) -> np.ndarray:
    if isinstance(ids, str):
        raise ValueError(f"{location} is the string {ids!r}: expected a list of client ids, such as [{ids!r}].")
    unknown = next((client_id for client_id in ids if client_id not in data), None)
    if unknown is not None:
        raise ValueError(
            f"{location} names client {unknown!r}, which is not among the {data.num_clients} clients of the population: "
            "correct the id, or remove it."
        )
    if len(set(ids)) < len(ids):
        twice = next(client_id for client_id in ids if list(ids).count(client_id) > 1)
        raise ValueError(f"{location} names client {twice!r} more than once: list each client once per round.")
    return np.array([data.index(client_id) for client_id in ids], np.int32)


def _read(path: Path) -> list[tuple[str, list[str]]]:
    """Returns each round's location in the file, as text for error messages, and its client ids."""
    text = read_text(path)
    suffix = path.suffix.lower()
    if suffix not in (".json", ".jsonl", ".ndjson"):
        return [_checked(location, row) for location, row in read_csv(text, path)]
    if suffix == ".json":
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None  # The file may have one list per line instead.
        if isinstance(whole, list) and all(isinstance(ids, list) for ids in whole):
            return [_checked(f"{path}, entry {number}", ids) for number, ids in enumerate(whole, 1)]
    return [_checked(location, ids) for location, ids in parse_json_lines(text, path, 'a list of client ids, ["a", "b"]')]


def _checked(location: str, ids: object) -> tuple[str, list[str]]:
    if not isinstance(ids, list) or not all(isinstance(client_id, str) for client_id in ids):
        raise ValueError(f'{location} is not a list of client ids: expected ["a", "b"].')
    if "" in ids:
        raise ValueError(f"{location} has an empty client id: remove it, or the extra comma.")
    return location, ids
