"""Algorithms with personal models: agreement with NumPy, and special cases that equal other algorithms."""

import types

import federation
import haiku as hk
import jax
import numpy as np
import optax
import pytest
from network_models import (
    BATCHES,
    RATE,
    client_memories,
    cohorts,
    make,
    numpy_gradient,
    numpy_rounds,
    plus,
    real_examples,
    run,
    start,
)

import fedsim
from fedsim import algorithms


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
    federation.assert_trees_close(client_memories(state), own)


@pytest.mark.first(1)
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
    rows = client_memories(state)
    assert sorted(rows) == sorted(own)
    for client_id, (v, a) in own.items():
        federation.assert_trees_close(rows[client_id].params, v)
        np.testing.assert_allclose(rows[client_id].alpha, a, rtol=1e-5)
    assert (len({float(row.alpha) for row in rows.values()}) > 1) == adaptive


def test_fedper_averages_bodies_and_clients_store_heads():
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
    federation.assert_trees_close(client_memories(state), heads)


def test_lg_fedavg_averages_heads_and_clients_store_bodies():
    algorithm = make(algorithms.LGFedAvg)
    shared = algorithm.broadcast(algorithm.init(jax.random.key(1)))
    first = jax.tree.map(lambda p: np.asarray(p, np.float64), algorithm.client_memory(shared))
    bodies = {}

    def train(client_id, dataset, key, head):
        params = head | bodies.get(client_id, first)
        for x, y in real_examples(dataset, key):
            params = plus(params, -RATE, numpy_gradient(params, x, y))
        bodies[client_id] = {"linear": params["linear"]}
        return {"linear_1": params["linear_1"]}

    head = numpy_rounds(start(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, head)
    federation.assert_trees_close(client_memories(state), bodies)


@pytest.mark.first(1)
@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_fedbabu_averages_bodies_and_the_head_never_changes(decay):
    """Neither momentum nor weight decay moves the head."""
    optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(RATE, momentum=0.5))
    algorithm = make(algorithms.FedBABU, client_optimizer=optimizer)
    head = start(algorithm)["linear_1"]

    def train(client_id, dataset, key, w):
        velocity = plus(w["linear"], -1, w["linear"])
        for x, y in real_examples(dataset, key):
            slope = plus(numpy_gradient(w, x, y)["linear"], decay, w["linear"])
            velocity = plus(slope, 0.5, velocity)
            w = w | {"linear": plus(w["linear"], -RATE, velocity)}
        return w

    w = numpy_rounds(start(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, w)
    np.testing.assert_array_equal(state.params["linear_1"]["w"], head["w"])


def test_fedbn_averages_all_but_what_it_takes_for_a_normalization():
    """The biases of the first layer stand for a normalization, whose equations are those of the model."""
    algorithm, own = make(algorithms.FedBN, norm="linear/b"), {}

    def train(client_id, dataset, key, w):
        w = w | {"linear": {"w": w["linear"]["w"], "b": own.get(client_id, first)}}
        for x, y in real_examples(dataset, key):
            w = plus(w, -RATE, numpy_gradient(w, x, y))
        own[client_id] = w["linear"]["b"]
        return w | {"linear": {"w": w["linear"]["w"], "b": first}}

    first = start(algorithm)["linear"]["b"]
    w = numpy_rounds(start(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, w)
    kept = {name: memory[1].kept["linear"]["b"] for name, memory in client_memories(state).items()}
    federation.assert_trees_close(kept, own)


def test_fedala_follows_algorithm_1():
    """The upper layers are the output layer. The weights learn in batches of their own order, before training."""
    rate, one_pass = 2.0, BATCHES.one_pass()
    algorithm, own = make(algorithms.FedALA, weight_learning_rate=rate), {}

    def train(client_id, dataset, key, w):
        last, weights = own.get(client_id, (w, jax.tree.map(np.ones_like, w["linear_1"])))
        difference = plus(w["linear_1"], -1, last["linear_1"])

        def mixture():
            return w | {"linear_1": jax.tree.map(lambda y, d, u: y + d * u, last["linear_1"], difference, weights)}

        for x, y in real_examples(dataset, fedsim.rng.stream(key, "weights"), one_pass):
            slope = numpy_gradient(mixture(), x, y)["linear_1"]
            weights = jax.tree.map(lambda u, g, d: np.clip(u - rate * g * d, 0, 1), weights, slope, difference)
        params = mixture()
        for x, y in real_examples(dataset, key):
            params = plus(params, -RATE, numpy_gradient(params, x, y))
        own[client_id] = params, weights
        return params

    w = numpy_rounds(start(algorithm), train)
    state, _ = run(algorithm)
    federation.assert_trees_close(state.params, w)
    memories = client_memories(state)
    federation.assert_trees_close(
        {name: row.params for name, row in memories.items()}, {name: p for name, (p, _) in own.items()}
    )
    for name, (_, weights) in own.items():
        federation.assert_trees_close(memories[name].weights["linear_1"], weights)
    assert min(weights["w"].min() for _, weights in own.values()) < 0.9


def test_heterofl_follows_algorithm_1():
    """Clients at odd positions train a network with the first three of five hidden units, which is one of its own in NumPy."""
    algorithm = make(algorithms.HeteroFL, widths=(1.0, 0.5))

    def corner(params, units):
        (w, b), (v, c) = ((params[name]["w"], params[name]["b"]) for name in ("linear", "linear_1"))
        return {"linear": {"w": w[:, :units], "b": b[:units]}, "linear_1": {"w": v[:units], "b": c}}

    w = start(algorithm)
    for cohort in cohorts(federation.data()):
        total, held = (jax.tree.map(np.zeros_like, w) for _ in range(2))
        for client_id, dataset, key in cohort:
            if not len(dataset):
                continue
            units = 3 if int(client_id.removeprefix("client")) % 2 else 5
            params = corner(w, units)
            for x, y in real_examples(dataset, key):
                params = plus(params, -RATE, numpy_gradient(params, x, y))
            for of_total, of_held, trained in zip(*map(jax.tree.leaves, (total, held, params)), strict=True):
                place = tuple(slice(size) for size in trained.shape)
                of_total[place] += len(dataset) * trained
                of_held[place] += len(dataset)
        w = jax.tree.map(lambda old, sum, weight: np.where(weight > 0, sum / np.maximum(weight, 1), old), w, total, held)
    state, info = run(algorithm)
    federation.assert_trees_close(state.params, w)
    assert set(np.asarray(info.clients["num_parameters"]).tolist()) <= {44, 3 * 3 + 3 + 3 * 4 + 4, 0}


def test_heterofl_does_not_move_what_no_client_of_the_cohort_has_by_a_compressor_s_errors():
    """Rotated, rounded and rotated back, zeros may have become other numbers, as the ones of this aggregate."""
    algorithm = make(algorithms.HeteroFL, widths=(1.0, 0.5))
    before = algorithm.init(jax.random.key(0))
    arrived = fedsim.aggregators.WithAux(jax.tree.map(np.ones_like, before.params), np.float32([0, 1]))
    after = algorithm.server_update(before, arrived, None)
    moved = jax.tree.map(lambda a, b: np.asarray(a != b), before.params, after.params)
    assert moved["linear"]["b"].tolist() == [True, True, True, False, False]
    assert moved["linear_1"]["w"].all(axis=1).tolist() == [True, True, True, False, False]


def test_sub_networks_have_as_many_units_as_the_decimal_width_says():
    """In floating point, 0.55 * 200 is slightly above 110."""

    def network(examples):
        hidden = hk.Linear(200)(examples["x"])
        return hk.Linear(federation.NUM_CLASSES)(jax.nn.relu(hidden))

    model = fedsim.Model.from_haiku(hk.transform(network), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)
    algorithm = make(algorithms.HeteroFL, model=model, widths=(0.55, 1e-6))
    params = model.init(jax.random.key(0))
    assert [int(algorithm.masks(params, level)["linear"]["b"].sum()) for level in (0, 1)] == [110, 1]


def test_heterofl_refuses_noise_that_it_would_divide():
    noise = fedsim.aggregators.GaussianMechanism(1.0, clip=1.0, denominator=4)
    with pytest.raises(ValueError, match="^Expected an aggregator without noise with HeteroFL, got GaussianMechanism: "):
        run(make(algorithms.HeteroFL, aggregator=noise, weighting="uniform"))


def test_noise_and_weight_decay_of_the_server_do_not_change_the_head_of_fedbabu():
    noise = fedsim.aggregators.GaussianMechanism(1.0, clip=1.0, denominator=4)
    decay = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1.0))
    algorithm = make(algorithms.FedBABU, aggregator=noise, weighting="uniform", server_optimizer=decay)
    before, after = start(algorithm), run(algorithm)[0].params
    np.testing.assert_array_equal(before["linear_1"]["w"], after["linear_1"]["w"])
    assert np.any(np.asarray(before["linear"]["w"]) != np.asarray(after["linear"]["w"]))


