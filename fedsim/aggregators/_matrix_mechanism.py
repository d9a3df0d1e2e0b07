"""The matrix mechanism: clipped updates are summed as by the Gaussian mechanism, and the noise is correlated between rounds.

DP-FTRL: P. Kairouz et al., "Practical and private (deep) learning without sampling or shuffling", ICML 2021:
https://arxiv.org/abs/2103.00039, and with other matrices C. A. Choquette-Choo et al., "(Amplified) banded matrix factorization:
a unified approach to private training", NeurIPS 2023: https://arxiv.org/abs/2306.08153. The server's optimizer takes the noised
aggregates, as in the second paper; with SGD this is the first one's algorithm without restarts.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.aggregators._aggregator import Memory, Update
from fedsim.aggregators._gaussian_mechanism import AdaptiveClip, GaussianMechanism
from fedsim.aggregators._noise_matrix import NoiseMatrix


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixMechanism(GaussianMechanism):
    """`GaussianMechanism` whose noise is correlated between rounds, so that most of it cancels out in the sum of all rounds.

    The noise of round t is noise_multiplier * clip / denominator times row t of C⁻¹ Z, where Z is a matrix of independent
    standard normal numbers with a row for each round. The privacy follows from how far apart a client's rounds are, see
    `fedsim.privacy.sensitivity`, so it needs a `samplers.CyclicSampler` or all clients in every round, and nobody has to hide
    who takes part. With a `samplers.CyclicPoissonSampler` and a `BandedToeplitz` of at most as many bands as there are groups,
    it also follows from the sampling, if nobody sees who takes part.

    The server's memory holds what the matrix remembers, and is in checkpoints. Row t is drawn from the key of the round, so a
    run that goes on from a checkpoint has the noise of one without a break.

    Attributes:
      noise_multiplier: the deviation of Z in units of the norm, before the correlation. What the accountant compares with the
        mechanism of one round is noise_multiplier divided by the sensitivity of the matrix.
      matrix: C, for a number of rounds. After these, the aggregate is NaN.
      clip: a number; the norm cannot adapt, because the noise of several rounds is added up.
      denominator, largest_weight: see `GaussianMechanism`.

    Raises:
      ValueError: see `GaussianMechanism`; or the norm is an `AdaptiveClip`, or ``matrix`` is none.

    In the sum of four rounds, a binary tree has the noise of one round, where independent noise has twice that:

    >>> from fedsim.aggregators import BinaryTree
    >>> mechanism = MatrixMechanism(1.0, clip=1.0, denominator=1, matrix=BinaryTree(rounds=4))
    >>> memory, total = mechanism.init(jnp.zeros(10_000)), jnp.zeros(10_000)
    >>> for key in jax.random.split(jax.random.key(0), 4):
    ...     aggregate, memory = mechanism.finish_round(jnp.zeros(10_000), memory, key)
    ...     total += aggregate
    >>> round(float(jnp.std(total)), 1)
    1.0
    """

    _: dataclasses.KW_ONLY
    clip: float
    matrix: NoiseMatrix

    def __post_init__(self) -> None:
        if isinstance(self.clip, AdaptiveClip):
            raise ValueError(
                f"Expected a number for clip with noise that is correlated between rounds, got {self.clip}: the noise of "
                "rounds with other norms would not cancel out. Give a norm, or use GaussianMechanism."
            )
        super().__post_init__()
        checks.instance(NoiseMatrix, "BinaryTree(rounds=100)", matrix=self.matrix)

    def init(self, update: Update) -> Memory:
        return jnp.int32(0), self.matrix.init(self.zero(update, slots=1))

    def finish_round(self, accumulator: Update, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        round, before = memory
        mean = self.finish(accumulator)
        noise, after = self.matrix.next(rng.normal_like(rng.stream(key, "noise"), mean), before)
        # The privacy of further rounds is not known, so they must not pass unnoticed.
        deviation = jnp.where(round < self.matrix.rounds, self.noise_multiplier * self.clip / self.denominator, jnp.nan)
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, before)
        return tree.add(mean, tree.scale(noise, deviation)), (round + 1, after)
