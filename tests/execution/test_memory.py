"""What lives from round to round beside the server's state: the same under every execution, and as in plain Python."""

import contextlib
import dataclasses
import re
from typing import NamedTuple

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, execution

EXECUTIONS = {
    "jit": fedsim.Jit(),
    "jit, on the device": fedsim.Jit(memory="resident"),
    "jit, streamed": fedsim.Jit(memory="stream"),
    "jit, 3 lanes, streamed": fedsim.Jit(lanes=3, memory="stream"),
    "pmap, 8 devices, streamed": fedsim.Pmap(devices=8, memory="stream"),
    "pmap, 2 devices, 2 lanes": fedsim.Pmap(devices=2, lanes=2),
    "debug": fedsim.Debug(),
}
BATCHES = fedsim.Batches(size=4, epochs=2)
LOOK = fedsim.Batches(size=3, shuffle=False)


class Kept(NamedTuple):
    visits: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Counting(fedsim.Algorithm):
    """Each client counts its visits, sums what it was sent, previews the sum of its examples, and keeps both."""

    refuse: float = -1.0

    @property
    def preview(self):
        return LOOK

    def init(self, key):
        return jnp.float32(0)

    def client_memory(self, shared):
        return Kept(jnp.int32(0), jnp.full((2,), 100.0))

    def client_init(self, shared, client):
        return jnp.float32(0), jnp.float32(0), client.memory.visits

    def client_preview(self, shared, state, batch):
        seen, steps, visits = state
        return seen + jnp.sum(batch.examples["x"][:, 0], where=batch.mask), steps, visits

    def client_begin(self, shared, state, client):
        return state[0], state[1] + 1000, state[2]

    def client_step(self, shared, state, batch):
        return state[0], state[1] + 1, state[2]

    def client_final(self, shared, state, client):
        seen, steps, visits = state
        kept = Kept(visits + 1, client.memory.total + jnp.stack([shared, seen]))
        bad = client.position == jnp.int32(self.refuse)
        update = jnp.where(bad, jnp.nan, seen + steps)
        return execution.ClientUpdate(update, jnp.float32(1), {"seen": seen, "visits": kept.visits}, kept)

    def server_update(self, state, update):
        return state + update


def by_hand(rounds, refuse=-1.0):
    """`Counting` in plain Python."""
    server, memory = 0.0, {}
    for cohort in rounds:
        updates = []
        for position, (client_id, dataset, _) in zip(cohort.clients.tolist(), cohort, strict=True):
            if not len(dataset):
                continue
            seen = float(dataset["x"][:, 0].sum())
            if position != refuse:
                visits, total = memory.get(client_id, (0, np.full(2, 100.0)))
                memory[client_id] = visits + 1, total + np.array([server, seen])
                updates.append(seen + 1000 + int(BATCHES.num_steps(len(dataset))))
        server += float(np.mean(updates)) if updates else 0.0
    return server, memory


def cohorts(population, seed=3):
    draw = np.random.default_rng(seed)
    for r in range(5):
        yield fedsim.Cohort(population, draw.permutation(8)[:4], r, fedsim.rng.root(0))


@pytest.mark.parametrize("refuse", [-1.0, 3.0])
@pytest.mark.parametrize("how", EXECUTIONS)
def test_clients_remember_the_same_under_every_execution(how, refuse):
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=EXECUTIONS[how], refuse=refuse)
    state = algorithm.init(jax.random.key(0))
    rounds = list(cohorts(population))
    with pytest.warns() if refuse >= 0 else contextlib.nullcontext():
        for cohort in rounds[:3]:
            state, _ = algorithm.apply(state, cohort)
        state, infos = algorithm.apply_rounds(state, rounds[3:], max_rounds=3)
        jax.block_until_ready(algorithm.apply(state, rounds[0]))
    server, memory = by_hand(rounds, refuse)
    np.testing.assert_allclose(state.server, server, rtol=1e-5)
    assert infos.clients["seen"].shape == (2, 4)
    everyone = np.arange(8)
    if isinstance(state.clients, execution.ClientTable):
        rows, seen = jax.device_get(state.clients)
    else:
        rows, seen = state.clients.gather(everyone)
    assert [population.client_ids[i] for i in np.flatnonzero(seen)] == sorted(memory)
    for client in np.flatnonzero(seen):
        visits, total = memory[population.client_ids[client]]
        assert rows[0].visits[client] == visits
        np.testing.assert_allclose(rows[0].total[client], total, rtol=1e-5)


