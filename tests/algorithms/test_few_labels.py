"""FixMatch and FedMatch against NumPy in float64, and what both do without labels, without helpers and at the server."""

import types

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from network_models import client_memories

import fedsim
from fedsim import algorithms
from fedsim.algorithms._fedmatch import Candidates, FedMatchMemory, Helpers, Parts
from fedsim.partitioners import hide_labels, only_labelled

RATE, THRESHOLD, WEIGHT = 0.3, 0.4, 0.7
BATCHES = fedsim.Batches(size=4, epochs=2)


def plain(key, x):
    return x


def doubled(key, x):
    return 2 * x


def few(sizes=(7, 0, 3, 12, 1, 5, 9, 2)):
    return hide_labels(federation.data(sizes), fraction=0.4, seed=1)


def make(cls=algorithms.FixMatch, **options):
    settings = {"model": federation.model(), "batches": BATCHES, "client_optimizer": optax.sgd(RATE), "threshold": THRESHOLD}
    return cls(**(settings | {"weak": plain, "strong": doubled, "execution": fedsim.Jit()} | options))


def softmax(logits):
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def cross_entropy_gradient(w, b, x, y, weights):
    """Returns the gradient of the sum over examples of weight times cross-entropy of the linear model x w + b."""
    p = softmax(x @ w + b)
    p[np.arange(len(y)), y] -= 1
    p *= weights[:, None]
    return x.T @ p, p.sum(0)


def fixmatch_gradient(w, b, x, y):
    """Returns the gradient of equations 3 and 4 of Sohn et al. 2020, if only the strong augmentation changes x, to 2 x."""
    labelled, p = y >= 0, softmax(x @ w + b)
    supervised = cross_entropy_gradient(w, b, x, np.maximum(y, 0), labelled / max(labelled.sum(), 1))
    counted = ~labelled & (p.max(1) >= THRESHOLD)
    of_pseudo = cross_entropy_gradient(w, b, 2 * x, p.argmax(1), counted / max((~labelled).sum(), 1))
    return [a + WEIGHT * c for a, c in zip(supervised, of_pseudo, strict=True)]


def numpy_round(cohort, w, b):
    moved, total = [np.zeros_like(w), np.zeros_like(b)], 0
    for _, dataset, key in cohort:
        v, c = w.copy(), b.copy()
        for batch in dataset.batches(BATCHES, key):
            x, y = batch.examples["x"][batch.mask].astype(np.float64), batch.examples["y"][batch.mask]
            of_w, of_b = fixmatch_gradient(v, c, x, y)
            v, c = v - RATE * of_w, c - RATE * of_b
        moved = [moved[0] + len(dataset) * (v - w), moved[1] + len(dataset) * (c - b)]
        total += len(dataset)
    return w + moved[0] / total, b + moved[1] / total


def test_fixmatch_follows_its_equations():
    algorithm, population = make(unlabelled_weight=WEIGHT), few()
    assert 0 < (population.columns["y"] < 0).mean() < 1
    state = algorithm.init(jax.random.key(1))
    w, b = (np.asarray(state.params["linear"][name], np.float64) for name in "wb")
    for round in range(3):
        cohort = federation.cohort(population, round=round)
        unlabelled = [each["x"][each["y"] < 0].astype(np.float64) for each in population.clients()]
        reached = [softmax(x @ w + b).max(1) >= THRESHOLD if len(x) else np.zeros(1) for x in unlabelled]
        state, info = algorithm.apply(state, cohort)
        np.testing.assert_allclose(info.clients["confident"], [each.mean() for each in reached], rtol=1e-6)
        w, b = numpy_round(cohort, w, b)
    np.testing.assert_allclose(state.params["linear"]["w"], w, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["linear"]["b"], b, rtol=2e-5, atol=1e-6)


def test_with_all_labels_fixmatch_is_federated_averaging():
    population = federation.data()
    fedavg = algorithms.FedAvg(model=federation.model(), batches=BATCHES, client_optimizer=optax.sgd(RATE))
    ours, theirs = (each.apply(each.init(jax.random.key(0)), federation.cohort(population))[0] for each in (make(), fedavg))
    federation.assert_trees_close(ours.params, theirs.params)


