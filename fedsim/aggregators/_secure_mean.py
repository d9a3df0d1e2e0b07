"""The mean of updates as secure aggregation computes it: from a sum of integers, without the updates of single clients.

K. Bonawitz, V. Ivanov, B. Kreuter, A. Marcedone, H. B. McMahan, S. Patel, D. Ramage, A. Segal, K. Seth, "Practical secure
aggregation for privacy-preserving machine learning", CCS 2017: https://doi.org/10.1145/3133956.3133982. The messages that
compute this sum are those of `fedsim.privacy.SecureAggregation`, whose result is equal, bit for bit. Deviation: values are
rounded to the nearest level, and not at random.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.aggregators._aggregator import Memory, Sent, SumAggregator, Update, Wrapper, accumulation_dtype
from fedsim.aggregators._clipped import check_floats


class SumInRing(NamedTuple):
    """The sums of the clients' integers and weights, the number of clients, and zeros with the dtypes of the mean.

    ``total`` and ``like`` have the structure of an update. ``total``, ``weight`` and ``clients`` are ``uint32``.
    """

    total: Update
    weight: jax.Array
    clients: jax.Array
    like: Update


@dataclasses.dataclass(frozen=True, eq=False)
class SecureMean(SumAggregator):
    """The weighted mean of updates, of which the server sees no more than the sum of the clients' integers.

    A client multiplies its update, whose coordinates are clipped to [-clip, clip], by its weight divided by ``max_weight``, and
    rounds the result to integers: q = round(u * w / max_weight * (2^(bits - 1) - 1) / clip). The server adds the q of all
    clients modulo 2^``modulus_bits``, and the integers of their weights, and divides the sums. Integers are added without
    rounding, so the mean has the same bits on any number of devices. A coordinate of the mean of n updates with weight
    ``max_weight`` differs from `Mean` by at most clip / (2^bits - 2), besides clipping and float32 rounding, and more if
    weights are far below ``max_weight``.

    ``bits_up`` counts ``modulus_bits`` for each coordinate and for the weight, and nothing for keys and shares, whose sizes
    `fedsim.privacy.SecureAggregation` reports. A robust aggregator such as `Krum` needs single updates, so it cannot be
    combined with secure aggregation. Bounds that clients enforce can: ``Clipped(1.0, inner=SecureMean(max_weight=1.0))``.

    What clients keep follows their updates before this clipping and rounding. So sums that are kept at clients and at the
    server, as in SCAFFOLD, FedDyn, FedDC and Scaffnew, differ by what is clipped. Clients keep nothing of a round in which
    fewer than ``minimum`` of them take a step. If enough do, and so many updates are dropped that the sum is hidden, those
    whose updates were not dropped keep what they have computed.

    Attributes:
      max_weight: largest weight of a client, positive; larger ones are clipped. Give 1 for ``weighting="uniform"``, and for
        weights by examples the number of examples above which a client counts no more.
      clip: largest absolute value of a coordinate of an update, positive.
      bits: size of a client's integers, at least 2 and at most 24, the precision of float32.
      modulus_bits: size of the integers that are sent, from ``bits`` to 32.
      minimum: fewest clients whose sum the protocol reveals, at least 2. A round with fewer clients leaves the server's state
        unchanged, as a round without clients does; its info has ``num_aggregated``.

    Raises:
      ValueError: an attribute is out of its range. Before the first round: an update has leaves that are not floats, the cohort
        has fewer than ``minimum`` clients, or its sum needs more than ``modulus_bits`` bits.

    >>> mean = SecureMean(max_weight=1.0)
    >>> accumulator = mean.zero({"w": jnp.zeros(2)}, slots=2)
    >>> accumulator = mean.accumulate(accumulator, {"w": jnp.array([1.0, 2.0])}, jnp.float32(1), 0)
    >>> accumulator = mean.accumulate(accumulator, {"w": jnp.array([4.0, -50.0])}, jnp.float32(1), 1)
    >>> [round(x, 4) for x in mean.finish(accumulator)["w"].tolist()]  # -50 is clipped to -8
    [2.5, -3.0]
    """

    is_secure: ClassVar[bool] = True

    _: dataclasses.KW_ONLY
    max_weight: float
    clip: float = 8.0
    bits: int = 22
    modulus_bits: int = 32
    minimum: int = 2

    def __post_init__(self) -> None:
        checks.positive(clip=self.clip, remedy="the largest absolute value of a coordinate")
        checks.positive(max_weight=self.max_weight, remedy="the largest weight of a client")
        checks.whole(2, 24, bits=self.bits)
        checks.whole(self.bits, 32, modulus_bits=self.modulus_bits)
        checks.whole(2, minimum=self.minimum, remedy="with one client, the sum is its update")

    @property
    def fewest_clients(self) -> int:
        return self.minimum

    @property
    def not_differentiable(self) -> str:
        return "rounds"

    def check(self, update: Update, slots: int) -> None:
        check_floats("SecureMean", update)
        if slots < self.minimum:
            raise ValueError(
                f"Expected cohorts of at least minimum={self.minimum} clients for SecureMean, got {slots}: the sum of fewer is "
                "never revealed, so sample more clients or give a smaller minimum."
            )
        needed = int(np.ceil(np.log2(slots))) + self.bits
        if needed > self.modulus_bits:
            raise ValueError(
                f"Expected modulus_bits of at least {needed} for the sum of {slots} clients with bits={self.bits}, got "
                f"{self.modulus_bits}: the sum would wrap. Give fewer bits or more modulus_bits, of which 32 is the most."
            )

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        numbers = sum(leaf.size for leaf in jax.tree.leaves(update)) + 1
        bits = numbers * self.modulus_bits
        return Sent(update, memory, tree.add_bits(bits, most=bits), jnp.float32(bits))

    def quantized(self, update: Update, weight: jax.Array) -> tuple[Update, jax.Array]:
        """Returns the integers that a client sends for its update and its weight, modulo 2^modulus_bits, ``uint32``.

        >>> mean = SecureMean(max_weight=1.0, clip=1.0, bits=3, modulus_bits=8)
        >>> update, weight = mean.quantized(jnp.array([0.4, -1.0]), jnp.float32(1))
        >>> update.tolist(), int(weight)  # 253 is -3 modulo 2^8
        ([1, 253], 3)
        """
        levels = 2 ** (self.bits - 1) - 1
        share = jnp.clip(weight / self.max_weight, 0, 1)

        def integers(x: jax.Array, largest: float) -> jax.Array:
            scaled = jnp.round(jnp.clip(x.astype(jnp.float32) / largest, -1, 1) * share * levels)
            return self._in_ring(scaled.astype(jnp.int32).astype(jnp.uint32))

        return jax.tree.map(lambda x: integers(x, self.clip), update), integers(jnp.ones(()), 1.0)

    def zero(self, update: Update, slots: int) -> SumInRing:
        total = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.uint32), update)
        like = jax.tree.map(lambda x: jnp.zeros((), accumulation_dtype(x.dtype)), update)
        return SumInRing(total, jnp.uint32(0), jnp.uint32(0), like)

    def accumulate(self, accumulator: SumInRing, update: Update, weight: jax.Array, slot: jax.Array) -> SumInRing:
        total, weights = self.quantized(update, weight)
        counts = (weight != 0).astype(jnp.uint32)
        return SumInRing(
            total=tree.add(accumulator.total, total),
            weight=accumulator.weight + weights,
            clients=accumulator.clients + counts,
            like=accumulator.like,
        )

    def finish(self, accumulator: SumInRing) -> Update:
        weight = self._signed(accumulator.weight)
        revealed = (accumulator.clients >= self.minimum) & (weight > 0)
        # The scale of the integers of updates is clip times that of the weights, so it is all that their quotient needs.
        scale = jnp.where(revealed, self.clip / jnp.where(revealed, weight, 1), 0)
        return jax.tree.map(lambda x, like: (self._signed(x) * scale).astype(like.dtype), accumulator.total, accumulator.like)

    def _in_ring(self, x: jax.Array) -> jax.Array:
        return x & jnp.uint32(2**self.modulus_bits - 1)

    def _signed(self, x: jax.Array) -> jax.Array:
        """Returns the numbers of the range of signed integers that are equal to ``x`` modulo 2^modulus_bits, ``float32``."""
        left = 32 - self.modulus_bits
        return ((x << left).astype(jnp.int32) >> left).astype(jnp.float32)


def check_not_secure(wrapper: Wrapper, reason: str) -> None:
    """Raises ``ValueError`` if the innermost aggregator is a `SecureMean`, for wrappers that need more than a sum."""
    inner = wrapper.innermost
    if inner.is_secure:
        raise ValueError(
            f"Expected an aggregator other than {type(inner).__name__} inside {type(wrapper).__name__}, got {inner}: {reason}"
        )
