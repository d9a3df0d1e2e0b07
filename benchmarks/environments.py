"""The peers' environments: one venv each under ``benchmarks/.envs``, made by pip on first use and kept."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parent / ".envs"

TORCH, JAX = "torch==2.13.0", "jax==0.10.2"
CUDA = {JAX: "jax[cuda12]==0.10.2"}  # what is asked for instead on a GPU
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {  # each group is one pip call
    "fedjax": (("fedjax==0.0.17", JAX, "dm-haiku==0.0.17", "optax==0.2.8", "h5py==3.16.0", "numpy==2.4.6"),),
    "drjax": (("drjax==0.2.1", JAX, "dm-haiku==0.0.17", "optax==0.2.8", "numpy==2.4.6"),),
    "pfl": ((TORCH, "numpy==2.4.6"), ("pfl==0.6.0",)),  # PyTorch first: pfl alone would choose an older one
    "flower": (("flwr[simulation]==1.41.0", TORCH, "numpy==2.4.6"),),
}
SHARED = {"fedjax_catalogue": "fedjax"}  # contenders that live with another


def python(name: str, device: str) -> str:
    """The interpreter for a contender. Those without packages of their own run where fedsim is installed: here.

    pip takes its index and options from the user's own configuration. A venv that fails to install is not kept.
    """
    name = SHARED.get(name, name)
    if name not in PACKAGES:
        return sys.executable
    folder = FOLDER / (name if device == "cpu" else f"{name}-{device}")
    interpreter = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        print(f"installing {name}, once", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        for group in PACKAGES[name]:
            wanted = [CUDA.get(package, package) if device == "gpu" else package for package in group]
            subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *wanted], check=True)
        done.touch()
    return str(interpreter)
