"""Models for the digits that come with scikit-learn: 1,797 images of 8 by 8 pixels in ten classes.

Features: ``x: uint8 [8, 8, 1]``, 0 for paper, 16 for ink (or floats in [0, 1]); ``y: int32 []``, the digit.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedsim.model import Model
from fedsim.models._dense import dense, logistic

_SHAPE, _CLASSES, _INK = (8, 8, 1), 10, 16


def digits_logistic() -> Model:
    """Multinomial logistic regression on the 64 pixels: 650 parameters.

    >>> digits_logistic().num_classes
    10
    """
    return logistic(_SHAPE, _CLASSES, scale=_INK)


def digits_dense(*, hidden: Sequence[int] = (128, 64)) -> Model:
    """A multilayer perceptron on the 64 pixels: 17,226 parameters with hidden layers of 128 and 64 units.

    >>> digits_dense().features["x"][0].shape
    (8, 8, 1)
    """
    return dense(_SHAPE, _CLASSES, hidden=hidden, scale=_INK)
