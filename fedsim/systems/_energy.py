"""Energy: what communication and computation consume, in joules."""

from __future__ import annotations

import dataclasses

from fedsim import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnergyModel:
    """A proxy for the energy of a device: joules per byte times the bytes, plus watts times the seconds of computing.

    Waiting, screens, base stations and cooling are left out. So it compares ways of training, and is no measurement.

    Attributes:
      joules_per_byte_up: of a byte that the device sends.
      joules_per_byte_down: of a byte that it receives.
      watts: the power while it computes, more than at rest.

    Raises:
      ValueError: a number is negative or not finite.

    >>> phone = EnergyModel(joules_per_byte_up=5e-6, joules_per_byte_down=1e-6, watts=2.0)
    >>> phone.joules(bytes_up=1_000_000, bytes_down=2_000_000, seconds=10.0)
    27.0
    """

    joules_per_byte_up: float
    joules_per_byte_down: float
    watts: float

    def __post_init__(self) -> None:
        checks.number(least=0, **dataclasses.asdict(self))

    def joules(self, *, bytes_up: float, bytes_down: float, seconds: float) -> float:
        """Returns the joules of a device that sends and receives these bytes and computes for these seconds."""
        return self.joules_per_byte_up * bytes_up + self.joules_per_byte_down * bytes_down + self.watts * seconds
