"""Distributed noise: clients add integer noise to rounded updates, so that the server sees no more than a noised sum.

P. Kairouz, Z. Liu, T. Steinke, "The distributed discrete Gaussian mechanism for federated learning with secure aggregation",
ICML 2021, algorithms 1 and 2: https://arxiv.org/abs/2102.06387. N. Agarwal, P. Kairouz, Z. Liu, "The Skellam mechanism for
differentially private federated learning", NeurIPS 2021, algorithm 1: https://arxiv.org/abs/2110.04995. ``clip`` is c, ``beta``
is β, ``bits`` is b with the modulus m = 2^b, ``clients`` is n, and 1 / γ is `DistributedMechanism.scale`. Scale and number of
standard deviations are chosen as TensorFlow Federated does (`tff.aggregators.DistributedDpSumFactory`). Deviations:

- the rotation is the discrete Fourier transform with random phases, the default of TensorFlow Federated, and not Hadamard's,
  which pads vectors to a power of two; the phases of a round come from the round before, those of the first round are fixed;
- the noise of a client has the variance (z c)² / ``minimum``, so that any ``minimum`` clients have enough of it;
- noise is drawn by inverting a table of its distribution with 32 random bits, so its probabilities are right up to 2^-32, and
  it claims no cryptographic strength.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng, tree
from fedsim.aggregators._aggregator import Memory, Sent, SumAggregator, Update
from fedsim.aggregators._clipped import check_floats

# Larger scales do not make rounding better, and their norms are no longer whole numbers of float32.
_LARGEST_SCALE = 1e6
# The table has the integers up to so many standard deviations; of a larger one, it would take too much memory.
_DEVIATIONS, _LARGEST_DEVIATION = 9, 2**16


class IntegerSums(NamedTuple):
    """Integers modulo 2^bits in the structure of an update, a padded one, and the number of clients.

    Sums are ``uint32``. The message of one client has the same numbers as ``float32``, as other parts of a round expect it.
    """

    total: Update
    padding: jax.Array
    clients: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class DistributedMechanism(SumAggregator):
    """The mean of clipped updates with noise of the clients: differential privacy without a server that is trusted.

    A client rotates its update, clips it to the norm c, multiplies it by a scale, rounds it at random to integers whose norm is
    bounded, adds integer noise, and sends the integers modulo 2^bits. The server gets their sum by secure aggregation, takes it
    as signed, and undoes scale and rotation. The aggregate is the sum divided by ``clients``, with noise of the standard
    deviation z c / ``clients`` or more on each coordinate. Integers are added exactly, so it has the same bits on any number of
    devices. `fedsim.privacy.distributed_epsilon` is the accountant. A client whose update is not finite sends noise alone.

    Attributes:
      noise_multiplier: z, at least 0: the standard deviation of the noise of ``minimum`` clients on the sum, in units of c.
      clip: c, positive.
      clients: the expected number of clients in a round, by which the sum is divided. It must not depend on who takes part.
      minimum: fewest clients whose sum the protocol reveals; with fewer, it is 0. None: ``clients``, which fits
        cohorts of a fixed size, all of whose clients take a step. Give fewer for Poisson sampling and drop-outs; each client
        then adds more noise.
      bits: b, from 2 to 22: size of the integers that are sent. The sum of all clients must have room in it.
      law: of a client's noise, ``"gaussian"`` (discrete) or ``"skellam"``, the difference of two Poisson variables.
      wrap_probability: the probability with which a coordinate of the sum may exceed b bits, by a normal approximation.
      beta: β in [0, 1): roundings are repeated until the norm is at most its bound, which holds with a probability of at least
        1 - β; 0 rounds once, without bias, and has a larger bound.

    Raises:
      ValueError: an attribute is out of its range, or ``bits`` are too few for the clients. Before the first round: an update
        has leaves that are not floats of up to 32 bits, cohorts have fewer than ``minimum`` clients, or the noise is too large.

    >>> mechanism = DistributedMechanism(0.0, clip=10.0, clients=2, bits=20)
    >>> memory, total = mechanism.init(jnp.zeros(3)), None
    >>> for slot, update in enumerate([jnp.array([1.0, 2.0, 3.0]), jnp.array([3.0, 2.0, 1.0])]):
    ...     sent = mechanism.send(update, memory, (), jax.random.key(slot)).update
    ...     total = mechanism.zero(sent, slots=2) if total is None else total
    ...     total = mechanism.accumulate(total, sent, jnp.float32(1), slot)
    >>> aggregate, memory = mechanism.finish_round(total, memory, jax.random.key(2))
    >>> [round(x, 2) for x in aggregate.tolist()]
    [2.0, 2.0, 2.0]
    """

    adds_weights: ClassVar[bool] = True
    is_secure: ClassVar[bool] = True
    skips_empty_rounds: ClassVar[bool] = False

    noise_multiplier: float
    _: dataclasses.KW_ONLY
    clip: float
    clients: int
    minimum: int | None = None
    bits: int = 16
    law: Literal["gaussian", "skellam"] = "skellam"
    wrap_probability: float = 1e-4
    beta: float = math.exp(-0.5)

    def __post_init__(self) -> None:
        checks.number(least=0, noise_multiplier=self.noise_multiplier)
        checks.positive(clip=self.clip, remedy="give the norm that updates are clipped to")
        checks.whole(2, clients=self.clients, remedy="give the expected number of clients in a round")
        checks.whole(2, self.clients, or_none=True, minimum=self.minimum)
        checks.whole(2, 22, bits=self.bits, remedy="float32 has no more than 24 bits for whole numbers")
        checks.one_of("gaussian", "skellam", law=self.law)
        checks.number(above=0, below=1, wrap_probability=self.wrap_probability)
        checks.number(least=0, below=1, beta=self.beta)
        if 2 ** (2 * self.bits) <= self.clients * self.num_deviations**2:
            needed = math.ceil(math.log2(self.clients * self.num_deviations**2) / 2)
            raise ValueError(
                f"Expected bits of at least {needed} for the rounding of {self.clients} clients, got bits={self.bits}: the sum "
                "would wrap. Give more bits, fewer clients, or a larger wrap_probability."
            )

    @property
    def counts_nonfinite(self) -> bool:
        return True

    @property
    def fewest_clients(self) -> int:
        return self.minimum or self.clients

    @property
    def is_scalable(self) -> bool:
        return False  # The numbers are those modulo a power of two.

    @property
    def not_differentiable(self) -> str:
        return "rounds"

    @property
    def num_deviations(self) -> float:
        """The number k of standard deviations of a coordinate of the sum for which the bits have room."""
        return statistics.NormalDist().inv_cdf(1 - self.wrap_probability / 2)

    @property
    def local_deviation(self) -> float:
        """The standard deviation of a client's noise, in units of updates."""
        return self.noise_multiplier * self.clip / math.sqrt(self.fewest_clients)

    def scale(self, size: int) -> float:
        """Returns 1 / γ, by which updates of this size are multiplied, so that k deviations of the sum have b bits.

        Of the rotated updates, each coordinate is taken as sub-Gaussian with the variance c² / d (section 4.2 of the paper).
        2^b = 2 k √(c² n² / d + (γ² / 4 + σ²) n) / γ.

        >>> round(DistributedMechanism(0.893777, clip=0.03, clients=100, wrap_probability=6.3342e-5).scale(2**20))
        303712
        """
        n, k = self.clients, self.num_deviations
        variance = self.clip**2 * n**2 / padded(size) + n * self.local_deviation**2
        return min(math.sqrt(2 ** (2 * self.bits) - n * k**2) / (2 * k * math.sqrt(variance)), _LARGEST_SCALE)

    def norm_bound(self, size: int) -> float:
        """Returns the largest norm of the integers of an update of this size (theorem 1 of the first paper)."""
        scaled, d = self.clip * self.scale(size), padded(size)
        largest = scaled + math.sqrt(d)
        if self.beta == 0:
            return largest
        squares = scaled**2 + d / 4 + math.sqrt(2 * math.log(1 / self.beta)) * (scaled + math.sqrt(d) / 2)
        return min(largest, math.sqrt(squares))

    def check(self, update: Update, slots: int) -> None:
        least = self.fewest_clients
        if slots < least:
            raise ValueError(
                f"Expected cohorts of at least minimum={least} clients for DistributedMechanism, got {slots}: the sum of fewer "
                "has too little noise and is never revealed. Sample more clients, or give a smaller minimum."
            )
        integers = update.total if isinstance(update, IntegerSums) else update
        size = sum(leaf.size for leaf in jax.tree.leaves(integers))
        if (norm := self.clip * self.scale(size)) > 2**24:
            raise ValueError(
                f"Expected integers of at most 2^24, got updates of norm {norm:.3g} after scaling for {size:,} coordinates "
                f"with bits={self.bits}: give fewer bits."
            )
        if (deviation := self.local_deviation * self.scale(size)) > _LARGEST_DEVIATION:
            raise ValueError(
                f"Expected noise with a deviation of at most {_LARGEST_DEVIATION} integers, got {deviation:.3g} with "
                f"bits={self.bits}: give fewer bits."
            )

    def init(self, update: Update) -> Memory:
        return jnp.zeros((), jnp.uint32)  # the seed of the rotation

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        check_floats("DistributedMechanism", update)
        leaves, structure = jax.tree.flatten(update)
        if wide := [leaf.dtype for leaf in leaves if leaf.dtype.itemsize > 4]:
            raise ValueError(f"DistributedMechanism computes in float32, got updates of {wide[0]}: convert them to float32.")
        flat = jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in leaves])
        integers = self.integers(flat, server_memory, key).astype(jnp.float32)
        ends = np.cumsum([leaf.size for leaf in leaves])
        parts = [part.reshape(leaf.shape) for part, leaf in zip(jnp.split(integers, ends), leaves, strict=False)]
        message = IntegerSums(jax.tree.unflatten(structure, parts), integers[ends[-1] :], jnp.float32(1))
        bits = len(integers) * self.bits
        return Sent(message, memory, tree.add_bits(bits, most=bits), jnp.float32(bits))

    def integers(self, update: jax.Array, rotation: jax.Array, key: jax.Array) -> jax.Array:
        """Returns what a client sends before masking, modulo 2^bits: ``uint32 [d]``, or one more if d is odd.

        Args:
          update: ``float32 [d]``.
          rotation: the seed of the round's rotation, ``uint32 []``.
          key: of the client in this round, for rounding and noise.
        """
        size = update.shape[0]
        scaled = tree.clip(rotate(update, rotation), self.clip) * self.scale(size)
        rounded = round_at_random(scaled, rng.stream(key, "round"), self.norm_bound(size) if self.beta else None)
        total = rounded.astype(jnp.int32)
        if self.noise_multiplier > 0:
            total += draw_noise(rng.stream(key, "noise"), total.shape, self.law, self.local_deviation * self.scale(size))
        return total.astype(jnp.uint32) & jnp.uint32(2**self.bits - 1)

    def zero(self, update: Update, slots: int) -> IntegerSums:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.uint32), update)

    def accumulate(self, accumulator: IntegerSums, update: Update, weight: jax.Array, slot: jax.Array) -> IntegerSums:
        return jax.tree.map(lambda total, x: total + jnp.where(weight != 0, x, 0).astype(jnp.uint32), accumulator, update)

    def finish_round(self, accumulator: IntegerSums, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        leaves, structure = jax.tree.flatten(accumulator.total)
        sums = jnp.concatenate([*[jnp.ravel(leaf) for leaf in leaves], accumulator.padding])
        left = 32 - self.bits
        signed = ((sums << left).astype(jnp.int32) >> left).astype(jnp.float32)
        size = sum(leaf.size for leaf in leaves)
        mean = unrotate(signed, memory)[:size] / (self.scale(size) * self.clients)
        mean = jnp.where(accumulator.clients >= self.fewest_clients, mean, 0)
        parts = jnp.split(mean, np.cumsum([leaf.size for leaf in leaves])[:-1])
        shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(structure, shaped), jax.random.bits(rng.stream(key, "rotation"), (), jnp.uint32)


def padded(size: int) -> int:
    """Returns a number of coordinates, rounded up to an even one: pairs are complex numbers in the rotation."""
    return size + size % 2


def rotate(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Returns the discrete Fourier transform of ``x float32 [d]`` after random rotations of pairs, a vector of equal norm.

    >>> bool(jnp.allclose(unrotate(rotate(jnp.arange(5.0), jnp.uint32(3)), jnp.uint32(3))[:5], jnp.arange(5.0), atol=1e-5))
    True
    """
    real, imaginary = jnp.pad(x, (0, x.shape[0] % 2)).reshape(2, -1)
    rotated = jnp.fft.fft(jax.lax.complex(real, imaginary) * _phases(seed, real.shape[0]), norm="ortho")
    return jnp.concatenate([rotated.real, rotated.imag])


def unrotate(y: jax.Array, seed: jax.Array) -> jax.Array:
    """Returns the vector, padded to an even size, of which ``y`` is the result of `rotate` with the same seed."""
    real, imaginary = y.reshape(2, -1)
    x = jnp.fft.ifft(jax.lax.complex(real, imaginary), norm="ortho") * jnp.conj(_phases(seed, real.shape[0]))
    return jnp.concatenate([x.real, x.imag])


def _phases(seed: jax.Array, count: int) -> jax.Array:
    angles = jax.random.uniform(jax.random.key(seed, impl=rng.IMPLEMENTATION), (count,), jnp.float32, 0, 2 * math.pi)
    return jax.lax.complex(jnp.cos(angles), jnp.sin(angles))


def round_at_random(x: jax.Array, key: jax.Array, bound: float | None) -> jax.Array:
    """Returns whole numbers next to ``x float32 [d]``, up with the probability of the fraction, of a norm of at most ``bound``.

    Roundings are drawn until one has such a norm. Without a bound there is one, and its expectation is ``x``.

    >>> round_at_random(jnp.array([2.0, -3.0]), jax.random.key(0), None).tolist()
    [2.0, -3.0]
    """

    def drawn(key: jax.Array) -> jax.Array:
        return jnp.floor(x + jax.random.uniform(key, x.shape, jnp.float32))

    if bound is None:
        return drawn(key)

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(carry[0], 1)
        return key, drawn(key)

    def too_long(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return tree.squared_norm(carry[1]) > bound**2

    return jax.lax.while_loop(too_long, again, (key, drawn(key)))[1]


def draw_noise(key: jax.Array, shape: tuple[int, ...], law: str, deviation: float) -> jax.Array:
    """Returns integers ``int32`` of the discrete Gaussian law with parameter σ, or of Skellam's with the variance σ².

    >>> draws = draw_noise(jax.random.key(0), (100_000,), "skellam", 3.0)
    >>> round(float(jnp.std(draws.astype(jnp.float32))), 1)
    3.0
    """
    table, lowest = _table(law, deviation)
    return (
        jnp.searchsorted(jnp.asarray(table), jax.random.bits(key, shape, jnp.uint32), side="right").astype(jnp.int32) + lowest
    )


def probabilities(law: str, deviation: float) -> np.ndarray:
    """Returns the probabilities of the integers from -w to w, ``float64 [2 w + 1]``, where w is nine deviations or more.

    Those of Skellam's law are the inverse Fourier transform of its characteristic function exp(σ² (cos t - 1)).
    """
    width = math.ceil(_DEVIATIONS * deviation) + 20
    k = np.arange(-width, width + 1)
    if law == "gaussian":
        chances = np.exp(-0.5 * (k / deviation) ** 2)
    else:
        angles = 2 * np.pi * np.arange(len(k)) / len(k)
        chances = np.maximum(np.fft.fft(np.exp(deviation**2 * (np.cos(angles) - 1))).real, 0)[k]
    return chances / chances.sum()


@functools.lru_cache(maxsize=16)
def _table(law: str, deviation: float) -> tuple[np.ndarray, int]:
    """Returns the distribution function in units of 2^-32 without its last value, ``uint32 [2 w]``, and -w."""
    chances = probabilities(law, deviation)
    below = np.minimum(np.round(np.cumsum(chances)[:-1] * 2.0**32), 2.0**32 - 1)
    return below.astype(np.uint32), -(len(chances) // 2)
