"""Algorithms whose clients end up with models of their own: against NumPy, and where they reduce to one another."""

import dataclasses

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import algorithms, execution

RATE = 0.3
BATCHES = fedsim.Batches(size=4, epochs=2)


def network() -> fedsim.Model:
    def logits(examples):
        hidden = jnp.tanh(hk.Linear(5)(examples["x"]))
        return hk.Linear(federation.NUM_CLASSES)(hidden)

    return fedsim.Model.from_haiku(hk.transform(logits), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)


def numpy_gradient(params, x, y):
    """Mean gradient of softmax cross-entropy of the network above."""
    (w, b), (v, c) = ((params[name]["w"], params[name]["b"]) for name in ("linear", "linear_1"))
    hidden = np.tanh(x @ w + b)
    logits = hidden @ v + c
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    back = (p @ v.T) * (1 - hidden**2)
    slopes = {"linear": {"w": x.T @ back, "b": back.sum(0)}, "linear_1": {"w": hidden.T @ p, "b": p.sum(0)}}
    return jax.tree.map(lambda g: g / len(y), slopes)


def plus(a, factor, b):
    """a + factor b, on trees of NumPy arrays."""
    return jax.tree.map(lambda x, y: x + factor * y, a, b)


def weighted_mean(pairs):
    total = sum(weight for weight, _ in pairs)
    return jax.tree.map(lambda *x: sum(w * leaf for (w, _), leaf in zip(pairs, x, strict=True)) / total, *[p for _, p in pairs])


def real_examples(dataset, key, batches=BATCHES):
    for batch in dataset.batches(batches, key):
        yield batch.examples["x"][batch.mask].astype(np.float64), batch.examples["y"][batch.mask]


def make(cls, **more):
    settings = {"model": network(), "batches": BATCHES, "client_optimizer": optax.sgd(RATE), "execution": fedsim.Jit()}
    return cls(**(settings | more))


def cohorts(population, rounds=3):
    """Overlapping cohorts of changing clients."""
    draw = np.random.default_rng(5)
    return [fedsim.Cohort(population, draw.permutation(8)[:5], r, fedsim.rng.root(0)) for r in range(rounds)]


def run(algorithm, rounds=3, seed=1):
    population = federation.data()
    state = algorithm.init(jax.random.key(seed))
    for cohort in cohorts(population, rounds):
        state, info = algorithm.apply(state, cohort)
    return state, info


def kept(state, population=None):
    """What each client keeps, by id."""
    population = population or federation.data()
    if isinstance(state.clients, execution.ClientTable):
        rows, seen = jax.device_get(state.clients)
    else:
        rows, seen = state.clients.gather(np.arange(population.num_clients))
    return {population.client_ids[i]: jax.tree.map(lambda leaf, i=i: leaf[i], rows[0]) for i in np.flatnonzero(seen)}


def start(algorithm, seed=1):
    """The parameters before the first round, in float64."""
    return jax.tree.map(lambda p: np.asarray(p, np.float64), algorithm.init(jax.random.key(seed)).params)


