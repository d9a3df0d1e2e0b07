"""Secure aggregation: clients send masked vectors, of which the server can compute nothing but the sum.

K. Bonawitz, V. Ivanov, B. Kreuter, A. Marcedone, H. B. McMahan, S. Patel, D. Ramage, A. Segal, K. Seth, "Practical secure
aggregation for privacy-preserving machine learning", CCS 2017, figure 4 (SecAgg): https://doi.org/10.1145/3133956.3133982.
J. Bell, K. Bonawitz, A. Gascón, T. Lepoint, M. Raykova, "Secure single-server aggregation with (poly)logarithmic overhead", CCS
2020 (SecAgg+, in which a client has keys and shares with k others only): https://doi.org/10.1145/3372297.3417885.

This is a simulation of cost and correctness. All arithmetic is done: keys are agreed on, shares are made, sent and combined,
and masks are added and removed. But it claims no cryptographic strength. Deviations from the papers:

- the server follows the protocol (honest but curious), so messages are not signed, and there is no consistency check;
- keys are agreed on in the multiplicative group modulo 2^255 - 19, whose elements have the size of Curve25519's, and masks come
  from the random bit generator SFC64, which is fast but not cryptographic;
- shares are encrypted with a pad from SHA-256, without authentication.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from fedsim import checks, rng

_PRIME = 2**255 - 19
_GENERATOR = 2
_BYTES = 32  # of a key, of an encrypted share, and of a share
_BLOCK = 2**16  # words; with smaller blocks, the calls take longer, and larger ones leave the cache
_STEPS = ("keys", "shares", "vector", "unmasking")

Result = TypeVar("Result")


class Shares(NamedTuple):
    """What a client has given to one neighbour: a share of its mask key, and one of the seed of its own mask."""

    mask_key: int
    seed: int


class Aggregated(NamedTuple):
    """The sum, and what it took.

    Attributes:
      sum: the sum of the vectors of the clients in ``counted``, modulo 2^modulus_bits, ``uint32 [d]``.
      counted: the positions of the clients whose vectors are in the sum, ascending.
      received: what the server received from them: their masked vectors, ``uint32 [len(counted), d]``.
      bytes_up: bytes that each client sent, ``int64 [n]``.
      bytes_down: bytes that each client received, ``int64 [n]``.
      client_seconds: processor time of each client's computations, ``float64 [n]``.
      server_seconds: processor time of the server's computations.
    """

    sum: np.ndarray
    counted: list[int]
    received: np.ndarray
    bytes_up: np.ndarray
    bytes_down: np.ndarray
    client_seconds: np.ndarray
    server_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The protocol of secure aggregation, for vectors of integers modulo 2^modulus_bits.

    A client sends y = x + m_i + Σ_{j > i} m_ij - Σ_{j < i} m_ij, in which j are its neighbours, the pairwise mask m_ij is that
    of the key that i and j agree on, and m_i that of its own seed. In the sum of all clients, pairwise masks cancel. Shamir
    shares of a client's mask key and seed lie with its neighbours. From ``threshold`` shares, the server computes the seeds of
    the clients whose vectors have arrived, and the mask keys of those that dropped out before, and removes these masks. It
    never gets both of one client.

    Attributes:
      threshold: fewest neighbours of a client that must answer until the end, at least 2. If fewer remain, nothing is revealed.
      neighbors: number of other clients with which a client has keys and shares, even; None: all (SecAgg). The neighbours are
        those on a ring in a random order (SecAgg+).
      modulus_bits: size of the integers, from 1 to 32.

    Raises:
      ValueError: an attribute is out of its range.

    >>> vectors = np.array([[1, 2], [10, 20], [100, 200], [1000, 2000]], np.uint32)
    >>> result = SecureAggregation(threshold=2).run(vectors, seed=0, dropped={"vector": [1]})
    >>> result.sum.tolist(), result.counted
    ([1101, 2202], [0, 2, 3])
    """

    threshold: int
    neighbors: int | None = None
    modulus_bits: int = 32

    def __post_init__(self) -> None:
        checks.whole(2, threshold=self.threshold, remedy="the fewest neighbours that must answer")
        checks.whole(1, 32, modulus_bits=self.modulus_bits)
        checks.whole(2, neighbors=self.neighbors, or_none=True)
        if self.neighbors is not None and self.neighbors % 2:
            raise ValueError(f"Expected an even number of neighbors, got {self.neighbors}: half of them are on each side.")
        if self.neighbors is not None and self.threshold > self.neighbors:
            raise ValueError(
                f"Expected a threshold of at most neighbors={self.neighbors}, got {self.threshold}: no others have shares."
            )

    def run(
        self, vectors: np.ndarray, seed: int | jax.Array, *, dropped: Mapping[str, Collection[int]] | None = None
    ) -> Aggregated:
        """Runs the protocol.

        Args:
          vectors: a vector of each client, ``uint32 [n, d]``, below 2^modulus_bits: for example what
            `fedsim.aggregators.SecureMean.quantized` returns.
          seed: of all draws, or their root key.
          dropped: the positions of clients that send nothing any more from a step on: ``"keys"``, ``"shares"``, ``"vector"`` or
            ``"unmasking"``. Who drops out at ``"unmasking"`` counts in the sum, because its vector has arrived.

        Raises:
          ValueError: an argument is out of its range, or too many clients dropped out, so that the sum is not revealed.
        """
        missing = self._checked(vectors, dropped or {})
        words = np.asarray(rng.words(rng.root(seed)))
        clients = [_Client(self, i, x, rng.generator(words, i + 1)) for i, x in enumerate(vectors)]
        costs = _Costs(np.zeros(len(clients), np.int64), np.zeros(len(clients), np.int64), np.zeros(len(clients)))

        # Clients advertise two public keys each, which the server sends to their neighbours.
        present = [i for i in range(len(clients)) if i not in missing["keys"]]
        neighbors = self._neighbors(present, rng.generator(words))
        public = {i: costs.timed(i, clients[i].advertise) for i in present}
        for i in present:
            costs.up[i] += 2 * _BYTES
            costs.down[i] += 2 * _BYTES * len(neighbors[i])

        # Clients send encrypted shares to their neighbours, through the server.
        shared = [i for i in present if i not in missing["shares"]]
        mail: dict[int, dict[int, bytes]] = {i: {} for i in present}
        for i in shared:
            for j, text in costs.timed(i, clients[i].share, {j: public[j] for j in neighbors[i]}).items():
                mail[j][i] = text
            costs.up[i] += 2 * _BYTES * len(neighbors[i])
        for i in shared:
            costs.down[i] += 2 * _BYTES * len(mail[i])

        # Clients send masked vectors. Large arrays release the interpreter's lock, so that clients compute side by side.
        counted = [i for i in shared if i not in missing["vector"]]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            received = dict(zip(counted, pool.map(lambda i: costs.timed(i, clients[i].masked, mail[i]), counted), strict=True))
        for i in counted:
            costs.up[i] += -(-vectors.shape[1] * self.modulus_bits // 8)

        # Clients send the shares that the server asks for: of seeds, or of the mask keys of those whose vectors are missing.
        answering = [i for i in counted if i not in missing["unmasking"]]
        lost = [i for i in shared if i not in counted]
        seeds: dict[int, dict[int, int]] = {i: {} for i in counted}
        mask_keys: dict[int, dict[int, int]] = {i: {} for i in lost}
        for i in answering:
            for owner, of_seed, value in costs.timed(i, clients[i].unmask, counted, lost):
                (seeds if of_seed else mask_keys)[owner][i] = value
                costs.up[i] += _BYTES
            costs.down[i] += -(-len(neighbors[i]) // 8)  # a bit for each neighbour

        if not counted:
            raise ValueError(
                f"Expected at least threshold={self.threshold} clients to send their vectors, got none: all have dropped out, "
                "so there is no sum."
            )
        start = time.thread_time()
        total = np.zeros(vectors.shape[1], np.uint32)
        for vector in received.values():
            total += vector
        masks = [(_reconstructed(seeds[i], self.threshold, i), False) for i in counted]
        for i in lost:
            secret = _reconstructed(mask_keys[i], self.threshold, i)
            masks += [(_agreed(secret, public[j][1]), i < j) for j in neighbors[i] if j in received]
        total = _with_masks(total, masks) & np.uint32(2**self.modulus_bits - 1)
        seconds = time.thread_time() - start
        order = np.stack([received[i] for i in counted])
        return Aggregated(total, counted, order, costs.up, costs.down, costs.seconds, seconds)

    def _checked(self, vectors: np.ndarray, dropped: Mapping[str, Collection[int]]) -> dict[str, set[int]]:
        """Returns the positions of the clients that are missing at each step."""
        if not isinstance(vectors, np.ndarray) or vectors.dtype != np.uint32 or vectors.ndim != 2:
            found = f"{vectors.dtype} {list(vectors.shape)}" if isinstance(vectors, np.ndarray) else type(vectors).__name__
            raise ValueError(f"Expected vectors uint32 [n, d], got {found}: see fedsim.aggregators.SecureMean.quantized.")
        if vectors.size and int(vectors.max()) >> self.modulus_bits:
            raise ValueError(
                f"Expected vectors below 2^modulus_bits = {2**self.modulus_bits}, got {vectors.max()}: give more modulus_bits."
            )
        least = (self.threshold if self.neighbors is None else self.neighbors) + 1
        if len(vectors) < least:
            raise ValueError(f"Expected at least {least} clients for {self}, got {len(vectors)}: give fewer neighbours.")
        if unknown := set(dropped) - set(_STEPS):
            raise ValueError(f"Expected steps of dropped among {', '.join(_STEPS)}, got {sorted(unknown)}.")
        missing: dict[str, set[int]] = {}
        for step in _STEPS:
            positions = set(dropped.get(step, ()))
            if wrong := sorted(i for i in positions if not 0 <= i < len(vectors)):
                raise ValueError(f"Expected positions of dropped[{step!r}] from 0 to {len(vectors) - 1}, got {wrong[0]}.")
            missing[step] = positions
        return missing

    def _neighbors(self, present: list[int], generator: np.random.Generator) -> dict[int, list[int]]:
        """Returns the neighbours of each client: all others, or those on a ring in a random order."""
        count = len(present)
        if self.neighbors is None or self.neighbors >= count - 1:
            return {i: [j for j in present if j != i] for i in present}
        ring = [present[i] for i in generator.permutation(count)]
        half = self.neighbors // 2
        steps = [step for step in range(-half, half + 1) if step]
        return {i: sorted(ring[(place + step) % count] for step in steps) for place, i in enumerate(ring)}


class _Costs(NamedTuple):
    """What each client has sent, received and computed so far."""

    up: np.ndarray
    down: np.ndarray
    seconds: np.ndarray

    def timed(self, client: int, function: Callable[..., Result], *args: Any) -> Result:
        """Returns what one client computes, and adds the processor time that it takes."""
        start = time.thread_time()
        result = function(*args)
        self.seconds[client] += time.thread_time() - start
        return result


class _Client:
    """One client's side of the protocol. It has what the client knows, and nothing else."""

    def __init__(self, protocol: SecureAggregation, position: int, vector: np.ndarray, generator: np.random.Generator) -> None:
        self.protocol, self.position, self.vector, self.generator = protocol, position, vector, generator
        self.channel_key, self.mask_key, self.seed = (_drawn(generator) for _ in range(3))
        self.public: dict[int, tuple[int, int]] = {}
        self.channels: dict[int, int] = {}
        self.shares: dict[int, Shares] = {}

    def advertise(self) -> tuple[int, int]:
        """Returns the public keys of the encrypted channel and of the pairwise masks."""
        return pow(_GENERATOR, self.channel_key, _PRIME), pow(_GENERATOR, self.mask_key, _PRIME)

    def share(self, public: dict[int, tuple[int, int]]) -> dict[int, bytes]:
        """Returns for each neighbour an encrypted share of the mask key and of the seed."""
        self.public = public
        self.channels = {j: _agreed(self.channel_key, keys[0]) for j, keys in public.items()}
        mask_keys = _divided(self.mask_key, self.protocol.threshold, public, self.generator)
        seeds = _divided(self.seed, self.protocol.threshold, public, self.generator)
        return {j: self._encrypted(self.position, j, _to_bytes(mask_keys[j]) + _to_bytes(seeds[j])) for j in public}

    def masked(self, mail: dict[int, bytes]) -> np.ndarray:
        """Returns the vector with the own mask and those of the neighbours that have sent shares."""
        for owner, text in mail.items():
            plain = self._encrypted(owner, owner, text)
            self.shares[owner] = Shares(int.from_bytes(plain[:_BYTES]), int.from_bytes(plain[_BYTES:]))
        pairwise = [(_agreed(self.mask_key, self.public[j][1]), self.position < j) for j in mail]
        total = _with_masks(self.vector, [(self.seed, True), *pairwise])
        return total & np.uint32(2**self.protocol.modulus_bits - 1)

    def unmask(self, counted: Iterable[int], lost: Iterable[int]) -> list[tuple[int, bool, int]]:
        """Returns the shares that the server asks for, never both of a client.

        Each is the position of its owner, whether it is a share of a seed and not of a mask key, and its value.
        """
        counted, lost = set(counted), set(lost)
        if both := counted & lost:
            raise ValueError(f"Expected a client to be counted or lost, got {sorted(both)} as both: the server is not honest.")
        return [
            (owner, owner in counted, share.seed if owner in counted else share.mask_key)
            for owner, share in self.shares.items()
            if owner in counted or owner in lost
        ]

    def _encrypted(self, owner: int, other: int, text: bytes) -> bytes:
        """Encrypts shares of ``owner`` for the channel to ``other``, or decrypts them: a pad is added modulo 2."""
        secret = _to_bytes(self.channels[other])
        pad = b"".join(hashlib.sha256(secret + bytes([part]) + owner.to_bytes(8)).digest() for part in range(2))
        return (int.from_bytes(text) ^ int.from_bytes(pad)).to_bytes(len(text))


def _drawn(generator: np.random.Generator) -> int:
    """Returns a number in [1, prime), uniform up to 2^-250."""
    return int.from_bytes(generator.bytes(64)) % (_PRIME - 1) + 1


def _to_bytes(number: int) -> bytes:
    return number.to_bytes(_BYTES)


def _agreed(secret: int, public: int) -> int:
    """Returns the number that two clients agree on, as the hash of public^secret."""
    return int.from_bytes(hashlib.sha256(_to_bytes(pow(public, secret, _PRIME))).digest())


def _with_masks(vector: np.ndarray, masks: Iterable[tuple[int, bool]]) -> np.ndarray:
    """Returns a vector to which the masks of seeds are added, or from which they are subtracted, modulo 2^32."""
    streams = [
        (np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed))), np.add if added else np.subtract)
        for seed, added in masks
    ]
    total = vector.copy()
    for start in range(0, len(total), _BLOCK):  # a block stays in the cache of a core while all masks are added to it
        block = total[start : start + _BLOCK]
        for stream, operation in streams:
            operation(block, _random_words(stream, len(block)), out=block)
    return total


