"""Memories of clients, aggregators and the downlink are the same under every execution, and as in plain Python."""

import contextlib
import dataclasses
import functools
import re

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import (
    BATCHES,
    EXECUTIONS,
    PREVIEW,
    Counting,
    Damped,
    Maximum,
    Memory,
    Variance,
    add_first_feature,
    cohorts,
    expected_state,
)

import fedsim
from fedsim.execution._device_round import put_rows
from fedsim.rounds import ClientTable


@pytest.mark.first(1)
@pytest.mark.parametrize(("how", "refuse"), [*((how, 3.0) for how in EXECUTIONS), ("jit", -1.0)])
def test_memories_are_the_same_under_every_execution(how, refuse):
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=EXECUTIONS[how], refuse=refuse)
    state = algorithm.init(jax.random.key(0))
    rounds = list(cohorts(population))
    with pytest.warns() if refuse >= 0 else contextlib.nullcontext():
        for cohort in rounds[:3]:
            state, _ = algorithm.apply(state, cohort)
        state, infos = algorithm.apply_rounds(state, rounds[3:], max_rounds=3)
        jax.block_until_ready(algorithm.apply(state, rounds[0]))
    server, memory = expected_state(rounds, refuse)
    np.testing.assert_allclose(state.server, server, rtol=1e-5)
    assert infos.clients["seen"].shape == (2, 4)
    everyone = np.arange(8)
    if isinstance(state.clients, ClientTable):
        rows, seen = jax.device_get(state.clients)
    else:
        rows, seen = state.clients.gather(everyone)
    assert [population.client_ids[i] for i in np.flatnonzero(seen)] == sorted(memory)
    for client in np.flatnonzero(seen):
        visits, total = memory[population.client_ids[client]]
        assert rows[0].visits[client] == visits
        np.testing.assert_allclose(rows[0].total[client], total, rtol=1e-5)


def test_memories_of_an_old_state_do_not_change():
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Jit(memory="stream"))
    states = [algorithm.init(jax.random.key(0))]
    for r in range(40):
        state, _ = algorithm.apply(states[-1], federation.cohort(population, round=r))
        states.append(state)
    for r, state in enumerate(states[1:], start=1):
        rows, seen = state.clients.gather(np.arange(8))
        assert rows[0].visits[seen].tolist() == [r] * 7  # one client has no examples


def test_unreferenced_rows_are_reused():
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Jit(memory="stream"))
    state = algorithm.with_memory(algorithm.init(jax.random.key(0)), population)
    state.clients.store.rows_per_chunk = 10
    for r in range(60):
        state, _ = algorithm.apply(state, federation.cohort(population, round=r))
    assert state.clients.store.capacity <= 40


UPPER, DAMPED, BOTH = Maximum(), Damped(), Damped(inner=Maximum())


@functools.cache
def after_five_rounds(how, aggregator):
    algorithm = Counting(batches=BATCHES, execution=EXECUTIONS[how], aggregator=aggregator)
    state = algorithm.init(jax.random.key(0))
    for cohort in cohorts(federation.data()):
        state, info = algorithm.apply(state, cohort)
    return jax.device_get((state.server, dict(state.aggregator), info))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "aggregator"),
    [
        *((how, BOTH) for how in EXECUTIONS if how != "jit"),
        *((how, one) for how in ("jit, 3 lanes, streamed", "pmap, 2 devices, 2 lanes") for one in (UPPER, DAMPED)),
    ],
)
def test_stacking_aggregators_and_aggregators_with_memory(how, aggregator):
    *_, info = after = after_five_rounds(how, aggregator)
    federation.assert_trees_close(after, after_five_rounds("jit", aggregator))
    took_part = info.clients["num_steps"] > 0
    bits = 32 if aggregator is UPPER else 3
    assert info.clients["bits_up"].tolist() == (bits * took_part).tolist()
    assert info.clients["bits_down"].tolist() == (32 * took_part).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("how", EXECUTIONS)
