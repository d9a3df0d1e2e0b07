"""Aggregators that need keys, histories or clusters, compared with NumPy implementations of the papers, and under attack."""

import dataclasses
import functools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, attacks
from fedsim.aggregators._flame import majority

SHAPES = {"w": (3, 4), "e": (0, 2), "b": ()}
SIZE = 13


def tree(rows):
    """Returns rows ``[n, 13]`` as a tree of rows."""
    rows = jnp.asarray(rows, jnp.float32)
    return {"w": rows[:, :12].reshape(-1, 3, 4), "e": jnp.zeros((len(rows), 0, 2)), "b": rows[:, 12]}


def flat(update):
    return np.concatenate([np.ravel(update["w"]), np.ravel(update["b"])])


def fold(aggregator, x, weights, slots=None):
    """Returns the accumulator of an aggregator without memories, for a cohort of ``slots``."""
    rows, slots = tree(x), slots or len(x)
    accumulator = aggregator.zero(jax.tree.map(lambda leaf: leaf[0], rows), slots)
    for slot, weight in enumerate(weights):
        row = jax.tree.map(lambda leaf, slot=slot: leaf[slot], rows)
        accumulator = aggregator.accumulate(accumulator, row, jnp.float32(weight), jnp.int32(slot))
    return accumulator


def aggregate(aggregator, x, weights, slots=None, key=9):
    """Runs one round of an aggregator without memories, in a cohort of ``slots``."""
    return flat(jax.jit(aggregator.finish_round)(fold(aggregator, x, weights, slots), (), jax.random.key(key))[0])


def draw(n, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, SIZE)), rng.uniform(0.5, 3, n), rng


# Bucketing.


@pytest.mark.first(2)
@pytest.mark.parametrize("n", [8, 9, 11])
def test_buckets_are_means_of_all_clients_and_each_client_is_in_one(n):
    """The largest value of the first coordinate of a bucket's mean tells which clients are in it, by bits."""
    x, weights, _ = draw(n, 0)
    x[:, 0] = 2.0 ** np.arange(n)
    seen = []

    class Recording(aggregators.StackAggregator):
        def combine(self, updates, weights):
            jax.debug.callback(lambda rows, weights: seen.append((rows, weights)), updates["w"][:, 0, 0], weights)
            return jax.tree.map(lambda rows: rows[0], updates)

    weights[3] = 0
    for key in range(2):
        aggregate(aggregators.Bucketing(3, inner=Recording()), x, weights > 0, key=key)
    jax.effects_barrier()
    bits = np.array([rows * sizes for rows, sizes in seen]).round().astype(int)
    members = bits[:, :, None] >> np.arange(n) & 1
    np.testing.assert_array_equal(members.sum(axis=1), [weights > 0] * 2)  # each client in one bucket, and none without weight
    sizes = np.diff([*range(0, n - 1, 3), n - 1])
    np.testing.assert_array_equal(members.sum(axis=2)[:, : len(sizes)], [sizes] * 2)
    assert sorted(members[0].tolist()) != sorted(members[1].tolist())  # the draw depends on the key


