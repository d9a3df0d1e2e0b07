"""Rows that go to the devices and come back: where they lie, what goes together, and that nothing copies them."""

import re

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import BATCHES, EXECUTIONS, Counting, MeanFirst, by_hand, cohorts

import fedsim
from fedsim import execution
from fedsim.algorithms import SCAFFOLD
from fedsim.data import ClientRows
from fedsim.execution._round import Given


@pytest.fixture(params=["in place", "gathered"])
def lie(request, monkeypatch):
    if request.param == "gathered":
        monkeypatch.setattr("fedsim.execution._moved_rows._in_place", lambda clients, mesh: None)
    return request.param


@pytest.fixture
def dispatches(monkeypatch):
    """What went to devices, and what they got room for, of every dispatch."""
    seen, rows_for = [], execution._moved_rows.rows_for

    def spied(*args):
        seen.append(rows_for(*args))
        return seen[-1]

    monkeypatch.setattr("fedsim.execution._moved_rows.rows_for", spied)
    return seen


def test_the_device_gets_no_more_rows_than_there_are_clients(lie, monkeypatch, dispatches):
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Jit(memory="stream"))
    start = algorithm.init(jax.random.key(0))
    row_bytes = 12
    # Room for all clients' rows, and for fewer than five rounds would take if nobody came twice: one dispatch.
    most = "fedsim.execution._moved_rows._ROOM_BYTES" if lie == "in place" else "fedsim.execution._moved_rows._GATHERED_BYTES"
    monkeypatch.setattr(most, 8 * row_bytes)
    state, _ = algorithm.apply_rounds(start, list(cohorts(population)))
    assert [len(table.seen) for _, table, _, _ in dispatches] == [8]
    monkeypatch.setattr(most, 8 * row_bytes - 1)
    parts, _ = algorithm.apply_rounds(start, list(cohorts(population)))
    assert [len(table.seen) for _, table, _, _ in dispatches[1:]] == [4] * 5
    federation.assert_trees_close(federation.plain(parts), federation.plain(state))


@pytest.mark.parametrize(("devices", "lanes"), [(2, 1), (2, 2), (8, 1)])
def test_each_row_is_on_the_device_of_its_client_and_what_goes_together_changes_no_bit(lie, devices, lanes, dispatches):
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=devices, lanes=lanes, memory="stream"))
    start, draw = algorithm.init(jax.random.key(0)), np.random.default_rng(3)
    rounds = [fedsim.Cohort(population, draw.permutation(8)[:4], r, fedsim.rng.root(0)) for r in range(12)]
    together, _ = algorithm.apply_rounds(start, rounds)
    ((_, table, plans, who),) = dispatches
    assert len(plans) == 12 and all(len(there) == len(set(there)) <= len(table.seen) // devices for there in who)
    for plan in plans:
        for (device, lane), length in np.ndenumerate(plan.length):
            at = plan.queue[device, lane, :length]
            assert who[device][plan.keeps[at]].tolist() == plan.client[at].tolist()
    moves = [tuple(move) for plan in plans for move in plan.moves.tolist() if move[0] >= 0]
    assert len(moves) > 3 and any((to, source) in moves[:i] for i, (source, to) in enumerate(moves))  # and some come back
    alone = start
    for cohort in rounds:
        alone, _ = algorithm.apply(alone, cohort)
    federation.assert_trees_equal(federation.plain(together), federation.plain(alone))
    (kept, _), seen = federation.plain(together).clients
    _, expected = by_hand(rounds)
    actual = {id: (int(kept.visits[at]), kept.total[at].tolist()) for at, id in enumerate(population.client_ids) if seen[at]}
    assert actual == {id: (visits, pytest.approx(total.tolist())) for id, (visits, total) in expected.items()}


@pytest.mark.filterwarnings("ignore:.*were left out")
def test_rows_of_several_phases_follow_their_clients(lie):
    """A phase must not find what a client left behind on another device."""

    class Two(Counting):
        @property
        def phases(self):
            return Counting(batches=self.batches, refuse=2), self

    population, draw = federation.data(), np.random.default_rng(5)
    algorithm = Two(batches=BATCHES, execution=fedsim.Pmap(devices=2, memory="stream"), refuse=5)
    rounds = [fedsim.Cohort(population, draw.permutation(8)[:4], r, fedsim.rng.root(0)) for r in range(16)]
    state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), rounds)
    visits = [leaf for leaf in jax.tree.leaves(federation.plain(state).clients) if leaf.dtype == np.int32]
    came = np.bincount(np.concatenate([cohort.clients for cohort in rounds]), minlength=8) * (population.sizes > 0)
    for of_phase, refused in zip(visits, (2, 5), strict=True):
        np.testing.assert_array_equal(of_phase, np.where(np.arange(8) == refused, 0, came))


