"""Byzantine neighbours, robust mixing, noise on what nodes send, and parameters that nodes keep to themselves."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import fedsim
from fedsim import decentralized
from fedsim.attacks import ALittleIsEnough, GaussianNoise, SignFlip
from fedsim.commands import main
from fedsim.compressors import Compressor, ErrorFeedback, TopK
from fedsim.decentralized._algorithm import consensus_distance
from fedsim.decentralized._mixer import Mixer

NODES = 8
# Nodes have 3 to 7 neighbours.
GRAPH = decentralized.Topology([nx.compose(nx.random_regular_graph(3, NODES, seed=0), nx.star_graph(NODES - 1))])
MATRIX = GRAPH.matrices()[0].toarray()
NEIGHBOURS = [[j for j in range(NODES) if j != i and MATRIX[i, j] > 0] for i in range(NODES)]
VALUES = np.random.default_rng(0).normal(size=(NODES, 5))
ATTACKERS = np.arange(NODES) < 2


def mix(values, *, attack=None, robust=None):
    """Mixes two leaves, which together are the columns of ``values``."""
    corrupt = attack and (lambda x, key: attack.corrupt_all(x, jnp.asarray(ATTACKERS), key))
    neighbours = decentralized.Neighbours(
        Mixer.of(GRAPH.matrices(), padded=robust is not None), jnp.int32(0), jax.random.key(0), corrupt=corrupt, robust=robust
    )
    parts = {"a": jnp.asarray(values[:, :2], jnp.float32), "b": jnp.asarray(values[:, 2:, None], jnp.float32)}
    mixed = neighbours.mix(parts)
    return np.concatenate([mixed["a"], mixed["b"][..., 0]], axis=1)


def clipped(own, sent, radius):
    result = own.copy()
    for i in range(NODES):
        for j in NEIGHBOURS[i]:
            step = sent[j] - own[i]
            length = np.linalg.norm(step)
            result[i] += MATRIX[i, j] * step * min(1, radius / length) if np.isfinite(length) else 0
    return result


def trimmed(own, sent, trim):
    kept = [np.sort(sent[NEIGHBOURS[i]], axis=0)[trim : len(NEIGHBOURS[i]) - trim] for i in range(NODES)]
    return np.stack([np.concatenate([own[i : i + 1], kept[i]]).mean(axis=0) for i in range(NODES)])


@pytest.mark.first(1)
@pytest.mark.parametrize("radius", [0.5, 2.0, 100.0])
def test_clipped_mixing_equals_a_loop(radius):
    result = mix(VALUES, robust=decentralized.ClippedMixing(radius))
    np.testing.assert_allclose(result, clipped(VALUES, VALUES, radius), rtol=1e-4, atol=1e-5)
    if radius == 100:
        np.testing.assert_allclose(result, MATRIX @ VALUES, rtol=1e-4, atol=1e-5)


def test_trimmed_mixing_equals_a_loop():
    np.testing.assert_allclose(
        mix(VALUES, robust=decentralized.TrimmedMixing(1)), trimmed(VALUES, VALUES, 1), rtol=1e-5, atol=1e-6
    )


def sign_flipped():
    return np.where(ATTACKERS[:, None], -10 * VALUES, VALUES)


def little_is_enough():
    honest = VALUES[~ATTACKERS]
    return np.where(ATTACKERS[:, None], honest.mean(axis=0) - 1.5 * honest.std(axis=0), VALUES)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("attack", "sent"),
    [
        (SignFlip(scale=10.0), sign_flipped()),
        (ALittleIsEnough(z=1.5), little_is_enough()),
    ],
)
def test_neighbours_receive_what_attackers_send_and_attackers_keep_their_own_values(attack, sent):
    plain = MATRIX @ sent + np.diag(MATRIX)[:, None] * (VALUES - sent)
    np.testing.assert_allclose(mix(VALUES, attack=attack), plain, rtol=1e-4, atol=1e-5)
    for robust, expected in (
        (decentralized.ClippedMixing(1.0), clipped(VALUES, sent, 1.0)),
        (decentralized.TrimmedMixing(1), trimmed(VALUES, sent, 1)),
    ):
        np.testing.assert_allclose(mix(VALUES, attack=attack, robust=robust), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("robust", [None, decentralized.TrimmedMixing(1), decentralized.ClippedMixing(2.0)])
def test_half_precision_is_rounded_once(robust):
    values = jnp.asarray(np.random.default_rng(1).normal(10, 3, size=[40, 50]), jnp.bfloat16)
    mixer = Mixer.of(decentralized.complete(40).matrices(), padded=True)
    mixed = mixer(values, jnp.int32(0), robust=robust)
    exact = mixer(values.astype(jnp.float32), jnp.int32(0), robust=robust).astype(jnp.bfloat16)
    assert mixed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(mixed, np.float32), np.asarray(exact, np.float32))
    if robust is None:
        mean = np.asarray(values, np.float64).mean(axis=0)
        np.testing.assert_allclose(np.asarray(mixed, np.float64), np.broadcast_to(mean, mixed.shape), rtol=2**-8)


def test_attackers_in_half_precision_know_the_mean_of_the_others():
    sent = ALittleIsEnough(z=1.0).corrupt_all(jnp.full([300, 1], 5, jnp.bfloat16), jnp.arange(300) < 2, jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(sent, np.float32), 5.0)


def test_values_that_are_not_finite_do_not_spread():
    line = np.array([np.nan, 1, 1, 1, 1, 1], np.float32)
    spread = Mixer.of(decentralized.line(6).matrices())(line, jnp.int32(0))
    np.testing.assert_array_equal(np.isnan(spread), [True, True, False, False, False, False])
    sent = np.where(ATTACKERS[:, None], np.inf * VALUES, VALUES)
    result = mix(VALUES, attack=SignFlip(scale=3e38), robust=decentralized.ClippedMixing(1.0))
    assert np.isfinite(result).all()
    huge = mix(100 * VALUES, attack=SignFlip(scale=3e38), robust=decentralized.ClippedMixing(1.0))
    np.testing.assert_allclose(huge, clipped(100 * VALUES, 100 * sent, 1.0), rtol=1e-4, atol=1e-4)


DIGITS = fedsim.datasets.load("digits", clients=16)


def accuracy(**settings):
    algorithm = decentralized.DFedAvg(
        model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5), batches=fedsim.Batches(size=20, steps=3),
        topology=decentralized.random_regular(16, degree=6), **settings,
    )  # fmt: skip
    everyone = fedsim.UniformSampler(DIGITS.train, clients=16, seed=0)
    state = algorithm.init(jax.random.key(0))
    for cohort in fedsim.samplers.Attacked(everyone, GaussianNoise(10.0), fraction=0.125, seed=0).rounds(15):
        state, _ = algorithm.apply(state, cohort)
    return fedsim.evaluate(algorithm.model, state.params, DIGITS.test).overall["accuracy"]


@pytest.mark.slow
def test_robust_mixing_learns_where_the_mean_does_not():
    assert accuracy() < 0.5
    assert accuracy(robust_mixing=decentralized.TrimmedMixing(2)) > 0.8
    assert accuracy(robust_mixing=decentralized.ClippedMixing(0.5)) > 0.8


SIZES = (4, 4, 4, 4)
DATA = federation.data(SIZES)


def make(name="DPSGD", **changes):
    settings = {
        "model": federation.model(), "client_optimizer": optax.sgd(0.3), "batches": fedsim.Batches(size=4, steps=1),
        "topology": decentralized.complete(4), "execution": fedsim.Jit(),
    }  # fmt: skip
    return getattr(decentralized, name)(**settings | changes)


def run(algorithm, rounds=2, attack=None):
    sampler = fedsim.UniformSampler(DATA, clients=4, seed=0)
    state = algorithm.init(jax.random.key(1))
    for cohort in (fedsim.samplers.Attacked(sampler, attack, fraction=0.25, seed=0) if attack else sampler).rounds(rounds):
        state, info = algorithm.apply(state, cohort)
    return state, info


@pytest.mark.slow
def test_noise_is_added_to_the_clipped_movement():
    quiet, loud = (run(make(local_noise=decentralized.LocalNoise(z, norm=0.01)), 1)[0] for z in (0.0, 2.0))
    start = make().init(jax.random.key(1))
    moved = jax.vmap(fedsim.tree.squared_norm)(fedsim.tree.subtract(start.models, quiet.models))
    np.testing.assert_allclose(np.sqrt(moved), 0.01, rtol=1e-3)
    noise = np.concatenate([x.reshape(4, -1) for x in jax.tree.leaves(fedsim.tree.subtract(loud.models, quiet.models))], axis=1)
    assert 0.5 < noise.std() / 0.02 < 1.5
    assert not np.allclose(noise[0], noise[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_noise_on_half_precision_is_drawn_in_float32(dtype):
    """The draws of bfloat16 have at most 128 values, and so not the law that ε is computed of."""
    noise, movement = decentralized.LocalNoise(0.5, norm=2.0), jnp.ones(10_000, dtype)
    noised = noise(movement, jax.random.key(0))
    assert noised.dtype == dtype and len(np.unique(np.asarray(noised, np.float32))) > 500
    wide = noise(movement.astype(jnp.float32), jax.random.key(0))
    np.testing.assert_array_equal(noised, wide.astype(dtype))


def of_labels(loss, name="DPSGD", **changes):
    """Returns an algorithm on a ring with another loss, a function of the algorithm's and the label of a node's examples."""

    def client_loss(self, shared, params, batch):
        return loss(cls.client_loss(self, shared, params, batch), params, batch.examples["y"][0].astype(jnp.float32))

    cls = getattr(decentralized, name)
    settings = {
        "model": federation.model(), "client_optimizer": optax.sgd(0.3), "batches": fedsim.Batches(size=4, steps=1),
        "topology": decentralized.ring(4), "execution": fedsim.Jit(),
    }  # fmt: skip
    return type(name, (cls,), {"client_loss": client_loss})(**settings | changes)


# Four nodes, of which the first one's label is 0, and that of the others 1.
OF_LABELS = fedsim.Cohort.of(
    fedsim.FederatedData(DATA.columns | {"y": np.repeat(np.int32([0, 1, 1, 1]), 4)}, DATA.offsets, DATA.client_ids),
    DATA.client_ids,
)


def round_of_labels(algorithm):
    start = algorithm.init(jax.random.key(1))
    return start, *algorithm.apply(start, OF_LABELS)


def test_a_node_whose_training_is_not_finite_sends_its_noise():
    """Without it, its neighbours would see that."""
    noise = decentralized.LocalNoise(1.0, norm=1.0)
    start, found, info = round_of_labels(of_labels(lambda loss, params, y: loss / y, local_noise=noise))
    assert int(info["dropped"]) == 1
    moved = np.asarray(found.models["linear"]["w"] - start.models["linear"]["w"])
    assert moved.all() and (moved.std(axis=(1, 2)) > 0.5).all() and (moved.std(axis=(1, 2)) < 2).all()


def test_personal_parameters_that_are_not_finite_are_not_kept():
    algorithm = of_labels(
        lambda loss, params, y: loss + jnp.sum(params["linear"]["b"]) / y, personal=lambda module, name: name == "b"
    )
    start, found, info = round_of_labels(algorithm)
    assert int(info["dropped"]) == 1
    before, after = (np.asarray(state.personal["linear"]["b"]) for state in (start, found))
    np.testing.assert_array_equal(after[0], before[0])
    assert np.isfinite(after).all() and (after[1:] != before[1:]).any(axis=1).all()


def test_states_of_optimizers_that_are_not_finite_are_not_kept():
    """The square of a gradient of 1e30 is infinite, with which RMSProp would never take a step again."""
    algorithm = of_labels(
        lambda loss, params, y: loss * jnp.where(y > 0, 1.0, 1e30), "DecentralizedDiLoCo", client_optimizer=optax.rmsprop(0.1)
    )
    _, found, info = round_of_labels(algorithm)
    assert int(info["dropped"]) == 1 and found.training.step.tolist() == [0, 1, 1, 1]
    squares = np.asarray(found.training.opt_state[0].nu["linear"]["w"])
    assert np.isfinite(squares).all() and (squares > 0).any(axis=(1, 2)).tolist() == [False, True, True, True]


@pytest.mark.slow
def test_personal_parameters_are_those_of_fedper():
    model = fedsim.models.digits_dense()
    examples = DIGITS.train.client(0)
    columns = {name: np.asarray(examples[name])[:32] for name in ("x", "y")}
    digits = fedsim.FederatedData.from_arrays(columns, sizes=[8] * 4)  # A step uses all examples, in whatever order.
    settings = {"model": model, "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=8, steps=2)}
    with_server = fedsim.algorithms.FedPer(**settings, weighting="uniform")
    without = decentralized.DFedAvg(
        **settings, topology=decentralized.complete(4), personal=lambda module, name: module == "linear_2"
    )
    server, nodes = with_server.init(jax.random.key(0)), without.init(jax.random.key(0))
    head = with_server.client_memory(with_server.broadcast(server))
    nodes = nodes._replace(personal=jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *x.shape)), head))
    nodes = nodes._replace(models=jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *x.shape)), server.params))
    for cohort in fedsim.UniformSampler(digits, clients=4, seed=0).rounds(3):
        server, _ = with_server.apply(server, cohort)
        nodes, info = without.apply(nodes, cohort)
    body, _ = without._split(nodes.params)
    federation.assert_trees_close(body, server.server.params, rtol=1e-4, atol=1e-5)
    assert np.abs(np.diff(nodes.personal["linear_2"]["w"], axis=0)).max() > 1e-3
    sent = sum(x.size for x in jax.tree.leaves(body))
    assert float(info["bits_up"]) == 4 * 3 * 32 * sent


def test_nodes_that_exchange_nothing_are_refused():
    with pytest.raises(ValueError, match="All parameters are personal"):
        make(personal=lambda module, name: True).init(jax.random.key(0))


def test_lost_averages_of_adpsgd_leave_nodes_alone():
    alone, averaged = (run(make("ADPSGD", message_loss=loss), 1)[0] for loss in (1.0, 0.0))
    trained, _ = run(make("DPSGD"), 1)
    # All nodes start with the same model, so that D-PSGD's first round also leaves everyone with its own step.
    federation.assert_trees_close(alone.models, trained.models, rtol=1e-5, atol=1e-6)
    assert not np.allclose(averaged.models["linear"]["w"], alone.models["linear"]["w"])


@dataclasses.dataclass(frozen=True)
class Wrapped(Compressor):
    inner: Compressor


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("DPSGD", {"robust_mixing": decentralized.TrimmedMixing(2)}, "node 0 has 3 neighbours in round 0.*at least 5"),
        ("RelaySGD", {"topology": decentralized.line(4), "robust_mixing": decentralized.TrimmedMixing(1)}, "does not mix"),
        ("ADPSGD", {"robust_mixing": decentralized.ClippedMixing(1.0)}, "does not mix"),
        ("StochasticGradientPush", {"robust_mixing": decentralized.ClippedMixing(1.0)}, "does not keep the sums"),
        ("GradientTracking", {"robust_mixing": decentralized.TrimmedMixing(1)}, "does not keep the sums of GradientTracking"),
        ("D2", {"robust_mixing": decentralized.ClippedMixing(1.0)}, "does not keep the sums of D2"),
        ("ChocoSGD", {"message_loss": 0.1}, "links that lose nothing, got message_loss=0.1: leave it out"),
        ("D2", {"message_loss": 0.1}, "D2 needs links that lose nothing, got message_loss=0.1: leave it out"),
        ("D2", {"link_failures": 0.1, "weights": "lazy"}, "links that lose nothing, got link_failures=0.1: leave it out"),
        ("ChocoSGD", {"topology": decentralized.base_graph(6)}, "needs the same graph in every round, and .* has 4: use ring"),
        (
            "ChocoSGD",
            {"compressor": ErrorFeedback(TopK())},
            "compressor without error feedback for ChocoSGD, got ErrorFeedback",
        ),
        ("ChocoSGD", {"compressor": Wrapped(ErrorFeedback(TopK()))}, "compressor without error feedback for ChocoSGD, got Wr"),
        ("DPSGD", {"personal": "head"}, "a function of a module's and a parameter's name"),
    ],
)
def test_what_does_not_fit_together_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make(name, **settings)


@pytest.mark.parametrize("name", ["RelaySGD", "ADPSGD", "StochasticGradientPush", "ChocoSGD", "GradientTracking", "D2"])
def test_some_algorithms_have_no_attackers(name):
    weights = {"weights": "lazy"} if name == "D2" else {}
    with pytest.raises(ValueError, match=f"{name} does not simulate attackers: use a sampler without them"):
        run(make(name, topology=decentralized.line(4), **weights), attack=SignFlip())


def test_values_with_64_bits_are_mixed_with_64_bits():
    draw = np.random.default_rng(0).normal(size=(NODES, 3))
    with jax.enable_x64(True):
        mixed = decentralized.gossip(jnp.asarray(draw), GRAPH, rounds=2)
        np.testing.assert_allclose(mixed, MATRIX @ MATRIX @ draw, rtol=1e-13, atol=1e-13)
        models = {"w": jnp.array([[1e9], [1e9 + 1]])}
        assert float(consensus_distance(models)) == 0.5
        assert decentralized.NodesState(models, (), jnp.int32(0)).params["w"].tolist() == [1e9 + 0.5]
        assert mix(VALUES, robust=decentralized.ClippedMixing(0.5)).dtype == np.float32


def test_attackers_train_on_poisoned_examples():
    honest, _ = run(make(), 1)
    poisoned, _ = run(make(), 1, fedsim.attacks.LabelFlip(num_classes=4))
    differs = [not np.allclose(a, b) for a, b in zip(honest.models["linear"]["w"], poisoned.models["linear"]["w"], strict=True)]
    assert sum(differs) == 1


@pytest.mark.parametrize("weights", ["edges", "metropolis"])
def test_edges_of_weight_zero_are_no_messages(weights):
    graph = nx.cycle_graph(3)
    nx.set_edge_attributes(graph, {(0, 1): 0.3, (1, 2): 0.3, (0, 2): 0.0}, "weight")
    topology = decentralized.Topology([graph])
    (matrix,) = topology.matrices(weights)
    links = {(j, i) for i, j in zip(*matrix.nonzero(), strict=True) if i != j}
    assert links == set(topology.bytes_by_link(1, rounds=1)) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert graph.number_of_edges() == 3  # The user's graph is not changed.


def test_bytes_by_link_are_those_that_the_rounds_count():
    topology = decentralized.one_peer_exponential(4)
    algorithm = make("DPSGD", topology=topology)
    state, total = algorithm.init(jax.random.key(0)), 0.0
    for cohort in fedsim.UniformSampler(DATA, clients=4, seed=0).rounds(3):
        state, info = algorithm.apply(state, cohort)
        total += float(info["bits_up"]) / 8
    size = fedsim.tree.num_bits(state.models) / 4 / 8
    assert sum(topology.bytes_by_link(size, rounds=3).values()) == total


@pytest.mark.slow
def test_a_run_of_nodes_that_do_not_wait_ends_with_its_table_and_pictures(tmp_path, capsys):
    run = ["run", "--algorithm", "adpsgd", "--folder", str(tmp_path / "r"), "--rounds", "1", "--model", "digits_logistic"]
    assert main(run) in (None, 0)
    assert "personal_accuracy" in capsys.readouterr().out and (tmp_path / "r/nodes.png").exists()


@pytest.mark.slow
def test_devices_and_debug_give_the_same_answer():
    settings = {
        "robust_mixing": decentralized.TrimmedMixing(1), "local_noise": decentralized.LocalNoise(0.1, norm=0.1),
        "message_loss": 0.2, "personal": lambda module, name: name == "b",
    }  # fmt: skip
    first, *others = [
        run(make(execution=execution, **settings), 2, SignFlip(3.0))[0]
        for execution in (fedsim.Jit(), fedsim.Pmap(devices=2), fedsim.Debug())
    ]
    for other in others:
        federation.assert_trees_close(first, other, rtol=1e-4, atol=1e-5)


def test_the_average_over_rounds_is_that_of_the_mean_of_the_nodes():
    algorithm, means = make(averaging=0.5), []
    state = algorithm.init(jax.random.key(1))
    for cohort in fedsim.UniformSampler(DATA, clients=4, seed=0).rounds(3):
        state, _ = algorithm.apply(state, cohort)
        means.append(np.asarray(state.server.params["linear"]["w"]))
    expected = (0.25 * means[0] + 0.5 * means[1] + means[2]) / 1.75
    np.testing.assert_allclose(state.params["linear"]["w"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_evaluates_the_average_over_rounds_and_the_nodes_own_models():
    algorithm = make(averaging=0.5)
    sampler = fedsim.UniformSampler(DATA, clients=4, seed=0)
    result = fedsim.experiment.run(algorithm, sampler, rounds=3, test_data=DATA, progress=False)
    expected = fedsim.evaluate(algorithm.model, result.state.average.params, DATA)
    assert result.evaluation.overall["loss"] == pytest.approx(expected.overall["loss"], rel=1e-5)
    own = [
        fedsim.evaluate_personalized(make(averaging=a), state, DATA, DATA)
        for a, state in ((0.5, result.state), (None, result.state.server))
    ]
    assert own[0].overall["loss"] == own[1].overall["loss"] != expected.overall["loss"]


def test_the_consensus_distance_of_half_precision_is_computed_in_float32():
    for size in (1e-4, 300.0):
        models = {"w": jnp.array([[size], [-size]], jnp.float16)}
        np.testing.assert_allclose(decentralized.consensus_distance(models), size, rtol=1e-3)


def test_trimmed_mixing_counts_only_messages():
    weights = np.eye(4)
    weights[1:, 1:] = 1 / 3
    stored = decentralized._mixing.Matrix((weights.ravel(), np.divmod(np.arange(16), 4)))
    assert stored.nnz == 16
    with pytest.raises(ValueError, match="node 0 has 0 neighbours"):
        make(weights=[stored], topology=decentralized.complete(4), robust_mixing=decentralized.TrimmedMixing(1))


def test_an_optimizer_may_keep_an_infinity():
    """As optax's reduce_on_plateau does, whose best value so far begins with it."""
    best = optax.GradientTransformation(
        lambda params: jnp.float32(jnp.inf), lambda updates, state, params=None: (updates, state)
    )
    algorithm = make("DecentralizedDiLoCo", client_optimizer=optax.chain(optax.sgd(0.3), best))
    state, info = run(algorithm)
    assert int(info["dropped"]) == 0
    start = algorithm.init(jax.random.key(1))
    assert all(np.any(x != y) for x, y in zip(jax.tree.leaves(start.models), jax.tree.leaves(state.models), strict=True))
