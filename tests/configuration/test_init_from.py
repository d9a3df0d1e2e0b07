"""Runs that start from the parameters of a file or of another run, and runs in half precision."""

import shutil

import jax
import numpy as np
import pytest
from small_run import SMALL

import fedsim
from fedsim.commands import main
from fedsim.configuration import RunConfig, Settings, build
from fedsim.experiment import read_config, restore


def started(folder):
    """Returns the configuration of a run and its algorithm, built from its folder."""
    config = RunConfig.from_json(read_config(folder)["config"])
    return config, build(config, Settings()).algorithm


def params_of(folder):
    return restore(folder, started(folder)[1])[0].params


def run(folder, *options):
    return main(["run", *SMALL, *options, "--folder", str(folder), "--no-progress"])


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    assert run(folder, "--averaging", "0.5") == 0  # so that state.params is not the server's
    return folder


@pytest.mark.slow
def test_a_run_starts_from_another_run_and_is_resumed(first, tmp_path, capsys):
    assert run(tmp_path / "whole", "--init-from", str(first), "--seed", "5") == 0
    config, algorithm = started(tmp_path / "whole")
    assert_same(algorithm.init(jax.random.key(9)).params, params_of(first))
    assert config.init_from.startswith(f"{first}/checkpoints/00000004#sha256=")
    assert run(tmp_path / "part", "--init-from", str(first), "--seed", "5", "--rounds", "2") == 0
    assert main(["resume", str(tmp_path / "part"), "--rounds", "4", "--no-progress"]) == 0
    assert_same(params_of(tmp_path / "part"), params_of(tmp_path / "whole"))
    capsys.readouterr()
    assert run(tmp_path / "whole", "--seed", "5") != 0
    assert "holds a run of another configuration" in capsys.readouterr().err


def test_a_run_starts_from_a_file_whose_content_belongs_to_the_run(first, tmp_path, capsys):
    arrays = fedsim.read_params(first)
    path = tmp_path / "a.npz"
    np.savez(path, **{f"old/{name}": value for name, value in arrays.items()})
    options = ["--init-from", str(path), "--init-map", "old/*=*", "--frozen", "linear/b", "--rounds", "2"]
    assert run(tmp_path / "r", *options) == 0
    np.testing.assert_array_equal(params_of(tmp_path / "r")["linear"]["b"], arrays["linear/b"])
    np.savez(path, **{f"old/{name}": value + 1 for name, value in arrays.items()})
    assert main(["resume", str(tmp_path / "r"), "--rounds", "3", "--no-progress"]) != 0
    assert "a.npz has changed since the run was configured" in capsys.readouterr().err


def test_wrong_options_are_refused(first, tmp_path):
    for options, message in [
        ({"init_map": "a=b"}, "Expected init_from with"),
        ({"init_from": str(first), "init_map": "linear/*"}, "rules OLD=NEW"),
        ({"init_from": str(tmp_path)}, "which has none"),
        ({"init_from": str(first), "algorithm": "ifca"}, "several models that must differ"),
        ({"init_from": str(first), "algorithm": "histogram"}, "has no model"),
        ({"init_from": str(first), "model": "digits_dense"}, r"linear_2/w: there is none, the model has float32 \[64, 10\]"),
        ({"precision": "half"}, "choice of precision"),
        ({"precision": 16}, "precision=16"),
        ({"loss_scale": 8.0}, "loss_scale with half precision"),
    ]:
        with pytest.raises(ValueError, match=message):
            build(RunConfig(**{"model": "digits_logistic", **options}), Settings())
    with pytest.raises(FileNotFoundError, match="There is no file"):
        RunConfig(init_from=str(tmp_path / "none.npz"))
    (tmp_path / "a.npz").write_bytes(b"nothing")
    (tmp_path / "a.safetensors").write_bytes(b"nothing at all")
    for name in ("a.npz", "a.safetensors"):
        with pytest.raises(fedsim.data.FormatError, match=f"{name} is no"):
            fedsim.read_params(tmp_path / name)


def test_a_damaged_checkpoint_is_not_read(first, tmp_path):
    shutil.copytree(first, tmp_path / "run")
    for manifest in (tmp_path / "run/checkpoints").glob("*/manifest.ocdbt"):  # a slow machine writes several checkpoints
        manifest.write_bytes(b"")
    with pytest.raises(fedsim.data.FormatError, match=r"manifest\.ocdbt is truncated or changed"):
        fedsim.read_params(tmp_path / "run")


@pytest.mark.slow
def test_parameters_of_a_run_have_all_parts_of_the_model(tmp_path):
    assert run(tmp_path / "r", "--kept", "linear/b", "--averaging", "0.5") == 0
    named = fedsim.read_params(tmp_path / "r")
    assert_same({"linear": {"w": named["linear/w"], "b": named["linear/b"]}}, params_of(tmp_path / "r"))


def test_a_run_in_half_precision():
    examples = {"x": np.full((2, 8, 8, 1), 3, np.uint8)}

    def outputs(**options):
        model = build(RunConfig(model="digits_dense", **options), Settings()).algorithm.model
        return np.asarray(model.apply_for_eval(model.init_whole(jax.random.key(0)), examples))

    half = fedsim.models.digits_dense().with_precision("bfloat16")
    expected = half.apply_for_eval(half.init(jax.random.key(0)), examples)
    np.testing.assert_array_equal(outputs(precision="bfloat16", loss_scale=4.0, frozen="linear/*"), expected)
    np.testing.assert_array_equal(outputs(precision="float32"), outputs())
    assert (outputs() != expected).any()


def test_a_network_that_computes_in_half_precision_itself_is_not_called_float32(tmp_path):
    (tmp_path / "own.py").write_text(
        "import fedsim\ndef half() -> fedsim.Model:\n    return fedsim.models.digits_dense().with_precision('bfloat16')\n"
    )
    with pytest.raises(ValueError, match="for precision='float32', got one that converts values to half precision itself"):
        build(RunConfig(model=f"{tmp_path}/own.py:half", precision="float32"), Settings())
