"""Multinomial logistic regression and multilayer perceptrons for inputs of any shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks, metrics
from fedsim.model import Examples, Feature, Model


def dense(shape: Sequence[int], num_classes: int, *, hidden: Sequence[int] = (200, 200), scale: float = 255) -> Model:
    """A multilayer perceptron with ReLU between its layers, whose outputs are logits ``float32 [n, num_classes]``.

    Features: ``x: uint8 [*shape]``, from 0 to ``scale``, or ``x: float32 [*shape]``, which is not scaled; ``y: int32 []``, the
    label. With two hidden layers of 200 units it is the "2NN" of B. McMahan et al., "Communication-Efficient Learning of Deep
    Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629, section 3. Initial weights are drawn from
    a truncated normal distribution of standard deviation ``1 / sqrt(fan_in)``, Haiku's default, and biases are 0.

    Args:
      shape: the shape of one input.
      num_classes: labels are in ``[0, num_classes)``.
      hidden: the widths of the hidden layers.
      scale: the number by which integer inputs are divided.

    Raises:
      ValueError: a size or the scale is not positive.

    >>> model = dense([28, 28, 1], 10)
    >>> sum(leaf.size for leaf in jax.tree.leaves(model.init(jax.random.key(0))))  # as the paper counts
    199210
    """
    checks.whole(1, num_classes=num_classes)
    logits = hk.transform(_layers(shape, num_classes, hidden, scale))
    return Model.from_haiku(logits, features=image_features(shape), num_classes=num_classes)


def dense_regression(shape: Sequence[int], *, hidden: Sequence[int] = (200, 200), scale: float = 255) -> Model:
    """The multilayer perceptron of `dense` with one output ``float32 [n]``, and the squared error as loss.

    Features: ``x: uint8 [*shape]``, from 0 to ``scale``, or ``x: float32 [*shape]``, which is not scaled; ``y: float32 []``.

    Args:
      shape: the shape of one input.
      hidden: the widths of the hidden layers.
      scale: the number by which integer inputs are divided.

    Raises:
      ValueError: a size or the scale is not positive.

    >>> model = dense_regression([3], hidden=[5])
    >>> model.apply_for_eval(model.init(jax.random.key(0)), {"x": jnp.zeros([4, 3])}).tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    layers = _layers(shape, 1, hidden, scale)
    features = image_features(shape) | {"y": jax.ShapeDtypeStruct((), jnp.float32)}
    outputs = hk.transform(lambda examples: layers(examples)[:, 0])
    return Model.from_haiku(outputs, features=features, loss=metrics.squared_error)


def linear_regression(shape: Sequence[int], *, scale: float = 255) -> Model:
    """Linear regression with a bias and the squared error as loss: `dense_regression` without hidden layers.

    Arguments and errors are those of `dense_regression`.

    >>> model = linear_regression([2])
    >>> params = {"linear": {"w": jnp.array([[1.0], [2.0]]), "b": jnp.array([0.5])}}
    >>> model.apply_for_eval(params, {"x": jnp.array([[3.0, 4.0]])}).tolist()
    [11.5]
    """
    return dense_regression(shape, hidden=(), scale=scale)


def _layers(shape: Sequence[int], outputs: int, hidden: Sequence[int], scale: float) -> Callable[[Examples], jax.Array]:
    """Returns the function of the layers, for ``hk.transform``."""
    for size in shape:
        checks.whole(1, shape=size)
    for width in hidden:
        checks.whole(1, hidden=width)
    checks.positive(scale=scale)

    def apply(examples: Examples) -> jax.Array:
        x = unit_scale(examples["x"], scale)
        x = x.reshape(x.shape[0], -1)
        for width in hidden:
            x = jax.nn.relu(hk.Linear(width)(x))
        return hk.Linear(outputs)(x)

    return apply


def logistic(shape: Sequence[int], num_classes: int, *, scale: float = 255) -> Model:
    """Multinomial logistic regression: `dense` without hidden layers, whose arguments and errors these are.

    >>> model = logistic([2], 3, scale=1)
    >>> model.apply_for_eval(model.init(jax.random.key(0)), {"x": jnp.zeros([5, 2])}).shape
    (5, 3)
    """
    return dense(shape, num_classes, hidden=(), scale=scale)


def unit_scale(x: jax.Array, scale: float) -> jax.Array:
    """Returns integers divided by ``scale`` and floats unchanged, as ``float32`` of the same shape.

    >>> unit_scale(jnp.array([0, 255], jnp.uint8), 255).tolist(), unit_scale(jnp.array([0.5]), 255).tolist()
    ([0.0, 1.0], [0.5])
    """
    floats = x.astype(jnp.float32)
    return floats / scale if jnp.issubdtype(x.dtype, jnp.integer) else floats


def image_features(shape: Sequence[int]) -> dict[str, Feature]:
    """Returns the features of an image classifier: ``x: uint8 [*shape]`` or ``float32 [*shape]``, and ``y: int32 []``.

    >>> image_features([8, 8, 1])["x"][0]
    ShapeDtypeStruct(shape=(8, 8, 1), dtype=uint8)
    """
    return {
        "x": (jax.ShapeDtypeStruct(tuple(shape), jnp.uint8), jax.ShapeDtypeStruct(tuple(shape), jnp.float32)),
        "y": jax.ShapeDtypeStruct((), jnp.int32),
    }
