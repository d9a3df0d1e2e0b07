"""Compressors, compared with float64 implementations of their papers in NumPy, and with each other in limiting cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federation import assert_trees_close, assert_trees_equal
from scipy import linalg

from fedsim import rng
from fedsim.compressors import (
    QSGD,
    Drive,
    Eden,
    Identity,
    IntegerQuantizer,
    MagnitudePruning,
    PowerSGD,
    RandomK,
    RotatedUniformQuantizer,
    ScaledSign,
    TernGrad,
    TopK,
    UniformQuantizer,
)
from fedsim.compressors._rotation import rotate

KEY = jax.random.key(11)
D = 1024


def vector(d=D, seed=0):
    return np.random.default_rng(seed).standard_t(4, size=d).astype(np.float32)


def sent(compressor, x):
    return np.asarray(send(compressor, jnp.asarray(x)).value)


def send(compressor, x):
    return jax.jit(compressor.transmit)(x, KEY, compressor.init(x))


def rounding():
    """Returns the uniform numbers for the coordinates of the first tensor."""
    return np.asarray(rng.noise(jax.random.fold_in(KEY, 0), D), np.float64)


def assert_same_but_for_edges(actual, expected):
    """Compares codes; a coordinate close to the boundary between two levels may be rounded to either."""
    assert np.mean(np.abs(actual - expected) > 1e-5 * np.abs(expected).max()) <= 2 / D


def test_uniform():
    x = vector().astype(np.float64)
    place = (x - x.min()) / (x.max() - x.min()) * 9
    up = rounding() >= 1 - np.modf(place)[0]
    expected = x.min() + (np.floor(place) + up) * (x.max() - x.min()) / 9
    assert_same_but_for_edges(sent(UniformQuantizer(levels=10), vector()), expected)


@pytest.mark.parametrize("levels", [1, 5])
def test_qsgd(levels):
    x = vector().astype(np.float64)
    place = levels * np.abs(x) / np.linalg.norm(x)
    up = rounding() >= 1 - np.modf(place)[0]
    expected = np.linalg.norm(x) * np.sign(x) * (np.floor(place) + up) / levels
    assert_same_but_for_edges(sent(QSGD(levels=levels), vector()), expected)


@pytest.mark.parametrize("clip", [None, 2.5])
def test_terngrad(clip):
    x = vector().astype(np.float64)
    x = x if clip is None else np.clip(x, -clip * np.sqrt(np.mean(x**2)), clip * np.sqrt(np.mean(x**2)))
    most = np.abs(x).max()
    expected = most * np.sign(x) * (rounding() >= 1 - np.abs(x) / most)
    assert_same_but_for_edges(sent(TernGrad(clip=clip), vector()), expected)


def test_scaled_sign():
    x = vector().astype(np.float64)
    np.testing.assert_allclose(sent(ScaledSign(), vector()), np.abs(x).mean() * np.sign(x), rtol=1e-5)


def numpy_rotation():
    """H D as a matrix: the signs D are what the transform of the ones came from."""
    matrix = linalg.hadamard(D) / np.sqrt(D)
    ones = np.asarray(rotate(jnp.ones(D), jax.random.fold_in(KEY, 0)), np.float64).reshape(-1)
    return matrix * np.sign(matrix @ ones)


@pytest.mark.parametrize("unbiased", [True, False])
def test_drive(unbiased):
    x = vector().astype(np.float64)
    rotation = numpy_rotation()
    y = rotation @ x
    scale = x @ x / np.abs(y).sum() if unbiased else np.abs(y).sum() / D
    np.testing.assert_allclose(sent(Drive(unbiased=unbiased), vector()), scale * rotation.T @ np.sign(y), atol=1e-4)


@pytest.mark.parametrize("unbiased", [True, False])
def test_eden(unbiased):
    x = vector().astype(np.float64)
    rotation = numpy_rotation()
    y = rotation @ x
    centroids = np.array([-1.510418, -0.4527800, 0.4527800, 1.510418])
    q = centroids[np.argmin(np.abs(y[:, None] * np.sqrt(D) / np.linalg.norm(x) - centroids), axis=1)]
    scale = x @ x / (y @ q) if unbiased else (y @ q) / (q @ q)
    np.testing.assert_allclose(sent(Eden(bits=2, unbiased=unbiased), vector()), scale * rotation.T @ q, atol=2e-2)


def test_top_k_and_pruning():
    x = vector()
    expected = x.copy()
    expected[np.argsort(np.abs(x))[:-103]] = 0
    np.testing.assert_array_equal(sent(TopK(fraction=0.1), x), expected)
    kept = np.abs(x) > 1.5 * np.sqrt(np.mean(x.astype(np.float64) ** 2))
    np.testing.assert_array_equal(sent(MagnitudePruning(threshold=1.5), x), np.where(kept, x, 0))


@pytest.mark.first(1)
@pytest.mark.parametrize("per_tensor", [True, False])
def test_pruning_always_sends_the_largest_coordinate(per_tensor):
    pruning = MagnitudePruning(threshold=2.0, per_tensor=per_tensor)
    for x in ([5.0], [-3.0, 2.0], [1.0, -1.0, 1.0, 1.0]):
        expected = np.where(np.arange(len(x)) == np.argmax(np.abs(x)), x, 0)
        np.testing.assert_array_equal(sent(pruning, jnp.array(x)), expected)
    zeros = pruning.transmit(jnp.zeros(4), jax.random.key(0))
    assert zeros.value.tolist() == [0.0] * 4 and int(zeros.bits) == 4  # only the mask


def test_random_k():
    x = vector()
    arrived = sent(RandomK(fraction=0.25), x)
    assert np.sum(arrived != 0) == 256
    np.testing.assert_array_equal(arrived, np.where(arrived != 0, 4 * x, 0))


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_integers(bits):
    x = vector().reshape(32, 32)
    last = 2**bits - 1
    scale = (x.max().astype(np.float64) - x.min()) / last
    zero = np.clip(-np.round(x.min() / scale), 0, last)
    expected = (np.clip(np.round(x / scale) + zero, 0, last) - zero) * scale
    np.testing.assert_allclose(sent(IntegerQuantizer(bits=bits), x), expected, rtol=1e-5)
    np.testing.assert_allclose(sent(IntegerQuantizer(bits=bits), x[0]), x[0])


@pytest.mark.parametrize("power", [-30, -110])
def test_integer_codes_do_not_depend_on_the_scale_of_updates(power):
    """Scaling an update by a power of two does not change any code."""
    x = vector().reshape(32, 32)
    small = sent(IntegerQuantizer(bits=4), np.ldexp(x, power))
    np.testing.assert_allclose(np.ldexp(small, -power), sent(IntegerQuantizer(bits=4), x), rtol=1e-6)


def test_integers_represent_zero_exactly():
    x = jnp.array([[3.0, 4.0], [0.0, 5.0]])
    assert sent(IntegerQuantizer(bits=2), x)[1, 0] == 0
    assert sent(IntegerQuantizer(bits=2), -x)[1, 0] == 0


def test_power_sgd_for_three_rounds():
    """The expected value is P Q^T with the Q of the previous round, by Gram-Schmidt; the update changes every round."""
    draw = np.random.default_rng(0)
    compressor = PowerSGD(rank=2)
    memory = compressor.init(jnp.zeros((4, 5, 12)))
    q = np.asarray(memory[0], np.float64)
    for _ in range(3):
        x = draw.normal(size=(4, 5, 12)).astype(np.float32)
        transmission = compressor.transmit(jnp.asarray(x), KEY, memory)
        memory = transmission.memory
        p = x.reshape(20, 12) @ q
        p[:, 0] /= np.linalg.norm(p[:, 0])
        p[:, 1] -= p[:, 0] * (p[:, 0] @ p[:, 1])
        p[:, 1] /= np.linalg.norm(p[:, 1])
        q = x.reshape(20, 12).T @ p
        np.testing.assert_allclose(transmission.value.reshape(20, 12), p @ q.T, atol=1e-5)
        q = np.asarray(memory[0], np.float64)  # Householder's columns may have the other sign; the space is the same


def test_power_sgd_converges_to_the_best_matrix_of_its_rank():
    """Repeated transmissions of a constant are power iterations, which converge to the optimum of Eckart and Young."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(30, 20)), jnp.float32)
    compressor = PowerSGD(rank=3)
    memory, values = compressor.init(x), np.linalg.svd(np.asarray(x), compute_uv=False)
    for _ in range(200):
        transmission = compressor.transmit(x, KEY, memory)
        memory = transmission.memory
    np.testing.assert_allclose(jnp.sum((transmission.value - x) ** 2), np.sum(values[3:] ** 2), rtol=1e-3)


