"""The Gaussian mechanism: against NumPy, its sensitivity, its noise in any execution, and broken mechanisms."""

import dataclasses
import functools

import federation
import jax
import numpy as np
import optax
import pytest
from sums_of_rows import EXECUTIONS, SIZE, population, rounds_of, send_rows

import fedsim
from fedsim import aggregators, rng, tree
from fedsim.aggregators import AdaptiveClip, GaussianMechanism


def adaptive(values, rounds, clip, denominator):
    """Returns the aggregates and the norms of the paper's algorithm without noise, for updates on a line."""
    norm, aggregates, norms = clip.start, [], []
    for _ in range(rounds):
        aggregates.append(sum(np.sign(v) * min(abs(v), norm) for v in values) / denominator)
        below = (sum((1 if abs(v) <= norm else 0) - 0.5 for v in values) / denominator) + 0.5
        norm *= np.exp(-clip.learning_rate * (below - clip.quantile))
        norms.append(norm)
    return np.array(aggregates), np.array(norms)


def test_without_noise_it_is_the_papers_algorithm_in_numpy():
    values = np.array([0.05, -0.3, 2.0, 0.9, 0.4, -5.0])
    clip = AdaptiveClip(start=0.2, quantile=0.7, learning_rate=0.5)
    algorithm = send_rows(GaussianMechanism(0.0, clip=clip, denominator=4))
    state, aggregates = rounds_of(algorithm, population(values), rounds=5)
    expected, norms = adaptive(values, 5, clip, 4)
    np.testing.assert_allclose(aggregates, np.outer(expected / SIZE**0.5, np.ones(SIZE)), rtol=1e-4)
    np.testing.assert_allclose(state.aggregator["update"], norms[-1], rtol=1e-5)


def test_with_x64_the_norm_is_the_same():
    algorithm, data = send_rows(GaussianMechanism(1.0, clip=AdaptiveClip(), denominator=2)), population([0.3, -1.0, 4.0])
    expected = rounds_of(algorithm, data, 2)[0].aggregator["update"]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = rounds_of(algorithm, data, 2)[0].aggregator["update"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_norm_converges_to_the_quantile_of_the_norms():
    """With 101 norms from 1 to 2, the quantile 0.3 lies at 1.3; the noise on the count is small."""
    clip = AdaptiveClip(quantile=0.3, learning_rate=0.5, count_noise=0.51)
    algorithm = send_rows(GaussianMechanism(1.0, clip=clip, denominator=101))
    state, _ = rounds_of(algorithm, population(np.linspace(1, 2, 101)), rounds=60)
    assert float(state.aggregator["update"]) == pytest.approx(1.3, abs=0.03)


@pytest.mark.first(1)
@pytest.mark.parametrize("clip", [1.5, AdaptiveClip(start=1.5)])
def test_one_more_client_with_any_update_moves_the_aggregate_by_at_most_the_norm(clip):
    """The noise of a round does not depend on the clients, so a difference of two aggregates is that of their sums."""
    data, big = population([0.3, -1.0, 4.0]), population([0.3, -1.0, 4.0, 1e12])
    mechanism = GaussianMechanism(1.0, clip=clip, denominator=2.5)
    one, a = rounds_of(send_rows(mechanism), data, 1)
    other, b = rounds_of(send_rows(mechanism, weight=7.0), big, 1)
    moved = np.linalg.norm((b - a)[0].astype(np.float64)) * 2.5
    assert 1.5 * 0.999 < moved < 1.5 * 1.001
    if isinstance(clip, AdaptiveClip):  # The count moves by a half.
        ratio = float(one.aggregator["update"] / other.aggregator["update"])
        assert abs(np.log(ratio)) == pytest.approx(0.2 * 0.5 / 2.5, rel=1e-3)


def test_updates_that_are_not_finite_do_not_change_the_denominator():
    mechanism = GaussianMechanism(0.0, clip=1.0, denominator=4)
    for values in ([3.0, 3.0, np.nan], [3.0, 3.0], [3.0, 3.0, np.inf, 0.0]):
        with_warning = pytest.warns(UserWarning, match="did not reach the server") if not np.isfinite(values).all() else None
        algorithm = send_rows(mechanism)
        if with_warning is None:
            _, aggregates = rounds_of(algorithm, population(values), 1)
        else:
            with with_warning:
                _, aggregates = rounds_of(algorithm, population(values), 2)
        np.testing.assert_allclose(np.linalg.norm(aggregates[0]), 2 / 4, rtol=1e-4)


def check_noise(mechanism, execution, deviation, rounds=3):
    """Raises ``AssertionError`` unless the noise has this deviation, and is new in every round and coordinate."""
    _, noise = rounds_of(send_rows(mechanism, execution), population(np.zeros(8)), rounds)
    # The deviation of a normal sample of n numbers differs by 4 / sqrt(2 n) once in 16,000 draws.
    assert np.std(noise) == pytest.approx(deviation, rel=4 / np.sqrt(2 * noise.size))
    assert abs(np.mean(noise)) < 4 * deviation / np.sqrt(noise.size)
    largest = np.abs(np.corrcoef(noise) - np.eye(rounds)).max()
    assert largest < 5 / np.sqrt(SIZE)
    return noise


@functools.cache
def noise_of(name):
    return check_noise(GaussianMechanism(2.0, clip=0.5, denominator=10), EXECUTIONS[name], 0.1)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "plain Python")) for name in EXECUTIONS]
)
def test_the_noise_has_its_deviation_once_in_every_execution(name):
    # Compiled in another way, the last bit may differ.
    np.testing.assert_allclose(noise_of(name), noise_of("one device"), rtol=1e-6, atol=1e-8)


