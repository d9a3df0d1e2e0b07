"""Wrong arguments raise errors that name the argument, before anything is computed."""

import dataclasses
import functools
import re
import typing
from collections.abc import Hashable

import federation
import jax
import numpy as np
import optax
import optax.contrib
import pytest

import fedsim
from fedsim import aggregators, attacks, checks, decentralized, execution
from fedsim.configuration._build import _evaluated_type
from fedsim.experiment.driving import RunFolder

X = np.zeros([3, 3], np.float32)


IMAGES = {"x": np.zeros([3, 2, 2], np.uint8), "y": np.array([0, 1, 1])}


def population(**columns):
    return fedsim.FederatedData.from_arrays(columns, sizes=[1, 2])


def attacked(attack, **columns):
    data = population(**columns) if columns else federation.data()
    return fedsim.samplers.Attacked(fedsim.UniformSampler(data, clients=2, seed=0), attack, seed=0)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: train(data=population(x=X, y=np.zeros(3, ">i4"))), "'y' has dtype >i4"),
        (lambda: train(data=population(x=X, y=np.zeros(3, int), z=np.array(["a", "b", "c"]))), "'z' has dtype <U1"),
        (lambda: fedsim.FederatedData({"x": [1, 2]}, np.array([0, 2]), ["a"]), "'x' must be a NumPy array"),
        (lambda: fedsim.FederatedData({"x": np.zeros(2)}, np.array([0, 1.5]), ["a"]), "Expected integer offsets"),
        (lambda: fedsim.FederatedData.from_partition({"y": [5, 6]}, [np.array([False, True])]), "integer indices for client 0"),
        (lambda: fedsim.Cohort.of(federation.data(), ["client0"], round=-1), "Expected 0 <= round"),
        (lambda: fedsim.UniformSampler(federation.data(), clients=1.5, seed=0), "Expected clients >= 1, got clients=1.5"),
        (lambda: fedsim.Jit(lanes=2.5), "Expected lanes >= 1"),
        (lambda: fedavg(aggregator="mean"), r"aggregator to be an instance of .*, such as Mean\(\), got aggregator='mean'"),
        (lambda: fedavg(downlink="eden"), "Expected downlink to be an instance of"),
        (lambda: aggregators.Clipped(1.0, inner="mean"), "Expected inner to be an instance of"),
        (lambda: fedavg(client_optimizer=0.1), "Expected client_optimizer to be an optax transformation, or a function .*=0.1"),
        (lambda: fedavg(client_optimizer=optax.sgd), r"got client_optimizer=optax.sgd: call it, as in optax.sgd\(0.1\)"),
        (lambda: fedavg(client_optimizer=functools.partial(optax.sgd, momentum=0.9)), "=optax.sgd: call it"),
        (lambda: fedavg(client_optimizer=optax.MultiSteps(optax.sgd(0.1), 2)), r"give its gradient_transformation\(\)"),
        (lambda: fedavg(server_optimizer=lambda round: optax.sgd(0.1)), "Expected server_optimizer to be an optax"),
        (lambda: fedavg(model="digits_dense"), "Expected model to be an instance of .*, such as .*got model='digits_dense'"),
        (lambda: fedavg(batches=20), r"such as fedsim.Batches\(size=20\), got batches=20"),
        (lambda: fedavg(batches=None), r"such as fedsim.Batches\(size=20\), got batches=None"),
        (lambda: fedavg(model=None), r"such as fedsim.models.emnist_dense\(\), got model=None"),
        (
            lambda: fedsim.algorithms.FedMGDA(**SETTINGS, aggregator=aggregators.Clipped(1.0)),
            r"FedMGDA needs the aggregator MinNorm\(.*got aggregator=Clipped",
        ),
        (
            lambda: fedsim.algorithms.Histogram(feature="x", aggregator=aggregators.Mean()),
            r"Histogram needs the aggregator Sum\(\), got aggregator=Mean\(\)",
        ),
        (lambda: fedsim.Batches(size="20"), "Expected size >= 1, got size='20'"),
        (lambda: fedsim.Batches(size=2, shuffle="no"), "Expected shuffle to be True or False"),
        (lambda: attacked(attacks.LabelFlip(3)), "Expected labels 'y' from 0 to 2, got 0 to 3. Set num_classes"),
        (
            lambda: attacked(attacks.LabelFlip(4, label="z")),
            "LabelFlip needs feature 'z', which .* Set label to",
        ),
        (lambda: attacked(attacks.PixelBackdoor(0)), r"at least size=3 .* 'x' of shape \[3\] per example"),
        (lambda: attacked(attacks.PixelBackdoor(0), **IMAGES), r"at least size=3 .* 'x' of shape \[2, 2\] per example"),
        (lambda: attacked(attacks.PixelBackdoor(9, size=2), **IMAGES), "Expected target <= 1, the largest label of 'y'"),
        (
            lambda: attacked(attacks.PixelBackdoor(0, size=2, value=256), **IMAGES),
            "range of uint8, the dtype of .x., got value=256",
        ),
        (lambda: train(attack=attacks.LabelFlip(3)), "Expected labels 'y' from 0 to 2"),
        (lambda: fedsim.experiment.RunConfig(clients=2.5), "Expected clients >= 1, got clients=2.5"),
        (lambda: fedsim.experiment.RunConfig(clip=float("inf")), "Expected clip > 0 and finite, or None, got clip=inf"),
        (lambda: fedsim.experiment.RunConfig(attackers="all"), "Expected 0 <= attackers <= 1, got attackers='all'"),
        (lambda: fedsim.experiment.RunConfig(shuffle="no"), "Expected shuffle to be True or False"),
        (lambda: fedsim.experiment.RunConfig(nonfinite=1), "Expected nonfinite to be 'drop' or 'raise', got nonfinite=1"),
        (lambda: fedsim.experiment.RunConfig(client_schedule="exponential(decay=-1)"), "Expected decay > 0 and finite"),
        (lambda: fedsim.Pmap(devices=[0]), "Expected devices >= 1"),
        (lambda: fedavg(execution="jit"), "Expected execution to be an instance of"),
        (lambda: train(fedsim.Batches(size=2**20, epochs=2**29, max_steps=1)), "go beyond 2\\*\\*31 examples"),
        (
            lambda: train(client_optimizer=optax.sgd(-1.0)),
            "Expected client_optimizer to descend, got a mean change of \\+1 in its first step",
        ),
        (lambda: train(client_optimizer=optax.lion(-0.1)), "Expected client_optimizer to descend"),
        (lambda: train(client_optimizer=optax.sgd(np.nan)), "Expected client_optimizer to descend"),
        (lambda: train(client_optimizer=lambda round: optax.sgd(-0.1)), "Expected client_optimizer to descend"),
        (lambda: train(server_optimizer=optax.sgd(-1.0)), "Expected server_optimizer to descend"),
        (
            lambda: train(server_optimizer=optax.sgd(0.0)),
            "server_optimizer to descend, got a mean change of \\+0 in its first 100 steps",
        ),
        (lambda: train(client_optimizer=optax.lion(0.0)), "Expected client_optimizer to descend"),
        (lambda: train(fedsim.Batches(size=2**20, steps=2**12)), "go beyond 2\\*\\*31 examples"),
    ],
)
def test_wrong_argument_is_named_in_the_error(misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse()


NEED_MORE = {
    "optax.contrib.sam, which needs a second gradient": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01)),
    "optax.contrib.dpsgd, which needs the gradient of each example": lambda: optax.chain(
        optax.contrib.differentially_private_aggregate(1.0, 1.0, 0), optax.sgd(0.1)
    ),
    "optax's lookahead, which raises AttributeError": lambda: optax.lookahead(optax.sgd(0.1), 4, 0.5),
}
NEED_THE_LOSS = {
    "optax's reduce_on_plateau, which raises TypeError": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    "optax's scale_by_zoom_linesearch, which raises TypeError": optax.lbfgs,
    "optax's scale_by_polyak, which raises TypeError": optax.polyak_sgd,
}


