"""Norm bounding.

Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, "Can you really backdoor federated learning?", 2019:
https://arxiv.org/abs/1911.07963; as the flat clipping of H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning
differentially private recurrent language models", ICLR 2018: https://arxiv.org/abs/1710.06963. No deviations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators._aggregator import Memory, Sent, Update, Wrapper


def clip(update: Update, norm: float) -> Update:
    """``update`` times min(1, norm / ‖update‖), the norm being that of all leaves together."""
    length = jnp.sqrt(tree.squared_norm(update))
    return tree.scale(update, jnp.where(length > norm, norm / jnp.where(length == 0, 1, length), 1))


def check_floats(name: str, update: Update) -> None:
    """Raises ``ValueError`` if an update has leaves that cannot be scaled."""
    for leaf in jax.tree.leaves(update):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{name} scales updates, and this one has a leaf of {leaf.dtype}: make it a float.")


@dataclasses.dataclass(frozen=True, eq=False)
class Clipped(Wrapper):
    """Scales an update down to a norm where it is longer: u * min(1, norm / ‖u‖), over all leaves together.

    It acts where an update is sent, on attackers' updates as on any other: the server bounds what it accepts.

    Attributes:
      norm: > 0, the bound on the Euclidean norm.
      inner: see `Wrapper`.

    Raises:
      ValueError: ``norm`` is not positive and finite; before the first round, an update with leaves that are not floats.

    >>> sent = Clipped(1.0).send({"w": jnp.array([3.0, 4.0])}, (), (), jax.random.key(0))
    >>> [round(x, 4) for x in sent.update["w"].tolist()]
    [0.6, 0.8]
    """

    norm: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(norm=self.norm, remedy="the longest update to let through")

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_floats("Clipped", update)

    def send(self, update: Update, common: Memory, memory: Memory, key: jax.Array) -> Sent:
        return super().send(clip(update, self.norm), common, memory, key)
