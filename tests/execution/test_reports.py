"""Problems of rounds are reported once, and the check for them does not wait for the device."""

import dataclasses
import types
import warnings

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim.aggregators import DistributedMechanism, GaussianMechanism, SecureMean
from fedsim.execution import report_problems, watch_problems
from fedsim.rounds import RoundInfo


class Computed:
    """A count that has been computed. Reading it costs nothing, but computing with it would wait for the device's queue."""

    def __array__(self, dtype=None, copy=None):
        return np.zeros([0], dtype or np.int32)

    def is_ready(self):
        return True

    def sum(self, *args, **kwargs):
        raise AssertionError("a sum on the device waits for the rounds under way")


def test_counts_are_read_without_further_computation():
    program, info = types.SimpleNamespace(nonfinite="drop"), RoundInfo({}, *(Computed() for _ in range(5)))
    watch_problems(program, info, [])
    assert program._execution["unread"] == []


def fedavg(**batches):
    return fedsim.algorithms.FedAvg(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(**batches), execution=fedsim.Jit()
    )


def data(*sizes):
    n = sum(sizes)
    columns = {"x": np.ones([n, 3], np.float32), "y": np.zeros(n, np.int32)}
    return fedsim.FederatedData.from_arrays(columns, sizes=sizes, client_ids=[f"client{i}" for i in range(len(sizes))])


def messages(algorithm, cohorts):
    """Returns the warnings of several rounds, after one more round, in which the last warnings are read."""
    state = algorithm.init(jax.random.key(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for cohort in [*cohorts, cohorts[-1]]:
            state, _ = jax.block_until_ready(algorithm.apply(state, cohort))
    return [str(w.message) for w in caught]


def test_clients_that_can_never_take_a_step_and_rounds_without_updates_are_reported_once():
    population, algorithm = data(5, 5, 20, 0), fedavg(size=10, drop_remainder=True)
    cohorts = [fedsim.Cohort.of(population, names, round=r) for r, names in enumerate((["client2"], ["client0", "client1"]))]
    never, idle = messages(algorithm, cohorts)
    assert "2 of 4 clients, the first with 5 examples, can never take a step" in never and "drop_remainder=False" in never
    assert "Round 1 aggregated no update" in idle and "none of its 2 clients took a step" in idle


def test_a_cohort_without_clients_is_reported():
    population = data(5, 5)
    empty = fedsim.Cohort(population, np.zeros(0, np.int32), 3, jax.random.key(0), slots=2)
    (message,) = messages(fedavg(size=5), [empty])
    assert "Round 3 aggregated no update" in message and "its cohort has no clients" in message


def test_weights_of_zero_are_reported():
    class Weightless(fedsim.algorithms.FedAvg):
        def weight(self, client):
            return 0.0 * super().weight(client)

    algorithm = Weightless(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    (message,) = messages(algorithm, [fedsim.Cohort.of(data(5, 0, 5), ["client0", "client1", "client2"])])
    assert "of its 3 clients 1 took no step, 0 sent an update with a NaN or an infinity, and 2 had weight 0" in message


@pytest.mark.parametrize(
    "aggregator",
    [SecureMean(max_weight=1.0, minimum=3), DistributedMechanism(1.0, clip=1.0, clients=3)],
    ids=["secure mean", "distributed mechanism"],
)
def test_sums_of_too_few_clients_are_reported_once(aggregator):
    algorithm, population = dataclasses.replace(fedavg(size=5), aggregator=aggregator), data(5, 5, 0, 5)
    names = ["client0", "client1", "client3"], ["client0", "client1", "client2"]
    cohorts = [fedsim.Cohort.of(population, each, round=r) for r, each in enumerate(names)]
    info = RoundInfo({}, *np.zeros([5, 2], np.int32))._replace(num_aggregated=np.array([3, 2]))
    name = type(aggregator).__name__
    with pytest.warns(UserWarning, match=f"In round 1, 2 client.s. sent an update, fewer than minimum=3 of {name}"):
        report_problems(algorithm, info, cohorts)
    report_problems(algorithm, info, cohorts)  # A second warning would be an error.


def test_a_round_without_updates_is_not_reported_if_noise_hides_it():
    algorithm = dataclasses.replace(fedavg(size=5), aggregator=GaussianMechanism(1.0, clip=1.0, denominator=2))
    info = RoundInfo({}, *np.zeros([5, 1], np.int32))
    report_problems(algorithm, info, [fedsim.Cohort.of(data(0, 5), ["client0"])])


@pytest.mark.parametrize("rounds", [1, 2])
def test_several_rounds_in_one_dispatch_are_reported(rounds):
    algorithm = fedavg(size=20)
    population = data(0, 20)
    cohorts = [fedsim.Cohort.of(population, ["client0"], round=r) for r in range(rounds)]
    _, info = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohorts)
    with pytest.warns(UserWarning, match="Round 0 aggregated no update") as caught:
        fedsim.execution.report_problems(fedavg(size=20), info, cohorts)
    assert len(caught) == 1
