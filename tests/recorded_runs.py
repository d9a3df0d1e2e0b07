"""Run folders that are written by hand, without training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedsim.comparison import RecordedRun


def write_run(folder, accuracies, *, seed=0, algorithm="fedavg", rounds=None, **fields):
    """Writes the folder of a run with an accuracy after each round; keywords are fields of its configuration."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    rounds = len(accuracies) if rounds is None else rounds
    config = {"dataset": "digits", "algorithm": algorithm, "rounds": rounds, "seed": seed, "hyperparameters": {}, **fields}
    (folder / "config.json").write_text(json.dumps({"config": config, "settings": {}}))
    lines = []
    for round, accuracy in enumerate(accuracies, 1):
        lines.append({"round": round, "bits_up": 8_000_000, "bits_down": 16_000_000, "seconds": 0.5})
        lines.append({"round": round, "test_accuracy": accuracy})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def recorded(value, *, seed=0, validation=None, rounds=1, **fields):
    """Returns a run with one evaluation; keywords are fields of its configuration."""
    line = {"round": rounds, "test_accuracy": value} | ({} if validation is None else {"validation_accuracy": validation})
    fields = {"algorithm": "fedavg", "dataset": "digits", "rounds": rounds, **fields}
    folder = Path("runs") / "-".join(map(str, [*fields.values(), seed]))
    return RecordedRun(folder=folder, fields=fields, seed=seed, rounds=rounds, history=[line])


def groups(first, second):
    """Returns a run for each value of two algorithms; seeds count from 0."""
    return [
        recorded(float(value), seed=seed, algorithm=name)
        for name, values in (("fedavg", first), ("fedprox", second))
        for seed, value in enumerate(np.asarray(values))
    ]