def test_an_old_state_keeps_what_clients_knew_then():
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Jit(memory="stream"))
    states = [algorithm.init(jax.random.key(0))]
    for r in range(40):
        state, _ = algorithm.apply(states[-1], federation.cohort(population, round=r))
        states.append(state)
    for r, state in enumerate(states[1:], start=1):
        rows, seen = state.clients.gather(np.arange(8))
        assert rows[0].visits[seen].tolist() == [r] * 7  # one client has no examples


def test_rows_that_nobody_refers_to_are_used_again():
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Jit(memory="stream"))
    state = algorithm.remember(algorithm.init(jax.random.key(0)), population)
    state.clients.store.rows_per_chunk = 10
    for r in range(60):
        state, _ = algorithm.apply(state, federation.cohort(population, round=r))
    assert state.clients.store.capacity <= 40


class Upper(aggregators.SideBySide):
    def combine(self, updates, weights):
        return jax.tree.map(lambda rows: jnp.max(jnp.where(weights != 0, rows, -jnp.inf)), updates)


@dataclasses.dataclass(frozen=True, eq=False)
class Damped(aggregators.Wrapper):
    """A server memory, a client memory, noise of the server and of the client."""

    def init(self, update):
        return jnp.float32(0)

    def client_memory(self, update):
        return jnp.full(update.shape, 7.0)

    def send(self, update, common, memory, key):
        sent = update + memory + common / 10 + jax.random.uniform(key)
        return aggregators.Sent(sent, memory + 1, jnp.uint32(3), jnp.float32(2.5))

    def conclude(self, accumulator, memory, key):
        update = self.finish(accumulator)
        return update + jax.random.uniform(key), memory + 1


@pytest.mark.parametrize("aggregator", [Upper(), Damped(), Damped(inner=Upper())])
@pytest.mark.parametrize("how", [how for how in EXECUTIONS if how != "jit"])
def test_aggregators_with_memory_and_side_by_side(how, aggregator):
    population = federation.data()
    states, infos = [], []
    for execution_ in (EXECUTIONS["jit"], EXECUTIONS[how]):
        algorithm = Counting(batches=BATCHES, execution=execution_, aggregator=aggregator)
        state = algorithm.init(jax.random.key(0))
        for cohort in cohorts(population):
            state, info = algorithm.apply(state, cohort)
        states.append(jax.device_get((state.server, state.aggregator)))
        infos.append(jax.device_get(info))
    federation.assert_trees_close(states[0], states[1])
    federation.assert_trees_close(infos[0], infos[1])
    took_part = infos[0].clients["num_steps"] > 0
    bits = 3 if isinstance(aggregator, Damped) else 32
    assert infos[1].clients["bits_up"].tolist() == (bits * took_part).tolist()
    assert infos[1].clients["bits_down"].tolist() == (32 * took_part).tolist()


class MeanFirst(fedsim.Algorithm):
    """Two phases: the mean of x over the cohort, then the mean of the squared distance to it, which needs the first."""

    def init(self, key):
        return {"mean": jnp.float32(0), "variance": jnp.float32(0)}

    def client_init(self, shared, client):
        return jnp.float32(0)

    def client_final(self, shared, state, client):
        size = jnp.maximum(client.num_examples, 1).astype(jnp.float32)
        return execution.ClientUpdate(state / size, size)

    def client_step(self, shared, state, batch):
        return state + jnp.sum(batch.examples["x"][:, 0], where=batch.mask)

    def server_update(self, state, update):
        return state | {"mean": update}