def test_sub_networks_have_the_first_channels_at_each_place_of_flattened_images():
    def network(examples):
        x = fedsim.models.Conv2D(4, 3, padding="SAME")(examples["x"])
        return hk.Linear(federation.NUM_CLASSES)(jax.nn.relu(x).reshape(len(x), -1))

    features = {"x": jax.ShapeDtypeStruct((2, 2, 1), np.float32), "y": federation.FEATURES["y"]}
    model = fedsim.Model.from_haiku(hk.transform(network), features=features, num_classes=federation.NUM_CLASSES)
    algorithm = make(algorithms.HeteroFL, model=model, widths=(1.0, 0.5))
    params = model.init(jax.random.key(0))
    masks = {name: values["w"] for name, values in algorithm.masks(params, 1).items()}
    convolution, linear = masks["conv2_d" if "conv2_d" in masks else next(iter(masks))], masks["linear"]
    assert convolution.reshape(-1, 4).tolist() == [[1, 1, 0, 0]] * 9
    assert linear[:, 0].tolist() == [1, 1, 0, 0] * 4


def test_fedbn_needs_a_normalization():
    algorithm = make(algorithms.FedBN)
    with pytest.raises(ValueError, match=r"FedBN needs a model with normalizations, and no parameter is one by norm='\*\[Nn"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


@pytest.mark.first(1)
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9, 1.0])
def test_fedrep_follows_algorithm_1(fraction):
    """The optimizer has momentum. Each half has its own momentum, from its own steps, and its own rate."""
    optimizer = fedsim.transfer.with_rates(optax.sgd(RATE, momentum=0.5), {"linear/*": 0.6, "linear_1/*": 0.9})
    algorithm = make(algorithms.FedRep, head_fraction=fraction, client_optimizer=optimizer)
    shared = algorithm.broadcast(algorithm.init(jax.random.key(1)))
    first = jax.tree.map(lambda p: np.asarray(p, np.float64), algorithm.client_memory(shared))
    heads = {}

    def train(client_id, dataset, key, body):
        params = body | heads.get(client_id, first)
        batches = list(real_examples(dataset, key))
        velocity = plus(params, -1, params)
        for step, (x, y) in enumerate(batches):
            half, rate = ("linear_1", 0.9) if step < int(fraction * len(batches) + 1e-6) else ("linear", 0.6)
            velocity[half] = plus(numpy_gradient(params, x, y)[half], 0.5, velocity[half])
            params = params | {half: plus(params[half], -RATE * rate, velocity[half])}
        heads[client_id] = {"linear_1": params["linear_1"]}
        return {"linear": params["linear"]}

    body = numpy_rounds(start(algorithm), train)
    state, info = run(algorithm)
    federation.assert_trees_close(state.params, body)
    federation.assert_trees_close(client_memories(state), heads)
    assert np.all(np.asarray(info.clients["loss"])[np.asarray(info.clients["num_steps"]) > 0] > 0)


