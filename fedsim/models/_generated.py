"""Models for the generated datasets `synthetic`, `synthetic_iid` and `toy_regression`: those that the data are drawn from."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks, metrics
from fedsim.model import Examples, Model
from fedsim.models._dense import logistic


def synthetic_logistic() -> Model:
    """Softmax regression from 60 features to 10 classes: 610 parameters.

    Features: ``x: float32 [60]``; ``y: int32 []``, the class.

    >>> synthetic_logistic().num_classes
    10
    """
    return logistic((60,), 10, scale=1)


def toy_regression(dimension: int = 2) -> Model:
    """Linear regression on ``dimension`` features, without a bias, with the squared error as loss.

    Features: ``x: float32 [dimension]``; ``y: float32 []``. Outputs: ``float32 [n]``.

    Raises:
      ValueError: ``dimension`` is not positive.

    >>> model = toy_regression()
    >>> outputs = model.apply_for_eval({"linear": {"w": jnp.array([[1.0], [2.0]])}}, {"x": jnp.array([[3.0, 4.0]])})
    >>> outputs.tolist(), model.loss({"y": jnp.array([10.0])}, outputs).tolist()
    ([11.0], [1.0])
    """
    checks.whole(1, dimension=dimension)

    def outputs(examples: Examples) -> jax.Array:
        return hk.Linear(1, with_bias=False)(examples["x"])[:, 0]

    features = {"x": jax.ShapeDtypeStruct((dimension,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)}
    return Model.from_haiku(hk.transform(outputs), features=features, loss=metrics.squared_error)