def test_power_sgd_recovers_from_zeros_and_from_one_column():
    compressor = PowerSGD(rank=2)
    memory = compressor.init(jnp.zeros((20, 10)))
    for x in (jnp.zeros((20, 10)), jnp.outer(jnp.arange(20.0), jnp.arange(10.0))):
        memory = compressor.transmit(x, KEY, memory).memory
    x = jnp.asarray(np.random.default_rng(0).normal(size=(20, 2)) @ np.random.default_rng(1).normal(size=(2, 10)), jnp.float32)
    for _ in range(3):
        transmission = compressor.transmit(x, KEY, memory)
        memory = transmission.memory
    np.testing.assert_allclose(transmission.value, x, atol=1e-4)


def tree():
    draw = np.random.default_rng(0)
    return {"w": jnp.asarray(draw.normal(size=(30, 20)), jnp.float32), "b": jnp.asarray(draw.normal(size=20), jnp.float32)}


@pytest.mark.first(1)
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("per_tensor", [True, False])
def test_eden_of_one_bit_is_drive(unbiased, per_tensor):
    settings = {"unbiased": unbiased, "per_tensor": per_tensor}
    drive, eden = (send(c, tree()) for c in (Drive(**settings), Eden(bits=1, **settings)))
    assert_trees_close(drive.value, eden.value)
    assert (drive.bits, drive.entropy_bits) == (eden.bits, eden.entropy_bits)


