"""Examples that arrive by round: the same as a NumPy loop on what has arrived, wherever the examples are stored."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.experiment import run
from fedsim.samplers import Arriving, Stragglers, UniformSampler

RATE, ROUNDS = 0.5, 4
SIZES = [5, 0, 12, 7, 3, 9]


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(sum(SIZES), 4)).astype(np.float32)
    return fedsim.FederatedData.from_arrays({"x": x, "y": np.argmax(x[:, :3], 1).astype(np.int32)}, sizes=SIZES)


@pytest.fixture(scope="module")
def arrival():
    draw = np.random.default_rng(1)
    return np.concatenate([np.sort(draw.integers(0, ROUNDS, size)) for size in SIZES])


@pytest.fixture(scope="module")
def make():
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.Linear(3, w_init=hk.initializers.Constant(0.0))(examples["x"])),
        features={"x": jax.ShapeDtypeStruct((4,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)},
        num_classes=3,
    )

    def make(execution=None, cls=fedsim.algorithms.FedAvg, **changes):
        fields = dict(model=model, client_optimizer=optax.sgd(RATE), batches=fedsim.Batches(size=20, shuffle=False))
        return cls(**fields | changes, execution=execution or fedsim.Jit())

    return make


def expected(data, sampler, arrival, last):
    """One step of each client on what it has, averaged by its number of examples; returns weights and bias."""
    w, b = np.zeros((4, 3)), np.zeros(3)
    for round in range(ROUNDS):
        total, steps = 0, []
        for client in sampler.cohort(round).clients:
            of_client = slice(*data.offsets[client : client + 2])
            exists = arrival[of_client] <= round
            if last is not None:
                exists &= arrival[of_client] > round - last
            x, y = data.columns["x"][of_client][exists].astype(np.float64), data.columns["y"][of_client][exists]
            if not len(x):
                continue
            logits = x @ w + b
            error = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - np.eye(3)[y]
            steps.append((-RATE * x.T @ error, -RATE * error.sum(0)))  # times the client's number of examples
            total += len(x)
        w, b = (value + sum(step[i] for step in steps) / max(total, 1) for i, value in enumerate((w, b)))
    return w, b


EXECUTIONS = {
    "jit": lambda: fedsim.Jit(),
    "streamed": lambda: fedsim.Pmap(devices=2, memory="stream"),
    "groups": lambda: fedsim.Jit(lanes=4),
    "eight devices": lambda: fedsim.Pmap(devices=8),
    "debug": lambda: fedsim.Debug(),
}


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("how", "last"), [("streamed", 2), ("jit", None), ("debug", 2), ("groups", 2), ("eight devices", None), ("jit", 2)]
)
def test_rounds_equal_a_numpy_loop_on_what_has_arrived(how, last, data, arrival, make):
    uniform = UniformSampler(data, clients=4, seed=3)
    sampler, algorithm = Arriving(uniform, arrival, last=last), make(EXECUTIONS[how]())
    state, counted = algorithm.init(jax.random.key(0)), []
    for cohort in sampler.rounds(ROUNDS):
        state, info = algorithm.apply(state, cohort)
        counted.append(np.asarray(info.clients["num_examples"])[: len(cohort)])
        assert counted[-1].tolist() == cohort.sizes.tolist() == [len(dataset) for _, dataset, _ in cohort]
    w, b = expected(data, uniform, arrival, last)
    np.testing.assert_allclose(state.params["linear"]["w"], w, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["linear"]["b"], b, rtol=2e-5, atol=1e-6)
    assert 0 in counted[0] and np.sum(counted[-1]) > np.sum(counted[0])


def test_the_program_for_audits_reads_the_same_examples(data, arrival, make):
    cohort = Arriving(UniformSampler(data, clients=4, seed=3), arrival, last=2).cohort(3)
    algorithm = make()
    state = algorithm.init(jax.random.key(0))
    one = algorithm.apply(state, cohort)[0]
    program, arguments = fedsim.execution.federated_round(algorithm, state, cohort)
    other = program(*arguments)[0]
    np.testing.assert_allclose(one.params["linear"]["w"], other.params["linear"]["w"], rtol=1e-6, atol=1e-7)


def test_an_interrupted_run_ends_with_the_same_bits_and_other_arrivals_are_another_run(data, arrival, make, tmp_path):
    def fail(line, state):
        if line["round"] == 3:
            raise RuntimeError("stop")

    algorithm = make()
    given = dict(algorithm=algorithm, rounds=ROUNDS, progress=False, rounds_per_dispatch=1, checkpoint_every=1, writers="none")
    sampler = Arriving(UniformSampler(data, clients=4, seed=3), arrival)
    with pytest.raises(RuntimeError, match="stop"):
        run(**given, sampler=sampler, folder=tmp_path / "r", callbacks=[fail])
    others = Arriving(UniformSampler(data, clients=4, seed=3), np.maximum(arrival, 1))
    with pytest.raises(ValueError, match="holds a run of another configuration"):
        run(**given, sampler=others, folder=tmp_path / "r")
    states = [run(**given, sampler=sampler, folder=folder).state for folder in (tmp_path / "r", None)]
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(states[0])] == [
        np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(states[1])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("last", [None, 1])
def test_personal_models_are_those_by_the_examples_of_the_last_round(last, data, arrival, make):
    exists = (arrival <= 1) & (last is None or arrival > 1 - last)
    cut = fedsim.FederatedData.from_arrays(
        {name: column[exists] for name, column in data.columns.items()},
        sizes=[int(own.sum()) for own in np.split(exists, np.cumsum(SIZES)[:-1])],
    )
    sampler = Stragglers(Arriving(UniformSampler(data, clients=4, seed=0), arrival, last=last), fraction=0.5, epochs=2)
    algorithm = make(cls=fedsim.algorithms.PerFedAvg)
    found = run(algorithm, sampler, rounds=2, test_data=data, progress=False)
    expected, of_all = (fedsim.evaluate_personalized(algorithm, found.state, train, data) for train in (cut, data))
    loss = found.evaluation.overall["personal_loss"]
    assert loss == pytest.approx(expected.overall["loss"], rel=1e-5) and abs(loss - of_all.overall["loss"]) > 1e-3
    of_members = fedsim.population(lambda: algorithm, {}, seeds=1, sampler=lambda seed: sampler, rounds=2, test_data=data)
    assert of_members.evaluation["test_personal_loss"].item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_rounds_before_the_first_arrival_count_for_personal_models(data, make):
    """They change no state, so its number of rounds is smaller than that of the finished rounds."""
    late = Arriving(UniformSampler(data, clients=4, seed=0), np.full(data.num_examples, 3))
    algorithm = make(cls=fedsim.algorithms.PerFedAvg)
    found = run(algorithm, late, rounds=5, test_data=data, progress=False)
    expected = fedsim.evaluate_personalized(algorithm, found.state, data, data).overall["loss"]
    assert found.evaluation.overall["personal_loss"] == pytest.approx(expected, rel=1e-5)


def test_stragglers_that_are_dropped_leave_the_others_their_examples(data, arrival):
    arriving = Arriving(UniformSampler(data, clients=4, seed=3), arrival)
    kept, whole = Stragglers(arriving, fraction=0.5, epochs=2, drop=True).cohort(2), arriving.cohort(2)
    rows = {int(client): whole.rows[at].tolist() for at, client in enumerate(whole.clients)}
    assert len(kept) == 2 and [rows[int(client)] for client in kept.clients] == kept.rows.tolist()


def test_what_cannot_be_right_is_refused(data, arrival, make):
    uniform = UniformSampler(data, clients=4, seed=3)
    with pytest.raises(ValueError, match="Expected arrival that does not decrease within a client, got 3 and then 2 of client"):
        Arriving(uniform, [0, 3, 2, 3, 3, *[0] * (sum(SIZES) - 5)])
    with pytest.raises(ValueError, match=r"Expected arrival int \[36\], a round for each example, got float64 \[36\]"):
        Arriving(uniform, arrival / 2)
    with pytest.raises(ValueError, match="last=0"):
        Arriving(uniform, arrival, last=0)
    arriving = Arriving(uniform, arrival)
    with pytest.raises(ValueError, match="got Arriving: leave one out"):
        Arriving(arriving, arrival).cohort(0)
    with pytest.raises(ValueError, match="on a virtual clock they have no time"):
        fedsim.systems.schedule(arriving, 2, steps=np.ones(len(SIZES), int))
    planned = fedsim.systems.ScheduledSampler(uniform, fedsim.systems.schedule(uniform, 2, steps=np.ones(len(SIZES), int)))
    with pytest.raises(ValueError, match="neither scales updates nor starts clients from earlier models, got ScheduledSampler"):
        Arriving(planned, arrival).cohort(0)
    diloco = make(cls=fedsim.algorithms.DiLoCo, batches=fedsim.Batches(size=2, steps=2))
    with pytest.raises(ValueError, match="The clients of DiLoCo go on to read their examples in the order of earlier rounds"):
        diloco.apply(diloco.init(jax.random.key(0)), arriving.cohort(0))
    with pytest.raises(ValueError, match="first <= stop <= its number of examples"):
        fedsim.Cohort(data, np.array([0]), 0, uniform.key, rows=np.array([[0, 6]]))