@pytest.mark.first(1)
@pytest.mark.parametrize("cls", [algorithms.FedPer, algorithms.FedRep])
def test_the_server_neither_receives_nor_stores_a_head(cls):
    algorithm = make(cls)
    state, info = run(algorithm)
    assert sorted(state.params) == ["linear"]
    body = fedsim.tree.num_bits(state.params)
    took_part = np.asarray(info.clients["num_steps"]) > 0
    assert info.clients["bits_up"].tolist() == (body * took_part).tolist()
    assert info.clients["bits_down"].tolist() == ((body + 64) * took_part).tolist()  # 64 more bits for the round and the seed
    head = make(cls, head=lambda module, name: module == "linear")
    assert sorted(run(head)[0].params) == ["linear_1"]


def local_training(params, rounds):
    """Trains each client alone. In each round a client continues from its own parameters, which start from ``params``."""
    alone, own = make(algorithms.FedAvg), {}
    for cohort in cohorts(federation.data(), rounds):
        for client_id, dataset, _ in cohort:
            if len(dataset):
                state = alone.init(jax.random.key(1))._replace(params=own.get(client_id, params))
                one = fedsim.Cohort(cohort.data, [cohort.data.index(client_id)], cohort.round, cohort.key)
                own[client_id] = alone.apply(state, one)[0].params
    return own


