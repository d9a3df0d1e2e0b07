"""The notebooks run top to bottom on embedded and generated data, and what is committed is what they give."""

import os
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
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


def test_all_notebooks_are_there():
    assert {path.stem for path in NOTEBOOKS} == {
        *("quickstart", "custom_algorithm", "datasets", "unlike_clients", "compression_and_attacks"),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook's client; what the notebook itself warns of is on its stderr
def test_notebook_runs_top_to_bottom_within_a_minute(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook, began = read(path), time.perf_counter()
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert time.perf_counter() - began < 60
    assert [out.text for out in outputs(notebook, "stream") if out.name == "stderr"] == []
    assert pictures(notebook) == pictures(read(path)) >= 3
    assert list(tmp_path.iterdir()) == []


def test_notebook_is_committed_as_it_ran(path):
    """In order, with pictures, without errors, and without a path of the machine it ran on."""
    notebook = read(path)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not outputs(notebook, "error")
    assert pictures(notebook) >= 3
    for out in outputs(notebook, "stream"):
        assert out.name == "stdout"
        assert "/home/" not in out.text and "/tmp/" not in out.text


def test_notebook_opens_in_colab_and_installs_itself(path):
    cells = read(path).cells
    address = f"https://colab.research.google.com/github/fedsim/fedsim/blob/main/colab/{path.name}"
    assert f"]({address})" in cells[0].source.splitlines()[0]
    first_code = next(cell.source for cell in cells if cell.cell_type == "code")
    assert "%pip install" in first_code and "fedsim.use_all_cores()" in first_code
