"""Label flip.

V. Tolpegin, S. Truex, M. E. Gursoy, L. Liu, "Data poisoning attacks against federated learning systems", ESORICS 2020 (one
class is labeled as another): https://arxiv.org/abs/2007.08432. M. Fang, X. Cao, J. Jia, N. Z. Gong, "Local model poisoning
attacks to Byzantine-robust federated learning", USENIX Security 2020 (label l becomes L - l - 1):
https://arxiv.org/abs/1911.11815. There are no deviations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.attacks._attack import Attack, check_column
from fedsim.data import Batch, FederatedData


@dataclasses.dataclass(frozen=True)
class LabelFlip(Attack):
    """Attackers train on wrong labels: label l becomes num_classes - 1 - l, or ``source`` becomes ``target``.

    A hidden label, which is -1, stays hidden, see `fedsim.partitioners.hide_labels`.

    Attributes:
      num_classes: labels are in [0, num_classes).
      source: the class whose label is changed to ``target``. None changes all labels l to num_classes - 1 - l.
      target: the new label of the examples of class ``source``.
      label: the feature that holds the label.

    Raises:
      ValueError: there are fewer than two classes, a class is out of range, or only one of ``source`` and ``target`` is given.
        Before the first round: the data has labels out of range.

    >>> batch = Batch({"y": jnp.array([0, 1, 9])}, jnp.ones(3, bool), jax.random.key(0), 0)
    >>> LabelFlip(10).poison(batch)["y"].tolist(), LabelFlip(10, source=1, target=7).poison(batch)["y"].tolist()
    ([9, 8, 0], [0, 7, 9])
    """

    num_classes: int
    source: int | None = None
    target: int | None = None
    label: str = "y"

    def __post_init__(self) -> None:
        checks.whole(2, num_classes=self.num_classes)
        if (self.source is None) != (self.target is None):
            raise ValueError(
                f"Expected source and target together, or neither, got source={self.source!r}, target={self.target!r}."
            )
        classes = f"classes are 0 to num_classes - 1 = {self.num_classes - 1}"
        checks.whole(0, self.num_classes - 1, or_none=True, source=self.source, target=self.target, remedy=classes)

    def check(self, data: FederatedData) -> None:
        check_column(self, data, self.label, "label")
        known = data.label_range(self.label)
        if known and not (known[0] >= -1 and known[1] < self.num_classes):
            raise ValueError(
                f"Expected labels {self.label!r} from 0 to {self.num_classes - 1}, got {known[0]} to {known[1]}. Set "
                f"num_classes={self.num_classes} to the number of classes, or set label to another feature."
            )

    def poison(self, batch: Batch) -> dict[str, jax.Array]:
        labels = batch.examples[self.label]
        if self.source is None or self.target is None:
            wrong = jnp.where(labels >= 0, self.num_classes - 1 - labels, labels)
        else:
            wrong = jnp.where(labels == self.source, jnp.asarray(self.target, labels.dtype), labels)
        return {**batch.examples, self.label: wrong}
