"""Training curves, and the quantities that papers report about them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import rng
from fedsim.algorithm import Algorithm
from fedsim.rounds import RoundInfo
from fedsim.samplers import Sampler

# The largest number of rounds that are sent to the device at once.
_MAX_ROUNDS = 50


@dataclasses.dataclass(frozen=True)
class Curve:
    """The scores of a run over its rounds.

    Attributes:
      rounds: the number of finished rounds at each evaluation.
      scores: the score at each evaluation.
      state: the algorithm's state after the last round.
      seconds: the wall time, compilation and evaluations included.
      bits_up: the number of bits that all clients sent together; 0 if the algorithm does not count them.
    """

    rounds: list[int]
    scores: list[float]
    state: Any
    seconds: float
    bits_up: float = 0.0

    def rounds_to_target(self, target: float) -> float | None:
        """Returns `rounds_to_target` of this curve."""
        return rounds_to_target(self.rounds, self.scores, target)

    def points(self) -> dict[int, float]:
        """Returns the scores by round, with four digits."""
        return {at: round(score, 4) for at, score in zip(self.rounds, self.scores, strict=True)}

    def mean_of_last(self, last: int) -> float:
        """Returns the mean of the last scores, which depends less on chance than the last one."""
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
    """Trains from the initial state, and evaluates the state at regular intervals and after the last round.

    Args:
      algorithm: any algorithm.
      sampler: the sampler. The root key of its cohorts is that of the run, as in `fedsim.experiment.run`.
      rounds: the largest number of rounds.
      score: a function of the state; larger is better.
      every: the number of rounds between evaluations.
      until: the run ends as soon as a score is at least this.

    Returns:
      The curve of the run.

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
        stop = min(position - position % every + every, position + _MAX_ROUNDS, rounds)
        cohorts = [sampler.cohort(round) for round in range(position, stop)]
        state, infos = algorithm.apply_rounds(state, cohorts, max_rounds=min(every, _MAX_ROUNDS))
        position = stop
        if isinstance(infos, RoundInfo) and "bits_up" in infos.clients:
            bits += float(np.sum(jax.device_get(infos.clients["bits_up"]), dtype=np.float64))
        if stop % every == 0 or stop == rounds:
            at.append(stop)
            scores.append(float(score(state)))
            if until is not None and scores[-1] >= until:
                break
    return Curve(at, scores, state, time.perf_counter() - began, bits)


class SearchResult(NamedTuple):
    """The result of `search_rate`.

    Attributes:
      rate: the best learning rate.
      curve: its curve.
      tried: all learning rates that were tried.
      seconds: the wall time of all runs.
    """

    rate: float
    curve: Curve
    tried: list[float]
    seconds: float


def search_rate(
    start: int, run: Callable[[float, int], Curve], *, rounds: int, target: float, search: bool = True
) -> SearchResult:
    """Finds the learning rate 10^(k/3) that reaches a target in the fewest rounds, or that comes closest if none reaches it.

    From ``k = start``, k increases while the results improve. If the first increase is no improvement, k decreases while they
    improve. The grid is that of McMahan et al. 2017, of which only the rates near the best are tried.

    Args:
      start: the first k.
      run: a function ``(rate, rounds) -> curve``, which ends at the target. A run that is slower than the best one so far is
        stopped.
      rounds: the largest number of rounds.
      target: the target of `rounds_to_target`.
      search: False tries only the first learning rate.

    Returns:
      The best learning rate with its curve.

    >>> reaches = {-1: 30, 0: 20, 1: 10, 2: 15}
    >>> def run(rate, rounds):
    ...     at = reaches[round(3 * np.log10(rate))]
    ...     return Curve([1, min(at, rounds)], [0.0, 1.0 if at <= rounds else 0.5], None, 1.0)
    >>> choice = search_rate(0, run, rounds=100, target=1.0)
    >>> f"{choice.rate:.3g}", [f"{rate:.3g}" for rate in choice.tried], choice.seconds
    ('2.15', ['1', '2.15', '4.64'], 3.0)
    """
    rate = 10 ** (start / 3)
    best = run(rate, rounds)
    found = SearchResult(rate, best, [rate], best.seconds)
    for step in (1, -1) if search else ():
        k, before = start, found.rate
        while True:
            k += step
            rate = 10 ** (k / 3)
            reached = found.curve.rounds_to_target(target) is not None
            curve = run(rate, found.curve.rounds[-1] if reached else rounds)
            better = quality(curve, target) > quality(found.curve, target)
            found = SearchResult(
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


def quality(curve: Curve, target: float) -> tuple[float, float]:
    """Returns a pair that is larger for a curve that reaches a target sooner, or comes closer to it if none reaches it.

    >>> quality(Curve([1, 2], [0.1, 0.6], None, 1.0), 0.5) > quality(Curve([1, 2], [0.1, 0.4], None, 1.0), 0.5)
    True
    """
    reached = curve.rounds_to_target(target)
    return -float("inf") if reached is None else -reached, float(np.max(np.nan_to_num(curve.scores, nan=-np.inf)))


def rounds_to_target(rounds: Sequence[int], scores: Sequence[float], target: float) -> float | None:
    """Returns the round in which a curve first reaches a target, as in McMahan et al. 2017, section 3; None if it does not.

    Each point of the curve is replaced by the best score so far, and the curve is interpolated linearly between the points.

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
