"""The notebooks run from top to bottom on embedded and generated data, and are committed with their outputs."""

import fnmatch
import glob
import importlib.machinery
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
import types
from pathlib import Path

import jax
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

import fedsim
from benchmarks import readme

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def outputs(notebook, kind):
    return [out for cell in notebook.cells for out in cell.get("outputs", []) if out.output_type == kind]


def pictures(notebook):
    shown = outputs(notebook, "display_data") + outputs(notebook, "execute_result")
    return sum("image/png" in out["data"] for out in shown)


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_all_notebooks_exist():
    assert {path.stem for path in NOTEBOOKS} == {
        *("quickstart", "custom_algorithm", "datasets", "heterogeneous_clients", "compression_and_attacks"),
        *("differentiate", "asynchronous", "decentralized", "privacy"),
    }


def test_every_notebook_says_how_long_it_takes():
    """The page of notebooks has the same seconds (``tests/test_readme.py``)."""
    seconds = json.loads((readme.RESULTS / "cpu-notebooks.json").read_text())["processor_seconds"]
    assert set(seconds) == {path.stem for path in NOTEBOOKS}
    assert len(re.findall(r"\| \d+ s \|$", readme.notebooks(), re.MULTILINE)) == len(NOTEBOOKS)
    for path in NOTEBOOKS:
        assert f"A run takes {seconds[path.stem]:.0f} s of a CPU, all cores added up;" in read(path).cells[0].source


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # nbclient itself warns; the notebook's warnings are on its stderr, which is checked
def test_notebook_runs_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = read(path)
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [out.text for out in outputs(notebook, "stream") if out.name == "stderr"] == []
    assert pictures(notebook) == pictures(read(path)) >= 3
    assert list(tmp_path.iterdir()) == []


def test_notebook_is_committed_with_the_outputs_of_a_complete_run(path):
    """The cells ran in order, with pictures and without errors, and no output has a path of the machine."""
    notebook = read(path)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not outputs(notebook, "error")
    assert pictures(notebook) >= 3
    for out in outputs(notebook, "stream"):
        assert out.name == "stdout"
        assert "/home/" not in out.text and "/tmp/" not in out.text


def test_notebook_opens_in_colab_and_installs_itself_from_the_tag_of_this_version(path):
    cells = read(path).cells
    on_github, tag = REPOSITORY.removeprefix("https://github.com/"), f"v{fedsim.__version__}"
    address = f"https://colab.research.google.com/github/{on_github}/blob/{tag}/colab/{path.name}"
    assert f"]({address})" in cells[0].source.splitlines()[0]
    first_code = next(cell.source for cell in cells if cell.cell_type == "code")
    assert f"git+{REPOSITORY}@{tag}" in first_code and "fedsim.use_all_cores()" in first_code


def test_notebook_has_an_exercise_before_its_last_links(path):
    last = read(path).cells[-1].source
    assert "## Exercise" in last and "https://" in last.partition("## Exercise")[2]


def test_first_cell_says_that_another_project_is_installed(monkeypatch):
    cell = next(cell.source for cell in read(NOTEBOOKS[0]).cells if cell.cell_type == "code")
    other = types.ModuleType("fedsim")
    other.__spec__ = importlib.machinery.ModuleSpec("fedsim", None)
    monkeypatch.setitem(sys.modules, "fedsim", other)
    with pytest.raises(AssertionError, match="another project"):
        InteractiveShell().run_cell(cell).raise_error()


@pytest.mark.filterwarnings("ignore:JAX had already started")  # tests run on eight devices
@pytest.mark.parametrize(
    ("device", "extra"),
    [(None, "jax"), ("nvidia-smi", "jax[cuda12]"), ("/dev/accel0", "jax[tpu]"), ("/dev/vfio/0", "jax[tpu]")],
)
def test_first_cell_installs_jax_for_the_device_and_prints_the_devices(device, extra, monkeypatch, capsys):
    """pip leaves the plugin of an older JAX as it is, unless JAX is named with its extra; then JAX uses the CPU."""
    (cell,) = {next(cell.source for cell in read(path).cells if cell.cell_type == "code") for path in NOTEBOOKS}
    shell, installed = InteractiveShell(), []
    shell.register_magic_function(lambda line: installed.append(shlex.split(line)), "line", "pip")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == device else None)
    monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter([device or ""], pattern))
    shell.run_cell(cell).raise_error()
    assert installed == [["install", "--quiet", extra, f"fedsim-jax[run] @ git+{REPOSITORY}@v{fedsim.__version__}"]]
    assert f"JAX {jax.__version__} on {jax.devices()[0]}" in capsys.readouterr().out
