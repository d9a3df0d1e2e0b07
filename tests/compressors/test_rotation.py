"""The randomized Hadamard transform, compared with its matrix, and its effect on vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg, stats

from fedsim.compressors._rotation import hadamard, layout, rotate, unrotate, whole_blocks

LENGTHS = [1, 2, 3, 5, 8, 31, 32, 100, 1000, 4096, 4097, 31_594]


@pytest.mark.first(4)
@pytest.mark.parametrize("d", LENGTHS)
def test_unrotate_inverts_rotate(d):
    x = jnp.asarray(np.random.default_rng(d).normal(size=whole_blocks(d)), jnp.float32)
    key = jax.random.key(d)
    y = rotate(x, key)
    assert y.shape == layout(d) == layout(whole_blocks(d))
    np.testing.assert_allclose(np.linalg.norm(y), np.linalg.norm(x), rtol=1e-5)
    np.testing.assert_allclose(unrotate(y, key), x, atol=1e-5)
    np.testing.assert_allclose(rotate(x * 1e37, key, 1e37), y, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_hadamard_is_scipys(n):
    np.testing.assert_allclose(hadamard(n), linalg.hadamard(n) / np.sqrt(n), rtol=1e-6)


@pytest.mark.parametrize("d", [2, 16, 512, 4096])
def test_one_block_is_signs_and_a_hadamard_matrix(d):
    """The inverse rotation of another vector is the product with the transpose."""
    key = jax.random.key(7)
    x, other = np.random.default_rng(d).normal(size=(2, d)).astype(np.float32)
    signs = np.asarray(unrotate(rotate(jnp.ones(d), key), key)).round()
    np.testing.assert_array_equal(signs, np.ones(d))
    matrix = linalg.hadamard(d) / np.sqrt(d)
    signs = np.sign(matrix @ np.asarray(rotate(jnp.ones(d), key), np.float64).reshape(-1))
    np.testing.assert_allclose(rotate(jnp.asarray(x), key).reshape(-1), matrix @ (signs * x), atol=1e-5)
    back = unrotate(jnp.asarray(other).reshape(layout(d)), key)
    np.testing.assert_allclose(back, signs * (matrix.T @ other), atol=1e-5)


def test_blocks_are_rotated_separately():
    d = 4096 * 3
    assert layout(d) == (64, 3, 64)
    x = jnp.zeros(d).at[64 * 64 * 3 - 1].set(1.0)
    y = np.asarray(rotate(x, jax.random.key(0)))
    assert np.all(y[:, :2] == 0)
    np.testing.assert_allclose(np.abs(y[:, 2]), 1 / 64, rtol=1e-5)


@pytest.mark.parametrize("d", [1, 7, 100, 1500, 31_594, 48_670, 209_662, 1_206_590])
def test_the_overhead_is_small(d):
    """Padding and a scale of 32 bits per block: for models, less than 8 % of one bit per coordinate."""
    a, blocks, b = layout(d)
    assert d <= a * blocks * b and a * b in [2**i for i in range(13)]
    if d > 20_000:
        assert a * blocks * b + 32 * blocks < 1.08 * d


def test_rotated_coordinates_are_nearly_gaussian():
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096) ** 5, jnp.float32)
    assert stats.kurtosis(np.asarray(x)) > 100
    y = np.asarray(rotate(x, jax.random.key(0))).reshape(-1)
    assert stats.kstest(y / y.std(), "norm").pvalue > 0.01


def test_signs_differ_between_keys():
    rows = np.stack([np.asarray(rotate(jnp.ones(4096), jax.random.key(seed))).reshape(-1) for seed in range(20)])
    signs = np.sign(rows @ (linalg.hadamard(4096) / 64.0))
    assert stats.binomtest(int(np.sum(signs > 0)), signs.size).pvalue > 1e-3
    correlation = signs @ signs.T / 64.0  # these are standard normal for unrelated rows
    assert np.max(np.abs(correlation[~np.eye(20, dtype=bool)])) < 4.5
