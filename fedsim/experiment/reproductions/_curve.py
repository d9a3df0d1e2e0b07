"""A training run as a curve, and what papers read off one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import rng
from fedsim.algorithm import Algorithm
from fedsim.execution import RoundInfo
from fedsim.samplers import Sampler

# Rounds that go to the device at once, at most.
_TOGETHER = 50


@dataclasses.dataclass(frozen=True)
class Curve:
    """Scores over rounds.

    Attributes:
      rounds: finished rounds at each evaluation.
      scores: what the evaluation gave.
      state: the algorithm's state after the last round.
      seconds: wall time, compilation and evaluations included.
      bits_up: what all clients together sent; 0 where the algorithm does not count it.
    """

    rounds: list[int]
    scores: list[float]
    state: Any
    seconds: float
    bits_up: float = 0.0

    def to_target(self, target: float) -> float | None:
        """`rounds_to_target` of this curve."""
        return rounds_to_target(self.rounds, self.scores, target)

    def points(self) -> dict[int, float]:
        """Round to score, with four digits."""
        return {at: round(score, 4) for at, score in zip(self.rounds, self.scores, strict=True)}

    def settled(self, last: int) -> float:
        """The mean of the last few scores: less of a lottery than the last one."""
        return float(np.mean(self.scores[-last:]))


def train(
    algorithm: Algorithm,
    sampler: Sampler,
    *,
    rounds: int,
    score: Callable[[Any], float],
    every: int = 1,
    until: float | None = None,
) -> Curve:
    """Trains from the start, and scores the state every so many rounds and after the last one.

    Args:
      algorithm: any.
      sampler: its root key is the run's, as in `fedsim.experiment.run`.
      rounds: at most this many.
      score: a function of the state, the larger the better.
      every: rounds between evaluations.
      until: the run ends as soon as a score is no less than this.

    >>> import jax.numpy as jnp, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 8, 8, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2))
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    >>> train(algorithm, sampler, rounds=7, every=3, score=lambda state: float(state.round)).rounds
    [3, 6, 7]
    """
    began = time.perf_counter()
    state = algorithm.init(rng.stream(sampler.cohort(0).key, "init"))
    at, scores, bits, position = [], [], 0.0, 0
    while position < rounds:
        stop = min(position - position % every + every, position + _TOGETHER, rounds)
        cohorts = [sampler.cohort(round) for round in range(position, stop)]
        state, infos = algorithm.apply_rounds(state, cohorts, max_rounds=min(every, _TOGETHER))
        position = stop
        if isinstance(infos, RoundInfo) and "bits_up" in infos.clients:
            bits += float(np.sum(jax.device_get(infos.clients["bits_up"]), dtype=np.float64))
        if stop % every == 0 or stop == rounds:
            at.append(stop)
            scores.append(float(score(state)))
            if until is not None and scores[-1] >= until:
                break
    return Curve(at, scores, state, time.perf_counter() - began, bits)


class Choice(NamedTuple):
    """What `fastest` found: the rate, its curve, all rates that were tried, and the seconds that they took."""

    rate: float
    curve: Curve
    tried: list[float]
    seconds: float


def fastest(start: int, run: Callable[[float, int], Curve], *, rounds: int, target: float, search: bool = True) -> Choice:
    """The learning rate 10^(k/3) that first gets to a target; while none does, the one that gets nearest.

    From ``k = start`` it goes up as long as that is better, else down as long as that is: the grid of McMahan et al. 2017,
    without its far ends.

    Args:
      start: the first k.
      run: ``(rate, rounds) -> curve``, which ends at the target. Who is slower than the best so far is cut off.
      rounds: at most this many.
      target: as in `rounds_to_target`.
      search: False takes the first rate for the best.

    >>> reaches = {-1: 30, 0: 20, 1: 10, 2: 15}
    >>> def run(rate, rounds):
    ...     at = reaches[round(3 * np.log10(rate))]
    ...     return Curve([1, min(at, rounds)], [0.0, 1.0 if at <= rounds else 0.5], None, 1.0)
    >>> choice = fastest(0, run, rounds=100, target=1.0)
    >>> f"{choice.rate:.3g}", [f"{rate:.3g}" for rate in choice.tried], choice.seconds
    ('2.15', ['1', '2.15', '4.64'], 3.0)
    """
    rate = 10 ** (start / 3)
    best = run(rate, rounds)
    found = Choice(rate, best, [rate], best.seconds)
    for step in (1, -1) if search else ():
        k, before = start, found.rate
        while True:
            k += step
            rate = 10 ** (k / 3)
            reached = found.curve.to_target(target) is not None
            curve = run(rate, found.curve.rounds[-1] if reached else rounds)
            better = _quality(curve, target) > _quality(found.curve, target)
            found = Choice(
                rate if better else found.rate,
                curve if better else found.curve,
                [*found.tried, rate],
                found.seconds + curve.seconds,
            )
            if not better:
                break
        if found.rate != before:
            break
    return found


def _quality(curve: Curve, target: float) -> tuple[float, float]:
    reached = curve.to_target(target)
    return -float("inf") if reached is None else -reached, float(np.max(np.nan_to_num(curve.scores, nan=-np.inf)))


def rounds_to_target(rounds: Sequence[int], scores: Sequence[float], target: float) -> float | None:
    """When a curve first reaches a target, by McMahan et al. 2017, section 3; None if it does not.

    The curve is made monotone, each point becoming the best score so far, and is taken for straight between points.

    >>> rounds_to_target([10, 20, 30], [0.5, 0.4, 0.9], 0.7)
    25.0
    """
    best = np.maximum.accumulate(np.where(np.isnan(scores), -np.inf, np.asarray(scores, np.float64)))
    reached = int(np.argmax(best >= target)) if len(best) and best[-1] >= target else None
    if reached is None:
        return None
    if reached == 0:
        return float(rounds[0])
    (r0, r1), (s0, s1) = (seq[reached - 1 : reached + 1] for seq in (rounds, best))
    return float(r1) if not np.isfinite(s0) else float(r0 + (r1 - r0) * (target - s0) / (s1 - s0))