@pytest.mark.parametrize(
    ("side", "message", "made"),
    [
        *(("client_optimizer", *case) for case in NEED_MORE.items()),
        *(("server_optimizer", *case) for case in (NEED_MORE | NEED_THE_LOSS).items()),
    ],
)
def test_optimizers_that_need_more_than_they_get_are_named(side, message, made):
    with pytest.raises(ValueError, match=f"Expected {side} to need .*{re.escape(message)}.*[Uu]se another"):
        fedavg(**{side: made()}).check(federation.data())


@pytest.mark.first(1)
@pytest.mark.parametrize("made", NEED_THE_LOSS.values())
def test_clients_give_the_loss_to_optimizers_that_need_it(made):
    with jax.numpy_dtype_promotion("standard"):  # required by reduce_on_plateau
        fedavg(client_optimizer=made()).check(federation.data())


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation(),
        optax.chain(optax.apply_every(3), optax.scale(-0.1)),
        optax.chain(optax.polyak_sgd(), optax.apply_every(3)),
    ],
)
def test_gradients_that_a_client_s_optimizer_still_holds_at_the_end_are_reported(optimizer):
    """Of clients with 2, 6 and 10 examples and batches of 2, only the second takes a multiple of three steps."""
    draw = np.random.default_rng(0)
    sizes = [2, 0, 6, 10]
    columns = {"x": draw.normal(size=(18, 3)).astype(np.float32), "y": draw.integers(0, 4, 18).astype(np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=sizes)
    message = "moves after every 3 steps, and 2 of 3 clients, the first with 1, take another number of steps.*multiple of 3"
    with jax.numpy_dtype_promotion("standard"):  # required by optax.MultiSteps
        with pytest.warns(UserWarning, match=message):
            fedavg(client_optimizer=optimizer, batches=fedsim.Batches(size=2)).check(data)
        fedavg(client_optimizer=optimizer, batches=fedsim.Batches(size=2, steps=6)).check(data)  # warnings are errors


def test_the_server_keeps_the_gradients_that_its_optimizer_holds():
    optimizer = optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation()
    with jax.numpy_dtype_promotion("standard"):  # required by optax.MultiSteps
        fedavg(server_optimizer=optimizer).check(federation.data())  # warnings are errors


SETTINGS = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}


