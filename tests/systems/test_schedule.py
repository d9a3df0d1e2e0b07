"""The schedule against a simple simulation, and its invariants under random faults."""

import dataclasses
import itertools
import json
import math
import re
import shlex
import unittest.mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from fault_replay import BYTES_DOWN, CLIENTS, COHORT, ROUNDS, SEED, STEPS, written_on_failure
from federation import singletons

from fedsim import rng, systems
from fedsim.commands import main
from fedsim.experiment import read_metrics
from fedsim.names import make
from fedsim.samplers import ScheduleSampler, Stragglers, UniformSampler
from fedsim.systems import _server
from fedsim.systems._draws import BLOCK, purpose_generator

SAMPLER = UniformSampler(singletons(CLIENTS), clients=COHORT, seed=SEED)
SPEEDS = systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0), variation=systems.LogNormal(sigma=0.5))


def assert_equal(first, second):
    for a, b in zip((first.updates, first.steps, first.timeline), (second.updates, second.steps, second.timeline), strict=True):
        for found, expected in zip(a, b, strict=True):
            np.testing.assert_array_equal(found, expected)
    assert first.totals == second.totals and first.seconds == second.seconds


def joined(parts):
    tables = zip(*((part.updates, part.steps, part.timeline) for part in parts), strict=True)
    updates, steps, timeline = (type(table[0])(*map(np.concatenate, zip(*table, strict=True))) for table in tables)
    return systems.Schedule(updates, steps, timeline, parts[-1].totals, parts[-1].seconds)


def test_buffered_equals_a_simple_simulation():
    size, concurrency, rounds = 3, 8, 50
    devices = systems.Devices(
        seconds_per_step=systems.LogNormal(sigma=1.0), variation=systems.Exponential(1.0),
        download_rate=systems.LogNormal(median=100.0), upload_rate=20.0, latency=systems.HalfNormal(0.1),
    )  # fmt: skip
    found = systems.schedule(
        SAMPLER, rounds, steps=STEPS, devices=devices, bytes_down=50, bytes_up=30,
        synchronization=systems.Buffered(size=size, concurrency=concurrency),
    )  # fmt: skip

    key = rng.root(3)
    speed = np.exp(purpose_generator(key, "seconds_per_step").standard_normal(40))
    download = 50 / (100 * np.exp(purpose_generator(key, "download_rate").standard_normal(40)))
    latency = 0.1 * np.abs(purpose_generator(key, "latency").standard_normal(40))
    variation = purpose_generator(key, "variation").standard_exponential(BLOCK)
    seconds = 2 * latency + download + STEPS * speed + 30 / 20
    stream = ((c, r) for r in range(1000) for c in SAMPLER.cohort(r).clients)
    flying, expected, buffer, now, version, number = [], [], [], 0.0, 0, 0
    while version < rounds:
        while len(flying) < concurrency:
            client, round = next(stream)
            if client not in {c for _, _, c, *_ in flying + buffer}:
                flying.append((now + variation[number] * seconds[client], number, client, round, version, now))
                number += 1
        first = min(flying)
        flying.remove(first)
        now = first[0]
        buffer.append(first)
        if len(buffer) == size:
            expected += [(version, n, c, r, v, version - v, (1 + version - v) ** -0.5, s, t) for t, n, c, r, v, s in buffer]
            version, buffer = version + 1, []
    step, numbers, clients, rounds_of, versions, staleness, scale, start, stop = map(np.array, zip(*expected, strict=True))
    updates = found.updates
    np.testing.assert_array_equal(updates.number, numbers)
    np.testing.assert_array_equal(updates.client, clients)
    np.testing.assert_array_equal(updates.round, rounds_of)
    np.testing.assert_array_equal(updates.version, versions)
    np.testing.assert_array_equal(updates.step, step)
    np.testing.assert_array_equal(updates.staleness, staleness)
    np.testing.assert_allclose(updates.scale, scale)
    np.testing.assert_allclose(updates.start, start)
    np.testing.assert_allclose(updates.stop, stop)
    assert found.largest_staleness == staleness.max() > 3


def test_synchronous_rounds_have_the_sampler_s_cohorts():
    found = systems.schedule(SAMPLER, 20, steps=STEPS, devices=SPEEDS)
    for round in range(20):
        of_round = found.updates.step == round
        assert sorted(found.updates.client[of_round]) == sorted(SAMPLER.cohort(round).clients)
        assert (found.updates.round[of_round] == round).all()