@dataclasses.dataclass(frozen=True, eq=False)
class NoisePerDevice(GaussianMechanism):
    """A broken mechanism: every device adds noise to its own sum."""

    def merge_devices(self, accumulator, axis):
        key = jax.random.fold_in(jax.random.key(3), jax.lax.axis_index(axis))
        noise = rng.normal_like(key, accumulator)
        own = tree.add(accumulator, tree.scale(noise, self.noise_multiplier * self.clip))
        return super().merge_devices(own, axis)


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseOfMany(GaussianMechanism):
    """A broken mechanism: the noise is divided by the number of updates that arrived, here 8, instead of the fixed one."""

    def finish_round(self, accumulator, memory, key):
        return GaussianMechanism(2.0, clip=0.5, denominator=8.0).finish_round(accumulator, memory, key)


@dataclasses.dataclass(frozen=True, eq=False)
class SameNoise(GaussianMechanism):
    """A broken mechanism: all rounds have the same noise, as a resumed run that began its stream again would have."""

    def finish_round(self, accumulator, memory, key):
        return super().finish_round(accumulator, memory, jax.random.key(0))


@pytest.mark.first(1)
@pytest.mark.parametrize("broken", [NoisePerDevice, NoiseOfMany, SameNoise])
def test_the_same_test_finds_broken_mechanisms(broken):
    execution = EXECUTIONS["eight devices"]
    with pytest.raises(AssertionError):
        check_noise(broken(2.0, clip=0.5, denominator=10), execution, 0.1)


def test_several_rounds_in_one_dispatch_have_the_noise_of_single_ones():
    data, algorithm = population(np.zeros(8)), send_rows(GaussianMechanism(2.0, clip=0.5, denominator=10))
    cohorts = [fedsim.Cohort.of(data, data.client_ids, round=round) for round in range(3)]
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohorts)
    np.testing.assert_array_equal(fedsim.rounds.server_state(state), noise_of("one device")[-1])


def test_a_round_without_updates_has_noise_too():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros([2, 1], np.float32)}, sizes=[2, 0])
    algorithm = send_rows(GaussianMechanism(2.0, clip=0.5, denominator=10))
    for clients in ([], [1]):
        cohort = fedsim.Cohort(data, np.array(clients, np.int32), 0, jax.random.key(0), slots=2)
        state, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
        assert int(info.num_aggregated) == 0
        assert np.std(fedsim.rounds.server_state(state)) == pytest.approx(0.1, rel=0.05)


def test_the_sum_and_the_count_together_have_the_noise_multiplier():
    for noise, denominator, count_noise in ((1.0, 100.0, 5.0), (1.0, 10.0, 1.0), (2.0, 10.0, 2.0)):
        mechanism = GaussianMechanism(noise, clip=AdaptiveClip(), denominator=denominator)
        assert float(mechanism.count_noise) == count_noise
        assert float(mechanism.sum_multiplier) ** -2 + (2 * count_noise) ** -2 == pytest.approx(noise**-2)
    with pytest.raises(ValueError, match=r"^Expected count_noise > 0.5 and finite, got count_noise=0.5: less noise"):
        GaussianMechanism(1.0, clip=AdaptiveClip(count_noise=0.5), denominator=10)


def test_the_message_has_one_bit_more_if_the_norm_adapts():
    for clip, more in ((1.0, 0), (AdaptiveClip(), 1)):
        algorithm, data = send_rows(GaussianMechanism(1.0, clip=clip, denominator=1)), population([1.0])
        _, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, data.client_ids))
        assert info.clients["bits_up"][0] == 32 * SIZE + more


def test_an_adaptive_norm_needs_equal_weights():
    with pytest.raises(ValueError, match="Expected a number for clip with largest_weight=100.0, got AdaptiveClip"):
        GaussianMechanism(1.0, clip=AdaptiveClip(), denominator=5, largest_weight=100.0)


def test_weights_by_examples_need_a_bound():
    options = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}
    mechanism = GaussianMechanism(1.0, clip=1.0, denominator=8)
    with pytest.raises(ValueError, match=r"^Expected weighting='uniform' with GaussianMechanism, got weighting='examples'"):
        fedsim.algorithms.FedAvg(aggregator=aggregators.Clipped(1.0, inner=mechanism), **options).check(federation.data())
    bounded = dataclasses.replace(mechanism, largest_weight=10.0)
    fedsim.algorithms.FedAvg(aggregator=bounded, **options).check(federation.data())
    fedsim.algorithms.FedAvg(aggregator=mechanism, weighting="uniform", **options).check(federation.data())
