"""The bottleneck autoencoder of EMNIST characters.

S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, appendix C (EMNIST AE). The
layer sizes are those of G. Hinton and R. Salakhutdinov, "Reducing the Dimensionality of Data with Neural Networks", Science
2006.

Features: ``x: uint8 [28, 28, 1]``, 0 for paper, 255 for ink (or floats in [0, 1]); no label.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim.model import Examples, Model
from fedsim.models._dense import image_features, unit_scale

_SHAPE = (28, 28, 1)
_ENCODER, _CODE, _DECODER = (1000, 500, 250), 30, (250, 500, 1000)


def emnist_autoencoder() -> Model:
    """An autoencoder of the 784 pixels with a code of 30 numbers: 2,837,314 parameters.

    The encoder has layers of 1000, 500 and 250 units, and the decoder the same in reverse. Every layer except the code is
    followed by a sigmoid, so outputs are pixels ``float32 [n, 784]`` in (0, 1). The loss of an example is the mean squared
    error of its pixels. Initial weights are drawn from Glorot's normal distribution, as in the paper's code.

    >>> model = emnist_autoencoder()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    2837314
    """
    glorot_normal = hk.initializers.VarianceScaling(1.0, "fan_avg", "truncated_normal")

    def decoded(examples: Examples) -> jax.Array:
        x = _pixels(examples)
        for width in _ENCODER:
            x = jax.nn.sigmoid(hk.Linear(width, w_init=glorot_normal)(x))
        x = hk.Linear(_CODE, w_init=glorot_normal)(x)
        for width in (*_DECODER, 784):
            x = jax.nn.sigmoid(hk.Linear(width, w_init=glorot_normal)(x))
        return x

    def loss(examples: Examples, outputs: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(outputs - _pixels(examples)), axis=1)

    features = {"x": image_features(_SHAPE)["x"]}
    return Model.from_haiku(hk.transform(decoded), features=features, loss=loss)


def _pixels(examples: Examples) -> jax.Array:
    return unit_scale(examples["x"], 255).reshape(examples["x"].shape[0], -1)
