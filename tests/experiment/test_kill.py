"""kill -9 at random moments, many times over one run: it goes on, and ends with the same bits as an unbroken run."""

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

# What a run imports, which is most of a short life: done once, by the process that the others are forked from.
_IMPORTED = ["fedsim", "matplotlib.pyplot", "orbax.checkpoint", "tensorboardX"]
# Seconds between rounds: so long that the lives, five seconds in all, are over before the run is, however fast its rounds.
_PAUSE = 0.03


def _start(*arguments: object) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    process = context.Process(target=killed_run.run, args=arguments)
    process.start()
    return process


def _finish(*arguments: object) -> None:
    process = _start(*arguments)
    process.join(timeout=120)
    assert process.exitcode == 0, process


def _saved(folder: Path) -> int:
    """The round of the newest checkpoint."""
    return max(Checkpoints(folder / "checkpoints").rounds(), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "rounds", "kills"), [("fedavg", 250, 20), ("drifting", 100, 3)])
def test_killed_many_times_ends_with_the_bits_of_an_unbroken_run(algorithm, rounds, kills, tmp_path):
    unbroken, folder, cache = (tmp_path / name for name in ("unbroken", "killed", "cache"))
    _finish(algorithm, rounds, unbroken, cache, 0.0)

    draw, lives = random.Random(2), []
    for life in range(kills):
        process, before = _start(algorithm, rounds, folder, cache, _PAUSE), _saved(folder)
        # Every fifth life may end before it did anything; the others save at least once, and mostly die while saving.
        while life % 5 and _saved(folder) == before and process.is_alive():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.2 if life % 5 else 1.0))
        assert process.is_alive(), f"ended by itself in life {life}: {process}"
        process.kill()
        process.join()
        lives.append(_saved(folder))
    assert lives == sorted(lives) and len(set(lives)) > kills // 2, lives
    _finish(algorithm, rounds, folder, cache, 0.0)
    assert folder.with_suffix(".bits").read_text() == unbroken.with_suffix(".bits").read_text()
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line["round"] for line in lines if "loss" in line]
    assert trained == list(range(1, len(trained) + 1))