def fedavg(**changes):
    return fedsim.algorithms.FedAvg(**(SETTINGS | changes))


def train(batches=None, data=None, attack=None, **changes):
    algorithm = fedavg(batches=batches or fedsim.Batches(size=4), **changes)
    cohort = federation.cohort(data)
    if attack is not None:
        cohort = dataclasses.replace(cohort, attack=attack, attackers=np.ones(len(cohort), bool))
    return algorithm.apply(algorithm.init(jax.random.key(0)), cohort)


REGISTERED = {
    **fedsim.algorithms.ALGORITHMS,
    **decentralized.ALGORITHMS,
    **aggregators.AGGREGATORS,
    **{cls.__name__: cls for cls in (aggregators.Clipped, aggregators.GaussianMechanism, aggregators.Grouped)},
    "DistributedMechanism": aggregators.DistributedMechanism,
    **{cls.__name__: cls for cls in (aggregators.LocallyNoised, aggregators.MatrixMechanism)},
    **fedsim.compressors.COMPRESSORS,
    **attacks.ATTACKS,
}
VALID = {
    "model": federation.model(),
    "batches": fedsim.Batches(size=2),
    "client_optimizer": optax.sgd(0.1),
    "topology": decentralized.line(2),
    "num_classes": 3,
    "num_features": 16,
    "target": 1,
    "names": "linear/*",
    "inner": attacks.SignFlip(),
    "matrix": aggregators.BinaryTree(rounds=2),
}
WRONG = {float: [np.nan, np.inf, -1, "1", True], int: [np.nan, np.inf, -1, 1.5, "1", True], bool: ["no", 1, None]}
MAY_BE_NEGATIVE = {("Histogram", "low"), ("Quantiles", "low"), ("PixelBackdoor", "value")}


def error_message(cls, fields):
    try:
        cls(**fields)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REGISTERED)
