"""`Plan`: the costs of a round as one value, which prints as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The costs of one round, see `fedsim.plan`.

    Bytes and steps are those of the clients that take at least one step. A number is None if it cannot be known before a round
    runs: everything that depends on the clients' work if the algorithm overrides ``apply``, memory and collectives with
    `fedsim.Debug`, and the time without a measurement.

    Attributes:
      algorithm: name of the class.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      devices: the number of devices that run a round.
      population: number of clients.
      clients: number of clients of the cohort.
      parameters: number of parameters of the server's model; of the numbers in the server's state if it has no ``params``.
      bytes_up: what one client sends in a round.
      bytes_down: what one client receives in a round.
      up_is_exact: whether ``bytes_up`` follows from shapes. Otherwise it depends on values, and ``bytes_up`` is that of
        normally distributed updates, or of the uncompressed update if the algorithm reports the size itself.
      down_is_exact: the same for ``bytes_down``.
      bytes_up_per_round, bytes_down_per_round: of all clients together.
      steps_per_client: mean number of local steps, over all loops of a round.
      steps_per_round: of all clients together.
      flops_per_client: mean number of floating-point operations in the local steps of a client.
      flops_per_round: of all clients together.
      bytes_per_device: peak memory of a device while a round runs, with the examples on it.
      free_bytes_per_device: memory of a device; on a CPU, a device's share of the free memory.
      collectives: for every kind of collective operation between devices, the number in a round outside of loops.
      collectives_in_loops: the same for collectives inside loops, where each is counted once.
      passes: the number of times that a round aggregates or maps its clients, without divisible calls of ``clients.map_rows``.
        On several devices, an all-reduce follows each of them: one if everything that is exchanged has the same dtype and the
        aggregator is a mean.
      divided_by: how the model is divided over the devices of a client: ``"the rule of the model"`` or ``"largest axes"``. None
        if it is not.
      whole: then the names of the parameters that are whole on every device of a client, each with its number of elements.
      largest_cohort: the largest number of clients whose round fits the memory, at most ``population``.
      seconds: estimated time of a round, without compilation and evaluation.

    >>> plan = Plan(algorithm="FedAvg", platform="cpu", devices=1, population=100, clients=10, parameters=650, bytes_up=2600)
    >>> plan.bytes_up, plan.seconds
    (2600, None)
    """

    algorithm: str
    platform: str
    devices: int
    population: int
    clients: int
    parameters: int
    bytes_up: float | None = None
    bytes_down: float | None = None
    up_is_exact: bool = True
    down_is_exact: bool = True
    bytes_up_per_round: float | None = None
    bytes_down_per_round: float | None = None
    steps_per_client: float | None = None
    steps_per_round: int | None = None
    flops_per_client: float | None = None
    flops_per_round: float | None = None
    bytes_per_device: int | None = None
    free_bytes_per_device: int | None = None
    collectives: Mapping[str, int] | None = None
    collectives_in_loops: Mapping[str, int] | None = None
    passes: int | None = None
    divided_by: str | None = None
    whole: Mapping[str, int] = dataclasses.field(default_factory=dict)
    largest_cohort: int | None = None
    seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as a dict of values that JSON can represent.

        >>> plan = Plan(algorithm="FedAvg", platform="cpu", devices=1, population=100, clients=10, parameters=650)
        >>> plan.to_json()["parameters"], plan.to_json()["seconds"]
        (650, None)
        """
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        devices = f"{self.devices} {self.platform.upper()} device{'s' * (self.devices != 1)}"
        rows = {
            "parameters": f"{self.parameters:,}",
            "up": _traffic(self.bytes_up, self.bytes_up_per_round, self.up_is_exact),
            "down": _traffic(self.bytes_down, self.bytes_down_per_round, self.down_is_exact),
            "local steps": self._steps(),
            "computation": self._computation(),
            "memory": self._memory(),
            "collectives": self._collectives(),
            "largest cohort": self._largest_cohort(),
            "time": "unknown" if self.seconds is None else f"about {duration(self.seconds)} per round",
        }
        if self.divided_by:
            rows = {"model": self._division()} | rows
        title = f"{self.algorithm} with {self.clients:,} of {self.population:,} clients per round, on {devices}"
        width = max(map(len, rows)) + 2
        return "\n".join([title, *(f"  {name:<{width}}{text}" for name, text in rows.items())])

    def _division(self) -> str:
        if not self.whole:
            return f"divided by {self.divided_by}"
        largest = sorted(self.whole, key=lambda name: -self.whole[name])[:3]
        more = f" and {len(self.whole) - 3} others" if len(self.whole) > 3 else ""
        return f"divided by {self.divided_by}; whole: {', '.join(largest)}{more}, {sum(self.whole.values()):,} parameters"

    def _steps(self) -> str:
        if self.steps_per_client is None:
            return "unknown"
        return f"{self.steps_per_client:,.1f} per client, {self.steps_per_round:,} per round"

    def _computation(self) -> str:
        if self.flops_per_client is None or self.flops_per_round is None:
            return "unknown"
        return f"{_in_units(self.flops_per_client, _FLOPS)} per client, {_in_units(self.flops_per_round, _FLOPS)} per round"

    def _memory(self) -> str:
        if self.bytes_per_device is None or self.free_bytes_per_device is None:
            return "unknown"
        needed, free = (_in_units(size, _BYTES) for size in (self.bytes_per_device, self.free_bytes_per_device))
        return f"{needed} per device, with {free} {'free for each' if self.platform == 'cpu' else 'in each'}"

    def _collectives(self) -> str:
        if self.collectives is None or self.collectives_in_loops is None:
            return "unknown"
        if self.devices == 1:
            more = f"; on several, an exchange after each pass over the clients: {self.passes} per round" if self.passes else ""
            return f"none on one device{more}"
        return f"{_counted(self.collectives)} per round outside of loops, {_counted(self.collectives_in_loops)} in loops"

    def _largest_cohort(self) -> str:
        if self.largest_cohort is None:
            return "unknown"
        if self.largest_cohort == self.population:
            return f"{self.population:,} clients, the whole population"
        return f"{self.largest_cohort:,} clients"


_BYTES = {1e9: "GB", 1e6: "MB", 1e3: "kB", 1: "bytes"}
_FLOPS = {1e12: "TFLOP", 1e9: "GFLOP", 1e6: "MFLOP", 1e3: "kFLOP", 1: "FLOP"}
_SECONDS = {3600: "h", 60: "min", 1: "s", 1e-3: "ms", 1e-6: "µs"}


def duration(seconds: float) -> str:
    """Writes a time with three digits, in a unit that fits.

    >>> duration(0.0031), duration(90), duration(7200)
    ('3.1 ms', '1.5 min', '2 h')
    """
    return _in_units(seconds, _SECONDS)


def _in_units(value: float, units: Mapping[float, str]) -> str:
    """Writes a value with three digits in the largest unit that is not larger.

    >>> _in_units(19_240, _BYTES), _in_units(0, _FLOPS)
    ('19.2 kB', '0 FLOP')
    """
    unit = next((size for size in units if value >= size), min(units))
    shown = value / unit
    return f"{shown:,.0f} {units[unit]}" if shown >= 999.5 else f"{shown:.3g} {units[unit]}"


def _traffic(each: float | None, together: float | None, is_exact: bool) -> str:
    if each is None or together is None:
        return "unknown"
    about, why = ("", "") if is_exact else ("about ", " (the size depends on the values)")
    return f"{about}{each:,.0f} bytes per client, {_in_units(together, _BYTES)} per round{why}"


def _counted(collectives: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(collectives.items())) or "none"
