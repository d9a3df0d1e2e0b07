"""What a run folder has, read without JAX: former names of options, the metrics, and the rounds, seconds and bytes so far."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

History = Sequence[Mapping[str, Any]]

# Names of metrics of an evaluation begin with that of the data. What is chosen is chosen by the first of these that a run has.
SPLITS = ("validation", "test")
# By the first of these that an evaluation has, it is ranked.
USUAL_METRICS = ("personal_accuracy", "accuracy", "loss")


# The options that the text of a learning-rate schedule has, and that were fields of their own.
_SCHEDULES = {"linear": ("end",), "cosine": ("end",), "exponential": ("decay", "every", "staircase")}


def with_present_names(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the file of a run or a sweep by the names that options have now: earlier versions wrote others.

    What a run that was started in Python has recorded is unchanged, because its names are those of its program.

    Args:
      stored: the content of ``config.json`` or ``sweep.json``.

    >>> config = {"client_schedule": "cosine", "client_schedule_end": 0.1, "client_devices": "2", "hyperparameters": {}}
    >>> with_present_names({"config": config, "settings": {"memory": "stream"}})["config"]
    {'client_schedule': 'cosine(end=0.1)', 'step_seconds': '2', 'hyperparameters': {}}
    """
    config = stored["config"]
    if not isinstance(config.get("hyperparameters"), Mapping):
        return dict(stored)
    present = {**stored, "config": _present_config(config)}
    if isinstance(stored.get("settings"), Mapping):
        present["settings"] = _renamed(stored["settings"], memory="example_storage")
    if differing := stored.get("differing"):
        present["differing"] = [[names, _present_fields(config, names, fields)] for names, fields in differing]
    return present


def _present_config(config: Mapping[str, Any]) -> dict[str, Any]:
    schedule, present = config.get("client_schedule"), _renamed(config, client_devices="step_seconds")
    if str(config.get("algorithm")).lower() == "scaffold":
        present["hyperparameters"] = _renamed(config["hyperparameters"], option="control_variate")
    fields = {
        name.removeprefix("client_schedule_"): present.pop(name) for name in config if name.startswith("client_schedule_")
    }
    names = _SCHEDULES.get(schedule, ()) if isinstance(schedule, str) else ()
    if given := ", ".join(f"{name}={fields[name]!r}" for name in names if name in fields):
        present["client_schedule"] = f"{schedule}({given})"
    return present


def _present_fields(config: Mapping[str, Any], names: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that differ from a configuration with some varied values, by present names: a schedule is a whole."""
    base, present = _present_config(config), _present_config({**config, **names, **fields})
    return {
        name: value
        for name, value in present.items()
        if name in fields or (name not in names and (name not in base or value != base[name]))
    }


def _renamed(values: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def metric_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the lines that can be read, and the numbers of the others, without that of an incomplete last line.

    >>> metric_lines(Path("no such file"))
    ([], [])
    """
    lines, damaged = [], []
    decoder = json.JSONDecoder(object_pairs_hook=_with_different_keys)
    *complete, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, content in enumerate([*complete, last], 1):
        try:
            line = decoder.decode(content.decode())
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and type(line.get("round")) is int:
            lines.append(line)
        elif number <= len(complete):
            damaged.append(number)
    return lines, damaged


def scalar_metrics(line: Mapping[str, Any], *splits: str) -> list[str]:
    """Returns the names of an evaluation's metrics over all examples, ``<split>_<metric>``, without those that are arrays.

    Args:
      line: of ``metrics.jsonl``.
      *splits: the data that was evaluated; by default validation and test data.

    >>> line = {"round": 1, "loss": 0.6, "test_loss": 0.5, "test_loss_clients_std": 0.1, "test_confusion": [[1, 0], [0, 1]]}
    >>> scalar_metrics(line), scalar_metrics(line, "validation")
    (['test_loss'], [])
    """
    names = [name for split in splits or SPLITS for name in line if name.startswith(f"{split}_") and "_clients_" not in name]
    return [name for name in names if line[name] is None or isinstance(line[name], int | float)]


def rounds_of(history: History) -> list[float]:
    """Returns the number of finished rounds at each line.

    >>> rounds_of([{"round": 1, "seconds": 0.5}, {"round": 1, "test_accuracy": 0.5}])
    [1, 1]
    """
    return [line["round"] for line in history]


def simulated_seconds_of(history: History) -> list[float]:
    """Returns the simulated time at each line; zeros if the run has no virtual clock.

    >>> simulated_seconds_of([{"round": 1, "simulated_seconds": 3.0}, {"round": 1, "test_accuracy": 0.5}])
    [3.0, 3.0]
    """
    return list(itertools.accumulate((line.get("simulated_seconds") or 0.0 for line in history), max))


def wall_seconds_of(history: History) -> list[float]:
    """Returns the wall time of the rounds until each line, without evaluations.

    >>> wall_seconds_of([{"round": 1, "seconds": 0.5}, {"round": 1, "test_accuracy": 0.5}, {"round": 2, "seconds": 0.25}])
    [0.5, 0.5, 0.75]
    """
    return list(itertools.accumulate(line.get("seconds") or 0.0 for line in history))


def megabytes_of(history: History) -> list[float]:
    """Returns the megabytes (1e6 bytes) of all messages until each line, in both directions.

    On a virtual clock these are all messages, and otherwise those of the aggregated updates.

    >>> megabytes_of([{"round": 1, "bits_up": 8e6, "bits_down": 16e6}, {"round": 1, "test_accuracy": 0.5}])
    [3.0, 3.0]
    """
    simulated = any("bytes_up" in line for line in history)
    names, factor = (("bytes_down", "bytes_up"), 1e-6) if simulated else (("bits_down", "bits_up"), 1e-6 / 8)
    return list(itertools.accumulate(factor * sum(line.get(name) or 0 for name in names) for line in history))


def shown_number(value: float, *, beside: float = 0.0, digits: int = 4) -> str:
    """Returns a number as tables and texts show it: with four decimal places, and so many digits if it is below 0.001.

    Args:
      value: the number.
      beside: a number in the same cell, such as the mean of which the value is the deviation. If it is not small, the value is
        shown with decimal places.
      digits: another number of decimal places and digits.

    >>> shown_number(0.12345), shown_number(0.0), shown_number(0.0000212345), shown_number(12345.678)
    ('0.1235', '0.0000', '2.123e-05', '12345.7')
    >>> shown_number(0.0004, beside=0.5)
    '0.0004'
    """
    if abs(value) >= 1000:
        return f"{value:.{digits + 2}g}"
    is_small = value != 0 and max(abs(value), abs(beside)) < 0.001
    return f"{value:.{digits}g}" if is_small else f"{value:.{digits}f}"


def _with_different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("A line has a key twice.")
    return found
