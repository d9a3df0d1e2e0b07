"""`fedsim.population`: many settings and seeds in one program give the results of separate runs."""

import dataclasses
import warnings

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import Counting

import fedsim
from fedsim import algorithms
from fedsim.execution import _members

DATA = federation.data()
MODEL = federation.model()
BATCHES = fedsim.Batches(size=4)
TWO = fedsim.Pmap(devices=2)
RATES = [0.05, 0.3, 1.0]
ATTACK = fedsim.attacks.SignFlip()
slow = pytest.mark.slow
WAYS = ["devices", pytest.param("vmap", marks=slow), pytest.param("sequential", marks=slow)]
# Numbers that no other test has, for programs that are not compiled yet: a program of the same text is not compiled again.
OWN_EPOCHS = {"devices": 3, "vmap": 4, "sequential": 5}


def sampler(seed):
    return fedsim.UniformSampler(DATA, clients=4, seed=seed)


def fedprox(rate, mu=0.1, **options):
    settings = dict(model=MODEL, client_optimizer=optax.sgd(rate, momentum=0.9), batches=BATCHES, execution=TWO)
    return algorithms.FedProx(**(settings | options), mu=mu)


def separate(algorithm, own_sampler, rounds):
    """Runs one member as a user does without `fedsim.population`, on one device."""
    if isinstance(algorithm.execution, fedsim.Jit):
        algorithm = dataclasses.replace(algorithm, execution=fedsim.Jit())
    state = algorithm.init(fedsim.rng.stream(own_sampler.key, "init"))
    infos = []
    for round in range(rounds):
        state, info = algorithm.apply(state, own_sampler.cohort(round))
        infos.append(jax.device_get(info))
    return federation.plain(state), infos


def assert_equals_separate_runs(result, make, own_sampler=sampler):
    rounds = len(result.infos.num_clients[0, 0])
    for i, setting in enumerate(result.settings):
        for j, seed in enumerate(result.seeds):
            state, infos = separate(make(**setting), own_sampler(seed), rounds)
            federation.assert_trees_close(federation.plain(result.state_of(i, j)), state)
            for r, info in enumerate(infos):
                federation.assert_trees_close(jax.tree.map(lambda x, i=i, j=j, r=r: x[i, j, r, ...], result.infos), info)


@pytest.mark.first(1)
@pytest.mark.parametrize("how", WAYS)
def test_members_equal_separate_runs(how, monkeypatch):
    """Cohorts and initial states differ between seeds; the last dispatch and the last turn of the devices are not full."""
    monkeypatch.setattr("fedsim.sweeps._population._ROUNDS_PER_DISPATCH", 3)
    result = fedsim.population(
        fedprox, {"rate": RATES, "mu": [0.1]}, [3, 0, 8], sampler=sampler, rounds=5, how=how, progress=False
    )
    assert result.how == how and result.seeds == (3, 0, 8)
    assert_equals_separate_runs(result, fedprox)


def programs_compiled(caplog, make, **options):
    """Returns the names of the programs that are compiled, one for each compilation."""
    with jax.log_compiles(), caplog.at_level("WARNING"):
        caplog.clear()
        fedsim.population(make, sampler=sampler, rounds=3, progress=False, test_data=DATA, **options)
    messages = [record.getMessage() for record in caplog.records]
    started = "Finished XLA compilation of "
    return [text.removeprefix(started).split()[0] for text in messages if text.startswith(started)]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("devices", "together"),
        pytest.param("vmap", "together", marks=slow),
        pytest.param("sequential", "run_rounds", marks=slow),
    ],
)
def test_all_rates_share_one_compilation_even_if_each_setting_has_a_new_model(how, name, caplog):
    def make(rate, mu):
        return fedprox(rate, mu, model=federation.model(), batches=fedsim.Batches(size=3, epochs=OWN_EPOCHS[how]))

    names = programs_compiled(caplog, make, settings={"rate": RATES, "mu": [0.0, 1.0]}, seeds=2, how=how)
    assert sum(name in compiled for compiled in names) == 1
    assert sum("sums" in compiled for compiled in names) <= 1  # the evaluation, which other tests may have compiled


