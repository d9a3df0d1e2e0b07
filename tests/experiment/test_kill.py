"""kill -9 at random moments, many times over one run: it goes on, and ends with the same bits as an unbroken run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedsim
from fedsim.experiment import Checkpoints

PROGRAM = Path(__file__).with_name("killed_run.py")


def _start(algorithm: str, folder: Path, cache: Path, pause: float) -> subprocess.Popen[str]:
    package = str(Path(fedsim.__file__).parents[1])  # installed or not
    cached = dict(JAX_COMPILATION_CACHE_DIR=str(cache), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    environment = {**os.environ, **cached, "PYTHONPATH": package}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), str(pause), algorithm],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _saved(folder: Path) -> int:
    """The round of the newest checkpoint."""
    return max(Checkpoints(folder / "checkpoints").rounds(), default=0)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "kills"), [("fedavg", 20), ("remembering", 3)])
def test_killed_many_times_ends_with_the_bits_of_an_unbroken_run(algorithm, kills, tmp_path):
    cache = tmp_path / "cache"
    unbroken = _start(algorithm, tmp_path / "unbroken", cache, pause=0.0)
    expected, error = unbroken.communicate(timeout=120)
    assert unbroken.returncode == 0, error

    draw, folder, lives = random.Random(2), tmp_path / "killed", []
    for life in range(kills):
        process, before = _start(algorithm, folder, cache, pause=0.01), _saved(folder)
        # Every fifth life may end before it did anything; the others save at least once, and mostly die while saving.
        while life % 5 and _saved(folder) == before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.2 if life % 5 else 1.0))
        assert process.poll() is None, f"ended by itself in life {life}: {process.communicate()}"
        process.kill()
        process.communicate()
        lives.append(_saved(folder))
    assert lives == sorted(lives) and len(set(lives)) > kills // 2, lives
    last = _start(algorithm, folder, cache, pause=0.0)
    actual, error = last.communicate(timeout=120)
    assert last.returncode == 0, error
    assert actual == expected
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line["round"] for line in lines if "loss" in line]
    assert trained == list(range(1, len(trained) + 1))
