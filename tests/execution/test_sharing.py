"""Which algorithms and cohorts share executables: those whose programs have the same text, and no others."""

import copy
import dataclasses
import functools
import os
import re
import subprocess
import sys
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
    return len(federation.executables(algorithm))


def executable_of(algorithm):
    """Runs a round of a new algorithm and returns the executable that it used."""
    algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    (executable,) = federation.executables(algorithm)
    return executable


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


@pytest.mark.slow
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
    """Each runs with its own numbers: the result is that of `fedsim.Debug`, which compiles nothing."""
    cohort, executables = federation.cohort(), set()
    for own in settings:
        algorithm = make(cls, **own)
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
        executables |= set(map(id, federation.executables(algorithm)))
        plain = make(cls, execution=fedsim.Debug(), **own)
        expected, _ = plain.apply(plain.init(jax.random.key(0)), cohort)
        federation.assert_trees_close(federation.plain(state), federation.plain(expected))
    assert len(executables) == 1


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.sgd(0.1, momentum=0.9),
        lambda: optax.chain(optax.clip(1.0), optax.rmsprop(0.1)),
        lambda: lambda round: optax.sgd(0.1 * 0.5 ** round.astype(jnp.float32)),
    ],
)
def test_algorithms_from_equal_calls_share_a_program(optimizer):
    """Everything is made twice, also the model and a schedule that is a user's function."""
    twice = [executable_of(make(model=federation.model(), client_optimizer=optimizer())) for _ in range(2)]
    assert twice[0] is twice[1]


def test_seeds_share_a_program():
    algorithm, states = make(model=federation.model()), []
    for seed in range(3):
        states.append(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(seed=seed))[0])
    assert num_programs(algorithm) == 1
    assert not np.array_equal(states[0].params["linear"]["w"], states[1].params["linear"]["w"])


@pytest.mark.slow
def test_other_optimizers_batches_and_aggregators_have_their_own_programs():
    shared = executable_of(make())
    for change in (
        {"client_optimizer": optax.sgd(0.2)},
        {"batches": fedsim.Batches(size=3)},
        {"aggregator": fedsim.aggregators.Clipped(1.0)},
        {"weighting": "uniform"},
    ):
        assert executable_of(make(**change)) is not shared
    assert executable_of(make(nonfinite="raise", execution=fedsim.Jit(lanes=1))) is shared


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Switched(algorithms.FedAvg):
    """An algorithm whose code needs the value of a number, which therefore is a constant of its programs."""

    scale: float = 0.0
    shift: float = 0.0

    def client_loss(self, shared, params, batch):
        loss = super().client_loss(shared, params, batch)
        return loss * self.scale if self.scale else loss + self.shift


@pytest.mark.slow
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
    executables = []
    for rate in (1.0, 0.5):
        algorithm = make(algorithms.FedAdam, server_learning_rate=rate)
        executables.append(executable_of(algorithm))
        fedsim.evaluate(MODEL, algorithm.init(jax.random.key(0)).params, federation.data())
    assert executables[0] is executables[1]


SCALE = 1.0
HELD = types.SimpleNamespace(factor=1.0)
MODULE = types.ModuleType("configuration")
MODULE.factor = 1.0


def scaled():
    return SCALE


READ_SCALE = functools.partial(scaled)


class Elsewhere:
    factor = 1.0


def counter():
    count = 1.0

    def read():
        return count

    def double():
        nonlocal count
        count *= 2

    return read, double


READ, DOUBLE = counter()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Sends(fedsim.Algorithm):
    """The mean of the numbers that clients send. Each source is something that Python code can read."""

    source: str
    own = 1.0

    def init(self, key):
        return jnp.zeros(())

    def method(self):
        return 1.0

    def client_update(self, shared, client):
        sources = {
            "method": self.method,
            "class attribute": lambda: self.own,
            "module": lambda: MODULE.factor,
            "other class": lambda: Elsewhere.factor,
            "object in a global": lambda: HELD.factor,
            "global": lambda: SCALE,
            "partial": READ_SCALE,
            "nonlocal": READ,
            "environment": lambda: float(os.environ.get("FEDSIM_TEST_FACTOR", 1.0)),
        }
        return fedsim.ClientUpdate(jnp.float32(sources[self.source]()), jnp.float32(1))

    def server_update(self, state, update, info):
        return update


CHANGES = {
    "method": lambda patch: patch.setattr(Sends, "method", lambda self: 2.0),
    "class attribute": lambda patch: patch.setattr(Sends, "own", 2.0),
    "module": lambda patch: patch.setattr(MODULE, "factor", 2.0),
    "other class": lambda patch: patch.setattr(Elsewhere, "factor", 2.0),
    "object in a global": lambda patch: patch.setattr(HELD, "factor", 2.0),
    "global": lambda patch: patch.setitem(globals(), "SCALE", 2.0),
    "partial": lambda patch: patch.setitem(globals(), "SCALE", 2.0),
    "nonlocal": lambda patch: DOUBLE(),
    "environment": lambda patch: patch.setenv("FEDSIM_TEST_FACTOR", "2"),
}


@pytest.mark.first(3)
@pytest.mark.parametrize("source", CHANGES)
def test_a_new_algorithm_reads_what_has_changed(source, monkeypatch):
    results = []
    for change in (lambda patch: None, CHANGES[source]):
        change(monkeypatch)
        algorithm = Sends(source=source, batches=BATCHES, execution=fedsim.Jit())
        results.append(float(algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[0]))
    assert results == [1.0, 2.0]


