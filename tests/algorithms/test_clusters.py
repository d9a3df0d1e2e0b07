"""k-means and mixtures over clients equal the computation on all data at once, by NumPy and by scikit-learn."""

import warnings

import federation
import jax
import numpy as np
import pytest
import sklearn.cluster
import sklearn.mixture

import fedsim
from fedsim import algorithms

SIZES = (37, 0, 5, 60, 1, 97)
CENTERS = np.array([[0.0, 0.0, 3.0], [4.0, -1.0, 0.0], [-3.0, 2.0, 1.0]])


def blobs(shift=0.0):
    """Returns three correlated clusters of examples, shuffled over clients of different sizes."""
    draw = np.random.default_rng(3)
    which = draw.integers(0, 3, sum(SIZES))
    stretch = np.array([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [-0.3, 0.2, 0.5]])
    x = CENTERS[which] + draw.normal(size=(len(which), 3)) @ stretch.T + shift
    return fedsim.FederatedData.from_arrays({"x": x.astype(np.float32)}, sizes=SIZES)


def iterate(algorithm, population, rounds, seed=0):
    state = algorithm.init(jax.random.key(0))
    cohorts = [federation.cohort(population, round=r, seed=seed) for r in range(rounds)]
    return algorithm.apply_rounds(state, cohorts)[0]


def settings(**options):
    return {"num_features": 3, "num_clusters": 3, "batches": fedsim.Batches(size=16)} | options


def numpy_lloyd(x, means):
    nearest = np.square(x[:, None] - means[None]).sum(2).argmin(1)
    return np.stack([x[nearest == k].mean(0) if np.any(nearest == k) else means[k] for k in range(len(means))])


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_k_means_equals_lloyd_on_all_examples(shift):
    population, start = blobs(shift), np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]) + shift
    x = population.columns["x"].astype(np.float64)
    algorithm = algorithms.KMeans(start=start, **settings())
    expected = start.astype(np.float32).astype(np.float64)
    for rounds in range(1, 5):
        expected = numpy_lloyd(x, expected)
        state = iterate(algorithm, population, rounds)
        np.testing.assert_allclose(np.asarray(state.means) - shift, expected - shift, rtol=1e-5, atol=1e-5 + 1e-6 * shift)
    theirs = sklearn.cluster.KMeans(3, init=start, n_init=1, max_iter=300, tol=0).fit(x)
    state = iterate(algorithm, population, 40)
    np.testing.assert_allclose(np.asarray(state.means) - shift, theirs.cluster_centers_ - shift, atol=1e-4)
    cost = algorithm.evaluate(state, population)
    np.testing.assert_allclose(cost.overall["cost"], theirs.inertia_ / len(x), rtol=1e-4)
    assert cost.clients["cost"].weight.tolist() == list(SIZES)


def test_each_example_counts_once_for_any_batch_size_and_number_of_epochs():
    population = blobs()
    once = algorithms.KMeans(start=CENTERS, **settings(batches=fedsim.Batches(size=256)))
    thrice = algorithms.KMeans(start=CENTERS, **settings(batches=fedsim.Batches(size=7, epochs=3)))
    federation.assert_trees_close(iterate(thrice, population, 2), iterate(once, population, 2))


def test_a_mean_moves_to_its_examples_also_if_they_count_less_than_one():
    """A client reads its examples as 1, 10, 1, so that they count as 4 / 3 and 2 / 3."""
    data = fedsim.FederatedData.from_arrays({"x": np.array([[1], [10]], np.float32)}, sizes=[2])
    batches = fedsim.Batches(size=1, steps=3, shuffle=False)
    algorithm = algorithms.KMeans(num_features=1, num_clusters=2, start=[[0.0], [12.0]], batches=batches)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0"]))
    np.testing.assert_allclose(state.means, [[1], [10]], rtol=1e-6)


def test_the_mean_of_an_empty_cluster_does_not_change():
    far = [[1e3, 1e3, 1e3]]
    state = iterate(algorithms.KMeans(start=[*CENTERS[:2].tolist(), *far], **settings()), blobs(), 3)
    np.testing.assert_array_equal(state.means[2], far[0])


