"""Clients that start from what the server sent in earlier rounds, against a loop over rounds of one client each."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators
from fedsim.data import Arrivals

EXECUTIONS = {
    "jit": fedsim.Jit(),
    "groups": fedsim.Jit(lanes=2),
    "pmap": fedsim.Pmap(devices=2),
    "streamed": fedsim.Jit(memory="stream"),
    "debug": fedsim.Debug(),
}
# The clients of each round, and how many rounds ago they started.
CLIENTS = [[0, 2], [3, 5], [4], [0, 6, 7], [2, 3]]
STALENESS = [[0, 0], [1, 0], [2], [0, 3, 1], [3, 1]]
SCALES = [[1.0, 0.5], [0.25, 2.0], [0.5], [1.0, 0.0, 3.0], [0.7, 0.3]]
WEIGHTS = [[1.0, 1.0], [2.0, 0.5], [1.0], [1.0, 2.0, 0.0], [0.1, 0.2]]
ROUNDS = list(zip(CLIENTS, STALENESS, SCALES, WEIGHTS, strict=True))


def make(staleness=None, **changes):
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.3), "batches": fedsim.Batches(size=4, epochs=2)}
    return fedsim.algorithms.FedAvg(**settings, staleness=staleness, **changes)


def stale_cohorts():
    data, cohorts = federation.data(), []
    for round, (clients, staleness, scales, weights) in enumerate(ROUNDS):
        arrivals = Arrivals.of(staleness, round=round, scales=scales, weights=weights)
        cohorts.append(fedsim.Cohort(data, np.array(clients), round, fedsim.rng.root(0), slots=4, arrivals=arrivals))
    return cohorts


def expected_params(mixing):
    """Computes every round from rounds of a single client each, with the state of the version that it started from."""
    one, data = make(execution=fedsim.Jit()), federation.data()
    states = [one.init(jax.random.key(0))]
    for round, of_round in enumerate(ROUNDS):
        now, total, weights = states[-1], jax.tree.map(jnp.zeros_like, states[-1].params), 0.0
        for client, age, scale, factor in zip(*of_round, strict=True):
            start = states[round - age]
            alone = fedsim.Cohort(data, clients=np.array([client]), round=round - age, key=fedsim.rng.root(0))
            end = one.apply(start, alone)[0].params
            origin = now.params if mixing else start.params
            movement = jax.tree.map(lambda a, b: a - b, origin, end)
            weight = float(data.sizes[client]) * factor
            total = jax.tree.map(lambda sum, x, w=weight * scale: sum + w * x, total, movement)
            weights += weight
        params = jax.tree.map(lambda p, x, w=weights: p - x / w, now.params, total)
        states.append(now._replace(params=params, round=now.round + 1))
    return states[-1].params


@pytest.mark.first(1)
@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("how", ["jit", *(how for how in EXECUTIONS if how != "jit")])
def test_updates_are_those_of_rounds_from_the_version_of_each_client(how, mixing):
    algorithm = make(fedsim.Staleness(bound=3, mixing=mixing), execution=EXECUTIONS[how])
    state, infos = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), stale_cohorts())
    federation.assert_trees_close(state.server.params, expected_params(mixing))
    for round, staleness in enumerate(STALENESS):
        np.testing.assert_array_equal(infos.clients["staleness"][round][: len(staleness)], staleness)


def test_clients_that_start_now_give_the_rounds_of_an_algorithm_without_staleness():
    algorithms = [
        make(kept, execution=fedsim.Jit(), aggregator=aggregators.CoordinateMedian()) for kept in (None, fedsim.Staleness(2))
    ]
    states = []
    for algorithm in algorithms:
        state = algorithm.init(jax.random.key(0))
        for round in range(3):
            state, _ = algorithm.apply(state, federation.cohort(round=round))
        states.append(fedsim.rounds.server_state(state))
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_round_without_updates_is_a_version_too():
    """Its number is taken, so later clients find the versions that they started from."""
    algorithm = make(fedsim.Staleness(bound=2), execution=fedsim.Jit())
    data, key = federation.data(), fedsim.rng.root(0)
    empty = [fedsim.Cohort(data, np.array([1]), round=r, key=key) for r in range(3)]  # a client without examples
    last = fedsim.Cohort(data, np.array([3]), round=3, key=key, arrivals=Arrivals.of([1], round=3))
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), [*empty, last])
    plain = make(execution=fedsim.Jit())
    alone = plain.apply(plain.init(jax.random.key(0)), dataclasses.replace(last, round=2, arrivals=None))[0]
    federation.assert_trees_close(state.server.params, alone.params)


@pytest.mark.parametrize(("dtype", "scaled"), [(jnp.complex64, True), (jnp.float16, True), (jnp.int32, False)])
def test_scales_multiply_all_numbers_but_integers(dtype, scaled):
    arrived = fedsim.Staleness(bound=1).arrived(jnp.array([2, 6], dtype), jnp.float32(0.5), (), ())
    assert arrived.dtype == dtype and arrived.tolist() == ([1, 3] if scaled else [2, 6])


def test_errors_name_the_remedy():
    data, key = federation.data(), fedsim.rng.root(0)
    stale = fedsim.Cohort(data, np.array([3]), round=5, key=key, arrivals=Arrivals.of([4], round=5))
    with pytest.raises(ValueError, match=r"staleness=None: set staleness=fedsim.Staleness\(bound="):
        make().apply(make().init(jax.random.key(0)), stale)
    short = make(fedsim.Staleness(bound=3))
    with pytest.raises(ValueError, match=r"at most 3, got 4 in round 5: set staleness=fedsim.Staleness\(bound=4\)"):
        short.apply(short.init(jax.random.key(0)), stale)
    for message, wrong in {
        r"Expected staleness in \[0, 5\]": Arrivals.of([6], round=5),
        "Expected key_rounds >= 0": Arrivals.of([0], round=5, key_rounds=[-1]),
        "Expected finite weights >= 0": Arrivals.of([0], round=5, weights=[-1.0]),
        "a number for each of the 1 clients": Arrivals.of([0, 1], round=5),
    }.items():
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(stale, arrivals=wrong)
    mime = fedsim.algorithms.Mime(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        staleness=fedsim.Staleness(bound=4),
    )
    with pytest.raises(ValueError, match=r"Mime cannot run with staleness.*a single clients.aggregate"):
        mime.apply(mime.init(jax.random.key(0)), stale)
    scaffold = fedsim.algorithms.SCAFFOLD(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        staleness=fedsim.Staleness(bound=4, mixing=True),
    )
    with pytest.raises(ValueError, match="difference of parameters, for Staleness"):
        scaffold.apply(scaffold.init(jax.random.key(0)), stale)