def test_every_number_is_checked_when_it_is_passed(name):
    cls, unchecked = REGISTERED[name], []
    fields = [field for field in dataclasses.fields(cls) if field.init]
    needed = {f.name: VALID.get(f.name, 2) for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    assert error_message(cls, needed) == ""
    for field in fields:
        kind = _evaluated_type(cls, field)
        kinds = {part for part in (*typing.get_args(kind), kind) if isinstance(part, Hashable)}
        wrong = next((values for kind, values in WRONG.items() if kind in kinds), [])
        for value in [*wrong, *([None] if wrong and type(None) not in kinds else [])]:
            if value != -1 or (cls.__name__, field.name) not in MAY_BE_NEGATIVE:
                message = error_message(cls, needed | {field.name: value})
                if not re.search(rf"^Expected .*\b{field.name}\b.* got .*\b{field.name}={re.escape(repr(value))}", message):
                    unchecked.append((field.name, value, message))
    assert unchecked == []


@pytest.mark.parametrize("name", fedsim.models.MODELS)
def test_every_number_of_a_model_is_checked(name):
    function = fedsim.models.MODELS[name]
    sizes = {"vocabulary": 9, "length": 4, "width": 8, "layers": 1, "heads": 2, "hidden": 8}
    of_classes, of_numbers = {"shape": (2,), "num_classes": 3}, {"shape": (2,)}
    needed = {"decoder": sizes, "dense": of_classes, "logistic": of_classes}
    needed = (needed | {"dense_regression": of_numbers, "linear_regression": of_numbers}).get(name, {})
    for argument, kind in typing.get_type_hints(function).items():
        kinds = {*typing.get_args(kind), kind} & {*WRONG}
        sequence = typing.get_origin(kind) is not None and kinds and argument in ("hidden", "shape")
        for value in WRONG[next(iter(kinds))] if kinds and argument != "return" else []:
            given = {**needed, argument: (4, value) if sequence else value}
            with pytest.raises(ValueError, match=rf"^Expected .*\b{argument}\b.* got {argument}={re.escape(repr(value))}"):
                function(**given)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda masked: fedsim.FederatedData.from_arrays({"x": masked}, sizes=[3]), "feature 'x'"),
        (lambda masked: fedsim.FederatedData.from_arrays({"x": X}, clients=masked), "clients"),
        (lambda masked: fedsim.FederatedData.from_arrays({"x": X[:2]}, sizes=masked), "sizes"),
        (lambda masked: fedsim.FederatedData.from_clients({"a": {"x": masked}}), "feature 'x'"),
        (lambda masked: fedsim.FederatedData.from_partition({"x": masked}, [np.arange(3)]), "feature 'x'"),
        (lambda masked: fedsim.FederatedData({"x": masked}, np.array([0, 3]), ["a"]), "feature 'x'"),
        (lambda masked: fedsim.partitioners.dirichlet(masked, clients=2, alpha=1.0, seed=0), "labels"),
        (lambda masked: fedsim.partitioners.temporal(masked, clients=2), "timestamps"),
        (lambda masked: fedsim.samplers.WeightedSampler(population(x=X), clients=1, seed=0, weights=masked[:2]), "weights"),
        (lambda masked: fedsim.vertical.Party(ids=[1, 2, 3], columns={"age": masked}), "column 'age'"),
        (lambda masked: fedsim.vertical.Party(ids=[1, 2, 3], labels=masked), "labels"),
    ],
)
def test_a_masked_value_is_refused_and_a_mask_without_one_is_not(use, name):
    with pytest.raises(ValueError, match=f"^Expected {name} without masked values, got 1 of . masked: fill them"):
        use(np.ma.masked_equal([1, 0, 1], 0))
    use(np.ma.array([1, 0, 1], mask=False))


@pytest.mark.parametrize("ids", [[None, "a"], ["a", None], ["a", 1.0], ["a", float("nan")]])
def test_client_ids_that_are_no_text_are_refused(ids):
    with pytest.raises(ValueError, match="Client ids must be text, got (NoneType None|float (1.0|nan)): convert it to str"):
        fedsim.FederatedData.from_arrays({"x": X}, sizes=[1, 2], client_ids=ids)


def test_complex_features_are_refused_where_real_ones_are_read():
    data = population(x=np.array([1, 2j, 3]))
    for algorithm in (fedsim.algorithms.Histogram(), fedsim.algorithms.PCA(num_features=1, num_components=1)):
        with pytest.raises(ValueError, match=r"reads real numbers, got feature 'x' of complex128: give its real and imaginary"):
            algorithm.check(data)
    with pytest.raises(ValueError, match="Feature 'x' has dtype complex128, and the model expects float32"):
        federation.model().check(population(x=X.astype(complex), y=np.zeros(3, int)))


