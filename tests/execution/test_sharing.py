"""Which algorithms and cohorts share compiled programs."""

import copy
import dataclasses
import types

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import algorithms

MODEL, BATCHES = federation.model(), fedsim.Batches(size=4)


def make(cls=algorithms.FedAvg, **options):
    settings = {"model": MODEL, "client_optimizer": optax.sgd(0.1), "batches": BATCHES, "execution": fedsim.Jit()}
    return cls(**(settings | options))


def num_programs(algorithm):
    return sum(compiled.rounds._cache_size() for compiled in federation.round_programs(algorithm))


@pytest.mark.first(1)
@pytest.mark.parametrize("execution", [fedsim.Jit(), fedsim.Pmap(devices=2), fedsim.Jit(memory="stream")])
def test_cohorts_of_1_to_30_clients_share_six_programs(execution):
    population = federation.data(sizes=[1 + i % 7 for i in range(40)])
    algorithm = make(model=federation.model(), execution=execution)
    state = algorithm.init(jax.random.key(0))
    for clients in range(1, 31):
        cohort = fedsim.UniformSampler(population, clients=clients, seed=0).cohort(clients)
        state, info = algorithm.apply(state, cohort)
        assert info.clients["num_examples"].tolist() == cohort.sizes.tolist()
    assert num_programs(algorithm) == 6


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (algorithms.FedProx, [{"mu": 0.0}, {"mu": 1}, {"mu": 0.3}]),
        (algorithms.FedDyn, [{"alpha": 0.1}, {"alpha": 0.01}]),
        (algorithms.FedAdam, [{"server_learning_rate": 0.1}, {"server_learning_rate": 0.01, "tau": 0.1}]),
        (algorithms.QFedAvg, [{"q": 0.5}, {"q": 2.0}]),
        (algorithms.Ditto, [{"lam": 0.1}, {"lam": 1.0}]),
    ],
)
def test_algorithms_that_differ_in_numbers_share_a_program(cls, settings):
    """Each runs with its own numbers: the result is that of a program which is not shared."""
    cohort, states, programs = federation.cohort(), [], []
    for own in settings:
        algorithm = make(cls, **own)
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), cohort)[0])
        programs += federation.round_programs(algorithm)
    assert len(set(map(id, programs))) == 1 and programs[0].rounds._cache_size() == 1
    for own, state in zip(settings, states, strict=True):
        alone = make(cls, model=federation.model(), **own)  # another model object, so that it does not share a program
        federation.assert_trees_close(
            federation.plain(state), federation.plain(alone.apply(alone.init(jax.random.key(0)), cohort)[0])
        )
        assert federation.round_programs(alone)[0] is not programs[0]


def test_optimizers_with_equal_settings_are_equal():
    """This does not apply to schedules that are a user's function, which may depend on anything."""
    cohort = federation.cohort()

    def programs(optimizer):
        algorithm = make(client_optimizer=optimizer)
        algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
        return federation.round_programs(algorithm)[0]

    assert programs(optax.sgd(0.1, momentum=0.9)) is programs(optax.sgd(0.1, momentum=0.9))
    clipped = (optax.chain(optax.clip(1.0), optax.rmsprop(0.1)) for _ in range(2))
    assert programs(next(clipped)) is programs(next(clipped))
    assert programs(optax.sgd(0.1)) is not programs(optax.sgd(0.2))
    assert programs(optax.sgd(0.1)) is not programs(optax.sgd(0.1, momentum=0.9))
    assert programs(lambda round: optax.sgd(0.1)) is not programs(lambda round: optax.sgd(0.1))


def test_seeds_share_a_program():
    algorithm, states = make(model=federation.model()), []
    for seed in range(3):
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(seed=seed))[0])
    assert num_programs(algorithm) == 1
    assert not np.array_equal(states[0].params["linear"]["w"], states[1].params["linear"]["w"])


@pytest.mark.slow
def test_other_models_aggregators_and_integers_have_their_own_programs():
    cohort = federation.cohort()
    shared = make()
    shared.apply(shared.init(jax.random.key(0)), cohort)
    changes = [
        {"model": federation.model()},
        {"client_optimizer": optax.sgd(0.2)},
        {"batches": fedsim.Batches(size=3)},
        {"aggregator": fedsim.aggregators.Clipped(1.0)},
        {"weighting": "uniform"},
    ]
    for change in changes:
        other = make(**change)
        other.apply(other.init(jax.random.key(0)), cohort)
        assert other._execution["programs"][0] is not shared._execution["programs"][0]
    again = make(nonfinite="raise", execution=fedsim.Jit(lanes=1))
    again.apply(again.init(jax.random.key(0)), cohort)
    assert again._execution["programs"][0] is shared._execution["programs"][0]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Switched(algorithms.FedAvg):
    """An algorithm whose code needs the value of a number, which therefore is a constant of its programs."""

    scale: float = 0.0
    shift: float = 0.0

    def client_loss(self, shared, params, batch):
        loss = super().client_loss(shared, params, batch)
        return loss * self.scale if self.scale else loss + self.shift


def test_code_that_needs_the_value_of_a_number_has_it_as_a_constant():
    cohort, start, params = federation.cohort(), None, []
    for scale in (0.0, 1.0, 2.0):
        algorithm = make(Switched, scale=scale, shift=1.0)
        start = start or algorithm.init(jax.random.key(0))
        state, info = algorithm.apply(start, cohort)
        params.append((np.asarray(state.params["linear"]["w"]), np.asarray(info.clients["loss"])))
    np.testing.assert_allclose(params[0][1], params[1][1] + (federation.data().sizes > 0), rtol=1e-5)
    np.testing.assert_array_equal(params[0][0], params[1][0])
    assert not np.allclose(params[1][0], params[2][0])