@pytest.mark.slow
def test_evaluation_is_that_of_separate_runs():
    def make(rate):
        return fedprox(rate, model=federation.model())

    rates = RATES[:2]
    result = fedsim.population(make, {"rate": rates}, 2, sampler=sampler, rounds=2, test_data=DATA, progress=False)
    for i, rate in enumerate(rates):
        algorithm = fedprox(rate)
        for j in range(2):
            expected = fedsim.evaluate(MODEL, separate(algorithm, sampler(j), 2)[0].params, DATA)
            np.testing.assert_allclose(result.evaluation["test_loss"][i, j], expected.overall["loss"], rtol=1e-5)
            assert result.evaluation["test_accuracy"][i, j] == pytest.approx(expected.overall["accuracy"])


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("cls", [pytest.param(algorithms.SCAFFOLD, marks=slow), Counting])
def test_memories_of_clients_belong_to_a_member(cls, how):
    def make(scale):
        if cls is Counting:
            return Counting(batches=fedsim.Batches(size=4, epochs=2), refuse=scale, execution=TWO)
        return cls(model=MODEL, client_optimizer=optax.sgd(scale), batches=BATCHES, execution=TWO)

    values = [-1.0, 3.0] if cls is Counting else [0.1, 0.2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `Counting` sends a NaN for one client.
        result = fedsim.population(make, {"scale": values}, 2, sampler=sampler, rounds=4, how=how, progress=False)
        assert_equals_separate_runs(result, make)


@slow
@pytest.mark.parametrize("how", ["devices", "vmap"])
def test_numbers_of_aggregators_and_schedules_are_arguments(how, caplog):
    def make(rate, decay, clip):
        return fedprox(
            rate,
            client_optimizer=lambda round: optax.sgd(rate * decay ** round.astype(jnp.float32)),
            batches=fedsim.Batches(size=3, epochs=OWN_EPOCHS[how]),  # for programs that no other test has
            aggregator=fedsim.aggregators.Clipped(clip),
        )

    settings = [{"rate": 0.1, "decay": 0.5, "clip": 0.1}, {"rate": 0.5, "decay": 0.9, "clip": 3}]
    names = programs_compiled(caplog, make, settings=settings, seeds=1, how=how)
    assert sum("together" in name for name in names) == 1
    result = fedsim.population(make, settings, 1, sampler=sampler, rounds=3, how=how, progress=False)
    assert_equals_separate_runs(result, make)


@slow
@pytest.mark.parametrize("how", ["devices", "vmap", "sequential"])
def test_samplers_with_attackers_stragglers_and_varying_cohorts(how):
    def own_sampler(seed):
        poisson = fedsim.samplers.PoissonSampler(DATA, probability=0.4, seed=seed)
        stragglers = fedsim.samplers.Stragglers(poisson, fraction=0.5, epochs=4)
        return fedsim.samplers.Attacked(stragglers, fedsim.attacks.SignFlip(), fraction=0.4, seed=seed)

    result = fedsim.population(fedprox, {"rate": [0.1, 0.2]}, 2, sampler=own_sampler, rounds=4, how=how, progress=False)
    assert_equals_separate_runs(result, fedprox, own_sampler)


@slow
def test_integers_and_strings_are_constants_of_a_program_each(caplog):
    def make(rate, size, weighting):
        return fedprox(rate, batches=fedsim.Batches(size=size, epochs=7), weighting=weighting)

    settings = [{"rate": 0.1, "size": 2, "weighting": "examples"}, {"rate": 0.2, "size": 4, "weighting": "uniform"}]
    names = programs_compiled(caplog, make, settings=settings, seeds=1, how="devices")
    assert sum("together" in name for name in names) == 2
    result = fedsim.population(make, settings, 1, sampler=sampler, rounds=2, progress=False)
    assert_equals_separate_runs(result, make)


@slow
def test_code_that_needs_values_runs_sequentially_with_a_warning():
    def make(rate):
        return fedprox(rate if rate > 0.1 else 2 * rate)

    with pytest.warns(UserWarning, match=r"how='sequential'.*needs the values of numbers \(rate\)"):
        result = fedsim.population(make, {"rate": [0.1, 0.3]}, 1, sampler=sampler, rounds=2, progress=False)
    assert result.how == "sequential"
    assert_equals_separate_runs(result, make)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Loop(fedsim.Algorithm):
    """An algorithm in plain Python: the sum of all examples, times a number."""

    scale: float

    def init(self, key):
        return np.zeros(())

    def apply(self, state, cohort):
        total = sum(float(dataset["x"].sum()) for _, dataset, _ in cohort)
        return state + self.scale * total, {"total": jnp.float32(total)}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda x: Loop(scale=x, batches=fedsim.Batches(size=1)), "because Loop.apply is not compiled"),
        pytest.param(
            lambda x: fedprox(x, execution=fedsim.Jit(memory="stream")), "the examples are not all on the device", marks=slow
        ),
        pytest.param(lambda x: fedprox(x, execution=fedsim.Debug()), r"their execution is Debug\(\)", marks=slow),
    ],
)
def test_algorithms_that_cannot_share_a_program_run_sequentially_with_a_warning(make, reason):
    with pytest.warns(UserWarning, match=reason):
        result = fedsim.population(make, {"x": [0.5, 2.0]}, 2, sampler=sampler, rounds=1, how="vmap", progress=False)
    if isinstance(make(0.5), Loop):
        np.testing.assert_allclose(result.state[1], 4 * result.state[0])
        assert result.infos["total"].shape == (2, 2, 1)
    else:
        assert_equals_separate_runs(result, make)


