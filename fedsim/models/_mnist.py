"""The two networks for MNIST of the paper that introduced federated averaging.

B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
https://arxiv.org/abs/1602.05629, section 3. Initial weights are drawn from a truncated normal distribution of standard
deviation ``1 / sqrt(fan_in)``, Haiku's default, and biases are 0. The paper does not state its initial weights.

Features: ``x: uint8 [28, 28, 1]``, 0 for paper, 255 for ink (or floats in [0, 1]); ``y: int32 []``, the class.
"""

from __future__ import annotations

import haiku as hk
import jax

from fedsim import checks
from fedsim.model import Examples, Model
from fedsim.models._convolution import Conv2D
from fedsim.models._dense import dense, image_features, unit_scale
from fedsim.models._pooling import max_pool

_SHAPE = (28, 28, 1)


def mnist_2nn(num_classes: int = 10) -> Model:
    """The paper's "2NN" with two hidden layers of 200 units: 199,210 parameters with 10 classes.

    Raises:
      ValueError: ``num_classes`` is not positive.

    >>> model = mnist_2nn()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    199210
    """
    return dense(_SHAPE, num_classes)


def mnist_cnn(num_classes: int = 10) -> Model:
    """The paper's CNN: 1,663,370 parameters with 10 classes.

    Two convolutions of 5 by 5 pixels with 32 and 64 channels, each followed by max pooling of 2 by 2, and a hidden layer of 512
    units.

    Raises:
      ValueError: ``num_classes`` is not positive.

    >>> model = mnist_cnn()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    1663370
    """
    checks.whole(1, num_classes=num_classes)

    def logits(examples: Examples) -> jax.Array:
        x = unit_scale(examples["x"], 255)
        x = max_pool(jax.nn.relu(Conv2D(32, 5)(x)), 2)
        x = max_pool(jax.nn.relu(Conv2D(64, 5)(x)), 2)
        x = jax.nn.relu(hk.Linear(512)(x.reshape(x.shape[0], -1)))
        return hk.Linear(num_classes)(x)

    return Model.from_haiku(hk.transform(logits), features=image_features(_SHAPE), num_classes=num_classes)
