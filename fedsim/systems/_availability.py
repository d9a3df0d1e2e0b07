"""When clients are online: by the time of day, or by traces."""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.text_files import parse_json_lines, read_table, read_text

_COLUMNS = ("client", "online", "seconds_per_step", "download_rate", "upload_rate")
RATES = _COLUMNS[2:]
_EXAMPLE = '{"client": "ann", "online": [[0, 3600]]}'


class Intervals:
    """The intervals in which each client of a population is online, repeated after a period.

    Client c is online at time t if (t - shift[c]) mod period lies in one of its intervals [start, stop).

    Args:
      counts: ``int [population]``, the number of intervals of each client.
      starts, stops: ``float64 [sum of counts]``, in seconds from the start of the period: each client's intervals in order.
      shift: ``float64 [population]``, in seconds.
      period: in seconds; infinity if the intervals are not repeated.

    >>> intervals = Intervals(np.array([2]), np.array([0.0, 20.0]), np.array([10.0, 30.0]), np.zeros(1), math.inf)
    >>> intervals.online(0, 5.0), intervals.online(0, 15.0), intervals.advance(0, 5.0, 8.0)
    (True, False, 23.0)
    """

    def __init__(self, counts: np.ndarray, starts: np.ndarray, stops: np.ndarray, shift: np.ndarray, period: float) -> None:
        self.starts, self.stops, self.shift, self.period = starts, stops, shift, period
        self._owners = np.repeat(np.arange(len(counts)), counts)
        self._offsets = np.concatenate([[0], np.cumsum(counts)])
        lengths = stops - starts
        # The seconds that a client is online in one period: in all, and before each of its intervals.
        self._total, self._before = np.zeros(len(counts)), np.zeros(len(starts))
        for depth in range(counts.max(initial=0)):
            clients = np.flatnonzero(counts > depth)
            self._before[self._offsets[clients] + depth] = self._total[clients]
            self._total[clients] += lengths[self._offsets[clients] + depth]

    def online(self, client: int, time: float) -> bool:
        """Returns whether a client is online at a time."""
        _, local = self._local(client, time)
        interval = self._interval(client, local)
        return bool(interval >= self._offsets[client] and local < self.stops[interval])

    def online_clients(self, time: float) -> np.ndarray:
        """Returns whether each client is online at a time, ``bool [population]``."""
        local = time - self.shift[self._owners]
        local = local if math.isinf(self.period) else np.mod(local, self.period)
        found = np.zeros(len(self.shift), bool)
        found[self._owners[(self.starts <= local) & (local < self.stops)]] = True
        return found

    def advance(self, client: int, start: float, seconds: float) -> float:
        """Returns the time at which a client has been online for ``seconds`` since ``start``; infinity if it never has."""
        first, last = int(self._offsets[client]), int(self._offsets[client + 1])
        periods, local = self._local(client, start)
        interval = self._interval(client, local)
        if not seconds or (interval >= first and local + seconds <= self.stops[interval]):
            return start + seconds  # This is exact; the general case below rounds.
        total = float(self._total[client])
        rest = seconds
        if interval >= first:
            rest += float(self._before[interval] + min(local, self.stops[interval]) - self.starts[interval])
        more = max(0, math.ceil(rest / total) - 1) if total else 1  # 0 if the last interval never ends.
        if more and (not total or math.isinf(self.period)):
            return math.inf
        rest -= more * total if more else 0.0
        index = max(first, bisect.bisect_left(self._before, rest, first, last) - 1)
        whole_periods = (periods + more) * self.period if periods + more else 0.0
        return max(start, float(self.shift[client] + whole_periods + self.starts[index] + rest - self._before[index]))

    def last(self, client: int) -> float:
        """Returns the time at which a client goes offline for good, if it does; 0 if it never is online."""
        first, last = self._offsets[client], self._offsets[client + 1]
        return float(self.stops[last - 1]) if last > first else 0.0

    def next_online(self, ready: np.ndarray, now: float) -> float:
        """Returns the earliest time after ``now`` at which a client comes online, or is ready while it is online.

        Args:
          ready: ``float64 [population]``, when each client has ended its earlier work; infinity if never.
          now: the present time. Clients that are ready and online at this time are not considered.
        """
        ready = np.maximum(ready, now)[self._owners]
        with np.errstate(invalid="ignore"):  # A client that is never ready has no local time.
            local = ready - self.shift[self._owners]
            local = local if math.isinf(self.period) else np.mod(local, self.period)
            wait = self.starts - local
            inside = (wait <= 0) & (local < self.stops)
            wait = np.where(inside & (ready > now), 0.0, np.where(wait > 0, wait, wait + self.period))
            # A client whose interval begins now, but for rounding, comes online at the next representable time.
            times = np.maximum(ready + wait, np.where(wait > 0, np.nextafter(now, math.inf), now))
        times = times[times > now]
        return float(times.min()) if times.size else math.inf

    def _local(self, client: int, time: float) -> tuple[float, float]:
        local = time - float(self.shift[client])
        return (0.0, local) if math.isinf(self.period) else divmod(local, self.period)

    def _interval(self, client: int, local: float) -> int:
        """Returns the last interval that starts at or before a time; one less than the client's first if there is none."""
        first, last = int(self._offsets[client]), int(self._offsets[client + 1])
        return bisect.bisect_right(self.starts, local, first, last) - 1