def test_over_selection_keeps_the_first_and_the_others_are_late():
    sampler = ScheduleSampler(singletons(40), [["0", "1", "2", "3"], ["10", "11", "12", "13"]], seed=0, repeat=True)
    found = systems.schedule(sampler, 2, steps=np.arange(40) + 1, synchronization=systems.Synchronous(over_selection=2.0))
    assert found.updates.client.tolist() == [0, 1, 10, 11]
    assert found.steps.time.tolist() == [2.0, 14.0]
    assert (found.totals.late, found.totals.steps_wasted) == (2, 3 + 4)
    assert found.totals.in_flight == 2 + 4  # clients 12 and 13, and the next round


def test_late_updates_are_used_with_their_staleness():
    sampler = ScheduleSampler(singletons(40), [["0", "1", "2", "3"], ["10", "11", "12", "13"]], seed=0, repeat=True)
    model, policy = systems.Synchronous(over_selection=2.0), systems.Policy(late="use")
    found = systems.schedule(sampler, 2, steps=np.arange(40) + 1, synchronization=model, policy=policy)
    assert found.updates.client.tolist() == [0, 1, 2, 3, 10, 11]
    assert found.updates.staleness.tolist() == [0, 0, 1, 1, 0, 0] and found.totals.late == 0


def test_a_late_update_takes_the_place_of_a_client_that_nobody_can_replace():
    sampler = UniformSampler(singletons(2), clients=2, seed=0)
    arguments = {"steps": np.array([1, 5]), "policy": systems.Policy(timeout=2.0, late="use")}
    assert systems.schedule(sampler, 1, **arguments).steps.time.tolist() == [5.0]
    first, second = (systems.Simulator(sampler, **arguments) for _ in range(2))
    begin = first.advance(1, seconds=3.0)
    second.restore(json.loads(json.dumps(first.state())))
    assert_equal(joined([begin, second.advance(4)]), systems.schedule(sampler, 4, **arguments))


EACH_FAULT = (
    systems.Fault(), systems.Fault(failure=0.5, recovery=1.0), systems.Fault(lost_up=2), systems.Fault(lost_down=2),
    systems.Fault(delay_up=7.0, doubled_up=True),
)  # fmt: skip


@pytest.mark.first(4)
@pytest.mark.parametrize("steps", [[1, 5], [1, 5, 2]])
@pytest.mark.parametrize(
    "model",
    [
        systems.Synchronous(), systems.Buffered(size=2, concurrency=1), systems.StaleSynchronous(bound=0),
        systems.Synchronous(over_selection=2.0), systems.Synchronous(deadline=3.0, minimum=2),
        systems.StaleSynchronous(bound=1, versions=0), systems.Buffered(size=2, concurrency=2),
        systems.Asynchronous(concurrency=2),
    ],
)  # fmt: skip
def test_every_schedule_with_late_updates_goes_on_and_loses_nothing(model, steps, monkeypatch):
    """After one fault of any kind, each client answers sooner or later, so every server step comes."""
    monkeypatch.setattr(_server, "_FEW_SKIPPED", 10)  # enough for so few clients, and faster
    monkeypatch.setattr(_server, "_MOST_SKIPPED", 40)
    sampler = UniformSampler(singletons(len(steps)), clients=2, seed=0)
    for fault, number, retries in itertools.product(EACH_FAULT, range(3), range(2)):
        policy = systems.Policy(timeout=2.0, retries=retries, late="use")
        found = systems.schedule(
            sampler, 6, steps=np.array(steps), synchronization=model, policy=policy,
            faults=systems.FaultSchedule({number: fault}),
        )  # fmt: skip
        assert found.totals.dispatched == sum(found.totals[1:7])
        # Each update that arrived and was not used is late, dropped or in the buffer, and none is used twice.
        assert len(set(found.updates.number)) == len(found.updates.number) == found.totals.aggregated
        assert found.totals.late == 0 and (found.updates.stop <= found.steps.time[found.updates.step]).all()


