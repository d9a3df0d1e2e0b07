"""Mime and MimeLite: agreement with rounds in float64, written from the paper, and the two calls of a round of Mime."""

import dataclasses

import federation
import jax
import numpy as np
import optax
import pytest
from linear_models import (
    ONE_STEP,
    RATE,
    SERVER_RATE,
    assert_close,
    assert_differ,
    clients,
    cohorts,
    gradient,
    run,
    settings,
    theta,
    with_ones,
)

import fedsim
from fedsim import aggregators, compressors, tree
from fedsim.algorithms import FedAvg, Mime, MimeLite


def numpy_mime(x, rounds, rho, lite):
    """Computes Algorithm 1 of Karimireddy et al. 2020 (Mime), for U(g, s) = g + rho s, V(c, s) = c + rho s."""
    s = np.zeros_like(x)
    for cohort in rounds:
        everybody = list(clients(cohort))
        weights = [len(everything[1]) for _, everything, _ in everybody]
        c = np.average([gradient(x, *everything) for _, everything, _ in everybody], axis=0, weights=weights)
        ends = []
        for _, _, batches in everybody:
            y = x
            for batch in batches:
                g = gradient(y, *batch) if lite else gradient(y, *batch) - gradient(x, *batch) + c
                y = y - RATE * (g + rho * s)
            ends.append(y)
        s = c + rho * s
        x = x + SERVER_RATE * (np.average(ends, axis=0, weights=weights) - x)
    return x


@pytest.mark.first(1)
@pytest.mark.parametrize("cls", [Mime, MimeLite])
def test_mime_follows_algorithm_1(cls):
    optimizers = {"client_optimizer": optax.sgd(RATE, 0.6), "server_optimizer": optax.sgd(SERVER_RATE)}
    start, end, _ = run(cls(**settings(**optimizers)), cohorts())
    assert_close(end, numpy_mime(start, cohorts(), 0.6, cls is MimeLite))
    assert_differ(end, numpy_mime(start, cohorts(), 0.6, cls is not MimeLite))


@pytest.mark.slow
def test_mimelite_with_sgd_is_fedavg_and_mime_is_not():
    fedavg = run(FedAvg(**settings()), cohorts())[1]
    assert_close(run(MimeLite(**settings()), cohorts())[1], fedavg)
    assert_differ(run(Mime(**settings()), cohorts())[1], fedavg)


@pytest.mark.slow
def test_mime_of_one_client_with_one_full_batch_is_momentum_sgd():
    """With one full-batch step per round, c is the client's gradient, and the server statistics are those of SGD."""
    population = federation.data(sizes=(6,))
    rounds = [federation.cohort(population, round=r) for r in range(5)]
    for cls in (Mime, MimeLite):
        start, end, _ = run(cls(**settings(batches=ONE_STEP, client_optimizer=optax.sgd(RATE, 0.9))), rounds)
        x, velocity = start, 0.0
        for _ in rounds:
            velocity = 0.9 * velocity + gradient(x, with_ones(population.columns["x"]), population.columns["y"])
            x = x - RATE * velocity
        assert_close(end, x)


