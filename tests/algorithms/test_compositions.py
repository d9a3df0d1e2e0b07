"""Tests of combinations: algorithms with aggregators, compressors, attacks and samplers."""

import dataclasses
from typing import Any, NamedTuple

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, attacks, compressors, samplers
from fedsim.experiment import RunConfig, Settings, build

FEEDBACK = aggregators.Compressed(compressors.ErrorFeedback(compressors.TopK(fraction=0.3)))


def make(cls, **changes):
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}
    return cls(**(settings | {"execution": fedsim.Jit()} | changes))


def two_rounds(algorithm, sampler):
    state = algorithm.init(jax.random.key(0))
    for cohort in sampler.rounds(2):
        state, info = algorithm.apply(state, cohort)
    return state, info


@pytest.mark.parametrize("attack", [attacks.SignFlip(2.0), attacks.PixelBackdoor(target=0, boost=5.0), attacks.GaussianNoise()])
def test_an_attack_does_not_change_the_group_number_of_an_update(attack):
    update = {"group": jnp.int32(1), "w": jnp.ones(3)}
    corrupt = attack.corrupt(update, jax.random.key(0))
    assert int(corrupt["group"]) == 1 and not np.any(np.asarray(corrupt["w"]) == 1)


def test_stragglers_may_be_attackers():
    uniform = fedsim.UniformSampler(federation.data(), clients=6, seed=0)
    attacked = samplers.Attacked(uniform, attacks.SignFlip(), fraction=0.5, seed=0)
    for drop in (False, True):
        both = samplers.Stragglers(attacked, fraction=0.5, epochs=4, drop=drop)
        for cohort, before in zip(both.rounds(5), attacked.rounds(5), strict=True):
            assert cohort.attack == attacks.SignFlip() and len(cohort) == (3 if drop else 6)
            was = dict(zip(before.clients.tolist(), before.attackers.tolist(), strict=True))
            assert cohort.attackers.tolist() == [was[client] for client in cohort.clients.tolist()]


def test_a_cohort_cannot_have_two_attacks():
    attacked = samplers.Attacked(fedsim.UniformSampler(federation.data(), clients=6, seed=0), attacks.SignFlip(), seed=0)
    with pytest.raises(ValueError, match="already have the attack SignFlip"):
        samplers.Attacked(attacked, attacks.LabelFlip(4), seed=0).cohort(0)


def test_scaffold_control_variates_do_not_change_at_learning_rate_zero():
    population = federation.data()
    rates = [0.1, 0.0]
    algorithm = make(
        fedsim.algorithms.SCAFFOLD, client_optimizer=lambda round: optax.sgd(jnp.where(round == 1, rates[1], rates[0]))
    )
    first, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
    second, _ = algorithm.apply(first, federation.cohort(population, round=1))
    federation.assert_trees_close(federation.plain(second).clients, federation.plain(first).clients)
    federation.assert_trees_close(second.server.control, first.server.control)
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(first.server.control)) > 0.01


@pytest.mark.slow
def test_two_calls_with_error_feedback_are_the_same_under_debug():
    sampler = fedsim.UniformSampler(federation.data(), clients=4, seed=0)
    states = [
        two_rounds(make(fedsim.algorithms.Mime, aggregator=FEEDBACK, execution=how), sampler)[0]
        for how in (fedsim.Jit(), fedsim.Debug())
    ]
    federation.assert_trees_close(*map(federation.plain, states))


def test_stragglers_complete_the_first_of_two_calls():
    """Mime's first call returns the gradient on all examples of a client, for any batches of the second call.

    After the first round, the momentum is this gradient.
    """
    population = federation.data(sizes=(8, 8))
    cohort = dataclasses.replace(federation.cohort(population), work=np.array([0.5, 1.0]))
    states = []
    for shuffle in (False, True):
        batches = fedsim.Batches(size=4, shuffle=shuffle)
        algorithm = make(fedsim.algorithms.Mime, batches=batches, client_optimizer=optax.sgd(0.1, momentum=0.9))
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), cohort)[0])
    states.append(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))[0])  # without stragglers
    for state in states[1:]:
        federation.assert_trees_close(state.statistics[0].trace, states[0].statistics[0].trace)