def _random_words(stream: np.random.Generator, count: int) -> np.ndarray:
    """Returns the next random words ``uint32``, by a function that releases the interpreter's lock, unlike ``random_raw``."""
    return stream.integers(2**64 - 1, size=-(-count // 2), dtype=np.uint64, endpoint=True).view(np.uint32)[:count]


def _divided(secret: int, threshold: int, holders: Iterable[int], generator: np.random.Generator) -> dict[int, int]:
    """Returns Shamir's shares: the values of a random polynomial of degree threshold - 1, whose value at 0 is the secret."""
    coefficients = [_drawn(generator) for _ in range(threshold - 1)]

    def value(x: int) -> int:
        total = 0
        for coefficient in reversed(coefficients):
            total = (total + coefficient) * x % _PRIME
        return (total + secret) % _PRIME

    return {holder: value(holder + 1) for holder in holders}


def _reconstructed(shares: Mapping[int, int], threshold: int, owner: int) -> int:
    """Returns the secret of shares, by Lagrange's interpolation at 0."""
    if len(shares) < threshold:
        raise ValueError(
            f"Expected at least threshold={threshold} neighbours of client {owner} to answer, got {len(shares)}: too many "
            "clients dropped out, so the sum is not revealed. Give a smaller threshold, or more neighbors."
        )
    holders = tuple(sorted(shares)[:threshold])
    return sum(shares[holder] * factor for holder, factor in zip(holders, _factors(holders), strict=True)) % _PRIME


@functools.lru_cache(maxsize=16)  # Owners that are no holders themselves have the same holders.
def _factors(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Returns Lagrange's factors, by which the shares of these holders are multiplied in the interpolation at 0."""
    points, factors = [holder + 1 for holder in holders], []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * other % _PRIME, below * (other - x) % _PRIME
        factors.append(above * pow(below, -1, _PRIME) % _PRIME)
    return tuple(factors)