def test_mime_of_one_client_with_full_batches_is_mimelite():
    rounds = [federation.cohort(federation.data(sizes=(6,)), round=r) for r in range(3)]
    full = settings(batches=fedsim.Batches(size=6, epochs=4, shuffle=False), client_optimizer=optax.sgd(RATE, 0.6))
    assert_close(run(Mime(**full), rounds)[1], run(MimeLite(**full), rounds)[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", [fedsim.Debug(), fedsim.Jit(lanes=3), fedsim.Pmap(devices=3)])
def test_mime_s_first_call_uses_every_example_once_for_any_batches_of_the_second(how, monkeypatch):
    monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)  # each call takes several programs
    population = federation.data()
    for batches in (fedsim.Batches(size=4, steps=1), fedsim.Batches(size=4, epochs=5)):
        c, _, _ = first_call(batches=batches, execution=how, cohort=federation.cohort(population))
        start = theta(Mime(**settings()).init(jax.random.key(1)))
        assert_close(c, gradient(start, with_ones(population.columns["x"]), population.columns["y"]))


def first_call(**options):
    """Returns c, the aggregated gradient of Mime's first call, the gradient of each client, and the state after one round.

    In the first round, the momentum s starts from 0: clients train without momentum, and afterwards s is c.
    """
    cohort = options.pop("cohort", None) or federation.cohort(federation.data())
    start, _, state = run(Mime(**settings(client_optimizer=optax.sgd(RATE, 0.6), **options)), [cohort])
    server = fedsim.rounds.server_state(state)
    sent = {i: gradient(start, *everything) for i, everything, _ in clients(cohort)}
    return joined(server.statistics[0].trace), sent, state


def joined(params):
    return theta(type("", (), {"params": params}))


@pytest.mark.slow
@pytest.mark.parametrize("how", [fedsim.Debug(), fedsim.Jit(lanes=3), fedsim.Pmap(devices=3)])
def test_mime_s_first_call_is_as_robust_as_its_aggregator(how):
    attackers = np.arange(8) % 3 == 0
    cohort = dataclasses.replace(federation.cohort(), attack=fedsim.attacks.SignFlip(5.0), attackers=attackers)
    c, sent, _ = first_call(cohort=cohort, aggregator=aggregators.CoordinateMedian(), execution=how)
    arrived = [-5.0 * g if attackers[i] else g for i, g in sent.items()]
    assert_close(c, np.median(arrived, axis=0))
    assert_differ(c, np.mean(arrived, axis=0))


def test_each_call_of_mime_has_its_own_aggregator_and_client_memories():
    c, _, state = first_call(aggregator=aggregators.CentredClipping(radius=0.5))
    of_gradients, of_movements = (joined(state.aggregator[call]) for call in ("gradient", "update"))
    assert_close(of_gradients, c)
    assert_differ(of_gradients, of_movements)
    feedback = compressors.ErrorFeedback(compressors.TopK(fraction=0.25))
    _, sent, state = first_call(aggregator=aggregators.Compressed(feedback))
    (_, kept), seen = federation.plain(state).clients
    assert kept.keys() == {"gradient", "update"}
    assert seen.tolist() == [i in sent for i in range(8)]
    of_compressor, _ = kept["gradient"]
    for i, g in sent.items():
        left = joined(jax.tree.map(lambda rows, i=i: rows[i], of_compressor.residual))
        assert 0 < np.count_nonzero(left) < g.size
        np.testing.assert_allclose(left[left != 0], g[left != 0], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_each_call_of_mime_draws_its_own_noise():
    noised = {"aggregator": aggregators.GaussianMechanism(0.005, clip=100.0, denominator=39 / 12, largest_weight=12.0)}
    of_gradients = first_call(**noised)[0] - first_call()[0]
    rounds = [federation.cohort(federation.data())]
    of_movements = run(FedAvg(**settings()), rounds)[1] - run(FedAvg(**settings(**noised)), rounds)[1]
    assert 0.05 < of_gradients.std() < 0.3 and 0.05 < of_movements.std() < 0.3
    assert_differ(of_gradients, of_movements)


def test_each_call_of_mime_sends_and_attacks_with_its_own_keys():
    keys = {"send": [], "attack": []}

    def note(what, key):
        if not isinstance(key, jax.core.Tracer):
            keys[what].append(jax.random.key_data(key).tobytes())

    class Spying(aggregators.Wrapper):
        def send(self, update, common, memory, key):
            note("send", key)
            return self.inner.send(update, common, memory, key)

    class Noting(fedsim.attacks.Attack):
        def corrupt(self, update, key):
            note("attack", key)
            return update

    cohort = fedsim.Cohort(federation.data(), np.array([0, 3]), 0, fedsim.rng.root(0), slots=2)
    cohort = dataclasses.replace(cohort, attack=Noting(), attackers=np.array([True, True]))
    run(Mime(**settings(aggregator=Spying(), execution=fedsim.Debug())), [cohort])
    for of_each in keys.values():  # two clients in two calls
        assert len(set(of_each)) == 4


@pytest.mark.slow
def test_mime_counts_the_bits_of_both_calls():
    sparse = {"aggregator": aggregators.Compressed(compressors.TopK(fraction=0.3)), "downlink": compressors.Cast()}
    cohort = federation.cohort()
    infos = {}
    for cls in (FedAvg, Mime):
        algorithm = cls(**settings(**sparse))
        state, infos[cls] = algorithm.apply(algorithm.init(jax.random.key(1)), cohort)
    parameters = tree.num_bits(state.params) // 32
    once, twice = (infos[cls].clients for cls in (FedAvg, Mime))
    for name in ("bits_up", "entropy_bits_up"):
        np.testing.assert_array_equal(twice[name], 2 * once[name])
    # The parameters are sent twice, with 16 bits each, c once, uncompressed, and the round number twice.
    assert once["bits_down"].tolist() == [16 * parameters + 32 if size else 0 for size in cohort.data.sizes]
    assert twice["bits_down"].tolist() == [(2 * 16 + 32) * parameters + 64 if size else 0 for size in cohort.data.sizes]


@pytest.mark.parametrize("cls", [Mime, MimeLite])
def test_a_base_algorithm_that_needs_the_loss_is_refused_because_the_server_has_none(cls):
    with pytest.raises(ValueError, match=f"needs gradients alone with {cls.__name__}, whose server has no loss, got one that"):
        cls(**settings(client_optimizer=optax.polyak_sgd(0.1))).check(federation.data())
