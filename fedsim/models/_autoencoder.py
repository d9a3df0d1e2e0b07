"""Bottleneck autoencoders of EMNIST characters and of the embedded digits.

The one of EMNIST: S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, appendix C
(EMNIST AE). The layer sizes are those of G. Hinton and R. Salakhutdinov, "Reducing the Dimensionality of Data with Neural
Networks", Science 2006.

Features: ``x: uint8 [28, 28, 1]``, 0 for paper, 255 for ink (digits: ``[8, 8, 1]`` and 16), or floats in [0, 1]; no label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.model import Examples, Model
from fedsim.models._dense import image_features, unit_scale

_SHAPE = (28, 28, 1)
_ENCODER, _CODE, _DECODER = (1000, 500, 250), 30, (250, 500, 1000)


def emnist_autoencoder(*, factor: float = 20.0) -> Model:
    """An autoencoder of the 784 pixels with a code of 30 numbers: 2,837,314 parameters.

    The encoder has layers of 1000, 500 and 250 units, and the decoder the same in reverse. Every layer except the code is
    followed by a sigmoid, so outputs are pixels ``float32 [n, 784]`` in (0, 1). Initial weights are drawn from Glorot's normal
    distribution, as in the paper's code. The loss of an example is ``factor`` times the mean squared error of its pixels, and
    the metric ``loss`` is this error. The paper's code sums the errors of a batch, so its learning rates for batches of 20 are
    those for a factor of 20.

    Args:
      factor: of the loss that clients minimize.

    Raises:
      ValueError: ``factor`` is not positive.

    >>> model = emnist_autoencoder()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    2837314
    """
    checks.positive(factor=factor)
    glorot_normal = hk.initializers.VarianceScaling(1.0, "fan_avg", "truncated_normal")

    def decoded(examples: Examples) -> jax.Array:
        x = _pixels(examples, 255)
        for width in _ENCODER:
            x = jax.nn.sigmoid(hk.Linear(width, w_init=glorot_normal)(x))
        x = hk.Linear(_CODE, w_init=glorot_normal)(x)
        for width in (*_DECODER, 784):
            x = jax.nn.sigmoid(hk.Linear(width, w_init=glorot_normal)(x))
        return x

    return _reconstruction(decoded, _SHAPE, 255, factor)


def digits_autoencoder(*, code: int = 10, hidden: Sequence[int] = (64,)) -> Model:
    """An autoencoder of the 64 pixels with a code of ``code`` numbers: 9,674 parameters with a hidden layer of 64 units.

    The encoder has ReLU layers of ``hidden`` units before the code, and the decoder the same in reverse after it; the code and
    the outputs ``float32 [n, 64]`` are linear. The loss of an example is the mean squared error of its pixels. Without hidden
    layers the best autoencoder is the projection onto principal components, see `fedsim.algorithms.PCA`.

    Raises:
      ValueError: a size is not positive.

    >>> model = digits_autoencoder()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    9674
    """
    checks.whole(1, code=code)
    for width in hidden:
        checks.whole(1, hidden=width)

    def decoded(examples: Examples) -> jax.Array:
        x = _pixels(examples, 16)
        for width in hidden:
            x = jax.nn.relu(hk.Linear(width)(x))
        x = hk.Linear(code)(x)
        for width in reversed(hidden):
            x = jax.nn.relu(hk.Linear(width)(x))
        return hk.Linear(64)(x)

    return _reconstruction(decoded, (8, 8, 1), 16)


def _reconstruction(decoded: Callable[[Examples], jax.Array], shape: Sequence[int], scale: float, factor: float = 1.0) -> Model:
    """Returns the model whose outputs ``[n, pixels]`` approximate the pixels of its inputs."""

    def error(examples: Examples, outputs: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(outputs - _pixels(examples, scale)), axis=1)

    def loss(examples: Examples, outputs: jax.Array) -> jax.Array:
        return factor * error(examples, outputs)

    features = {"x": image_features(shape)["x"]}
    return Model.from_haiku(hk.transform(decoded), features=features, loss=loss, metrics={"loss": error})


def _pixels(examples: Examples, scale: float) -> jax.Array:
    return unit_scale(examples["x"], scale).reshape(examples["x"].shape[0], -1)
