"""Learning rates of clients that change over the rounds, by name: ``--client-schedule "cosine(end=0.1)"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import optax

from fedsim import checks
from fedsim.names import check_options, look_up, parse_call

# A function from the first learning rate and the number of rounds to the rate of each round; None if it does not change.
ClientSchedule: TypeAlias = Callable[[float, int], optax.Schedule | None]


def _constant() -> ClientSchedule:
    return lambda start, rounds: None


def _linear(*, end: float = 0.0) -> ClientSchedule:
    checks.number(least=0, most=1, end=end, remedy="give the last learning rate as a fraction of the first one")
    return lambda start, rounds: optax.linear_schedule(start, start * end, rounds)


def _cosine(*, end: float = 0.0) -> ClientSchedule:
    checks.number(least=0, most=1, end=end, remedy="give the last learning rate as a fraction of the first one")
    return lambda start, rounds: optax.cosine_decay_schedule(start, rounds, alpha=end)


def _exponential(*, decay: float = 0.1, every: int = 500, staircase: bool = False) -> ClientSchedule:
    checks.positive(decay=decay, remedy="give the factor of the learning rate")
    checks.whole(1, every=every)
    return lambda start, rounds: optax.exponential_decay(start, every, decay, staircase=staircase)


SCHEDULES: dict[str, Callable[..., ClientSchedule]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
}


def client_schedule(text: str) -> ClientSchedule:
    """Returns the schedule that a text names.

    With the first learning rate r0 and R rounds, the rate in round t = 0, 1, ... is

    - constant: r0;
    - linear(end=e): r0 (1 - (1 - e) t / R);
    - cosine(end=e): r0 (e + (1 - e) (1 + cos(pi t / R)) / 2);
    - exponential(decay=d, every=n): r0 d ** (t / n), and with ``staircase=True`` the exponent is rounded down.

    Raises:
      ValueError: there is no such schedule, it has no such option, or a value is out of its range.

    >>> client_schedule("cosine(end=0.1)")(0.5, 100)(100).item()
    0.05000000074505806
    >>> client_schedule("cosin")
    Traceback (most recent call last):
    ...
    ValueError: There is no client schedule 'cosin'. Did you mean 'cosine'?
    """
    name, options = parse_call(text)
    make = look_up("client schedule", name, SCHEDULES)
    check_options("client schedule", name, make, options)
    return make(**options)
