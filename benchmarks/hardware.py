"""Describes the machine on which results are measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def stamp(device: str) -> dict[str, Any]:
    """Returns the hardware, system, date and commit, which every result records."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    code = (":(top)", ":(top,exclude)benchmarks/results", ":(top,exclude)docs")  # The results of tables that were measured before are no changes.
    changed = _output("git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", *code)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": (_output("git", "rev-parse", "HEAD") or "none") + (" with changes" if changed else ""),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "gpu": gpu if device == "gpu" else None,
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """Returns what a command prints, or "" if it does not exist or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
        return run.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
