"""Rounds with several loops, several calls and maps, and client work that is a closure."""

import dataclasses
import functools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import BATCHES, EXECUTIONS

import fedsim
from fedsim import aggregators, rng


def sum_of(client, batches, purpose=None, f=lambda x: x):
    def add(total, batch):
        return total + jnp.sum(f(batch.examples["x"][:, 0]), where=batch.mask)

    return client.for_each_batch(batches, add, jnp.float32(0), purpose)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Centred(fedsim.Algorithm):
    """Computes the mean and two central moments by a map and by calls whose work is a closure over earlier results."""

    def init(self, key):
        return {"mean": jnp.float32(0), "variance": jnp.float32(0), "skew": jnp.float32(0)}

    def round(self, state, clients):
        each = clients.map(lambda shared, client: (sum_of(client, self.batches), client.num_examples), state)
        sums, counts = each
        mean = jnp.sum(sums) / jnp.sum(counts).astype(jnp.float32)

        def moment(power, shared, client):
            return self.moment(client, lambda x: (x - mean) ** power)

        variance, _ = clients.aggregate(functools.partial(moment, 2), state, name="variance")
        skew, info = clients.aggregate(lambda shared, client: moment(3, shared, client), state)
        return {"mean": mean, "variance": variance, "skew": skew}, info

    def moment(self, client, f):
        size = jnp.maximum(client.num_examples, 1).astype(jnp.float32)
        return fedsim.ClientUpdate(sum_of(client, self.batches, f=f) / size, size)


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("how", EXECUTIONS)
def test_calls_whose_work_is_a_closure(how, long, monkeypatch):
    if long:
        monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)
    population = federation.data()
    algorithm = Centred(batches=fedsim.Batches(size=4), execution=EXECUTIONS[how])
    x = population.columns["x"][:, 0].astype(np.float64)
    state = algorithm.init(jax.random.key(0))
    for round in range(2):
        state, info = algorithm.apply(state, federation.cohort(population, round=round))
        expected = [x.mean(), x.var(), ((x - x.mean()) ** 3).mean()]
        np.testing.assert_allclose([state["mean"], state["variance"], state["skew"]], expected, rtol=1e-4)
        # A map sends no update, and its messages to clients are not counted.
        assert info.clients["bits_up"].tolist() == [64 if n else 0 for n in population.sizes]
        assert info.clients["bits_down"].tolist() == [2 * 96 if n else 0 for n in population.sizes]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Loops(fedsim.Algorithm):
    """Reports the order in which a client's training and its other loops read its examples."""

    def init(self, key):
        return jnp.float32(0)

    def client_update(self, shared, client):
        def order(batches, purpose=None):
            def add(state, batch):
                total, place = state
                places = place + 1 + jnp.arange(batches.size, dtype=jnp.float32)
                return total + jnp.sum(places * batch.examples["x"][:, 0], where=batch.mask), place + batches.size

            return client.for_each_batch(batches, add, (jnp.float32(0), jnp.float32(0)), purpose)[0]

        several = fedsim.Batches(size=3, epochs=2)
        info = {
            "training": order(self.batches),
            "again": order(self.batches),
            "other batches": order(several),
            "look": order(several, "look"),
            "stored": order(self.batches.one_pass(), "stored"),
        }
        return fedsim.ClientUpdate(jnp.float32(1), jnp.float32(1), info)

    def server_update(self, state, update, info):
        return state


def by_hand(dataset, batches, key, most=None):
    total, place = 0.0, 0
    for step, batch in enumerate(dataset.batches(batches, key)):
        if most is not None and step >= most:
            break
        places = place + 1 + np.arange(batches.size)
        total += float(np.sum((places * batch.examples["x"][:, 0])[batch.mask]))
        place += batches.size
    return total


