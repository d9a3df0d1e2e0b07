"""`Scores`: what an attack on privacy finds out, as a ROC curve and as a lower bound of ε.

G. Andrew, P. Kairouz, S. Oh, A. Oprea, H. B. McMahan, V. M. Suriyakumar, "One-shot empirical privacy estimation for federated
learning", ICLR 2024, section 3, for the estimate from the two normal laws of the scores: https://arxiv.org/abs/2302.03098.
J. Dong, A. Roth, W. J. Su, "Gaussian differential privacy", 2019, corollary 2.13, converts it: https://arxiv.org/abs/1905.02383.
T. Steinke, M. Nasr, M. Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023, for ``"one_run"``:
https://arxiv.org/abs/2305.08846.

Deviations from Andrew et al.: both laws have the same variance, which is estimated from the scores, and the estimate has a
confidence bound.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import numpy as np

from fedsim import checks

Bound = Literal["normal", "independent", "one_run"]


class Roc(NamedTuple):
    """The ROC curve of an attack: what share of both kinds has at least a score, for all scores from the highest.

    Attributes:
      false_positive_rate: ``float64 [k]``, from 0 to 1.
      true_positive_rate: ``float64 [k]``, from 0 to 1.

    >>> Scores([2.0, 3.0], [1.0, 2.5]).roc()
    Roc(false_positive_rate=array([0. , 0. , 0.5, 0.5, 1. ]), true_positive_rate=array([0. , 0.5, 0.5, 1. , 1. ]))
    """

    false_positive_rate: np.ndarray
    true_positive_rate: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The scores of an attack that distinguishes those who took part from those who did not, who should have lower scores.

    Attributes:
      inside: ``float64 [n]``, scores of examples or clients that took part, or that have the property.
      outside: ``float64 [m]``, scores of the others.

    Raises:
      ValueError: there are fewer than two scores of a kind, or one is not a number.

    >>> scores = Scores(np.arange(100) + 9.5, np.arange(100))
    >>> round(scores.auc, 4), scores.true_positive_rate(0.01)
    (0.5905, 0.11)
    """

    inside: Any
    outside: Any

    def __post_init__(self) -> None:
        for name in ("inside", "outside"):
            values = np.asarray(getattr(self, name), np.float64)
            if values.ndim != 1 or len(values) < 2 or np.isnan(values).any():
                raise ValueError(
                    f"Expected {name} to be at least two numbers, float [n], got shape {list(values.shape)}"
                    f"{' with NaN' if np.isnan(values).any() else ''}: give a score for each example or client."
                )
            object.__setattr__(self, name, values)

    def roc(self) -> Roc:
        """Returns the ROC curve; a straight line joins its points."""
        thresholds = np.unique(np.concatenate([self.inside, self.outside]))[::-1]

        def share(scores: np.ndarray) -> np.ndarray:
            found = len(scores) - np.searchsorted(np.sort(scores), thresholds)
            return np.concatenate([[0], found]) / len(scores)  # Nobody is found with a threshold above all scores.

        return Roc(share(self.outside), share(self.inside))

    @property
    def auc(self) -> float:
        """The area under the ROC curve: the probability that one inside has a higher score than one outside; 0.5 is chance."""
        curve = self.roc()
        return float(np.trapezoid(curve.true_positive_rate, curve.false_positive_rate))

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Returns the share of those inside that are found with at most this share of false alarms.

        Raises:
          ValueError: ``false_positive_rate`` is outside [0, 1].
        """
        checks.number(least=0, most=1, false_positive_rate=false_positive_rate)
        curve = self.roc()
        return float(curve.true_positive_rate[curve.false_positive_rate <= false_positive_rate].max())

    def epsilon_estimate(self, delta: float) -> float:
        """Returns ε of two normal laws with the means and the common variance of the scores: an estimate, not a bound.

        Args:
          delta: δ, in (0, 1).

        Raises:
          ValueError: ``delta`` is out of its range.

        >>> quantiles = np.array([-1.5, -0.5, 0.5, 1.5])
        >>> round(Scores(quantiles + 1, quantiles).epsilon_estimate(1e-3), 2)
        2.29
        """
        checks.number(above=0, below=1, delta=delta)
        return gaussian_epsilon(self._distance()[0], delta)

    def epsilon_bound(self, delta: float, *, confidence: float = 0.95, method: Bound = "normal") -> float:
        """Returns a lower bound of ε: a mechanism whose accountant states less is broken, except by chance.

        Args:
          delta: δ, in (0, 1).
          confidence: the probability that the bound is below ε, in [0.5, 1); above 0.5 with ``"independent"``.
          method: what is assumed of the scores. ``"normal"``: they are independent and have two normal laws with the same
            variance, as those of `canary_audit` almost are. ``"independent"``: they are independent (Clopper and Pearson), as
            those of runs of their own are. ``"one_run"``: nothing, if each canary took part by a coin of its own in the same
            run; it needs many canaries and a small δ. The last two cannot exceed about the logarithm of the number of scores.

        Raises:
          ValueError: an argument is out of its range.
          ImportError: jax-privacy is not installed, which the last two methods need.

        >>> noise = np.random.default_rng(0).normal(size=[2, 500])
        >>> scores = Scores(noise[0] + 1, noise[1])  # ε is 3.14
        >>> round(scores.epsilon_bound(1e-3), 1)
        3.0
        """
        checks.number(above=0, below=1, delta=delta)
        checks.number(least=0.5, below=1, confidence=confidence)
        checks.one_of("normal", "independent", "one_run", method=method)
        if method == "independent":  # jax-privacy's bound needs more.
            checks.number(above=0.5, below=1, confidence=confidence)
        if method == "normal":
            return gaussian_epsilon(self._distance(confidence)[1], delta)
        auditor = _auditing().CanaryScoreAuditor(self.inside, self.outside)
        bound = auditor.epsilon_one_run if method == "one_run" else auditor.epsilon_clopper_pearson
        return float(bound(1 - confidence, delta))

    def _distance(self, confidence: float = 0.5) -> tuple[float, float]:
        """Returns the distance of the means in standard deviations, and its lower bound by the normal law of large samples."""
        from scipy import stats

        if not (np.isfinite(self.inside).all() and np.isfinite(self.outside).all()):
            raise ValueError("Expected finite scores for two normal laws, got an infinite one: choose another method.")
        n, m = len(self.inside), len(self.outside)
        squares = sum(float(np.sum(np.square(x - x.mean()))) for x in (self.inside, self.outside))
        difference, deviation = float(self.inside.mean() - self.outside.mean()), math.sqrt(squares / (n + m - 2))
        if difference <= 0 or deviation == 0:
            found = math.inf if difference > 0 else 0.0
            return found, found
        distance = difference / deviation
        error = math.sqrt(1 / n + 1 / m + distance**2 / (2 * (n + m - 2)))
        return distance, max(0.0, distance - float(stats.norm.ppf(confidence)) * error)


def gaussian_epsilon(distance: float, delta: float) -> float:
    """Returns ε of distinguishing N(0, 1) from N(distance, 1), in closed form.

    >>> round(gaussian_epsilon(1.0, 1e-3), 2)
    3.14
    """
    from scipy import optimize, stats

    if distance in (0.0, math.inf):
        return distance

    def excess(epsilon: float) -> float:
        tail = stats.norm.logcdf(-epsilon / distance - distance / 2)
        return float(stats.norm.cdf(-epsilon / distance + distance / 2) - math.exp(epsilon + tail)) - delta

    return 0.0 if excess(0.0) <= 0 else float(optimize.brentq(excess, 0.0, distance * (distance + 40)))


def _auditing() -> Any:
    try:
        from jax_privacy import auditing
    except ImportError as error:
        raise ImportError(
            "This bound needs jax-privacy: pip install 'fedsim-jax[privacy]'. Or give method='normal'."
        ) from error
    return auditing
