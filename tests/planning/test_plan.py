"""Plans: what they predict is compared with real rounds, with closed forms, and with what XLA reports.

The estimated time of real models is tested in test_time_of_rounds.py.
"""

import dataclasses
import json
from types import SimpleNamespace

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, compressors
from fedsim.commands import main
from fedsim.planning import _costs


def fedavg(cls=fedsim.algorithms.FedAvg, **changes):
    settings = dict(model=federation.model(), batches=fedsim.Batches(size=4), execution=fedsim.Jit())
    return cls(**settings | {"client_optimizer": optax.sgd(0.1)} | changes)


def memory_of(compiled):
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def test_fedavg_has_one_all_reduce_per_round_and_none_inside_local_steps():
    plan = fedsim.plan(fedavg(execution=fedsim.Pmap(devices=2)), federation.cohort(), measure=False)
    assert (plan.collectives, plan.collectives_in_loops) == ({"all-reduce": 1}, {})
    assert "1 all-reduce per round outside of loops, none in loops" in str(plan)


@pytest.mark.slow
def test_one_device_has_no_collectives_and_the_plan_says_what_several_would_have():
    plan = fedsim.plan(fedavg(fedsim.algorithms.Mime), federation.cohort(), measure=False)
    assert (plan.collectives, plan.collectives_in_loops, plan.passes) == ({}, {}, 2)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Consensus(aggregators.Mean):
    """A mean whose devices exchange it ten times."""

    def finish_round_devices(self, accumulator, memory, key, axis):
        update, memory = super().finish_round_devices(accumulator, memory, key, axis)
        exchange = lambda _, x: jax.tree.map(lambda leaf: jnp.sin(jax.lax.psum(leaf, axis)), x)  # noqa: E731
        return jax.lax.fori_loop(0, 10, exchange, update), memory


@pytest.mark.slow
def test_collectives_in_loops_are_found():
    algorithm = fedavg(execution=fedsim.Pmap(devices=2), aggregator=Consensus())
    plan = fedsim.plan(algorithm, federation.cohort(), measure=False)
    assert plan.collectives == {"all-reduce": 1} and plan.collectives_in_loops["all-reduce"] >= 1


@pytest.mark.parametrize(
    "compressor", [compressors.MagnitudePruning(), compressors.TopK(fraction=0.3), compressors.Eden(bits=2)]
)
def test_a_plan_says_whether_the_size_of_an_update_depends_on_its_values(compressor):
    algorithm = fedavg(aggregator=aggregators.Compressed(compressor), downlink=compressors.Cast(), execution=fedsim.Debug())
    plan = fedsim.plan(algorithm, federation.cohort(), measure=False)
    depends = isinstance(compressor, compressors.MagnitudePruning)
    assert plan.up_is_exact != depends and ("depends on the values" in str(plan)) == depends
    # 12 weights and 4 biases in half precision, and the number of the round.
    assert plan.bytes_down == 2 * 16 + 4 and plan.down_is_exact
    assert 0 < plan.bytes_up < 4 * 16 + 4


def test_messages_and_steps_of_stragglers_are_those_of_a_round():
    cohort = dataclasses.replace(federation.cohort(), work=np.array([1, 1, 0.5, 0.5, 0, 1, 0.3, 0], np.float32))
    algorithm = fedavg(batches=fedsim.Batches(size=2, epochs=3))
    plan = fedsim.plan(dataclasses.replace(algorithm, execution=fedsim.Debug()), cohort, measure=False)
    info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)[1].clients
    assert plan.steps_per_round == int(info["num_steps"].sum())
    assert plan.bytes_up_per_round == float(info["bits_up"].sum()) / 8
    assert plan.bytes_down_per_round == float(info["bits_down"].sum()) / 8
    assert plan.steps_per_client == plan.steps_per_round / int((info["num_steps"] > 0).sum())