def test_an_error_of_the_algorithm_itself_is_raised():
    class Broken(algorithms.FedAvg):
        def client_loss(self, shared, params, batch):
            loss = super().client_loss(shared, params, batch)
            return loss if loss > 0 else -loss

    algorithm = make(Broken)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


def test_one_algorithm_runs_on_data_of_several_shapes():
    """The program depends on the data's features, which the algorithm does not check."""

    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Sums(fedsim.Algorithm):
        def init(self, key):
            return ()

        def client_update(self, shared, client):
            def add(total, batch):
                mask = batch.mask.reshape(-1, *[1] * (batch.examples["x"].ndim - 1))
                return total + jnp.sum(batch.examples["x"], axis=0, where=mask)

            (column,) = client.reader.columns.values()
            total = client.for_each_batch(self.batches, add, jnp.zeros(column.shape[1:], column.dtype))
            return fedsim.ClientUpdate(total, jnp.float32(1), {"total": total})

        def server_update(self, state, update, info):
            return state

    algorithm = Sums(batches=fedsim.Batches(size=2), execution=fedsim.Jit())
    for shape in ((3,), (3, 2), (3, 2, 2)):
        data = fedsim.FederatedData.from_arrays({"x": np.ones(shape, np.float32)}, sizes=[2, 1])
        _, info = algorithm.apply((), federation.cohort(data))
        np.testing.assert_array_equal(info.clients["total"], np.stack([2 * np.ones(shape[1:]), np.ones(shape[1:])]))


def test_evaluation_does_not_end_the_sharing_of_programs():
    model, cohort, programs = federation.model(), federation.cohort(), []
    for rate in (1.0, 0.5):
        algorithm = make(algorithms.FedAdam, model=model, server_learning_rate=rate)
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
        fedsim.evaluate(model, state.params, cohort.data)
        programs += federation.round_programs(algorithm)
    assert programs[0] is programs[1]


SCALE = 1.0


def scaled(update):
    return jax.tree.map(lambda x: SCALE * x, update)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class UsesGlobals(algorithms.FedAvg):
    held: object = None

    @property
    def scaled(self):
        return scaled

    def server_update(self, state, update, info):
        factor = self.held.factor if isinstance(self.held, types.SimpleNamespace) else 1.0
        return super().server_update(state, jax.tree.map(lambda x: factor * x, self.scaled(update)), info)


def distance_of(algorithm):
    start = algorithm.init(jax.random.key(0))
    end, _ = algorithm.apply(start, federation.cohort())
    return float(jnp.sqrt(fedsim.tree.squared_norm(fedsim.tree.subtract(end.params, start.params))))


def test_a_new_algorithm_reads_the_globals_and_objects_that_its_methods_use(monkeypatch):
    once = distance_of(make(UsesGlobals))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert distance_of(make(UsesGlobals)) == pytest.approx(2 * once)
    settings = types.SimpleNamespace(factor=1.0)
    assert distance_of(make(UsesGlobals, held=settings)) == pytest.approx(2 * once)
    settings.factor = 3.0
    assert distance_of(make(UsesGlobals, held=settings)) == pytest.approx(6 * once)


def test_a_global_with_the_name_of_a_field_does_not_affect_sharing(monkeypatch):
    programs = []
    for mu in (0.1, 0.2):
        monkeypatch.setitem(globals(), "mu", mu)
        algorithm = make(OwnProx, mu=mu)
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
        programs += federation.round_programs(algorithm)
    assert programs[0] is programs[1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OwnProx(algorithms.FedAvg):
    mu: float = 0.1

    def client_loss(self, shared, params, batch):
        away = fedsim.tree.squared_norm(fedsim.tree.subtract(params, shared.params))
        return super().client_loss(shared, params, batch) + self.mu / 2 * away


@dataclasses.dataclass(frozen=True)
class Nested:
    nonfinite: float


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Nested(1.0), Nested(2.0)),
        (jnp.ones(3), jnp.ones(5)),
        (jnp.int32(3), 3.0),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    ],
)
def test_contents_of_fields_are_compared_with_their_types(first, second):
    """The two values give infos that differ in structure, dtype or value."""

    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Reporting(algorithms.FedAvg):
        held: object = None

        def client_update(self, shared, client):
            held = getattr(self.held, "nonfinite", getattr(self.held, "a", self.held))
            result = super().client_update(shared, client)
            return result._replace(info={"held": jnp.asarray(held)})

    for held in (first, second):
        algorithm = make(Reporting, held=held)
        _, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
        expected = jnp.asarray(getattr(held, "nonfinite", getattr(held, "a", held)))
        reported = info.clients["held"][0]
        assert (reported.shape, reported.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(reported, expected)


def test_a_number_that_is_looked_up_by_value_is_a_constant():
    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class LookedUp(algorithms.FedAvg):
        level: float = 0.5

        def server_update(self, state, update, info):
            factor = {0.5: 1.0, 0.25: 2.0}[self.level]
            return super().server_update(state, jax.tree.map(lambda x: factor * x, update), info)

    assert distance_of(make(LookedUp, level=0.25)) == pytest.approx(2 * distance_of(make(LookedUp)))


def test_copies_do_not_carry_programs():
    algorithm = make()
    algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    assert "_execution" not in vars(copy.copy(algorithm))
