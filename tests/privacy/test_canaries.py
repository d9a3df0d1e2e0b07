"""Audits by canaries: below the accountant's ε for a sound mechanism, above it for broken ones."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsim
from fedsim import rng, tree
from fedsim.aggregators import GaussianMechanism
from fedsim.privacy import Canary, EveryRound, Poisson, canary_audit, epsilon
from fedsim.rounds import ClientUpdate

D, DELTA, NOISE, ROUNDS = 1024, 1e-3, 4.0, 4


class State(NamedTuple):
    params: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Moves(fedsim.Algorithm):
    """The parameters move by the aggregate; a real client sends its example as the first coordinate."""

    def init(self, key):
        return State(jnp.zeros(D))

    def client_update(self, shared, client):
        def add(total, batch):
            return total + jnp.sum(batch.examples["x"], where=batch.mask)

        total = client.for_each_batch(self.batches, add, jnp.zeros(()))
        return ClientUpdate(jnp.zeros(D).at[0].set(total), weight=jnp.float32(1))

    def server_update(self, state, update, info):
        return State(state.params - update)


class TooLittleNoise(GaussianMechanism):
    """Each of eight lanes has noise of an eighth of the deviation, where an eighth of the variance is right."""

    def finish_round(self, accumulator, memory, key):
        own = dataclasses.replace(self, noise_multiplier=self.noise_multiplier / math.sqrt(8))
        return GaussianMechanism.finish_round(own, accumulator, memory, key)


class WrongSensitivity(GaussianMechanism):
    """Updates are clipped to four times the norm that the noise is made for."""

    def send(self, update, server_memory, memory, key):
        sent = super().send(update, server_memory, memory, key)
        return sent._replace(update=tree.clip(update, 4 * self.clip))


class NoiseAgainAfterResume(GaussianMechanism):
    """Its noise is drawn by a counter that a resumed run begins again, here in the middle of the rounds."""

    def init(self, update):
        return jnp.int32(0)

    def finish_round(self, accumulator, memory, key):
        again = jax.random.fold_in(rng.root(7), memory % (ROUNDS // 2))
        return super().finish_round(accumulator, memory, again)[0], memory + 1


class EverybodyAlways(fedsim.samplers.PoissonSampler):
    """All clients take part, whatever the probability."""

    def _draw(self, round):
        return np.arange(self.data.num_clients)


def audit(mechanism=GaussianMechanism, noise=NOISE, sampler=None, canaries=400, seed=0, rounds=ROUNDS):
    def everybody(data):
        return fedsim.UniformSampler(data, clients=data.num_clients, seed=seed)  # It draws the noise and the directions.

    data = fedsim.FederatedData.from_arrays({"x": np.linspace(-3, 3, 6, dtype=np.float32)}, sizes=[2, 1, 3])
    algorithm = Moves(batches=fedsim.Batches(size=2), aggregator=mechanism(noise, clip=2.0, denominator=100))
    return canary_audit(algorithm, sampler or everybody, data, rounds=rounds, canaries=canaries, seed=seed)


def test_the_bound_of_a_sound_mechanism_is_below_the_accountants_and_the_estimate_is_near_it():
    scores = audit()
    upper = epsilon(NOISE, EveryRound(), rounds=ROUNDS, delta=DELTA)
    assert 0.2 * upper < scores.epsilon_bound(DELTA) < upper
    assert scores.epsilon_estimate(DELTA) == pytest.approx(upper, rel=0.5)


def test_without_noise_the_bound_is_large():
    scores = audit(noise=0.0, canaries=100)
    assert scores.auc == 1 and scores.epsilon_bound(DELTA) > 30


@pytest.mark.first(1)
@pytest.mark.parametrize("broken", [NoiseAgainAfterResume, WrongSensitivity, TooLittleNoise])
def test_broken_mechanisms_are_found(broken):
    upper = epsilon(NOISE, EveryRound(), rounds=ROUNDS, delta=DELTA)
    assert audit(broken).epsilon_bound(DELTA, confidence=0.999) > upper


@pytest.mark.slow
def test_sampling_that_does_not_hide_who_takes_part_is_found():
    upper = epsilon(2.0, Poisson(0.2), rounds=8, delta=DELTA)
    made = {"noise": 2.0, "rounds": 8}
    classes = fedsim.samplers.PoissonSampler, EverybodyAlways
    sound, broken = (audit(sampler=functools.partial(cls, probability=0.2, seed=0), **made) for cls in classes)
    assert sound.epsilon_bound(DELTA) < upper < broken.epsilon_bound(DELTA, confidence=0.999)


@pytest.mark.slow
def test_estimates_are_unbiased_and_bounds_hold_for_many_seeds():
    """The distance of the two laws is √rounds / z, less what canaries interfere: 200 of them add 200 / 1024 to the 16 of z²."""
    found = [audit(seed=seed) for seed in range(12)]
    distances = [scores._distance()[0] for scores in found]
    expected = math.sqrt(ROUNDS / (NOISE**2 + 200 / D))
    assert np.mean(distances) == pytest.approx(expected, abs=3.5 * 0.1 / math.sqrt(12))
    upper = epsilon(NOISE, EveryRound(), rounds=ROUNDS, delta=DELTA)
    assert sum(scores.epsilon_bound(DELTA) > upper for scores in found) <= 3


@pytest.mark.slow
def test_the_bound_of_one_run_holds_and_finds_a_mechanism_without_noise():
    pytest.importorskip("jax_privacy", reason="the extra [privacy] has it")
    assert audit(noise=0.0, canaries=500).epsilon_bound(1e-5, method="one_run") > 3
    assert audit(canaries=500).epsilon_bound(1e-5, method="one_run") < epsilon(NOISE, EveryRound(), rounds=ROUNDS, delta=1e-5)


def test_canaries_are_unit_directions_times_the_norm():
    update = {"a": jnp.zeros([3, 2]), "b": jnp.zeros(4)}
    first, second = (Canary(norm=3.0).corrupt(update, jax.random.key(seed)) for seed in (0, 1))
    assert float(tree.squared_norm(first)) == pytest.approx(9, rel=1e-5)
    assert abs(float(tree.dot(first, second))) < 9 * 0.99


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: audit(canaries=5), "^Expected canaries >= 10, got canaries=5: a bound needs a few hundred"),
        (lambda: audit(rounds=0), "^Expected rounds >= 1, got rounds=0"),
        (
            lambda: audit(sampler=lambda data: fedsim.samplers.ClusteredSampling(data, clients=2, seed=0)),
            "^Expected an algorithm with weighting='uniform' for ClusteredSampling, got weighting=None",
        ),
        (lambda: Canary(norm=0.0), "^Expected .*norm.*, got norm=0.0"),
    ],
)
def test_arguments_that_are_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use()