@pytest.mark.filterwarnings("ignore:.*were left out")
def test_what_moves_between_devices_keeps_its_bits_whatever_its_dtypes(lie):
    """-0.0 too, and flags; of clients whose update does not count, nothing moves."""

    class Kinds(Counting):
        def client_memory(self, shared):
            return jnp.int8(-3), jnp.bfloat16(0), jnp.zeros(2), False, jnp.uint16(7)

        def client_init(self, shared, client):
            return jnp.float32(0), jnp.float32(0), client.memory[0].astype(jnp.int32)

        def client_final(self, shared, state, client):
            small, half, floats, flag, counts = client.memory
            floats = jnp.where(counts == 7, jnp.array([-0.0, 1e-40]), floats)  # from its first visit on
            kept = small - jnp.int8(1), half - jnp.bfloat16(1.5), floats, ~flag, counts * jnp.uint16(3)
            update = jnp.where(client.position == 2, jnp.nan, state[0])
            return execution.ClientUpdate(update, jnp.float32(1), {}, kept)

    population = federation.data()
    by_two = Kinds(batches=BATCHES, execution=fedsim.Pmap(devices=2, memory="stream"))
    start, draw = by_two.init(jax.random.key(0)), np.random.default_rng(3)
    rounds = [fedsim.Cohort(population, draw.permutation(8)[:4], r, fedsim.rng.root(0)) for r in range(12)]
    together, _ = by_two.apply_rounds(start, rounds)
    alone = start
    for cohort in rounds:
        alone, _ = by_two.apply(alone, cohort)
    for ours, theirs in zip(*(jax.tree.leaves(federation.plain(state)) for state in (together, alone)), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("memory", ["resident", "stream"])
def test_a_long_round_is_by_itself_whatever_it_is_given_with(memory, monkeypatch):
    """Its lanes are merged after every part, and a sum of floats is of its order."""
    monkeypatch.setattr("fedsim.execution._plan._STEPS_PER_PROGRAM", 3)
    population, slots = federation.data(sizes=range(1, 25)), 24
    algorithm = SCAFFOLD(
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


def test_nothing_is_compiled_for_where_the_long_rounds_are(monkeypatch, caplog):
    monkeypatch.setattr("fedsim.execution._plan._STEPS_PER_PROGRAM", 3)
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
    """What is sent is what is written over."""

    def client_final(self, shared, state, client):
        result = super().client_final(shared, state, client)
        return result._replace(update=result.update + client.memory.total - jnp.stack([shared, state[0]]))

    def server_update(self, state, update):
        return state + update.sum()


@pytest.mark.parametrize("kind", [Counting, Telling])
@pytest.mark.parametrize("devices", [1, 2])
def test_rows_are_written_in_their_place_and_not_sent_around(lie, devices, kind, dispatches):
    """What `python -m benchmarks --only algorithms` is about: no table is copied, and no all-reduce carries a row."""
    population = federation.data()
    algorithm = kind(batches=BATCHES, execution=fedsim.Pmap(devices=devices, memory="stream"))
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
    (((mesh, layout, *_), compiled),) = algorithm._compiled.items()
    before, room, plans, _ = dispatches[0]
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*mesh.axis_names))
    table = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded), room)
    columns, plans = execution._placement.streamed_columns(population, plans, mesh, 1)
    server, key = execution._placement.replicate((state._replace(clients=()), fedsim.rng.root(0)), mesh)
    given, packed = Given(columns, before), layout.pack(plans, 1)
    text = compiled.rounds.lower(given, table, server, key, packed, np.int32(1)).compile().as_text()
    rows, kept = f"f32[{len(room.seen) // devices},2]", f"f32[{len(before.seen) // (1 if lie == 'in place' else devices)},2]"
    assert f"{rows}{{1,0}} dynamic-update-slice(" in text and "input_output_alias" in text and kept in text
    assert not re.search(rf"({re.escape(rows)}|{re.escape(kept)})\S* copy\(", text)
    assert not any("f32[8,2]" in line for line in text.splitlines() if " all-reduce" in line)