def test_buckets_do_not_change_the_mean_and_do_not_depend_on_empty_slots():
    x, weights, _ = draw(11, 1)
    expected = np.average(x, axis=0, weights=weights)
    np.testing.assert_allclose(aggregate(aggregators.Bucketing(3), x, weights), expected, rtol=1e-5, atol=1e-6)
    median = aggregators.Bucketing(2, inner=aggregators.CoordinateMedian())
    np.testing.assert_allclose(aggregate(median, x, weights), aggregate(median, x, weights, slots=20), rtol=1e-6)
    alone = aggregators.Bucketing(1, inner=aggregators.CoordinateMedian())
    np.testing.assert_allclose(aggregate(alone, x, weights), np.median(x, axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(aggregate(median, x, 0 * weights), 0)


# Divide and conquer.


def numpy_dnc(x, f, c=1.0):
    """One iteration on all coordinates, by the singular value decomposition."""
    centered = x - x.mean(0)
    scores = np.square(centered @ np.linalg.svd(centered)[2][0])
    return x[np.argsort(scores)[: len(x) - int(np.ceil(c * f - 1e-9))]].mean(0)


@pytest.mark.first(3)
@pytest.mark.parametrize(("n", "f", "c"), [(11, 2, 1.0), (12, 3, 1.5), (17, 4, 0.5), (9, 0, 1.0)])
def test_divide_and_conquer_against_numpy(n, f, c):
    x, weights, _ = draw(n + 2, n)
    weights[[0, 5]] = 0
    x[[0, 5]] = 1e6
    there = x[weights > 0]
    result = aggregate(aggregators.DivideAndConquer(attackers=f, factor=c), x, weights)
    np.testing.assert_allclose(result, numpy_dnc(there, f, c), rtol=1e-4, atol=1e-5)
    assert f == 0 or np.abs(result - there.mean(0)).max() > 0.01


def test_coordinates_are_drawn_and_all_iterations_count():
    x = draw(11, 3)[0]
    x[4] += 20.0  # far away in every coordinate
    x[7, 2] += 30.0  # far away in one coordinate, so it is removed only where that is drawn
    rows, exists = tree(x), jnp.ones(11)

    def remaining(key, **options):
        return np.asarray(aggregators.DivideAndConquer(attackers=1, **options).remaining(rows, exists, jax.random.key(key)))

    one = [np.flatnonzero(~remaining(key, coordinates=2)).tolist() for key in range(20)]
    assert all(len(removed) == 1 for removed in one) and [4] in one and [7] in one
    many = remaining(0, coordinates=2, iterations=30)
    assert not many[4] and not many[7]
    # Thirty iterations with f = 9 of 11 leave no client that is never removed, so those count that are removed least often.
    most = aggregators.DivideAndConquer(attackers=9, coordinates=2, iterations=30).remaining(rows, exists, jax.random.key(0))
    assert 1 <= int(most.sum()) <= 2


def test_updates_at_the_end_of_float32_are_removed():
    x, weights, _ = draw(11, 4)
    x[:2] = [[3e18], [2e18]]
    np.testing.assert_allclose(aggregate(aggregators.DivideAndConquer(2), x, weights), x[2:].mean(0), rtol=1e-4, atol=1e-5)


# FLAME.


def groups_of(n, seed):
    """Returns directions around two axes, with different lengths."""
    x, _, rng = draw(n, seed)
    x += 4 * np.where(np.arange(n)[:, None] % 3 == 0, np.eye(SIZE)[0], np.eye(SIZE)[1])
    return x * rng.uniform(0.2, 5, (n, 1))


def numpy_majority(distances):
    """Connects pairs in the order of their distances, until more than half of the clients are connected."""
    n = len(distances)
    group = np.arange(n)
    for i, j in sorted(np.ndindex(n, n), key=lambda pair: distances[pair]):
        group[group == group[i]] = group[j]
        if np.sum(group == group[j]) > n // 2:
            return group == group[j]
    return group == group[0]


def cosines(x):
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return unit @ unit.T


@pytest.mark.first(2)
@pytest.mark.parametrize("n", [1, 2, 3, 10, 15, 24])
def test_the_majority_is_the_first_connected_one_and_the_cluster_of_hdbscan(n):
    for seed in range(5):
        distances = 1 - cosines(groups_of(n, seed))
        # Three slots of clients that sent nothing do not count.
        padded, exists = np.zeros((n + 3, n + 3), np.float32), np.arange(n + 3) < n
        padded[:n, :n] = distances
        ours = np.asarray(majority(jnp.asarray(padded), jnp.asarray(exists)))
        np.testing.assert_array_equal(ours[:n], numpy_majority(distances))
        assert not ours[n:].any()
        if n > 3:
            cluster = pytest.importorskip("sklearn.cluster")
            settings = {"min_cluster_size": n // 2 + 1, "min_samples": 1, "allow_single_cluster": True, "copy": True}
            labels = cluster.HDBSCAN(metric="precomputed", **settings).fit_predict(np.maximum(distances, 0))
            np.testing.assert_array_equal(ours[:n], labels == 0)
            assert 0 < np.sum(labels == 0) < n


@pytest.mark.slow
def test_flame_against_numpy():
    x, weights = groups_of(15, 7), np.ones(15)
    chosen, norms = numpy_majority(1 - cosines(x)), np.linalg.norm(x, axis=1)
    clipped = x * np.minimum(1, np.median(norms) / norms)[:, None]
    np.testing.assert_allclose(
        aggregate(aggregators.FLAME(noise=0.0), x, weights), clipped[chosen].mean(0), rtol=1e-5, atol=1e-5
    )
    noisy, keys = aggregators.FLAME(noise=0.1), jax.random.split(jax.random.key(0), 100)
    rounds = jax.vmap(noisy.finish_round, (None, None, 0))(fold(noisy, x, weights), (), keys)[0]
    noises = np.concatenate([rounds["w"].reshape(100, 12), rounds["b"][:, None]], axis=1)
    # 1,300 draws: the deviation differs by more than 4 / sqrt(2 * 1300) = 8 % only once in 16,000 times.
    assert np.std(noises - clipped[chosen].mean(0)) == pytest.approx(0.1 * np.median(norms), rel=0.08)
    assert np.unique(noises).size == noises.size
    np.testing.assert_array_equal(aggregate(aggregators.FLAME(), x, 0 * weights), 0)


# FoolsGold.


def numpy_fools_gold(history, kappa):
    """The weights of the paper's algorithm 1, by loops."""
    n = len(history)
    cs, alpha = cosines(history), np.zeros(n)
    v = np.array([max([0, *(cs[i, j] for j in range(n) if j != i)]) for i in range(n)])
    for i in range(n):
        for j in range(n):
            if i != j and v[j] > v[i]:
                cs[i, j] *= v[i] / v[j]
        alpha[i] = 1 - max([0, *(cs[i, j] for j in range(n) if j != i)])
    alpha = np.clip(alpha, 0, 1) / alpha.max()
    with np.errstate(divide="ignore"):
        return np.clip(kappa * (np.log(alpha / (1 - alpha)) + 0.5), 0, 1)


@pytest.mark.first(1)
@pytest.mark.parametrize("kappa", [1.0, 0.3])
def test_fools_gold_remembers_all_rounds_of_a_client(kappa):
    aggregator, clients = aggregators.FoolsGold(kappa), 9
    shared = {"w": jnp.zeros((3, 4)), "e": jnp.zeros((0, 2)), "b": jnp.float32(0)}
    memories = [aggregator.client_memory(shared) for _ in range(clients)]
    history = np.zeros((clients, SIZE))
    for round in range(3):
        x, weights, rng = draw(clients, 30 + round)
        x[:4] = rng.normal(size=SIZE) + 0.3 * rng.normal(size=(4, SIZE))  # four attackers with one goal
        ids = [0, 1, 2, 3, 5, 6 + round]
        accumulator = None
        for slot, client in enumerate(ids):
            update = jax.tree.map(lambda leaf, client=client: leaf[client], tree(x))
            sent = aggregator.send(update, (), memories[client], jax.random.key(0))
            memories[client], history[client] = sent.memory, history[client] + x[client]
            assert float(sent.bits) == 32 * SIZE  # the history is not sent
            accumulator = aggregator.zero(sent.update, 8) if accumulator is None else accumulator
            accumulator = aggregator.accumulate(accumulator, sent.update, jnp.float32(weights[client]), jnp.int32(slot))
        alpha = numpy_fools_gold(history[ids], kappa)
        result = flat(aggregator.finish_round(accumulator, (), jax.random.key(0))[0])
        np.testing.assert_allclose(result, np.average(x[ids], axis=0, weights=alpha * weights[ids]), rtol=1e-3, atol=1e-4)
        assert alpha[:4].max() < 0.5 < alpha[4:].max()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aggregators.Bucketing(0), "Expected size >= 1, got size=0: the number of clients of a bucket"),
        (lambda: aggregators.Bucketing(2, inner=aggregators.CentredClipping(1.0)), "got inner=CentredClipping.*put Bucketing"),
        (lambda: aggregators.DivideAndConquer(attackers=-1), "Expected attackers >= 0"),
        (lambda: aggregators.DivideAndConquer(attackers=1, factor=0.0), "Expected factor > 0 and finite"),
        (lambda: aggregators.DivideAndConquer(attackers=1, iterations=0), "Expected iterations >= 1"),
        (lambda: aggregators.DivideAndConquer(attackers=1, coordinates=0), "Expected coordinates >= 1"),
        (lambda: aggregators.FLAME(noise=-0.1), "Expected noise >= 0 and finite"),
        (lambda: aggregators.FoolsGold(0.0), "Expected confidence > 0 and finite"),
        (
            lambda: aggregators.DivideAndConquer(attackers=4, factor=1.5).check(jnp.zeros(3), 6),
            "removes 6 updates, and needs cohorts of more clients, got cohorts of 6",
        ),
        (
            lambda: aggregators.Bucketing(3, inner=aggregators.Krum(attackers=1)).check(jnp.zeros(3), 12),
            "Krum.attackers=1. needs cohorts of at least 2 . 1 . 3 = 5 clients, got cohorts of 4",
        ),
        (lambda: aggregators.FLAME().check(jnp.zeros(3, jnp.int32), 6), "FLAME scales updates, and needs floats"),
    ],
)
def test_arguments_out_of_range_raise_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Under attack, on the digits.


