"""Gaussian noise that every node adds to what it has learned, before anything leaves it.

The mechanism is that of M. Abadi et al., "Deep learning with differential privacy", CCS 2016, applied to the movement of a node
in a round instead of an example's gradient. E. Cyffers, A. Bellet, "Privacy amplification by decentralization", AISTATS 2022,
call the setting, in which noise protects whatever leaves a node, local differential privacy: https://arxiv.org/abs/2012.05326.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fedsim import checks, rng, tree
from fedsim.aggregators import widened


@dataclasses.dataclass(frozen=True)
class LocalNoise:
    """Clips the movement of a node's local steps to ``norm``, and adds noise of deviation ``multiplier * norm`` per coordinate.

    All messages of a node are computed from its noised movements and from what it received. So what it sends in a round,
    to any number of neighbours, reveals no more about its data than one Gaussian mechanism of this noise multiplier, for two
    data sets of a node whose clipped movements differ by at most ``norm`` (such as with and without the node's data). Over T
    rounds compose T mechanisms, without amplification by sampling: ``privacy.epsilon(multiplier, EveryRound(), rounds=T,
    delta=δ)``. A node whose training is not finite sends its noise alone. Running statistics have no noise, so models whose
    nodes mix them are refused.

    Attributes:
      multiplier: the deviation of the noise in units of ``norm``, at least 0.
      norm: the largest Euclidean norm of a movement over all parameters that are sent, positive.

    Raises:
      ValueError: an attribute is out of its range.

    >>> import jax.numpy as jnp
    >>> noised = LocalNoise(multiplier=0.5, norm=2.0)(jnp.zeros(10_000), jax.random.key(0))
    >>> round(float(noised.std()), 1)
    1.0
    """

    multiplier: float = 1.0
    norm: float = 1.0

    def __post_init__(self) -> None:
        checks.number(least=0, multiplier=self.multiplier)
        checks.positive(norm=self.norm, remedy="the norm that movements are clipped to")

    def __call__(self, movement: Any, key: jax.Array) -> Any:
        """Returns the movement of one node, clipped and with noise, in its dtype: half precision is rounded after the noise."""
        wide = widened(movement)  # Noise has few values in half precision.
        noise = tree.scale(rng.normal_like(key, wide), self.multiplier * self.norm)
        noised = tree.add(tree.clip(wide, self.norm), noise)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), noised, movement)