def test_deadline_ends_a_round_and_a_round_below_the_minimum_does_not_count():
    sampler = ScheduleSampler(singletons(8), [["0", "6", "7"], ["0", "1", "5"], ["2", "3", "4"]], seed=0, repeat=True)
    steps = np.array([1, 2, 3, 4, 5, 50, 60, 70])
    found = systems.schedule(sampler, 2, steps=steps, synchronization=systems.Synchronous(deadline=10.0, minimum=2))
    # Round 0 has one update at its deadline; round 1 two; round 2 ends when its last update arrives.
    assert found.updates.client.tolist() == [0, 1, 2, 3, 4]
    assert found.steps.time.tolist() == [20.0, 25.0]
    assert found.totals.dropped == 1


def test_a_late_update_outlasts_a_round_that_does_not_count():
    sampler = ScheduleSampler(singletons(6), [["0", "1"], ["2", "3"], ["4", "5"]], seed=0, repeat=True)
    model, policy = systems.Synchronous(deadline=10.0, minimum=2), systems.Policy(late="use")
    found = systems.schedule(sampler, 1, steps=np.array([1, 15, 1, 50, 1, 2]), synchronization=model, policy=policy)
    # Each of the first two rounds has one update in time. Client 1 answers in the second one.
    assert found.updates.client.tolist() == [1, 4, 5] and found.steps.time.tolist() == [22.0]
    assert (found.totals.dropped, found.totals.late) == (2, 0)


def test_update_that_arrives_at_the_deadline_is_in_time():
    found = systems.schedule(SAMPLER, 3, steps=np.full(40, 2), synchronization=systems.Synchronous(deadline=2.0))
    assert found.steps.time.tolist() == [2.0, 4.0, 6.0] and found.totals.late == 0


def test_an_update_of_a_replacement_that_arrives_at_the_deadline_is_in_time():
    sampler = ScheduleSampler(singletons(3), [["0", "1"], ["2"]], seed=0, repeat=True)
    found = systems.schedule(
        sampler, 1, steps=np.array([8, 5, 6]), synchronization=systems.Synchronous(deadline=10.0),
        faults=systems.FaultSchedule({0: systems.Fault(failure=0.5)}),
    )  # fmt: skip
    # Client 0 fails at 4 seconds, and client 2 takes its place until 10.
    assert found.updates.client.tolist() == [1, 2] and found.totals.late == 0


def test_a_client_that_goes_offline_for_good_has_taken_the_steps_that_fit_into_its_time_online():
    def totals_of(online, **fault):
        devices = systems.Devices(availability=systems.Traces({"0": {"online": online}, "1": {}, "2": {}}), latency=1.0)
        faults = systems.FaultSchedule({0: systems.Fault(**fault)})
        return systems.schedule(sampler, 1, steps=np.full(3, 10), devices=devices, faults=faults).totals

    sampler = ScheduleSampler(singletons(3), [["0", "1"], ["2"], ["1"]], seed=0)
    for online, fault, expected in (
        ([(0, 0.5)], {}, 0),  # while it receives the model
        ([(0, 2.5), (4, 5)], {}, 2),
        ([(0, 2.5), (4, 5)], {"failure": 0.1}, 1),
        ([(0, 2.5), (4, 5)], {"failure": 0.9}, 2),
        ([(0, 11.5)], {}, 10),  # while it sends its update
    ):
        totals = totals_of(online, **fault)
        assert (totals.steps, totals.steps_wasted) == (20 + expected, expected)


@pytest.mark.parametrize("interrupt", [False, True])
def test_a_worker_that_waits_does_not_take_over_the_work_of_a_lost_one(interrupt):
    sampler = ScheduleSampler(singletons(3), [["0", "1"], ["0", "1", "2"]], seed=0, repeat=True)
    arguments = {"steps": np.array([1, 10, 1]), "synchronization": systems.StaleSynchronous(bound=0)}
    arguments["faults"] = systems.FaultSchedule({1: systems.Fault(failure=0.5)})
    simulator = systems.Simulator(sampler, **arguments)
    if interrupt:  # while worker 0 waits
        simulator.advance(1, seconds=2.0)
        state, simulator = json.loads(json.dumps(simulator.state())), systems.Simulator(sampler, **arguments)
        simulator.restore(state)
    found = simulator.advance(2)
    # Worker 1 fails at 5 seconds, while worker 0, which has ended at 1, waits for it.
    assert found.updates.client.tolist() == [0, 2, 0, 2] and found.updates.round.tolist() == [0, 0, 1, 1]
    assert found.steps.time.tolist() == [6.0, 7.0]


