"""Faults by probability and by schedule, each against its consequence computed by hand."""

import math

import numpy as np
import pytest
from federation import singletons

from fedsim import rng, systems
from fedsim.samplers import ScheduleSampler
from fedsim.systems._faults import NO_FAULT

SAMPLER = ScheduleSampler(singletons(4), [["0"], ["1"], ["2"], ["3"]], seed=0, repeat=True)
DEVICES = systems.Devices(download_rate=10.0, upload_rate=5.0)  # 2 s down, 10 s of training, 4 s up
ONE = systems.Buffered(size=1, concurrency=1)


def run(faults, rounds=1, *, model=ONE, policy=None):
    return systems.schedule(
        SAMPLER, rounds, steps=np.full(4, 10), devices=DEVICES, bytes_down=20, bytes_up=20,
        synchronization=model, faults=faults, policy=policy,
    )  # fmt: skip


def listed(fault, **arguments):
    return systems.FaultSchedule({0: systems.Fault(**fault)}, **arguments)


def test_probabilities_of_faults():
    faults = systems.Faults(
        client_failures=0.2, message_loss=0.25, duplication=0.1, delay=systems.Exponential(3.0), delay_probability=0.5,
        recovery=systems.Constant(7.0),
    ).draw(rng.root(0))  # fmt: skip
    drawn = [faults[number] for number in range(20_000)]
    fractions = [fault.failure for fault in drawn if fault.failure is not None]
    assert len(fractions) / 20_000 == pytest.approx(0.2, abs=0.012)
    assert np.mean(fractions) == pytest.approx(0.5, abs=0.02) and 0 < min(fractions) < max(fractions) < 1
    assert {fault.recovery for fault in drawn if fault.failure is not None} == {7.0}
    for way in ("down", "up"):
        lost = np.array([getattr(fault, f"lost_{way}") for fault in drawn])
        assert [np.mean(lost >= k) for k in (1, 2)] == pytest.approx([0.25, 0.0625], abs=0.014)
        assert np.mean([getattr(fault, f"doubled_{way}") for fault in drawn]) == pytest.approx(0.1, abs=0.01)
        delays = np.array([getattr(fault, f"delay_{way}") for fault in drawn])
        assert np.mean(delays > 0) == pytest.approx(0.5, abs=0.015) and delays.mean() == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize(("when", "fraction"), [("before", 0.0), ("after", 1.0)])
def test_time_of_failures(when, fraction):
    for recovery, seconds in ((None, math.inf), (3.0, 3.0)):
        drawn = systems.Faults(client_failures=1.0, failure_time=when, recovery=recovery).draw(rng.root(0))[5]
        assert drawn == systems.Fault(failure=fraction, recovery=seconds)


def test_a_kind_of_fault_does_not_depend_on_the_others():
    alone = systems.Faults(message_loss=0.3).draw(rng.root(0))
    along = systems.Faults(message_loss=0.3, client_failures=0.5, duplication=0.5, delay=1.0).draw(rng.root(0))
    assert [alone[number].lost_up for number in range(100)] == [along[number].lost_up for number in range(100)]


def test_without_faults():
    found = run(None)
    assert found.seconds == 16.0
    assert (found.totals.downloads, found.totals.uploads, found.totals.bytes_up, found.totals.steps) == (1, 1, 20, 10)


@pytest.mark.parametrize(("fraction", "steps", "stop"), [(0.0, 0, 2.0), (0.25, 2, 4.5), (1.0, 10, 12.0)])
def test_failing_client_is_replaced_when_it_fails(fraction, steps, stop):
    found = run(listed({"failure": fraction}))
    assert found.updates.client.tolist() == [1] and found.updates.number.tolist() == [1]
    assert found.timeline.stop.tolist() == [stop, stop + 16.0]
    assert (found.totals.lost, found.totals.steps_wasted, found.totals.uploads) == (1, steps, 1)


def test_client_that_failed_is_selected_again_only_after_its_recovery():
    for recovery, clients in ((math.inf, [1, 2, 3, 1]), (10.0, [1, 2, 3, 0]), (1000.0, [1, 2, 3, 1])):
        found = run(listed({"failure": 0.5, "recovery": recovery}), rounds=4)
        assert found.updates.client.tolist() == clients