def test_error_feedback_keeps_no_residual_of_colluding_attackers():
    population = federation.data(sizes=(4,) * 6)
    attackers = np.array([True, False, False, True, False, False])
    cohort = dataclasses.replace(federation.cohort(population), attack=attacks.ALittleIsEnough(z=1.0), attackers=attackers)
    state, _ = (algorithm := make(fedsim.algorithms.FedAvg, aggregator=FEEDBACK)).apply(
        algorithm.init(jax.random.key(0)), cohort
    )
    rows, _ = federation.plain(state).clients
    residual = sum(np.abs(leaf).reshape(6, -1).sum(1) for leaf in jax.tree.leaves(rows))
    assert ((residual > 0) == ~attackers).all()


@pytest.mark.slow
def test_command_line_options_clip_and_compress_ifca_and_fedmgda():
    for name in ("ifca", "fedmgda"):
        states, bits = [], []
        for options in ({"clip": 0.01, "compressor": "eden(bits=2)"}, {"compressor": "eden(bits=2)"}, {}):
            algorithm, sampler, *_ = build(RunConfig(dataset="digits", algorithm=name, **options), Settings(execution="jit"))
            state, info = algorithm.apply(algorithm.init(jax.random.key(0)), sampler.cohort(0))
            states.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)]))
            bits.append(int(info.clients["bits_up"][0]))
        is_clipped = np.abs(states[0] - states[1]).max() > 1e-3
        assert is_clipped == (name == "ifca")  # FedMGDA normalizes the updates afterwards.
        assert bits[0] == bits[1] < bits[2] / 8


def test_an_algorithm_without_a_model_is_evaluated_with_downlink_memory():
    population = federation.data()
    algorithm = fedsim.algorithms.KMeans(
        num_features=3, num_clusters=2, downlink=compressors.ErrorFeedback(compressors.Cast()), execution=fedsim.Jit()
    )
    state, _ = two_rounds(algorithm, fedsim.UniformSampler(population, clients=4, seed=0))
    assert isinstance(state, fedsim.rounds.FederatedState)
    assert np.isfinite(list(algorithm.evaluate(state, population).overall.values())).all()


def test_auxiliary_numbers_are_not_clipped_with_the_update():
    """FedNova's server moves along the clipped direction by the distance of the only client, which is not clipped."""
    population = federation.data(sizes=(9,))
    cohort = federation.cohort(population)
    algorithm = make(fedsim.algorithms.FedNova, aggregator=aggregators.Clipped(0.01))
    before = algorithm.init(jax.random.key(0))
    after, info = algorithm.apply(before, cohort)
    moved = jax.tree.map(lambda a, b: np.asarray(a - b), before.params, after.params)
    np.testing.assert_allclose(info.clients["distance"], 0.3, rtol=1e-6)  # three steps of 0.1
    np.testing.assert_allclose(np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(moved))), 0.3 * 0.01, rtol=1e-4)
    assert info.clients["bits_up"].tolist() == [32 * (3 * 4 + 4 + 1)]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("aggregator", "attack"),
    [
        (aggregators.Clipped(0.01), attacks.SignFlip(2.0)),
        (aggregators.Compressed(compressors.Eden(bits=1)), None),
        (aggregators.Compressed(compressors.TopK(fraction=0.3, per_tensor=False)), None),
    ],
)
def test_heterofl_of_whole_networks_is_fedavg_whatever_is_sent(aggregator, attack):
    """The shares that HeteroFL's server divides by are neither attacked nor clipped nor compressed."""
    cohort = federation.cohort()
    if attack is not None:
        cohort = dataclasses.replace(cohort, attack=attack, attackers=np.arange(8) % 3 == 0)
    results = []
    for cls, options in ((fedsim.algorithms.FedAvg, {}), (fedsim.algorithms.HeteroFL, {"widths": (1.0,)})):
        algorithm = make(cls, aggregator=aggregator, **options)
        state, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
        results.append((federation.plain(state.params), info.clients["bits_up"]))
    (expected, bits), (found, with_share) = results
    federation.assert_trees_close(found, expected)
    assert with_share.tolist() == np.where(np.asarray(bits) > 0, np.asarray(bits) + 32, 0).tolist()