def personal_params(algorithm, shared, memory):
    """Returns the personal parameters of a client with this memory, which is all that these algorithms need of a client."""
    return algorithm.personal_params(shared, types.SimpleNamespace(memory=memory))


def test_apfl_with_alpha_zero_is_the_global_model():
    algorithm = make(algorithms.APFL, alpha=0.0)
    state, _ = run(algorithm)
    shared = algorithm.broadcast(state.server)
    for memory in client_memories(state).values():
        federation.assert_trees_equal(personal_params(algorithm, shared, memory), state.params)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("cls", "settings", "rounds"),
    [
        # Only one round, because the server state changes and new clients of later rounds would start from it.
        (algorithms.Ditto, {"lam": 0.0}, 1),
        (algorithms.APFL, {"alpha": 1.0}, 1),
        (algorithms.FedPer, {"head": lambda module, name: True}, 3),
    ],
)
def test_without_regularization_or_sharing_clients_train_alone(cls, settings, rounds):
    algorithm = make(cls, **settings)
    shared = algorithm.broadcast(algorithm.init(jax.random.key(1)))
    params = personal_params(algorithm, shared, algorithm.client_memory(shared))
    state, _ = run(algorithm, rounds)
    shared = algorithm.broadcast(state.server)
    own = {client_id: personal_params(algorithm, shared, memory) for client_id, memory in client_memories(state).items()}
    federation.assert_trees_close(own, local_training(params, rounds))


@pytest.mark.first(1)
@pytest.mark.parametrize("cls", [algorithms.FedPer, algorithms.FedRep])
def test_fedper_and_fedrep_with_an_empty_head_are_fedavg(cls):
    settings = {"head_fraction": 0.0} if cls is algorithms.FedRep else {}
    nothing = make(cls, head=lambda module, name: False, **settings)
    fedavg = make(algorithms.FedAvg)
    population = federation.data()
    state, expected = nothing.init(jax.random.key(1)), fedavg.init(jax.random.key(1))
    for cohort in cohorts(population):
        (state, _), (expected, _) = nothing.apply(state, cohort), fedavg.apply(expected, cohort)
    federation.assert_trees_close(state.params, expected.params)


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
    federation.assert_trees_close(client_memories(state), own)


@pytest.mark.slow
def test_pfedme_reduces_to_sgd():
    """A local round with one gradient step of rate 1 / lam is a step of SGD, and so is any in the limit of a large lam."""
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


def test_a_model_with_one_module_needs_an_explicit_head():
    for cls in (algorithms.FedPer, algorithms.FedBABU):
        algorithm = make(cls, model=federation.model())
        with pytest.raises(ValueError, match="All parameters are in one module, 'linear'"):
            algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