def test_stragglers_take_fewer_steps():
    found = systems.schedule(Stragglers(SAMPLER, fraction=1.0, epochs=2), 1, steps=np.full(40, 10))
    assert found.seconds == 5.0


def test_weights_and_scales_of_stale_updates():
    for divide_by, model_field in (("size", "scale"), ("weights", "weight")):
        model = systems.Buffered(size=2, concurrency=9, divide_by=divide_by, staleness_weight=systems.HingeWeight(2.0, 1.0))
        updates = systems.schedule(SAMPLER, 40, steps=STEPS, devices=SPEEDS, synchronization=model).updates
        expected = [1.0 if s <= 1 else 1 / (2 * (s - 1) + 1) for s in updates.staleness]
        np.testing.assert_allclose(getattr(updates, model_field), expected)
        np.testing.assert_array_equal(getattr(updates, {"scale": "weight", "weight": "scale"}[model_field]), 1.0)
    model = systems.Asynchronous(concurrency=9, mixing=0.5, staleness_weight=systems.PolynomialWeight(0.5))
    updates = systems.schedule(SAMPLER, 40, steps=STEPS, devices=SPEEDS, synchronization=model).updates
    np.testing.assert_allclose(updates.scale, 0.5 / np.sqrt(1 + updates.staleness))


def test_staleness_weights_by_name():
    named = systems.Buffered(size=2, concurrency=9, staleness_weight="hinge(a=2, b=1)")
    assert named.staleness_weight == systems.HingeWeight(2, 1)
    model = make(
        "synchronization",
        "asynchronous(concurrency=3, staleness_weight='polynomial(a=1)')",
        systems.SYNCHRONIZATIONS,
        systems.Synchronization,
    )
    assert model.staleness_weight == systems.PolynomialWeight(1)
    with pytest.raises(ValueError, match="no staleness weight 'hing'. Did you mean 'hinge'"):
        systems.Buffered(size=2, concurrency=9, staleness_weight="hing")


def test_a_client_is_as_slow_whatever_the_other_arguments():
    """Only the law of the speeds and the seed count."""
    plain = systems.Devices(seconds_per_step=systems.LogNormal()).draw(["a"] * 40, rng.root(3))
    other = systems.Devices(
        seconds_per_step=systems.LogNormal(), latency=systems.Exponential(), availability=systems.Diurnal(0.5)
    ).draw(["a"] * 40, rng.root(3))
    np.testing.assert_array_equal(plain.seconds_per_step, other.seconds_per_step)
    assert (plain.seconds_per_step != systems.Devices(systems.LogNormal()).draw(["a"] * 40, rng.root(4)).seconds_per_step).all()


MODELS = st.one_of(
    st.builds(systems.Synchronous, over_selection=st.sampled_from([1.0, 1.3]), deadline=st.sampled_from([None, 8.0])),
    st.builds(systems.StaleSynchronous, bound=st.integers(0, 4), versions=st.sampled_from([None, 0, 2])),
    st.builds(systems.Buffered, size=st.integers(1, 4), concurrency=st.integers(1, 12)),
    st.builds(systems.Asynchronous, concurrency=st.integers(1, 40)),
)
SPANS = st.lists(st.floats(0, 60), max_size=4, unique=True).map(
    lambda times: list(zip(sorted(times)[0::2], sorted(times)[1::2], strict=False))
)
FAULTS = st.builds(
    systems.Faults,
    client_failures=st.sampled_from([0.0, 0.2, 0.7]),
    failure_time=st.sampled_from(["before", "during", "after"]),
    recovery=st.sampled_from([None, 5.0, systems.Exponential(10.0)]),
    message_loss=st.sampled_from([0.0, 0.3]),
    duplication=st.sampled_from([0.0, 0.5]),
    delay=st.sampled_from([None, systems.Exponential(5.0)]),
    delay_probability=st.sampled_from([0.5, 1.0]),
    outages=SPANS,
    server_crashes=SPANS,
)
POLICIES = st.builds(
    systems.Policy,
    timeout=st.sampled_from([None, 5.0, 50.0]),
    retries=st.integers(0, 3),
    late=st.sampled_from(["drop", "use"]),
)
DEVICES = st.builds(
    systems.Devices,
    seconds_per_step=st.sampled_from([1.0, systems.LogNormal(sigma=1.0)]),
    variation=st.sampled_from([1.0, systems.Exponential(1.0)]),
    download_rate=st.sampled_from([math.inf, 10.0]),
    upload_rate=st.sampled_from([math.inf, 5.0]),
    latency=st.sampled_from([0.0, 0.1]),
    availability=st.sampled_from([None, systems.Diurnal(0.5, period=20.0)]),
)
SETTINGS = st.fixed_dictionaries(
    {"synchronization": MODELS, "faults": FAULTS, "policy": POLICIES, "devices": DEVICES, "bytes_up": st.integers(0, 20)}
)


