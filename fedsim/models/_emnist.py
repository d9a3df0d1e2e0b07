"""Models for handwritten characters: EMNIST, FEMNIST and, with ``num_classes=10``, MNIST.

Features: ``x: uint8 [28, 28, 1]``, 0 for paper, 255 for ink (or floats in [0, 1]); ``y: int32 []``, the character's class.
"""

from __future__ import annotations

from collections.abc import Sequence

import haiku as hk
import jax

from fedsim import checks
from fedsim.model import Examples, Model
from fedsim.models._convolution import Conv2D
from fedsim.models._dense import dense, image_features, logistic, unit_scale
from fedsim.models._dropout import dropout
from fedsim.models._pooling import max_pool

_SHAPE = (28, 28, 1)


def emnist_logistic(num_classes: int = 62) -> Model:
    """Multinomial logistic regression on the 784 pixels: 48,670 parameters with 62 classes.

    >>> emnist_logistic().num_classes
    62
    """
    return logistic(_SHAPE, num_classes)


def emnist_dense(num_classes: int = 62, *, hidden: Sequence[int] = (200, 200)) -> Model:
    """A multilayer perceptron on the 784 pixels: 209,662 parameters with 62 classes and two hidden layers of 200 units.

    >>> emnist_dense(num_classes=10).num_classes
    10
    """
    return dense(_SHAPE, num_classes, hidden=hidden)


def emnist_cnn(num_classes: int = 62) -> Model:
    """Two convolutions, dropout and a hidden layer of 128 units: 1,206,590 parameters with 62 classes.

    The network for EMNIST character recognition of S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
    https://arxiv.org/abs/2003.00295, appendix C. It differs in its initial weights, which are drawn from Haiku's truncated
    normal distribution of standard deviation ``1 / sqrt(fan_in)``; the paper's code uses Keras's uniform distribution.

    Raises:
      ValueError: ``num_classes`` is not positive.

    >>> model = emnist_cnn()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    1206590
    """
    checks.whole(1, num_classes=num_classes)

    def logits(examples: Examples, training: bool) -> jax.Array:
        x = unit_scale(examples["x"], 255)
        x = jax.nn.relu(Conv2D(32, 3, padding="VALID")(x))
        x = jax.nn.relu(Conv2D(64, 3, padding="VALID")(x))
        x = max_pool(x, 2)
        x = dropout(hk.next_rng_key(), 0.25, x) if training else x
        x = x.reshape(x.shape[0], -1)
        x = jax.nn.relu(hk.Linear(128)(x))
        x = dropout(hk.next_rng_key(), 0.5, x) if training else x
        return hk.Linear(num_classes)(x)

    return Model.from_haiku(
        hk.transform(logits),
        features=image_features(_SHAPE),
        num_classes=num_classes,
        train_kwargs={"training": True},
        eval_kwargs={"training": False},
    )
