"""Packing of codes into words: exact round trips, and numbers of bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.compressors._packing import bits_for, coded_bits, histogram, pack, unpack, words_for


@pytest.mark.first(6)
@pytest.mark.parametrize("bits", [1, 3, 4, 8, 11])
@pytest.mark.parametrize("d", [33, 32769, 1, 32, 1000, 32768])
def test_packing_round_trip_is_exact(bits, d):
    codes = np.random.default_rng(d).integers(0, 2**bits, d).astype(np.uint32)
    planes = pack(jnp.asarray(codes), bits)
    assert planes.shape == (bits, words_for(d)) and planes.dtype == jnp.uint32
    np.testing.assert_array_equal(unpack(planes, d), codes)
    of_another_shape = jnp.asarray(codes, jnp.int32 if d % 2 else jnp.float32).reshape(-1, 2 - d % 2, 1)
    np.testing.assert_array_equal(pack(of_another_shape, bits), planes)
    np.testing.assert_array_equal(histogram(planes, d), np.bincount(codes, minlength=2**bits))


def test_planes_have_the_documented_layout():
    codes = np.random.default_rng(0).integers(0, 8, 100).astype(np.uint32)
    planes, words = np.zeros((3, 4), np.uint32), 4
    for i, code in enumerate(codes):
        for p in range(3):
            planes[p, i % words] |= ((code >> np.uint32(p)) & np.uint32(1)) << np.uint32(i // words)
    np.testing.assert_array_equal(pack(jnp.asarray(codes), 3), planes)


@pytest.mark.parametrize(("symbols", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (256, 8), (257, 9), (65536, 16)])
def test_bits_for_symbols(symbols, bits):
    assert bits_for(symbols) == bits


def test_entropy_bits_of_a_single_symbol_are_those_of_its_histogram():
    assert float(coded_bits(jnp.array([0, 0, 1000, 0]), 1000)) < 40
