"""The processor time of each notebook in ``colab/``, on a CPU.

    python -m benchmarks.notebooks

Notebooks run one after another, from top to bottom, each in a process and an empty folder of its own, as in the test suite.
What is recorded is the time of the processor, user and system together, over all cores: other programs on the machine disturb
it less than the time of the clock. It includes importing and compiling. On an idle machine the clock shows less, because cores
work at the same time.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import jax
import nbformat
from nbclient import NotebookClient

from benchmarks.hardware import stamp

RESULT = Path(__file__).parent / "results" / "cpu-notebooks.json"
ROOT = Path(__file__).parents[1]


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    record: dict[str, Any] = {**stamp("cpu"), "jax": jax.__version__, "processor_seconds": {}}
    for path in sorted((ROOT / "colab").glob("*.ipynb")):
        record["processor_seconds"][path.stem] = round(processor_seconds(path), 1)
        print(path.stem, record["processor_seconds"][path.stem], flush=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


def processor_seconds(path: Path) -> float:
    """Returns the seconds that a run of a notebook takes of the processor, on all cores together."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=3600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