def test_computation_of_a_linear_model_is_that_of_its_matrix_products():
    inputs, classes, size = 64, 32, 16
    features = {"x": jax.ShapeDtypeStruct((inputs,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    network = hk.transform(lambda examples: hk.Linear(classes)(examples["x"]))
    model = fedsim.Model.from_haiku(network, features=features, num_classes=classes)
    data = fedsim.FederatedData.from_arrays({"x": np.ones([96, inputs], np.float32), "y": np.arange(96) % 32}, sizes=[64, 32])
    algorithm = fedavg(model=model, batches=fedsim.Batches(size=size, epochs=3), execution=fedsim.Debug())
    plan = fedsim.plan(algorithm, fedsim.Cohort.of(data, ["0", "1"]), measure=False)
    products = 18 * 2 * 2 * size * inputs * classes  # 18 steps of a product for the outputs and one for the gradient
    assert products < plan.flops_per_round < 1.3 * products and plan.flops_per_client == plan.flops_per_round / 2
    assert plan.parameters == inputs * classes + classes


@pytest.mark.slow
def test_computation_of_an_lstm_counts_every_step_in_time():
    model, size, length = fedsim.models.shakespeare_lstm(), 4, 80
    columns = {name: np.zeros_like(column) for name, column in model.dummy_examples(8).items()}
    assert columns["x"].shape == (8, length)
    cohort = fedsim.Cohort.of(fedsim.FederatedData.from_arrays(columns, sizes=[8]), ["0"])
    plan = fedsim.plan(fedavg(model=model, batches=fedsim.Batches(size=size), execution=fedsim.Debug()), cohort, measure=False)
    weights = [x.size for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))) if x.ndim == 2]
    # Two operations per weight and character for the outputs, and four for the gradients.
    assert 1 < plan.flops_per_round / plan.steps_per_round / (6 * size * length * sum(weights)) < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("aggregator", [aggregators.Mean(), aggregators.CoordinateMedian()], ids=["mean", "median"])