def trained(sampler, aggregator, rounds):
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.digits_logistic(),
        client_optimizer=optax.sgd(0.05),
        batches=fedsim.Batches(size=10),
        aggregator=aggregator,
        weighting="uniform",
        execution=fedsim.Jit(),
    )
    return algorithm.apply_rounds(algorithm.init(jax.random.key(0)), list(sampler.rounds(rounds)))[0].params


def accuracy(params, data):
    return float(fedsim.evaluate(fedsim.models.digits_logistic(), params, data).overall["accuracy"])


DEFENSES = {
    "mean": aggregators.Mean(),
    "multi-krum": aggregators.Krum(attackers=5, selected=10),
    "divide and conquer": aggregators.DivideAndConquer(attackers=5),
    "flame": aggregators.FLAME(),
    "buckets": aggregators.Bucketing(2, inner=aggregators.GeometricMedian()),
}


@functools.cache
def accuracy_under(attack, name):
    """Returns the accuracy after 25 rounds of 20 clients, 5 of whom attack."""
    data = fedsim.datasets.load("digits", clients=40)
    sampler = fedsim.UniformSampler(data.train, clients=20, seed=0)
    if attack is not None:
        sampler = fedsim.samplers.Attacked(sampler, attack, fraction=0.25, seed=1, every_round=True)
    return accuracy(trained(sampler, DEFENSES[name], 25), data.test)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (attacks.SignFlip(5.0), "buckets"),
        (attacks.SignFlip(5.0), "divide and conquer"),
        (attacks.SignFlip(5.0), "flame"),
        (attacks.MinMax(), "divide and conquer"),
        (attacks.MinMax(), "flame"),
        (attacks.MinSum(), "divide and conquer"),
    ],
    ids=str,
)
def test_defenses_are_better_than_the_mean(attack, name):
    assert accuracy_under(attack, name) > accuracy_under(attack, "mean") + 0.2


