"""Devices: how fast clients train and communicate, and when they are online."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np

from fedsim import checks
from fedsim.systems._availability import RATES, Diurnal, Intervals, Traces
from fedsim.systems._draws import BLOCK, Blocks, purpose_generator
from fedsim.systems._laws import Law, as_law


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of the clients, by laws from which each client draws once.

    A dispatch to a client takes ``variation`` times the sum of: ``latency`` and the download; the steps; ``latency`` and the
    upload. A client is selected only while it is online. If it goes offline while it works or communicates, it pauses until it
    is online again.

    Attributes:
      seconds_per_step: the seconds that a local step takes, a law or a number.
      variation: a factor of the duration, drawn anew for every dispatch.
      download_rate, upload_rate: in bytes per second.
      latency: the seconds before each transmission.
      availability: `Diurnal` or `Traces`; None: all clients are always online.

    Guarantees:
      - What a client draws depends on the root key, its position in the population and the law, and on no other argument.

    Raises:
      ValueError: a value is neither a law nor a number of at least 0; a rate is 0; a number other than a rate is infinite.

    >>> from fedsim.systems import LogNormal
    >>> drawn = Devices(seconds_per_step=LogNormal(sigma=1.0)).draw(["a", "b"], jax.random.key(0))
    >>> drawn.seconds_per_step.shape, drawn.advance(0, 1.0, 2.5)
    ((2,), 3.5)
    """

    seconds_per_step: Law | float = 1.0
    variation: Law | float = 1.0
    download_rate: Law | float = math.inf
    upload_rate: Law | float = math.inf
    latency: Law | float = 0.0
    availability: Diurnal | Traces | None = None

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "variation", "download_rate", "upload_rate", "latency"):
            object.__setattr__(self, name, as_law(name, getattr(self, name)))
        for name in ("download_rate", "upload_rate"):
            if not getattr(self, name).mean > 0:
                raise ValueError(f"Expected {name} > 0 bytes per second, got {name}=0.0: with 0 no message would ever arrive.")
        for name in ("seconds_per_step", "variation", "latency"):
            checks.number(least=0, remedy="no client would ever answer", **{name: getattr(self, name).least})
        if not isinstance(self.availability, Diurnal | Traces | None):
            checks.instance(Diurnal, "Diurnal(fraction=0.5), or of Traces", availability=self.availability)

    def draw(self, client_ids: Sequence[str], key: jax.Array) -> ClientDevices:
        """Returns the devices of a population.

        Args:
          client_ids: the clients of the population.
          key: the run's root key.

        Raises:
          ValueError: a client is missing in the traces.
        """
        clients = len(client_ids)
        drawn = {
            name: as_law(name, getattr(self, name)).draw(purpose_generator(key, name), clients) for name in (*RATES, "latency")
        }
        if isinstance(self.availability, Traces):
            drawn |= {name: self.availability.rates(name, client_ids, drawn[name]) for name in RATES}
        intervals = None
        if self.availability is not None:
            intervals = self.availability.intervals(client_ids, purpose_generator(key, "availability"))
        variation = as_law("variation", self.variation)
        factors = Blocks(lambda block: variation.draw(purpose_generator(key, "variation", block), BLOCK).tolist())
        return ClientDevices(**drawn, variation=factors, least_variation=variation.least, intervals=intervals)


@dataclasses.dataclass(frozen=True, eq=False)
class ClientDevices:
    """The devices of all clients of a population, as drawn by `Devices.draw`.

    Attributes:
      seconds_per_step, download_rate, upload_rate, latency: ``float64 [population]``.
      variation: the factor of each dispatch, by its number.
      least_variation: the smallest factor.
      intervals: when clients are online; None: always.
    """

    seconds_per_step: np.ndarray
    download_rate: np.ndarray
    upload_rate: np.ndarray
    latency: np.ndarray
    variation: Blocks[float]
    least_variation: float
    intervals: Intervals | None

    def online(self, client: int, time: float) -> bool:
        """Returns whether a client is online at a time."""
        return self.intervals is None or self.intervals.online(client, time)

    def advance(self, client: int, start: float, seconds: float) -> float:
        """Returns the time at which a client has been online for ``seconds`` since ``start``; infinity if it never has."""
        return start + seconds if self.intervals is None else self.intervals.advance(client, start, seconds)

    def available(self, ready: np.ndarray, now: float) -> np.ndarray:
        """Returns whether each client is ready and online, ``bool [population]``.

        Args:
          ready: ``float64 [population]``, when each client has ended its earlier work; infinity if never.
          now: the present time.
        """
        free = ready <= now
        return free if self.intervals is None else free & self.intervals.online_clients(now)

    def next_available(self, ready: np.ndarray, now: float) -> float:
        """Returns the earliest time after ``now`` at which a client becomes available; infinity if none ever does.

        Args:
          ready: ``float64 [population]``, when each client has ended its earlier work; infinity if never.
          now: the present time.
        """
        if self.intervals is not None:
            return self.intervals.next_online(ready, now)
        return float(np.min(ready, where=ready > now, initial=math.inf))

    def fastest(self, steps: np.ndarray, bytes_down: int, bytes_up: int) -> float:
        """Returns the shortest time in seconds in which any client may answer, without pauses."""
        transfers = 2 * self.latency + bytes_down / self.download_rate + bytes_up / self.upload_rate
        return float(np.min(transfers + steps * self.seconds_per_step)) * self.least_variation