@pytest.mark.first(1)
@pytest.mark.parametrize("how", EXECUTIONS)
def test_a_loop_without_a_purpose_is_training_and_others_have_their_own_shuffle(how):
    """Compares with `ClientDataset.batches`. Stragglers stop early in training only."""
    population = federation.data()
    work = np.array([1, 1, 0.5, 0.25, 1, 0.6, 1, 0], np.float32)
    cohort = fedsim.Cohort(population, np.arange(8), 5, rng.root(3), work=work)
    algorithm = Loops(batches=BATCHES, execution=EXECUTIONS[how])
    _, info = algorithm.apply(jnp.float32(0), cohort)
    several = fedsim.Batches(size=3, epochs=2)
    for at, (_, dataset, key) in enumerate(cohort):
        if not len(dataset):
            continue
        found = {name: float(info.clients[name][at]) for name in ("training", "again", "other batches", "look", "stored")}
        most = int(cohort.num_steps(BATCHES)[at])
        expected = {
            "training": by_hand(dataset, BATCHES, key, most),
            "again": by_hand(dataset, BATCHES, key, most),
            "other batches": by_hand(dataset, several, key, most),
            "look": by_hand(dataset, several, rng.stream(key, "look")),
            "stored": by_hand(dataset, BATCHES.one_pass(), key),
        }
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-4), (name, at)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TwoAggregators(fedsim.Algorithm):
    """Computes the largest and the mean number of examples by two aggregators; the second call has another downlink."""

    def init(self, key):
        return {"params": jnp.linspace(0.1, 1.3, 40), "largest": jnp.float32(0), "mean": jnp.float32(0), "seen": jnp.float32(0)}

    def round(self, state, clients):
        largest, _ = clients.aggregate(self.size, state["params"], name="largest", aggregator=Largest())
        downlink = fedsim.compressors.ErrorFeedback(fedsim.compressors.Cast())
        mean, info = clients.aggregate(self.received, state["params"], downlink=downlink)
        return {"params": state["params"], "largest": largest, "mean": mean["size"], "seen": mean["seen"]}, info

    def size(self, shared, client):
        return fedsim.ClientUpdate(client.num_examples.astype(jnp.float32), jnp.float32(1))

    def received(self, shared, client):
        update = {"size": client.num_examples.astype(jnp.float32), "seen": jnp.sum(shared)}
        return fedsim.ClientUpdate(update, jnp.float32(1))


class Largest(aggregators.StackAggregator):
    def init(self, update):
        return jnp.float32(0)

    def combine(self, updates, weights):
        return jnp.max(jnp.where(weights != 0, updates, 0))

    def finish_round(self, accumulator, memory, key):
        return self.finish(accumulator), memory + 1


@pytest.mark.first(1)
@pytest.mark.parametrize("how", EXECUTIONS)
def test_each_call_has_its_own_aggregator_and_downlink(how):
    population = federation.data()
    algorithm = TwoAggregators(batches=BATCHES, execution=EXECUTIONS[how])
    state = algorithm.init(jax.random.key(0))
    for round in range(3):
        state, info = algorithm.apply(state, federation.cohort(population, round=round))
    sizes = population.sizes[population.sizes > 0]
    assert float(state.server["largest"]) == 12
    assert float(state.server["mean"]) == pytest.approx(sizes.mean())
    assert {name: float(rounds) for name, rounds in state.aggregator.items()} == {"largest": 3}
    assert list(state.downlink) == ["update"]
    # With error feedback, the mean over rounds of what clients receive is closer to what was sent than a single rounding.
    params = np.linspace(0.1, 1.3, 40, dtype=np.float32)
    halves = params.astype(jnp.bfloat16).astype(np.float32)
    error = np.asarray(jax.tree.leaves(state.downlink["update"])[0])
    assert 0 < np.abs(error).max() <= 2 * np.abs(params - halves).max()
    assert info.clients["bits_down"].tolist() == [40 * 32 + 40 * 16 if n else 0 for n in population.sizes]


def test_two_calls_with_the_same_name_are_rejected():
    class Twice(fedsim.Algorithm):
        def round(self, state, clients):
            for _ in range(2):
                update, info = clients.aggregate(self.client_update, state, name="update")
            return update, info

        def client_update(self, shared, client):
            return fedsim.ClientUpdate(shared, jnp.float32(1))

    with pytest.raises(ValueError, match="has two calls with name='update'"):
        Twice(batches=BATCHES).apply(jnp.float32(0), federation.cohort())