@pytest.mark.slow
def test_krum_resists_sign_flips_and_suffers_from_min_max():
    """Clients have skewed labels. If they are alike, the most distant ones are so close that the attack does little."""
    clean, flipped, deceived = (accuracy_under(a, "multi-krum") for a in (None, attacks.SignFlip(5.0), attacks.MinMax()))
    assert flipped > clean - 0.1 and deceived < clean - 0.3


@pytest.mark.slow
def test_fools_gold_resists_sybils():
    """Each honest client has one class. Four attackers have the examples of class 1 and call them 7."""
    data = fedsim.datasets.load("digits", clients=1)
    x, y = (data.train.columns[name] for name in "xy")
    honest = {f"class {c}": {"x": x[y == c], "y": y[y == c]} for c in range(10)}
    sybils = {f"sybil {i}": {"x": x[y == 1][i::4], "y": y[y == 1][i::4]} for i in range(4)}
    sampler = fedsim.UniformSampler(fedsim.FederatedData.from_clients(honest | sybils), clients=14, seed=0)
    attacked = fedsim.samplers.Attacked(sampler, attacks.LabelFlip(10, source=1, target=7), attackers=list(sybils), seed=0)
    ones = data.test.columns["y"] == 1
    test = fedsim.FederatedData.from_clients({"ones": {name: data.test.columns[name][ones] for name in "xy"}})
    mean, fooled = (accuracy(trained(attacked, a, 40), test) for a in (aggregators.Mean(), aggregators.FoolsGold()))
    assert mean < 0.2 and fooled > 0.6


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trusting(fedsim.algorithms.FedAvg):
    """FedAvg whose server takes five steps on examples of its own and trusts clients that go in a similar direction."""

    root: dict

    def own_update(self, params):
        examples = jax.tree.map(jnp.asarray, self.root)
        batch = fedsim.Batch(examples, jnp.ones(len(examples["y"]), bool), jax.random.key(0), 0)
        after = params
        for _ in range(5):
            after = fedsim.tree.subtract(after, fedsim.tree.scale(jax.grad(self.model.train_loss)(after, batch), 0.1))
        return fedsim.tree.subtract(params, after)

    def round(self, state, clients):
        trust = aggregators.FLTrust(self.own_update(state.params))
        update, info = clients.aggregate(self.client_update, self.broadcast(state), aggregator=trust)
        return self.server_update(state, update, info), info