def numpy_rounds(w, train):
    """Weighted averaging of what ``train(client_id, dataset, key, w)`` gives; None from a client without examples."""
    for cohort in cohorts(federation.data()):
        trained = [(len(dataset), train(i, dataset, key, w)) for i, dataset, key in cohort if len(dataset)]
        w = weighted_mean(trained)
    return w


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto_follows_algorithm_1(lam):
    algorithm = make(algorithms.Ditto, lam=lam)
    own = {}

    def train(client_id, dataset, key, w):
        copy, v = w, own.get(client_id, w)
        for x, y in real_examples(dataset, key):
            copy = plus(copy, -RATE, numpy_gradient(copy, x, y))
            v = plus(v, -RATE, plus(numpy_gradient(v, x, y), lam, plus(v, -1, w)))
        own[client_id] = v
        return copy

    w = numpy_rounds(start(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, w)
    federation.assert_trees_close(kept(state), own)


@pytest.mark.parametrize(("alpha", "adaptive"), [(0.3, False), (0.3, True), (0.97, True)])
def test_apfl_follows_algorithm_1(alpha, adaptive):
    algorithm = make(algorithms.APFL, alpha=alpha, adaptive=adaptive)
    own = {}

    def train(client_id, dataset, key, w):
        v, a = own.get(client_id, (w, alpha))
        for x, y in real_examples(dataset, key):
            slope = numpy_gradient(plus(plus(w, -a, w), a, v), x, y)
            along = sum(jax.tree.leaves(jax.tree.map(lambda d, g: np.sum(d * g), plus(v, -1, w), slope)))
            w, v = plus(w, -RATE, numpy_gradient(w, x, y)), plus(v, -RATE * a, slope)
            a = np.clip(a - RATE * along, 0, 1) if adaptive else a
        own[client_id] = (v, a)
        return w

    w = numpy_rounds(start(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, w)
    rows = kept(state)
    assert sorted(rows) == sorted(own)
    for client_id, (v, a) in own.items():
        federation.assert_trees_close(rows[client_id].params, v)
        np.testing.assert_allclose(rows[client_id].alpha, a, rtol=1e-5)
    assert (len({float(row.alpha) for row in rows.values()}) > 1) == adaptive


def test_fedper_averages_bodies_and_clients_keep_heads():
    algorithm = make(algorithms.FedPer)
    shared = algorithm.broadcast(algorithm.init(jax.random.key(1)))
    first = jax.tree.map(lambda p: np.asarray(p, np.float64), algorithm.client_memory(shared))
    heads = {}

    def train(client_id, dataset, key, body):
        params = body | heads.get(client_id, first)
        for x, y in real_examples(dataset, key):
            params = plus(params, -RATE, numpy_gradient(params, x, y))
        heads[client_id] = {"linear_1": params["linear_1"]}
        return {"linear": params["linear"]}

    body = numpy_rounds(start(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, body)
    federation.assert_trees_close(kept(state), heads)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9, 1.0])
def test_fedrep_follows_algorithm_1(fraction):
    """With momentum, which each half has for itself, from its own steps."""
    algorithm = make(algorithms.FedRep, head_fraction=fraction, client_optimizer=optax.sgd(RATE, momentum=0.5))
    shared = algorithm.broadcast(algorithm.init(jax.random.key(1)))
    first = jax.tree.map(lambda p: np.asarray(p, np.float64), algorithm.client_memory(shared))
    heads = {}

    def train(client_id, dataset, key, body):
        params = body | heads.get(client_id, first)
        batches = list(real_examples(dataset, key))
        velocity = plus(params, -1, params)
        for step, (x, y) in enumerate(batches):
            half = "linear_1" if step < int(fraction * len(batches) + 1e-6) else "linear"
            velocity[half] = plus(numpy_gradient(params, x, y)[half], 0.5, velocity[half])
            params = params | {half: plus(params[half], -RATE, velocity[half])}
        heads[client_id] = {"linear_1": params["linear_1"]}
        return {"linear": params["linear"]}

    body = numpy_rounds(start(algorithm), train)
    state, info = run(algorithm)
    federation.assert_trees_close(state.params, body)
    federation.assert_trees_close(kept(state), heads)
    assert np.all(np.asarray(info.clients["loss"])[np.asarray(info.clients["num_steps"]) > 0] > 0)


@pytest.mark.parametrize("cls", [algorithms.FedPer, algorithms.FedRep])
def test_the_server_neither_gets_nor_keeps_a_head(cls):
    algorithm = make(cls)
    state, info = run(algorithm)
    assert sorted(state.params) == ["linear"]
    body = fedsim.tree.num_bits(state.params)
    took_part = np.asarray(info.clients["num_steps"]) > 0
    assert info.clients["bits_up"].tolist() == (body * took_part).tolist()
    assert info.clients["bits_down"].tolist() == ((body + 64) * took_part).tolist()  # the round and the seed
    head = make(cls, head=lambda module, name: module == "linear")
    assert sorted(run(head)[0].params) == ["linear_1"]


def local_training(params, rounds):
    """Every client alone: each round its steps, on from where it was, from a common start."""
    alone, own = make(algorithms.FedAvg), {}
    for cohort in cohorts(federation.data(), rounds):
        for client_id, dataset, _ in cohort:
            if len(dataset):
                state = alone.init(jax.random.key(1))._replace(params=own.get(client_id, params))
                one = fedsim.Cohort(cohort.data, [cohort.data.index(client_id)], cohort.round, cohort.key)
                own[client_id] = alone.apply(state, one)[0].params
    return own


def test_apfl_of_alpha_0_is_the_global_model():
    algorithm = make(algorithms.APFL, alpha=0.0)
    state, _ = run(algorithm)
    shared = algorithm.broadcast(state.server)
    for memory in kept(state).values():
        federation.assert_trees_equal(algorithm.personal_params(shared, memory), state.params)


@pytest.mark.parametrize(
    ("cls", "settings", "rounds"),
    [
        # After one round, for later ones start new clients from a server that has moved.
        (algorithms.Ditto, {"lam": 0.0}, 1),
        (algorithms.APFL, {"alpha": 1.0}, 1),
        (algorithms.FedPer, {"head": lambda module, name: True}, 3),
    ],
)
def test_without_ties_clients_train_alone(cls, settings, rounds):
    algorithm = make(cls, **settings)
    shared = algorithm.broadcast(algorithm.init(jax.random.key(1)))
    params = algorithm.personal_params(shared, algorithm.client_memory(shared))
    state, _ = run(algorithm, rounds)
    shared = algorithm.broadcast(state.server)
    own = {client_id: algorithm.personal_params(shared, memory) for client_id, memory in kept(state).items()}
    federation.assert_trees_close(own, local_training(params, rounds))


@pytest.mark.parametrize("cls", [algorithms.FedPer, algorithms.FedRep])
def test_an_empty_head_is_fedavg(cls):
    settings = {"head_fraction": 0.0} if cls is algorithms.FedRep else {}
    nothing = make(cls, head=lambda module, name: False, **settings)
    fedavg = make(algorithms.FedAvg)
    population = federation.data()
    state, expected = nothing.init(jax.random.key(1)), fedavg.init(jax.random.key(1))
    for cohort in cohorts(population):
        (state, _), (expected, _) = nothing.apply(state, cohort), fedavg.apply(expected, cohort)
    federation.assert_trees_close(state.params, expected.params)


@pytest.mark.parametrize("variant", ["first_order", "hessian_free"])
def test_per_fedavg_follows_algorithm_1(variant):
    alpha, delta, parts = 0.2, 0.05, 2 if variant == "first_order" else 3
    batches = fedsim.Batches(size=7, epochs=2)
    algorithm = make(algorithms.PerFedAvg, alpha=alpha, delta=delta, variant=variant, batches=batches)

    def slope(w, x, y, part):
        own = slice(part, None, parts)
        return numpy_gradient(w, x[own], y[own]) if len(y[own]) else plus(w, -1, w)

    def train(client_id, dataset, key, w):
        for batch in real_examples(dataset, key, batches):
            step = g = slope(plus(w, -alpha, slope(w, *batch, 0)), *batch, 1)
            if variant == "hessian_free":
                ahead, behind = (slope(plus(w, d, g), *batch, 2) for d in (delta, -delta))
                step = plus(g, -alpha / (2 * delta), plus(ahead, -1, behind))
            w = plus(w, -RATE, step)
        return w

    w = numpy_rounds(start(algorithm), train)
    federation.assert_trees_close(run(algorithm)[0].params, w, atol=5e-6)


def test_hessian_free_is_near_the_exact_meta_gradient():
    """Of w -> f(w - alpha grad f(w)), on a batch of which all thirds are the same examples."""
    algorithm = make(algorithms.PerFedAvg, alpha=0.3, variant="hessian_free", batches=fedsim.Batches(size=12, shuffle=False))
    once = federation.data(sizes=(4,))
    population = fedsim.FederatedData.from_arrays({k: np.repeat(c, 3, axis=0) for k, c in once.columns.items()}, sizes=(12,))
    ((_, dataset, key),) = federation.cohort(population)
    (batch,) = dataset.batches(algorithm.batches, key)
    state = algorithm.init(jax.random.key(0))
    model = algorithm.model

    def meta(params):
        slope = jax.grad(model.train_loss)(params, batch)
        return model.train_loss(jax.tree.map(lambda p, g: p - 0.3 * g, params, slope), batch)

    after, _ = algorithm.apply(state, federation.cohort(population))
    expected = jax.tree.map(lambda p, g: p - RATE * g, state.params, jax.grad(meta)(state.params))
    federation.assert_trees_close(after.params, expected, rtol=1e-3, atol=1e-4)
    first = dataclasses.replace(algorithm, variant="first_order")
    farther, _ = first.apply(state, federation.cohort(population))
    gap = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (farther.params, expected)), strict=True))
    assert gap > 1e-3