@pytest.mark.first(2)
@pytest.mark.parametrize("how", [how for how in EXECUTIONS if how != "jit, on the device"])
def test_map_clients(how):
    population = federation.data()

    def extremes(shared, client):
        def step(state, batch):
            x = batch.examples["x"][:, 0]
            low = jnp.min(jnp.where(batch.mask, x, jnp.inf))
            return {"low": jnp.minimum(state["low"], low), "steps": state["steps"] + 1}

        return client.for_each_batch(BATCHES, step, {"low": shared, "steps": jnp.int32(0)})

    cohort = federation.cohort(population)
    found = fedsim.map_clients(extremes, jnp.float32(10), cohort, batches=BATCHES, execution=EXECUTIONS[how])
    assert found["steps"].tolist() == BATCHES.num_steps(population.sizes).tolist()
    expected = [dataset["x"][:, 0].min() if len(dataset) else 10.0 for _, dataset, _ in cohort]
    np.testing.assert_allclose(found["low"], expected, rtol=1e-6)


class Steps(fedsim.Algorithm):
    """Keeps two numbers for every client: its steps so far, and the sum of its examples."""

    def init(self, key):
        return {"steps": jnp.zeros(8, jnp.int32), "sums": jnp.zeros((8, 3))}

    def round(self, state, clients):
        return clients.map_rows(self.count, jnp.float32(2), state), {"clients": clients.num_clients}

    def count(self, scale, row, client):
        def step(row, batch):
            total = scale * jnp.sum(batch.examples["x"], axis=0, where=batch.mask[:, None])
            return {"steps": row["steps"] + 1, "sums": row["sums"] + total}

        return client.for_each_batch(self.batches, step, row)


@pytest.mark.first(2)
@pytest.mark.parametrize("execution", [
    fedsim.Jit(), fedsim.Jit(lanes=2), fedsim.Pmap(devices=2), fedsim.Pmap(devices=8, memory="stream"), fedsim.Pmap(devices=3),
    fedsim.Debug(),
])  # fmt: skip
def test_rows_of_the_population_are_read_and_written_by_their_clients(execution):
    population, batches = federation.data(), fedsim.Batches(size=4)
    algorithm, chosen = Steps(batches=batches, execution=execution), np.array([5, 0, 1, 3])
    start = {"steps": jnp.arange(8, dtype=jnp.int32), "sums": jnp.ones((8, 3))}
    state, info = algorithm.apply(start, fedsim.Cohort(population, chosen, 0, fedsim.rng.root(0), slots=6))
    steps, sums = np.zeros(8, int), np.zeros((8, 3))
    for client in chosen:
        steps[client] = client + batches.num_steps(population.sizes)[client]
        sums[client] = 1 + 2 * population.client(client)["x"].sum(axis=0)
    assert state["steps"].tolist() == steps.tolist() and int(info["clients"]) == 4
    np.testing.assert_allclose(state["sums"], sums, rtol=1e-5)


def test_rows_that_do_not_fit_the_population_are_rejected():
    algorithm, state = Steps(batches=BATCHES), {"steps": jnp.zeros(7, jnp.int32), "sums": jnp.ones((8, 3))}
    with pytest.raises(ValueError, match=r"leaves \[clients, ...\], an entry for each .*, got \[\[7\], \[8, 3\]\]"):
        algorithm.apply(state, federation.cohort())
    state["sums"] = state["sums"][:7]
    with pytest.raises(ValueError, match=r"leaves \[8, ...\], an entry for each client of the population, got 7 entries"):
        algorithm.apply(state, federation.cohort())
    fits, larger = (
        fedsim.Cohort(data, np.array([0, 2]), 0, fedsim.rng.root(0))
        for data in (federation.data(), federation.data(sizes=(7, 0, 3, 12, 1, 5, 9, 2, 4)))
    )
    algorithm = Steps(batches=BATCHES, execution=fedsim.Jit())
    algorithm.apply(algorithm.init(None), fits)
    with pytest.raises(ValueError, match=r"leaves \[9, ...\], an entry for each client of the population, got 8 entries"):
        algorithm.apply(algorithm.init(None), larger)