def simulator(settings):
    return systems.Simulator(SAMPLER, steps=STEPS, bytes_down=BYTES_DOWN, **settings)


def schedule_or_reason(settings):
    try:
        with unittest.mock.patch.object(_server, "_MOST_IDLE_EVENTS", 300):  # This is enough for so few clients.
            return simulator(settings).advance(ROUNDS)
    except ValueError as error:
        return str(error)


def check_invariants(settings, break_at):
    found = schedule_or_reason(settings)
    if isinstance(found, str):  # The run ended, or was refused because no client can answer in time.
        assert re.match("The run cannot go on after .*: give|Expected timeout >= .*; give", found), found
        return
    totals, updates = found.totals, found.updates
    # Sent = aggregated + late + lost + dropped + received + in flight, and no update counts twice.
    assert totals.dispatched == sum(totals[1:7])
    assert len(set(updates.number)) == len(updates.number) == totals.aggregated == found.steps.updates.sum()
    # No two updates have the same random keys.
    assert len(set(zip(updates.round.tolist(), updates.client.tolist(), strict=True))) == totals.aggregated
    outcomes = np.bincount(found.timeline.outcome, minlength=4)
    assert outcomes.tolist() == [totals.aggregated, totals.late, totals.lost, totals.dropped]
    # An update starts from a version that existed, and is used after it has arrived.
    times = np.concatenate([[0.0], found.steps.time])
    assert (np.diff(times) >= 0).all()
    assert (updates.staleness == updates.step - updates.version).all() and (updates.staleness >= 0).all()
    assert (times[updates.version] <= updates.start).all() and (updates.stop <= times[updates.step + 1]).all()
    for start, stop in settings["faults"].server_crashes:
        assert not ((start <= found.steps.time) & (found.steps.time < stop)).any()
    largest = 0 if isinstance(settings["synchronization"], systems.Synchronous) else None
    largest = getattr(settings["synchronization"], "versions", largest)
    if settings["policy"].late == "drop" and largest is not None:
        assert (updates.staleness <= largest).all()
    # What the server steps count adds up to the totals, but for what happened after the last one.
    for name in systems.ServerSteps._fields[3:]:
        assert getattr(found.steps, name).sum() <= getattr(totals, name)
    assert found.steps.downloads.sum() >= totals.aggregated and (found.steps.in_flight <= totals.dispatched).all()
    # The same seed gives the same schedule, also from a saved state and from a list of the faults.
    first = simulator(settings)
    begin = first.advance(break_at)
    second = simulator(settings)
    second.restore(json.loads(json.dumps(first.state())))
    assert_equal(joined([begin, second.advance(12)]), found)
    listed = settings["faults"].schedule(rng.root(3), totals.dispatched)
    assert_equal(simulator({**settings, "faults": listed}).advance(12), found)


@pytest.mark.slow
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(settings=SETTINGS, break_at=st.integers(0, 12))
def test_invariants_under_random_faults(settings, break_at):
    with written_on_failure("random_faults", settings):
        check_invariants(settings, break_at)


@pytest.mark.slow
@hypothesis.settings(max_examples=500, deadline=None, derandomize=True)
@hypothesis.given(settings=SETTINGS, break_at=st.integers(0, 12))
def test_invariants_under_many_random_faults(settings, break_at):
    with written_on_failure("many_random_faults", settings):
        check_invariants(settings, break_at)


