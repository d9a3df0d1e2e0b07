"""HypCluster and IFCA: agreement with NumPy, a single cluster, and the initial clusters."""

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from network_models import RATE, client_memories, cohorts, make, numpy_gradient, plus, real_examples, run, start, weighted_mean

import fedsim
from fedsim import algorithms


def numpy_loss(params, x, y):
    hidden = np.tanh(x @ params["linear"]["w"] + params["linear"]["b"])
    logits = hidden @ params["linear_1"]["w"] + params["linear_1"]["b"]
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])


@pytest.mark.first(1)
@pytest.mark.parametrize("cls", [algorithms.HypCluster, algorithms.IFCA])
def test_hyp_cluster_and_ifca_follow_their_algorithm(cls):
    algorithm, population = make(cls, num_clusters=3, server_optimizer=optax.sgd(0.9, momentum=0.5)), federation.data()
    stacked = start(algorithm)
    models = [jax.tree.map(lambda p, j=j: p[j], stacked) for j in range(3)]
    speeds, chosen = [plus(w, -1, w) for w in models], {}
    for cohort in cohorts(population):
        moves = [[], [], []]
        for client_id, dataset, key in cohort:
            if len(dataset):
                j = int(np.argmin([numpy_loss(w, dataset["x"], dataset["y"]) for w in models]))
                w = models[j]
                for x, y in real_examples(dataset, key):
                    w = plus(w, -RATE, numpy_gradient(w, x, y))
                moves[j].append((len(dataset) if cls is algorithms.HypCluster else 1, plus(models[j], -1, w)))
                chosen[client_id] = j
        for j in range(3):
            if moves[j]:
                speeds[j] = plus(weighted_mean(moves[j]), 0.5, speeds[j])
                models[j] = plus(models[j], -0.9, speeds[j])
    state, info = run(algorithm)
    for j in range(3):
        federation.assert_trees_close(jax.tree.map(lambda p, j=j: p[j], state.params), models[j])
    assert {client_id: int(j) for client_id, j in client_memories(state).items()} == chosen
    assert len(set(chosen.values())) > 1
    assert info.clients["cluster_losses"].shape == (5, 3)


def test_one_cluster_is_fedavg():
    alone, fedavg = make(algorithms.IFCA, num_clusters=1), make(algorithms.FedAvg, weighting="uniform")
    state = alone.init(jax.random.key(1))
    expected = fedavg.init(jax.random.key(1))._replace(params=jax.tree.map(lambda p: p[0], state.params))
    for cohort in cohorts(federation.data()):
        (state, _), (expected, _) = alone.apply(state, cohort), fedavg.apply(expected, cohort)
    federation.assert_trees_close(jax.tree.map(lambda p: p[0], state.params), expected.params)


def two_kinds_of_clients():
    """Returns ten clients. For half of them the label is the sign of x0, for the others the opposite."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 3)).astype(np.float32)
    flip = np.repeat(np.arange(10) % 2, 20)
    return fedsim.FederatedData.from_arrays({"x": x, "y": ((x[:, 0] > 0) ^ (flip > 0)).astype(np.int32)}, sizes=[20] * 10)


@pytest.mark.slow
def test_clusters_are_found_from_initial_models_of_different_clients():
    data = two_kinds_of_clients()
    algorithm = make(algorithms.HypCluster, client_optimizer=optax.sgd(0.5))
    state = algorithm.init_from(data, seed=3)
    for r in range(10):
        state, _ = algorithm.apply(state, federation.cohort(data, round=r))
    numbers = [int(number) for number in client_memories(state, data).values()]
    assert len(set(numbers[::2])) == len(set(numbers[1::2])) == 1
    assert numbers[0] != numbers[1]
    assert fedsim.evaluate_personalized(algorithm, state, data, data).overall["accuracy"] > 0.95
    one = jax.tree.map(lambda p: p[0], state.params)
    assert fedsim.evaluate(algorithm.model, one, data).overall["accuracy"] < 0.7


@pytest.mark.slow
def test_initial_models_are_trained_on_single_clients_of_different_kinds():
    """The second client is almost always drawn from the other half, because those clients have high losses."""
    data = two_kinds_of_clients()
    algorithm = make(algorithms.HypCluster, client_optimizer=optax.sgd(0.5), batches=fedsim.Batches(size=4, epochs=20))
    apart = 0
    for seed in range(6):
        state = algorithm.init_from(data, seed=seed)
        right = [
            fedsim.evaluate(algorithm.model, jax.tree.map(lambda p, j=j: p[j], state.params), data).clients["accuracy"].result()
            for j in range(2)
        ]
        kinds = [bool(np.mean(right[j][::2]) > np.mean(right[j][1::2])) for j in range(2)]
        apart += kinds[0] != kinds[1]
    assert apart >= 5
    federation.assert_trees_equal(state, algorithm.init_from(data, seed=5))


@pytest.mark.slow
def test_no_client_trains_two_initial_models():
    """There are three models and three clients with examples, so each of these clients trains one model."""
    draw = np.random.default_rng(0)
    data = fedsim.FederatedData.from_arrays(
        {"x": draw.normal(size=(6, 3)).astype(np.float32), "y": np.ones(6, np.int32)}, sizes=[2, 1, 0, 3]
    )
    algorithm = make(algorithms.HypCluster, num_clusters=3)
    for seed in range(5):
        models = np.asarray(algorithm.init_from(data, seed=seed).params["linear"]["w"])
        assert len({model.tobytes() for model in models}) == 3
    with pytest.raises(ValueError, match="a client with examples for each of num_clusters=4 models to start from, got 3"):
        make(algorithms.HypCluster, num_clusters=4).init_from(data)


def test_a_diverged_model_is_not_chosen_by_any_client():
    algorithm, population = make(algorithms.HypCluster), federation.data()
    state = algorithm.init(jax.random.key(0))
    broken = jax.tree.map(lambda p: p.at[0].set(jnp.nan), state.params)
    after, info = algorithm.apply(state._replace(params=broken), federation.cohort(population))
    assert {int(number) for number in client_memories(after).values()} == {1}
    assert int(info.num_dropped) == 0