NOTEBOOK = """
import pathlib, sys
from IPython.core.interactiveshell import InteractiveShell

folder = pathlib.Path(sys.argv[1])
shell = InteractiveShell.instance()
sys.path.insert(0, str(folder))


def write(number):
    (folder / "own_method.py").write_text(f'''
import dataclasses, fedsim, jax.numpy as jnp

@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mine(fedsim.Algorithm):
    def init(self, key): return jnp.zeros(())
    def client_update(self, shared, client): return fedsim.ClientUpdate(jnp.float32({number}), jnp.float32(1))
    def server_update(self, state, update, info): return update
''')


def cell(code):
    shell.run_cell(code).raise_error()


write(1.0)
cell("%load_ext autoreload")
cell("%autoreload 2")
cell("import fedsim, jax, numpy as np\\nfrom own_method import Mine")
cell("data = fedsim.FederatedData.from_arrays({'x': np.zeros(2, np.float32)}, sizes=[1, 1])")
run = '''
algorithm = Mine(batches=fedsim.Batches(size=1), execution=fedsim.Jit())
state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, data.client_ids))
print("result", float(state))
'''
cell(run)
write(52.0)  # The file has another length, so Python does not take the bytecode of the old one.
cell(run)
"""


def test_an_edited_class_is_used_in_a_notebook_with_autoreload(tmp_path):
    pytest.importorskip("IPython")
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    command = [sys.executable, str(tmp_path / "notebook.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert re.findall(r"result (\S+)", done.stdout) == ["1.0", "52.0"], done.stdout + done.stderr


@pytest.mark.first(1)
@pytest.mark.parametrize("transform", [jax.vmap, lambda f: lambda rates: jnp.stack([jax.jvp(f, (r,), (r,))[0] for r in rates])])
def test_an_algorithm_that_holds_a_traced_value_is_a_part_of_the_surrounding_program(transform):
    """Only the optimizer holds the rate. The arguments of the round are arrays."""
    start, cohort = make().init(jax.random.key(0)), federation.cohort()

    def trained(rate):
        algorithm = make(client_optimizer=optax.sgd(rate))
        return algorithm.apply(start, cohort)[0].params["linear"]["b"]

    rates = jnp.array([0.1, 0.3])
    expected = np.stack([trained(rate) for rate in (0.1, 0.3)])
    np.testing.assert_allclose(transform(trained)(rates), expected, rtol=1e-5)


def test_columns_that_no_client_reads_may_have_other_shapes():
    """They are no part of the text."""
    for size in (3, 5):
        data = fedsim.FederatedData.from_arrays({"x": np.zeros(size, np.float32)}, sizes=[size])
        algorithm = Sends(source="class attribute", batches=BATCHES, execution=fedsim.Jit())
        assert algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(data))[0] == 1


@pytest.mark.first(3)
@pytest.mark.parametrize("kind", ["pure", "io", "print", "debug"])
def test_programs_that_call_python_functions_are_not_shared(kind, capfd):
    """The text of a program does not have these functions."""

    def called(factor, seen):
        value, shape = jnp.float32(1.0), jax.ShapeDtypeStruct((), jnp.float32)
        if kind == "pure":
            return jax.pure_callback(lambda x: np.float32(factor * x), shape, value)
        if kind == "io":
            return jax.experimental.io_callback(lambda x: np.float32(factor * x), shape, value)
        if kind == "print":
            jax.debug.print(f"factor {factor} of {{}}", value)
        else:
            jax.debug.callback(lambda x: seen.append(factor * float(x)), value)
        return jnp.float32(factor)

    found = []
    for factor in (1.0, 2.0):
        seen = []

        class Calls(Sends):
            def client_update(self, shared, client, factor=factor, seen=seen):
                return fedsim.ClientUpdate(called(factor, seen), jnp.float32(1))

        algorithm = Calls(source="own", batches=BATCHES, execution=fedsim.Jit())
        result = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[0]
        jax.effects_barrier()
        printed = {line for line in capfd.readouterr().out.splitlines() if line.startswith("factor")}
        found.append((float(result), set(seen), printed))
    expected = [
        (x, {x} if kind == "debug" else set(), {f"factor {x} of 1.0"} if kind == "print" else set()) for x in (1.0, 2.0)
    ]
    assert found == expected


def test_settings_of_jax_are_part_of_what_is_shared():
    algorithm = make()
    start, cohort = algorithm.init(jax.random.key(0)), federation.cohort()
    algorithm.apply(start, cohort)
    with jax.default_matmul_precision("highest"):
        algorithm.apply(start, cohort)
    programs = [of_setting.program for of_setting in federation.compiled_rounds(algorithm)]
    assert len(programs) == 2 and programs[0] is not programs[1]


@dataclasses.dataclass(frozen=True)
class Nested:
    nonfinite: float


@pytest.mark.first(1)
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

    def moved(level):
        algorithm = make(LookedUp, level=level)
        start = algorithm.init(jax.random.key(0))
        return jax.tree.map(jnp.subtract, algorithm.apply(start, federation.cohort())[0].params, start.params)

    once, twice = moved(0.5), moved(0.25)
    federation.assert_trees_close(twice, jax.tree.map(lambda x: 2 * x, once))


def test_copies_do_not_carry_programs():
    algorithm = make()
    algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    assert "_execution" not in vars(copy.copy(algorithm))
