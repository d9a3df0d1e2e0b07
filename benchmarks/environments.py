"""The virtual environments of the other libraries, one each under ``benchmarks/.envs``, created by pip on first use."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parent / ".envs"

TORCH, JAX = "torch==2.13.0", "jax==0.10.2"
CUDA = {JAX: "jax[cuda12]==0.10.2"}  # replacements on a GPU
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {  # each group is one pip call
    "fedjax": (("fedjax==0.0.17", JAX, "dm-haiku==0.0.17", "optax==0.2.8", "h5py==3.16.0", "numpy==2.4.6"),),
    "drjax": (("drjax==0.2.1", JAX, "dm-haiku==0.0.17", "optax==0.2.8", "numpy==2.4.6"),),
    "pfl": ((TORCH, "numpy==2.4.6"), ("pfl==0.6.0",)),  # PyTorch first, because pfl alone installs an older one
    "torch": ((TORCH, "numpy==2.4.6"),),
    "flower": (("flwr[simulation]==1.41.0", TORCH, "numpy==2.4.6"),),
}
SHARED = {"fedjax_catalogue": "fedjax"}  # contenders that use another's environment


def python(name: str, device: str) -> str:
    """Returns the interpreter for a contender. Contenders without packages of their own use this process's interpreter.

    pip takes its index and options from the user's configuration. An environment whose installation failed is created again
    at the next call.
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
