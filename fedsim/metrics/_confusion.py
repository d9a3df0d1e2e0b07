"""Metrics from counts of labels and predicted classes: confusion matrix, precision, recall and F1 score."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from fedsim.metrics._examples import predicted_class
from fedsim.metrics._statistics import Better, Examples, Sparse, Sum, array_module, divide

Average = Literal["macro", "micro"]
Measure = Literal["precision", "recall", "f1"]


@dataclasses.dataclass(frozen=True)
class ConfusionMatrix:
    """The number of examples of each label (rows) with each predicted class (columns), ``int [classes, classes]``.

    Labels are ``examples["y"] int [n]``, and outputs are logits ``[n, classes]``, whose largest is the predicted class. The
    matrix of every client is computed, which takes ``4 * clients * classes ** 2`` bytes on every device. An example with a
    logit that is NaN has no predicted class and is not in the matrix.

    Raises:
      ValueError: outputs and labels have other shapes.

    >>> counts = ConfusionMatrix()({"y": jnp.array([0, 1])}, jnp.array([[0.2, 0.1], [0.2, 0.1]]))
    >>> counts.total.dense().sum(0).tolist()
    [[1, 0], [1, 0]]
    """

    def __call__(self, examples: Examples, outputs: jax.Array) -> Sum:
        labels, predicted, classes = _labels_and_predictions(examples, outputs)
        in_range = (labels >= 0) & (labels < classes) & (predicted < classes)
        return Sum(Sparse.of(jnp.where(in_range, labels * classes + predicted, -1), (classes, classes)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClassCounts:
    """The counts of each class that precision, recall and F1 score are computed from.

    Attributes:
      correct: examples of the class that are predicted as such, ``int [..., classes]``.
      predicted: examples that are predicted to be of the class, of the same shape.
      labelled: examples of the class, of the same shape.
      measure: "precision", "recall" or "f1".
      average: "macro", "micro" or None.

    >>> counts = ClassCounts(jnp.array([1, 0]), jnp.array([2, 0]), jnp.array([1, 1]), "precision", None)
    >>> counts.result().tolist()
    [0.5, 0.0]
    """

    correct: Any
    predicted: Any
    labelled: Any
    measure: Measure = dataclasses.field(metadata={"static": True})
    average: Average | None = dataclasses.field(metadata={"static": True})

    better: ClassVar[Better] = "higher"

    @property
    def weight(self) -> Any:
        """The number of examples, ``int [...]``."""
        return self.labelled.sum(-1)

    def result(self) -> Any:
        """Returns the measure, ``[...]``, or ``[..., classes]`` without an average.

        It is 0 where the denominator is 0, and NaN where there are no examples.
        """
        correct, predicted, labelled = self.correct, self.predicted, self.labelled
        if self.average == "micro":
            correct, predicted, labelled = (counts.sum(-1) for counts in (correct, predicted, labelled))
        if self.measure == "f1":
            each = divide(2 * correct, predicted + labelled)
        else:
            each = divide(correct, predicted if self.measure == "precision" else labelled)
        xp = array_module(self)
        if self.average == "macro":
            # As in scikit-learn, the mean is over classes that occur as a label or as a prediction.
            occurs = (self.predicted + self.labelled) > 0
            each = divide(xp.where(occurs, each, 0.0).sum(-1), occurs.sum(-1))
        has_examples = self.weight[..., None] > 0 if self.average is None else self.weight > 0
        return xp.where(has_examples, each, xp.nan)


@dataclasses.dataclass(frozen=True)
class _ClassMetric:
    _measure: ClassVar[Measure]
    average: Average | None = "macro"

    def __post_init__(self) -> None:
        if self.average not in (*get_args(Average), None):
            raise ValueError(f'Expected average to be "macro", "micro" or None, got average={self.average!r}.')

    def __call__(self, examples: Examples, outputs: jax.Array) -> ClassCounts:
        labels, predicted, classes = _labels_and_predictions(examples, outputs)
        in_range = (labels >= 0) & (labels < classes)
        counts = (
            Sparse.of(labels, (classes,), (labels == predicted).astype(jnp.int32)),
            Sparse.of(jnp.where(in_range, predicted, -1), (classes,)),
            Sparse.of(labels, (classes,)),
        )
        return ClassCounts(*counts, self._measure, self.average)


@dataclasses.dataclass(frozen=True)
class Precision(_ClassMetric):
    """The fraction of the examples predicted to be of a class that are of this class.

    Labels are ``examples["y"] int [n]``, and outputs are logits ``[n, classes]``, whose largest is the predicted class. Values
    are those of scikit-learn with ``zero_division=0``. The statistic takes ``12 * clients * classes`` bytes on every device.

    Attributes:
      average: "macro" is the mean over classes that occur as a label or as a prediction; "micro" is the value of the counts of
        all classes together, which equals the accuracy; None gives the value of each class, ``[classes]``.

    Raises:
      ValueError: ``average`` is another value, or outputs and labels have other shapes.

    >>> logits = jnp.array([[0.2, 0.1], [0.2, 0.1], [0.1, 0.2]])
    >>> counts = jax.tree.map(lambda leaf: leaf.dense().sum(0), Precision(average=None)({"y": jnp.array([0, 1, 1])}, logits),
    ...                       is_leaf=lambda leaf: isinstance(leaf, Sparse))
    >>> counts.result().tolist()
    [0.5, 1.0]
    """

    _measure: ClassVar[Measure] = "precision"


@dataclasses.dataclass(frozen=True)
class Recall(_ClassMetric):
    """The fraction of the examples of a class that are predicted to be of this class. See `Precision`.

    Attributes:
      average: see `Precision`.

    Raises:
      ValueError: ``average`` is another value, or outputs and labels have other shapes.

    >>> Recall()({"y": jnp.array([0, 1, 1])}, jnp.array([[0.2, 0.1], [0.2, 0.1], [0.1, 0.2]])).correct.dense().tolist()
    [[1, 0], [0, 0], [0, 1]]
    """

    _measure: ClassVar[Measure] = "recall"


@dataclasses.dataclass(frozen=True)
class F1(_ClassMetric):
    """The harmonic mean of precision and recall of a class. See `Precision`.

    Attributes:
      average: see `Precision`. "macro" is the mean of the classes' F1 scores.

    Raises:
      ValueError: ``average`` is another value, or outputs and labels have other shapes.

    >>> F1("micro").average
    'micro'
    >>> F1("weighted")
    Traceback (most recent call last):
    ...
    ValueError: Expected average to be "macro", "micro" or None, got average='weighted'.
    """

    _measure: ClassVar[Measure] = "f1"


def _labels_and_predictions(examples: Examples, outputs: jax.Array) -> tuple[jax.Array, jax.Array, int]:
    """Returns the labels ``int32 [n]``, the predicted classes ``int32 [n]`` of `predicted_class`, and the number of classes."""
    labels = examples["y"].astype(jnp.int32)
    if outputs.ndim != 2 or labels.ndim != 1:
        raise ValueError(
            f"Expected logits [n, classes] and labels [n], got outputs of shape {list(outputs.shape)} and labels of shape "
            f"{list(labels.shape)}. Wrap the metric in a function that passes arrays of these shapes."
        )
    return labels, predicted_class(outputs), outputs.shape[1]