def test_lost_messages_are_sent_again_after_a_pause_that_doubles():
    policy = systems.Policy(retries=2, backoff=3.0)
    found = run(listed({"lost_up": 2}), policy=policy)
    # 2 s down, 10 s of training, and three uploads of 4 s with pauses of 3 s and 6 s.
    assert found.seconds == 2 + 10 + 4 + 3 + 4 + 6 + 4
    assert (found.totals.uploads, found.totals.messages_lost, found.totals.lost, found.totals.bytes_up) == (3, 2, 0, 60)
    found = run(listed({"lost_down": 3}), policy=policy)
    assert found.updates.client.tolist() == [1]
    assert found.timeline.stop[0] == 2 + 3 + 2 + 6 + 2
    assert (found.totals.downloads, found.totals.messages_lost, found.totals.lost) == (4, 3, 1)


def test_server_knows_of_a_loss_only_at_the_timeout():
    found = run(listed({"lost_up": 1}), policy=systems.Policy(timeout=30.0))
    assert found.updates.start.tolist() == [30.0]


@pytest.mark.parametrize("late", ["drop", "use"])
def test_update_after_the_timeout_is_late(late):
    found = run(listed({"delay_up": 20.0}), rounds=2, policy=systems.Policy(timeout=30.0, late=late))
    # Client 0 has 30 s, and its update arrives at 36 s; client 1 starts at 30 s and answers at 46 s.
    assert found.updates.client.tolist() == ([1, 2] if late == "drop" else [0, 1, 2])
    assert found.steps.time.tolist() == [46.0, 62.0] and found.totals.late == (late == "drop")


def test_delays_change_the_order():
    model = systems.Buffered(size=2, concurrency=2)
    assert run(listed({"delay_up": 1.5}), model=model).updates.client.tolist() == [1, 0]
    assert run(listed({"delay_down": 1.5}), model=model).seconds == 17.5


def test_second_copies_are_ignored():
    found = run(listed({"doubled_up": True, "doubled_down": True}), rounds=3)
    assert found.updates.number.tolist() == [0, 1, 2]
    assert (found.totals.downloads, found.totals.uploads, found.totals.messages_doubled) == (4, 4, 2)
    late = run(listed({"doubled_up": True, "delay_up": 25.0}), rounds=3, policy=systems.Policy(timeout=30.0, late="use"))
    assert sorted(late.updates.number) == [0, 1, 2, 3]


def test_messages_are_lost_while_the_network_is_down():
    outage = [(13.0, 15.0)]
    assert run(listed({}, outages=outage)).totals.lost == 1
    found = run(listed({}, outages=outage), policy=systems.Policy(retries=1, backoff=0.5))
    assert found.seconds == 2 + 10 + 4 + 0.5 + 4
    assert run(listed({}, outages=[(3.0, 11.0)])).seconds == 16.0  # Nothing is transmitted in this time.
    found = run(listed({}, outages=[(1.0, 30.0)]))
    assert found.updates.start.tolist() == [30.0]  # The server replaces the client when the network is up again.


def test_server_crash_keeps_what_has_arrived_and_what_is_in_flight():
    crash = [(17.0, 60.0)]
    model = systems.Buffered(size=2, concurrency=1)
    found = run(listed({}, server_crashes=crash), model=model, policy=systems.Policy(retries=1, backoff=4.0))
    # Client 0 answers at 16 s. The download of client 1 is lost, and sent again 4 s after the server is up again.
    assert found.updates.client.tolist() == [0, 1]
    assert found.updates.start.tolist() == [0.0, 16.0]
    assert found.steps.time.tolist() == [60 + 4 + 2 + 10 + 4]
    # Without repetition, the server replaces the client when it is up again.
    found = run(listed({}, server_crashes=crash), model=model)
    assert found.updates.client.tolist() == [0, 2] and found.updates.start.tolist() == [0.0, 60.0]