def test_work_that_returns_no_update_is_rejected():
    class Bare(fedsim.Algorithm):
        def client_update(self, shared, client):
            return shared

    with pytest.raises(ValueError, match="Expected client_update to return a ClientUpdate, got"):
        Bare(batches=BATCHES).apply(jnp.float32(0), federation.cohort())


@pytest.mark.parametrize("execution", [fedsim.Jit(), fedsim.Debug()])
def test_a_round_with_only_maps_returns_its_own_info(execution):
    """Three clients have five slots; a scalar and a longer array are returned whole."""

    class Extremes(fedsim.Algorithm):
        def init(self, key):
            return jnp.zeros(())

        def round(self, state, clients):
            sizes = clients.map(lambda shared, client: client.num_examples, ())
            return state, {"largest": jnp.max(sizes), "counts": jnp.bincount(sizes, length=13)}

    algorithm, population = Extremes(batches=fedsim.Batches(size=4)), federation.data()
    cohort = fedsim.Cohort.of(population, ["client0", "client2", "client3"])
    _, info = execution.run_one(algorithm, algorithm.init(jax.random.key(0)), cohort)
    assert int(info["largest"]) == 12 and np.flatnonzero(info["counts"])[-3:].tolist() == [3, 7, 12]


@pytest.mark.parametrize("execution", [fedsim.Jit(), fedsim.Debug()])
def test_a_loop_may_start_with_a_number_and_be_inside_a_cond(execution):
    def work(shared, client):
        def add(total, batch):
            return total + jnp.sum(batch.mask, dtype=jnp.float32)

        return jax.lax.cond(client.num_examples > 3, lambda: client.for_each_batch(BATCHES, add, 0.0), lambda: jnp.float32(-1))

    population = federation.data()
    found = fedsim.map_clients(work, (), federation.cohort(population), execution=execution)
    assert found.tolist() == [2 * n if n > 3 else -1 for n in population.sizes]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TwoForms(fedsim.Algorithm):
    """Its memory starts in half precision in the first call of a round, and in single precision in the second one."""

    def init(self, key):
        return jnp.zeros(3, jnp.float16)

    def client_memory(self, shared):
        return jnp.zeros_like(shared)

    def work(self, shared, client):
        return fedsim.ClientUpdate(
            jnp.ones(3, jnp.float16), jnp.float32(1), memory=client.memory + jnp.ones_like(client.memory)
        )

    def round(self, state, clients):
        first, _ = clients.aggregate(self.work, state)
        second, info = clients.aggregate(self.work, state.astype(jnp.float32) + first)
        return state + second.astype(jnp.float16), info


def test_a_memory_has_the_dtype_of_the_first_call():
    cohort, results = federation.cohort(), []
    for execution in (fedsim.Jit(memory="resident"), fedsim.Debug()):
        algorithm = TwoForms(batches=fedsim.Batches(size=4), execution=execution)
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
        memory = federation.plain(state).clients[0][0]
        results.append((np.asarray(state.server), np.asarray(memory)))
    for each, expected in zip(*results, strict=True):
        assert each.dtype == np.float16
        np.testing.assert_array_equal(each, expected)


@pytest.mark.slow
def test_rounds_run_without_compilation_if_jax_says_so():
    algorithm = TwoForms(batches=fedsim.Batches(size=4), execution=fedsim.Jit(memory="resident"))
    start, cohort = algorithm.init(jax.random.key(0)), federation.cohort()
    expected, _ = algorithm.apply(start, cohort)
    with jax.disable_jit():
        state, _ = algorithm.apply(start, cohort)
    np.testing.assert_array_equal(state.server, expected.server)


def one_round(round, **options):
    """Returns the state and the info of one round of an algorithm with this ``round``, which starts from zero."""

    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class OneRound(fedsim.Algorithm):
        capabilities = fedsim.Capabilities(scalable=True)

        def init(self, key):
            return jnp.zeros((8,))

        def round(self, state, clients):
            return round(state, clients)

    algorithm = OneRound(batches=fedsim.Batches(size=4), execution=fedsim.Jit(), **options)
    return algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


