"""Gradient inversion: the images of a client from its update.

L. Zhu, Z. Liu, S. Han, "Deep leakage from gradients", NeurIPS 2019, algorithm 1: https://arxiv.org/abs/1906.08935, for
``distance="squared"``. J. Geiping, H. Bauermeister, H. Dröge, M. Moeller, "Inverting gradients", NeurIPS 2020, equation 4, for
``"cosine"``, and proposition 3.1, for `inputs_of_dense`: https://arxiv.org/abs/2003.14053. ``total_variation`` is α.

Deviations: labels are known to the attacker or part of ``update_of``; Adam replaces L-BFGS in the attack of Zhu et al.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim import checks, rng, tree

Update = Any


def invert(
    update_of: Callable[[jax.Array], Update],
    observed: Update,
    shape: Sequence[int],
    *,
    key: jax.Array,
    distance: Literal["cosine", "squared"] = "cosine",
    total_variation: float = 1e-3,
    steps: int = 1000,
    learning_rate: float = 0.05,
    low: float = 0.0,
    high: float = 1.0,
) -> jax.Array:
    """Returns images whose update is like the observed one, by gradient descent on the images.

    Args:
      update_of: the update of a client with these images, float32 ``shape``, and the labels that the attacker assumes: a
        gradient, or local steps. It must be differentiable.
      observed: what the attacker saw, with the structure of its result.
      shape: of the batch, ``[n, height, width, channels]``.
      key: draws the images at the start, uniform in [low, high].
      distance: ``"cosine"`` ignores the length of the update, as clipping changes it; ``"squared"`` does not.
      total_variation: the weight of the mean absolute difference of adjacent pixels, 0 for none.
      steps, learning_rate: of Adam, whose rate is divided by ten after 3/8, 5/8 and 7/8 of the steps; with ``"cosine"``, on the
        signs of the gradient.
      low, high: the range of pixels, into which they are clipped after each step.

    Returns:
      ``float32 shape``. The order of images with equal labels is arbitrary.

    Raises:
      ValueError: an argument is out of its range.

    One image of a logistic regression:

    >>> image, weights = jax.random.uniform(jax.random.key(0), [1, 4, 4, 1]), jnp.zeros([16, 3])
    >>> def loss(weights, x): return optax.softmax_cross_entropy(x.reshape(1, 16) @ weights, jnp.eye(3)[:1])[0]
    >>> def update_of(x): return jax.grad(loss)(weights, x)
    >>> found = invert(
    ...     update_of, update_of(image), image.shape, key=jax.random.key(1), distance="squared", total_variation=0.0)
    >>> bool(jnp.abs(found - image).max() < 0.01)
    True
    """
    checks.one_of("cosine", "squared", distance=distance)
    checks.number(least=0, total_variation=total_variation)
    checks.whole(1, steps=steps)
    checks.positive(learning_rate=learning_rate)
    checks.number(above=low, high=high)
    boundaries = {int(steps * part): 0.1 for part in (0.375, 0.625, 0.875)}
    optimizer = optax.adam(optax.piecewise_constant_schedule(learning_rate, boundaries))

    def of_length_one(update: Any) -> Any:
        squares = tree.squared_norm(update)
        return tree.scale(update, jax.lax.rsqrt(jnp.where(squares == 0, 1, squares)))  # The derivative is infinite at 0.

    def objective(images: jax.Array) -> jax.Array:
        update = update_of(images)
        if distance == "squared":
            far = tree.squared_norm(tree.subtract(update, observed))
        else:
            far = 1 - tree.dot(of_length_one(update), of_length_one(observed))
        down, right = jnp.diff(images, axis=1), jnp.diff(images, axis=2)
        return far + total_variation * sum(jnp.mean(jnp.abs(x)) if x.size else 0.0 for x in (down, right))

    @jax.jit
    def run(images: jax.Array) -> jax.Array:
        def step(carry: Any, _: Any) -> tuple[Any, None]:
            images, opt_state = carry
            gradient = jax.grad(objective)(images)
            with jax.numpy_dtype_promotion("standard"):  # which optax.adam requires
                change, opt_state = optimizer.update(jnp.sign(gradient) if distance == "cosine" else gradient, opt_state)
            return (jnp.clip(images + change, low, high), opt_state), None

        return jax.lax.scan(step, (images, optimizer.init(images)), length=steps)[0][0]

    return run(jax.random.uniform(rng.stream(key, "images"), tuple(shape), jnp.float32, low, high))


def inputs_of_dense(weight: Any, bias: Any) -> np.ndarray:
    """Returns the inputs of a dense layer from the gradients of its weights and bias, exactly where one example reaches a unit.

    The gradient of a unit's weights is a mean of the inputs, weighted by the derivatives by its output, and that of its bias is
    the sum of these. A quotient is therefore an input, if a single example of the batch activates the unit, and a weighted mean
    of inputs otherwise. Local steps, noise and updates of several clients mix further terms in.

    Args:
      weight: the gradient ``[inputs, units]``.
      bias: the gradient ``[units]``.

    Returns:
      ``float64 [active, inputs]``, a row for each unit whose bias has a gradient.

    Raises:
      ValueError: the shapes do not fit.

    >>> x, derivatives = np.array([0.1, 0.9]), np.array([2.0, 0.0, -1.0])
    >>> inputs_of_dense(np.outer(x, derivatives), derivatives).tolist()
    [[0.1, 0.9], [0.1, 0.9]]
    """
    weight, bias = np.asarray(weight, np.float64), np.asarray(bias, np.float64)
    if bias.ndim != 1 or weight.shape[1:] != bias.shape:
        raise ValueError(
            f"Expected weight [inputs, units] and bias [units], got {list(weight.shape)} and {list(bias.shape)}: give the "
            "gradients of one dense layer."
        )
    active = bias != 0
    return (weight[:, active] / bias[active]).T


def likeness(found: Any, images: Any, *, peak: float = 1.0) -> np.ndarray:
    """Returns the peak signal-to-noise ratio of each image in decibels, ``float64 [n]``, in the order of ``images``.

    Every image is compared with another one of ``found``, so that the mean squared error is least in total.

    Args:
      found: ``[m, ...]``, at least as many as images.
      images: ``[n, ...]``.
      peak: the difference between black and white. An error of a tenth of it is 20 dB.

    Raises:
      ValueError: the shapes do not fit, or ``peak`` is not positive.

    >>> likeness([[0.5], [0.1]], [[0.0], [0.5]]).round(1).tolist()
    [20.0, 120.0]
    """
    from scipy.optimize import linear_sum_assignment

    checks.positive(peak=peak)
    found, images = np.asarray(found, np.float64), np.asarray(images, np.float64)
    if found.shape[1:] != images.shape[1:] or len(found) < len(images):
        raise ValueError(
            f"Expected found [m, ...] and images [n, ...] with m >= n, got {list(found.shape)} and {list(images.shape)}."
        )
    errors = np.square(images[:, None] - found[None]).reshape(len(images), len(found), -1).mean(axis=-1)
    rows, columns = linear_sum_assignment(errors)
    return -10 * np.log10(np.maximum(errors[rows, columns] / peak**2, 1e-12))