@pytest.mark.slow
def test_a_failing_schedule_is_written_with_the_command_that_repeats_it(tmp_path, monkeypatch):
    monkeypatch.setattr("fault_replay.FOLDER", tmp_path)
    failed = []

    @hypothesis.settings(
        max_examples=20, deadline=None, derandomize=True, database=None, report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )  # fmt: skip
    @hypothesis.given(settings=SETTINGS)
    def wrong(settings):
        with written_on_failure("wrong", settings):
            found = schedule_or_reason(settings)
            failed.append(found)
            assert isinstance(found, str) or found.totals.lost < 3

    with pytest.raises(AssertionError) as error:
        wrong()
    expected = failed[-1]  # of the smallest example
    (note,) = (note for note in error.value.__notes__ if "To repeat the simulation" in note)
    assert f"The faults are in {tmp_path / 'wrong.json'}" in note and "no option" not in note
    program, *arguments = shlex.split(note.partition("To repeat the simulation: ")[2])
    assert program == "fedsim" and main([*arguments, "--folder", str(tmp_path / "r"), "--no-progress"]) == 0
    lines = read_metrics(tmp_path / "r/metrics.jsonl")
    assert [line["simulated_seconds"] for line in lines] == expected.steps.time.tolist()
    assert [line["updates_lost"] for line in lines] == expected.steps.lost.tolist()
    assert expected.totals.lost >= 3


def test_a_worker_that_takes_over_a_round_uses_no_key_twice():
    sampler, arguments = UniformSampler(singletons(6), clients=4, seed=0), {"steps": np.full(6, 5), "devices": SPEEDS}
    faults = systems.Faults(client_failures=0.2)
    simulator = systems.Simulator(sampler, synchronization=systems.StaleSynchronous(bound=3), faults=faults, **arguments)
    begin = simulator.advance(100)
    simulator.restore(json.loads(json.dumps(simulator.state())))
    rest = simulator.advance(300)
    pairs = [pair for part in (begin, rest) for pair in zip(part.updates.round, part.updates.client, strict=True)]
    assert len(set(pairs)) == len(pairs) > 400 and rest.totals.lost > 50


@pytest.mark.parametrize(
    "model", [systems.Synchronous(), systems.StaleSynchronous(bound=1), systems.Buffered(size=2, concurrency=6)]
)
def test_no_fault_equals_none_to_the_bit(model):
    none, empty, listed = (
        systems.schedule(SAMPLER, 20, steps=STEPS, devices=SPEEDS, synchronization=model, faults=faults)
        for faults in (None, systems.Faults(), systems.FaultSchedule())
    )
    assert_equal(none, empty)
    assert_equal(none, listed)


def test_stretches_join_to_the_whole_schedule():
    arguments = dict(steps=STEPS, devices=SPEEDS, synchronization=systems.Buffered(size=3, concurrency=9))
    whole = systems.schedule(SAMPLER, 30, **arguments)
    simulator = systems.Simulator(SAMPLER, **arguments)
    parts = [simulator.advance(until) for until in (1, 7, 7, 30)]
    assert [len(part.steps.time) for part in parts] == [1, 6, 0, 23]
    assert_equal(joined(parts), whole)


def test_a_state_of_other_arguments_is_refused_by_their_names():
    traces = systems.Traces({str(i): {"online": [(0, 90.0)]} for i in range(CLIENTS)}, period=100.0)
    faults = systems.FaultSchedule({3: systems.Fault(failure=0.5)})
    arguments = dict(steps=STEPS, devices=systems.Devices(availability=traces), faults=faults, bytes_up=4)
    arguments |= {"synchronization": systems.Buffered(size=3, concurrency=9), "policy": systems.Policy(retries=1)}
    saved = json.loads(json.dumps(systems.Simulator(SAMPLER, **arguments).state()))
    systems.Simulator(SAMPLER, **arguments).restore(saved)
    changes = {
        "steps": STEPS + 1,
        "devices": systems.Devices(availability=systems.Traces(traces.clients, period=101.0)),
        "faults": systems.FaultSchedule({3: systems.Fault(failure=0.25)}),
        "synchronization": systems.Buffered(size=4, concurrency=9),
        "policy": systems.Policy(retries=2),
        "bytes_up": 5,
        "key": rng.root(4),
    }
    for name, value in changes.items():
        with pytest.raises(ValueError, match=f"equal arguments, got one with other {name}: make"):
            systems.Simulator(SAMPLER, **{**arguments, name: value}).restore(saved)
    with pytest.raises(ValueError, match="got one with other sampler: make"):
        systems.Simulator(UniformSampler(singletons(CLIENTS), clients=4, seed=SEED), **arguments).restore(saved)


