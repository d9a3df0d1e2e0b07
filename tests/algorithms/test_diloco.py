"""Compares DiLoCo with a plain loop over workers, in optax alone, which uses nothing of fedsim but the indices of batches."""

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import rng

STEPS, ROUNDS = 3, 4
INNER = optax.adamw(optax.cosine_decay_schedule(0.1, STEPS * ROUNDS), weight_decay=0.1)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
BATCHES = fedsim.Batches(size=4, steps=STEPS)


@pytest.fixture(autouse=True, scope="module")
def _dtype_promotion():
    with jax.numpy_dtype_promotion("standard"):  # which optax.adamw requires
        yield


def diloco(cls=fedsim.algorithms.DiLoCo, **options):
    settings = {"model": federation.model(), "client_optimizer": INNER, "batches": BATCHES, "execution": fedsim.Jit()}
    return cls(**settings | options)


def run(algorithm, population, rounds=ROUNDS):
    state, infos = algorithm.init(jax.random.key(1)), []
    for cohort in (federation.cohort(population, round=r) for r in range(rounds)):
        state, info = algorithm.apply(state, cohort)
        infos.append(info)
    return federation.plain(state), jax.device_get(infos)


def loss(params, x, y):
    logits = x @ params["linear"]["w"] + params["linear"]["b"][None]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


class PlainWorkers:
    """Workers with data of their own, which they read in the order of their first round without an end."""

    def __init__(self, population, params, loss=loss):
        self.cohort = federation.cohort(population)
        self.data = [dataset for _, dataset, _ in self.cohort]
        self.words = [rng.words(rng.stream(key, "shuffle")) for _, _, key in self.cohort]
        self.states, self.steps = [INNER.init(params) for _ in self.data], [0] * len(self.data)
        self.gradient = jax.jit(jax.grad(loss))

    def step(self, i, params):
        """Takes a step of worker i from these parameters."""
        index, _ = BATCHES.indices(self.words[i], len(self.data[i]), self.steps[i])
        x, y = (self.data[i].examples[name][np.asarray(index)] for name in ("x", "y"))
        updates, self.states[i] = INNER.update(self.gradient(params, x, y), self.states[i], params)
        self.steps[i] += 1
        return optax.apply_updates(params, updates)


