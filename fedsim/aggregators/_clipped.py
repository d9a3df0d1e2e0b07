"""Norm clipping of updates.

Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan, "Can you really backdoor federated learning?", 2019 (norm thresholding):
https://arxiv.org/abs/1911.07963. It is the flat clipping of H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning
differentially private recurrent language models", ICLR 2018: https://arxiv.org/abs/1710.06963. There are no deviations.
"""

from __future__ import annotations

import dataclasses

import jax

from fedsim import checks, tree
from fedsim.aggregators._aggregator import Memory, Sent, Update, Wrapper


def check_floats(name: str, update: Update) -> None:
    """Raises ``ValueError`` if an update has leaves that are not floats."""
    for leaf in jax.tree.leaves(update):
        if not tree.is_float(leaf):
            raise ValueError(f"{name} scales updates, and needs floats, got an array of {leaf.dtype}: convert it to float32.")


@dataclasses.dataclass(frozen=True, eq=False)
class Clipped(Wrapper):
    """Clips the norm of each update: u * min(1, norm / ‖u‖), with the Euclidean norm over all leaves.

    Clipping is computed where an update is sent, also for attackers' updates, because a server would not accept an update
    with a larger norm. The norm of an update in half precision may be larger by the rounding error of its dtype, see
    `fedsim.tree.clip`.

    Attributes:
      norm: the largest Euclidean norm, positive and finite.
      inner: see `Wrapper`.

    Raises:
      ValueError: ``norm`` is not positive and finite. Before the first round: an update has leaves that are not floats.

    >>> import jax.numpy as jnp
    >>> sent = Clipped(1.0).send({"w": jnp.array([3.0, 4.0])}, (), (), jax.random.key(0))
    >>> [round(x, 4) for x in sent.update["w"].tolist()]
    [0.6, 0.8]
    """

    norm: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(norm=self.norm, remedy="the largest norm of an update")

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_floats("Clipped", update)

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        return super().send(tree.clip(update, self.norm), server_memory, memory, key)
