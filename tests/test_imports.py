"""What `import fedsim` and the command line load, and that everything else is there when it is used."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import fedsim

# Libraries that only some functions need, and packages of fedsim that many programs do not use.
HEAVY = {
    "array_record",
    "dp_accounting",
    "equinox",
    "flax",
    "h5py",
    "jax_privacy",
    "keras",
    "matplotlib",
    "mlflow",
    "msgpack",
    "networkx",
    "orbax",
    "pandas",
    "psutil",
    "pyarrow",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboardX",
    "tensorflow_datasets",
    "tqdm",
    "tyro",
    "wandb",
    "fedsim.algorithms",
    "fedsim.datasets",
    "fedsim.decentralized",
    "fedsim.deployment",
    "fedsim.experiment",
    "fedsim.formats",
    "fedsim.models",
    "fedsim.planning",
    "fedsim.plots",
    "fedsim.privacy",
    "fedsim.systems",
    "fedsim.vertical",
}
# Those without which the options of a run cannot be listed.
OPTIONS_OF_A_RUN = {
    "h5py",
    "msgpack",
    "tqdm",
    "tyro",
    "fedsim.algorithms",
    "fedsim.datasets",
    "fedsim.experiment",
    "fedsim.formats",
    "fedsim.models",
    "fedsim.plots",
    "fedsim.systems",
}

_LOADED = """
import contextlib, sys
with contextlib.suppress(SystemExit):
    exec(sys.argv[1])
print("\\nLOADED", *sys.modules)
"""
# What most programs use.
CORE = "fedsim.Algorithm, fedsim.FederatedData, fedsim.UniformSampler, fedsim.Model, fedsim.Jit, fedsim.evaluate"


@functools.cache
def loaded_by(code: str) -> set[str]:
    """Returns the modules that a fresh process loads."""
    root, process = Path(fedsim.__file__).parents[1], [sys.executable, "-c", _LOADED, code]
    done = subprocess.run(process, capture_output=True, text=True, check=True, timeout=600, cwd=root)
    return set(done.stdout.splitlines()[-1].split()[1:])


def command(*arguments: str) -> str:
    return f"from fedsim.commands import main; main({list(arguments)})"


@pytest.mark.parametrize("code", ["import fedsim; dir(fedsim)", command("--help"), command("--version"), command("rum")])
def test_these_do_not_even_load_jax(code):
    loaded = loaded_by(code)
    assert "fedsim" in loaded and {"jax", "numpy", "haiku", "optax", *HEAVY} & loaded == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "needed"),
    [
        (f"import fedsim; {CORE}", set()),
        ("import fedsim; fedsim.algorithms, fedsim.models", {"fedsim.algorithms", "fedsim.models"}),
        (command("run", "--help"), OPTIONS_OF_A_RUN),
    ],
)
def test_only_what_is_needed_is_loaded(code, needed):
    """Besides what JAX, Haiku and optax load. Haiku loads Flax if this is installed, and Flax loads msgpack."""
    others = loaded_by("import jax, haiku, optax")
    loaded = loaded_by(code) - others
    assert "fedsim.execution" in loaded and HEAVY & loaded == needed - others
    assert not any(name.startswith("fedsim.reproductions") for name in loaded)


def names_for_type_checkers() -> set[str]:
    body = ast.parse(Path(fedsim.__file__).read_text(encoding="utf-8")).body
    (guarded,) = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {alias.asname for node in guarded.body for alias in node.names}


def test_what_type_checkers_see_is_there_and_is_completed():
    names = names_for_type_checkers()
    assert names >= {"datasets", "decentralized", "experiment", "population", "plan"}
    assert names <= set(dir(fedsim)) and sorted(dir(fedsim)) == dir(fedsim)
    assert [name for name in names if not hasattr(fedsim, name)] == []
    assert fedsim.population is fedsim.sweeps.population


def test_every_public_submodule_and_exported_name_is_seen_by_type_checkers():
    # These have no public names of their own: the first two are those of fedsim itself, the next are for its own modules, and
    # the last is above fedsim.
    others = {
        "algorithm",
        "model",
        "checks",
        "commands",
        "descriptions",
        "durable_files",
        "names",
        "pinned_files",
        "run_files",
        "saved_arrays",
        "text_files",
        "reproductions",
    }
    assert names_for_type_checkers() == (fedsim._SUBMODULES - others) | set(fedsim._EXPORTED_BY)


def test_a_name_that_does_not_exist_is_an_error():
    with pytest.raises(AttributeError, match="module 'fedsim' has no attribute 'experiments'"):
        _ = fedsim.experiments
    with pytest.raises(ImportError, match="cannot import name 'FedAvg'"):
        exec("from fedsim import FedAvg")