@pytest.mark.parametrize("variant", ["first_order", "hessian_free"])
def test_per_fedavg_of_alpha_0_is_fedavg_on_a_part_of_every_batch(variant):
    """All parts of a batch are the same examples, so that a part's gradient is the batch's."""
    parts = 2 if variant == "first_order" else 3
    once = federation.data()
    columns = {name: np.repeat(column, parts, axis=0) for name, column in once.columns.items()}
    population = fedsim.FederatedData.from_arrays(columns, sizes=parts * once.sizes)
    batches = fedsim.Batches(size=4 * parts, shuffle=False)
    states = []
    for algorithm in (
        make(algorithms.PerFedAvg, alpha=0.0, variant=variant, batches=batches),
        make(algorithms.FedAvg, batches=batches),
    ):
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))[0])
    federation.assert_trees_close(*states)


def test_per_fedavg_is_evaluated_after_one_step():
    algorithm, data = make(algorithms.PerFedAvg, alpha=0.2), federation.data()
    state, _ = run(algorithm)
    found = fedsim.evaluate_personalized(algorithm, state, data, data, seed=3)
    step = make(algorithms.FedAvg, batches=fedsim.Batches(size=4, max_steps=1), client_optimizer=optax.sgd(0.2))
    federation.assert_trees_close(
        found, fedsim.evaluate_personalized(make(algorithms.FedAvg), state, data, data, fine_tune=step, seed=3)
    )
    assert found.overall != fedsim.evaluate(algorithm.model, state.params, data).overall


