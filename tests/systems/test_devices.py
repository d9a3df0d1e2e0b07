"""Laws, availability and traces."""

import json
import math

import numpy as np
import pytest
from federation import singletons

from fedsim import rng, systems
from fedsim.samplers import UniformSampler
from fedsim.systems._availability import Intervals


@pytest.mark.parametrize(
    ("law", "mean", "deviation"),
    [
        (systems.Constant(2.0), 2.0, 0.0),
        (systems.LogNormal(sigma=0.5, median=3.0), 3 * math.exp(0.125), 3 * math.exp(0.125) * math.sqrt(math.expm1(0.25))),
        (systems.HalfNormal(2.0), 2 * 0.797885, 2 * math.sqrt(1 - 2 / math.pi)),
        (systems.Exponential(4.0), 4.0, 4.0),
    ],
)
def test_laws_have_their_mean_and_deviation(law, mean, deviation):
    draws = law.draw(np.random.default_rng(0), 40_000)
    assert law.mean == pytest.approx(mean, rel=1e-6)
    assert draws.mean() == pytest.approx(mean, abs=deviation / 50 + 1e-12)
    assert draws.std() == pytest.approx(deviation, rel=0.03)
    assert draws.min() >= law.least


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: systems.Constant(-1.0), "value >= 0.*value=-1.0"),
        (lambda: systems.LogNormal(sigma=-1.0), "sigma >= 0"),
        (lambda: systems.LogNormal(median=0.0), "median > 0"),
        (lambda: systems.HalfNormal(0.0), "scale > 0"),
        (lambda: systems.Exponential(0.0), "mean > 0"),
        (lambda: systems.Devices(latency=-0.5), "latency >= 0.*latency=-0.5.*LogNormal"),
        (lambda: systems.Devices(latency=math.inf), "latency >= 0 and finite, got latency=inf: no client would ever answer"),
        (lambda: systems.Devices(seconds_per_step=math.inf), "seconds_per_step >= 0 and finite"),
        (lambda: systems.Traces({"ann": {"seconds_per_step": math.inf}}), "'ann' has seconds_per_step=inf.*finite"),
        (lambda: systems.Traces({"ann": {"online": None}}), "'ann' has online=None: expected a list of intervals"),
        (lambda: systems.Traces({"ann": {"online": 5}}), "'ann' has online=5: expected a list of intervals"),
        (lambda: systems.Traces({"ann": {"online": np.zeros((0, 2))}}), "No client of traces is ever online"),
        (lambda: systems.Devices(seconds_per_step="fast"), "seconds_per_step='fast'.*law such as"),
        (lambda: systems.Devices(upload_rate=0), "upload_rate > 0 bytes per second.*no message would ever arrive"),
        (lambda: systems.Devices(availability=0.5), "availability to be an instance of Diurnal.*availability=0.5"),
        (lambda: systems.Diurnal(fraction=0.0), "0 < fraction <= 1.*nobody would ever be online"),
        (lambda: systems.Diurnal(fraction=0.5, period=0), "period > 0"),
        (lambda: systems.PolynomialWeight(-1.0), "a >= 0.*stale updates would count more"),
        (lambda: systems.HingeWeight(b=-1.0), "b >= 0"),
    ],
)
def test_wrong_values_are_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def online_seconds(intervals, shift, period, start, stop, tick=0.125):
    """Counts ticks in which a client is online; exact if all times are multiples of a tick."""
    ticks = np.arange(round(start / tick), round(stop / tick)) * tick - shift
    ticks = ticks if math.isinf(period) else ticks % period
    return tick * sum(int(np.sum((a <= ticks) & (ticks < b))) for a, b in intervals)