class Variance(MeanFirst):
    @property
    def phases(self):
        return MeanFirst(batches=self.batches), self

    def client_step(self, shared, state, batch):
        return state + jnp.sum(jnp.square(batch.examples["x"][:, 0] - shared["mean"]), where=batch.mask)

    def server_update(self, state, update):
        return state | {"variance": update}


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("how", EXECUTIONS)
def test_a_round_of_two_phases(how, long, monkeypatch):
    if long:
        monkeypatch.setattr("fedsim.execution._plan._STEPS_PER_PROGRAM", 3)
    population = federation.data()
    algorithm = Variance(batches=fedsim.Batches(size=4), execution=EXECUTIONS[how])
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
    x = population.columns["x"][:, 0]
    np.testing.assert_allclose([state["mean"], state["variance"]], [x.mean(), x.var()], rtol=1e-5)
    assert info.clients["bits_up"].tolist() == [64 if n else 0 for n in population.sizes]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Refusing(Counting):
    """`Counting` before `Counting`: a client that the first phase refuses may count in the second."""

    first: Counting | None = None

    @property
    def phases(self):
        return self.first, self


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("how", [how for how in EXECUTIONS if how not in ("jit", "jit, streamed")])
@pytest.mark.filterwarnings("ignore:.*held a NaN")
def test_phases_keep_what_is_theirs(how, long, monkeypatch):
    """Each phase has rows of its own, and a row that the other one wrote is none of its own."""
    if long and how == "debug":
        pytest.skip("one step after another")
    if long:
        monkeypatch.setattr("fedsim.execution._plan._STEPS_PER_PROGRAM", 3)
    population = federation.data()
    first = Counting(batches=BATCHES, refuse=3.0, aggregator=Damped())
    algorithm = Refusing(batches=BATCHES, first=first, execution=EXECUTIONS[how], aggregator=Damped())
    state = algorithm.init(jax.random.key(0))
    for round in range(3):
        state, info = algorithm.apply(state, federation.cohort(population, round=round))
        assert int(info.num_dropped) == 1
    rows, seen = federation.plain(state).clients
    some = population.sizes > 0
    (of_first, damped_first, wrote_first), (of_second, damped_second, wrote_second) = rows
    assert seen.tolist() == wrote_second.tolist() == some.tolist()
    assert wrote_first.tolist() == (some & (np.arange(8) != 3)).tolist()
    assert of_first.visits.tolist() == (3 * wrote_first).tolist() and of_second.visits.tolist() == (3 * some).tolist()
    assert damped_first.tolist() == (10 * wrote_first).tolist() and damped_second.tolist() == (10 * some).tolist()
    assert [float(rounds) for rounds in state.aggregator] == [3, 3]
    # What they were sent: the second phase got what the first had made of it.
    assert np.all(of_second.total[some, 0] > 100 + 3 * 1000)


@pytest.fixture
def dispatches(monkeypatch):
    """What went to devices: table, plans, and whose rows, of every dispatch."""
    seen, brought = [], execution._memory.brought

    def spied(*args):
        seen.append(brought(*args))
        return seen[-1]

    monkeypatch.setattr("fedsim.execution._memory.brought", spied)
    return seen


def test_the_device_gets_no_more_rows_than_there_are_clients(monkeypatch, dispatches):
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Jit(memory="stream"))
    start = algorithm.init(jax.random.key(0))
    row_bytes = 12
    # Room for all clients' rows, and for fewer than five rounds would take if nobody came twice: one dispatch.
    monkeypatch.setattr("fedsim.execution._memory._TABLE_BYTES", 8 * row_bytes)
    state, _ = algorithm.apply_rounds(start, list(cohorts(population)))
    assert [len(table.seen) for table, _, _ in dispatches] == [8]
    monkeypatch.setattr("fedsim.execution._memory._TABLE_BYTES", 8 * row_bytes - 1)
    parts, _ = algorithm.apply_rounds(start, list(cohorts(population)))
    assert [len(table.seen) for table, _, _ in dispatches[1:]] == [4] * 5
    federation.assert_trees_close(federation.plain(parts), federation.plain(state))


@pytest.mark.parametrize("lanes", [1, 2])
def test_each_row_is_on_the_device_of_its_client_and_what_goes_together_changes_no_bit(lanes, dispatches):
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=2, lanes=lanes, memory="stream"))
    start, rounds = algorithm.init(jax.random.key(0)), list(cohorts(population))
    together, _ = algorithm.apply_rounds(start, rounds)
    for table, plans, who in dispatches:
        capacity = len(table.seen) // 2
        assert sum(len(there) for there in who) == len(set(np.concatenate(who).tolist())) <= 2 * capacity
        for plan in plans:
            for (device, lane), length in np.ndenumerate(plan.length):
                at = plan.queue[device, lane, :length]
                assert who[device][plan.keeps[at]].tolist() == plan.client[at].tolist()
    # Of five rounds of half of the clients some cannot go with those before them: a client came to the other device.
    assert 1 < len(dispatches) < 5 and sum(len(plans) for _, plans, _ in dispatches) == 5
    alone = start
    for cohort in rounds:
        alone, _ = algorithm.apply(alone, cohort)
    federation.assert_trees_equal(federation.plain(together), federation.plain(alone))


