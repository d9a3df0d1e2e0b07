"""Intervals of means over seeds, paired t tests, Holm's correction, and the number of seeds that a difference needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from fedsim.run_files import shown_number

_MOST_SEEDS = 10_000
_ROUNDING = 4 * float(np.finfo(np.float32).eps)


@dataclasses.dataclass(frozen=True)
class Interval:
    """The mean of some values and its confidence interval, ``mean ± half_width``.

    Attributes:
      mean: the mean; NaN without values, or if a value is not finite.
      half_width: half the width of the interval; None if it is not known: for fewer than two values, or one that is not finite.
      deviation: the standard deviation of the sample (n - 1); None like ``half_width``.
      count: the number of values.

    >>> str(Interval(mean=0.5, half_width=0.01, deviation=0.02, count=5))
    '0.5000 ± 0.0100'
    """

    mean: float
    half_width: float | None
    deviation: float | None
    count: int

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "-"
        if self.half_width is None:
            return shown_number(self.mean)
        half_width = shown_number(self.half_width, beside=self.mean)
        return f"{shown_number(self.mean, beside=self.half_width)} ± {half_width}"


@dataclasses.dataclass(frozen=True)
class PairedTest:
    """A two-sided paired t test of values of two groups with the same seeds.

    Attributes:
      difference: the mean of the differences, first minus second, and its interval.
      p: the probability of a mean difference that is at least as large if there is none; None without a test: for fewer than
        two common seeds, if a value is not finite, or if all differences are equal, whose spread over seeds is then not known.

    >>> PairedTest(Interval(0.5, None, None, 1), None).p is None
    True
    """

    difference: Interval
    p: float | None


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Returns the mean of independent values and its confidence interval by Student's t (W. S. Gosset, Biometrika 6, 1908).

    The interval is mean ± t s / √n, with the sample's standard deviation s and the quantile t of n - 1 degrees of freedom.

    Args:
      values: ``[n]``, for example one per seed.
      confidence: the probability that the interval covers the mean, if the values are normally distributed.

    Raises:
      ValueError: ``confidence`` is not between 0 and 1.

    >>> str(interval([0.5, 0.7, 0.6])), interval([0.5]).half_width
    ('0.6000 ± 0.2484', None)
    """
    _check_between(confidence=confidence)
    array = np.asarray(values, np.float64)
    if not len(array) or not np.isfinite(array).all():
        return Interval(math.nan, None, None, len(array))
    mean = float(array.mean())
    if len(array) == 1:
        return Interval(mean, None, None, 1)
    from scipy.special import stdtrit

    deviation = float(array.std(ddof=1))
    quantile = float(stdtrit(len(array) - 1, 0.5 + confidence / 2))
    return Interval(mean, quantile * deviation / math.sqrt(len(array)), deviation, len(array))


def paired_test(first: Mapping[Hashable, float], second: Mapping[Hashable, float]) -> PairedTest:
    """Tests whether two groups differ, by Student's t test of the differences of the seeds that both have.

    Args:
      first: a value for each seed.
      second: the same for the other group.

    >>> test = paired_test({0: 0.80, 1: 0.82, 2: 0.81}, {0: 0.79, 1: 0.80, 2: 0.78})
    >>> str(test.difference), round(test.p, 4)
    ('0.0200 ± 0.0248', 0.0742)
    """
    common = [seed for seed in first if seed in second]
    pairs = np.array([(first[seed], second[seed]) for seed in common], np.float64).reshape(-1, 2)
    difference = interval((pairs[:, 0] - pairs[:, 1]).tolist())
    # Equal differences are equal up to the rounding of their values, which metrics have in float32.
    if difference.deviation is None or difference.deviation <= _ROUNDING * np.abs(pairs).max():
        return PairedTest(difference, None)
    from scipy.special import stdtr

    t = difference.mean / (difference.deviation / math.sqrt(difference.count))
    return PairedTest(difference, float(2 * stdtr(difference.count - 1, -abs(t))))


def holm(p: Sequence[float]) -> list[float]:
    """Returns p-values that are corrected for the number of tests (S. Holm, Scandinavian Journal of Statistics 6, 1979).

    If those below a level are called differences, the probability of any false one is at most this level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = largest
    return corrected


def power_of(seeds: int, difference: float, deviation: float, level: float = 0.05) -> float:
    """Returns the probability that a paired t test finds a difference, from the noncentral t distribution.

    Args:
      seeds: the number of common seeds, at least 2.
      difference: the true mean difference.
      deviation: the standard deviation of the differences over seeds.
      level: of the two-sided test.

    Raises:
      ValueError: an argument is out of its range.

    >>> round(power_of(10, difference=0.01, deviation=0.01), 4)
    0.8031
    """
    # `fedsim.checks` needs JAX, for which the command line would wait.
    if seeds < 2:
        raise ValueError(f"Expected seeds >= 2, got seeds={seeds}: a spread over seeds needs two of them.")
    if not 0 < deviation < math.inf:
        raise ValueError(
            f"Expected deviation > 0, got deviation={deviation}: give the standard deviation of the differences over seeds."
        )
    _check_between(level=level)
    from scipy.special import nctdtr, stdtrit

    freedom, shift = seeds - 1, math.sqrt(seeds) * abs(difference) / deviation
    critical = float(stdtrit(freedom, 1 - level / 2))
    if shift > critical + 30:  # The distribution cannot be computed so far away, where the power differs from 1 by rounding.
        return 1.0
    below = float(nctdtr(freedom, shift, -critical))
    return 1 - float(nctdtr(freedom, shift, critical)) + (0.0 if math.isnan(below) else below)


def seeds_needed(difference: float, deviation: float, level: float = 0.05, power: float = 0.8) -> int | None:
    """Returns the smallest number of common seeds with which a paired t test finds a difference with a given probability.

    Args:
      difference: the true mean difference.
      deviation: the standard deviation of the differences over seeds.
      level: of the two-sided test.
      power: the probability.

    Returns:
      The number; None if 10,000 seeds do not suffice, or if there is no difference.

    Raises:
      ValueError: an argument is out of its range.

    >>> seeds_needed(difference=0.01, deviation=0.01), seeds_needed(0.0, 0.01)
    (10, None)
    """
    _check_between(power=power)
    if power_of(_MOST_SEEDS, difference, deviation, level) < power or difference == 0:
        return None
    low, high = 1, _MOST_SEEDS  # The power grows with the number of seeds.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle, difference, deviation, level) >= power else (middle, high)
    return high


def _check_between(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise ValueError(f"Expected {name} between 0 and 1, got {name}={value}: give a probability, such as 0.95.")
