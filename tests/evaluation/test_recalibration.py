"""Recalibration of running statistics, against NumPy."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import models

FEATURES = {"x": jax.ShapeDtypeStruct((4,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
SIZE = 4


def network(examples, is_training, norm=None):
    hidden = (norm or models.BatchNorm(name="norm"))(hk.Linear(8, name="body")(examples["x"]), is_training)
    return hk.Linear(3, name="head")(jax.nn.relu(hidden))


def make_model(function=network, **options):
    kwargs = {"train_kwargs": {"is_training": True}, "eval_kwargs": {"is_training": False}}
    return fedsim.Model.from_haiku(hk.transform_with_state(function), features=FEATURES, **kwargs, **options)


def population(sizes, seed, names=None):
    draw, n = np.random.default_rng(seed), sum(sizes)
    columns = {"x": draw.normal(size=(n, 4)).astype(np.float32), "y": draw.integers(0, 3, n).astype(np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=sizes)
    return fedsim.FederatedData(data.columns, data.offsets, names) if names else data


TRAIN = population([7, 1, 12, 5], 0)  # the last batches of clients 0 and 3 have 3 examples and 1
TEST = population([3, 2, 4, 6, 2], 1, ["0", "1", "2", "3", "new"])


def fedavg(model, **options):
    settings = {"client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=SIZE, shuffle=False)}
    return fedsim.algorithms.FedAvg(model=model, **(settings | options))


def trained(algorithm):
    state = algorithm.init(jax.random.key(0))
    return algorithm.apply(state, fedsim.UniformSampler(TRAIN, clients=4, seed=0).cohort(0))[0]


def by_hand(whole, client):
    """Returns the mean loss of a client of `TEST` with its own statistics, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), whole)
    mean, var = p["norm"]["mean"], p["norm"]["var"]
    if client < TRAIN.num_clients:
        x = TRAIN.columns["x"][TRAIN.offsets[client] : TRAIN.offsets[client + 1]]
        batches = [(x[start : start + SIZE] @ p["body"]["w"] + p["body"]["b"]) for start in range(0, len(x), SIZE)]
        mean = np.average([batch.mean(0) for batch in batches], axis=0, weights=[len(batch) for batch in batches])
        several = [batch for batch in batches if len(batch) > 1]  # One example has no variance.
        if several:
            var = np.average([batch.var(0, ddof=1) for batch in several], axis=0, weights=[len(batch) for batch in several])
    rows = slice(TEST.offsets[client], TEST.offsets[client + 1])
    x = TEST.columns["x"][rows] @ p["body"]["w"] + p["body"]["b"]
    x = (x - mean) / np.sqrt(var + 1e-5) * p["norm"]["scale"] + p["norm"]["offset"]
    logits = np.maximum(x, 0) @ p["head"]["w"] + p["head"]["b"]
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), TEST.columns["y"][rows]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statistics", "execution"),
    [
        ("average", fedsim.Jit()),
        ("client", fedsim.Pmap(devices=2, lanes=2)),
        ("average", fedsim.Debug()),
    ],
)
def test_each_client_has_the_statistics_of_its_examples(statistics, execution):
    """The parameters are the server's. A client that is not in the training data has the server's statistics, too."""
    algorithm = fedavg(make_model(statistics=statistics))
    state = trained(algorithm)
    found = fedsim.evaluate_personalized(algorithm, state, TRAIN, TEST, recalibrate=True, execution=execution)
    expected = [by_hand(state.params, client) for client in range(5)]
    np.testing.assert_allclose(found.clients["loss"].result(), expected, rtol=1e-4)


@pytest.mark.slow
def test_statistics_are_those_of_the_tuned_parameters():
    algorithm = fedavg(make_model())
    state = trained(algorithm)
    options = {"fine_tune": fedavg(algorithm.model, batches=fedsim.Batches(size=SIZE, epochs=3, shuffle=False))}
    one = fedsim.Cohort.of(TRAIN, ["2"])
    tuned = options["fine_tune"].apply(state, one)[0].params
    found = fedsim.evaluate_personalized(algorithm, state, TRAIN, TEST, recalibrate=True, **options)
    np.testing.assert_allclose(found.clients["loss"].result()[2], by_hand(tuned, 2), rtol=1e-4)