@pytest.mark.slow
def test_initial_means_are_examples_drawn_in_proportion_to_their_squared_distance():
    """Of ten examples, eight are at 0, one at 1 and one at 3. The second point is never equal to the first."""
    x = np.array([*[0.0] * 5, 1.0, *[0.0] * 3, 3.0], np.float32)[:, None]
    population = fedsim.FederatedData.from_arrays({"x": x}, sizes=[4, 6])
    algorithm = algorithms.KMeans(num_features=1, num_clusters=2, batches=fedsim.Batches(size=4, shuffle=False))
    runs = 400
    starts = np.array([iterate(algorithm, population, 2, seed=seed).means[:, 0] for seed in range(runs)])
    assert set(np.unique(starts)) == {0.0, 1.0, 3.0} and not np.any(starts[:, 0] == starts[:, 1])
    at_zero = starts[starts[:, 0] == 0]
    for observed, chance, draws in [
        (np.mean(starts[:, 0] == 0), 0.8, runs),
        (np.mean(starts[:, 0] == 3), 0.1, runs),
        (np.mean(at_zero[:, 1] == 3), 0.9, len(at_zero)),
    ]:
        assert abs(observed - chance) < 4 * np.sqrt(chance * (1 - chance) / draws)
    # The second point is not drawn uniformly, which would give 0.5.
    assert abs(np.mean(at_zero[:, 1] == 3) - 0.5) > 0.3


def test_an_example_that_is_read_more_often_is_no_likelier_to_be_the_first_mean():
    """Both clients read 50 examples: one its only example 50 times, the other each of nine about six times."""
    population = fedsim.FederatedData.from_arrays({"x": np.array([[0.0], *[[1.0]] * 9], np.float32)}, sizes=[1, 9])
    algorithm = algorithms.KMeans(num_features=1, num_clusters=1, batches=fedsim.Batches(size=10, steps=5))
    runs, chance = 60, 0.1
    observed = np.mean([float(iterate(algorithm, population, 1, seed=seed).means[0, 0]) == 0 for seed in range(runs)])
    assert 0 < observed < chance + 4 * np.sqrt(chance * (1 - chance) / runs)


def test_k_means_finds_clusters_from_its_default_start():
    state = iterate(algorithms.KMeans(**settings()), blobs(), 30, seed=2)
    assert int(state.num_started) == 3
    best = sklearn.cluster.KMeans(3, n_init=10, random_state=0, tol=0).fit(blobs().columns["x"]).cluster_centers_
    np.testing.assert_allclose(np.sort(np.asarray(state.means), axis=0), np.sort(best, axis=0), atol=1e-3)


@pytest.mark.first(1)
@pytest.mark.parametrize("cls", [algorithms.KMeans, algorithms.GaussianMixture])
def test_with_x64_the_first_points_are_the_same(cls):
    algorithm = cls(**settings(batches=fedsim.Batches(size=64)))
    expected = iterate(algorithm, blobs(), 3).means
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = iterate(cls(**settings(batches=fedsim.Batches(size=64))), blobs(), 3).means
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_fewer_distinct_examples_than_clusters():
    population = fedsim.FederatedData.from_arrays({"x": np.ones((4, 3), np.float32)}, sizes=[2, 2])
    state = iterate(algorithms.KMeans(**settings()), population, 5)
    np.testing.assert_array_equal(state.means, np.ones((3, 3)))