def test_calls_of_a_round_have_random_draws_of_their_own():
    def draw(shared, client):
        return jax.random.normal(client.key)

    def round(state, clients):
        first, second, again = (clients.map(draw, (), name=name) for name in ("a", "b", "update"))
        return state, (first, second, again)

    _, (first, second, of_root) = one_round(round)
    drawn = np.concatenate([draws[:8] for draws in (first, second, of_root)])
    assert len(set(drawn.tolist())) == 24
    # The call "update" has the keys that the cohort gives its clients.
    np.testing.assert_allclose(of_root[:8], jax.vmap(jax.random.normal)(federation.cohort().keys()), rtol=1e-6)


def test_a_map_does_not_run_with_staleness():
    with pytest.raises(ValueError, match="cannot run with staleness, .*: its round has other calls"):
        one_round(
            lambda state, clients: (state, clients.map(lambda shared, client: client.num_examples, ())),
            staleness=fedsim.Staleness(bound=1),
        )


@pytest.mark.filterwarnings("ignore:1 client update")
def test_messages_that_are_not_finite_are_dropped_and_clients_without_steps_send_nothing():
    class Overflowing(aggregators.Mean):
        def send(self, update, state, memory, key):
            return aggregators.Sent(jnp.where(update == 12, jnp.inf, update), memory, jnp.uint32(7), jnp.float32(5))

    def work(shared, client):
        return fedsim.ClientUpdate(jnp.asarray(client.num_examples, jnp.float32) * jnp.ones(8), weight=1.0)

    state, info = one_round(lambda state, clients: clients.aggregate(work, ()), aggregator=Overflowing())
    assert info.num_dropped == 1
    np.testing.assert_allclose(state, np.full(8, (7 + 3 + 1 + 5 + 9 + 2) / 6), rtol=1e-6)
    took_part = np.array(federation.data().sizes) > 0
    np.testing.assert_array_equal(info.clients["bits_up"][:8], 7 * took_part)
    np.testing.assert_array_equal(info.clients["entropy_bits_up"][:8], 5 * took_part)


@pytest.mark.filterwarnings("ignore:1 client update")
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_client_with_a_weight_that_is_not_finite_does_not_count(wrong):
    def work(shared, client):
        size = jnp.asarray(client.num_examples, jnp.float32)
        return fedsim.ClientUpdate(size * jnp.ones(8), weight=jnp.where(size == 12, wrong, 1.0))

    state, info = one_round(lambda state, clients: clients.aggregate(work, ()))
    assert info.num_dropped == 1 and info.clients["weight"].sum() == 6
    np.testing.assert_allclose(state, np.full(8, (7 + 3 + 1 + 5 + 9 + 2) / 6), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:1 client update")
@pytest.mark.parametrize("wrong", [complex(0, np.nan), complex(0, np.inf), complex(np.nan, 0)])
def test_both_parts_of_complex_updates_must_be_finite(wrong):
    def work(shared, client):
        size = jnp.asarray(client.num_examples, jnp.complex64)
        return fedsim.ClientUpdate(jnp.where(size == 12, wrong, size * (3 + 4j)) * jnp.ones(8, jnp.complex64), weight=1.0)

    with jax.numpy_dtype_promotion("standard"):  # A weight times a complex number needs it.
        state, info = one_round(lambda state, clients: clients.aggregate(work, ()), update_norms=True)
    assert info.num_dropped == 1
    np.testing.assert_allclose(state, np.full(8, (3 + 4j) * (7 + 3 + 1 + 5 + 9 + 2) / 6), rtol=1e-6)
    sizes = np.where(federation.data().sizes == 12, 0, federation.data().sizes)
    np.testing.assert_allclose(info.clients["update_norm"][:8], 5 * sizes * np.sqrt(8), rtol=1e-6)


def test_map_clients_takes_cohorts_whose_clients_start_in_their_round_alone():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(6, np.float32)}, sizes=[1, 2, 3])
    cohort = fedsim.samplers.ClusteredSampling(data, clients=2, seed=0).cohort(0)
    assert cohort.arrivals is not None
    sizes = fedsim.map_clients(lambda shared, client: client.num_examples, (), cohort)
    assert sizes.tolist() == data.sizes[cohort.clients].tolist()
    late = fedsim.data.Arrivals.of([0, 1], round=3)
    with pytest.raises(ValueError, match="start in round 3 for map_clients"):
        fedsim.map_clients(
            lambda shared, client: client.num_examples, (), fedsim.Cohort(data, [0, 1], 3, cohort.key, arrivals=late)
        )