def test_per_fedavg_needs_batches_to_deal_out():
    algorithm = make(algorithms.PerFedAvg, variant="hessian_free", batches=fedsim.Batches(size=2))
    with pytest.raises(
        ValueError, match="Expected batches of at least 3 examples, which hessian_free deals out, got batches of 2"
    ):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


def test_reptile_is_fedavg_with_uniform_weights_and_a_server_rate():
    reptile = make(algorithms.Reptile, server_learning_rate=0.4)
    fedavg = make(algorithms.FedAvg, server_optimizer=optax.sgd(0.4), weighting="uniform")
    federation.assert_trees_close(run(reptile)[0].params, run(fedavg)[0].params)


def test_reptile_follows_algorithm_2_with_a_rate_that_falls():
    algorithm = make(algorithms.Reptile, server_learning_rate=0.8, decay_rounds=4)
    w = start(algorithm)
    for r, cohort in enumerate(cohorts(federation.data())):
        moves = []
        for _, dataset, key in cohort:
            x_i = w
            for x, y in real_examples(dataset, key):
                x_i = plus(x_i, -RATE, numpy_gradient(x_i, x, y))
            moves += [(1, plus(x_i, -1, w))] if len(dataset) else []
        w = plus(w, 0.8 * (1 - r / 4), weighted_mean(moves))
    federation.assert_trees_close(run(algorithm)[0].params, w)