@dataclasses.dataclass(frozen=True)
class Diurnal:
    """Every client is online for a part of each day, which begins at its own time, uniformly random.

    Attributes:
      fraction: the part of the day for which a client is online, in (0, 1].
      period: the length of a day, in seconds.

    Raises:
      ValueError: ``fraction`` is outside (0, 1], or ``period`` is not positive.

    >>> night = Diurnal(fraction=0.25).intervals(["a", "b", "c"], np.random.default_rng(0))
    >>> [bool(night.online(client, 3600.0)) for client in range(3)]
    [False, False, True]
    """

    fraction: float
    period: float = 86400.0

    def __post_init__(self) -> None:
        checks.number(above=0, most=1, fraction=self.fraction, remedy="with 0 nobody would ever be online")
        checks.positive(period=self.period)

    def intervals(self, client_ids: Sequence[str], generator: np.random.Generator) -> Intervals:
        """Returns the intervals of each client; draws when its day begins."""
        clients = len(client_ids)
        # A client whose shift is one day back is in the middle of its day at time 0.
        shift = (generator.random(clients) - 1) * self.period
        stops = np.full(clients, self.fraction * self.period)
        return Intervals(np.ones(clients, np.int64), np.zeros(clients), stops, shift, self.period)


@dataclasses.dataclass(frozen=True, eq=False)
class Traces:
    """When each client is online, and how fast it is, from a file.

    Attributes:
      clients: the clients' entries by id. An entry may have ``online``, a list of intervals (start, stop) in seconds, in order
        and disjoint (default: always online), and numbers ``seconds_per_step``, ``download_rate`` and ``upload_rate`` (bytes
        per second), which replace those of `Devices`.
      period: the seconds after which the intervals repeat; None: they do not.
      source: the file, for error messages.

    Raises:
      ValueError: intervals are not in order, overlap or end after ``period``; a number is not positive; an entry has an
        unknown column; no client is ever online. The message names the client and the file.

    >>> traces = Traces({"ann": {"online": [(0, 60), (90, 120)], "seconds_per_step": 0.5}, "bob": {}})
    >>> traces.intervals(["bob", "ann"], np.random.default_rng(0)).online(1, 70.0)
    False
    """

    clients: Mapping[str, Mapping[str, Any]]
    period: float | None = None
    source: str = "traces"

    def __post_init__(self) -> None:
        checks.positive(or_none=True, period=self.period)
        for client, entry in self.clients.items():
            self._check(client, entry)
        if not any(len(entry.get("online", [()])) for entry in self.clients.values()):
            raise ValueError(f"No client of {self.source} is ever online: give at least one interval, such as (0, 3600).")

    @classmethod
    def read(cls, path: str | os.PathLike[str], period: float | None = None) -> Traces:
        """Reads traces with one line per client: CSV, or a JSON object per line (``.json``, ``.jsonl``).

        A CSV file has a header with ``client`` and any of ``online``, ``seconds_per_step``, ``download_rate`` and
        ``upload_rate``. Its intervals are written ``0-3600 7200-9000``. An empty field is like a missing column. In JSON, a
        line is ``{"client": "ann", "online": [[0, 3600]], "seconds_per_step": 0.5}``.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file has another form, an unknown column, or one client twice. The message names file and line.

        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "traces.csv"
        >>> _ = path.write_text("client,online,seconds_per_step\\nann,0-60 90-120,0.5\\nbob,,2\\n")
        >>> Traces.read(path).clients["ann"]
        {'online': [(0.0, 60.0), (90.0, 120.0)], 'seconds_per_step': 0.5}
        """
        path = Path(path)
        text = read_text(path)
        lines = _read_json(path, text) if path.suffix.lower() in (".json", ".jsonl") else _read_csv(path, text)
        clients: dict[str, Mapping[str, Any]] = {}
        for location, entry in lines:
            if unknown := sorted(set(entry) - set(_COLUMNS)):
                raise ValueError(f"{location} has the unknown column {unknown[0]!r}: the columns are {', '.join(_COLUMNS)}.")
            client = entry.pop("client", "")
            client = str(client) if isinstance(client, str | int) and not isinstance(client, bool) else ""
            if not client or client in clients:
                raise ValueError(f"{location} {'repeats client ' + repr(client) if client else 'has no client id'}: "
                                 "give each client one line, with its id in the column 'client'.")  # fmt: skip
            clients[client] = entry
        return cls(clients, period, str(path))

    def intervals(self, client_ids: Sequence[str], generator: np.random.Generator) -> Intervals:
        """Returns the intervals of these clients; draws nothing.

        Raises:
          ValueError: a client is missing.
        """
        always = [(0.0, math.inf if self.period is None else self.period)]
        online = [entry.get("online", always) for entry in self._entries(client_ids)]
        counts = np.array([len(pairs) for pairs in online], np.int64)
        flat = np.array([pair for pairs in online for pair in pairs], np.float64).reshape(-1, 2)
        period = math.inf if self.period is None else float(self.period)
        return Intervals(counts, flat[:, 0].copy(), flat[:, 1].copy(), np.zeros(len(online)), period)

    def rates(self, name: str, client_ids: Sequence[str], otherwise: np.ndarray) -> np.ndarray:
        """Returns a number of each client, ``float64 [n]``; ``otherwise`` where the traces do not have it."""
        entries = self._entries(client_ids)
        return np.array([entry.get(name, value) for entry, value in zip(entries, otherwise, strict=True)], np.float64)

    def _entries(self, client_ids: Sequence[str]) -> list[Mapping[str, Any]]:
        missing = [client for client in client_ids if client not in self.clients]
        if missing:
            raise ValueError(
                f"{self.source} has no line for client {missing[0]!r} ({len(missing)} of {len(client_ids)} clients are "
                "missing): add one line per client of the population, or leave these clients out of the data."
            )
        return [self.clients[client] for client in client_ids]

    def _check(self, client: str, entry: Mapping[str, Any]) -> None:
        where = f"In {self.source}, client {client!r}"
        if unknown := sorted(set(entry) - set(_COLUMNS)):
            raise ValueError(f"{where} has the unknown column {unknown[0]!r}: the columns are {', '.join(_COLUMNS[1:])}.")
        for name in RATES:
            value = entry.get(name, 1.0)
            number = isinstance(value, int | float) and not isinstance(value, bool) and value <= sys.float_info.max
            if not (number or (value == math.inf and name != "seconds_per_step")) or not value > 0:
                raise ValueError(
                    f"{where} has {name}={value!r}: expected a number above 0{', and finite' * (value == math.inf)}."
                )
        online, end = entry.get("online", ()), 0.0
        if not isinstance(online, Sequence | np.ndarray) or isinstance(online, str):
            raise ValueError(f"{where} has online={online!r}: expected a list of intervals, such as [(0, 3600)].")
        for pair in online:
            try:
                start, stop = map(float, pair)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{where} has the interval {pair!r}: expected two numbers, start and stop.") from None
            if not end <= start < stop <= (self.period or math.inf):
                raise ValueError(
                    f"{where} is online from {start} to {stop} after an interval that ends at {end}: expected intervals that "
                    f"are sorted, disjoint and not empty{f', until period={self.period}' if self.period else ''}, in seconds."
                )
            end = stop


def _read_json(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    lines = [(location, entry) for location, entry in parse_json_lines(text, path, _EXAMPLE) if entry is not None]
    for location, entry in lines:
        if not isinstance(entry, dict):
            raise ValueError(f"{location} is not an object: expected {_EXAMPLE}.")
    return lines


def _read_csv(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    names, rows = read_table(text, path)
    lines = []
    for location, row in rows:
        entry: dict[str, Any] = {}
        for name, value in zip(names, row, strict=True):
            if name in RATES and value:
                entry[name] = _number(location, name, value)
            elif name == "online" and value:
                pairs = [pair.partition("-") for pair in value.split()]
                entry[name] = [(_number(location, name, start), _number(location, name, stop)) for start, _, stop in pairs]
            elif value or name not in _COLUMNS:
                entry[name] = value
        lines.append((location, entry))
    return lines


def _number(location: str, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        remedy = "write intervals as 0-3600 7200-9000, in seconds" if name == "online" else "write a number"
        raise ValueError(f"{location} has {text!r} in the column {name!r}, which is not a number: {remedy}.") from None