def test_memory_is_what_xla_reports_and_the_largest_cohort_fits_in_it(aggregator, monkeypatch):
    data = federation.data(sizes=[5] * 60)
    algorithm = fedavg(model=fedsim.models.dense(shape=(3,), hidden=(100,), num_classes=4), aggregator=aggregator)
    algorithm = dataclasses.replace(algorithm, execution=fedsim.Jit(memory="resident"))
    of = [fedsim.UniformSampler(data, clients=n, seed=0).cohort(0) for n in (5, 20, 50)]
    needed = [memory_of(algorithm.execution.lower(algorithm, cohort).compile()) for cohort in of]
    plan = fedsim.plan(algorithm, of[0], measure=False)
    assert abs(plan.bytes_per_device - needed[0]) < 1000 and plan.largest_cohort == 60
    free = SimpleNamespace(available=(needed[1] + needed[2]) // 2)
    monkeypatch.setattr(_costs.psutil, "virtual_memory", lambda: free)
    assert fedsim.plan(algorithm, of[0], measure=False).largest_cohort == 20
    free.available = needed[0] // 2
    assert fedsim.plan(algorithm, of[0], measure=False).largest_cohort == 0


def test_memory_is_that_of_the_slots_and_of_numbers_as_devices_have_them():
    model = fedsim.models.dense(shape=(3,), hidden=(50,), num_classes=4)
    algorithm = fedavg(model=model, aggregator=aggregators.CoordinateMedian(), execution=fedsim.Jit(memory="resident"))
    data = federation.data(sizes=[5] * 60)
    cohort = fedsim.samplers.PoissonSampler(data, probability=0.1, seed=0).cohort(0)
    assert len(cohort) < cohort.slots / 2
    needed = memory_of(algorithm.execution.lower(algorithm, cohort).compile())
    assert abs(fedsim.plan(algorithm, cohort, measure=False).bytes_per_device - needed) < 1000
    double = fedsim.FederatedData.from_arrays(
        {n: np.float64(c) if n == "x" else c for n, c in data.columns.items()}, sizes=data.sizes
    )
    cohort = dataclasses.replace(cohort, data=double)
    assert abs(fedsim.plan(algorithm, cohort, measure=False).bytes_per_device - needed) < 1000


def test_a_cohort_without_examples_has_a_plan():
    cohort = fedsim.Cohort(federation.data(), np.zeros(0, np.int32), 0, fedsim.rng.root(0), slots=2)
    assert fedsim.plan(fedavg(), cohort, measure=False).bytes_per_device > 0


def test_the_largest_cohort_has_space_for_its_streamed_examples():
    # Slots of 10 bytes, and clients of 40 bytes: 500 clients need 5,000 and 20,000 bytes, and with two slots each 10,000.
    for slots_per_client, needed in ((1.0, 25_000), (2.0, 30_000)):
        assert _costs._largest(10_000, slots_per_client, [51, 204], [1_000, 5_000], 40.0, needed - 1) == 200
        assert _costs._largest(10_000, slots_per_client, [51, 204], [1_000, 5_000], 40.0, needed) == 500


@pytest.mark.slow
def test_streamed_examples_and_memories_take_only_the_memory_of_the_cohort():
    data = federation.data(sizes=[5] * 2000)
    cohort = fedsim.UniformSampler(data, clients=5, seed=0).cohort(0)
    needed = {}
    for memory in ("resident", "stream"):
        algorithm = fedavg(fedsim.algorithms.SCAFFOLD, execution=fedsim.Jit(memory=memory))
        needed[memory] = fedsim.plan(algorithm, cohort, measure=False).bytes_per_device
    table = 2000 * 16 * 4  # a control variate of 16 floats per client
    assert needed["stream"] < needed["resident"] - data.nbytes - table
    assert needed["stream"] < 100_000


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Noticed(fedsim.algorithms.FedAvg):
    """Notices when a round ends."""

    rounds: list

    def server_update(self, state, update, info):
        jax.debug.callback(lambda: self.rounds.append(1))
        return super().server_update(state, update, info)


@pytest.mark.slow
def test_a_plan_runs_no_round():
    cohort, algorithm = federation.cohort(), fedavg(Noticed, rounds=[])
    assert fedsim.plan(algorithm, cohort).seconds > 0
    jax.effects_barrier()
    assert algorithm.rounds == []
    algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    jax.effects_barrier()
    assert algorithm.rounds == [1]


@pytest.mark.slow
def test_the_time_grows_with_the_number_of_steps():
    few, many = (fedavg(batches=fedsim.Batches(size=1, epochs=epochs)) for epochs in (1, 2000))
    assert 3 * fedsim.plan(few, federation.cohort()).seconds < fedsim.plan(many, federation.cohort()).seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mime", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hypcluster", "kmeans", "error feedback"))]
)
def test_the_time_of_rounds_of_several_kinds_is_estimated(name):
    feedback = aggregators.Compressed(compressors.ErrorFeedback(compressors.TopK(fraction=0.3)))
    algorithm = {
        "mime": lambda: fedavg(fedsim.algorithms.Mime),
        "hypcluster": lambda: fedavg(fedsim.algorithms.HypCluster, num_clusters=2),
        "kmeans": lambda: fedsim.algorithms.KMeans(num_clusters=2, num_features=3, batches=fedsim.Batches(size=4)),
        "error feedback": lambda: fedavg(aggregator=feedback, execution=fedsim.Pmap(devices=2)),
    }[name]()
    plan = fedsim.plan(algorithm, federation.cohort())
    assert 0 < plan.seconds < 60 and plan.steps_per_round > 0


def test_an_algorithm_with_its_own_apply_has_a_plan_with_unknown_costs():
    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Count(fedsim.Algorithm):
        def init(self, key):
            return jnp.zeros(3)

        def apply(self, state, cohort):
            raise AssertionError("a plan runs no round")

    plan = fedsim.plan(Count(batches=fedsim.Batches(size=4)), federation.cohort())
    assert plan.parameters == 3 and plan.bytes_up is plan.seconds is plan.collectives is None
    assert str(plan).count("unknown") == 8


