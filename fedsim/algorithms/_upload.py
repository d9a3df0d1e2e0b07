"""Which changes of its parameters a participant of distributed selective SGD uploads, and what it makes of them before.

R. Shokri, V. Shmatikov, "Privacy-preserving deep learning", CCS 2015: https://doi.org/10.1145/2810103.2813687.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.algorithms._sparse_vector import above_noisy_threshold
from fedsim.algorithms._vector_part import share_of
from fedsim.compressors._selection import drawn, largest, mask_of


@dataclasses.dataclass(frozen=True)
class Upload:
    """Up to a share of the changes, by their size or by chance; see `fedsim.algorithms.DSSGD` for the fields.

    >>> from fedsim.compressors._selection import chosen
    >>> change, mask = Upload(theta=0.7, clip=0.5).of(jnp.array([0.125, -0.75, 0.25]), jax.random.key(0))
    >>> change[chosen(mask, 3)].tolist()
    [-0.5, 0.25]
    """

    theta: float
    selection: Literal["largest", "random"] = "largest"
    threshold: float = 0.0
    clip: float | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        checks.one_of("largest", "random", selection=self.selection)
        checks.number(least=0, threshold=self.threshold)
        checks.positive(or_none=True, clip=self.clip, epsilon=self.epsilon)
        if self.epsilon is not None and (self.clip is None or self.selection != "random"):
            raise ValueError(f"Noise of epsilon={self.epsilon} needs a clip, which bounds it, and selection='random'.")

    def of(self, change: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The changes ``[size]`` as they are uploaded, and the mask of those that are, ``uint32 [words]``."""
        count = share_of(self.theta, change.size)
        if self.clip is not None:
            change = jnp.clip(change, -self.clip, self.clip)
            if self.epsilon is not None:
                noisy, passed = above_noisy_threshold(change, self.clip, self.threshold, count, self.epsilon, key)
                return noisy, mask_of(passed)
        size = jnp.abs(change)
        if self.selection == "largest":
            return change, largest(size, count)
        eligible = size >= self.threshold if self.threshold else jnp.ones(change.size, bool)
        return change, drawn(mask_of(eligible), count, key)
