"""A run that is killed by SIGKILL at random times and resumed ends with the same bits as an uninterrupted run."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import killed_run
import pytest

from fedsim.experiment import Checkpoints

# Imports take most of the time of a short process, so the process from which the others are forked imports these modules.
_IMPORTED = ["fedsim", "matplotlib.pyplot", "orbax.checkpoint", "tensorboardX"]
# Seconds between rounds, chosen so that the run does not end before all kills, which take five seconds in total.
_PAUSE = 0.03


def _start(*arguments: object) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    process = context.Process(target=killed_run.run, args=arguments)
    process.start()
    return process


def _finish(*arguments: object) -> None:
    process = _start(*arguments)
    process.join(timeout=600)
    assert process.exitcode == 0, process


def _saved(folder: Path) -> int:
    """Returns the round of the newest checkpoint."""
    return max(Checkpoints(folder / "checkpoints").rounds(), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "rounds", "kills"), [("fedavg", 250, 20), ("drifting", 100, 3)])
def test_killed_many_times_ends_with_the_bits_of_an_unbroken_run(algorithm, rounds, kills, tmp_path):
    unbroken, folder, cache = (tmp_path / name for name in ("unbroken", "killed", "cache"))
    _finish(algorithm, rounds, unbroken, cache, 0.0)

    draw, saved = random.Random(2), []
    for attempt in range(kills):
        process, before = _start(algorithm, rounds, folder, cache, _PAUSE), _saved(folder)
        # Every fifth process may be killed before it saves; the others save at least once, and most are killed while saving.
        while attempt % 5 and _saved(folder) == before and process.is_alive():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.2 if attempt % 5 else 1.0))
        assert process.is_alive(), f"process {attempt} ended before it was killed: {process}"
        process.kill()
        process.join()
        saved.append(_saved(folder))
    assert saved == sorted(saved) and len(set(saved)) > kills // 2, saved
    _finish(algorithm, rounds, folder, cache, 0.0)
    assert folder.with_suffix(".bits").read_text() == unbroken.with_suffix(".bits").read_text()
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line["round"] for line in lines if "loss" in line]
    assert trained == list(range(1, len(trained) + 1))
