"""Fair algorithms: agreement with rounds in NumPy with float64, written from the papers, and special cases."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

import fedsim
from fedsim import algorithms
from fedsim.aggregators._min_norm import _minimize_norm
from fedsim.algorithms._domains import exponentiated

RATE = 0.3
BATCHES = fedsim.Batches(size=4, epochs=2)


def loss_and_gradient(params, x, y, weights=None):
    """Returns the mean or weighted mean softmax cross-entropy of the linear model [x, 1] @ params, and its gradient."""
    x = np.concatenate([x.astype(np.float64), np.ones((len(x), 1))], axis=1)
    logits = x @ params
    logits -= logits.max(1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    losses = -np.log(p[np.arange(len(y)), y])
    p[np.arange(len(y)), y] -= 1
    weights = np.ones(len(y)) if weights is None else weights
    return losses @ weights / len(y), x.T @ (p * weights[:, None]) / len(y), losses


def stacked(state):
    layer = state.params["linear"]
    return np.concatenate([layer["w"], layer["b"][None]]).astype(np.float64)


def trained(params, dataset, key, weight_of=lambda y: np.ones(len(y))):
    for batch in dataset.batches(BATCHES, key):
        x, y = batch.examples["x"][batch.mask], batch.examples["y"][batch.mask]
        params = params - RATE * loss_and_gradient(params, x, y, weight_of(y))[1]
    return params


def settings(**options):
    return {"model": federation.model(), "batches": BATCHES, "client_optimizer": optax.sgd(RATE)} | options


def rounds(algorithm, count=3):
    population = federation.data()
    return algorithm.init(jax.random.key(1)), [federation.cohort(population, round=r) for r in range(count)]


@pytest.mark.first(2)
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 5.0])
def test_q_fedavg_follows_algorithm_2(q):
    algorithm = algorithms.QFedAvg(q=q, **settings())
    state, cohorts = rounds(algorithm)
    for cohort in cohorts:
        w = stacked(state)
        state, info = algorithm.apply(state, cohort)
        delta, h, lipschitz = 0.0, 0.0, 1 / RATE
        for _, dataset, key in cohort:
            if len(dataset):
                loss = loss_and_gradient(w, dataset["x"], dataset["y"])[0]
                move = lipschitz * (w - trained(w, dataset, key))
                delta = delta + len(dataset) * loss**q * move
                h += len(dataset) * (q * loss ** (q - 1) * np.sum(move**2) + lipschitz * loss**q)
        np.testing.assert_allclose(stacked(state), w - delta / h, rtol=1e-5, atol=1e-6)
    expected = [loss_and_gradient(w, d["x"], d["y"])[0] if len(d) else 0.0 for _, d, _ in cohort]
    np.testing.assert_allclose(info.clients["loss_before"], expected, rtol=1e-5)


@pytest.mark.first(2)
@pytest.mark.parametrize("q", [0.0, 1.0, 3.0])
def test_q_fedsgd_follows_algorithm_1(q):
    algorithm = algorithms.QFedSGD(model=federation.model(), batches=fedsim.Batches(size=4), q=q, lipschitz=2.0)
    state, cohorts = rounds(algorithm)
    for cohort in cohorts:
        w = stacked(state)
        state, _ = algorithm.apply(state, cohort)
        delta, h = 0.0, 0.0
        for _, dataset, _ in cohort:
            if len(dataset):
                loss, gradient, _ = loss_and_gradient(w, dataset["x"], dataset["y"])
                delta = delta + len(dataset) * loss**q * gradient
                h += len(dataset) * (q * loss ** (q - 1) * np.sum(gradient**2) + 2.0 * loss**q)
        np.testing.assert_allclose(stacked(state), w - delta / h, rtol=1e-5, atol=1e-6)


@pytest.mark.first(1)
@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_q_fedavg_and_q_fedsgd_with_q_zero_are_fedavg_and_fedsgd(weighting):
    fedavg = algorithms.FedAvg(weighting=weighting, **settings())
    state, (cohort,) = rounds(fedavg, 1)
    fair = algorithms.QFedAvg(q=0.0, weighting=weighting, **settings())
    federation.assert_trees_close(fair.apply(state, cohort)[0], fedavg.apply(state, cohort)[0])
    some = {"model": federation.model(), "batches": fedsim.Batches(size=4), "weighting": weighting}
    fedsgd = algorithms.FedSGD(server_optimizer=optax.sgd(0.25), **some)
    fair = algorithms.QFedSGD(q=0.0, lipschitz=4.0, **some)
    expected = fedsgd.apply(fedsgd.init(jax.random.key(1)), cohort)[0].params
    federation.assert_trees_close(fair.apply(fair.init(jax.random.key(1)), cohort)[0].params, expected)


WARM_UP = optax.sgd(optax.linear_schedule(0.0, RATE, 3))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (WARM_UP, "whose first step is not 0 .* in round 0, .*: set lipschitz"),
        (lambda round: optax.sgd(0.0) if round == 0 else WARM_UP, "whose first step is not 0 .* in round 1"),
        (optax.polyak_sgd(RATE), r"needs gradients alone with QFedAvg and lipschitz=None, got one that needs the loss"),
    ],
    ids=["warm-up", "later warm-up", "polyak"],
)
def test_a_learning_rate_that_the_first_step_does_not_show_is_refused_unless_lipschitz_is_given(optimizer, message):
    """Otherwise L, 1 over the length of that step, would be 0, and the model would never move."""
    with pytest.raises(ValueError, match=message):
        algorithms.QFedAvg(**settings(client_optimizer=optimizer)).check(federation.data())
    algorithms.QFedAvg(lipschitz=1 / RATE, **settings(client_optimizer=optimizer)).check(federation.data())
    algorithms.QFedAvg(**settings(client_optimizer=lambda round: optax.sgd(0.0))).check(federation.data())


@pytest.mark.slow
def test_the_lipschitz_estimate_follows_a_schedule():
    scheduled = settings(client_optimizer=lambda round: optax.sgd(RATE * 0.5 ** round.astype(float)))
    algorithm = algorithms.QFedAvg(q=2.0, **scheduled)
    state, cohorts = rounds(algorithm, 2)
    expected = state
    for r, cohort in enumerate(cohorts):
        state, _ = algorithm.apply(state, cohort)
        constant = settings(client_optimizer=optax.sgd(RATE * 0.5**r))
        expected, _ = algorithms.QFedAvg(q=2.0, lipschitz=2.0**r / RATE, **constant).apply(expected, cohort)
    federation.assert_trees_close(state, expected)


@pytest.mark.slow
def test_a_larger_q_makes_the_clients_losses_more_equal():
    """Two clients have opposite labels, and one has three times the examples. A larger q favours the higher loss."""
    x = np.ones((8, 3), np.float32)
    y = np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int32)
    population = fedsim.FederatedData.from_arrays({"x": x, "y": y}, sizes=[6, 2])
    gaps = []
    for q in (0.0, 2.0, 10.0):
        algorithm = algorithms.QFedAvg(q=q, **settings(batches=fedsim.Batches(size=8)))
        state = algorithm.init(jax.random.key(0))
        state, infos = algorithm.apply_rounds(state, [federation.cohort(population, round=r) for r in range(200)])
        small, large = np.sort(infos.clients["loss_before"][-1])
        gaps.append(large - small)
    assert gaps[0] > 0.9 and gaps[0] > 2 * gaps[1] > 4 * gaps[2]


def test_a_client_whose_loss_is_zero_is_aggregated():
    """F^(q-1) would be infinite for a loss of 0."""
    losses = {"loss": lambda examples, outputs: 0.0 * outputs[:, 0]}
    model = federation.model()
    model = type(model)(**{**vars(model), **losses})
    algorithm = algorithms.QFedAvg(q=0.5, **settings(model=model))
    state, (cohort,) = rounds(algorithm, 1)
    after, info = algorithm.apply(state, cohort)
    assert int(info.num_dropped) == 0 and int(info.num_aggregated) == 7
    federation.assert_trees_close(after.params, state.params)


def population_with_domains(num_domains=3):
    """Returns clients with several domains each, except for one client with a single domain. One domain is rare."""
    data = federation.data()
    domains = np.minimum(np.random.default_rng(5).integers(0, 6, data.num_examples) // 2, num_domains - 1)
    domains[7:10] = 0
    return fedsim.FederatedData({**data.columns, "domain": domains.astype(np.int32)}, data.offsets, data.client_ids)


def nearest_in_simplex(values):
    """Computes the projection by bisection; the algorithm sorts the values."""
    low, high = values.min() - 1, values.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(values - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(values - low, 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("update", ["exponentiated", "projected"])
@pytest.mark.parametrize("window", [2, 1])
def test_agnostic_fedavg_follows_the_papers(window, update):
    population = population_with_domains()
    algorithm = algorithms.AgnosticFedAvg(
        num_domains=3, domain_learning_rate=0.7, window=window, domain_update=update, **settings()
    )
    state = algorithm.init(jax.random.key(1))
    weights, counts = np.full(3, 1 / 3), [np.zeros(3)] * window
    for r in range(4):
        cohort = federation.cohort(population, round=r)
        w = stacked(state)
        state, _ = algorithm.apply(state, cohort)
        alpha = weights / (np.mean(counts, axis=0) if r else 1)
        movement, total, losses, seen = 0.0, 0.0, np.zeros(3), np.zeros(3)
        for _, dataset, key in cohort:
            beta = alpha[dataset["domain"]].sum()
            if len(dataset):
                np.add.at(losses, dataset["domain"], loss_and_gradient(w, dataset["x"], dataset["y"])[2])
                np.add.at(seen, dataset["domain"], 1)
                params = w
                for batch in dataset.batches(BATCHES, key):
                    x, y, d = (batch.examples[name][batch.mask] for name in ("x", "y", "domain"))
                    params = params - RATE * loss_and_gradient(params, x, y, alpha[d] * len(dataset) / max(beta, 1e-30))[1]
                movement, total = movement + beta * (w - params), total + beta
        np.testing.assert_allclose(stacked(state), w - movement / total, rtol=1e-5, atol=2e-6)
        step = 0.7 * losses / seen
        weights = weights * np.exp(step) if update == "exponentiated" else nearest_in_simplex(weights + step)
        weights, counts = weights / weights.sum(), [*counts[1:], seen]
        np.testing.assert_allclose(state.weights, weights, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(state.counts, counts)


@pytest.mark.parametrize(
    ("weights", "step", "present"),
    [
        ([0.5, 0.5, 0.0], [0.0, 1.0, 200.0], [True, True, True]),
        ([0.25, 0.25, 0.5], [-300.0, -301.0, 9.0], [True, True, False]),
        ([0.0, 1.0, 0.0], [200.0, 1.0, 0.0], [True, False, False]),
    ],
    ids=["beside a domain of weight 0", "steps far below 0", "only a domain of weight 0"],
)
def test_the_exponentiated_update_keeps_the_sum_of_weights(weights, step, present):
    weights, step, present = np.array(weights), np.array(step), np.array(present)
    moves = present & (weights > 0)
    expected = weights.copy()
    if moves.any():
        powers = weights[moves] * np.exp(step[moves] - step[moves].max())
        expected[moves] = powers / powers.sum() * weights[moves].sum()
    found = exponentiated(*(jnp.asarray(x, jnp.float32) for x in (weights, step)), jnp.asarray(present))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_agnostic_fedavg_divides_by_weights_that_are_not_attacked_or_clipped():
    """The only client is an attacker, whose movement, times its weight β, is clipped; β and the losses of domains are not."""
    population = federation.data(sizes=(20,))
    clipped = fedsim.aggregators.Clipped(0.01, inner=fedsim.aggregators.Sum())
    algorithm = algorithms.AgnosticFedAvg(num_domains=4, domain="y", aggregator=clipped, **settings())
    cohort = federation.cohort(population)
    attacked = dataclasses.replace(cohort, attack=fedsim.attacks.SignFlip(), attackers=np.array([True]))
    start = algorithm.init(jax.random.key(1))
    state, _ = algorithm.apply(start, attacked)
    ((_, dataset, key),) = cohort
    w, beta = stacked(start), 20 / 4
    movement = trained(w, dataset, key) - w
    np.testing.assert_allclose(stacked(state) - w, -0.01 / beta * movement / np.linalg.norm(movement), rtol=1e-3, atol=1e-7)
    counts = np.bincount(dataset["y"], minlength=4)
    losses = np.bincount(dataset["y"], weights=loss_and_gradient(w, dataset["x"], dataset["y"])[2], minlength=4)
    powers = np.exp(0.1 * losses / counts)
    np.testing.assert_allclose(state.weights, powers / powers.sum(), rtol=1e-5)
    assert state.counts.tolist() == [counts.tolist()] and counts.min() > 0


@pytest.mark.slow
def test_agnostic_fedavg_of_one_domain_is_fedavg():
    population = population_with_domains(num_domains=1)
    fedavg = algorithms.FedAvg(**settings())
    agnostic = algorithms.AgnosticFedAvg(num_domains=1, **settings())
    expected, state = fedavg.init(jax.random.key(1)), agnostic.init(jax.random.key(1))
    for r in range(3):
        expected, _ = fedavg.apply(expected, federation.cohort(population, round=r))
        state, _ = agnostic.apply(state, federation.cohort(population, round=r))
    federation.assert_trees_close(state.params, expected.params)


@pytest.mark.slow
def test_agnostic_fedavg_lowers_the_loss_of_the_worst_domain():
    """Nine examples of domain 0 have class 0, and one of domain 1 has class 1, which FedAvg almost ignores."""
    x, y = np.ones((20, 3), np.float32), np.array([*[0] * 9, 1] * 2, np.int32)
    population = fedsim.FederatedData.from_arrays({"x": x, "y": y, "domain": y}, sizes=[10, 10])
    cohorts = [federation.cohort(population, round=r) for r in range(300)]
    losses = {}
    for rate in (0.0, 0.2):
        some = settings(batches=fedsim.Batches(size=10))
        algorithm = algorithms.AgnosticFedAvg(num_domains=2, domain_learning_rate=rate, domain_update="projected", **some)
        fedavg = algorithms.FedAvg(**some)
        for name, each in {"agnostic": algorithm, "fedavg": fedavg}.items():
            state, _ = each.apply_rounds(each.init(jax.random.key(0)), cohorts)
            losses[name, rate] = loss_and_gradient(stacked(state), x, y)[2].max()
    # Each domain is one point. The lowest worst loss is log 2, at equal weights, which are also the initial weights.
    assert losses["fedavg", 0.2] > 2
    np.testing.assert_allclose([losses["agnostic", 0.0], losses["agnostic", 0.2]], np.log(2), atol=0.05)


@pytest.mark.first(1)
@pytest.mark.parametrize("update", ["exponentiated", "projected"])
def test_a_domain_without_examples_in_a_round_keeps_its_weight(update):
    population = population_with_domains()
    algorithm = algorithms.AgnosticFedAvg(num_domains=3, domain_update=update, **settings())
    state, _ = algorithm.apply(algorithm.init(jax.random.key(1)), federation.cohort(population))
    before = state
    only = fedsim.Cohort.of(population, ["client2"], round=1)  # all examples are of domain 0
    state, _ = algorithm.apply(state, only)
    np.testing.assert_allclose(state.weights, before.weights, rtol=1e-6)
    assert np.all(np.asarray(before.counts) > 3)
    assert state.counts.tolist() == [[3.0, *before.counts[0, 1:].tolist()]]


@pytest.mark.slow
@pytest.mark.parametrize("came", [["01", "0", "0", "01"], ["0", "01"]], ids=["away for a while", "late"])
def test_a_domain_that_returns_or_appears_late_has_no_more_weight_than_the_other(came):
    """Two clients have the same number of examples, each of its own domain, and equal weights: each round is one of FedAvg."""
    data = federation.data(sizes=(20, 20))
    population = fedsim.FederatedData({**data.columns, "domain": np.repeat(np.int32([0, 1]), 20)}, data.offsets, ["0", "1"])
    agnostic = algorithms.AgnosticFedAvg(num_domains=2, domain_learning_rate=0.0, **settings())
    fedavg = algorithms.FedAvg(**settings())
    state, expected = agnostic.init(jax.random.key(1)), fedavg.init(jax.random.key(1))
    for r, clients in enumerate(came):
        cohort = fedsim.Cohort.of(population, list(clients), round=r)
        (state, _), (expected, _) = agnostic.apply(state, cohort), fedavg.apply(expected, cohort)
        federation.assert_trees_close(state.params, expected.params)


def test_a_domain_keeps_the_counts_of_its_last_window_with_examples():
    data = federation.data(sizes=(20, 10))
    population = fedsim.FederatedData(
        {**data.columns, "domain": np.repeat(np.int32([0, 1]), [20, 10])}, data.offsets, ["0", "1"]
    )
    algorithm = algorithms.AgnosticFedAvg(num_domains=2, window=2, **settings())
    state, counts = algorithm.init(jax.random.key(1)), []
    for r, clients in enumerate(["0", "01", "0", "0", "01"]):
        state, _ = algorithm.apply(state, fedsim.Cohort.of(population, list(clients), round=r))
        counts.append(np.asarray(state.counts)[:, 1].tolist())
    assert counts == [[0, 0], [0, 10], [10, 0], [10, 0], [0, 10]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_domains": 0}, "Expected num_domains >= 1, got num_domains=0"),
        ({"window": 0}, "Expected window >= 1, got window=0"),
        ({"domain_learning_rate": -1.0}, "Expected domain_learning_rate >= 0 and finite, got domain_learning_rate=-1.0"),
        ({"domain_update": "none"}, "got domain_update='none'"),
    ],
)
def test_invalid_agnostic_fedavg_settings_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        algorithms.AgnosticFedAvg(**settings(**{"num_domains": 3} | wrong))


@pytest.mark.parametrize("wrong", [{"domain": "nothing"}, {"domain": "x"}, {"num_domains": 2}])
def test_agnostic_fedavg_rejects_invalid_domains(wrong):
    algorithm = algorithms.AgnosticFedAvg(**settings(**{"num_domains": 3} | wrong))
    with pytest.raises(ValueError, match="an integer in .* name another one by domain, or set num_domains"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population_with_domains()))


def clients_and_shares(seed, slots=9, size=5):
    """Returns updates of more clients than dimensions, and weights. Two weights are 0; one of these updates is huge."""
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(slots, size))
    rows[:, 0] += 1
    weights = draw.integers(1, 9, slots).astype(np.float64)
    rows[4] *= 1e6
    weights[[4, 7]] = 0
    return rows, weights


def shortest(rows, weights, epsilon):
    """Solves the same quadratic program with SciPy's sequential quadratic programming."""
    directions, shares = rows[weights > 0], weights[weights > 0] / weights.sum()
    directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    found = scipy.optimize.minimize(
        lambda shares: np.sum(np.square(shares @ directions)),
        shares,
        jac=lambda shares: 2 * directions @ (shares @ directions),
        bounds=list(zip(np.maximum(shares - epsilon, 0), np.minimum(shares + epsilon, 1), strict=True)),
        constraints={"type": "eq", "fun": lambda shares: shares.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    return found.x @ directions, directions


@pytest.mark.first(2)
@pytest.mark.parametrize("epsilon", [0.0, 0.03, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_min_norm_solves_its_quadratic_program(epsilon, seed):
    rows, weights = clients_and_shares(seed)
    expected, directions = shortest(rows, weights, epsilon)
    update = {"a": jnp.asarray(rows[:, :2], jnp.float32), "b": jnp.asarray(rows[:, 2:].reshape(9, 1, 3), jnp.float32)}
    found = fedsim.aggregators.MinNorm(epsilon).combine(update, jnp.asarray(weights, jnp.float32))
    found = np.concatenate([found["a"], found["b"][0]])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    if epsilon == 1:  # the result is a descent direction for every client
        assert np.all(directions @ found >= found @ found - 1e-5)


def test_min_norm_stops_when_a_step_changes_nothing():
    """For four orthogonal directions all shares are 1/4. The first step reaches them, and later steps change nothing."""
    start = jnp.array([0.4, 0.3, 0.2, 0.1])
    found = _minimize_norm(jnp.eye(4), start, jnp.zeros(4), jnp.ones(4))
    np.testing.assert_allclose(found.shares, 0.25, atol=1e-6)
    assert bool(found.converged) and int(found.steps) < 10


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.2])
def test_min_norm_takes_few_steps_also_if_directions_are_similar(noise, absent):
    """The common part of the directions does not shorten the steps. If it did, about 200 or all 300 steps would be taken."""
    rows = 1 + noise * np.random.default_rng(0).normal(size=(10, 40))
    expected, directions = shortest(rows, np.ones(10), 0.1) if noise else (np.full(40, 40**-0.5), np.full((10, 40), 40**-0.5))
    present = np.pad(np.ones(10), (0, absent))
    products = np.pad(directions @ directions.T, (0, absent))
    found = _minimize_norm(*(jnp.asarray(x, jnp.float32) for x in (products, 0.1 * present, 0 * present, 0.2 * present)))
    shares = np.asarray(found.shares)
    np.testing.assert_allclose(shares[:10] @ directions, expected, atol=1e-5)
    np.testing.assert_allclose(shares.sum(), 1, atol=1e-6)
    assert bool(found.converged) and int(found.steps) < 60 and not shares[10:].any()


def test_min_norm_of_opposite_updates_is_zero():
    update = jnp.array([[1.0, 1.0], [-3.0, -3.0], [0.0, 0.0]])
    found = fedsim.aggregators.MinNorm(1.0).combine(update, jnp.array([1.0, 5.0, 1.0]))
    np.testing.assert_allclose(found, [0.0, 0.0], atol=1e-6)
    with pytest.raises(ValueError, match="Expected 0 <= epsilon <= 1, got epsilon=1.5"):
        fedsim.aggregators.MinNorm(1.5)


@pytest.mark.first(1)
@pytest.mark.parametrize("epsilon", [0.0, 0.15])
def test_fedmgda_follows_algorithm_1(epsilon):
    algorithm = algorithms.FedMGDA(epsilon=epsilon, **settings(server_optimizer=optax.sgd(0.4)))
    state, cohorts = rounds(algorithm)
    for cohort in cohorts:
        w = stacked(state)
        state, _ = algorithm.apply(state, cohort)
        moves = np.stack([(w - trained(w, dataset, key)).ravel() for _, dataset, key in cohort])
        weights = np.array([len(dataset) for _, dataset, _ in cohort], np.float64)
        expected = w - 0.4 * shortest(moves, weights, epsilon)[0].reshape(w.shape)
        np.testing.assert_allclose(stacked(state), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_fedmgda_with_epsilon_zero_is_fedavg_of_normalized_updates():
    """The expected value normalizes one update at a time, each from a FedAvg round with a single client."""
    fedavg, mgda = algorithms.FedAvg(**settings()), algorithms.FedMGDA(epsilon=0.0, **settings())
    state, (cohort,) = rounds(fedavg, 1)
    w, total = stacked(state), 0.0
    for client in np.flatnonzero(cohort.sizes):
        alone, _ = fedavg.apply(state, fedsim.Cohort(cohort.data, np.array([client]), 0, cohort.key))
        movement = stacked(alone) - w
        total = total + cohort.sizes[client] / cohort.sizes.sum() * movement / np.linalg.norm(movement)
    after, _ = mgda.apply(state, cohort)
    np.testing.assert_allclose(stacked(after), w + total, rtol=1e-5, atol=1e-6)


def test_fedmgda_rejects_two_values_of_epsilon():
    with pytest.raises(ValueError, match="got epsilon=0.5 and aggregator=.* inside the aggregator"):
        algorithms.FedMGDA(
            epsilon=0.5, aggregator=fedsim.aggregators.Clipped(1.0, inner=fedsim.aggregators.MinNorm()), **settings()
        )