@pytest.mark.parametrize("name", ["HeteroFL", "SCAFFOLD", "FedDyn", "FedDC", "QFedAvg", "QFedSGD", "FedExP"])
def test_equal_weights_for_some_parameters_are_refused_where_the_server_uses_other_weights(name):
    """The server would divide, or multiply, a mean with equal weights by a number from other weights."""
    cls, partly = getattr(fedsim.algorithms, name), aggregators.Clipped(1.0, inner=aggregators.PartlyUniform("*"))
    if name == "QFedSGD":
        algorithm = cls(model=federation.model(), batches=fedsim.Batches(size=4), aggregator=partly)
    else:
        algorithm = make(cls, aggregator=partly)
    with pytest.raises(ValueError, match=f"same weights for all parameters with {name}, got PartlyUniform: the server"):
        algorithm.check(federation.data())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qfedavg", "fednova", "adaptivefedprox", "heterofl"])
@pytest.mark.parametrize("attack", [attacks.SignFlip(), attacks.ALittleIsEnough()])
def test_compression_and_attacks_do_not_change_auxiliary_numbers(name, attack):
    """Auxiliary numbers include divisors, so dropping one or changing its sign would break the update."""
    few = aggregators.Compressed(compressors.RandomK(fraction=0.1))
    algorithm = make(fedsim.algorithms.get(name), aggregator=few, server_optimizer=optax.sgd(0.1))
    sampler = samplers.Attacked(fedsim.UniformSampler(federation.data(), clients=6, seed=0), attack, fraction=0.4, seed=0)
    state, _ = two_rounds(algorithm, sampler)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.params))
    update = aggregators.WithAux(jax.tree.map(jnp.ones_like, state.params), jnp.float32(7))
    arrived = algorithm.aggregator.send(update, (), (), jax.random.key(0)).update
    assert arrived.aux == 7 and any(np.any(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(arrived.update))


def test_q_fedavg_does_not_change_in_a_round_at_learning_rate_zero():
    algorithm = make(fedsim.algorithms.QFedAvg, client_optimizer=lambda round: optax.sgd(jnp.where(round == 0, 0.0, 0.1)))
    state = algorithm.init(jax.random.key(0))
    after, info = algorithm.apply(state, federation.cohort())
    federation.assert_trees_equal(federation.plain(state.params), federation.plain(after.params))
    assert int(info.num_dropped) == 0 and int(after.round) == 1
    moved, _ = algorithm.apply(after, federation.cohort(round=1))
    assert not np.array_equal(moved.params["linear"]["w"], state.params["linear"]["w"])


RIDGE = 2.0


def ridge(cls, epochs=1, **options):
    """Returns an algorithm that overrides ``client_loss``, the data of two clients, and a function for the optimum."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(24, 2)), draw.normal(size=24) + 2
    data = fedsim.FederatedData.from_arrays({"x": x.astype(np.float32), "y": y.astype(np.float32)}, sizes=(12, 12))
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: examples["x"] @ hk.get_parameter("w", [2], init=jnp.zeros)),
        features={"x": jax.ShapeDtypeStruct((2,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)},
        loss=lambda examples, outputs: jnp.square(examples["y"] - outputs) / 2,
        metrics={},
    )

    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Ridge(cls):
        def client_loss(self, shared, params, batch):
            return super().client_loss(shared, params, batch) + RIDGE / 2 * fedsim.tree.squared_norm(params)

    def optimum(rows, strength=RIDGE):
        return np.linalg.solve(x[rows].T @ x[rows] / len(x[rows]) + strength * np.eye(2), x[rows].T @ y[rows] / len(x[rows]))

    if cls is not fedsim.algorithms.FedSGD:
        options["client_optimizer"] = optax.sgd(0.2)
    return Ridge(model=model, batches=fedsim.Batches(size=12, epochs=epochs, shuffle=False), **options), data, optimum


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *((getattr(fedsim.algorithms, name), {}) for name in ("FedAvg", "FedSGD", "FedProx", "Mime", "MimeLite", "FedDyn")),
        *((fedsim.algorithms.SCAFFOLD, {"control_variate": option}) for option in ("I", "II")),
    ],
)
def test_training_minimizes_an_overridden_client_loss(cls, options):
    """In ridge regression with one full gradient per client and round, clients do not drift, and the optimum is known."""
    options = {"server_optimizer": optax.sgd(0.2)} if cls is fedsim.algorithms.FedSGD else options
    algorithm, data, optimum = ridge(cls, **options)
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), [federation.cohort(data, round=r) for r in range(200)])
    np.testing.assert_allclose(jax.tree.leaves(state.params)[0], optimum(slice(24)), atol=1e-4)
    assert np.abs(optimum(slice(24)) - optimum(slice(24), strength=0)).max() > 0.1


def test_initial_clusters_and_personal_steps_use_an_overridden_client_loss():
    clusters, data, optimum = ridge(fedsim.algorithms.HypCluster, epochs=200, num_clusters=2)
    starts = jax.tree.leaves(clusters.init_from(data, seed=0).params)[0]
    expected = np.stack([optimum(slice(12)), optimum(slice(12, 24))])
    np.testing.assert_allclose(np.sort(starts, axis=0), np.sort(expected, axis=0), atol=1e-4)
    # At a client's ridge optimum, its personal step changes nothing.
    per_fedavg, _, _ = ridge(fedsim.algorithms.PerFedAvg, alpha=0.3)
    assert_its_personal_step_leads_nowhere(per_fedavg, data, expected[0])


def assert_its_personal_step_leads_nowhere(per_fedavg, data, there):
    """Checks that the personal step of the first client does not change these parameters."""
    state = per_fedavg.init(jax.random.key(0))
    there = jax.tree.map(lambda x: jnp.asarray(there, x.dtype), state.params)
    shared = per_fedavg.broadcast(state._replace(params=there))
    own = fedsim.map_clients(per_fedavg.personal_params, shared, fedsim.Cohort.of(data, ["0"]))
    federation.assert_trees_close(jax.tree.map(lambda x: x[0], own), there, atol=1e-5)


class WithStrength(NamedTuple):
    """A server state with one additional number, which is also broadcast."""

    params: Any
    opt_state: Any
    round: Any
    strength: Any


@pytest.mark.parametrize(
    ("cls", "options"), [("PerFedAvg", {"alpha": 0.3}), ("HypCluster", {"num_clusters": 1, "epochs": 200})]
)
def test_initial_clusters_and_personal_steps_use_what_the_server_broadcasts(cls, options):
    """The server broadcasts the strength of the ridge penalty with the parameters."""
    plain, data, optimum = ridge(getattr(fedsim.algorithms, cls), **options)

    class Sent(type(plain)):
        def init(self, key):
            return WithStrength(*super().init(key), strength=jnp.float32(1))

        def broadcast(self, state):
            return state._replace(opt_state=(), strength=2 * state.strength)

        def client_loss(self, shared, params, batch):
            return super().client_loss(shared, params, batch) + shared.strength / 2 * fedsim.tree.squared_norm(params)

    algorithm = Sent(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain) if field.init})
    there = optimum(slice(12), strength=RIDGE + 2)
    if cls == "HypCluster":
        start = jax.tree.leaves(algorithm.init_from(data.select(["0"]), seed=0).params)[0][0]
        np.testing.assert_allclose(start, there, atol=1e-4)
    else:
        assert_its_personal_step_leads_nowhere(algorithm, data, there)