def mean(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def test_diloco_is_a_plain_loop_over_workers():
    population = federation.data(sizes=(7, 12, 5))
    state, _ = run(diloco(), population)
    params = diloco().init(jax.random.key(1)).params
    workers, outer = PlainWorkers(population, params), OUTER.init(params)
    for _ in range(ROUNDS):
        gradients = []
        for i in range(3):
            own = params
            for _ in range(STEPS):
                own = workers.step(i, own)
            gradients.append(jax.tree.map(jnp.subtract, params, own))
        updates, outer = OUTER.update(mean(gradients), outer, params)
        params = optax.apply_updates(params, updates)
    federation.assert_trees_close(federation.plain(state.server.params), jax.device_get(params), rtol=1e-5, atol=1e-6)


def test_one_worker_whose_server_adds_its_movement_trains_centrally_whatever_the_number_of_steps():
    population = federation.data(sizes=(10,))
    server = {"server_learning_rate": 1.0, "momentum": 0.0}
    few, _ = run(diloco(**server), population)
    many, _ = run(diloco(**server, batches=fedsim.Batches(size=4, steps=STEPS * ROUNDS)), population, 1)
    federation.assert_trees_close(few.server.params, many.server.params)


def test_fine_tuning_is_the_next_round_of_a_worker():
    """It continues with the state of its optimizer and with the examples where it has stopped."""
    algorithm = diloco(client_optimizer=optax.sgd(0.1, momentum=0.9), server_learning_rate=1.0, momentum=0.0)
    population = federation.data(sizes=(7,))
    before, _ = algorithm.apply(algorithm.init(jax.random.key(1)), federation.cohort(population))
    after, _ = algorithm.apply(before, federation.cohort(population, round=1))
    expected = fedsim.evaluate(algorithm.model, after.params, population).overall["loss"]
    found = fedsim.evaluate_personalized(algorithm, before, population, population, fine_tune=algorithm).overall["loss"]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_order_of_examples_continues_in_any_execution():
    population = federation.data(sizes=(7, 0, 5))
    expected, infos = run(diloco(), population, 2)
    for execution in (fedsim.Pmap(devices=2, memory="stream"), fedsim.Debug()):
        state, others = run(diloco(execution=execution), population, 2)
        federation.assert_trees_close(state, expected)
        federation.assert_trees_close(others, infos)


@pytest.mark.slow
def test_one_fragment_without_delay_is_diloco_bit_for_bit():
    population = federation.data(sizes=(7, 0, 5))
    expected, infos = run(diloco(), population)
    state, others = run(diloco(fedsim.algorithms.StreamingDiLoCo), population)
    federation.assert_trees_equal(state.server.params, expected.server.params)
    federation.assert_trees_equal(others, infos)


def network():
    layers = ["first", "second", "third"]

    def forward(examples):
        x = examples["x"]
        for name in layers[:-1]:
            x = jax.nn.tanh(hk.Linear(5, name=name)(x))
        return hk.Linear(federation.NUM_CLASSES, name=layers[-1])(x)

    return fedsim.Model.from_haiku(hk.transform(forward), features=federation.FEATURES, num_classes=federation.NUM_CLASSES)


def network_loss(params, x, y):
    for name in ("first", "second"):
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"][None])
    logits = x @ params["third"]["w"] + params["third"]["b"][None]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


STREAMING = {"model": network(), "batches": fedsim.Batches(size=4, steps=8), "delay": 2, "alpha": 0.25}


def test_the_norm_of_an_update_in_fragments_is_that_of_all_fragments():
    """A server that takes the parameters of its only worker moves by each fragment's update."""
    algorithm = diloco(
        fedsim.algorithms.StreamingDiLoCo,
        client_optimizer=optax.sgd(0.1),
        fragment_names=["linear/w", "linear/b"],
        server_learning_rate=1.0,
        momentum=0.0,
        update_norms=True,
    )
    start = algorithm.init(jax.random.key(1))
    state, info = algorithm.apply(start, federation.cohort(federation.data(sizes=(7,))))
    moved = fedsim.tree.subtract(state.params, start.params)["linear"]
    parts = [float(np.sum(np.square(moved[name]))) for name in ("w", "b")]
    assert info.clients["update_norm"].tolist() == [pytest.approx(np.sqrt(sum(parts)), rel=1e-5)]
    assert min(parts) > 1e-4


@pytest.mark.slow
def test_fragments_with_a_delay_are_a_plain_loop_over_steps():
    population = federation.data(sizes=(7, 12))
    fragments = (("first", "third"), ("second",))  # strided
    algorithm = diloco(fedsim.algorithms.StreamingDiLoCo, **STREAMING, fragments=2, strided=True)
    state, infos = run(algorithm, population, 2)
    params = algorithm.init(jax.random.key(1)).params
    workers = PlainWorkers(population, params, network_loss)
    own, outer = [params, params], [OUTER.init({name: params[name] for name in fragment}) for fragment in fragments]
    in_flight = []  # fragments that the workers will receive, with the step after which they do
    for step in range(1, 17):
        own = [workers.step(i, each) for i, each in enumerate(own)]
        for fragment in [fragment for due, fragment in in_flight if due == step]:
            own = [
                each | {n: jax.tree.map(lambda x, g: 0.25 * x + 0.75 * g, each[n], params[n]) for n in fragment} for each in own
            ]
        if step % 4 == 0:  # every four steps one of the two, so each in eight
            p = (step // 4 - 1) % 2
            moved = [{n: jax.tree.map(jnp.subtract, params[n], each[n]) for n in fragments[p]} for each in own]
            part = {n: params[n] for n in fragments[p]}
            updates, outer[p] = OUTER.update(mean(moved), outer[p], part)
            params = params | optax.apply_updates(part, updates)
            in_flight.append((step + 2, fragments[p]))
    federation.assert_trees_close(state.server.params, jax.device_get(params), rtol=1e-4, atol=1e-6)
    size = sum(x.size for x in jax.tree.leaves(params))
    for info in infos:  # each fragment once, and the number of the round with each
        assert info.clients["bits_up"].tolist() == [32 * size] * 2
        assert info.clients["bits_down"].tolist() == [32 * size + 2 * 32] * 2
        assert info.clients["num_steps"].tolist() == [8, 8]


@pytest.mark.slow
def test_fragments_have_rows_of_stacked_layers():
    """One worker whose server takes its parameters trains centrally, and a fragment is what it was when it was sent."""
    model = fedsim.models.decoder(11, length=5, width=8, layers=2, heads=2, hidden=12)
    draw = np.random.default_rng(0)
    columns = {name: draw.integers(0, 11, [9, 5]).astype(np.int32) for name in ("x", "y")}
    population = fedsim.FederatedData.from_arrays(columns | {"document": np.ones([9, 5], np.int32)}, sizes=[9])
    options = {"model": model, "server_learning_rate": 1.0, "momentum": 0.0}
    steps = [fedsim.Batches(size=4, steps=count) for count in (2, 4)]

    def after_a_round(cls, **own):
        algorithm = diloco(cls, **options, **own)
        state, info = algorithm.apply(algorithm.init(jax.random.key(1)), fedsim.Cohort.of(population, ["0"]))
        return federation.plain(state.server.params), info

    halfway, whole = (after_a_round(fedsim.algorithms.DiLoCo, batches=each)[0] for each in steps)
    found, info = after_a_round(fedsim.algorithms.StreamingDiLoCo, batches=steps[1], fragments=2)
    expected = {}
    for name in whole:
        source = {True: halfway, False: whole}[name == "embedding"]
        stacked = name.startswith("layers/")
        expected[name] = {
            key: np.stack([halfway[name][key][0], whole[name][key][1]]) if stacked else source[name][key] for key in whole[name]
        }
    federation.assert_trees_close(found, expected)
    assert info.clients["bits_up"].tolist() == [32 * sum(x.size for x in jax.tree.leaves(whole))]


@pytest.mark.slow
def test_fragments_in_any_execution_and_of_workers_that_were_absent():
    population, results = federation.data(sizes=(7, 0, 5)), []
    compressed = fedsim.aggregators.Compressed(fedsim.compressors.QSGD(levels=7))
    options = STREAMING | {"fragment_names": ["first/*", ["second/*", "third/*"]], "aggregator": compressed}
    for execution in (fedsim.Jit(), fedsim.Pmap(devices=2), fedsim.Debug()):
        algorithm = diloco(fedsim.algorithms.StreamingDiLoCo, **options, execution=execution)
        state = algorithm.init(jax.random.key(1))
        for round, ids in enumerate([["client0", "client2"], ["client0"], ["client0", "client2"]]):
            state, info = algorithm.apply(state, fedsim.Cohort.of(population, ids, round=round))
        results.append((federation.plain(state), jax.device_get(info)))
    for other in results[1:]:
        federation.assert_trees_close(other, results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 4}, "Expected a delay below the steps between two fragments, 8 / 2, got delay=4"),
        ({"fragments": 4}, "Expected fragments <= 3, the number of layers, got fragments=4: use fewer"),
        (
            {"fragments": 1, "fragment_names": ["first/*", "secnd/*"]},
            "There is no parameter 'secnd/\\*' for a fragment. Did you mean",
        ),
        (
            {"fragments": 1, "fragment_names": ["first/*", "*"]},
            "Expected fragments that have each parameter once, got 'first/b' in 2 of",
        ),
        ({"batches": fedsim.Batches(size=4)}, "Expected batches with steps for 2 fragments and delay=2"),
        ({"fragment_names": ["*"]}, "Expected fragments or fragment_names, got fragments=2"),
        ({"staleness": fedsim.Staleness(bound=2)}, "Expected no staleness"),
    ],
)
def test_what_cannot_be_synchronized_in_fragments_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        diloco(fedsim.algorithms.StreamingDiLoCo, **STREAMING | {"fragments": 2} | options)


def test_fragments_of_a_round_without_workers_have_noise_where_it_hides_that():
    mechanism = fedsim.aggregators.GaussianMechanism(1.0, clip=1.0, denominator=2)
    algorithm = diloco(fedsim.algorithms.StreamingDiLoCo, client_optimizer=optax.sgd(0.1), aggregator=mechanism)
    start = algorithm.init(jax.random.key(1))
    empty = fedsim.Cohort(federation.data(), np.zeros(0, np.int32), 0, jax.random.key(0), slots=2)
    state, info = algorithm.apply(start, empty)
    assert int(info.num_aggregated) == 0
    assert np.abs(state.params["linear"]["w"] - start.params["linear"]["w"]).max() > 0.1
