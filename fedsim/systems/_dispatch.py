"""A dispatch: the server sends a model to a client, which trains and sends its update. How long that takes, and what fails."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedsim import checks
from fedsim.systems._devices import ClientDevices
from fedsim.systems._faults import Drawn, TimeSpan


@dataclasses.dataclass(frozen=True)
class Policy:
    """What server and clients do when there is no answer.

    Attributes:
      timeout: the seconds after a dispatch at which the server stops waiting for the client. None: it waits as long as an
        update may arrive, and knows at once when a client has failed or its last message is lost, as with an open connection.
      retries: how often a message is sent again that got lost.
      backoff: the seconds before it is sent again: ``backoff`` the first time, twice as many the second time, and so on.
      late: what happens to an update that arrives after the server has stopped waiting for it. "drop": it is not used. "use":
        it is used in the next server step, with its staleness. If at that time no client is available for another dispatch
        that the server waits for, the late update takes its place.

    Raises:
      ValueError: ``timeout`` is not positive, ``retries`` or ``backoff`` is negative, or ``late`` is none of the two.

    >>> Policy(timeout=600.0, retries=3).late
    'drop'
    """

    timeout: float | None = None
    retries: int = 0
    backoff: float = 1.0
    late: str = "drop"

    def __post_init__(self) -> None:
        checks.positive(or_none=True, timeout=self.timeout)
        checks.whole(0, 60, retries=self.retries, remedy="the pause doubles every time")
        checks.number(least=0, backoff=self.backoff)
        checks.one_of("drop", "use", late=self.late)


class Dispatch(NamedTuple):
    """A dispatch to a client, and the update that comes of it.

    Attributes:
      number: the number of the dispatch in the run, from 0. What its device and faults draw depends on it.
      client: the client, a position in the population.
      round: the round of the sampler that selected the client, or one that the synchronization model gave. (round, client)
        determines the keys of its training.
      version: the version of the model that it starts from: the number of server steps at ``start``.
      start: when the server sent the model, in seconds.
      stop: when the update arrives, or when it is certain that none will.
      free: when the client can be selected again; infinity if never.
      arrives: whether the update arrives.
      steps: the local steps that the client takes, as far as it ends them before it fails or goes offline for good.
      downloads, uploads: how many messages are sent, including those that are repeated or doubled.
      lost, doubled: how many of them are lost, and how many are second copies.
      copy: when a second copy of the update arrives; infinity if none does.
      ahead: how much larger ``round`` is than the round that the synchronization model gave, because the client had trained in
        that round before.
    """

    number: int
    client: int
    round: int
    version: int
    start: float
    stop: float
    free: float
    arrives: bool
    steps: int
    downloads: int
    uploads: int
    lost: int
    doubled: int
    copy: float
    ahead: int = 0

    @property
    def clock(self) -> int:
        """The round that the synchronization model gave."""
        return self.round - self.ahead


class Clients:
    """The clients of a run: computes what comes of a dispatch, which depends on nothing that happens after it.

    Args:
      devices: the devices of the population.
      faults: the faults by the number of the dispatch.
      unreachable: the spans in which messages are lost.
      policy: how often messages are sent again.
      bytes_down, bytes_up: the sizes of the messages.
    """

    def __init__(
        self,
        devices: ClientDevices,
        faults: Drawn,
        unreachable: Sequence[TimeSpan],
        policy: Policy,
        bytes_down: int,
        bytes_up: int,
    ) -> None:
        self.devices, self._faults, self._policy = devices, faults, policy
        self.bytes_down, self.bytes_up = bytes_down, bytes_up
        self._unreachable = Spans(unreachable)

    def dispatch(self, number: int, client: int, round: int, version: int, start: float, steps: int) -> Dispatch:
        """Returns the dispatch of a model to a client that would take ``steps`` local steps."""
        devices, fault, factor = self.devices, self._faults[number], self.devices.variation[number]
        latency = float(devices.latency[client])
        download = factor * (latency + self.bytes_down / float(devices.download_rate[client]))
        upload = factor * (latency + self.bytes_up / float(devices.upload_rate[client]))
        training = factor * steps * float(devices.seconds_per_step[client])

        copy, uploads, trained = math.inf, 0, 0
        free, arrival, downloads = self._transmit(client, start, download, fault.lost_down, fault.delay_down)
        begun = arrival
        stop, downloaded, uploaded = free, arrival < math.inf, False
        if downloaded and fault.failure is not None:
            trained = int(fault.failure * steps)
            stop = devices.advance(client, arrival, fault.failure * training)
            free = stop + fault.recovery
        elif downloaded:
            trained = steps
            sent = devices.advance(client, arrival, training)
            free, arrival, uploads = self._transmit(client, sent, upload, fault.lost_up, fault.delay_up)
            uploaded = arrival < math.inf
            stop = arrival if uploaded else free
            copy = arrival + upload if uploaded and fault.doubled_up else math.inf
        if math.isinf(stop):  # The client goes offline for good.
            assert devices.intervals is not None
            stop, free = max(start, devices.intervals.last(client)), math.inf

            def end_of(step: int) -> float:
                return devices.advance(client, begun, factor * step * float(devices.seconds_per_step[client]))

            trained = bisect.bisect_left(range(1, trained + 1), math.inf, key=end_of)  # the steps that it ends
        copies_down = int(downloaded and fault.doubled_down)
        copies_up = int(uploaded and fault.doubled_up)
        lost = downloads - downloaded + uploads - uploaded
        return Dispatch(
            number, client, round, version, start, stop, free, uploaded, trained,
            downloads + copies_down, uploads + copies_up, lost, copies_down + copies_up, copy,
        )  # fmt: skip

    def _transmit(self, client: int, start: float, seconds: float, lost: int, delay: float) -> tuple[float, float, int]:
        """Returns when the client ends a transmission, when the message arrives (infinity if it does not), and the attempts."""
        attempt, end = 0, start
        while attempt <= self._policy.retries:
            end = self.devices.advance(client, start, seconds)
            if math.isinf(end):
                break
            attempt += 1
            outage = self._unreachable.meet(start, end + delay)
            if attempt > lost and outage is None:
                return end, end + delay, attempt
            # Who sends knows when the other side can be reached again.
            end = max(end, outage or end)
            start = end + self._policy.backoff * 2.0 ** (attempt - 1)
        return end, math.inf, attempt


class Spans:
    """Spans of time, which may overlap.

    Args:
      spans: pairs (start, stop) in seconds; the stop does not belong to the span.

    >>> spans = Spans([(10.0, 20.0), (15.0, 30.0)])
    >>> spans.meet(5.0, 9.0), spans.meet(5.0, 12.0), spans.end(25.0), spans.end(5.0)
    (None, 30.0, 30.0, 5.0)
    """

    def __init__(self, spans: Sequence[TimeSpan]) -> None:
        self._starts: list[float] = []
        self._stops: list[float] = []
        for start, stop in sorted(spans):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            else:
                self._starts.append(float(start))
                self._stops.append(float(stop))

    def meet(self, start: float, stop: float) -> float | None:
        """Returns the end of the first span that meets the closed interval from ``start`` to ``stop``; None if none does."""
        index = bisect.bisect_right(self._stops, start)
        return self._stops[index] if index < len(self._starts) and self._starts[index] <= stop else None

    def end(self, time: float) -> float:
        """Returns the end of the span that a time is in, and the time itself if it is in none."""
        end = self.meet(time, time)
        return time if end is None else end
