"""Local differential privacy: the noise of each client against its law, its key, and the accountant's closed form."""

import dataclasses

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from sums_of_rows import EXECUTIONS, SIZE, population, rounds_of, send_rows

import fedsim
from fedsim import rng
from fedsim.aggregators import DistributedMechanism, LocallyNoised, Mean, Wrapper
from fedsim.privacy import EveryRound, epsilon

JIT = fedsim.Jit()


def noise_of(mechanism, execution=JIT, rounds=3):
    return rounds_of(send_rows(mechanism, execution), population(np.zeros(8)), rounds)[1]


def check_noise(mechanism, execution=JIT):
    """Raises ``AssertionError`` unless a message has noise, and the mean of 8 clients that divided by √8, new in each round."""
    sent = mechanism.send(jnp.zeros(SIZE), mechanism.init(jnp.zeros(SIZE)), (), jax.random.key(0)).update
    assert np.std(sent) == pytest.approx(2.0 * 0.5, rel=4 / np.sqrt(2 * SIZE))
    noise = noise_of(mechanism, execution)
    deviation = 2.0 * 0.5 / np.sqrt(8)
    assert np.std(noise) == pytest.approx(deviation, rel=4 / np.sqrt(2 * noise.size))
    assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 5 / np.sqrt(SIZE)
    return noise


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["one device", "eight devices", "lanes"])
def test_every_client_has_noise_of_its_own(name):
    noise = check_noise(LocallyNoised(2.0, clip=0.5), EXECUTIONS[name])
    if name != "one device":
        np.testing.assert_allclose(noise, noise_of(LocallyNoised(2.0, clip=0.5)), rtol=1e-5, atol=1e-6)


@dataclasses.dataclass(frozen=True, eq=False)
class SameForAll(LocallyNoised):
    """A broken mechanism: all clients draw the same noise, as `optax.add_noise` with a fixed key would."""

    def send(self, update, server_memory, memory, key):
        return super().send(update, server_memory, memory, jax.random.key(0))


@dataclasses.dataclass(frozen=True, eq=False)
class ByServer(Wrapper):
    """A broken mechanism: the noise is added once, so the server has seen updates without noise."""

    def finish_round(self, accumulator, memory, key):
        mean, memory = super().finish_round(accumulator, memory, key)
        return jax.tree.map(lambda x, n: x + 2 * 0.5 / 8**0.5 * n, mean, rng.normal_like(key, mean)), memory


@pytest.mark.first(1)
@pytest.mark.parametrize("broken", [SameForAll(2.0, clip=0.5), ByServer()])
def test_the_same_test_finds_broken_mechanisms(broken):
    with pytest.raises(AssertionError):
        check_noise(broken)


def test_an_update_is_clipped_before_the_noise():
    found = rounds_of(send_rows(LocallyNoised(0.0, clip=1.5)), population([0.3, -1.0, 4.0, 1e12]), 1)[1]
    np.testing.assert_allclose(found[0], np.full(SIZE, (0.3 - 1 + 1.5 + 1.5) / 4 / SIZE**0.5), rtol=1e-4)


def test_two_data_sets_of_a_client_are_two_norms_apart():
    mu = 2 * np.sqrt(10) / 20.0
    expected = brentq(lambda e: norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu) - 1e-5, 0, 100)
    found = epsilon(20.0, EveryRound(), rounds=10, delta=1e-5, relation="replace_one")
    assert found == pytest.approx(expected, rel=3e-3)


def test_weights_by_examples_are_refused():
    options = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}
    noised = fedsim.aggregators.Clipped(1.0, inner=LocallyNoised(1.0, clip=0.5, inner=Mean()))
    with pytest.raises(
        ValueError, match="^Expected weighting='uniform' with LocallyNoised, got weighting='examples' in FedAvg"
    ):
        fedsim.algorithms.FedAvg(aggregator=noised, **options).check(federation.data())
    fedsim.algorithms.FedAvg(aggregator=noised, weighting="uniform", **options).check(federation.data())


@pytest.mark.parametrize(
    ("cls", "outer"),
    [*((cls, "AuxMean") for cls in ("FedNova", "QFedAvg", "AdaptiveFedProx", "FedProto")), ("IFCA", "Grouped")],
)
def test_algorithms_that_send_numbers_without_noise_are_refused(cls, outer):
    options = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}
    noised = fedsim.aggregators.Clipped(1.0, inner=LocallyNoised(1.0, clip=0.5))
    with pytest.raises(ValueError, match=f"^Expected an aggregator without LocallyNoised inside {outer}, got Clipped.*: the "):
        getattr(fedsim.algorithms, cls)(aggregator=noised, **options)


def test_running_statistics_would_have_no_noise():
    model = fedsim.Model.from_haiku(
        hk.transform_with_state(lambda x, training: hk.Linear(4)(fedsim.models.BatchNorm()(x["x"], training))),
        features=federation.FEATURES, num_classes=4, train_kwargs={"training": True}, eval_kwargs={"training": False},
        statistics="average",
    )  # fmt: skip
    algorithm = fedsim.algorithms.FedAvg(
        model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), weighting="uniform",
        aggregator=LocallyNoised(1.0, clip=0.5),
    )  # fmt: skip
    with pytest.raises(ValueError, match="LocallyNoised inside AuxMean, .* running statistics, would be sent without noise"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


@pytest.mark.first(2)
@pytest.mark.parametrize("execution", ["one device", "eight devices", "plain Python"])
@pytest.mark.parametrize("name", ["LocallyNoised", "DistributedMechanism"])
def test_a_client_whose_update_is_not_finite_sends_its_noise(name, execution):
    """Without it, the noise of the round would be less, which shows that an update was not finite."""
    mechanism = {
        "LocallyNoised": LocallyNoised(2.0, clip=0.5),
        "DistributedMechanism": DistributedMechanism(2.0, clip=0.5, clients=3, minimum=2),
    }[name]
    algorithm = send_rows(mechanism, EXECUTIONS[execution])
    _, zeros = rounds_of(algorithm, population([0.3, 0.0, 1.0]), 2)
    with pytest.warns(UserWarning, match="did not reach the server"):
        _, found = rounds_of(algorithm, population([0.3, np.nan, 1.0]), 2)
    np.testing.assert_array_equal(found, zeros)
    _, others = rounds_of(algorithm, population([0.3, 0.4, 1.0]), 2)
    assert np.abs(others - zeros).max() > 1e-4  # a control: a finite update is not taken as zeros
