"""What users get wrong is named, and never computed on."""

import federation
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim.experiment._folder import lock

X = np.zeros([3, 3], np.float32)


def population(**columns):
    return fedsim.FederatedData.from_arrays(columns, sizes=[1, 2])


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda: train(data=population(x=X, y=np.zeros(3, ">i4"))), "'y' has dtype >i4"),
        (lambda: train(data=population(x=X, y=np.zeros(3, int), z=np.array(["a", "b", "c"]))), "'z' has dtype <U1"),
        (lambda: fedsim.FederatedData({"x": [1, 2]}, np.array([0, 2]), ["a"]), "'x' must be a NumPy array"),
        (lambda: fedsim.FederatedData({"x": np.zeros(2)}, np.array([0, 1.5]), ["a"]), "Expected integer offsets"),
        (lambda: fedsim.FederatedData.from_partition({"y": [5, 6]}, [np.array([False, True])]), "integer indices for client 0"),
        (lambda: fedsim.Cohort.of(federation.data(), ["client0"], round=-1), "Expected 0 <= round"),
        (lambda: fedsim.Jit(lanes=2.5), "Expected lanes >= 1"),
        (lambda: fedsim.Pmap(devices=[0]), "Expected devices >= 1"),
        (lambda: fedavg(execution="jit"), "Expected execution to be one of fedsim's"),
        (lambda: train(fedsim.Batches(size=2**20, epochs=2**29, max_steps=1)), "go beyond 2\\*\\*31 examples"),
        (
            lambda: train(client_optimizer=optax.sgd(-1.0)),
            "Expected client_optimizer to descend, .* its first step .*: \\+1 in the mean",
        ),
        (lambda: train(client_optimizer=optax.lion(-0.1)), "Expected client_optimizer to descend"),
        (lambda: train(client_optimizer=optax.sgd(np.nan)), "Expected client_optimizer to descend"),
        (lambda: train(client_optimizer=lambda round: optax.sgd(-0.1)), "Expected client_optimizer to descend"),
        (lambda: train(server_optimizer=optax.sgd(-1.0)), "Expected server_optimizer to descend"),
        (
            lambda: train(server_optimizer=optax.sgd(0.0)),
            "server_optimizer to descend, and its first 100 steps .*: \\+0 in the mean",
        ),
        (lambda: train(client_optimizer=optax.lion(0.0)), "Expected client_optimizer to descend"),
        (lambda: train(fedsim.Batches(size=2**20, steps=2**12)), "go beyond 2\\*\\*31 examples"),
    ],
)
def test_misuse_is_named(misuse, message):
    with pytest.raises(ValueError, match=message):
        misuse()


def fedavg(**changes):
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}
    return fedsim.algorithms.FedAvg(**(settings | changes))


def train(batches=None, data=None, **changes):
    algorithm = fedavg(batches=batches or fedsim.Batches(size=4), **changes)
    return algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(data))


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
        optax.chain(optax.clip_by_global_norm(0.5), optax.add_noise(1.0, 0.0, 0), optax.sgd(0.1)),
    ],
)
def test_optimizers_that_descend_are_let_through(optimizer):
    with jax.numpy_dtype_promotion("standard"):  # optax.add_noise asks for it.
        train(client_optimizer=optimizer)


def test_positions_out_of_range():
    for index in (-1, 8):
        with pytest.raises(IndexError, match=f"Expected 0 <= index < 8, got index={index}"):
            federation.data().client(index)
    with pytest.raises(TypeError):
        fedsim.UniformSampler(federation.data(), clients=1.5, seed=0)


def test_more_lanes_than_clients_are_not_made():
    states = [train_with(fedsim.Jit(lanes=lanes)) for lanes in (8, 100_000)]
    federation.assert_trees_equal(*states)


def train_with(execution):
    algorithm = fedavg(execution=execution)
    return algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[0]


def test_a_run_folder_is_held_by_one_run_at_a_time(tmp_path):
    algorithm, data = fedavg(), federation.data()
    sampler = fedsim.UniformSampler(data, clients=3, seed=0)
    fedsim.experiment.run(algorithm, sampler, rounds=1, folder=tmp_path / "r", progress=False)
    with lock(tmp_path / "r"), pytest.raises(ValueError, match="is in use by another run"):
        fedsim.experiment.run(algorithm, sampler, rounds=1, folder=tmp_path / "r", progress=False)
    fedsim.experiment.run(algorithm, sampler, rounds=1, folder=tmp_path / "r", progress=False)


def test_an_error_in_a_user_s_file_says_where(tmp_path, capsys):
    from fedsim.cli import main

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
