"""Models for the digits that come with scikit-learn: 1,797 images of 8 by 8 pixels in ten classes.

Features: ``x: uint8 [8, 8, 1]``, 0 for paper, 16 for ink (or floats in [0, 1]); ``y: int32 []``, the digit.
"""

from __future__ import annotations

from collections.abc import Sequence

import haiku as hk
import jax

from fedsim import checks
from fedsim.model import Examples, Model, SplitModel
from fedsim.models._dense import dense, image_features, logistic, unit_scale

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


def digits_split(*, device: int = 128, server: int = 64, head: bool = False) -> SplitModel:
    """`digits_dense` in parts: the device has the first hidden layer, and the server has the other layers.

    Args:
      device: the number of units of the device's layer, which are what it sends per image.
      server: the number of units of the server's hidden layer.
      head: whether the output layer is on the device, so that the labels stay there.

    Raises:
      ValueError: ``device`` or ``server`` is not a positive whole number, or ``head`` is not a truth value.

    >>> {part: sorted(own) for part, own in digits_split(head=True).init(jax.random.key(0)).items()}
    {'device': ['linear'], 'head': ['linear'], 'server': ['linear']}
    """
    checks.whole(1, device=device, server=server)
    checks.truth(head=head)

    def on_device(examples: Examples) -> jax.Array:
        x = unit_scale(examples["x"], _INK)
        return jax.nn.relu(hk.Linear(device)(x.reshape(x.shape[0], -1)))

    def on_server(activations: jax.Array) -> jax.Array:
        activations = jax.nn.relu(hk.Linear(server)(activations))
        return activations if head else hk.Linear(_CLASSES)(activations)

    return SplitModel.from_parts(
        device=hk.transform(on_device),
        server=hk.transform(on_server),
        head=hk.transform(lambda activations: hk.Linear(_CLASSES)(activations)) if head else None,
        features=image_features(_SHAPE),
        num_classes=_CLASSES,
    )