EXECUTIONS = {"jit, 3 lanes": fedsim.Jit(lanes=3), "pmap, 2 devices": fedsim.Pmap(devices=2), "debug": fedsim.Debug()}


@pytest.mark.slow
@pytest.mark.parametrize("how", EXECUTIONS)
def test_fltrust_against_numpy_in_a_round(how):
    population = federation.data()
    root = {name: column[:5] for name, column in population.columns.items()}
    options = {"model": federation.model(), "client_optimizer": optax.sgd(0.3), "batches": fedsim.Batches(size=4)}
    algorithm, plain = Trusting(**options, execution=EXECUTIONS[how], root=root), fedsim.algorithms.FedAvg(**options)
    start = algorithm.init(jax.random.key(0))
    state, _ = algorithm.apply(start, federation.cohort(population))

    def row(params):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)]).astype(float)

    def sent(client):  # The mean of one update is that update.
        return row(start.params) - row(plain.apply(start, fedsim.Cohort.of(population, [client]))[0].params)

    updates = np.array([sent(client) for client, size in zip(population.client_ids, population.sizes, strict=True) if size])
    own, norms = row(algorithm.own_update(start.params)), np.linalg.norm(updates, axis=1)
    trust = np.maximum(updates @ own / norms / np.linalg.norm(own), 0)
    mean = np.average(updates * (np.linalg.norm(own) / norms)[:, None], axis=0, weights=trust)
    np.testing.assert_allclose(row(state.params), row(start.params) - mean, rtol=1e-4, atol=1e-5)
    assert np.ptp(trust) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("attack", [attacks.SignFlip(5.0), attacks.MinMax()], ids=str)
def test_fltrust_is_better_than_the_mean(attack):
    data = fedsim.datasets.load("digits", clients=40)
    sampler = fedsim.UniformSampler(data.train, clients=20, seed=0)
    sampler = fedsim.samplers.Attacked(sampler, attack, fraction=0.25, seed=1, every_round=True)
    columns = fedsim.datasets.load("digits", clients=1).train.columns
    algorithm = Trusting(
        model=fedsim.models.digits_logistic(),
        client_optimizer=optax.sgd(0.05),
        batches=fedsim.Batches(size=10),
        execution=fedsim.Jit(),
        root={name: np.asarray(column[:100]) for name, column in columns.items()},
    )
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), list(sampler.rounds(25)))
    assert accuracy(state.params, data.test) > accuracy_under(attack, "mean") + 0.2


def test_fltrust_trusts_nobody_who_goes_the_other_way_and_checks_the_form_of_its_reference():
    trust = aggregators.FLTrust({"w": jnp.array([3.0, 4.0])})

    def aggregate(w, weight):
        return trust.finish(trust.accumulate(trust.zero({"w": w}, 2), {"w": w}, jnp.float32(weight), 0))["w"].tolist()

    assert aggregate(jnp.array([-9.0, 0.0]), 1) == aggregate(jnp.array([9.0, 0.0]), 0) == aggregate(jnp.zeros(2), 1) == [0, 0]
    assert aggregate(jnp.array([9.0, 0.0]), 7) == pytest.approx([5, 0])
    with pytest.raises(ValueError, match=r"Expected a reference of the form of an update, .*\[\(3,\)\], got .*\[\(2,\)\]"):
        trust.check({"w": jnp.zeros(3)}, 2)


# What does not go together.


def test_fools_gold_refuses_attackers_without_history_and_clients_that_keep_what_was_received():
    population, options = federation.data(), {"batches": fedsim.Batches(size=4), "aggregator": aggregators.FoolsGold()}
    options |= {"model": federation.model(), "client_optimizer": optax.sgd(0.1)}
    fedavg, scaffold = fedsim.algorithms.FedAvg(**options), fedsim.algorithms.SCAFFOLD(**options)
    sampler = fedsim.UniformSampler(population, clients=6, seed=0)
    attacked = fedsim.samplers.Attacked(sampler, attacks.MinMax(), fraction=0.4, seed=0)
    with pytest.raises(
        ValueError, match=r"MinMax computes updates of attackers, but FoolsGold.* use an attack without collusion"
    ):
        fedavg.apply(fedavg.init(jax.random.key(0)), attacked.cohort(0))
    with pytest.raises(ValueError, match=r"is a function of the update .* but with FoolsGold it receives more than an update"):
        scaffold.apply(scaffold.init(jax.random.key(0)), sampler.cohort(0))
