"""Folders of small runs, which the tests of several commands read."""

from __future__ import annotations

import pytest
from small_run import SMALL

from fedsim.commands import main


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Creates a folder with a finished run of FedProx."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert main(["run", *SMALL, "--algorithm", "fedprox", "--mu", "0.5", "--folder", str(folder), "--no-progress"]) == 0
    return folder


_CUSTOM = '''
import dataclasses
from typing import Literal
import jax.numpy as jnp
from fedsim import Algorithm, ClientUpdate
from fedsim.algorithms import FedAvg

@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Shrinking(FedAvg):
    """FedAvg with a penalty.

    Attributes:
      penalty: how much large
        parameters cost.
    """
    penalty: float = 0.25
    norm: Literal["l1", "l2"] = "l2"
    def client_loss(self, shared, params, batch):
        squares = [jnp.sum(jnp.square(w)) for layer in params.values() for w in layer.values()]
        return super().client_loss(shared, params, batch) + self.penalty * sum(squares)

@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Counting(Algorithm):
    """No model, no optimizer, and a Python loop."""
    step: int = 1
    client_learning_rate: float = 0.0625
    def init(self, key): return jnp.zeros((), jnp.int32)
    def apply(self, state, cohort): return state + self.step * sum(1 for _ in cohort), {"clients": jnp.int32(len(cohort))}
'''


@pytest.fixture
def custom(tmp_path):
    (tmp_path / "custom.py").write_text(_CUSTOM)
    return tmp_path / "custom.py"


@pytest.fixture
def custom_run(custom, tmp_path):
    """Creates a run folder whose configuration names a Python file, which writes the file ``ran`` when it is executed."""
    custom.write_text(_CUSTOM + f"\nfrom pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    arguments = ["run", *SMALL, "--rounds", "1", "--algorithm", f"{custom}:Shrinking", "--no-progress"]
    assert main([*arguments, "--folder", str(tmp_path / "r")]) == 0
    (tmp_path / "ran").unlink()
    return tmp_path / "r"