def test_pfedme_follows_algorithm_1():
    lam, rate, steps = 3.0, 0.1, 4
    algorithm = make(
        algorithms.PFedMe,
        lam=lam,
        personal_learning_rate=rate,
        personal_steps=steps,
        server_optimizer=optax.sgd(0.7),
        client_optimizer=optax.sgd(0.05),
    )
    own = {}

    def train(client_id, dataset, key, w):
        theta, copy = w, w
        for x, y in real_examples(dataset, key):
            for _ in range(steps):
                theta = plus(theta, -rate, plus(numpy_gradient(theta, x, y), lam, plus(theta, -1, copy)))
            copy = plus(copy, -0.05 * lam, plus(copy, -1, theta))
        own[client_id] = theta
        return plus(plus(w, -0.7, w), 0.7, copy)  # (1 - beta) w + beta w_i

    w = numpy_rounds(start(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, w)
    federation.assert_trees_close(kept(state), own)


def test_limits_of_pfedme():
    """One local round of one gradient step of rate 1 / lam is a step of SGD; and so is any for a large lam, in the limit."""
    one_step = fedsim.Batches(size=4, max_steps=1)
    fedavg, _ = run(make(algorithms.FedAvg, batches=one_step))
    exact, _ = run(make(algorithms.PFedMe, lam=5.0, personal_learning_rate=0.2, personal_steps=1, batches=one_step))
    federation.assert_trees_close(exact.params, fedavg.params)
    gaps = []
    for lam in (30.0, 300.0):
        settings = {"lam": lam, "personal_learning_rate": 1 / lam, "personal_steps": 3}
        near, _ = run(make(algorithms.PFedMe, batches=one_step, **settings))
        away = fedsim.tree.squared_norm(fedsim.tree.subtract(near.params, fedavg.params))
        gaps.append(float(away / fedsim.tree.squared_norm(fedavg.params)) ** 0.5)
    assert gaps[1] < gaps[0] / 5 < 0.02


def numpy_loss(params, x, y):
    hidden = np.tanh(x @ params["linear"]["w"] + params["linear"]["b"])
    logits = hidden @ params["linear_1"]["w"] + params["linear_1"]["b"]
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])


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
    assert {client_id: int(j) for client_id, j in kept(state).items()} == chosen
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
    """Ten clients: in one half the label is the sign of x0, in the other the opposite."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 3)).astype(np.float32)
    flip = np.repeat(np.arange(10) % 2, 20)
    return fedsim.FederatedData.from_arrays({"x": x, "y": ((x[:, 0] > 0) ^ (flip > 0)).astype(np.int32)}, sizes=[20] * 10)


def test_clusters_are_found_from_a_start_that_is_spread_out():
    data = two_kinds_of_clients()
    algorithm = make(algorithms.HypCluster, client_optimizer=optax.sgd(0.5))
    state = algorithm.init_from(data, seed=3)
    for r in range(10):
        state, _ = algorithm.apply(state, federation.cohort(data, round=r))
    numbers = [int(number) for number in kept(state, data).values()]
    assert len(set(numbers[::2])) == len(set(numbers[1::2])) == 1
    assert numbers[0] != numbers[1]
    assert fedsim.evaluate_personalized(algorithm, state, data, data).overall["accuracy"] > 0.95
    one = jax.tree.map(lambda p: p[0], state.params)
    assert fedsim.evaluate(algorithm.model, one, data).overall["accuracy"] < 0.7


def test_the_start_of_clusters_is_trained_on_single_clients_and_spread():
    """The second is drawn from the other half of the clients nearly always: theirs are the losses."""
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


def test_a_model_that_went_astray_is_chosen_by_nobody():
    algorithm, population = make(algorithms.HypCluster), federation.data()
    state = algorithm.init(jax.random.key(0))
    broken = jax.tree.map(lambda p: p.at[0].set(jnp.nan), state.params)
    after, info = algorithm.apply(state._replace(params=broken), federation.cohort(population))
    assert {int(number) for number in kept(after).values()} == {1}
    assert int(info.num_dropped) == 0


def test_a_model_of_one_module_needs_to_be_told_its_head():
    algorithm = make(algorithms.FedPer, model=federation.model())
    with pytest.raises(ValueError, match="All parameters are in one module, 'linear'"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    [
        (algorithms.Ditto, {"lam": -1.0}, "Expected lam >= 0 and finite, got lam=-1.0"),
        (algorithms.Ditto, {"lam": float("nan")}, "Expected lam >= 0 and finite, got lam=nan"),
        (algorithms.APFL, {"alpha": -0.1}, "Expected 0 <= alpha <= 1, got alpha=-0.1"),
        (algorithms.FedPer, {"head": "linear"}, "Expected head to be a function"),
        (algorithms.FedRep, {"head_fraction": 1.1}, "Expected 0 <= head_fraction <= 1, got head_fraction=1.1"),
        (algorithms.PerFedAvg, {"alpha": -1.0}, "Expected alpha >= 0 and finite, got alpha=-1.0"),
        (algorithms.PerFedAvg, {"delta": 0.0}, "Expected delta > 0"),
        (algorithms.PerFedAvg, {"variant": "exact"}, "Expected variant to be 'first_order' or 'hessian_free'"),
        (algorithms.Reptile, {"server_learning_rate": -1.0}, "Expected server_learning_rate > 0"),
        (algorithms.Reptile, {"decay_rounds": 0}, "Expected decay_rounds >= 1, or None, got decay_rounds=0"),
        (algorithms.PFedMe, {"lam": 0.0}, "Expected lam > 0"),
        (algorithms.PFedMe, {"personal_learning_rate": 0.0}, "Expected personal_learning_rate > 0"),
        (algorithms.PFedMe, {"personal_steps": 0}, "Expected personal_steps >= 1, got personal_steps=0"),
        (algorithms.HypCluster, {"num_clusters": 0}, "Expected num_clusters >= 1, got num_clusters=0"),
    ],
)
def test_hyperparameters_out_of_range(cls, wrong, message):
    with pytest.raises(ValueError, match=message):
        make(cls, **wrong)