def test_terngrad_is_qsgd_of_one_level_with_another_norm():
    x = jnp.array([0.0, 0.0, -3.0, 0.0])  # an update for which both norms are equal
    np.testing.assert_array_equal(sent(TernGrad(), x), sent(QSGD(levels=1), x))


@pytest.mark.parametrize("layout", ["mask", "places"])
def test_top_k_and_random_k_of_all_coordinates_are_the_identity(layout):
    for compressor in (TopK(fraction=1.0, layout=layout), RandomK(fraction=1.0), RandomK(fraction=1.0, unbiased=False)):
        assert_trees_equal(send(compressor, tree()).value, tree())
    assert_trees_equal(send(MagnitudePruning(threshold=0.0), tree()).value, tree())


@pytest.mark.slow
@pytest.mark.parametrize("per_tensor", [True, False])
def test_with_many_levels_quantizers_are_the_identity(per_tensor):
    for levels in (64, 65536):
        for compressor in (
            UniformQuantizer(levels=levels, per_tensor=per_tensor),
            RotatedUniformQuantizer(levels=levels, per_tensor=per_tensor),
            QSGD(levels=levels // 2, per_tensor=per_tensor),
        ):
            arrived = send(compressor, tree()).value
            # The range of the values is about 8, and their norm about 25.
            assert_trees_close(arrived, tree(), rtol=0, atol=60 / levels)
    assert_trees_close(send(IntegerQuantizer(bits=16), tree()).value, tree(), rtol=0, atol=1e-4)


def test_uniform_represents_extremes_and_constants_exactly():
    x = vector()
    for levels in (2, 7):
        arrived = sent(UniformQuantizer(levels=levels), x)
        assert arrived[x.argmin()] == x.min() and arrived[x.argmax()] == x.max()
        assert len(np.unique(arrived)) <= levels
        assert np.all(sent(UniformQuantizer(levels=levels), np.full(5, 0.1, np.float32)) == np.float32(0.1))


def test_a_joined_vector_does_not_depend_on_its_tensors():
    whole = {"all": jnp.arange(60.0) - 30}
    cut = {"a": whole["all"][:10].reshape(2, 5), "b": whole["all"][10], "c": whole["all"][11:]}
    for compressor in (Drive(), Eden(bits=2), RotatedUniformQuantizer(), TopK(fraction=0.1), RandomK(fraction=0.1)):
        a, b = send(compressor, whole), send(compressor, cut)
        np.testing.assert_array_equal(a.value["all"], np.concatenate([x.reshape(-1) for x in jax.tree.leaves(b.value)]))
        assert a.bits == b.bits


@pytest.mark.slow
def test_scales_do_not_depend_on_units():
    """A value that is 2^40 times larger or smaller is decoded to a result that is 2^40 times larger or smaller."""
    for compressor in (Drive(), Eden(bits=3), QSGD(), TernGrad(), ScaledSign(), UniformQuantizer(), RotatedUniformQuantizer()):
        for factor in (2.0**-80, 2.0**40, 2.0**80):
            np.testing.assert_allclose(
                sent(compressor, vector() * factor) / factor, sent(compressor, vector()), rtol=1e-4, atol=1e-6
            )


def test_identity_is_the_identity():
    assert_trees_equal(send(Identity(), tree()).value, tree())