def test_state_does_not_grow():
    model, faults = systems.Buffered(size=3, concurrency=9), systems.Faults(client_failures=0.3, message_loss=0.2)
    simulator = systems.Simulator(SAMPLER, steps=STEPS, devices=SPEEDS, synchronization=model, faults=faults)
    simulator.advance(100)
    before = len(json.dumps(simulator.state()))
    simulator.advance(1000)
    assert len(json.dumps(simulator.state())) < 1.3 * before
    assert len(simulator.advance(1000).timeline.client) == 0


def run_that_fails(match, sampler=SAMPLER, rounds=50, **arguments):
    with pytest.raises(ValueError, match=match):
        systems.schedule(sampler, rounds, steps=np.ones(sampler.data.num_clients, int), **arguments)


def test_runs_that_cannot_be_are_refused_with_a_remedy():
    run_that_fails("concurrency <= 40.*concurrency=41.*more clients", synchronization=systems.Buffered(size=1, concurrency=41))
    run_that_fails("concurrency <= 40.*concurrency=41", synchronization=systems.Asynchronous(concurrency=41))
    run_that_fails("minimum <= 5.*minimum=6.*no round would ever count", synchronization=systems.Synchronous(minimum=6))
    run_that_fails(
        "deadline >= 1.0 seconds.*deadline=0.5.*no update would ever arrive", synchronization=systems.Synchronous(deadline=0.5)
    )
    run_that_fails("timeout >= 1.0 seconds.*timeout=0.5.*every update would be late", policy=systems.Policy(timeout=0.5))
    run_that_fails("synchronization to be an instance", synchronization="buffered")
    run_that_fails("rounds >= 1", rounds=0)
    run_that_fails("bytes_up >= 0", bytes_up=-1)
    with pytest.raises(ValueError, match=r"steps \[40\], a whole number.*int64 \[3\].*batches.num_steps"):
        systems.schedule(SAMPLER, 1, steps=np.ones(3, int))


@pytest.mark.parametrize("model", [systems.Buffered(size=2, concurrency=4), systems.Asynchronous(concurrency=4)])
@pytest.mark.parametrize("weight", [lambda s: 1.0, lambda s: np.ones(3), lambda s: s - 9.0, lambda s: s * math.nan])
def test_wrong_staleness_weights_are_errors(model, weight):
    match = "(weights|scales) to be a finite number of at least 0 for each of . updates, got"
    run_that_fails(match, synchronization=dataclasses.replace(model, staleness_weight=weight))


def test_runs_that_cannot_go_on_say_why():
    run_that_fails(
        r"cannot go on after \d+ server.* .*37 of 40 have failed .* have sent an update or are reserved: give.*recovery",
        faults=systems.Faults(client_failures=0.5, recovery=None),
    )
    run_that_fails(
        r"cannot go on after 0 server steps.*late updates and other events.*timeout",
        policy=systems.Policy(timeout=1.5),
        devices=systems.Devices(variation=systems.LogNormal(sigma=0.1, median=10.0)),
    )
    run_that_fails(
        "late updates and other events.*recovery|fewer faults", faults=systems.Faults(client_failures=1.0, recovery=1.0)
    )
    with unittest.mock.patch.object(_server, "_MOST_PASSED_OVER", 10_000):  # Long before there are very many events.
        run_that_fails(
            "at [0-9.]+ seconds: of [0-9]{2,3} dispatches.* looked at 1[0-9]{4} clients.*busy or offline: give .*more clients",
            synchronization=systems.Buffered(size=10, concurrency=30),
            faults=systems.Faults(client_failures=1 - 1e-9, recovery=10.0),
        )
    traces = systems.Traces({str(client): {"online": [(0, 2.5)]} for client in range(40)})
    run_that_fails(
        "No other client .*5 of 40 have failed .*rest stay offline, .*period", devices=systems.Devices(availability=traces)
    )

    class Idle(systems.Synchronization):
        def begin(self, server):
            pass

    run_that_fails("Idle waits for nothing: it must dispatch clients, or set a timer", synchronization=Idle())