def test_a_round_that_calls_its_clients_twice(how, long, monkeypatch):
    if long:
        monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)
    population = federation.data()
    algorithm = Variance(batches=fedsim.Batches(size=4), execution=EXECUTIONS[how])
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
    x = population.columns["x"][:, 0]
    np.testing.assert_allclose([state["mean"], state["variance"]], [x.mean(), x.var()], rtol=1e-5)
    assert info.clients["bits_up"].tolist() == [64 if n else 0 for n in population.sizes]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Twice(Counting):
    """Runs `Counting` twice in a round, each with its own memory. A client dropped in one call may count in the other."""

    refuse_first: float = -1.0

    def round(self, state, clients):
        first, _ = clients.aggregate(self.client_first, state, name="first")
        update, info = clients.aggregate(self.client_second, state + first)
        return state + first + update, info

    def client_memory(self, shared):
        start = super().client_memory(shared)
        return {"first": start, "second": start}

    def client_first(self, shared, client):
        return self.of_call("first", self.refuse_first, shared, client)

    def client_second(self, shared, client):
        return self.of_call("second", self.refuse, shared, client)

    def of_call(self, name, refuse, shared, client):
        seen = client.for_each_batch(PREVIEW, add_first_feature, jnp.float32(0), "look")
        steps = client.for_each_batch(self.batches, lambda steps, batch: steps + 1, jnp.float32(1000))
        kept = client.memory[name]
        kept = Memory(kept.visits + 1, kept.total + jnp.stack([shared, seen]))
        update = jnp.where(client.position == jnp.int32(refuse), jnp.nan, seen + steps)
        return fedsim.ClientUpdate(update, jnp.float32(1), {}, client.memory | {name: kept})


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("how", [how for how in EXECUTIONS if how not in ("jit", "jit, streamed")])
@pytest.mark.filterwarnings("ignore:.*held a NaN")
def test_each_call_has_its_own_memories(how, long, monkeypatch):
    """The first call drops client 3. This does not affect its memory of the second call or the aggregators' memories."""
    if long and how == "debug":
        pytest.skip("Debug runs one client after another.")
    if long:
        monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)
    population = federation.data()
    algorithm = Twice(batches=BATCHES, refuse_first=3.0, execution=EXECUTIONS[how], aggregator=Damped())
    state = algorithm.init(jax.random.key(0))
    for round in range(3):
        state, info = algorithm.apply(state, federation.cohort(population, round=round))
        assert int(info.num_dropped) == 1
    (kept, by_call), seen = federation.plain(state).clients
    came = population.sizes > 0
    in_first = came & (np.arange(8) != 3)
    assert seen.tolist() == came.tolist()
    assert kept["first"].visits.tolist() == (3 * in_first).tolist() and kept["second"].visits.tolist() == (3 * came).tolist()
    assert by_call["first"][came].tolist() == np.where(in_first, 10, 7)[came].tolist()
    assert by_call["update"][came].tolist() == [10] * 7
    assert {name: float(rounds) for name, rounds in state.aggregator.items()} == {"first": 3, "update": 3}
    # The second call received the result of the first one.
    assert np.all(kept["second"].total[came, 0] > 100 + 3 * 1000)


@pytest.mark.first(1)
@pytest.mark.parametrize("how", EXECUTIONS)
@pytest.mark.filterwarnings("ignore:.*held a NaN")
def test_a_dropped_client_keeps_its_old_memory(how):
    population, kinds = federation.data(), {"execution": EXECUTIONS[how], "batches": BATCHES, "aggregator": Damped()}
    state = Counting(**kinds).init(jax.random.key(0))
    for round, refuse in enumerate([-1.0, 3.0, 3.0]):
        state, info = Counting(refuse=refuse, **kinds).apply(state, federation.cohort(population, round=round))
    (kept, by_call), _ = federation.plain(state).clients
    came, other = population.sizes > 0, np.arange(8) != 3
    assert came[3] and int(info.num_dropped) == 1
    assert kept.visits[came].tolist() == np.where(other, 3, 1)[came].tolist()
    assert by_call["update"][came].tolist() == np.where(other, 10, 8)[came].tolist()


@pytest.mark.first(1)
@pytest.mark.parametrize("how", ["jit, on the device", *(how for how in EXECUTIONS if how != "jit, on the device")])
@pytest.mark.filterwarnings("ignore:In round 1, 2 client.s. sent an update, fewer than minimum=3")
def test_clients_keep_nothing_of_a_round_whose_sum_is_never_revealed(how):
    """Two clients take a step in round 1, of which one had none before, and three in round 2."""
    mean = fedsim.aggregators.SecureMean(max_weight=1.0, clip=2000.0, minimum=3)
    algorithm = Counting(execution=EXECUTIONS[how], batches=BATCHES, aggregator=mean)
    population, state = federation.data(), algorithm.init(jax.random.key(0))
    filled, (empty,) = np.flatnonzero(population.sizes), np.flatnonzero(population.sizes == 0)
    expected = np.zeros(8, int)
    for round, chosen in enumerate([filled[:3], [*filled[2:4], empty], filled[:3]]):
        cohort = fedsim.Cohort(population, np.array(chosen), round, fedsim.rng.root(0))
        state, info = algorithm.apply(state, cohort)
        if round != 1:
            expected[chosen] += 1
        (kept, _), seen = federation.plain(state).clients
        assert kept.visits.tolist() == expected.tolist() and seen.tolist() == (expected > 0).tolist()
        assert int(info.num_aggregated) == (2 if round == 1 else 3)


