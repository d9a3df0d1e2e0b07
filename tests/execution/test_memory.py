"""What lives from round to round beside the server's state: the same under every execution, and as in plain Python."""

import contextlib
import dataclasses
import functools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import BATCHES, EXECUTIONS, Counting, Damped, Upper, Variance, by_hand, cohorts

import fedsim
from fedsim import execution
from fedsim.execution._cohort_loop import put_rows


@pytest.mark.parametrize(("how", "refuse"), [*((how, 3.0) for how in EXECUTIONS), ("jit", -1.0)])
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


UPPER, DAMPED, BOTH = Upper(), Damped(), Damped(inner=Upper())


@functools.cache
def after_five_rounds(how, aggregator):
    algorithm = Counting(batches=BATCHES, execution=EXECUTIONS[how], aggregator=aggregator)
    state = algorithm.init(jax.random.key(0))
    for cohort in cohorts(federation.data()):
        state, info = algorithm.apply(state, cohort)
    return jax.device_get((state.server, state.aggregator, info))


@pytest.mark.parametrize(
    ("how", "aggregator"),
    [
        *((how, BOTH) for how in EXECUTIONS if how != "jit"),
        *((how, one) for how in ("jit, 3 lanes, streamed", "pmap, 2 devices, 2 lanes") for one in (UPPER, DAMPED)),
    ],
)
def test_aggregators_with_memory_and_side_by_side(how, aggregator):
    *_, info = after = after_five_rounds(how, aggregator)
    federation.assert_trees_close(after, after_five_rounds("jit", aggregator))
    took_part = info.clients["num_steps"] > 0
    bits = 32 if aggregator is UPPER else 3
    assert info.clients["bits_up"].tolist() == (bits * took_part).tolist()
    assert info.clients["bits_down"].tolist() == (32 * took_part).tolist()


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


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("how", [how for how in EXECUTIONS if "streamed" in how])
@pytest.mark.filterwarnings("ignore:.*held a NaN")
def test_rows_that_others_wrote_before_are_nobody_elses(how, long, monkeypatch):
    """A client that is refused takes the place that another had in the last dispatch's table."""
    if long:
        monkeypatch.setattr("fedsim.execution._plan._STEPS_PER_PROGRAM", 3)
    population, kinds = federation.data(), {"batches": BATCHES, "aggregator": Damped(), "execution": EXECUTIONS[how]}
    first = Counting(refuse=3.0, batches=BATCHES, aggregator=Damped())
    alone, second = Counting(refuse=3.0, **kinds), Refusing(first=first, **kinds)
    of_alone, of_second = alone.init(jax.random.key(0)), second.init(jax.random.key(0))
    for round, ids in enumerate([("client0", "client5"), ("client3", "client6")]):
        cohort = fedsim.Cohort.of(population, ids, round=round)
        of_alone, of_second = alone.apply(of_alone, cohort)[0], second.apply(of_second, cohort)[0]
    came = np.isin(np.arange(8), [0, 5, 6])
    assert federation.plain(of_alone).clients[1].tolist() == came.tolist()
    rows, seen = federation.plain(of_second).clients
    assert rows[0][2].tolist() == came.tolist()
    assert seen.tolist() == rows[1][2].tolist() == (came | (np.arange(8) == 3)).tolist()
    for counted, _, wrote in rows:  # and none begins with another's
        assert counted.visits[wrote].tolist() == [1] * wrote.sum()


@pytest.mark.parametrize("how", EXECUTIONS)
@pytest.mark.filterwarnings("ignore:.*held a NaN")
def test_a_phase_that_refuses_a_client_leaves_it_what_that_phase_kept_of_it(how):
    population = federation.data()
    kinds = {"execution": EXECUTIONS[how], "batches": BATCHES, "aggregator": Damped()}
    welcoming, refusing = (
        Refusing(first=Counting(batches=BATCHES, refuse=refuse, aggregator=Damped()), **kinds) for refuse in (-1.0, 3.0)
    )
    state = welcoming.init(jax.random.key(0))
    for round, algorithm in enumerate([welcoming, refusing, refusing]):
        state, info = algorithm.apply(state, federation.cohort(population, round=round))
    (of_first, damped_first, _), (of_second, *_) = federation.plain(state).clients[0]
    some, other = population.sizes > 0, np.arange(8) != 3
    assert some[3] and int(info.num_dropped) == 1
    assert of_first.visits.tolist() == np.where(some, np.where(other, 3, 1), 0).tolist()
    assert damped_first.tolist() == np.where(some, np.where(other, 10, 8), 0).tolist()
    assert of_second.visits.tolist() == np.where(some, 3, 0).tolist()


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


def test_rows_of_several_clients_go_to_their_places_and_those_beyond_the_end_nowhere():
    draw = np.random.default_rng(0)
    old, new = draw.normal(size=(6, 3)).astype(np.float32), draw.normal(size=(5, 3)).astype(np.float32)
    at = np.array([4, 6, 0, 6, 9], np.int32)
    table = execution.ClientTable({"w": jnp.asarray(old)}, jnp.zeros(6, bool))
    expected, seen = old.copy(), np.zeros(6, bool)
    expected[[4, 0]], seen[[4, 0]] = new[[0, 2]], True
    write = jax.jit(put_rows)
    for written in (put_rows(table, jnp.asarray(at), {"w": new}), write(table, at, {"w": new})):
        np.testing.assert_array_equal(written.rows["w"], expected)
        np.testing.assert_array_equal(written.seen, seen)
    # All places are different, and XLA knows: else it may write them one after another, to be sure which is the last.
    assert write.lower(table, at, {"w": new}).as_text().count("unique_indices = true") == 2