def test_what_the_server_would_do_is_done_when_it_is_up_again():
    model = systems.Synchronous(deadline=20.0)
    sampler = ScheduleSampler(singletons(4), [["0", "1"]], seed=0, repeat=True)
    faults = systems.FaultSchedule({1: systems.Fault(delay_up=100.0)}, server_crashes=[(18.0, 25.0)])
    found = systems.schedule(
        sampler, 1, steps=np.full(4, 10), devices=DEVICES, bytes_down=20, bytes_up=20, synchronization=model, faults=faults
    )
    assert found.steps.time.tolist() == [25.0] and found.updates.client.tolist() == [0]


def test_server_that_is_down_at_first_begins_later():
    assert run(listed({}, server_crashes=[(0.0, 5.0)])).seconds == 21.0


def test_schedule_is_read_as_it_was_written(tmp_path):
    drawn = systems.Faults(client_failures=0.2, message_loss=0.3, duplication=0.1, delay=2.0, outages=[(1.0, 2.5)])
    schedule = drawn.schedule(rng.root(0), 100)
    schedule.write(tmp_path / "faults.json")
    read = systems.FaultSchedule.read(tmp_path / "faults.json")
    assert read.faults == schedule.faults and [tuple(span) for span in read.outages] == [(1.0, 2.5)]
    assert NO_FAULT not in read.faults.values() and len(read.faults) > 50


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "Expected JSON such as"),
        ('{"faults": [{"failure": 0.5}]}', "KeyError: 'dispatch'"),
        ('{"faults": [{"dispatch": 1, "failing": 0.5}]}', "failing"),
        ('{"faults": [{"dispatch": 1, "failure": 1.5}]}', "0 <= failure <= 1"),
        ('{"faults": [{"dispatch": 1}, {"dispatch": 1}]}', "dispatch 1 is given twice"),
        ('{"outage": []}', "outage"),
        ('{"faults": [],\n "faults": [{"dispatch": 1}]}', "line 2 has the key 'faults' a second time"),
        ('{"outages": [[0, 1' + "0" * 400 + "]]}", "sorted, disjoint, finite and not empty"),
        ('{"outages": [[5, 4]]}', "sorted, disjoint, finite and not empty"),
    ],
)
def test_wrong_files_are_errors(tmp_path, text, match):
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as error:
        systems.FaultSchedule.read(path)
    assert "faults.json is not a schedule of faults" in str(error.value)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: systems.Faults(client_failures=1.5), "0 <= client_failures <= 1.*probability"),
        (lambda: systems.Faults(message_loss=1.0), "0 <= message_loss < 1.*no message would arrive"),
        (lambda: systems.Faults(failure_time="never"), "failure_time to be 'before', 'during' or 'after'"),
        (lambda: systems.Faults(recovery=-1.0), "recovery >= 0"),
        (lambda: systems.Faults(outages=[(0, 5), (4, 6)]), r"outages.*got \(4, 6\) after 5.0: sort and join"),
        (lambda: systems.Faults(outages=[(3, math.inf)]), r"outages.*finite.*got \(3, inf\)"),
        (lambda: systems.Faults(server_crashes=None), "server_crashes to be an instance of Sequence"),
        (lambda: systems.Faults(server_crashes=[5.0]), r"server_crashes to be spans \(start, stop\)"),
        (lambda: systems.Policy(timeout=0.0), "timeout > 0"),
        (lambda: systems.Policy(retries=-1), "retries"),
        (lambda: systems.Policy(late="maybe"), "late to be 'drop' or 'use'"),
        (lambda: systems.Synchronous(over_selection=0.5), "over_selection >= 1"),
        (lambda: systems.StaleSynchronous(bound=-1), "bound >= 0"),
        (lambda: systems.Buffered(size=0, concurrency=1), "size >= 1"),
        (lambda: systems.Buffered(size=1, concurrency=1, divide_by="k"), "divide_by to be 'size' or 'weights'"),
        (
            lambda: systems.Buffered(size=1, concurrency=1, staleness_weight="hinges"),
            "no staleness weight 'hinges'. Did you mean 'hinge'",
        ),
        (lambda: systems.Asynchronous(concurrency=1, staleness_weight=0.5), "staleness_weight to be .*staleness_weight=0.5"),
        (lambda: systems.Asynchronous(concurrency=1, mixing=0.0), "0 < mixing <= 1"),
    ],
)
def test_wrong_values_are_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()