def numpy_em(x, weights, means, covariances):
    """Computes one EM iteration with full covariances, in the log domain.

    Returns the new parameters and the log-likelihood of the old ones.
    """
    joint = np.stack(
        [
            np.log(w) - np.einsum("ni,ij,nj->n", x - m, np.linalg.inv(c), x - m) / 2 - np.linalg.slogdet(2 * np.pi * c)[1] / 2
            for w, m, c in zip(weights, means, covariances, strict=True)
        ],
        axis=1,
    )
    likelihood = np.logaddexp.reduce(joint, axis=1)
    shares = np.exp(joint - likelihood[:, None])
    counts = shares.sum(0)
    means = shares.T @ x / counts[:, None]
    covariances = np.stack([(shares[:, k, None] * (x - means[k])).T @ (x - means[k]) / counts[k] for k in range(len(counts))])
    return counts / len(x), means, covariances, likelihood.mean()


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_em_equals_em_on_all_examples_and_the_likelihood_never_decreases(covariance):
    population, start = blobs(), CENTERS + 1
    x = population.columns["x"].astype(np.float64)
    algorithm = algorithms.GaussianMixture(covariance=covariance, regularization=0.0, start=start, **settings())
    weights, means, covariances = np.full(3, 1 / 3), start, np.stack([np.eye(3)] * 3)
    likelihoods = []
    for rounds in range(1, 9):
        weights, means, covariances, before = numpy_em(x, weights, means, covariances)
        if covariance == "diagonal":
            covariances *= np.eye(3)
        likelihoods.append(before)
        if rounds in (1, 2, 8):
            state = iterate(algorithm, population, rounds)
            expected = covariances if covariance == "full" else np.diagonal(covariances, axis1=1, axis2=2)
            tolerance = 1e-5 if rounds < 3 else 1e-4
            for ours, theirs in zip(state[:3], (weights, means, expected), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    ours = []
    state = algorithm.init(jax.random.key(0))
    for r in range(40):
        ours.append(algorithm.evaluate(state, population).overall["log_likelihood"])
        state, _ = algorithm.apply(state, federation.cohort(population, round=r))
    np.testing.assert_allclose(ours[:8], likelihoods, rtol=1e-5)
    assert np.all(np.diff(ours) > -2e-6) and ours[-1] > ours[0] + 0.5


@pytest.mark.first(1)
@pytest.mark.parametrize(("covariance", "theirs"), [("diagonal", "diag"), ("full", "full")])
def test_em_agrees_with_scikit_learn(covariance, theirs):
    population = blobs()
    algorithm = algorithms.GaussianMixture(covariance=covariance, regularization=1e-3, start=CENTERS, **settings())
    ones = np.ones((3, 3)) if covariance == "diagonal" else np.stack([np.eye(3)] * 3)
    mixture = sklearn.mixture.GaussianMixture(
        3,
        covariance_type=theirs,
        reg_covar=1e-3,
        max_iter=6,
        tol=0,
        weights_init=np.full(3, 1 / 3),
        means_init=CENTERS,
        precisions_init=ones,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns that six iterations do not suffice
        mixture.fit(population.columns["x"].astype(np.float64))
    state = iterate(algorithm, population, 6)
    expected = mixture.weights_, mixture.means_, mixture.covariances_
    for a, b in zip(state[:3], expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_a_start_ten_thousand_standard_deviations_from_the_examples(seed, covariance):
    """The rounding error of the first round is as large as the variance, which must be positive; later rounds are accurate."""
    x = np.random.default_rng(seed).normal(size=(sum(SIZES), 3)) @ [[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [-0.3, 0.2, 0.5]]
    population = fedsim.FederatedData.from_arrays({"x": x.astype(np.float32)}, sizes=SIZES)
    start = 1e4 * np.random.default_rng(seed + 9).choice([-1.0, 1.0], (1, 3))
    algorithm = algorithms.GaussianMixture(covariance=covariance, **settings(num_clusters=1, start=start))
    first = np.asarray(iterate(algorithm, population, 1).covariances[0], np.float64)
    assert np.all(np.linalg.eigvalsh(np.diag(first) if covariance == "diagonal" else first) > 0)
    state, expected = iterate(algorithm, population, 3), np.cov(x.T, bias=True)
    np.testing.assert_allclose(state.means[0], x.mean(0), atol=1e-5)
    expected = np.diag(expected) if covariance == "diagonal" else expected
    np.testing.assert_allclose(state.covariances[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_two_starts_far_from_all_examples_converge(covariance):
    """Each component finds one cluster. With a variance of 0 after the first round, a component would never get examples."""
    draw = np.random.default_rng(0)
    x = np.where(np.arange(sum(SIZES))[:, None] % 2, 5.0, -5.0) + draw.normal(size=(sum(SIZES), 3))
    population = fedsim.FederatedData.from_arrays({"x": x.astype(np.float32)}, sizes=SIZES)
    start = 1e4 * np.stack([np.full(3, -1.0), np.full(3, 1.0)])
    algorithm = algorithms.GaussianMixture(covariance=covariance, **settings(num_clusters=2, start=start))
    state = iterate(algorithm, population, 30)
    np.testing.assert_allclose(np.asarray(state.means), [x[::2].mean(0), x[1::2].mean(0)], atol=1e-3)
    variances = np.asarray(state.covariances)
    variances = variances if covariance == "diagonal" else np.diagonal(variances, axis1=1, axis2=2)
    np.testing.assert_allclose(variances, [x[::2].var(0), x[1::2].var(0)], rtol=1e-3)


def test_a_component_without_examples_does_not_change():
    start = [*CENTERS[:2].tolist(), [1e6, 1e6, 1e6]]
    state = iterate(algorithms.GaussianMixture(start=start, covariance="full", **settings()), blobs(), 2)
    np.testing.assert_array_equal(state.means[2], start[2])
    np.testing.assert_array_equal(state.covariances[2], np.eye(3))
    assert float(state.weights[2]) == 0 and np.all(np.isfinite(state.covariances))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_features": 0}, "Expected num_features >= 1, got num_features=0"),
        ({"start": np.zeros((2, 3))}, r"Expected start to hold finite numbers \[3, 3\], got \[2, 3\]"),
        ({"covariance": "tied"}, "got covariance='tied'"),
        ({"regularization": -1.0}, "Expected regularization >= 0 and finite, got regularization=-1.0"),
        ({"start_variance": 0.0}, "Expected start_variance > 0"),
    ],
)
def test_invalid_cluster_settings_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        algorithms.GaussianMixture(**settings(**wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"num_features": 4}, "Expected num_features=3, .* got 4"), ({"feature": "z"}, "needs feature 'z'")],
)
def test_data_that_clusters_cannot_use_are_rejected(wrong, message):
    algorithm = algorithms.KMeans(**settings(**wrong))
    with pytest.raises(ValueError, match=message):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(blobs()))
