"""Classifiers of small photographs: from a network for prepared images to a model for pixels."""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.model import Examples, Model
from fedsim.models._augmentation import center_crop, random_crop_and_flip, standardize
from fedsim.models._dense import image_features


def classifier(
    body: Callable[[jax.Array, bool], jax.Array],
    num_classes: int,
    *,
    size: int = 32,
    window: int | None = None,
    margin: int = 0,
    w_init: hk.initializers.Initializer | None = None,
) -> Model:
    """Returns a classifier of ``x: uint8 [size, size, 3]`` (or floats) with a linear layer on ``body``.

    In training, ``margin`` pixels of the mean are added on each side of an image, a random window is cropped, and it is flipped
    with probability 1/2. In evaluation the window is central. Images are standardized, before pixels are added, or after the
    crop.

    Args:
      body: from windows ``float32 [n, window, window, 3]``, and whether they are of training, to features ``[n, width]``.
      num_classes: labels are in ``[0, num_classes)``.
      size: the height and width of the images.
      window: those of the crop; None for ``size``.
      margin: how many pixels are added.
      w_init: the initializer of the linear layer; None for Haiku's.

    Raises:
      ValueError: ``num_classes`` is not positive.

    >>> model = classifier(lambda x, training: x.mean((1, 2)), 10, margin=4)
    >>> model.apply_for_eval(model.init(jax.random.key(0)), {"x": jnp.zeros([2, 32, 32, 3])}).shape
    (2, 10)
    """
    checks.whole(1, num_classes=num_classes)
    crop = window or size

    def logits(examples: Examples, training: bool) -> jax.Array:
        x = examples["x"].astype(jnp.float32)
        if margin:
            x = jnp.pad(standardize(x), ((0, 0), (margin, margin), (margin, margin), (0, 0)))
        x = random_crop_and_flip(hk.next_rng_key(), x, crop) if training else center_crop(x, crop)
        x = body(x if margin else standardize(x), training)
        return hk.Linear(num_classes, w_init=w_init)(x)

    return Model.from_haiku(
        hk.transform_with_state(logits),
        features=image_features((size, size, 3)),
        num_classes=num_classes,
        train_kwargs={"training": True},
        eval_kwargs={"training": False},
    )
