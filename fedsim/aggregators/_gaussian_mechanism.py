"""The Gaussian mechanism: clipped updates are summed, the sum is divided by a fixed number, and noise is added once.

H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning differentially private recurrent language models", ICLR 2018, algorithm
1 with the estimator of a fixed denominator: https://arxiv.org/abs/1710.06963. ``noise_multiplier`` is z, ``clip`` is S,
``largest_weight`` is ŵ and ``denominator`` is qW. `AdaptiveClip` is G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy,
"Differentially private learning with adaptive clipping", NeurIPS 2021, algorithm 1: https://arxiv.org/abs/1905.03871. ``start``
is C⁰, ``quantile`` is γ, ``learning_rate`` is η_C and ``count_noise`` is σ_b. Deviation: by default σ_b is at least z, so that
also small cohorts have enough noise on the count; for cohorts of more than 20 z clients, it is the paper's m / 20.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.aggregators._aggregator import Memory, Sent, SumAggregator, Update, accumulation_dtype, widened
from fedsim.aggregators._clipped import check_floats


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """A norm for clipping that follows a quantile of the norms of the updates.

    After a round, the norm is multiplied by exp(-learning_rate * (b - quantile)), where b is a noised estimate of the fraction
    of updates that were not longer than the norm (equation 1 of the paper, with the geometric update).

    Attributes:
      start: the norm in the first round.
      quantile: the fraction of updates, in [0, 1], that the norm should not shorten.
      learning_rate: how fast the norm changes.
      count_noise: the standard deviation of the noise on the number of updates that were not longer than the norm; None:
        a twentieth of the denominator, and at least the noise multiplier.

    Raises:
      ValueError: an attribute is out of its range.

    >>> AdaptiveClip(quantile=0.8)
    AdaptiveClip(start=0.1, quantile=0.8, learning_rate=0.2, count_noise=None)
    """

    start: float = 0.1
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        checks.positive(start=self.start, learning_rate=self.learning_rate)
        checks.number(least=0, most=1, quantile=self.quantile, remedy="it is a fraction of the updates")
        checks.positive(or_none=True, count_noise=self.count_noise)


class WithShortness(NamedTuple):
    """A clipped update, and half of 1 if it was not longer than the norm, of -1 if it was, ``float32 []``.

    >>> WithShortness(jnp.ones(2), shortness=jnp.float32(-0.5)).shortness.item()
    -0.5
    """

    update: Update
    shortness: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class GaussianMechanism(SumAggregator):
    """The sum of clipped updates over a fixed denominator, with Gaussian noise: differential privacy of clients.

    Each update u is scaled to the norm S where it is longer, u * min(1, S / ‖u‖), and multiplied by its weight divided by
    ``largest_weight``, at most 1. So one client changes the sum by at most S. The aggregate is the sum divided by
    ``denominator``, with noise of the standard deviation noise_multiplier * S / denominator on each coordinate. The noise is
    drawn once in a round, also in one without updates, from a key of the round.

    With `AdaptiveClip`, clients send besides whether their update was longer than the norm, and the server keeps the norm. The
    noise on the sum is larger then, so that the sum and the count together have the privacy of ``noise_multiplier``.

    It is not a wrapper: what a client does with an update before (`Compressed`) cannot change that it is clipped last.

    Attributes:
      noise_multiplier: z, at least 0.
      clip: S, a positive norm, or an `AdaptiveClip`.
      denominator: the expected sum of the weights of a round, in units of ``largest_weight``: for equal weights the expected
        number of clients. It must not depend on the clients that take part.
      largest_weight: weights above it count as much as it; None: as 1, for algorithms whose clients have equal weights.

    Raises:
      ValueError: an attribute is out of its range. Before the first round: an update has leaves that are not floats, or the
        algorithm weights clients by examples and there is no ``largest_weight``.

    >>> mechanism = GaussianMechanism(0.5, clip=2.0, denominator=10)
    >>> total = mechanism.accumulate(mechanism.zero(jnp.zeros(10_000), slots=1), jnp.ones(10_000), jnp.float32(1), 0)
    >>> aggregate, _ = mechanism.finish_round(total, (), jax.random.key(0))
    >>> round(float(jnp.mean(aggregate)), 2), round(float(jnp.std(aggregate)), 2)
    (0.1, 0.1)
    """

    adds_weights: ClassVar[bool] = True
    skips_empty_rounds: ClassVar[bool] = False

    noise_multiplier: float
    _: dataclasses.KW_ONLY
    clip: float | AdaptiveClip
    denominator: float
    largest_weight: float | None = None

    def __post_init__(self) -> None:
        checks.number(least=0, noise_multiplier=self.noise_multiplier)
        if not isinstance(self.clip, AdaptiveClip):
            checks.positive(clip=self.clip, remedy="give the norm that updates are clipped to, or AdaptiveClip()")
        checks.positive(denominator=self.denominator, remedy="give the expected number of clients in a round")
        checks.positive(or_none=True, largest_weight=self.largest_weight)
        if isinstance(self.clip, AdaptiveClip) and self.largest_weight is not None:
            raise ValueError(
                f"Expected a number for clip with largest_weight={self.largest_weight}, got {self.clip}: the denominator is "
                "then no number of clients, by which the adaptive norm divides its count. Give equal weights, or a fixed norm."
            )
        is_known = not isinstance(self.noise_multiplier, jax.core.Tracer)
        if isinstance(self.clip, AdaptiveClip) and self.clip.count_noise is not None and is_known:
            checks.number(
                above=self.noise_multiplier / 2,
                count_noise=self.clip.count_noise,
                remedy="less noise on the count alone spends the privacy of the noise multiplier",
            )

    @property
    def is_scalable(self) -> bool:
        return not isinstance(self.clip, AdaptiveClip)  # whose messages also say whether they were clipped

    @property
    def count_noise(self) -> Any:
        """The standard deviation of the noise on the count of `AdaptiveClip`."""
        assert isinstance(self.clip, AdaptiveClip)
        if self.clip.count_noise is not None:
            return self.clip.count_noise
        return jnp.maximum(self.denominator / 20, self.noise_multiplier)

    @property
    def sum_multiplier(self) -> Any:
        """The standard deviation of the noise on the sum in units of the norm; above ``noise_multiplier`` with a count.

        A client changes the count, less a half for each update, by at most a half: z⁻² = z_sum⁻² + (2 σ_b)⁻².
        """
        if not isinstance(self.clip, AdaptiveClip):
            return self.noise_multiplier
        return self.noise_multiplier / jnp.sqrt(1 - jnp.square(self.noise_multiplier / (2 * self.count_noise)))

    def check(self, update: Update, slots: int) -> None:
        check_floats("GaussianMechanism", update)

    def init(self, update: Update) -> Memory:
        return jnp.float32(self.clip.start) if isinstance(self.clip, AdaptiveClip) else ()

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        wide = widened(update)  # Rounding could make it longer.
        sent = super().send(update, server_memory, memory, key)
        if not isinstance(self.clip, AdaptiveClip):
            return sent._replace(update=tree.clip(wide, self.clip))
        shortness = jnp.where(tree.squared_norm(wide) <= jnp.square(server_memory), jnp.float32(0.5), jnp.float32(-0.5))
        bits = tree.add_bits(sent.bits, 1, most=tree.num_bits(update) + 1)
        message = WithShortness(tree.clip(wide, server_memory), shortness)
        return sent._replace(update=message, bits=bits, entropy_bits=sent.entropy_bits + 1)

    def zero(self, update: Update, slots: int) -> Update:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), update)

    def accumulate(self, accumulator: Update, update: Update, weight: jax.Array, slot: jax.Array) -> Update:
        share = jnp.clip(weight / (self.largest_weight or 1), 0, 1)
        if not isinstance(self.clip, AdaptiveClip):
            return tree.add(accumulator, tree.scale(update, share))
        count = accumulator.shortness + jnp.where(weight != 0, update.shortness, 0)
        return WithShortness(tree.add(accumulator.update, tree.scale(update.update, share)), count)

    def finish(self, accumulator: Update) -> Update:
        total = accumulator.update if isinstance(self.clip, AdaptiveClip) else accumulator
        return tree.scale(total, 1 / self.denominator)

    def finish_round(self, accumulator: Update, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        norm = memory if isinstance(self.clip, AdaptiveClip) else self.clip
        mean = self.finish(accumulator)
        noise = rng.normal_like(rng.stream(key, "noise"), mean)
        noised = tree.add(mean, tree.scale(noise, self.sum_multiplier * norm / self.denominator))
        if not isinstance(self.clip, AdaptiveClip):
            return noised, memory
        # Without noise on the sum, there is none on the count.
        deviation = jnp.where(self.noise_multiplier == 0, 0, self.count_noise)
        count = accumulator.shortness + deviation * jax.random.normal(rng.stream(key, "count"), (), jnp.float32)
        fraction = count / self.denominator + 0.5
        return noised, memory * jnp.exp(-self.clip.learning_rate * (fraction - self.clip.quantile))