def test_losses_in_float64_train_parameters_in_float64():
    """The loss that is reported is float32; the gradient is that of the loss in float64."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        model = fedsim.Model(
            init=lambda key: {"w": jax.numpy.zeros((), "float64")},
            apply_for_train=lambda params, e, key: params["w"] - e["x"], apply_for_eval=lambda params, e: params["w"] - e["x"],
            loss=lambda e, out: 0.5 * out**2, metrics={}, features={"x": jax.ShapeDtypeStruct((), "float64")},
        )  # fmt: skip
        data = fedsim.FederatedData.from_arrays({"x": np.array([1 + 1e-12, 1 + 1e-12])}, sizes=[1, 1])
        algorithm = fedavg(model=model, client_optimizer=optax.sgd(1.0), batches=fedsim.Batches(size=1))
        state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
        assert abs(float(fedsim.rounds.server_state(state).params["w"]) - (1 + 1e-12)) < 1e-14
        assert info.clients["loss"].dtype == np.float32 and info.clients["loss"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("name", decentralized.TOPOLOGIES)
def test_every_number_of_a_topology_is_checked(name):
    function = decentralized.TOPOLOGIES[name]
    kinds = {name: kind for name, kind in typing.get_type_hints(function).items() if name != "return"}
    for argument, kind in kinds.items():
        for value in WRONG[next(iter({*typing.get_args(kind), kind} & {*WRONG}))]:
            with pytest.raises(ValueError, match=rf"^Expected .*\b{argument}\b.* got {argument}={re.escape(repr(value))}"):
                function(**{"nodes": 8} | {argument: value})


def test_numbers_of_numpy_and_jax_are_accepted():
    checks.number(least=0, most=2, a=np.float32(0.5), b=np.int8(2), c=jax.numpy.float32(1), d=np.array(1.5), e=2)
    checks.whole(1, a=np.int64(3), b=jax.numpy.int32(1), c=10**30)
    checks.truth(a=np.True_)
    for wrong in (np.array([1.0]), np.True_, 10**400, "1", [1]):
        with pytest.raises(ValueError, match="Expected a >= 0 and finite, got a="):
            checks.number(least=0, a=wrong)


@pytest.mark.first(5)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(optax.linear_schedule(0.0, 0.1, 10)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)),
        optax.multi_transform({"w": optax.sgd(0.1), "b": optax.set_to_zero()}, lambda params: {"linear": {"w": "w", "b": "b"}}),
        optax.polyak_sgd(),
        optax.lion(0.1),
        optax.MultiSteps(optax.sgd(0.1), 7).gradient_transformation(),
        lambda round: optax.sgd(0.1 * round.astype(float)),
    ],
)
def test_optimizers_that_descend_are_accepted(optimizer):
    with jax.numpy_dtype_promotion("standard"):  # required by some optimizers of optax
        fedavg(client_optimizer=optimizer, batches=fedsim.Batches(size=4, steps=7)).check(federation.data())


@pytest.mark.parametrize("noisy", [optax.noisy_sgd(0.1, key=0), optax.chain(optax.add_noise(1.0, 0.0, 0), optax.sgd(0.1))])
def test_noise_that_all_clients_would_share_is_refused(noisy):
    with pytest.raises(ValueError, match=r"^Expected client_optimizer without noise, got optax.add_noise .* all clients would"):
        fedavg(client_optimizer=noisy).check(federation.data())


def test_client_indices_out_of_range_raise_an_error():
    for index in (-1, 8):
        with pytest.raises(IndexError, match=f"Expected 0 <= index < 8, got index={index}"):
            federation.data().client(index)


@pytest.mark.slow
def test_more_lanes_than_clients_are_the_largest_cohort_s():
    slots = execution.rounded_slots(federation.data().num_clients)
    states = [train_with(fedsim.Jit(lanes=lanes)) for lanes in (1, slots, 100_000)]
    federation.assert_trees_equal(states[1], states[2])
    federation.assert_trees_close(states[0], states[2])  # XLA rounds differently where clients run side by side


def train_with(how):
    algorithm = fedavg(execution=how)
    return algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[0]


def test_a_run_folder_is_used_by_one_run_at_a_time(tmp_path):
    algorithm, data = fedavg(), federation.data()
    sampler = fedsim.UniformSampler(data, clients=3, seed=0)
    fedsim.experiment.run(algorithm, sampler, rounds=1, folder=tmp_path / "r", progress=False)
    with RunFolder(tmp_path / "r").lock(), pytest.raises(ValueError, match="is in use by another run"):
        fedsim.experiment.run(algorithm, sampler, rounds=1, folder=tmp_path / "r", progress=False)
    fedsim.experiment.run(algorithm, sampler, rounds=1, folder=tmp_path / "r", progress=False)


def test_an_error_in_a_user_s_file_has_file_and_line(tmp_path, capsys):
    from fedsim.commands import main

    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses, fedsim\n\n"
        "class Mine(fedsim.algorithms.FedAvg):\n"
        "    def client_loss(self, shared, params, batch):\n"
        "        raise ValueError('no luck')\n"
    )
    arguments = ["run", "--rounds", "1", "--clients", "2", "--no-progress", "--folder", str(tmp_path / "r")]
    assert main([*arguments, "--algorithm", f"{file}:Mine"]) == 2
    assert f"fedsim: error: {file}:5: ValueError: no luck" in capsys.readouterr().err