@pytest.mark.first(1)
@pytest.mark.filterwarnings("ignore:.*did not reach the server")
@pytest.mark.parametrize("memory", ["resident", "stream"])
@pytest.mark.parametrize("devices", [8, 1, 2])
def test_rounds_in_one_dispatch_equal_single_rounds_bit_for_bit(devices, memory):
    """This holds for all dtypes, for -0.0 and for flags. Clients change devices from round to round."""

    class Kinds(Counting):
        def client_memory(self, shared):
            return jnp.int8(-3), jnp.bfloat16(0), jnp.zeros(2), False, jnp.uint16(7)

        def client_update(self, shared, client):
            small, half, floats, flag, counts = client.memory
            floats = jnp.where(counts == 7, jnp.array([-0.0, 1e-40]), floats)  # from its first visit on
            kept = small - jnp.int8(1), half - jnp.bfloat16(1.5), floats, jnp.logical_not(flag), counts * jnp.uint16(3)
            update = jnp.where(client.position == 2, jnp.nan, client.num_examples.astype(jnp.float32))
            return fedsim.ClientUpdate(update, jnp.float32(1), {}, kept)

    algorithm = Kinds(batches=BATCHES, execution=fedsim.Pmap(devices=devices, memory=memory))
    start, rounds = algorithm.init(jax.random.key(0)), list(cohorts(federation.data()))
    together, _ = algorithm.apply_rounds(start, rounds)
    alone = start
    for cohort in rounds:
        alone, _ = algorithm.apply(alone, cohort)
    for ours, theirs in zip(*(jax.tree.leaves(federation.plain(state)) for state in (together, alone)), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    (small, *_, counts), _ = federation.plain(together).clients[0]
    visits = np.bincount(np.concatenate([cohort.clients for cohort in rounds]), minlength=8)
    visits[[1, 2]] = 0  # Client 1 has no examples, and client 2 is dropped.
    np.testing.assert_array_equal(small, np.where(visits, -3 - visits, 0))
    np.testing.assert_array_equal(counts, np.where(visits, 7 * 3**visits, 0))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["resident", "stream"])
def test_a_long_round_always_runs_alone(memory, monkeypatch):
    """The order of its sums must not depend on the rounds around it."""
    monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)
    population, slots = federation.data(sizes=range(1, 25)), 24
    algorithm = fedsim.algorithms.SCAFFOLD(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=BATCHES,
        execution=fedsim.Pmap(devices=2, lanes=2, memory=memory),
    )
    start = algorithm.init(jax.random.key(0))
    of_rounds = np.array([3, 5]), np.arange(slots), np.arange(slots), np.array([3, 5])
    rounds = [fedsim.Cohort(population, who, r, fedsim.rng.root(0), slots=slots) for r, who in enumerate(of_rounds)]
    together, infos = algorithm.apply_rounds(start, rounds, max_rounds=8)
    alone = start
    for r, cohort in enumerate(rounds):
        alone, info = algorithm.apply(alone, cohort)
        federation.assert_trees_equal(jax.tree.map(lambda x, r=r: np.asarray(x[r]), infos), jax.device_get(info))
    federation.assert_trees_equal(federation.plain(together), federation.plain(alone))


def test_the_position_of_long_rounds_compiles_nothing_new(monkeypatch, caplog):
    monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)
    population, slots = federation.data(sizes=range(1, 25)), 24
    algorithm = Counting(batches=BATCHES, execution=fedsim.Jit(memory="resident"))
    state = algorithm.init(jax.random.key(0))
    short, long = np.array([0]), np.arange(slots)
    for call, of_rounds in enumerate(([short, long, short, short], [long, short, short, short], [short, short, short, long])):
        with jax.log_compiles(), caplog.at_level("WARNING"):
            caplog.clear()
            rounds = [fedsim.Cohort(population, who, r, fedsim.rng.root(0), slots=slots) for r, who in enumerate(of_rounds)]
            state, infos = algorithm.apply_rounds(state, rounds)
        compiled = [record.message for record in caplog.records if record.message.startswith("Compiling")]
        assert infos.num_clients.tolist() == [len(who) for who in of_rounds]
        assert bool(compiled) == (call == 0), compiled


