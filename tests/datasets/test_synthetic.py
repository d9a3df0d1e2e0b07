"""Synthetic(alpha, beta) and toy regression, compared with closed forms of their definitions, with negative controls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import fedsim
from fedsim import datasets
from fedsim.datasets._synthetic import synthetic


@pytest.fixture(scope="module")
def many():
    """300 clients without the largest ones, because means over clients do not need as many rows."""
    return synthetic(1, 2, clients=300)["train"]


def totals(splits):
    return splits["train"].sizes + splits["test"].sizes


def test_sizes_are_fifty_plus_a_log_normal_number():
    sizes = totals(synthetic(0, 0, clients=300)) - 50
    # Sizes are rounded down to integers, which reduces them by 0.5 on average.
    ours = scipy.stats.kstest(sizes + 0.5, scipy.stats.lognorm(s=2, scale=np.exp(4)).cdf).pvalue
    another = scipy.stats.kstest(sizes + 0.5, scipy.stats.lognorm(s=1, scale=np.exp(4)).cdf).pvalue
    assert ours > 0.01 > 1e-6 > another


def test_nine_tenths_are_for_training():
    splits = synthetic(1, 1)
    np.testing.assert_array_equal(splits["train"].sizes, np.floor(0.9 * totals(splits)).astype(int))
    assert splits["train"].client_ids == splits["test"].client_ids == [f"f_{client:05d}" for client in range(30)]


def test_features_have_the_published_covariance(many):
    centered = np.concatenate([client["x"] - client["x"].mean(0) for client in many.clients()]).astype(np.float64)
    covariance = centered.T @ centered / (len(centered) - many.num_clients)
    expected = np.arange(1, 61) ** -1.2
    np.testing.assert_allclose(np.diag(covariance), expected, rtol=0.03)
    correlation = covariance / np.sqrt(np.outer(expected, expected))
    assert np.abs(correlation - np.diag(np.diag(correlation))).max() < 0.02
    assert abs(np.diag(covariance)[1] / 2**-0.6 - 1) > 0.3  # the value if the exponent were -0.6


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_beta_is_the_standard_deviation_of_clients_features(beta):
    data = synthetic(0, beta, clients=300)["train"]
    means = np.array([client["x"].mean(0) for client in data.clients()], np.float64)
    # v_k has 60 entries from N(B_k, 1): their variance around their average is 1, and the variance of the average is
    # beta^2 + 1/60. The mean over a client's rows adds a variance of at most j^-1.2 / 45.
    assert abs(means.var(axis=1, ddof=1).mean() - 1) < 0.05
    assert abs(means.mean(1).std() - np.sqrt(beta**2 + 1 / 60)) < 0.1 * np.sqrt(beta**2 + 1 / 60) + 0.005


def test_a_client_is_learnt_by_a_linear_model_and_scrambled_labels_are_not():
    data = synthetic(1, 1)["train"]
    large = [data.client(int(i)) for i in np.argsort(data.sizes)[-8:]]
    client = min(large, key=lambda client: np.bincount(client["y"]).max() / len(client))  # Some clients have a single label.

    def accuracy(y):
        x = np.column_stack([(client["x"] - client["x"].mean(0)) / client["x"].std(0), np.ones(len(client), np.float32)])
        loss = lambda w: optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()  # noqa: E731
        step = lambda _, w: w - jax.grad(loss)(w)  # noqa: E731
        w = jax.jit(lambda w: jax.lax.fori_loop(0, 2000, step, w))(jnp.zeros([61, 10]))
        return float(np.mean(np.argmax(x @ w, 1) == y))

    y = jnp.asarray(client["y"])
    assert accuracy(y) > 0.97
    assert accuracy(jnp.asarray(np.random.default_rng(0).permutation(client["y"]))) < 0.9


def test_alpha_shifts_all_logits_equally_and_changes_no_label():
    near, far = (synthetic(alpha, 1)["train"] for alpha in (0, 3))
    np.testing.assert_array_equal(near.columns["x"], far.columns["x"])
    assert np.mean(near.columns["y"] == far.columns["y"]) > 0.999  # except for ties due to rounding


def test_clients_labels_differ_and_those_of_iid_clients_do_not():
    def spread(splits):
        train = splits["train"]
        counts = np.array([np.bincount(train.client(i)["y"], minlength=10) for i in np.argsort(train.sizes)[-10:]])
        shares = counts / counts.sum(1, keepdims=True)
        return np.abs(shares - shares.mean(0)).sum(1).mean()

    assert spread(synthetic(0, 0)) > 0.8
    assert spread(synthetic(0, 0, iid=True)) < 0.2


def test_iid_clients_share_one_model_and_their_features_have_mean_zero():
    data = synthetic(0, 0, iid=True, clients=60)["train"]
    assert np.abs(data.columns["x"].mean(0, dtype=np.float64)).max() < 0.05
    half = data.num_examples // 2
    x, y = data.columns["x"].astype(np.float64), data.columns["y"]
    # Least squares on label indicators is enough to predict the labels of some clients from the rows of others.
    weights = np.linalg.lstsq(np.column_stack([x[:half], np.ones(half)]), np.eye(10)[y[:half]], rcond=None)[0]
    predicted = np.argmax(np.column_stack([x[half:], np.ones(len(x) - half)]) @ weights, 1)
    assert np.mean(predicted == y[half:]) > 0.6


def test_a_client_does_not_depend_on_the_number_of_clients():
    few, more = synthetic(1, 1, clients=3)["train"], synthetic(1, 1, clients=5)["train"]
    for name in few.client_ids:
        np.testing.assert_array_equal(few[name]["x"], more[name]["x"])
    other = synthetic(1, 1, clients=3, seed=1)["train"]
    assert not np.array_equal(few.client(0)["x"][:50], other.client(0)["x"][:50])


def test_both_are_registered_with_their_model():
    for name in ("synthetic(beta=0.5, clients=4)", "synthetic_iid(clients=4)"):
        splits = datasets.load(name)
        assert splits.train.num_clients == splits.test.num_clients == 4
        fedsim.models.get(splits.description.default_model).check(splits.train)
    about = datasets.load("synthetic")
    assert about.description.splits["train"] == (about.train.num_clients, about.train.num_examples)
    assert about.description.splits["test"] == (about.test.num_clients, about.test.num_examples)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("synthetic(alpha=-1)", "alpha=-1"),
        ("synthetic(beta=-0.5)", "beta=-0.5"),
        ("synthetic(clients=0)", "clients=0"),
        ("toy_regression(clients=0)", "clients=0"),
        ("toy_regression(dimension=0)", "dimension=0"),
        ("toy_regression(noise=-1)", "noise=-1"),
        ("toy_regression(heterogeneity=-1)", "heterogeneity=-1"),
    ],
)
def test_the_error_for_arguments_out_of_range_names_them(name, message):
    with pytest.raises(ValueError, match=message):
        datasets.load(name)


@pytest.mark.parametrize("name", ["synthetic", "synthetic_iid", "toy_regression", "emnist62_like", "stackoverflow_like"])
def test_a_folder_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name!r} reads no files"):
        datasets.load(name, data=tmp_path)


def normal_equations(data):
    """Returns X'X / n, X'y / n and n of each client, in double precision."""
    x = [client["x"].astype(np.float64) for client in data.clients()]
    y = [client["y"].astype(np.float64) for client in data.clients()]
    return [xk.T @ xk / len(xk) for xk in x], [xk.T @ yk / len(yk) for xk, yk in zip(x, y, strict=True)], data.sizes


def test_without_noise_a_clients_optimum_is_its_own_weights_with_the_documented_variance():
    data = datasets.load("toy_regression(clients=400, noise=0, heterogeneity=0.5)").train
    grams, moments, _ = normal_equations(data)
    optima = np.array([np.linalg.solve(gram, moment) for gram, moment in zip(grams, moments, strict=True)])
    np.testing.assert_allclose(optima.std(0), 0.5, rtol=0.12)
    residual = [client["y"] - client["x"] @ w for client, w in zip(data.clients(), optima, strict=True)]
    assert max(np.abs(r).max() for r in residual) < 1e-5
    same = datasets.load("toy_regression(clients=2, noise=0, heterogeneity=0)").train
    grams, moments, _ = normal_equations(same)
    np.testing.assert_allclose(np.linalg.solve(grams[0], moments[0]), np.linalg.solve(grams[1], moments[1]), atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("steps", [1, 5])
def test_federated_averaging_converges_to_the_closed_form(steps):
    # Each client has ten examples, so a batch of ten contains all of them.
    ten = {client.client_id: {name: client[name][:10] for name in "xy"} for client in datasets.load("toy_regression").train}
    data, rate = fedsim.FederatedData.from_clients(ten), 0.1
    grams, moments, sizes = normal_equations(data)
    p = sizes / sizes.sum()
    least_squares = np.linalg.solve(sum(map(np.multiply, p, grams)), sum(map(np.multiply, p, moments)))
    # sum p_k (I - (I - h A_k)^t) (w - w_k) = 0
    pulls = [np.eye(2) - np.linalg.matrix_power(np.eye(2) - rate * 2 * gram, steps) for gram in grams]
    optima = [np.linalg.solve(gram, moment) for gram, moment in zip(grams, moments, strict=True)]
    fixed = np.linalg.solve(
        sum(map(np.multiply, p, pulls)), sum(pk * pull @ w for pk, pull, w in zip(p, pulls, optima, strict=True))
    )
    assert (np.abs(fixed - least_squares).max() < 1e-6) == (steps == 1)

    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.toy_regression(),
        client_optimizer=optax.sgd(rate),
        server_optimizer=optax.sgd(1.0),
        batches=fedsim.Batches(size=10, epochs=steps),
    )
    state = algorithm.init(jax.random.key(0))
    for cohort in fedsim.UniformSampler(data, clients=20, seed=0).rounds(60):
        state, _ = algorithm.apply(state, cohort)
    np.testing.assert_allclose(state.params["linear"]["w"][:, 0], fixed, atol=1e-4)


def test_toy_regression_has_a_description():
    splits = datasets.load("toy_regression")
    for split in ("train", "test"):
        data = getattr(splits, split)
        assert splits.description.splits[split] == (data.num_clients, data.num_examples)
        fedsim.models.get("toy_regression").check(data)
    assert datasets.load("toy_regression(dimension=5)").train.columns["x"].shape[1:] == (5,)