def test_a_cpu_reads_rows_where_they_lie_and_rows_that_are_gathered_give_the_same_bits(monkeypatch, dispatches):
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=2, memory="stream"))
    start, rounds = algorithm.init(jax.random.key(0)), list(cohorts(population))
    in_place, _ = algorithm.apply_rounds(start, rounds)
    (compiled,) = algorithm._compiled.values()
    assert compiled.rounds._cache_size() == 1
    lies = [leaf.ctypes.data for leaf in in_place.clients.store.rows]
    for before, *_ in dispatches:
        read = [
            {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards} for leaf in jax.tree.leaves(before.rows)
        ]
        assert read == [{at} for at in lies]
    there = len(dispatches)
    monkeypatch.setattr("fedsim.execution._moved_rows._in_place", lambda clients, mesh: None)
    gathered, _ = algorithm.apply_rounds(start, rounds)
    assert len(dispatches) == 2 * there and all(len(before.seen) <= 16 for before, *_ in dispatches[there:])
    federation.assert_trees_equal(federation.plain(gathered), federation.plain(in_place))


@pytest.mark.parametrize("how", ["jit, streamed", "pmap, 8 devices, streamed", "debug"])
def test_another_execution_goes_on_with_rows_that_were_moved(how):
    population = federation.data()
    by_two = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=2, memory="stream"))
    other = Counting(batches=BATCHES, execution=EXECUTIONS[how])
    state, expected = (by_two.init(jax.random.key(0)) for _ in range(2))
    for round, algorithm in enumerate([by_two, other, by_two]):
        state, _ = algorithm.apply(state, federation.cohort(population, round=round))
        expected, _ = by_two.apply(expected, federation.cohort(population, round=round))
    federation.assert_trees_close(federation.plain(state), federation.plain(expected))


def test_a_phase_that_keeps_nothing_makes_nobody_copy_rows(monkeypatch):
    """Its flag is never set, and says nothing of what other phases kept."""

    class Two(Counting):
        @property
        def phases(self):
            return MeanFirst(batches=self.batches), self

        def init(self, key):
            return {"mean": jnp.float32(0)}

        def broadcast(self, state):
            return state["mean"]

        def server_update(self, state, update):
            return {"mean": state["mean"] + update}

    gathers = []
    monkeypatch.setattr(ClientRows, "gather", lambda *args, **more: gathers.append(args))
    algorithm = Two(batches=BATCHES, execution=fedsim.Jit(memory="stream"))
    state = algorithm.init(jax.random.key(0))
    for round in range(2):
        state, _ = algorithm.apply(state, federation.cohort(federation.data(), round=round))
    assert len(state.clients) == 7 and not gathers


def test_states_that_somebody_holds_stay_what_they_were_wherever_rows_go(monkeypatch):
    """More of them than there is room for at first: the rows move, and what devices read with them."""
    monkeypatch.setattr("fedsim.data._row_store._CHUNK_BYTES", 4 * 12)
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=2, memory="stream"))
    state = algorithm.init(jax.random.key(0))
    states, plain, places = [], [], set()
    for round in range(12):
        state, _ = algorithm.apply(state, federation.cohort(population, round=round))
        states.append(state)
        plain.append(federation.plain(state))
        places.add(state.clients.store.rows[0].ctypes.data)
    assert len(places) > 1
    for held, expected in zip(states, plain, strict=True):
        federation.assert_trees_equal(federation.plain(held), expected)
    again = algorithm.init(jax.random.key(0))
    for round in range(12):
        again, _ = algorithm.apply(again, federation.cohort(population, round=round))
    federation.assert_trees_equal(federation.plain(again), plain[-1])


@pytest.mark.parametrize("devices", [1, 2])
def test_room_for_what_rounds_write_is_used_again(lie, devices):
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=devices, memory="stream"))
    state, places = algorithm.init(jax.random.key(0)), set()
    for round in range(4):
        state, _ = algorithm.apply(state, federation.cohort(population, round=round))
        room = state.clients.store.kept["room", algorithm.execution.mesh()]
        places.add(tuple(shard.data.unsafe_buffer_pointer() for shard in room.rows[0].total.addressable_shards))
    assert len(places) == 1
