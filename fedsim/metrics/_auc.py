"""Area under the receiver operating characteristic curve, from histograms of scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.metrics._statistics import Better, Examples, Sparse, array_module, divide

_FINEST, _END = 0.01, 80.0  # the grid of logits is linear below the first, and ends at the second; between, it is logarithmic


class ScoreHistogram(NamedTuple):
    """Histograms of the scores of positive and negative examples, for each class.

    Attributes:
      positives: ``int [..., classes, bins]``.
      negatives: of the same shape.

    >>> histogram = ScoreHistogram(jnp.array([[0, 1, 1]]), jnp.array([[1, 1, 0]]))
    >>> float(histogram.result()), float(histogram.error_bound())
    (0.875, 0.125)
    """

    positives: Any
    negatives: Any

    @property
    def better(self) -> Better:
        """Which areas are better: higher ones."""
        return "higher"

    @property
    def weight(self) -> Any:
        """The number of pairs of a positive and a negative example, summed over classes, ``float [...]``."""
        # As floats: the product of two counts can exceed the range of integers.
        return (self._total(self.positives) * self._total(self.negatives)).sum(-1)

    def result(self) -> Any:
        """Returns the mean AUC over classes with positive and negative examples, ``[...]``; NaN if there is no such class."""
        positives, negatives = self._densities()
        below = negatives.cumsum(-1) - negatives
        return self._mean_over_classes((positives * (below + 0.5 * negatives)).sum(-1))

    def error_bound(self) -> Any:
        """Returns a bound of the error that scores are rounded to the grid: half the share of pairs within one bin.

        If all scores are on the grid, the result is exact up to the rounding of floats.
        """
        positives, negatives = self._densities()
        return self._mean_over_classes(0.5 * (positives * negatives).sum(-1))

    def _total(self, counts: Any) -> Any:
        return self._as_float(counts.sum(-1))

    def _densities(self) -> tuple[Any, Any]:
        """Returns the share of each bin in the positive and in the negative examples."""
        positives, negatives = (divide(counts, counts.sum(-1, keepdims=True)) for counts in (self.positives, self.negatives))
        return positives, negatives

    def _as_float(self, counts: Any) -> Any:
        return counts.astype(jnp.float32 if array_module(self) is jnp else np.float64)

    def _mean_over_classes(self, values: Any) -> Any:
        xp = array_module(self)
        defined = (self.positives.sum(-1) > 0) & (self.negatives.sum(-1) > 0)
        number = defined.sum(-1)
        return xp.where(number > 0, divide(xp.where(defined, values, 0.0).sum(-1), number), xp.nan)


@dataclasses.dataclass(frozen=True)
class AUC:
    """The probability that a positive example has a higher score than a negative one, where equal scores count half.

    With labels ``examples["y"] int [n]`` of 0 and 1 and outputs ``[n]`` or ``[n, 2]``, it is the area under the ROC curve of
    class 1. With outputs ``[n, classes]`` of more classes, it is the unweighted mean of one-versus-rest areas, over classes
    with positive and negative examples. It is NaN if there is no such class; `Evaluation.over_clients` leaves such clients out.

    Scores are rounded to the points of a grid, and their histograms are what is summed. The error is at most half the share of
    pairs of a positive and a negative example at the same point, which `ScoreHistogram.error_bound` computes. Equal scores make
    no error.

    The grid is one of logits, ``log(p / (1 - p))``, so small probabilities, as those of rare positives, are distinguished as
    well as others. With 1,001 points, neighbouring points differ by 2 % of the logit, close to the probability 1/2 by 0.0002,
    and the ends are the logits -80 and 80. Scores whose logits all lie within 1 % of one number far from 0, as those of a model
    that has learned only how frequent positives are, are not distinguished: give more ``bins``, or a ``score`` that separates
    them. Scores of NaN are the lowest. The histograms take ``8 * clients * classes * bins`` bytes on every device (for two
    classes, those of one class).

    Attributes:
      bins: the number of points of the grid. None is 1,001 for two classes. For more classes it is 201, whose distances are
        five times as large.
      score: maps the outputs to scores in [0, 1], ``[n]`` or ``[n, classes]``. None is the sigmoid of outputs ``[n]`` and the
        softmax of outputs ``[n, classes]``. If ``bins`` is given as well, the grid is ``0, 1 / (bins - 1), ..., 1``, and for
        scores on it the result is exact.

    Raises:
      ValueError: ``bins`` is less than 2, or scores and labels have other shapes.

    >>> histogram = AUC(bins=3)({"y": jnp.array([1, 0])}, jnp.array([2.0, -2.0]))
    >>> histogram.positives.dense().tolist(), histogram.negatives.dense().tolist()
    ([[[0, 0, 1]], [[0, 0, 0]]], [[[0, 0, 0]], [[1, 0, 0]]])
    """

    bins: int | None = None
    score: Callable[[Any], jax.Array] | None = None

    def __post_init__(self) -> None:
        if self.bins is not None:
            checks.whole(2, bins=self.bins)

    def __call__(self, examples: Examples, outputs: Any) -> ScoreHistogram:
        labels, scores = examples["y"].astype(jnp.int32), self.score(outputs) if self.score else outputs
        if labels.ndim != 1 or scores.ndim not in (1, 2) or scores.shape[1:] == (1,):
            raise ValueError(
                f"Expected scores [n] or [n, classes] and labels [n], got scores of shape {list(scores.shape)} and labels of "
                f"shape {list(labels.shape)}; for two classes, give [n] of class 1, or [n, 2]. Wrap the metric "
                "in a function that passes arrays of these shapes."
            )
        two_classes = scores.ndim == 1 or scores.shape[1] == 2
        bins = self.bins or (1001 if two_classes else 201)
        if self.score is None and scores.ndim == 2:
            scores = _logits_against_the_rest(scores.astype(jnp.float32))
        if two_classes:
            scores = scores if scores.ndim == 1 else scores[:, 1]
            scores, positive = scores[:, None], (labels == 1)[:, None]
        else:
            positive = labels[:, None] == jnp.arange(scores.shape[1])[None]
        share = scores  # of the grid, from 0 to 1
        if self.score is None or self.bins is None:
            logits = scores if self.score is None else jnp.log(scores) - jnp.log1p(-scores)
            share = 0.5 + 0.5 * jnp.arcsinh(logits / _FINEST) / np.float32(np.arcsinh(_END / _FINEST))
        classes = scores.shape[1]
        point = jnp.round(jnp.clip(jnp.nan_to_num(share), 0, 1) * (bins - 1)).astype(jnp.int32)
        index, shape = point + bins * jnp.arange(classes, dtype=jnp.int32)[None], (classes, bins)
        counts = (Sparse.of(index, shape, each.astype(jnp.int32)) for each in (positive, ~positive))
        return ScoreHistogram(*counts)


def _logits_against_the_rest(outputs: jax.Array) -> jax.Array:
    """Returns the logits ``log(p / (1 - p))`` of the probabilities of a softmax of outputs ``[n, classes]``, of the same shape.

    >>> _logits_against_the_rest(jnp.array([[0.0, 3.0], [9.0, 0.0]])).tolist()
    [[-3.0, 3.0], [9.0, -9.0]]
    """
    classes = jnp.arange(outputs.shape[1])[None]
    is_top = classes == jnp.argmax(outputs, axis=1)[:, None]
    whole = jax.nn.logsumexp(outputs, axis=1, keepdims=True)
    without_top = jax.nn.logsumexp(jnp.where(is_top, -jnp.inf, outputs), axis=1, keepdims=True)
    # The largest probability may be rounded to 1; those of the other classes are at most 1/2.
    others = jnp.where(is_top, without_top, whole + jnp.log1p(-jnp.exp(jnp.where(is_top, -1.0, outputs - whole))))
    return outputs - others
