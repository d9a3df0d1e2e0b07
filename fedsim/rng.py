"""Random keys and permutations, which are derived from one root key per run.

Every key is derived from the root key by names and positions, never by the order of use::

    cohort of round r          permutation of the population keyed by  words(stream(root, "sampling")), r
    client c in round r        client_key(root, r, c) = fold_in(fold_in(stream(root, "clients"), r), c)
    its shuffle, epoch e       permutation of its examples keyed by    words(stream(client key, "shuffle")), e
    its step t (dropout, ...)  fold_in(stream(client key, "step"), t)
    its loops with a purpose   as in the two lines above, with stream(client key, purpose)
    its message                stream(client key, "send")
    what an attacker sends     stream(client key, "attack")
    server in round r          round_key(root, r, purpose), for the purposes "downlink" and "aggregator"
    a named call of a round    all of the above, with stream(root, name) in place of root, unless the name is "update"
    speeds and faults          generator(words(stream(stream(root, "systems"), purpose)), block of dispatches)
    fine-tuning to evaluate    as for a client in round 0, with stream(root, "personal") in place of root
    initial parameters         stream(root, "init"); for clusters of clients, stream(root, "clusters")

Hence two seeds have no draws in common, a run with the same seed repeats bit for bit, a resumed run equals an uninterrupted
one, and any client of any round can be repeated alone.
"""

from __future__ import annotations

import functools
import operator
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Halves of fewer than three bits mix measurably worse: a chi-square test on 5 positions detects it in 20,000 draws.
_MIN_BITS = 6
_HALF_ROUNDS = 8

# Under `jax.vmap`, JAX draws from "rbg" keys by the first of them alone, so that draws would depend on what runs side by side.
IMPLEMENTATION = "threefry2x32"


def root(seed: int | jax.Array) -> jax.Array:
    """Returns the root key of a seed. A key is returned as it is; a legacy key of `jax.random.PRNGKey` is wrapped.

    The key is one of "threefry2x32", whatever ``jax_default_prng_impl`` says.

    Raises:
      ValueError: ``seed`` is not a whole number in [0, 2**63), or is a key of another implementation, such as "rbg", whose
        draws for a client would depend on the clients that run beside it.

    >>> bool(root(7) == root(root(7)))
    True
    """
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        check_implementation(seed)
        return seed
    if np.shape(seed) == (2,) and getattr(seed, "dtype", None) == np.uint32:  # a legacy key of `jax.random.PRNGKey`
        return jax.random.wrap_key_data(jnp.asarray(seed), impl=IMPLEMENTATION)
    try:
        seed = operator.index(seed)
    except jax.errors.TracerIntegerConversionError:  # Its message explains the remedy.
        raise
    except TypeError:
        raise ValueError(
            f"Expected seed to be a whole number or a key of jax.random, got seed={seed!r}: give an int, such as seed=0."
        ) from None
    if not 0 <= seed < 2**63:
        raise ValueError(f"Expected 0 <= seed < 2**63, got seed={seed}: give another whole number.")
    with jax.ensure_compile_time_eval():  # The key is a constant, also inside `jax.jit`.
        key = jax.random.key(seed & 0xFFFFFFFF, impl=IMPLEMENTATION)
        # Without x64, jax.random.key would silently drop the upper word of a large seed.
        return key if seed < 2**32 else jax.random.fold_in(key, np.uint32(seed >> 32))


def check_implementation(key: jax.Array) -> None:
    """Raises ``ValueError`` unless a key is one of "threefry2x32".

    >>> check_implementation(root(0))
    """
    if (given := str(jax.random.key_impl(key))) != IMPLEMENTATION:
        raise ValueError(
            f'Expected a key of "{IMPLEMENTATION}", got one of "{given}", whose draws for a client would depend on the clients '
            f'that run beside it: give a whole number as seed, or jax.random.key(0, impl="{IMPLEMENTATION}").'
        )


def stream(key: jax.Array, name: str) -> jax.Array:
    """Returns the key of a named purpose, which is independent of those of other names.

    >>> bool(stream(root(0), "shuffle") == stream(root(0), "dropout"))
    False
    """
    return jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))


def client_keys(root_key: jax.Array, round_number: jax.Array | np.ndarray | int, clients: jax.Array | np.ndarray) -> jax.Array:
    """Returns the keys ``[n]`` of clients in one round, or each in its own round.

    Args:
      root_key: the root key.
      round_number: the round, or ``int32 [n]``.
      clients: positions in the population, ``int32 [n]``.

    >>> client_keys(root(0), 3, jnp.arange(5)).shape
    (5,)
    """
    clients_key = stream(root_key, "clients")

    def key_of(round_number: jax.Array, client: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(clients_key, round_number), client)

    return jax.vmap(key_of, (0 if jnp.ndim(round_number) else None, 0))(jnp.asarray(round_number), jnp.asarray(clients))


def round_key(root_key: jax.Array, round_number: jax.Array | int, purpose: str) -> jax.Array:
    """Returns the server's key for a purpose in one round.

    >>> bool(round_key(root(0), 3, "aggregator") == round_key(root(0), 4, "aggregator"))
    False
    """
    return stream(jax.random.fold_in(stream(root_key, "rounds"), round_number), purpose)


def words(key: jax.Array) -> jax.Array:
    """Returns the first two words of a key, ``uint32 [..., 2]``, which are the key of `permute`.

    >>> words(root(0)).dtype
    dtype('uint32')
    """
    return jax.random.key_data(key)[..., :2]