@pytest.mark.parametrize(
    ("cls", "wrong", "message"),
    [
        (algorithms.Ditto, {"lam": -1.0}, "Expected lam >= 0 and finite, got lam=-1.0"),
        (algorithms.Ditto, {"lam": float("nan")}, "Expected lam >= 0 and finite, got lam=nan"),
        (algorithms.APFL, {"alpha": -0.1}, "Expected 0 <= alpha <= 1, got alpha=-0.1"),
        (algorithms.FedPer, {"head": "linear"}, "Expected head to be a function"),
        (algorithms.FedBABU, {"head": "linear"}, "Expected head to be a function"),
        (algorithms.FedALA, {"head": "linear"}, "Expected head to be a function"),
        (algorithms.FedRep, {"head_fraction": 1.1}, "Expected 0 <= head_fraction <= 1, got head_fraction=1.1"),
        (algorithms.PerFedAvg, {"alpha": -1.0}, "Expected alpha >= 0 and finite, got alpha=-1.0"),
        (algorithms.PerFedAvg, {"delta": 0.0}, "Expected delta > 0"),
        (algorithms.PerFedAvg, {"variant": "exact"}, "Expected variant to be 'first_order' or 'hessian_free'"),
        (algorithms.Reptile, {"server_learning_rate": -1.0}, "Expected server_learning_rate > 0"),
        (algorithms.Reptile, {"decay_rounds": 0}, "Expected decay_rounds >= 1, or None, got decay_rounds=0"),
        (algorithms.PFedMe, {"lam": 0.0}, "Expected lam > 0"),
        (algorithms.PFedMe, {"personal_learning_rate": 0.0}, "Expected personal_learning_rate > 0"),
        (algorithms.PFedMe, {"personal_steps": 0}, "Expected personal_steps >= 1, got personal_steps=0"),
        (algorithms.HeteroFL, {"widths": ()}, r"Expected widths to be a tuple of shares, got widths=\(\)"),
        (algorithms.HeteroFL, {"widths": (1.0, 1.5)}, "Expected 0 < widths <= 1, got widths=1.5"),
        (algorithms.HypCluster, {"num_clusters": 0}, "Expected num_clusters >= 1, got num_clusters=0"),
    ],
)
def test_hyperparameters_out_of_range_raise_an_error(cls, wrong, message):
    with pytest.raises(ValueError, match=message):
        make(cls, **wrong)


def test_a_constant_alpha_of_apfl_does_not_contribute_to_the_gradient_norm():
    """A step with a clipped gradient has the length of the bound, and all of it belongs to the personal model."""
    population, bound = federation.data(), 1e-3
    optimizer = optax.chain(optax.clip_by_global_norm(bound), optax.sgd(1.0))
    algorithm = make(algorithms.APFL, client_optimizer=optimizer, batches=fedsim.Batches(size=12, steps=1))
    state, before = algorithm.init(jax.random.key(1)), None
    for r in range(4):
        state, _ = algorithm.apply(state, federation.cohort(population, round=r))
        (rows, *_), seen = federation.plain(state).clients
        if before is not None:
            moved = jax.tree.map(lambda a, b: a - b, rows.params, before.params)
            lengths = np.sqrt(sum(np.sum(np.square(x.reshape(len(seen), -1)), 1) for x in jax.tree.leaves(moved)))
            np.testing.assert_allclose(lengths[seen], bound, rtol=1e-3)
        before = rows


class Broken(algorithms.APFL):
    """APFL with personal parameters that are NaN."""

    def client_memory(self, shared):
        own = super().client_memory(shared)
        return own._replace(params=jax.tree.map(lambda v: v * np.nan, own.params))


@pytest.mark.first(1)
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.filterwarnings("ignore:.*did not reach the server")
def test_a_client_whose_personal_model_diverges_is_dropped(adaptive):
    algorithm = make(Broken, adaptive=adaptive)
    state, info = run(algorithm)
    assert info.num_dropped > 0
    assert info.num_aggregated == 0
    assert np.all(np.isfinite(info.clients["loss"]))  # the loss of the copy of the global model
    federation.assert_trees_close(state.params, start(algorithm))