@pytest.mark.first(1)
@pytest.mark.parametrize("cls", [algorithms.FixMatch, algorithms.FedMatch])
def test_the_server_takes_the_steps_of_a_client_with_its_examples(cls):
    """Clients without labels and without confidence change nothing, so that only the server's steps remain.

    They have the optimizer of the round, the first, and not that of the next.
    """
    known = only_labelled(few())
    examples = dict(known.columns)
    options = {"threshold": 1.0} | ({"l1": 0.0, "l2": 0.0} if cls is algorithms.FedMatch else {})
    options["client_optimizer"] = lambda round: optax.sgd(RATE * 0.5 ** round.astype(jnp.float32))
    algorithm = make(cls, server_examples=examples, batches=fedsim.Batches(size=64), **options)
    start = algorithm.init(jax.random.key(0))
    hidden = hide_labels(federation.data(), fraction=0.0, seed=0)
    state, _ = algorithm.apply(start, federation.cohort(hidden))
    state = state.server if cls is algorithms.FedMatch else state
    w, b = (np.asarray(start.params["linear"][name], np.float64) for name in "wb")
    y = examples["y"]
    of_w, of_b = cross_entropy_gradient(w, b, examples["x"].astype(np.float64), y, np.full(len(y), 1 / len(y)))
    factor = RATE * (10.0 if cls is algorithms.FedMatch else 1.0)
    np.testing.assert_allclose(state.params["linear"]["w"], w - factor * of_w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["linear"]["b"], b - factor * of_b, rtol=1e-5, atol=1e-6)
    if cls is algorithms.FedMatch:  # The labels train sigma alone.
        federation.assert_trees_equal(state.parts.psi, start.parts.psi)


def test_the_loss_of_fedmatch_follows_its_equations():
    draw = np.random.default_rng(0)
    algorithm = make(algorithms.FedMatch, threshold=0.8, unlabelled_weight=0.5, labels_weight=3.0, l2=0.2, l1=0.1)
    sigma, psi, *others = ({"linear": {"w": draw.normal(size=(3, 4)), "b": draw.normal(size=4)}} for _ in range(4))
    x, y = draw.normal(size=(9, 3)), np.array([0, 1, 2, -1, -1, -1, -1, -1, -1])
    mask = np.arange(9) < 8
    single = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)  # noqa: E731
    batch = fedsim.Batch({"x": single(x), "y": jnp.asarray(y)}, jnp.asarray(mask), jax.random.key(0), jnp.int32(0))
    helpers = Helpers(single(jax.tree.map(lambda *rows: np.stack(rows), *others)), jnp.array([True, True]))
    start = algorithm.broadcast(algorithm.init(jax.random.key(0)))._replace(helpers=helpers)
    found = algorithm.client_loss(start, Parts(single(sigma), single(psi)), batch)

    def predicted(psi, x):
        return softmax(x @ (sigma["linear"]["w"] + psi["linear"]["w"]) + sigma["linear"]["b"] + psi["linear"]["b"])

    p, labelled, unlabelled = predicted(psi, x), (y >= 0) & mask, (y < 0) & mask
    supervised = -np.log(p[np.arange(9), y])[labelled].mean()
    theirs = [predicted(other, x) for other in others]
    votes = sum(np.eye(4)[each.argmax(1)] for each in (p, *theirs)).argmax(1)
    counted = unlabelled & (p.max(1) >= 0.8)
    assert 0 < counted.sum() < unlabelled.sum() and np.any(votes[counted] != p.argmax(1)[counted])
    of_votes = -np.log(predicted(psi, 2 * x)[np.arange(9), votes])[counted].mean()
    divergence = np.mean([(q * np.log(q / p)).sum(1)[counted].mean() for q in theirs])
    away = sum(np.square(sigma["linear"][name] - psi["linear"][name]).sum() for name in "wb")
    size = sum(np.abs(psi["linear"][name]).sum() for name in "wb")
    expected = 3.0 * supervised + 0.5 * (of_votes + divergence) + 0.2 * away + 0.1 * size
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_labels_train_sigma_and_the_others_psi():
    algorithm = make(algorithms.FedMatch, threshold=0.0)
    shared = algorithm.broadcast(algorithm.init(jax.random.key(0)))
    shared = shared._replace(helpers=Helpers(shared.helpers.psi, jnp.zeros(10, bool)))
    for label, still in ((1, "psi"), (-1, "sigma")):
        examples = {"x": jnp.ones([4, 3]), "y": jnp.full(4, label)}
        batch = fedsim.Batch(examples, jnp.ones(4, bool), jax.random.key(0), jnp.int32(0))
        gradient = jax.grad(algorithm.client_loss, argnums=1)(shared, shared.params, batch)
        for part in Parts._fields:
            zero = all(not leaf.any() for leaf in jax.tree.leaves(getattr(gradient, part)))
            assert zero == (part == still)


