"""Faults: clients that fail, messages that are lost, doubled or delayed, a network or server that is down."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np

from fedsim import checks
from fedsim.systems._draws import BLOCK, Blocks, purpose_generator
from fedsim.systems._laws import Law, as_law
from fedsim.text_files import read_json

TimeSpan = tuple[float, float]


class Fault(NamedTuple):
    """What goes wrong with one dispatch to a client. The default is that nothing does.

    Attributes:
      failure: the fraction of its steps after which the client fails: 0 before training, 1 after training and before the
        upload; None: it does not fail.
      recovery: the seconds after which a client that has failed can be selected again; infinity: never.
      lost_down, lost_up: how many transmissions of the download and of the upload are lost, from the first one on.
      doubled_down, doubled_up: whether the message arrives twice. The receiver recognizes the second copy and ignores it.
      delay_down, delay_up: the seconds for which the message is delayed on its way.

    >>> Fault(failure=0.5, recovery=60.0).lost_up
    0
    """

    failure: float | None = None
    recovery: float = math.inf
    lost_down: int = 0
    lost_up: int = 0
    doubled_down: bool = False
    doubled_up: bool = False
    delay_down: float = 0.0
    delay_up: float = 0.0


NO_FAULT = Fault()


class Drawn(Protocol):
    """The faults of a run by the number of the dispatch."""

    def __getitem__(self, number: int, /) -> Fault:
        """Returns what goes wrong with a dispatch."""
        ...


@dataclasses.dataclass(frozen=True)
class Faults:
    """Faults by probability, independent between dispatches.

    Attributes:
      client_failures: the probability that a client fails in a dispatch.
      failure_time: "before" training, "during" (after a uniform fraction of its steps), or "after" it, before the upload.
      recovery: the seconds after which a client that has failed can be selected again, a law or a number; None: never, so a
        run may end when the clients are used up.
      message_loss: the probability that a transmission is lost, in either direction; `Policy` says how often one is repeated.
      duplication: the probability that a message arrives twice.
      delay: the seconds for which a message is delayed on its way, a law or a number; None: none is. Delays change the order of
        messages.
      delay_probability: the probability that a message is delayed.
      outages: spans (start, stop) in seconds in which the network is down: what is being transmitted is lost, which
        the sender knows when the network is up again.
      server_crashes: spans (start, stop) in seconds in which the server is down: messages to and from it are lost, and what it
        would do is done when it is up again. It keeps the updates that it has received; clients continue their work.

    Guarantees:
      - What a dispatch draws depends on the root key, the number of the dispatch and the fault's own law.

    Raises:
      ValueError: a probability is outside [0, 1]; a span is empty; spans of one kind are not sorted and disjoint.

    >>> faults = Faults(client_failures=0.5, message_loss=0.1).draw(jax.random.key(0))
    >>> sum(faults[number].failure is not None for number in range(4096))
    2028
    """

    client_failures: float = 0.0
    failure_time: str = "during"
    recovery: Law | float | None = 0.0
    message_loss: float = 0.0
    duplication: float = 0.0
    delay: Law | float | None = None
    delay_probability: float = 1.0
    outages: Sequence[TimeSpan] = ()
    server_crashes: Sequence[TimeSpan] = ()

    def __post_init__(self) -> None:
        for name in ("client_failures", "duplication", "delay_probability"):
            checks.number(least=0, most=1, remedy="it is a probability", **{name: getattr(self, name)})
        checks.number(least=0, below=1, remedy="with 1 no message would arrive", message_loss=self.message_loss)
        checks.one_of("before", "during", "after", failure_time=self.failure_time)
        for name in ("recovery", "delay"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_law(name, getattr(self, name)))
        _check_spans(self)

    def draw(self, key: jax.Array) -> Drawn:
        """Returns the faults of a run by the number of the dispatch, from a block of draws at a time.

        Args:
          key: the run's root key.
        """
        return Blocks(lambda block: self._draw_block(key, block))

    def schedule(self, key: jax.Array, dispatches: int) -> FaultSchedule:
        """Returns the faults of the first dispatches of a run as an explicit schedule, for example to write it to a file.

        Args:
          key: the run's root key.
          dispatches: the number of dispatches.

        >>> Faults(message_loss=0.5).schedule(jax.random.key(0), 4).faults[0].lost_up
        1
        """
        drawn = self.draw(key)
        faults = {number: fault for number in range(dispatches) if (fault := drawn[number]) != NO_FAULT}
        return FaultSchedule(faults, self.outages, self.server_crashes)

    def _draw_block(self, key: jax.Array, block: int) -> list[Fault]:
        def happens(purpose: str, probability: float) -> np.ndarray:
            return purpose_generator(key, purpose, block).random(BLOCK) < probability

        def seconds(purpose: str, law: Law | float) -> np.ndarray:
            return as_law(purpose, law).draw(purpose_generator(key, purpose, block), BLOCK)

        columns: dict[str, np.ndarray] = {"failure": np.full(BLOCK, None)}
        if self.client_failures:
            fails = happens("failure", self.client_failures)
            when = purpose_generator(key, "failure time", block).random(BLOCK)
            when = when if self.failure_time == "during" else np.full(BLOCK, float(self.failure_time == "after"))
            columns["failure"][fails] = when[fails]
            if self.recovery is not None:
                columns["recovery"] = np.where(fails, seconds("recovery", self.recovery), math.inf)
        for way in ("down", "up"):
            if self.message_loss:
                columns[f"lost_{way}"] = (
                    purpose_generator(key, f"loss {way}", block).geometric(1 - self.message_loss, BLOCK) - 1
                )
            if self.duplication:
                columns[f"doubled_{way}"] = happens(f"duplication {way}", self.duplication)
            if self.delay is not None:
                delayed = happens(f"delayed {way}", self.delay_probability)
                columns[f"delay_{way}"] = np.where(delayed, seconds(f"delay {way}", self.delay), 0.0)
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [Fault(**dict(zip(columns, row, strict=True))) for row in rows]


@dataclasses.dataclass(frozen=True)
class FaultSchedule:
    """Faults of given dispatches, which can be written to a file and replayed.

    Attributes:
      faults: the faults by the number of the dispatch, counted from 0 in the order in which clients are selected.
      outages, server_crashes: as in `Faults`.

    Raises:
      ValueError: a dispatch is not a whole number of at least 0; a value of a fault is out of range; spans of one kind are not
        sorted and disjoint.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "faults.json"
    >>> FaultSchedule({3: Fault(failure=0.5)}, outages=[(10.0, 20.0)]).write(path)
    >>> FaultSchedule.read(path).faults[3].failure
    0.5
    """

    faults: Mapping[int, Fault] = dataclasses.field(default_factory=dict)
    outages: Sequence[TimeSpan] = ()
    server_crashes: Sequence[TimeSpan] = ()

    def __post_init__(self) -> None:
        for dispatch, fault in self.faults.items():
            checks.whole(0, dispatch=dispatch)
            checks.number(least=0, most=1, or_none=True, failure=fault.failure, remedy="it is a fraction of the client's steps")
            checks.whole(0, lost_down=fault.lost_down, lost_up=fault.lost_up)
            checks.truth(doubled_down=fault.doubled_down, doubled_up=fault.doubled_up)
            checks.number(least=0, delay_down=fault.delay_down, delay_up=fault.delay_up)
            if fault.recovery != math.inf:
                checks.number(least=0, recovery=fault.recovery)
        _check_spans(self)

    def draw(self, key: jax.Array) -> Drawn:
        """Returns the faults of a run by the number of the dispatch; draws nothing."""
        return _Listed(self.faults)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the schedule to a JSON file, from which `read` returns an equal one."""
        faults = []
        for dispatch, fault in sorted(self.faults.items()):
            values = {name: value for name, value in fault._asdict().items() if value != Fault._field_defaults[name]}
            faults.append({"dispatch": dispatch, **values})
        spans = {"outages": [*map(list, self.outages)], "server_crashes": [*map(list, self.server_crashes)]}
        Path(path).write_text(json.dumps({**spans, "faults": faults}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FaultSchedule:
        """Reads a schedule from a JSON file: ``{"faults": [{"dispatch": 3, "failure": 0.5}], "outages": [[10, 20]]}``.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file has another form, an unknown name, or a value out of range. The message names the file.
        """
        try:
            content = read_json(path)
            faults = {}
            for entry in content.pop("faults", []):
                dispatch = entry.pop("dispatch")
                if dispatch in faults:
                    raise ValueError(f"dispatch {dispatch} is given twice: write one entry with all of its faults")
                faults[dispatch] = Fault(**entry)
            spans = {name: [(start, stop) for start, stop in value] for name, value in content.items()}
            return cls(faults, **spans)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{path} is not a schedule of faults ({type(error).__name__}: {error}). Expected JSON such as "
                '{"faults": [{"dispatch": 3, "failure": 0.5}], "outages": [[10, 20]], "server_crashes": []}.'
            ) from error


class _Listed(dict[int, Fault]):
    def __missing__(self, number: int) -> Fault:
        return NO_FAULT


def _check_spans(faults: Faults | FaultSchedule) -> None:
    for name in ("outages", "server_crashes"):
        end = 0.0
        spans = getattr(faults, name)
        checks.instance(Sequence, "[(60.0, 120.0)]", **{name: spans})
        for span in spans:
            try:
                start, stop = map(float, span)
                ordered = end <= start < stop < math.inf
            except (TypeError, ValueError, OverflowError):
                ordered = False
            if not ordered:
                raise ValueError(
                    f"Expected {name} to be spans (start, stop) in seconds, sorted, disjoint, finite and not empty, got "
                    f"{span!r} after {end}: sort and join them."
                )
            end = stop
