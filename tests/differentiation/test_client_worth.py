"""What clients are worth: derivatives against differences, against leaving clients out, and clients with wrong labels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import spearmanr

import fedsim
from fedsim import aggregators, differentiation, rng, rounds


def population(clients, wrong=(), **options):
    """Returns training data, some of whose clients have wrong labels, and validation data without these clients."""
    data = fedsim.datasets.load("digits", clients=clients, **options).train
    split = fedsim.partitioners.split_within_clients(data, {"train": 0.7, "validation": 0.3}, seed=0)
    train, draw = split["train"], np.random.default_rng(0)
    labels = np.array(train.columns["y"])
    for client in wrong:
        own = slice(*train.offsets[client : client + 2])
        labels[own] = (labels[own] + draw.integers(1, 10, labels[own].shape)) % 10
    train = fedsim.FederatedData.from_arrays({"x": np.array(train.columns["x"]), "y": labels}, sizes=train.sizes)
    return train, split["validation"].select([name for i, name in enumerate(data.client_ids) if i not in wrong])


def task(clients, rounds, cohort=None, **options):
    train, validation = population(clients, **options)
    model = fedsim.models.digits_logistic()
    algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    objective = differentiation.validation_loss(model, validation)
    sampler = fedsim.UniformSampler(train, clients=cohort or clients, seed=0)
    return algorithm, sampler, rounds, objective


def loss_with(algorithm, sampler, rounds, objective):
    """Returns a compiled function from the weights of clients to the objective after a run."""
    cohorts = [sampler.cohort(round) for round in range(rounds)]

    @jax.jit
    def loss(weights):
        weighted = differentiation.with_client_weights(algorithm, weights)
        state, _ = weighted.apply_rounds(weighted.init(rng.stream(cohorts[0].key, "init")), cohorts)
        return objective(state)

    return loss


@pytest.mark.slow
def test_worth_is_the_derivative_in_each_weight():
    given = task(6, rounds=3, cohort=3, partition="dirichlet", alpha=0.5)
    algorithm, sampler, rounds, objective = given
    worth = differentiation.client_worth(algorithm, sampler, rounds=rounds, objective=objective)
    loss, ones = loss_with(*given), jnp.ones(6)
    plain, _ = algorithm.apply_rounds(
        algorithm.init(rng.stream(sampler.cohort(0).key, "init")), [sampler.cohort(round) for round in range(rounds)]
    )
    assert float(loss(ones)) == pytest.approx(float(objective(plain)), rel=1e-6) == worth.objective
    for client in range(6):
        up, down = (float(loss(ones.at[client].set(1 + step))) for step in (0.1, -0.1))
        assert -(up - down) / 0.2 == pytest.approx(worth.values[client], rel=0.05, abs=5e-5)
    absent = set(range(6)) - {int(i) for round in range(rounds) for i in sampler.cohort(round).clients}
    assert all(worth.values[i] == 0 for i in absent)


@pytest.mark.slow
def test_its_order_is_that_of_leaving_each_client_out():
    given = task(20, rounds=10, partition="dirichlet", alpha=0.3)
    worth = differentiation.client_worth(*given[:2], rounds=given[2], objective=given[3])
    loss, ones = loss_with(*given), jnp.ones(20)
    without = [float(loss(ones.at[client].set(0))) - worth.objective for client in range(20)]
    assert spearmanr(worth.values, without)[0] >= 0.9


@pytest.mark.slow
def test_clients_with_wrong_labels_are_worth_least():
    wrong = tuple(range(3, 100, 10))
    algorithm, sampler, rounds, objective = task(100, rounds=10, wrong=wrong, partition="iid")
    worth = differentiation.client_worth(algorithm, sampler, rounds=rounds, objective=objective)
    assert set(np.argsort(worth.values)[:10].tolist()) == set(wrong)
    assert [line.split()[0] for line in worth.table().splitlines()[-10:]] == [
        worth.client_ids[i] for i in np.argsort(-worth.values, kind="stable")[-10:]
    ]


def test_what_has_no_weights_is_refused():
    data = fedsim.datasets.load("digits", clients=4).train
    nodes = fedsim.decentralized.DPSGD(
        model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10),
        topology=fedsim.decentralized.ring(4),
    )  # fmt: skip
    sampler = fedsim.UniformSampler(data, clients=4, seed=0)
    with pytest.raises(ValueError, match="DPSGD, which defines no client_update"):
        differentiation.client_worth(nodes, sampler, rounds=1, objective=lambda state: 0.0)


@pytest.mark.parametrize(
    "aggregator",
    [
        aggregators.GaussianMechanism(0.0, clip=1.0, denominator=4),
        aggregators.MatrixMechanism(0.0, clip=1.0, denominator=4, matrix=aggregators.BinaryTree(rounds=1)),
        aggregators.PartlyUniform("*"),
    ],
)
def test_an_aggregator_without_a_derivative_in_the_weights_is_refused(aggregator):
    """A mechanism takes weights above 1 as 1, and its derivative at 1 would be half of that from below."""
    data, model = fedsim.datasets.load("digits", clients=4).train, fedsim.models.digits_logistic()
    algorithm = fedsim.algorithms.FedAvg(
        model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), weighting="uniform",
        aggregator=aggregators.Clipped(1.0, inner=aggregator),
    )  # fmt: skip
    sampler, objective = fedsim.UniformSampler(data, clients=4, seed=0), differentiation.validation_loss(model, data)
    named = f"got {type(aggregator).__name__}.*, which bounds weights or ignores them"
    with pytest.raises(ValueError, match=named):
        differentiation.client_worth(algorithm, sampler, rounds=1, objective=objective)


class Whole(fedsim.algorithms.FedAvg):
    def weight(self, client):
        return client.num_examples  # a whole number


def test_weights_may_be_whole_numbers():
    data, model = fedsim.datasets.load("digits", clients=4).train, fedsim.models.digits_logistic()
    sampler, objective = fedsim.UniformSampler(data, clients=4, seed=0), differentiation.validation_loss(model, data)
    worth = [
        differentiation.client_worth(
            cls(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20)), sampler, rounds=1,
            objective=objective,
        ).values
        for cls in (fedsim.algorithms.FedAvg, Whole)
    ]  # fmt: skip
    assert np.abs(worth[0]).max() > 1e-4
    np.testing.assert_allclose(worth[1], worth[0], rtol=1e-4)


class Own(fedsim.algorithms.FedAvg):
    def client_update(self, shared, client):
        return super().client_update(shared, client)


@pytest.mark.parametrize(
    ("cls", "scaled"), [(fedsim.algorithms.FedAvg, True), (Own, False), (fedsim.algorithms.SCAFFOLD, False)]
)
def test_with_weights_an_algorithm_has_the_capabilities_that_it_has_without(cls, scaled):
    algorithm = object.__new__(cls)
    weighted = differentiation.with_client_weights(algorithm, jnp.ones(3))
    assert rounds.is_scalable(algorithm) == rounds.is_scalable(weighted) == scaled
    assert weighted.capabilities == dataclasses.replace(algorithm.capabilities, scalable=scaled)


@pytest.mark.slow
def test_updates_with_scales_may_have_weights():
    """The second client has half of its weight, and half of its update arrives."""
    data = fedsim.FederatedData.from_arrays({"x": np.ones((2, 1), np.float32), "y": np.float32([1, 4])}, sizes=[1, 1])
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.linear_regression([1]), client_optimizer=optax.sgd(0.5), batches=fedsim.Batches(size=1),
        weighting="uniform", staleness=fedsim.Staleness(bound=0),
    )  # fmt: skip
    start = algorithm.init(jax.random.key(0))
    params = lambda state: np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)])  # noqa: E731

    def moved(algorithm, scales):
        arrivals = fedsim.data.Arrivals.of([0, 0], round=0, scales=scales)
        cohort = fedsim.Cohort(data, [0, 1], 0, jax.random.key(0), arrivals=arrivals)
        return params(algorithm.apply(start, cohort)[0]) - params(start)

    one, both = moved(algorithm, [1.0, 0.0]) * 2, moved(algorithm, [1.0, 1.0]) * 2
    weighted = differentiation.with_client_weights(algorithm, jnp.float32([1.0, 0.5]))
    expected = (one + 0.5 * 0.5 * (both - one)) / 1.5
    np.testing.assert_allclose(moved(weighted, [1.0, 0.5]), expected, rtol=1e-5)


def test_weights_of_another_number_of_clients_are_refused():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(5, np.float32)}, sizes=[1] * 5)
    histogram = differentiation.with_client_weights(fedsim.algorithms.Histogram(bins=2), jnp.ones(3))
    with pytest.raises(ValueError, match=r"each of the 5 clients of the population, got shape \[3\]"):
        histogram.apply(histogram.init(jax.random.key(0)), fedsim.UniformSampler(data, clients=5, seed=0).cohort(0))


def test_a_client_whose_update_is_not_finite_has_no_worth():
    x = np.ones((4, 2), np.float32)
    x[2:] = 1e30
    data = fedsim.FederatedData.from_arrays({"x": x, "y": np.float32([1, 2, 1, 2])}, sizes=[2, 2], client_ids=["ann", "bob"])
    valid = fedsim.FederatedData.from_arrays({"x": x[:2], "y": np.float32([1, 2])}, sizes=[2])
    model = fedsim.models.linear_regression([2])
    algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=2))
    objective = differentiation.validation_loss(model, valid)
    sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    named = r"\(client 'bob' in round 0, 'bob' in round 1, .* 'bob' in round 4, \.\.\.\): leave these clients out"
    with pytest.raises(ValueError, match=f"Expected finite updates, got 6 with a NaN or an infinity, .* {named}"):
        differentiation.client_worth(algorithm, sampler, rounds=6, objective=objective)
    sampler = fedsim.samplers.ClusteredSampling(data, clients=2, seed=0)
    with pytest.raises(ValueError, match="weighting='uniform' for ClusteredSampling"):
        differentiation.client_worth(algorithm, sampler, rounds=1, objective=objective)
    with pytest.raises(ValueError, match="weighting='uniform' for ClusteredSampling"):
        fedsim.tune(lambda rate: algorithm, {"rate": 0.1}, sampler=sampler, rounds=1, objective=objective)