def generator(seed_words: np.ndarray, position: int = 0) -> np.random.Generator:
    """Returns NumPy's generator of a key and a position, such as a round or a client, for draws on the host.

    The position is the high word of Philox's counter, so the streams of different positions never overlap.

    Args:
      seed_words: the key, ``uint32 [2]``, from `words`.
      position: a whole number in [0, 2**64).

    >>> draw = generator(np.asarray(words(root(0))), 3)
    >>> draw.random(2).shape
    (2,)
    """
    key = np.asarray(seed_words).astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, position]))


def permute(seed_words: Any, epoch: Any, size: Any, index: Any, xp: Any = jnp) -> Any:
    """Applies a keyed pseudorandom permutation of ``0`` to ``size - 1`` to ``index``, without storing the permutation.

    The permutation is an unbalanced Feistel network over the smallest sufficient power of two, at least 64, with cycle-walking
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It is a bijection for every key and size. The
    cost per index does not depend on ``size``, so shuffling a client's examples or a population needs no sorting.

    Args:
      seed_words: the key, ``uint32 [2]``, from `words`.
      epoch: the number of the permutation, ``int32``, a scalar or of the shape of ``index``.
      size: ``int32`` scalar, at least 1 (0 is treated as 1).
      index: ``int32 [n]``, each in ``[0, size)``.
      xp: ``jax.numpy``, or ``numpy`` for the same numbers on the host.

    Returns:
      ``int32 [n]``, each in ``[0, size)``.

    >>> [int(i) for i in np.sort(permute(np.array([1, 2], np.uint32), 0, 5, np.arange(5), np))]
    [0, 1, 2, 3, 4]
    """
    if xp is np:
        return _permute(seed_words, epoch, size, index, np)
    return _permute_jitted(seed_words, epoch, size, index)


def _permute(seed_words: Any, epoch: Any, size: Any, index: Any, xp: Any) -> Any:
    u32 = xp.uint32
    index = xp.asarray(index).astype(u32)
    last = xp.maximum(xp.asarray(size).astype(xp.int32), 1).astype(u32) - u32(1)
    bits = xp.maximum(_bit_length(last, xp), u32(_MIN_BITS))
    low_bits = bits >> u32(1)
    high_mask = (u32(1) << (bits - low_bits)) - u32(1)
    low_mask = (u32(1) << low_bits) - u32(1)
    epoch_words = xp.atleast_1d(xp.asarray(epoch).astype(u32))  # A scalar epoch has one salt for all indices.
    salt = _mix(epoch_words + xp.asarray(seed_words[..., 1]).astype(u32), xp)
    salt = _mix(salt ^ xp.asarray(seed_words[..., 0]).astype(u32), xp)
    steps = np.array([0x9E3779B9 * (j + 1) & 0xFFFFFFFF for j in range(_HALF_ROUNDS)], np.uint32)
    round_keys = _mix(salt[None] + steps[:, None], xp)

    def encrypt(value: Any) -> Any:
        high, low = value >> low_bits, value & low_mask
        for j in range(0, _HALF_ROUNDS, 2):
            high = high ^ (_mix(low + round_keys[j], xp) & high_mask)
            low = low ^ (_mix(high + round_keys[j + 1], xp) & low_mask)
        return (high << low_bits) | low

    def continue_cycle(value: Any) -> Any:
        return xp.where(value > last, encrypt(value), value)

    value = encrypt(index)
    if xp is np:
        while np.any(value > last):
            value = continue_cycle(value)
    else:
        value = jax.lax.while_loop(lambda v: jnp.any(v > last), continue_cycle, value)
    return value.astype(xp.int32)


# A permutation has hundreds of small operations. As a jitted function it is traced once, and not for every loop of a round.
_permute_jitted = jax.jit(functools.partial(_permute, xp=jnp))


def hashed(key: jax.Array, size: int) -> jax.Array:
    """Returns a keyed hash of each position, ``uint32 [size]``, as cheap random bits for every parameter of a model.

    It is much cheaper than `jax.random.bits`, and good enough for stochastic rounding and random signs. It is not suitable for
    cryptography or for the noise of differential privacy. Words of different keys are unrelated; the words of one key are all
    different.

    >>> hashed(root(0), 3).dtype
    dtype('uint32')
    """
    first, second = words(key)
    return _mix(_mix(jnp.arange(size, dtype=jnp.uint32) + second, jnp) ^ first, jnp)


def normal_like(key: jax.Array, like: Any) -> Any:
    """Returns independent draws of the standard normal law, a pytree with the shapes and dtypes of ``like``, which has floats.

    >>> normal_like(root(0), {"w": jnp.zeros([2, 3])})["w"].shape
    (2, 3)
    """
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])


def noise(key: jax.Array, size: int) -> jax.Array:
    """Returns uniform numbers in [0, 1), ``float32 [size]``, of the same quality and cost as `hashed`.

    >>> bool(jnp.all(noise(root(0), 100) < 1))
    True
    """
    return (hashed(key, size) >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24


def _mix(x: Any, xp: Any) -> Any:
    """Applies a 32-bit integer hash (xor-shifts and odd multiplications; constants of C. Wellons' hash prospector)."""
    u32 = xp.uint32
    x = (x ^ (x >> u32(16))) * u32(0x7FEB352D)
    x = (x ^ (x >> u32(15))) * u32(0x846CA68B)
    return x ^ (x >> u32(16))


def _bit_length(x: Any, xp: Any) -> Any:
    if xp is np:
        return np.uint32(int(x).bit_length())
    return jnp.uint32(32) - jax.lax.clz(x)


def typed(key: Any) -> jax.Array:
    """Returns a key as an array of a key dtype; ``uint32`` words are those of a key of "threefry2x32".

    >>> typed(np.array([0, 7], np.uint32)) == jax.random.key(7)
    Array(True, dtype=bool)
    """
    if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(jnp.asarray(key, jnp.uint32), impl=IMPLEMENTATION)