def test_helpers_are_the_nearest_others_that_have_trained(monkeypatch):
    algorithm = make(algorithms.FedMatch, num_helpers=2, helper_every=10, candidates=5)
    shared = algorithm.broadcast(algorithm.init(jax.random.key(0)))
    predictions = jnp.array([[0.1, 0.9], [0.2, 0.8], [0.9, 0.1], [0.15, 0.85], [0.12, 0.88]])
    psi = {"w": jnp.arange(5.0)}
    known = Candidates(psi, predictions, jnp.arange(10, 15), jnp.array([True, True, True, True, False]))
    shared = shared._replace(helpers=known, round=jnp.int32(9))
    monkeypatch.setattr(algorithms.FedMatch, "on_probe", lambda self, shared, psi: psi)

    def helpers(number, trained=True, shared=shared):
        memory = FedMatchMemory(predictions[number], jnp.bool_(trained))
        return algorithm.nearest(shared, types.SimpleNamespace(position=10 + number, memory=memory))

    assert [helpers(number).psi["w"].tolist() for number in range(4)] == [[3, 1], [3, 0], [1, 3], [0, 1]]
    assert helpers(0).there.all() and not helpers(4, trained=False).there.any()
    assert not helpers(0, shared=shared._replace(round=jnp.int32(8))).there.any()  # in other rounds there are none


@pytest.mark.slow
def test_candidates_are_the_last_models_of_the_clients_of_the_round():
    seen = []

    class Seen(algorithms.FedMatch):
        def client_update(self, shared, client):
            jax.debug.callback(lambda known: seen.append(known), shared.helpers)
            return super().client_update(shared, client)

    algorithm, population = make(Seen, execution=fedsim.Debug(), client_optimizer=optax.sgd(0.01)), few((3, 4, 2))
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
    assert not np.any(seen[-1].trained)
    last = [each.psi for each in client_memories(state, population).values()]
    algorithm.apply(state, federation.cohort(population, round=1))
    assert seen[-1].trained.tolist() == [True] * 3 + [False] * 7
    for number, psi in enumerate(last):
        federation.assert_trees_close(jax.tree.map(lambda x, number=number: x[number], seen[-1].psi), psi)


def test_without_helpers_in_the_round_the_number_of_helpers_does_not_matter():
    states = []
    for helpers in (0, 3):
        algorithm = make(algorithms.FedMatch, num_helpers=helpers, threshold=0.0, client_optimizer=optax.sgd(0.01))
        state = algorithm.init(jax.random.key(0))
        for round in range(2):
            state, _ = algorithm.apply(state, federation.cohort(few(), round=round))
        states.append(state.server)
    federation.assert_trees_close(states[0].params, states[1].params)


def test_algorithms_that_need_labels_refuse_hidden_ones():
    algorithm = algorithms.FedAvg(model=federation.model(), batches=BATCHES, client_optimizer=optax.sgd(RATE))
    with pytest.raises(
        ValueError, match=r"label y=-1.*only_labelled\(data\), or with an algorithm that learns from unlabelled"
    ):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(few()))
    columns = dict(few().columns)
    columns["y"] = np.where(columns["y"] < 0, -2, columns["y"])
    wrong = fedsim.FederatedData(columns, few().offsets, few().client_ids)
    with pytest.raises(ValueError, match="label y=-2"):
        make().apply(make().init(jax.random.key(0)), federation.cohort(wrong))


@pytest.mark.parametrize("cls", [algorithms.FixMatch, algorithms.FedMatch])
def test_without_any_label_there_is_nothing_to_learn_from(cls):
    unlabelled = federation.cohort(hide_labels(federation.data(), fraction=0.0, seed=0))
    algorithm = make(cls)
    with pytest.raises(ValueError, match="Expected labels at the clients or the server, got y=-1, .* give server_examples"):
        algorithm.apply(algorithm.init(jax.random.key(0)), unlabelled)
    make(cls, server_examples=dict(federation.data().columns)).check(unlabelled.data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.5}, "Expected 0 <= threshold <= 1, got threshold=1.5"),
        ({"server_examples": dict(few().columns)}, "Client 'server' has label y=-1"),
        ({"server_examples": {"x": np.zeros([2, 3], np.float32)}}, "reads feature 'y'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_augmentations_of_images_refuse_other_examples():
    algorithm = make(weak=fedsim.augmentations.shift)
    with pytest.raises(ValueError, match=r"Expected images \[n, h, w, c\], got float32 \[1, 3\]"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(few()))