class Telling(Counting):
    """An algorithm whose update is computed from the row that is overwritten."""

    def client_update(self, shared, client):
        result = super().client_update(shared, client)
        return result._replace(update=result.update + client.memory.total)

    def server_update(self, state, update, info):
        return state + update.sum()


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", [Counting, Telling])
@pytest.mark.parametrize("devices", [1, 2])
def test_rows_are_written_in_place(devices, kind):
    """Otherwise a CPU would copy the whole table for every client. One copy per dispatch is allowed."""
    population = federation.data(sizes=[1] * 60)
    algorithm = kind(batches=BATCHES, execution=fedsim.Pmap(devices=devices, memory="resident"))
    text = algorithm.execution.lower(algorithm, federation.cohort(population)).compile().as_text()
    in_loops = [body for body in text.split("\n\n") if "dynamic-update-slice(" in body and "f32[60,2]" in body]
    assert in_loops
    assert not any(re.search(r"f32\[60,2\]\S* (copy|select|scatter)\(", body) for body in in_loops if "ENTRY" not in body)


@pytest.mark.first(1)
@pytest.mark.parametrize("how", ["jit, streamed", "pmap, 8 devices, streamed", "debug"])
def test_another_execution_continues_with_the_memories(how):
    population = federation.data()
    by_two = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=2, memory="resident"))
    other = Counting(batches=BATCHES, execution=EXECUTIONS[how])
    state, expected = (by_two.init(jax.random.key(0)) for _ in range(2))
    for round, algorithm in enumerate([by_two, other, by_two]):
        state, _ = algorithm.apply(state, federation.cohort(population, round=round))
        expected, _ = by_two.apply(expected, federation.cohort(population, round=round))
    federation.assert_trees_close(federation.plain(state), federation.plain(expected))


def test_old_states_do_not_change(monkeypatch):
    """This also holds when the store of the rows grows and moves them."""
    monkeypatch.setattr("fedsim.data._row_store._CHUNK_BYTES", 4 * 12)
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=2, memory="stream"))
    state = algorithm.init(jax.random.key(0))
    states, plain = [], []
    for round in range(12):
        state, _ = algorithm.apply(state, federation.cohort(population, round=round))
        states.append(state)
        plain.append(federation.plain(state))
    for held, expected in zip(states, plain, strict=True):
        federation.assert_trees_equal(federation.plain(held), expected)


@pytest.mark.first(1)
@pytest.mark.parametrize("how", ["jit", "debug", "pmap, 8 devices, streamed"])
def test_stragglers_take_a_fraction_of_their_steps(how):
    population = federation.data(sizes=(12, 12, 12, 12, 0))
    work = np.array([1.0, 0.35, 0.0, 0.01, 1.0])
    cohort = fedsim.Cohort(population, np.arange(5), 0, fedsim.rng.root(0), work=work)
    algorithm = Counting(batches=fedsim.Batches(size=6, epochs=10), execution=EXECUTIONS[how])
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    assert info.clients["num_steps"].tolist() == [20, 7, 0, 1, 0]
    assert int(info.num_aggregated) == 3
    with pytest.raises(ValueError, match=r"Expected work in \[0, 1\]"):
        dataclasses.replace(cohort, work=work + 0.1)


def test_rows_are_written_at_their_indices_and_not_beyond_the_end():
    draw = np.random.default_rng(0)
    old, new = draw.normal(size=(6, 3)).astype(np.float32), draw.normal(size=(5, 3)).astype(np.float32)
    at = np.array([4, 6, 0, 6, 9], np.int32)
    table = ClientTable({"w": jnp.asarray(old)}, jnp.zeros(6, bool))
    expected, seen = old.copy(), np.zeros(6, bool)
    expected[[4, 0]], seen[[4, 0]] = new[[0, 2]], True
    write, rows = jax.jit(put_rows), ClientTable({"w": jnp.asarray(new)}, jnp.ones(5, bool))
    for written in (put_rows(table, jnp.asarray(at), rows), write(table, at, rows)):
        np.testing.assert_array_equal(written.rows["w"], expected)
        np.testing.assert_array_equal(written.seen, seen)
    # XLA knows that all indices differ. Otherwise it may write the rows one after another.
    assert write.lower(table, at, rows).as_text().count("unique_indices = true") == 2
