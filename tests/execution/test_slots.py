"""Cohorts of varying size share one program: slots beyond the clients change nothing but the infos' shapes."""

import dataclasses

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import rng

EXECUTIONS = {
    "jit, 3 lanes": fedsim.Jit(lanes=3),
    "pmap, 2 devices, 2 lanes": fedsim.Pmap(devices=2, lanes=2),
    "jit, streamed": fedsim.Jit(memory="stream"),
    "jit": fedsim.Jit(),
    "pmap, 8 devices": fedsim.Pmap(devices=8),
    "pmap, 8 devices, streamed": fedsim.Pmap(devices=8, memory="stream"),
    "debug": fedsim.Debug(),
}
POPULATION = federation.data()

# Client 1 has no examples. The fourth round has no clients, the fifth one client without examples, the last all clients.
ROUNDS = [[3, 0, 6], [5], [7, 4, 2], [], [1], [0, 1, 2, 3, 4, 5, 6, 7]]


def cohort(clients, round=0, slots=8):
    return fedsim.Cohort(POPULATION, np.array(clients, np.int32), round, rng.root(0), slots=slots)


def fedavg(**changes):
    settings = dict(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        server_optimizer=optax.sgd(0.5, momentum=0.9),
        batches=fedsim.Batches(size=4, epochs=2),
    )
    return fedsim.algorithms.FedAvg(**(settings | changes))


@pytest.fixture(scope="module")
def unpadded():
    """The same rounds, each with as many slots as clients, without the round that has no clients."""
    algorithm = fedavg(execution=fedsim.Jit())
    states, infos = [algorithm.init(jax.random.key(0))], []
    for round, clients in enumerate(ROUNDS):
        if clients:
            state, info = algorithm.apply(states[-1], cohort(clients, round, slots=0))
            states.append(state)
            infos.append(info)
        else:
            states.append(states[-1])
            infos.append(None)
    return jax.device_get(states), jax.device_get(infos)


def assert_same_info(info, expected, clients):
    """Checks that the first rows are those of the unpadded cohort, and the others zeros."""
    assert int(info.num_clients) == len(clients)
    for name, rows in info.clients.items():
        assert rows.shape[0] == 8
        assert not np.any(rows[len(clients) :])
        if expected is not None:
            np.testing.assert_allclose(rows[: len(clients)], expected.clients[name], rtol=1e-5, atol=1e-6)
    if expected is not None:
        assert (info.num_aggregated, info.num_dropped) == (expected.num_aggregated, expected.num_dropped)


@pytest.mark.first(1)
@pytest.mark.parametrize("how", EXECUTIONS)
def test_a_padded_cohort_gives_the_result_of_an_unpadded_one_with_one_trace(how, unpadded):
    states, infos = unpadded
    model, traces = federation.model(), []

    def counting(examples, outputs):
        traces.append(None)
        return federation.model().loss(examples, outputs)

    algorithm = fedavg(execution=EXECUTIONS[how], model=dataclasses.replace(model, loss=counting))
    state, after_first = algorithm.init(jax.random.key(0)), None
    for round, clients in enumerate(ROUNDS):
        before = jax.device_get(state)
        state, info = algorithm.apply(state, cohort(clients, round))
        federation.assert_trees_close(jax.device_get(state), states[round + 1])
        assert_same_info(jax.device_get(info), infos[round], clients)
        if not POPULATION.sizes[clients].sum():  # The state must not change in any bit.
            federation.assert_trees_equal(jax.device_get(state), before)
        after_first = after_first or len(traces)
    if how != "debug":
        assert len(traces) == after_first
        (compiled,) = federation.compiled_rounds(algorithm)
        assert compiled.rounds.num_executables == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["jit, streamed", "pmap, 2 devices, 2 lanes", "debug"])
def test_cohorts_of_different_sizes_run_in_one_dispatch(how, unpadded):
    states, infos = unpadded
    algorithm = fedavg(execution=EXECUTIONS[how])
    cohorts = [cohort(clients, round) for round, clients in enumerate(ROUNDS)]
    state, stacked = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohorts, max_rounds=9)
    federation.assert_trees_close(jax.device_get(state), states[-1])
    for round, clients in enumerate(ROUNDS):
        assert_same_info(jax.tree.map(lambda x, r=round: np.asarray(x)[r], stacked), infos[round], clients)


def test_a_padded_round_in_several_programs_is_the_same_round(unpadded, monkeypatch):
    states, infos = unpadded
    monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)
    algorithm = fedavg(execution=fedsim.Pmap(devices=2))
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort(ROUNDS[0]))
    (compiled,) = federation.compiled_rounds(algorithm)
    assert federation.num_executables_of_parts(compiled) >= 1 and compiled.rounds.num_executables == 0
    federation.assert_trees_close(jax.device_get(state), states[1])
    assert_same_info(jax.device_get(info), infos[0], ROUNDS[0])


def test_with_uniform_weighting_free_slots_do_not_count():
    """In the tests above, empty slots have weight 0 in any case; here they would not."""
    algorithm = fedavg(weighting="uniform", execution=fedsim.Jit())
    state = algorithm.init(jax.random.key(0))
    padded, info = algorithm.apply(state, cohort([2, 3]))
    alone, _ = algorithm.apply(state, cohort([2, 3], slots=2))
    federation.assert_trees_close(padded, alone)
    assert info.clients["weight"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_experiment_run_accepts_cohorts_of_any_size():
    class Growing:
        data = POPULATION

        def cohort(self, round):
            return cohort(range(round % 5), round)

    algorithm = fedavg(execution=fedsim.Jit())
    result = fedsim.experiment.run(algorithm, Growing(), rounds=12, test_data=POPULATION, progress=False)
    examples = [line["num_examples"] for line in result.history if "num_examples" in line]
    assert examples == [int(POPULATION.sizes[: round % 5].sum()) for round in range(12)]
    assert result.history[0]["loss"] is None
    (compiled,) = federation.compiled_rounds(algorithm)
    assert compiled.rounds.num_executables == 1


def test_a_python_loop_iterates_over_clients_only():
    assert [client_id for client_id, _, _ in cohort([4, 2])] == ["client4", "client2"]
    assert list(cohort([])) == [] and len(cohort([])) == 0 and cohort([]).client_ids == []


def test_an_error_in_a_round_without_clients_names_the_method():
    class Broken(fedsim.algorithms.FedAvg):
        def client_update(self, shared, client):
            raise ArithmeticError("no luck")

    algorithm = Broken(**{f.name: getattr(fedavg(), f.name) for f in dataclasses.fields(fedavg()) if f.init})
    algorithm = dataclasses.replace(algorithm, execution=fedsim.Debug())
    with pytest.raises(
        fedsim.execution.StageError, match="client_update of a client without examples, in an empty cohort: no luck"
    ):
        algorithm.apply(algorithm.init(jax.random.key(0)), cohort([]))


@pytest.mark.parametrize(
    ("clients", "slots", "message"),
    [([], 0, "cohort is empty"), ([0, 1], 1, r"Expected 2 .* <= slots <= 8 .*, got slots=1"), ([0], 9, "got slots=9")],
)
def test_impossible_slots_are_rejected(clients, slots, message):
    with pytest.raises(ValueError, match=message):
        cohort(clients, slots=slots)