def test_recalibration_that_cannot_be_right_is_refused():
    def evaluate(model, **options):
        algorithm = fedavg(model, **options)
        state = algorithm.init(jax.random.key(0))
        fedsim.evaluate_personalized(algorithm, state, TRAIN, TEST, recalibrate=True)

    with pytest.raises(ValueError, match="got recalibrate=True for one without"):
        evaluate(make_model(statistics="frozen"))

    def largest(x, is_training):
        most = hk.get_state("most", x.shape[1:], init=jnp.zeros)
        if is_training:
            hk.set_state("most", jnp.maximum(most, jnp.max(x, axis=0)))
        return x - most[None]

    with pytest.raises(ValueError, match=r"averages over batches, .*, got ~/most, which is none"):
        evaluate(make_model(lambda examples, is_training: network(examples, is_training, largest)))

    def plain(x, is_training):
        mean = hk.get_state("mean", x.shape[1:], init=jnp.zeros)
        if is_training:
            hk.set_state("mean", 0.9 * mean + 0.1 * jnp.mean(x, axis=0))
        return x - mean[None]

    model = make_model(lambda examples, is_training: network(examples, is_training, plain))
    with pytest.raises(ValueError, match=r"filled up with padding, .*set drop_remainder=True"):
        evaluate(model)

    # Fine-tuning is checked as a round of it is, and the padding is that of the examples that have arrived.
    algorithm = fedavg(model, batches=fedsim.Batches(size=SIZE, drop_remainder=True))
    whole, state = population([8, 4], 2), algorithm.init(jax.random.key(0))
    tuned = functools.partial(fedsim.evaluate_personalized, algorithm, state, whole, whole)
    with pytest.raises(ValueError, match=r"The last batch of 3 of 4 clients is filled up with padding"):
        fedsim.evaluate_personalized(algorithm, state, TRAIN, TRAIN, fine_tune=fedavg(model))
    with pytest.raises(ValueError, match="Expected client_optimizer"):
        tuned(fine_tune=fedavg(model, client_optimizer=optax.sgd(-0.1)))
    partial = fedavg(model)
    for options in ({"fine_tune": partial}, {"fine_tune": partial, "recalibrate": True}):
        assert tuned(**options, rows=[[0, 8], [0, 4]]).overall == tuned(**options).overall
        with pytest.raises(ValueError, match="The last batch of 1 of 2 clients is filled up with padding"):
            tuned(**options, rows=[[0, 8], [0, 3]])


@pytest.mark.filterwarnings("ignore:1 of 2 clients, the first with 3 examples, can never take a step")
def test_the_step_of_per_fedavg_drops_partial_batches_as_a_round_does():
    """A client with fewer examples than a batch then takes no step."""
    model, data = make_model(), population([3, 4], 3)
    state = fedavg(model).init(jax.random.key(0))

    def losses(drop):
        batches = fedsim.Batches(size=SIZE, shuffle=False, drop_remainder=drop)
        settings = {"model": model, "client_optimizer": optax.sgd(0.1), "batches": batches, "alpha": 0.5}
        algorithm = fedsim.algorithms.PerFedAvg(**settings)
        return fedsim.evaluate_personalized(algorithm, state, data, data).clients["loss"].result()

    dropped, kept = losses(True), losses(False)
    server = fedsim.evaluate(model, state.params, data).clients["loss"].result()
    assert dropped[0] == pytest.approx(server[0], rel=1e-5) and dropped[1] == pytest.approx(kept[1], rel=1e-5)
    assert abs(kept[0] - server[0]) > 1e-2 and abs(kept[1] - server[1]) > 1e-2