@pytest.mark.parametrize("memory", ["resident", "stream"])
def test_a_long_round_is_by_itself_whatever_it_is_given_with(memory, monkeypatch):
    """Its lanes are merged after every part, and a sum of floats is of its order."""
    monkeypatch.setattr("fedsim.execution._plan._STEPS_PER_PROGRAM", 3)
    population = federation.data(sizes=[30, *[2] * 7])
    algorithm = Counting(
        batches=BATCHES, execution=fedsim.Pmap(devices=2, lanes=2, memory=memory), aggregator=aggregators.Sum()
    )
    start = algorithm.init(jax.random.key(0))
    short, long = np.array([1, 2, 3]), np.array([0, 4, 5])
    rounds = [fedsim.Cohort(population, who, r, fedsim.rng.root(0)) for r, who in enumerate((short, short, long, long, short))]
    together, infos = algorithm.apply_rounds(start, rounds, max_rounds=8)
    alone = start
    for r, cohort in enumerate(rounds):
        alone, info = algorithm.apply(alone, cohort)
        federation.assert_trees_equal(jax.tree.map(lambda x, r=r: np.asarray(x[r]), infos), jax.device_get(info))
    federation.assert_trees_equal(federation.plain(together), federation.plain(alone))


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_are_written_in_their_place_and_not_sent_around(devices, dispatches):
    """What `python -m benchmarks --only algorithms` is about: the table is never copied, and no all-reduce carries a row."""
    population = federation.data()
    algorithm = Counting(batches=BATCHES, execution=fedsim.Pmap(devices=devices, memory="stream"))
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population))
    (((mesh, layout, *_), compiled),) = algorithm._compiled.items()
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*mesh.axis_names))
    table = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharded), dispatches[0][0])
    columns, plans = execution._placement.streamed_columns(population, dispatches[0][1], mesh, 1)
    server, key = execution._placement.replicate((state._replace(clients=()), fedsim.rng.root(0)), mesh)
    packed = layout.pack(plans, 1)
    text = compiled.rounds.lower(columns, table, server, key, packed, np.int32(1)).compile().as_text()
    rows = f"f32[{len(table.seen) // devices},2]"
    assert f"{rows}{{1,0}} dynamic-update-slice(" in text and "input_output_alias" in text
    assert not re.search(rf"{re.escape(rows)}\S* copy\(", text)
    assert not any("f32[8,2]" in line for line in text.splitlines() if " all-reduce" in line)


@pytest.mark.parametrize("how", ["jit", "debug", "pmap, 8 devices, streamed"])
def test_stragglers_take_a_share_of_their_steps(how):
    population = federation.data(sizes=(12, 12, 12, 12, 0))
    work = np.array([1.0, 0.35, 0.0, 0.01, 1.0])
    cohort = fedsim.Cohort(population, np.arange(5), 0, fedsim.rng.root(0), work=work)
    algorithm = Counting(batches=fedsim.Batches(size=6, epochs=10), execution=EXECUTIONS[how])
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    assert info.clients["num_steps"].tolist() == [20, 7, 0, 1, 0]
    assert int(info.num_aggregated) == 3
    with pytest.raises(ValueError, match=r"Expected work in \[0, 1\]"):
        dataclasses.replace(cohort, work=work + 0.1)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Wide(fedsim.Algorithm):
    """Clients send ``size`` zeros, to one of ``groups``, if there are any."""

    size: int = 10_000
    groups: int = 0

    def init(self, key):
        return jnp.zeros(())

    def client_init(self, shared, client):
        return jnp.zeros(())

    def client_step(self, shared, state, batch):
        return state + jnp.sum(batch.examples["x"], where=batch.mask[:, None])

    def client_final(self, shared, state, client):
        update = jnp.full(self.size, state)
        update = aggregators.Member(client.position % self.groups, update) if self.groups else update
        return fedsim.ClientUpdate(update, jnp.float32(1))

    def server_update(self, state, update):
        return state + jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, update))


