"""FarmHash's 64-bit fingerprint, by which TensorFlow's lookup tables assign unknown words to buckets.

G. Pike, "FarmHash", 2014, https://github.com/google/farmhash, function ``farmhashna::Hash64``, which is frozen. This is an
independent implementation.
"""

from __future__ import annotations

import functools

_MASK = 2**64 - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_SEED = 81


@functools.lru_cache(maxsize=1 << 16)  # Unknown words repeat, and one word takes Python microseconds.
def fingerprint64(data: bytes) -> int:
    """Returns FarmHash's fingerprint of ``data``, in ``[0, 2**64)``, which is the same on every machine and in every version.

    >>> fingerprint64(b"zebra")
    10208485115171276162
    """
    size = len(data)
    if size > 64:
        return _long(data)
    if size > 32:
        return _up_to_64(data)
    return _up_to_32(data) if size > 16 else _up_to_16(data)


def _word(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _rotate(x: int, by: int) -> int:
    x &= _MASK
    return (x >> by | x << (64 - by)) & _MASK


def _shift_mix(x: int) -> int:
    x &= _MASK
    return x ^ x >> 47


def _mix(u: int, v: int, mul: int) -> int:
    a = _shift_mix((u ^ v) * mul)
    return _shift_mix((v ^ a) * mul) * mul & _MASK


def _up_to_16(data: bytes) -> int:
    size = len(data)
    mul = _K2 + size * 2
    if size >= 8:
        a, b = _word(data, 0) + _K2 & _MASK, _word(data, size - 8)
        return _mix((_rotate(b, 37) * mul + a) & _MASK, (_rotate(a, 25) + b) * mul & _MASK, mul)
    if size >= 4:
        return _mix(size + (_word(data, 0, 4) << 3), _word(data, size - 4, 4), mul)
    if size > 0:
        y, z = data[0] + (data[size >> 1] << 8), size + (data[-1] << 2)
        return _shift_mix(y * _K2 ^ z * _K0) * _K2 & _MASK
    return _K2


def _ends(data: bytes, first: int) -> tuple[int, int, int, int, int]:
    """Returns what the hashes of 17 to 32 and of 33 to 64 bytes have in common; ``first`` multiplies the first word."""
    size = len(data)
    mul = _K2 + size * 2
    a, b = _word(data, 0) * first & _MASK, _word(data, 8)
    c, d = _word(data, size - 8) * mul & _MASK, _word(data, size - 16) * _K2 & _MASK
    return mul, a, b, (_rotate(a + b, 43) + _rotate(c, 30) + d) & _MASK, (a + _rotate(b + _K2, 18) + c) & _MASK


def _up_to_32(data: bytes) -> int:
    mul, _, _, y, z = _ends(data, _K1)
    return _mix(y, z, mul)


def _up_to_64(data: bytes) -> int:
    size = len(data)
    mul, a, _, y, z = _ends(data, _K2)
    z = _mix(y, z, mul)
    e, f = _word(data, 16) * mul & _MASK, _word(data, 24)
    g, h = (y + _word(data, size - 32)) * mul & _MASK, (z + _word(data, size - 24)) * mul & _MASK
    return _mix((_rotate(e + f, 43) + _rotate(g, 30) + h) & _MASK, (e + _rotate(f + a, 18) + g) & _MASK, mul)


def _weak(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    w, x, y, z = (_word(data, at + i) for i in (0, 8, 16, 24))
    a += w
    b = _rotate(b + a + z, 21)
    c = a
    a += x + y
    return a + z & _MASK, b + _rotate(a, 44) + c & _MASK


def _long(data: bytes) -> int:
    y = _SEED * _K1 + 113 & _MASK
    z = _shift_mix(y * _K2 + 113) * _K2 & _MASK
    x = _SEED * _K2 + _word(data, 0) & _MASK
    v, w = (0, 0), (0, 0)

    def turn(at: int, mul: int, nine: int, state: tuple) -> tuple:
        x, y, z, v, w = state
        x = _rotate(x + y + v[0] + _word(data, at + 8), 37) * mul & _MASK
        y = _rotate(y + v[1] + _word(data, at + 48), 42) * mul & _MASK
        x ^= w[1] * nine & _MASK
        y = y + v[0] * nine + _word(data, at + 40) & _MASK
        z = _rotate(z + w[0], 33) * mul & _MASK
        v = _weak(data, at, v[1] * mul, x + w[0])
        w = _weak(data, at + 32, z + w[1], y + _word(data, at + 16))
        return z, y, x, v, w

    last = (len(data) - 1) & 63
    state = (x, y, z, v, w)
    for at in range(0, len(data) - 1 - last, 64):
        state = turn(at, _K1, 1, state)
    x, y, z, v, w = state
    mul = _K1 + ((z & 0xFF) << 1)
    w = (w[0] + last & _MASK, w[1])
    v = (v[0] + w[0] & _MASK, v[1])
    w = (w[0] + v[0] & _MASK, w[1])
    x, y, z, v, w = turn(len(data) - 64, mul, 9, (x, y, z, v, w))
    return _mix((_mix(v[0], w[0], mul) + _shift_mix(y) * _K0 + z) & _MASK, (_mix(v[1], w[1], mul) + x) & _MASK, mul)
