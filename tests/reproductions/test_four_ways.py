"""`fedsim reproduce four_ways` and `data_parallel`: steps, bytes, times and gradients against closed forms and the clock."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import fedsim
from fedsim import rng, systems
from fedsim.decentralized.costs import epoch_seconds
from fedsim.reproductions import Request
from fedsim.reproductions import _data_parallel as parallel
from fedsim.reproductions import _four_ways as four

VALUES = 64 * 32 + 32 + 32 * 10 + 10  # of the perceptron
ROUNDS = 40


def scenario(**fields):
    return dataclasses.replace(four.SCENARIOS["iid"], **fields)


@pytest.fixture(scope="module")
def splits():
    return four._iid(Request(), 0)


def total(way, kind, data, place, rounds=ROUNDS):
    once, each = four.costs(way, kind, data, VALUES, four.PLACES[place])
    return once.until(rounds, each)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["iid", "skewed", "imbalance"])
def test_all_ways_compute_equally_many_gradients(name):
    kind = four.SCENARIOS[name]
    train, _ = kind.load(Request(), 0)
    expected = train.num_clients * kind.local_steps
    for way in four.WAYS:
        batches = four.Maker(way, kind, kind.model(), train.num_clients)(0.1).batches
        steps = int(batches.num_steps(four.population(way, train, 0).sizes).sum())
        steps *= kind.local_steps if way == "distributed" else 1  # rounds of one step
        assert steps * batches.size == expected * kind.batch
        assert way == "offloading" or steps == expected


def test_every_way_has_all_examples(splits):
    train, _ = splits
    for way, clients in zip(four.WAYS, (1, 20, 20, 20), strict=True):
        data = four.population(way, train, 0)
        assert data.num_clients == clients and data.num_examples == train.num_examples
        assert np.bincount(data.columns["y"]).tolist() == np.bincount(train.columns["y"]).tolist()


def test_bytes_equal_closed_forms(splits):
    train, _ = splits
    examples, model = train.num_examples / 20 * (64 + 4), 4 * VALUES  # an image and its label; float32
    ring = 2 * 19 * 4 * -(-VALUES // 20) * 5 * ROUNDS  # 2 (n - 1) messages of 1 / n of the model in each of 5 steps
    expected = {
        "offloading": (examples, model, 20 * (examples + model)),
        "distributed": (examples + ring, examples + ring, 40 * examples),
        "federated": (ROUNDS * model, (ROUNDS + 1) * model, 20 * (2 * ROUNDS + 1) * model),
        "collaborative": (ROUNDS * model, ROUNDS * model, 0),
    }
    for way, numbers in expected.items():
        for place in four.PLACES:
            assert total(way, scenario(), train, place)[:3] == pytest.approx(numbers)


def test_time_and_bytes_of_federated_learning_equal_those_of_the_clock(splits):
    train, _ = splits
    found = systems.schedule(
        fedsim.UniformSampler(train, clients=20, seed=0),
        ROUNDS,
        steps=np.full(20, 5),
        devices=four.PLACES["phone"].devices,
        bytes_down=4 * VALUES,
        bytes_up=4 * VALUES,
    )
    _, each = four.costs("federated", scenario(), train, VALUES, four.PLACES["phone"])
    assert found.seconds == pytest.approx(ROUNDS * each.seconds)
    assert found.totals.bytes_up == pytest.approx(20 * ROUNDS * each.up)
    assert found.totals.bytes_down == pytest.approx(20 * ROUNDS * each.down)


def test_times_and_joules_in_the_data_centre_equal_closed_forms(splits):
    train, _ = splits
    most, model = int(train.sizes.max()) * 68, 4 * VALUES
    rate, latency, gradients = 1.25e9, 5e-5, 20 * 5 * ROUNDS
    offloading, distributed, _, collaborative = (total(way, scenario(), train, "data centre") for way in four.WAYS)
    assert offloading.seconds == pytest.approx(gradients * 1e-3 + 2 * latency + (most + model) / rate)
    assert collaborative.seconds == pytest.approx(ROUNDS * (5e-3 + latency + model / rate))
    step = 1e-3 + 38 * (latency + 4 * -(-VALUES // 20) / rate)
    assert distributed.seconds == pytest.approx(5 * ROUNDS * step + 2 * latency + (most + train.nbytes / 20) / rate)
    for each in (offloading, distributed, collaborative):
        assert each.joules == pytest.approx(gradients * 1e-3 * 10 + 20 * 8e-9 * (each.up + each.down))


def test_costs_of_stragglers(splits):
    train, _ = splits
    dropped, partial = scenario(stragglers="dropped"), scenario(stragglers="partial")
    both = {kind: total("federated", kind, train, "phone") for kind in (scenario(), dropped)}
    assert both[dropped].up == both[scenario()].up / 2 and both[dropped].down == both[scenario()].down
    # All-reduce waits in every step for the slowest straggler, which takes 5 / 4 to 5 times as long as others.
    plain, waits = (total("distributed", kind, train, "data centre") for kind in (scenario(), partial))
    assert 1.25 * 0.2 <= waits.seconds - plain.seconds + 0.2 <= 5 * 0.2 and waits.up == plain.up


def test_distributed_learning_with_full_batches_takes_the_step_of_central_training():
    """All-reduced gradients of shards are the gradient of all examples."""
    generator = np.random.default_rng(0)
    columns = {
        "x": generator.integers(17, size=(40, 8, 8, 1)).astype(np.uint8),
        "y": generator.integers(10, size=40).astype(np.int32),
    }
    data = fedsim.FederatedData.from_arrays(columns, sizes=[25, 5, 5, 5])
    model, params = fedsim.models.digits_logistic(), {}
    for way, batch, devices in (("distributed", 10, 4), ("offloading", 40, 1)):
        kind = scenario(batch=batch, local_steps=1)
        algorithm = four.Maker(way, kind, model, devices)(0.5)
        sampler = four.sampler_of(way, kind, four.population(way, data, 0), 0)
        state, _ = algorithm.apply(algorithm.init(rng.root(0)), sampler.cohort(0))
        params[way] = state.params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *params.values())


@pytest.mark.slow
def test_messages_and_work_are_those_of_the_costs(splits):
    train, _ = splits
    kind = scenario(stragglers="partial")
    algorithm = four.Maker("collaborative", kind, kind.model(), 20)(0.1)
    sampler = four.sampler_of("collaborative", kind, train, 0)
    _, info = algorithm.apply(algorithm.init(rng.root(0)), sampler.cohort(0))
    assert float(info["bits_up"]) / 8 == 20 * four.costs("collaborative", kind, train, VALUES, four.PLACES["phone"])[1].up
    algorithm = four.Maker("federated", kind, kind.model(), 20)(0.1)
    _, info = algorithm.apply(algorithm.init(rng.root(0)), sampler.cohort(0))
    steps = np.asarray(info.clients["num_steps"])[:20]
    assert (steps == 5).sum() == 10 and steps.min() >= 1
    dropped = four.sampler_of("federated", scenario(stragglers="dropped"), train, 0)
    assert len(dropped.cohort(0)) == 10


@pytest.mark.slow
def test_one_device_with_as_many_examples_as_ten_thousand_others():
    train, test = four._imbalanced(Request(), 0)
    for data in (train, test):
        assert data.num_clients == 10_001 and data.sizes[0] == 10_000 and set(data.sizes[1:]) == {1}
    for way in four.WAYS:
        once, each = four.costs(way, four.SCENARIOS["imbalance"], train, 650, four.PLACES["phone"])
        assert np.isfinite(once.until(10, each)).all()


def test_epochs_of_data_parallel_sgd_take_as_long_as_closed_forms_say():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(8)}, sizes=[1] * 8)
    for slow in (0, 2):
        devices = parallel.devices(slow, variation=0.0)
        (expected,) = epoch_seconds([8], 5 * parallel.EPOCH, devices)
        assert expected.synchronous / 5 == pytest.approx(16 * (5 if slow else 1))
        assert expected.asynchronous / 5 == pytest.approx(128 / (8 - slow + slow / 5), rel=0.02)
        for method in ("synchronous", "asynchronous"):
            model, per_step = parallel.METHODS[method]
            sampler = fedsim.UniformSampler(data, clients=8, seed=0)
            clock = systems.schedule(sampler, 640 // per_step, steps=np.ones(8, int), synchronization=model, devices=devices)
            assert clock.seconds == getattr(expected, method)


def test_backup_workers_leave_slow_ones_behind_and_a_bound_does_not():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(8)}, sizes=[1] * 8)
    seconds = {}
    for method, (model, _) in parallel.METHODS.items():
        if model is not None:
            sampler = fedsim.UniformSampler(data, clients=8, seed=0)
            arguments = {"steps": np.ones(8, int), "synchronization": model, "devices": parallel.devices(1, variation=0.0)}
            clock = systems.schedule(sampler, 200, **arguments)
            seconds[method] = clock.steps.time[-1] / clock.totals.aggregated
    assert seconds["backup workers, 6 of 8"] < seconds["synchronous"] / 2
    assert seconds["stale synchronous, bound 2"] == pytest.approx(seconds["synchronous"], rel=0.05)