def test_a_plan_is_text_and_json():
    plan = fedsim.plan(fedavg(execution=fedsim.Debug()), federation.cohort(), measure=False)
    assert json.loads(json.dumps(plan.to_json())) == dataclasses.asdict(plan)
    lines = str(plan).splitlines()
    assert lines[0] == "FedAvg with 8 of 8 clients per round, on 1 CPU device"
    assert lines[1:4] == [
        "  parameters      16",
        "  up              64 bytes per client, 448 bytes per round",
        "  down            68 bytes per client, 476 bytes per round",
    ]
    assert lines[-1] == "  time            unknown"


def test_measure_is_a_truth_value():
    with pytest.raises(ValueError, match="measure"):
        fedsim.plan(fedavg(), federation.cohort(), measure="no")


@pytest.mark.slow
def test_the_command_prints_a_plan_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--model", "digits_logistic", "--clients", "3", "--rounds", "40", "--execution", "jit", "--algorithm", "fedprox"]
    assert main(["plan", *options, "--mu", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("FedProx with 3 of 100 clients per round, on 1 CPU device\n  parameters      650\n")
    assert "\n40 rounds: about " in shown and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sampler", "round"), [("poisson", 1), ("oort", 0)])
def test_the_command_plans_the_first_round_that_has_clients(sampler, round, monkeypatch):
    """With Poisson sampling of one client in ten, the first cohort of this seed is empty."""
    planned = []
    monkeypatch.setattr(fedsim, "plan", lambda _, cohort, measure: planned.append(cohort) or SimpleNamespace(seconds=None))
    monkeypatch.setattr(fedsim, "audit", lambda _, cohort: planned.append(cohort))
    options = ["--dataset", "digits(clients=10)", "--model", "digits_logistic", "--clients", "1", "--seed", "3"]
    assert main(["plan", *options, "--sampler", sampler]) == 0
    assert [(cohort.round, len(cohort)) for cohort in planned] == [(round, 1)] * 2


@pytest.mark.slow
def test_a_plan_says_what_stays_whole_on_the_devices_of_a_client():
    data = fedsim.datasets.load("digits(clients=20)").train
    cohort = fedsim.UniformSampler(data, clients=4, seed=0).cohort(0)

    def planned(model, execution):
        algorithm = fedsim.algorithms.FedAvg(
            model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10), execution=execution
        )
        return fedsim.plan(algorithm, cohort, measure=False)

    model, mesh = fedsim.models.digits_dense(hidden=(8, 7)), fedsim.Sharded(clients=1, model=4)
    whole = {"linear_1/b": 7, "linear_2/b": 10, "linear_2/w": 70}
    assert dict(planned(model, mesh).whole) == whole
    assert "divided by largest axes; whole: linear_2/w, linear_2/b, linear_1/b, 87 parameters" in str(planned(model, mesh))
    own = planned(model.with_shardings({"*/w": jax.P("model")}), fedsim.Sharded(clients=1, model=1, data=2))
    assert own.divided_by is None
    own = planned(model.with_shardings({"linear/w": jax.P("model")}), mesh)
    assert own.divided_by == "the rule of the model" and "linear/w" not in own.whole and own.whole["linear_1/w"] == 56
    assert planned(model, fedsim.Jit()).divided_by is None


def test_a_plan_for_tpus_needs_an_execution_on_all_chips(capsys):
    assert main(["plan", "--tpu", "v5e:2x4", "--execution", "jit"]) == 2
    assert "Expected an execution on all chips with --tpu, got Jit(" in capsys.readouterr().err


def test_clients_whose_examples_arrive_are_timed():
    data = fedsim.datasets.load("digits", clients=10).train
    arrived = fedsim.samplers.Arriving(fedsim.UniformSampler(data, clients=5, seed=0), np.zeros(data.num_examples, int))
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10),
        execution=fedsim.Jit(),
    )  # fmt: skip
    assert fedsim.plan(algorithm, arrived.cohort(0)).seconds > 0