def test_a_run_goes_on_as_long_as_updates_arrive_for_the_next_server_step():
    """Almost all clients that the server looks at are offline, and every client has come online after a day."""
    devices = systems.Devices(availability=systems.Diurnal(fraction=0.02))
    with unittest.mock.patch.object(_server, "_MOST_PASSED_OVER", 0):
        found = systems.schedule(
            SAMPLER, 1, steps=np.ones(CLIENTS, int), synchronization=systems.Buffered(size=36, concurrency=4), devices=devices
        )
    assert len(np.unique(found.updates.client)) == 36 and found.seconds < 86400 + 1


def test_clients_that_do_a_part_of_their_work_may_be_as_fast_as_the_deadline():
    stragglers = Stragglers(SAMPLER, fraction=1.0, epochs=10)  # They take 1 to 9 of 10 steps.
    arguments = {"steps": np.full(CLIENTS, 10), "synchronization": systems.Synchronous(deadline=5.0)}
    found = systems.schedule(stragglers, 3, **arguments)
    assert len(found.steps.time) == 3 and found.totals.aggregated >= 3 and found.totals.late > 0
    with pytest.raises(ValueError, match="deadline >= 10.0 seconds"):
        systems.schedule(SAMPLER, 3, **arguments)
    arguments = {"steps": np.full(CLIENTS, 3), "devices": systems.Devices(seconds_per_step=0.1)}
    with pytest.raises(ValueError, match="deadline >= 0.30000000000000004 seconds, .* got deadline=0.3: "):
        systems.schedule(SAMPLER, 1, synchronization=systems.Synchronous(deadline=0.3), **arguments)
    with pytest.raises(ValueError, match="timeout >= 0.30000000000000004 seconds, .* got timeout=0.3: "):
        systems.schedule(SAMPLER, 1, policy=systems.Policy(timeout=0.3), **arguments)


def test_wrong_calls_of_custom_models_are_errors():
    class Empty(systems.Synchronization):
        def begin(self, server):
            server.aggregate()

    class Twice(systems.Synchronization):
        def begin(self, server):
            server.dispatch(1)

        def received(self, server, update):
            server.aggregate([update, update])

    run_that_fails("aggregate got no updates", synchronization=Empty())
    run_that_fails("each can be aggregated or dropped once", synchronization=Twice())


def test_custom_model_with_timer():
    """A server step every ten seconds with whatever has arrived."""

    class Periodic(systems.Synchronization):
        def begin(self, server):
            server.dispatch(4)
            server.call_at(10.0, "step")

        def received(self, server, update):
            server.dispatch(1)

        def timer(self, server, name):
            server.aggregate()
            server.call_at(server.now + 10.0, name)

    found = systems.schedule(SAMPLER, 3, steps=np.full(40, 3), synchronization=Periodic())
    assert found.steps.time.tolist() == [10.0, 20.0, 30.0]
    # Updates arrive at 3, 6, ..., 30, those of second 30 before its timer.
    assert found.steps.updates.tolist() == [12, 12, 16]


def test_the_only_client_that_is_online_is_found():
    clients = 4000
    traces = {str(client): {"online": [(0, 1e6) if client == 77 else (1e6, 2e6)]} for client in range(clients)}
    sampler = UniformSampler(singletons(clients), clients=400, seed=0)
    arguments = {"steps": np.full(clients, 2), "devices": systems.Devices(availability=systems.Traces(traces))}
    found = systems.schedule(sampler, 4, synchronization=systems.Asynchronous(concurrency=1), **arguments)
    assert found.steps.time.tolist() == [2.0, 4.0, 6.0, 8.0] and set(found.updates.client) == {77}


def test_few_clients_that_are_all_busy():
    """A sampler of few clients, all of which are in flight: the one that returns starts again at once."""
    sampler = UniformSampler(singletons(3), clients=1, seed=0)
    found = systems.schedule(sampler, 60, steps=np.array([1, 2, 4]), synchronization=systems.Buffered(size=1, concurrency=3))
    assert np.bincount(found.updates.client)[0] == pytest.approx(60 * 4 / 7, abs=2)