@pytest.mark.first(3)
@pytest.mark.parametrize("period", [math.inf, 32.0])
@pytest.mark.parametrize("shift", [0.0, -5.5])
def test_pauses_against_counting(period, shift):
    draw = np.random.default_rng(1)
    clients = [[], [(0.0, 32.0)], [(2.0, 9.0), (12.5, 13.0), (20.0, 31.25)], [(0.0, 4.0), (10.0, period)]]
    counts = np.array([len(client) for client in clients])
    starts, stops = np.array([pair for client in clients for pair in client]).T
    intervals = Intervals(counts, starts, stops, np.full(4, shift), period)
    for _ in range(80):
        client, start, seconds = draw.integers(4), draw.integers(0, 400) / 8, draw.integers(1, 400) / 8
        stop = intervals.advance(client, start, seconds)
        whole = online_seconds(clients[client], shift, period, start, 1000.0)
        if whole < seconds:
            assert stop == math.inf
        else:
            # It is the first time at which the client has been online for so long.
            assert online_seconds(clients[client], shift, period, start, stop) == seconds
            assert online_seconds(clients[client], shift, period, start, stop - 0.125) < seconds
        online = [online_seconds(each, shift, period, start, start + 0.125) > 0 for each in clients]
        assert [intervals.online(each, start) for each in range(4)] == online == intervals.online_clients(start).tolist()
        # The next client that becomes available, from counting on.
        ready = np.array([start, draw.integers(0, 100) / 8, math.inf, math.inf])
        free = start + np.arange(1, 600) / 8
        changes = []
        for client in range(2):
            available = [online_seconds(clients[client], shift, period, time, time + 0.125) > 0 for time in free]
            available &= free >= ready[client]
            before = start >= ready[client] and online[client]
            changes.append(free[available & ~np.concatenate([[before], available[:-1]])])
        expected = min((change[0] for change in changes if change.size), default=math.inf)
        found = intervals.next_online(ready, start)
        # A day without a night begins anew each day, which is no change.
        assert found == expected or (period == 32 and start < found < expected and (found - shift) % 32 == 0)


def test_diurnal_clients_are_online_for_their_fraction():
    intervals = systems.Diurnal(fraction=0.25, period=100.0).intervals(["c"] * 4000, np.random.default_rng(0))
    for time in (0.0, 33.0, 1e6):
        assert intervals.online_clients(time).mean() == pytest.approx(0.25, abs=0.03)
    assert all(intervals.advance(client, 0.0, 25.0 * 8) <= 800.0 + 1e-6 for client in range(100))


def test_client_is_found_when_it_comes_online_although_times_are_rounded():
    """At the time at which an interval begins, a client may still be offline by rounding; then it is online a moment later."""
    intervals = Intervals(np.ones(1, int), np.array([0.1]), np.array([0.2]), np.zeros(1), 1.0)
    rounded = 0
    for period in range(2000):
        found = intervals.next_online(np.zeros(1), period + 0.5)
        if not intervals.online(0, found):
            rounded += 1
            found = intervals.next_online(np.zeros(1), found)
        assert found == pytest.approx(period + 1.1, abs=1e-9) and intervals.online(0, found)
    assert rounded > 0


def test_work_that_ends_with_an_interval_ends_there():
    intervals = Intervals(np.array([3]), np.array([2.0, 12.5, 20.0]), np.array([9.0, 13.0, 31.25]), np.zeros(1), 32.0)
    for seconds, stop in ((7.0, 9.0), (7.5, 13.0), (18.75, 31.25), (18.75 + 7.0, 41.0), (2 * 18.75, 63.25)):
        assert intervals.advance(0, 0.0, seconds) == stop


def test_the_intervals_of_traces_may_be_an_array():
    traces = systems.Traces({"ann": {"online": np.array([[0.0, 60.0], [90.0, 120.0]])}})
    intervals = traces.intervals(["ann"], np.random.default_rng(0))
    assert [intervals.online(0, time) for time in (0.0, 70.0, 100.0)] == [True, False, True]


def test_clients_are_selected_only_while_online_and_pause_when_offline():
    traces = systems.Traces({"0": {"online": [(0, 4), (10, 12), (100, 200)]}, "1": {"online": [(20, 300)]}}, period=400)
    sampler = UniformSampler(singletons(2), clients=2, seed=0)
    found = systems.schedule(
        sampler, 3, steps=np.array([5, 7]), devices=systems.Devices(availability=traces),
        synchronization=systems.Buffered(size=1, concurrency=1),
    )  # fmt: skip
    # Client 0 works for 4 s, pauses for 6 s and works for 1 s; then it is the only one online; then client 1 is.
    assert found.updates.start[:2].tolist() == [0.0, 11.0] and found.updates.client[:2].tolist() == [0, 0]
    assert found.updates.stop[:2].tolist() == [11.0, 104.0]


