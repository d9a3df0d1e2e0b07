"""Random numbers by position: those of a client's row depend only on the seed, the client and the row.

So a generated population has no state: clients can be generated in any order, one at a time or many rows at a time, and client
7 of ten is the same as client 7 of a million. SplitMix64 gives each row its own stream: G. Steele, D. Lea and C. Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014, https://doi.org/10.1145/2660193.2660195.
"""

from __future__ import annotations

import numpy as np

from fedsim import rng

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def generator(seed: int, name: str, client: int = 0) -> np.random.Generator:
    """Returns a NumPy generator, which depends on the seed, the purpose ``name`` and the client.

    >>> int(generator(0, "sizes").integers(100)) == int(generator(0, "sizes").integers(100))
    True
    """
    words = np.asarray(rng.words(rng.stream(rng.root(seed), name)), np.uint64)
    return np.random.Generator(np.random.Philox(key=words, counter=[0, 0, client, 0]))


def streams(seed: int, name: str, *positions: np.ndarray) -> np.ndarray:
    """Returns a stream ``uint64 [n]`` for each position (client, row, ...), given as arrays ``int [n]``; `bits` draws from it.

    >>> first, second = streams(0, "rows", np.array([3, 3]), np.array([0, 1]))
    >>> bool(first == second)
    False
    """
    high, low = (int(word) for word in np.asarray(rng.words(rng.stream(rng.root(seed), name))))
    state = np.full(np.shape(positions[0]), (high << 32) | low, np.uint64)
    for position in positions:
        state = _mix((state ^ np.asarray(position).astype(np.uint64)) + _GOLDEN)
    return state


def bits(streams: np.ndarray, number: int) -> np.ndarray:
    """Returns draw ``number`` of each stream, 64 random bits: ``uint64 [n]``.

    >>> bits(streams(0, "rows", np.arange(2)), 5).dtype
    dtype('uint64')
    """
    return _mix(streams + np.uint64((number + 1) * int(_GOLDEN) & 0xFFFFFFFFFFFFFFFF))


def uniform(streams: np.ndarray, number: int) -> np.ndarray:
    """Returns draw ``number`` of each stream, uniform in [0, 1): ``float64 [n]``.

    >>> u = uniform(streams(0, "rows", np.arange(10_000)), 0)
    >>> bool(0.49 < u.mean() < 0.51 and 0 <= u.min() and u.max() < 1)
    True
    """
    return (bits(streams, number) >> np.uint64(11)) * 2.0**-53


def normal(streams: np.ndarray, number: int) -> np.ndarray:
    """Returns a standard normal ``float64 [n]`` from the draws ``number`` and ``number + 1`` of each stream (Box and Muller).

    >>> z = normal(streams(0, "rows", np.arange(10_000)), 0)
    >>> bool(abs(z.mean()) < 0.05 and abs(z.std() - 1) < 0.05)
    True
    """
    return np.sqrt(-2 * np.log1p(-uniform(streams, number))) * np.cos(2 * np.pi * uniform(streams, number + 1))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
