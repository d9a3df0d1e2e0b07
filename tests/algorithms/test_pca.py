"""Principal components over clients equal those of NumPy's singular value decomposition of all examples together."""

import federation
import jax
import numpy as np
import pytest

import fedsim
from fedsim import algorithms

SIZES = (37, 0, 5, 60, 1, 97)


def population(shift=0.0):
    draw = np.random.default_rng(0)
    scales = np.array([4.0, 2.5, 1.5, 0.6, 0.3])
    x = draw.normal(size=(sum(SIZES), 5)) * scales @ np.linalg.qr(draw.normal(size=(5, 5)))[0] + shift
    return fedsim.FederatedData.from_arrays({"x": x.astype(np.float32)}, sizes=SIZES)


def iterate(algorithm, data, rounds):
    cohorts = [federation.cohort(data, round=r) for r in range(rounds)]
    return algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohorts)[0]


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_the_limit_is_the_singular_value_decomposition_of_the_centred_examples(shift):
    data = population(shift)
    state = iterate(algorithms.PCA(num_features=5, num_components=3, batches=fedsim.Batches(size=16)), data, 40)
    x = data.columns["x"].astype(np.float64)
    _, values, rows = np.linalg.svd(x - x.mean(0), full_matrices=False)
    rows = rows * np.sign(rows[np.arange(5), np.abs(rows).argmax(1)])[:, None]
    np.testing.assert_allclose(state.mean, x.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.components, rows[:3].T, atol=2e-4)
    np.testing.assert_allclose(state.variances, values[:3] ** 2 / len(x), rtol=1e-4)


def test_one_round_is_a_step_of_subspace_iteration():
    data, algorithm = population(), algorithms.PCA(num_features=5, num_components=2)
    start = algorithm.init(jax.random.key(0))
    state, _ = algorithm.apply(start, federation.cohort(data))
    x = data.columns["x"].astype(np.float64)
    product = np.cov(x.T, bias=True) @ np.asarray(start.components, np.float64)
    # The subspaces are compared by their projections, which do not depend on the basis.
    basis = np.linalg.qr(product)[0]
    np.testing.assert_allclose(state.components @ state.components.T, basis @ basis.T, atol=1e-5)
    np.testing.assert_allclose(state.components.T @ state.components, np.eye(2), atol=1e-6)


def test_the_error_is_the_variance_that_is_left_out():
    data = population()
    algorithm = algorithms.PCA(num_features=5, num_components=3)
    state = iterate(algorithm, data, 40)
    x = data.columns["x"].astype(np.float64)
    left_out = np.sort(np.linalg.eigvalsh(np.cov(x.T, bias=True)))[:2].sum() / 5
    assert algorithm.evaluate(state, data).overall["error"] == pytest.approx(left_out, rel=1e-4)


def test_more_components_than_features_are_refused():
    with pytest.raises(ValueError, match="Expected 1 <= num_components <= 5, got num_components=6"):
        algorithms.PCA(num_features=5, num_components=6)