def write(tmp_path, text, name="traces.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_traces_from_csv_and_json_are_equal(tmp_path):
    table = "client,online,seconds_per_step,upload_rate\nann,0-60 90-120,0.5,1e3\nbob,,2,\n"
    lines = [{"client": "ann", "online": [[0, 60], [90, 120]], "seconds_per_step": 0.5, "upload_rate": 1000},
             {"client": "bob", "seconds_per_step": 2}]  # fmt: skip
    csv = systems.Traces.read(write(tmp_path, table))
    jsonl = systems.Traces.read(write(tmp_path, "\n".join(map(json.dumps, lines)), "traces.jsonl"))
    for traces in (csv, jsonl):
        devices = systems.Devices(seconds_per_step=7.0, upload_rate=5.0, availability=traces).draw(["bob", "ann"], rng.root(0))
        assert devices.seconds_per_step.tolist() == [2.0, 0.5] and devices.upload_rate.tolist() == [5.0, 1000.0]
        assert devices.online(0, 70.0) and not devices.online(1, 70.0) and devices.advance(1, 59.0, 2.0) == 91.0


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "client,online\nann,0-60 50-70\n",
            "'ann' is online from 50.0 to 70.0 after an interval that ends at 60.0.*sorted",
        ),
        ("client,online\nann,80-90 0-5\n", "after an interval that ends at 90.0.*sorted, disjoint"),
        ("client,online\nann,5-5\n", "not empty"),
        ("client,online\nann,0-sixty\n", "line 2 has 'sixty' in the column 'online'.*not a number.*0-3600 7200-9000"),
        ("client,seconds_per_step\nann,quick\n", "line 2 has 'quick' in the column 'seconds_per_step'"),
        ("client,seconds_per_step\nann,0\n", "'ann' has seconds_per_step=0.0: expected a number above 0"),
        ("client,speed\nann,1\n", "line 2 has the unknown column 'speed': the columns are client, online"),
        ("online\n0-60\n", "line 2 has no client id"),
        ("client,online\nann,0-1\nann,0-1\n", "line 3 repeats client 'ann'"),
        ("client,online,seconds_per_step\nann,0-1,2\nbob,0-1\n", "line 3: .* got 2 for 3 names"),
        ("client,online\nann,0-1,2\n", "line 2: .* got 3 for 2 names"),
        ("client,upload_rate,upload_rate\nann,1,2\n", "different names, got 'upload_rate' 2 times"),
    ],
)
def test_wrong_traces_are_errors(tmp_path, text, match):
    with pytest.raises(ValueError, match=match) as error:
        systems.Traces.read(write(tmp_path, text))
    assert "traces.csv" in str(error.value)


def test_wrong_json_traces_are_errors(tmp_path):
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        systems.Traces.read(write(tmp_path, '{"client": "a"}\n{', "traces.jsonl"))
    text = '{"client": "a"}\n{"client": "b", "online": [[0, 1]], "online": [[2, 3]]}'
    with pytest.raises(ValueError, match="line 2 has the key 'online' a second time"):
        systems.Traces.read(write(tmp_path, text, "traces.jsonl"))
    for client in ("null", "true", "[1]"):
        with pytest.raises(ValueError, match="line 1 has no client id"):
            systems.Traces.read(write(tmp_path, f'{{"client": {client}}}', "traces.jsonl"))
    for value in ("true", "1" + "0" * 400, '"1"'):
        with pytest.raises(ValueError, match="'a' has seconds_per_step="):
            systems.Traces.read(write(tmp_path, f'{{"client": "a", "seconds_per_step": {value}}}', "traces.jsonl"))
    with pytest.raises(ValueError, match="line 1 is not an object"):
        systems.Traces.read(write(tmp_path, "[1]", "traces.jsonl"))
    with pytest.raises(ValueError, match="interval 3: expected two numbers"):
        systems.Traces.read(write(tmp_path, '{"client": "a", "online": [3]}', "traces.jsonl"))
    with pytest.raises(ValueError, match="No client of .* is ever online"):
        systems.Traces.read(write(tmp_path, '{"client": "a", "online": []}', "traces.jsonl"))
    with pytest.raises(ValueError, match="until period=50"):
        systems.Traces({"a": {"online": [(0, 60)]}}, period=50)


def test_missing_client_is_named():
    sampler = UniformSampler(singletons(3), clients=2, seed=0)
    devices = systems.Devices(availability=systems.Traces({"0": {}, "2": {}}))
    with pytest.raises(ValueError, match=r"no line for client '1' \(1 of 3 clients are missing\): add one line per client"):
        systems.schedule(sampler, 1, steps=np.ones(3, int), devices=devices)
