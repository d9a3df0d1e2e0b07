"""The machine, the date and the versions that are recorded with every result."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import jax
import optax

from fedsim._version import __version__
from fedsim.experiment._environment import commit


def machine() -> dict[str, Any]:
    """Returns the processor, the accelerator, the date, the commit (``"none"`` outside a git checkout) and the versions.

    >>> sorted(machine())
    ['commit', 'cores', 'cpu', 'date', 'device', 'system', 'versions']
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit() or "none",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "system": platform.system(),
        "versions": {
            "fedsim": __version__,
            "jax": jax.__version__,
            "optax": optax.__version__,
            "python": platform.python_version(),
        },
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
