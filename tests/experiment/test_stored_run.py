"""Runs that are read from their folders, evaluated and exported."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import fedsim
from fedsim.commands import main
from fedsim.experiment import load

RUN = ["run", "--dataset", "digits(clients=10)", "--algorithm", "ditto", "--rounds", "4", "--clients", "5", "--no-progress"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "ditto"
    assert main([*RUN, "--evaluate-every", "2", "--folder", str(path)]) == 0
    return path


@pytest.mark.slow
def test_a_run_as_an_object(folder):
    run = load(folder)
    assert run.round == 4 and run.config.clients == 5 and type(run.algorithm).__name__ == "Ditto"
    assert (run.train_data.num_clients, run.test_data.num_clients) == (10, 10)
    last = run.history[-1]
    found = run.evaluate()
    assert found.overall == {name: last[f"test_{name}"] for name in found.overall} and "personal_loss" in found.overall
    own = run.evaluate(personalized=True).overall
    assert own == {name: last[f"test_personal_{name}"] for name in own}
    table = run.metrics()
    assert len(table["round"]) == len(run.history) and np.isnan(table["test_loss"][0])
    assert table["test_loss"][-1] == last["test_loss"] and table["round"].tolist()[-2:] == [4, 4]
    params = fedsim.read_params(folder)
    for name, layer in run.state.server.params.items():
        np.testing.assert_array_equal(layer["w"], params[f"{name}/w"])


def test_a_run_that_was_started_in_python_is_refused(tmp_path):
    data = fedsim.datasets.load("digits(clients=5)").train
    algorithm = fedsim.algorithms.Histogram(bins=2)
    sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    fedsim.experiment.run(algorithm, sampler, rounds=1, folder=tmp_path / "own", progress=False)
    with pytest.raises(ValueError, match=r"was started in Python.*fedsim\.experiment\.restore"):
        load(tmp_path / "own")


@pytest.mark.slow
def test_evaluate(folder, capsys):
    assert main(["evaluate", str(folder)]) == 0
    printed = capsys.readouterr().out
    last = load(folder).history[-1]
    assert "after round 4" in printed and f"{last['test_accuracy']:.4f}" in printed
    assert main(["evaluate", str(folder), "--split", "train"]) == 0
    assert "train data, 1,437 examples of 10 clients" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("file", ["a.npz", "a.safetensors"])
def test_export(folder, tmp_path, file, capsys):
    assert main(["export", str(folder), str(tmp_path / file)]) == 0
    assert "17,226 numbers, after round 4" in capsys.readouterr().out
    read = load_file if file.endswith("safetensors") else lambda path: dict(np.load(path))
    written, params = read(tmp_path / file), fedsim.read_params(folder)
    assert written.keys() == params.keys()
    for name in params:
        np.testing.assert_array_equal(written[name], params[name])


def test_files_that_cannot_hold_the_parameters(folder, tmp_path, capsys):
    assert main(["export", str(folder), str(tmp_path / "a.txt")]) == 2
    assert "Expected a file with the suffix .npz or .safetensors" in capsys.readouterr().err
    half = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    with pytest.raises(ValueError, match="got bfloat16 for w: write a .safetensors file"):
        fedsim.write_params(tmp_path / "a.npz", half)
    fedsim.write_params(tmp_path / "a.safetensors", half)
    assert fedsim.read_params(tmp_path / "a.safetensors")["w"].dtype == jnp.bfloat16