@pytest.mark.parametrize(("groups", "lanes", "devices"), [(0, 1, 4), (0, 4, 2), (3, 2, 1)])
def test_what_is_refused_is_what_a_round_needs(groups, lanes, devices, monkeypatch):
    """One byte less than this is refused, and it is near what XLA reserves for the compiled round, and not above."""
    aggregator = aggregators.GeometricMedian()
    aggregator = aggregators.Grouped(groups=groups, inner=aggregator) if groups else aggregator
    way = fedsim.Pmap(lanes=lanes, devices=devices)
    algorithm = Wide(batches=BATCHES, aggregator=aggregator, groups=groups, execution=way)
    state, cohort = jnp.zeros(()), federation.cohort()
    one = 4 * 8 * (algorithm.size + 1) * max(1, groups) + 4 * groups
    needs = 2 * one * lanes * devices

    monkeypatch.setattr("psutil.virtual_memory", lambda: type("free", (), {"available": needs - 1}))
    with pytest.raises(ValueError, match=f"lanes={lanes} and devices={devices} that is there {2 * lanes * devices} times"):
        algorithm.apply(state, cohort)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("free", (), {"available": needs}))
    algorithm = dataclasses.replace(algorithm)
    algorithm.apply(state, cohort)

    ((how, compiled),) = vars(algorithm)["_compiled"].items()
    reserved = []

    def measured(*arguments):
        reserved.append(compiled.rounds.lower(*arguments).compile().memory_analysis().temp_size_in_bytes * devices)
        return compiled.rounds(*arguments)

    vars(algorithm)["_compiled"][how] = compiled._replace(rounds=measured)
    algorithm.apply(state, cohort)
    assert needs <= reserved[0] < 2 * needs


def test_updates_that_do_not_fit_side_by_side_are_refused(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("free", (), {"available": 10}))
    for way in (fedsim.Jit(), fedsim.Debug()):
        algorithm = Counting(batches=BATCHES, aggregator=Upper(), execution=way)
        with pytest.raises((ValueError, fedsim.execution.StageError), match="Upper folds 8 clients into 0.0 MB, .* are free"):
            algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


def test_another_population_s_state_is_refused():
    algorithm = Counting(batches=BATCHES)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    with pytest.raises(ValueError, match="remembers a population of 8 clients, and this one has 2"):
        algorithm.apply(state, federation.cohort(federation.data(sizes=(2, 3))))


