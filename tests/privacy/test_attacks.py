"""Attacks on privacy: against closed forms, and that defences stop what succeeds without them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import fedsim
from fedsim.privacy import Scores, attacks


def test_likelihood_ratios_of_normal_laws_are_those_of_scipy():
    draw = np.random.default_rng(0)
    members = np.arange(10)[:, None] % 2 == np.array([0, 1, 0])
    shadows, target = draw.normal(size=(10, 3)) + members, draw.normal(size=3)
    found = attacks.likelihood_ratios(target, shadows, members, common_variance=False)
    for at in range(3):
        inside, outside = shadows[members[:, at], at], shadows[~members[:, at], at]
        laws = [stats.norm(x.mean(), x.std(ddof=1)).logpdf(target[at]) for x in (inside, outside)]
        assert found[at] == pytest.approx(laws[0] - laws[1])
    squares = [np.var(shadows[members[:, at] == side, at]) * 5 for at in range(3) for side in (True, False)]
    common = attacks.likelihood_ratios(target, shadows, members)
    deviations = [np.sqrt(sum(squares[start::2]) / 12) for start in (0, 1)]
    means = shadows[members[:, 0], 0].mean(), shadows[~members[:, 0], 0].mean()
    laws = [stats.norm(mean, deviation).logpdf(target[0]) for mean, deviation in zip(means, deviations, strict=True)]
    assert common[0] == pytest.approx(laws[0] - laws[1])
    offline = attacks.likelihood_ratios(target, shadows, np.zeros_like(members), common_variance=False)
    np.testing.assert_allclose(offline, (target - shadows.mean(axis=0)) / shadows.std(axis=0, ddof=1))


def test_the_power_against_a_mean_is_the_closed_form():
    """The released value is the mean of n rows of dimension d plus noise: the best attack on row x is <x, released>.

    Its two laws are N(‖x‖²/n, s²‖x‖²) and N(0, s²‖x‖²), with s² the variance of the mean and of the noise, so the ROC curve has
    the distance ‖x‖ / (n s), which is about √(d / n) without noise.
    """
    n, d, models, noise = 50, 100, 81, 0.1
    draw = np.random.default_rng(0)
    rows, members = draw.normal(size=(2 * n, d)), np.stack([draw.permutation(2 * n) < n for _ in range(models)])
    released = members @ rows / n + noise * draw.normal(size=(models, d))
    values = released @ rows.T
    ratios = attacks.likelihood_ratios(values[0], values[1:], members[1:])
    scores = Scores(ratios[members[0]], ratios[~members[0]])
    # The set is a half of 2n fixed rows, so that the variance of its mean is half of 1 / n.
    distance = np.sqrt(d) / (n * np.sqrt(1 / (2 * n) + noise**2))
    assert scores.auc == pytest.approx(stats.norm.cdf(distance / np.sqrt(2)), abs=0.08)
    plain = Scores(values[0][members[0]], values[0][~members[0]])
    assert scores.auc > plain.auc - 0.02
    loud = (members @ rows / n + 10 * draw.normal(size=(models, d))) @ rows.T
    ratios = attacks.likelihood_ratios(loud[0], loud[1:], members[1:])
    assert abs(Scores(ratios[members[0]], ratios[~members[0]]).auc - 0.5) < 0.15


def test_confidences_are_log_odds():
    p = np.array([0.2, 0.5, 0.999])
    np.testing.assert_allclose(attacks.confidences(-np.log(p)), np.log(p / (1 - p)))
    assert np.isfinite(attacks.confidences([0.0])).all()


def test_losses_are_those_of_the_model_in_the_order_of_the_columns():
    data = fedsim.datasets.load("digits(clients=3)").train
    model = fedsim.models.digits_logistic()
    params = jax.tree.map(lambda x: np.broadcast_to(np.arange(10, dtype=np.float32), x.shape), model.init(jax.random.key(0)))
    logits = (np.asarray(data.columns["x"]).reshape(-1, 64).sum(axis=1) / 16 + 1)[:, None] * np.arange(10)
    own = np.asarray(data.columns["y"])
    expected = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - logits[np.arange(len(own)), own]
    np.testing.assert_allclose(attacks.losses(model, params, data), expected, rtol=1e-4, atol=1e-3)


def test_half_of_the_population_takes_part_in_a_shadow_run():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(40)}, sizes=[1] * 40)
    samplers = [attacks.ShadowSampler(data, clients=4, seed=seed) for seed in range(200)]
    members = np.stack([sampler.members for sampler in samplers])
    assert (members.sum(axis=1) == 20).all()
    # Each client is a member of a binomial number of 200 halves: five standard deviations are 35.
    assert np.abs(members.sum(axis=0) - 100).max() < 35
    seen = np.bincount(np.concatenate([samplers[0].cohort(round).clients for round in range(200)]), minlength=40)
    assert (seen[~members[0]] == 0).all() and (seen[members[0]] > 15).all()
    with pytest.raises(ValueError, match=r"^Expected 1 <= clients <= 20, got clients=21: half of the population takes part"):
        attacks.ShadowSampler(data, clients=21, seed=0)


IMAGES = fedsim.datasets.load("digits(clients=5)").train.columns["x"][:2].astype(np.float32) / 16
LABELS = jnp.array([3, 7])


def gradient(params, images, labels=LABELS):
    def loss(params):
        hidden = jax.nn.sigmoid(images.reshape(len(images), 64) @ params["first"] + params["bias"][None])
        logits = hidden @ params["second"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[: len(images)]).mean()

    return jax.grad(loss)(params)


def network(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    first, second = jax.random.normal(keys[0], [64, 64]) / 8, jax.random.normal(keys[1], [64, 10]) / 8
    return {"first": first, "bias": jnp.zeros(64), "second": second}


def local_steps(params, images, steps, rate=2.0):
    start = params
    for _ in range(steps):
        params = jax.tree.map(lambda x, g: x - rate * g, params, gradient(params, images))
    return jax.tree.map(jnp.subtract, start, params)


@pytest.mark.slow
def test_images_are_found_from_a_gradient_and_not_with_noise_or_from_several_steps():
    params = network()
    exact = gradient(params, IMAGES)
    norm = float(optax.tree.norm(exact))
    options = dict(key=jax.random.key(1), steps=2000, total_variation=1e-4)

    def error(observed):
        found = attacks.invert(lambda images: gradient(params, images), observed, IMAGES.shape, **options)
        return attacks.likeness(found, IMAGES).mean()

    d = sum(x.size for x in jax.tree.leaves(params))
    noise = jax.tree.map(lambda x: norm / np.sqrt(d) * 5 * jax.random.normal(jax.random.key(2), x.shape), exact)
    assert error(exact) > 22
    assert error(jax.tree.map(lambda x: x / norm, exact)) > 22  # Clipping alone changes the length only.
    assert error(jax.tree.map(jnp.add, exact, noise)) < 14
    assert error(local_steps(params, IMAGES, 20)) < error(exact) - 4


def test_images_without_an_update_stay_finite_and_the_length_of_updates_does_not_matter():
    """The derivative of the root of a norm is infinite at 0, and the product of two small norms is 0."""
    weights = jax.random.normal(jax.random.key(0), [16, 5])
    image = jax.random.uniform(jax.random.key(1), [1, 4, 4, 1])
    options = dict(shape=image.shape, key=jax.random.key(2), steps=20, total_variation=0.0)
    dead = attacks.invert(lambda x: jnp.maximum(x.reshape(16) - 2, 0), jnp.ones(16), **options)
    assert bool(jnp.isfinite(dead).all())
    found, of_small = (
        attacks.invert(
            lambda x, s=s: s * jnp.tanh(x.reshape(16) @ weights), s * jnp.tanh(image.reshape(16) @ weights), **options
        )
        for s in (1.0, 2.0**-40)
    )
    np.testing.assert_allclose(found, of_small, atol=1e-5)


@pytest.mark.slow
def test_the_inputs_of_a_dense_layer_are_exact_for_one_example_and_not_after_several_steps():
    params = network()
    one = gradient(params, IMAGES[:1])
    found = attacks.inputs_of_dense(one["first"], one["bias"])
    assert len(found) == 64
    np.testing.assert_allclose(found, np.broadcast_to(IMAGES[:1].reshape(1, 64), (64, 64)), atol=1e-3)
    both = gradient(params, IMAGES)
    mixed = attacks.inputs_of_dense(both["first"], both["bias"])
    assert attacks.likeness(mixed, IMAGES.reshape(2, 64)).max() < 60
    noisy = attacks.inputs_of_dense(one["first"] + 0.1 * jax.random.normal(jax.random.key(0), [64, 64]), one["bias"])
    assert attacks.likeness(noisy, IMAGES[:1].reshape(1, 64)).max() < 10


def test_likeness_matches_images_in_any_order():
    draw = np.random.default_rng(0)
    images = draw.random((5, 3, 3, 1))
    found = images[::-1] + 0.01 * np.where(draw.random(images.shape) < 0.5, 1, -1)
    np.testing.assert_allclose(attacks.likeness(found, images), 40, atol=1e-6)


def clients_with(shares, seed, classes=5):
    """Returns clients with 20 digits each, of which a share is of the first five classes."""
    data = fedsim.datasets.load("digits(clients=5)").train
    draw, x, y = np.random.default_rng(seed), np.asarray(data.columns["x"]), np.asarray(data.columns["y"])
    low, high = np.flatnonzero(y < classes), np.flatnonzero(y >= classes)
    rows = np.concatenate([np.where(draw.random(20) < share, draw.choice(low, 20), draw.choice(high, 20)) for share in shares])
    return fedsim.FederatedData.from_arrays({"x": x[rows], "y": y[rows]}, sizes=[20] * len(shares))


def test_a_property_is_inferred_from_updates_and_not_from_noised_ones():
    has = np.arange(60) % 2 == 0
    data = clients_with(np.where(has, 0.7, 0.3), seed=0)
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20)
    )
    updates = attacks.sent_updates(algorithm, algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, data.client_ids))

    def auc(updates):
        found = attacks.property_scores(updates[:40], has[:40], updates[40:])
        return Scores(found[has[40:]], found[~has[40:]]).auc

    assert auc(updates) > 0.9
    norms = np.linalg.norm(updates, axis=1)
    noise = 2 * norms.mean() * np.random.default_rng(1).normal(size=updates.shape)
    assert abs(auc(updates + noise) - 0.5) < 0.3


def test_sent_updates_are_the_gradient_of_one_step():
    data = clients_with([0.5, 0.2], seed=1)
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5), batches=fedsim.Batches(size=20)
    )
    state = algorithm.init(jax.random.key(0))
    updates = attacks.sent_updates(algorithm, state, fedsim.Cohort.of(data, data.client_ids))
    for at, client in enumerate(data.client_ids):
        x, y = np.asarray(data[client]["x"]).reshape(20, 64) / 16.0, np.asarray(data[client]["y"])
        weights = np.asarray(state.params["linear"]["w"], np.float64)
        exponentials = np.exp(x @ weights)
        residual = exponentials / exponentials.sum(1, keepdims=True) - np.eye(10)[y]
        expected = 0.5 * np.concatenate([residual.mean(0), (x.T @ residual / 20).ravel()])
        np.testing.assert_allclose(updates[at], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: attacks.likelihood_ratios([1.0], [[1.0]], [[True]]), "^Expected at least two models without each example"),
        (lambda: attacks.likelihood_ratios([1.0], [[1.0]], [[1]]), r"^Expected target \[n\], shadows .* and int64 \[1, 1\]"),
        (lambda: attacks.inputs_of_dense([[1.0]], [1.0, 2.0]), r"^Expected weight \[inputs, units\] and bias \[units\], got"),
        (lambda: attacks.likeness([[1.0]], [[1.0], [2.0]]), r"^Expected found \[m, ...\] and images \[n, ...\] with m >= n"),
        (lambda: attacks.property_scores([[1.0], [2.0]], [True, True], [[1.0]]), "^Expected shadows with and without the"),
        (lambda: attacks.property_scores([[1.0]], [True], [[1.0, 2.0]]), r"^Expected shadows \[k, d\], has_property bool"),
        (
            lambda: attacks.invert(lambda x: x, 0.0, [1, 2, 2, 1], key=jax.random.key(0), distance="l1"),
            "^Expected distance to be .*, got distance='l1'",
        ),
        (lambda: attacks.invert(lambda x: x, 0.0, [1, 2, 2, 1], key=jax.random.key(0), high=-1.0), "^Expected .*high > 0"),
    ],
)
def test_arguments_that_are_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use()


def test_the_variance_of_members_is_that_of_the_others_if_no_example_has_two():
    """2.0 lies beside the value of the only model that was trained on the example, and far from those of the others."""
    found = attacks.likelihood_ratios([2.0], [[1.9], [-0.1], [0.1]], [[True], [False], [False]])
    expected = 0.5 * (2.0**2 - 0.1**2) / np.var([-0.1, 0.1], ddof=1)
    np.testing.assert_allclose(found, expected)
