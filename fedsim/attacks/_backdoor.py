"""Pixel backdoor.

T. Gu, B. Dolan-Gavitt, S. Garg, "BadNets: identifying vulnerabilities in the machine learning model supply chain", 2017:
https://arxiv.org/abs/1708.06733. Attackers scale their updates up as in E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V.
Shmatikov, "How to backdoor federated learning", AISTATS 2020: https://arxiv.org/abs/1807.00459, where ``boost`` is called γ.
Deviation: the trigger is a checkerboard, which is visible on any background.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng, tree
from fedsim.attacks._attack import Attack, Update, check_column, on_inexact
from fedsim.data import Batch, FederatedData


@dataclasses.dataclass(frozen=True)
class PixelBackdoor(Attack):
    """Attackers train on images with a trigger in the lower right corner, which they label as one class, ``target``.

    Attributes:
      target: the label that the model should predict for images with the trigger.
      size: side length of the trigger in pixels. The trigger is a checkerboard of 0 and ``value``.
      value: value of the bright pixels: 255 for bytes, 1 for floats in [0, 1].
      fraction: the fraction of an attacker's examples that get the trigger, in (0, 1]. They are drawn anew in every step.
      boost: the factor of the floats and complex numbers of an attacker's update, at least 1.
      image: the feature that holds images ``[height, width]`` or ``[height, width, channels]``.
      label: the feature that holds the label.

    Raises:
      ValueError: an attribute is out of its range. Before the first round: the data has no such images and labels.

    >>> import fedsim
    >>> data = FederatedData.from_arrays({"x": np.zeros([2, 4, 4, 1], np.uint8), "y": np.array([0, 1])}, sizes=[2])
    >>> stamped = PixelBackdoor(target=1, size=2).test_data(data)
    >>> stamped.columns["x"][0, 2:, 2:, 0].tolist(), stamped.columns["y"].tolist()
    ([[255, 0], [0, 255]], [1])
    """

    target: int
    size: int = 3
    value: float = 255
    fraction: float = 0.5
    boost: float = 1.0
    image: str = "x"
    label: str = "y"

    def __post_init__(self) -> None:
        checks.whole(0, target=self.target, remedy="a label")
        checks.whole(1, size=self.size, remedy="the side length of the trigger in pixels")
        checks.number(value=self.value)
        checks.number(above=0, most=1, fraction=self.fraction)
        checks.number(least=1, boost=self.boost)

    def check(self, data: FederatedData) -> None:
        check_column(self, data, self.image, "image")
        check_column(self, data, self.label, "label")
        images: Any = data.columns[self.image]
        labels: Any = data.columns[self.label]
        self._check_image_shape(images.shape[1:])
        if images.dtype.kind in "iu" and not np.iinfo(images.dtype).min <= self.value <= np.iinfo(images.dtype).max:
            raise ValueError(
                f"Expected a value in the range of {images.dtype}, the dtype of {self.image!r}, got value={self.value}."
            )
        if labels.ndim != 1:
            raise ValueError(
                f"Expected one label per example, got {self.label!r} of shape {list(labels.shape[1:])} per example. Set label "
                "to another feature."
            )
        known = data.label_range(self.label)
        if known and self.target > known[1]:
            raise ValueError(f"Expected target <= {known[1]}, the largest label of {self.label!r}, got target={self.target}.")

    def _check_image_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) not in (2, 3) or self.size > min(shape[:2]):
            raise ValueError(
                f"Expected images [height, width] or [height, width, channels] with at least size={self.size} pixels per side, "
                f"got {self.image!r} of shape {list(shape)} per example. Set a smaller size, or set image to another feature."
            )

    def stamp(self, examples: Mapping[str, Any]) -> dict[str, Any]:
        """Returns examples (NumPy or JAX arrays) with the trigger and with label ``target``."""
        images, labels = examples[self.image], examples[self.label]
        xp = np if isinstance(images, np.ndarray) else jnp
        self._check_image_shape(images.shape[1:])
        height, width = images.shape[1:3]
        row, column = np.ogrid[:height, :width]
        where = (row >= height - self.size) & (column >= width - self.size)
        trigger = np.where((row + column - height - width) % 2 == 0, self.value, 0).astype(images.dtype)
        shape = (1, height, width, *[1] * (images.ndim - 3))
        stamped = xp.where(where.reshape(shape), xp.asarray(trigger.reshape(shape)), images)
        return {**examples, self.image: stamped, self.label: xp.full_like(labels, self.target)}

    def test_data(self, data: FederatedData) -> FederatedData:
        """Returns all examples of other labels with the trigger. The accuracy on them is the attack's success rate."""
        keep = np.asarray(data.columns[self.label]) != self.target
        owner = np.repeat(np.arange(data.num_clients), data.sizes)[keep]
        columns = {name: np.asarray(column)[keep] for name, column in data.columns.items()}
        sizes = np.bincount(owner, minlength=data.num_clients)
        return FederatedData.from_arrays(self.stamp(columns), sizes=sizes, client_ids=data.client_ids)

    def poison(self, batch: Batch) -> dict[str, jax.Array]:
        stamped = self.stamp(batch.examples)
        if self.fraction == 1:
            return stamped
        chosen = jax.random.bernoulli(rng.stream(batch.key, "backdoor"), jnp.float32(self.fraction), batch.mask.shape)

        def mix(stamped: jax.Array, clean: jax.Array) -> jax.Array:
            return jnp.where(tree.per_row(chosen, clean), stamped, clean)

        return {name: mix(stamped[name], clean) for name, clean in batch.examples.items()}

    def corrupt(self, update: Update, key: jax.Array) -> Update:
        return on_inexact(update, lambda leaf: leaf * jnp.asarray(self.boost, leaf.dtype))