def test_a_client_that_keeps_another_structure_is_refused():
    class Odd(Counting):
        def client_final(self, shared, state, client):
            return super().client_final(shared, state, client)._replace(memory=())

    algorithm = Odd(batches=BATCHES, execution=fedsim.Jit())
    with pytest.raises(ValueError, match="client_final keeps .* client_memory starts with"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


WAYS = [fedsim.Jit(memory="stream"), fedsim.Jit(lanes=2), fedsim.Debug()]


@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_keeps_another_shape_is_refused_and_another_dtype_becomes_its_own(way):
    class Short(Counting):
        def client_final(self, shared, state, client):
            result = super().client_final(shared, state, client)
            return result._replace(memory=result.memory._replace(total=result.memory.total[:1]))

    class Half(Counting):
        def client_final(self, shared, state, client):
            result = super().client_final(shared, state, client)
            return result._replace(memory=jax.tree.map(lambda x: x.astype(jnp.float16), result.memory))

    algorithm = Short(batches=BATCHES, execution=way)
    with pytest.raises((ValueError, execution.StageError), match=r"client_final keeps \[\(\), \(1,\)\], and client_memory"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    algorithm = Half(batches=BATCHES, execution=way)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    rows, seen = federation.plain(state).clients
    assert rows[0].visits.dtype == np.int32 and rows[0].total.dtype == np.float32 and rows[0].visits[seen].tolist() == [1] * 7


def test_another_algorithm_s_state_is_refused():
    """Of the same population, even of the same rows: SCAFFOLD and Ditto both keep something like parameters."""
    make = dict(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    scaffold, ditto = (cls(**make) for cls in (fedsim.algorithms.SCAFFOLD, fedsim.algorithms.Ditto))
    state = scaffold.remember(scaffold.init(jax.random.key(0)), federation.data())
    other = r"not one of this Ditto.* it has float32\[4\] for .server.more\['linear'\]\['b'\], .* nothing"
    with pytest.raises(ValueError, match=other):
        ditto.apply(state, federation.cohort())
    apfl = fedsim.algorithms.APFL(**make)
    state = ditto.remember(ditto.init(jax.random.key(0)), federation.data())
    with pytest.raises(ValueError, match=r"not one of this APFL.* for .clients\[0\]"):
        apfl.apply(state, federation.cohort())
    # Nor one of another model, nor one with what another aggregator keeps; as it was made by, and on the device, it goes on.
    compressed = fedsim.algorithms.Ditto(**make, aggregator=aggregators.CentredClipping(1.0))
    with pytest.raises(ValueError, match=r"nothing for \.aggregator"):
        compressed.apply(state, federation.cohort())
    on_device = dataclasses.replace(ditto, execution=fedsim.Jit(memory="resident"))
    state, _ = on_device.apply(state, federation.cohort())
    assert isinstance(state.clients, execution.ClientTable)
    with pytest.raises(ValueError, match="not one of this APFL"):
        apfl.apply(state, federation.cohort())
    dataclasses.replace(ditto).apply(state, federation.cohort())


@pytest.mark.parametrize("way", [fedsim.Jit(), fedsim.Debug()])
@pytest.mark.parametrize(
    ("aggregator", "names", "refused"),
    [
        (aggregators.Mean(), ("weight",), "weight"),
        (aggregators.Mean(), ("attacker", "num_examples", "loss"), "attacker, num_examples"),
        (aggregators.Mean(), ("bits_down",), "bits_down"),
        (aggregators.Mean(), ("bits_up",), "bits_up"),
        (aggregators.Mean(), ("bits_up", "entropy_bits_up"), None),
        (Damped(), ("bits_up", "entropy_bits_up"), "bits_up, entropy_bits_up"),
    ],
)
def test_names_of_the_round_s_own_info_are_refused(aggregator, names, refused, way):
    class Named(Wide):
        def client_final(self, shared, state, client):
            numbers = {name: jnp.float32(5) for name in names}
            return fedsim.ClientUpdate(jnp.float32(1), jnp.float32(1), numbers)

    algorithm = Named(batches=BATCHES, aggregator=aggregator, execution=way)
    if refused is None:
        _, info = algorithm.apply(jnp.zeros(()), federation.cohort())
        assert info.clients["bits_up"].tolist() == [5] * 8
    else:
        with pytest.raises((ValueError, execution.StageError), match=f"client_final's info has {refused}, and so has"):
            algorithm.apply(jnp.zeros(()), federation.cohort())


def in_float32_from(monkeypatch, bits):
    """As a big model's bits are counted, where there is none."""
    monkeypatch.setattr("fedsim.tree.bits_dtype", lambda most: jnp.uint32 if most < bits else jnp.float32)


@pytest.mark.parametrize("how", ["jit", "debug"])
def test_bits_of_all_phases_together_are_counted_in_float32(how, monkeypatch):
    in_float32_from(monkeypatch, 64)  # Each of two phases sends 32.
    algorithm = Variance(batches=fedsim.Batches(size=4), execution=EXECUTIONS[how])
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    assert info.clients["bits_up"].dtype == info.clients["bits_down"].dtype == jnp.float32
    assert info.clients["bits_up"].tolist() == [64 if n else 0 for n in federation.data().sizes]


def test_bits_of_a_big_model_are_those_of_a_small_one_in_float32(monkeypatch):
    pruning = aggregators.Compressed(fedsim.compressors.MagnitudePruning())
    make = dict(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    make |= dict(aggregator=pruning, downlink=fedsim.compressors.Cast(), execution=fedsim.Jit())
    sent = []
    for dtype in (jnp.uint32, jnp.float32):
        algorithm = fedsim.algorithms.FedAvg(**make)
        clients = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[1].clients
        assert clients["bits_up"].dtype == clients["bits_down"].dtype == dtype
        sent.append((clients["bits_up"].tolist(), clients["bits_down"].tolist()))
        in_float32_from(monkeypatch, 100)
    assert sent[0] == sent[1]


@pytest.mark.parametrize(("length", "dtype"), [(2**27 - 2, jnp.uint32), (2**27 - 1, jnp.float32), (2**28, jnp.float32)])
def test_bits_of_a_member_of_a_group(length, dtype):
    # Nothing of that size is made: the compiler leaves out what is not asked for.
    member = lambda: aggregators.Member(jnp.int32(1), jnp.zeros(length))  # noqa: E731
    bits = jax.jit(lambda: aggregators.Grouped(groups=2).send(member(), (), (), jax.random.key(0)).bits)()
    assert bits.dtype == dtype and float(bits) == np.float32(32 * length + 32)