def test_map_clients_refuses_a_state_that_has_more_than_what_clients_get():
    cohort = fedsim.Cohort.of(fedsim.FederatedData.from_arrays({"x": np.zeros(1, np.float32)}, sizes=[1]), ["0"])
    server = fedsim.algorithms.ServerState({"w": jnp.float32(3)}, (), jnp.int32(0))
    for state in (fedsim.rounds.FederatedState(server, past=server), fedsim.rounds.FederatedState(server)):
        with pytest.raises(ValueError, match="got a FederatedState, .*: give state.params"):
            fedsim.map_clients(lambda shared, client: shared.params["w"], state, cohort)
    assert fedsim.map_clients(lambda shared, client: shared.params["w"], server, cohort).tolist() == [3.0]


def test_map_clients_traces_once_per_function_object():
    @dataclasses.dataclass
    class Scaled:
        scale: float

        def work(self, shared, client):
            traced.append(self.scale)
            return self.scale * client.num_examples.astype(jnp.float32)

    @dataclasses.dataclass(frozen=True)
    class Shifted:  # whose hash raises an error
        by: np.ndarray

        def __call__(self, shared, client):
            return client.num_examples + jnp.asarray(self.by)

    traced, scaled = [], Scaled(1.0)
    cohort = fedsim.Cohort.of(fedsim.FederatedData.from_arrays({"x": np.zeros(3, np.float32)}, sizes=[1, 2]), ["0", "1"])
    for scaled.scale in (1.0, 10.0):
        assert fedsim.map_clients(scaled.work, (), cohort).tolist() == [scaled.scale, 2 * scaled.scale]
    kept, before = scaled.work, len(traced)
    assert fedsim.map_clients(kept, (), cohort).tolist() == [10, 20]
    assert (first := len(traced)) > before
    assert fedsim.map_clients(kept, (), cohort).tolist() == [10, 20] and len(traced) == first
    assert fedsim.map_clients(Shifted(np.int32(3)), (), cohort).tolist() == [4, 5]
    assert fedsim.map_clients(Shifted(np.array([3, 4], np.int32)), (), cohort).tolist() == [[4, 5], [5, 6]]


def test_a_population_is_used_with_and_without_x64():
    data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.2, 0.3])}, sizes=[3])

    def total(shared, client):
        add = lambda total, batch: total + jnp.sum(batch.examples["x"], where=batch.mask)  # noqa: E731
        return client.for_each_batch(fedsim.Batches(size=3), add, jnp.zeros((), jax.dtypes.canonicalize_dtype(float)))

    cohort = fedsim.Cohort.of(data, ["0"])
    for x64 in (False, True, False):
        with jax.enable_x64(x64):
            found = fedsim.map_clients(total, (), cohort)
            assert found.dtype == (np.float64 if x64 else np.float32)
            np.testing.assert_allclose(found, [0.6], rtol=1e-15 if x64 else 1e-6)


def test_the_total_of_bits_may_exceed_32_bits_and_is_that_of_one_round():
    zero = jnp.int32(0)
    info = fedsim.RoundInfo({"bits_up": jnp.full(200, 32_000_000, jnp.uint32)}, *[zero] * 5)
    assert float(info.total("bits_up")) == 6.4e9
    several = jax.tree.map(lambda x: jnp.stack([x, x]), info)
    with pytest.raises(ValueError, match="info of one round, got that of 2"):
        several.total("bits_up")