@slow
def test_members_that_do_not_fit_the_memory_run_in_turns_with_a_warning(monkeypatch):
    monkeypatch.setattr("fedsim.sweeps._ways.most_side_by_side", lambda *_: 1)
    with pytest.warns(UserWarning, match="The memory suffices for 1 of 2 members side by side"):
        result = fedsim.population(
            fedprox, {"rate": RATES}, 1, sampler=sampler, rounds=2, how="vmap",
            progress=False,
        )  # fmt: skip
    assert_equals_separate_runs(result, fedprox)


@slow
def test_a_device_that_runs_out_of_memory_runs_half_as_many_members(monkeypatch):
    compile_members = _members._compiled

    def compiled(programs, setting, mesh, side_by_side):
        def exhausted(*_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        return exhausted if side_by_side > 1 else compile_members(programs, setting, mesh, side_by_side)

    monkeypatch.setattr(_members, "_compiled", compiled)
    with pytest.warns(UserWarning, match="out of memory with 3 members side by side"):
        result = fedsim.population(
            lambda rate: fedprox(rate, execution=fedsim.Jit()), {"rate": RATES}, 1, sampler=sampler, rounds=2, how="vmap",
            progress=False,
        )  # fmt: skip
    assert_equals_separate_runs(result, fedprox)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The device ran out of memory")
def test_rounds_that_run_again_are_counted_once(monkeypatch):
    sizes, bars = federation.out_of_memory_in_the_third_dispatch(monkeypatch), federation.progress_bars(monkeypatch)
    reads = federation.reads_of_states(monkeypatch)
    monkeypatch.setattr("fedsim.sweeps._population._ROUNDS_PER_DISPATCH", 1)

    def make(rate):
        return fedprox(rate, execution=fedsim.Jit())

    result = fedsim.population(make, {"rate": RATES[:2]}, 1, sampler=sampler, rounds=3, how="vmap", progress=False)
    assert sizes == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    assert [(bar.n, bar.total) for bar in bars] == [(6, 6)]
    assert_equals_separate_runs(result, make)
    # The states of the wave that ran out of memory are copied once, those of the others after the last round.
    assert reads == [2, 1, 1]


def test_updates_that_are_not_finite_are_counted_or_raised():
    def make(rate, nonfinite):
        return fedprox(rate, nonfinite=nonfinite)

    run = dict(sampler=sampler, seeds=2, rounds=3, progress=False)
    with pytest.warns(UserWarning, match=r"of 2 of 4 members held a NaN.* the first with rate=1e\+38, nonfinite=drop, seed=0"):
        result = fedsim.population(make, {"rate": [0.1, 1e38], "nonfinite": ["drop"]}, **run)
    assert result.infos.num_dropped[0].sum() == 0 and np.all(result.infos.num_dropped[1].sum(-1) > 0)
    with pytest.raises(FloatingPointError, match=r"rate=1e\+38, nonfinite=raise, seed=\d: The update of client .* holds a NaN"):
        fedsim.population(make, {"rate": [0.1, 1e38], "nonfinite": ["raise"]}, **run)


def test_the_table_has_a_row_per_member_or_per_round():
    result = fedsim.population(
        fedprox, {"rate": [0.1, 0.2], "mu": [0.0]}, [5, 7], sampler=sampler, rounds=3, test_data=DATA, progress=False
    )
    table, by_round = result.to_pandas(), result.to_pandas(by_round=True)
    assert table.index.names == ["rate", "mu", "seed"] and by_round.index.names == ["rate", "mu", "seed", "round"]
    assert table.loc[(0.2, 0.0, 7), "test_loss"] == result.evaluation["test_loss"][1, 1]
    clients = result.infos.clients
    weights = np.where(clients["num_steps"][1, 1] > 0, clients["num_examples"][1, 1], 0)
    losses = (clients["loss"][1, 1] * weights).sum(-1) / weights.sum(-1)
    np.testing.assert_allclose(by_round.loc[(0.2, 0.0, 7), "loss"], losses, rtol=1e-5)
    assert by_round.loc[(0.2, 0.0, 7)].index.tolist() == [1, 2, 3]
    assert table.loc[(0.2, 0.0, 7), "loss"] == by_round.loc[(0.2, 0.0, 7, 3), "loss"]


def other_data(seed):
    return fedsim.UniformSampler(federation.data(), clients=4, seed=seed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"rate": [0.1, -0.1]}}, r"With the setting rate=-0.1: Expected client_optimizer to descend"),
        ({"settings": {"rate": [0.1], "mu": [-1.0]}}, r"With the setting rate=0.1, mu=-1: Expected mu >= 0"),
        ({"settings": {"rate": 0.1}}, r"got rate=0.1: give rate=\[...\]"),
        ({"settings": []}, "at least one setting"),
        ({"settings": {"rate": []}}, "at least one setting"),
        ({"settings": [{"rate": 0.1}, {"mu": 0.1}]}, r"got \['mu'\] in setting 1"),
        ({"settings": [{"rate": 0.1}, {"rate": 0.1}]}, "got rate=0.1 twice"),
        ({"settings": {"typo": [0.1]}}, "With the setting typo=0.1: .*'rate'"),
        ({"seeds": 0}, "Expected seeds >= 1"),
        ({"seeds": [1, 1]}, "Expected different seeds"),
        ({"seeds": [0.9, 1.2]}, "Expected whole numbers as seeds, got seeds=.0.9, 1.2."),
        ({"rounds": 0}, "Expected rounds >= 1"),
        ({"how": "fast"}, "Expected how to be 'vmap', 'devices' or 'sequential'"),
        ({"sampler": sampler(0)}, "Expected sampler to be a function from a seed"),
        ({"sampler": lambda seed: sampler(0)}, "pass the seed on"),
        ({"sampler": other_data}, "one FederatedData object"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = {"settings": {"rate": [0.1]}, "seeds": 2, "sampler": sampler, "rounds": 2, "progress": False}
    with pytest.raises((ValueError, TypeError), match=message):
        fedsim.population(fedprox, **(arguments | changes))


def test_settings_with_other_shapes_are_refused():
    def make(rate, hidden):
        model = MODEL if hidden == 0 else fedsim.models.dense(shape=[3], num_classes=4, hidden=[hidden])
        return fedprox(rate, model=model)

    with pytest.raises(ValueError, match=r"got other shapes with rate=0.1, hidden=2 than with rate=0.1, hidden=0"):
        fedsim.population(make, {"rate": [0.1], "hidden": [0, 2]}, 1, sampler=sampler, rounds=1, progress=False)


def test_samplers_that_do_not_fit_are_refused():
    data = federation.data()

    def make(rate):
        settings = {"batches": fedsim.Batches(size=4), "staleness": fedsim.Staleness(bound=0)}
        return algorithms.FedAvg(model=federation.model(), client_optimizer=optax.sgd(rate), **settings)

    with pytest.raises(ValueError, match="With the setting rate=0.1: .* weighting='uniform' for ClusteredSampling"):
        fedsim.population(
            make,
            {"rate": [0.1]},
            1,
            rounds=1,
            sampler=lambda seed: fedsim.samplers.ClusteredSampling(data, clients=2, seed=seed),
        )


def test_cohorts_are_checked_as_those_of_separate_runs():
    def make(rate):
        return fedprox(rate, weighting="uniform")

    def clustered(seed):
        return fedsim.samplers.ClusteredSampling(DATA, clients=2, seed=seed)

    with pytest.raises(ValueError, match="FedProx has staleness=None: set staleness=fedsim.Staleness"):
        fedsim.population(make, {"rate": [0.1]}, 1, sampler=clustered, rounds=1, how="devices", progress=False)


def test_attacks_that_begin_after_the_first_round_are_refused():
    class Later:
        def __init__(self, seed):
            self.before = sampler(seed)
            self.after = fedsim.samplers.Attacked(self.before, ATTACK, fraction=0.5, seed=seed)

        def cohort(self, round):
            return (self.after if round else self.before).cohort(round)

    with pytest.raises(ValueError, match=r"one attack in all rounds .* got None and in round 1 SignFlip.*how='sequential'"):
        fedsim.population(fedprox, {"rate": [0.1]}, 1, sampler=Later, rounds=2, how="devices", progress=False)
