"""The lines of the metrics file: one flat dict for each round and one for each evaluation, of values that JSON has."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedsim.data import FederatedData
from fedsim.evaluation import Evaluation
from fedsim.metrics import Better, better_of
from fedsim.rounds import RoundInfo
from fedsim.run_files import SPLITS, USUAL_METRICS, scalar_metrics
from fedsim.samplers import Observation, Sampler, is_steered

Line = dict[str, Any]

_SUMMED = ("num_examples", "bits_up", "bits_down", "entropy_bits_up")
_NAMES_OF_RUN = {"round", "seconds", "simulated_seconds", "better", "observed"}  # of every line or of a run
_NOT_METRICS = ("num_steps", "weight", "dropped", "attacker", "staleness", *_SUMMED)


def round_lines(infos: Any, first_round: int, rounds: int, seconds: float) -> list[Line]:
    """Returns the lines of the rounds of one dispatch.

    Args:
      infos: a stacked `RoundInfo` on the host. For an algorithm that overrides ``apply``, a mapping of names to arrays of
        shape ``[rounds]``.
      first_round: the number of rounds before these. ``round`` counts finished rounds, so the first line has
        ``first_round + 1``.
      rounds: the number of rounds.
      seconds: the wall time of all of them.

    Returns:
      One line per round, with ``round``; the example-weighted mean of every scalar that the algorithm reports for each client
      (``loss``); ``num_examples``; the bits that all clients sent and received (``bits_up``, ``bits_down``, and the estimate
      ``entropy_bits_up`` if it differs from ``bits_up``); ``dropped``, the number of updates that were not finite; the mean
      and the largest ``staleness`` of the clients, and ``staleness_counts``, how many have each staleness from 0 on, if the
      algorithm has one; and ``seconds``, the wall time of the round, without evaluations and checkpoints.

    Raises:
      ValueError: an algorithm reports a value with a name that the run itself gives, or that of an evaluation.

    >>> round_lines({"loss": np.array([0.5, float("nan")])}, first_round=4, rounds=2, seconds=3.0)[1]
    {'round': 6, 'loss': None, 'seconds': 1.5}
    """
    columns: dict[str, Any] = {}
    if isinstance(infos, RoundInfo):
        clients = infos.clients
        # A dropped client often reports NaN, which would hide the other clients' values; one without a step has no loss.
        counted = (clients["num_steps"] > 0) & ~clients["dropped"]
        weight = np.where(counted, clients["num_examples"], 0).astype(np.float64)
        total = weight.sum(1)
        for name, values in clients.items():
            if name not in _NOT_METRICS and np.shape(values) == weight.shape:
                weighted = np.where(weight > 0, np.asarray(values, np.float64) * np.maximum(weight, 1), 0).sum(1)
                columns[name] = np.where(total > 0, weighted / np.maximum(total, 1), np.nan)
        # The sum over a cohort may exceed 32 bits. The counts are whole numbers even where clients report float32.
        wide = {name: np.float64 if "entropy" in name else np.int64 for name in _SUMMED}
        sums = {name: np.asarray(clients[name]).astype(dtype).sum(1) for name, dtype in wide.items()}
        if np.array_equal(sums["entropy_bits_up"], sums["bits_up"]):
            del sums["entropy_bits_up"]  # nothing was compressed
        columns |= sums
        columns["dropped"] = np.asarray(infos.num_dropped)
        if (staleness := clients.get("staleness")) is not None:
            took_part = clients["num_steps"] > 0
            columns["staleness"] = np.sum(staleness, 1) / np.maximum(np.sum(took_part, 1), 1)
            columns["largest_staleness"] = np.max(staleness, 1)
            pairs = zip(np.asarray(staleness), took_part, strict=True)
            columns["staleness_counts"] = [np.bincount(values[took], minlength=1) for values, took in pairs]
    elif isinstance(infos, Mapping):
        columns = {name: values for name, values in infos.items() if np.shape(values) == (rounds,)}
    splits = tuple(f"{split}_" for split in SPLITS)
    if taken := [name for name in columns if name in _NAMES_OF_RUN or name.startswith(splits)]:
        raise ValueError(
            f"Expected other names in the info of clients or of rounds, got {taken[0]!r}: the lines of the metrics have it for "
            "the run itself, or for its evaluations. Choose another name, such as 'local_loss'."
        )
    return [
        {"round": first_round + 1 + i}
        | {name: plain(values[i]) for name, values in columns.items()}
        | {"seconds": seconds / rounds}
        for i in range(rounds)
    ]


def observed(sampler: Sampler, history: Sequence[Line], rounds: int | None = None) -> Sampler:
    """Returns a sampler after the rounds of a history: the same, unless values steer it, see `fedsim.samplers.SteeredSampler`.

    Args:
      sampler: the sampler before the first round.
      history: lines of the metrics.
      rounds: the number of finished rounds, all of which must be there; None: as many as there are without a gap.

    Raises:
      ValueError: the observation of a round is missing, or the sampler has observed rounds before.

    >>> from fedsim.samplers import PowerOfChoice
    >>> data = FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[1, 1, 1])
    >>> sampler = PowerOfChoice(data, clients=1, candidates=3, seed=0)
    >>> history = [{"round": 1, "observed": {"clients": [2], "loss": [0.5]}}, {"round": 1, "test_loss": 0.4}]
    >>> observed(sampler, history, 1).memory(1).tolist()
    [inf, inf, 0.5]
    """
    if not is_steered(sampler):
        return sampler
    steered: Any = sampler
    if known := len(getattr(steered, "observations", ())):
        raise ValueError(
            f"Expected the sampler {type(sampler).__name__} as it is before the first round, got one that has observed {known} "
            "rounds: give the one that observe was first called on."
        )
    found = {line["round"]: line["observed"] for line in history if "observed" in line}
    count = next(number for number in itertools.count() if number + 1 not in found)
    if rounds is not None and count < rounds:
        raise ValueError(
            f"The values of round {count + 1}, which steer the sampler {type(sampler).__name__}, are missing in metrics.jsonl, "
            f"and {rounds} rounds are finished: start the run again in another folder."
        )
    for number in range(1, count + 1 if rounds is None else rounds + 1):
        steered = steered.observe(Observation.from_json(found[number]))
    return steered


def evaluation_line(evaluation: Evaluation | Mapping[str, Any], round: int, split: str = "test") -> Line:
    """Returns the line of an evaluation after ``round`` rounds.

    The names of metrics begin with that of the split. A metric with one number is ``test_<metric>``, and
    ``test_<metric>_clients_<mean, std or worst10>`` over clients. A metric with an array, such as a confusion matrix, is a
    nested list ``test_<metric>``, of the overall value alone. A metric that does not say which values are better has no
    worst10. ``better`` has what the metrics say, "higher" or "lower", unless it follows from their names (`better_of`).

    >>> evaluation_line({"accuracy": 0.5}, round=3)
    {'round': 3, 'test_accuracy': 0.5}
    """
    overall, clients = evaluation if isinstance(evaluation, Evaluation) else (evaluation, {})
    line: Line = {"round": round} | {f"{split}_{name}": plain(value) for name, value in overall.items()}
    said = {name: better_of(name, clients.get(name, value)) for name, value in overall.items()}
    if further := {f"{split}_{name}": better for name, better in said.items() if better != better_of(name, None)}:
        line["better"] = further
    if not isinstance(evaluation, Evaluation):
        return line
    for name in evaluation.clients:
        if np.ndim(evaluation.overall.get(name, 0)):
            continue
        over = evaluation.over_clients(name)
        names = {"mean": "mean", "std": "std"} | ({"worst10": "worst 10%"} if better_of(name, evaluation.clients[name]) else {})
        line |= {f"{split}_{name}_clients_{key}": plain(over[of]) for key, of in names.items()}
    return line


def clients_table(evaluation: Evaluation, data: FederatedData) -> str:
    """Returns the results of each client as CSV: its id, its number of examples, its loss, and its other metrics.

    Metrics with an array per client are left out. A cell is empty if it has no number, as for a client without examples. The
    text is empty if the evaluation has no results for the clients of ``data``.

    >>> from fedsim.metrics import Mean
    >>> data = FederatedData.from_arrays({"y": np.arange(3)}, clients=["ann", "ann", "bob"])
    >>> means = {"accuracy": Mean(np.array([1.0, 1.0]), np.array([2, 1])), "loss": Mean(np.array([3.0, 0.5]), np.array([2, 1]))}
    >>> clients_table(Evaluation({}, means), data).splitlines()
    ['id,num_examples,loss,accuracy', 'ann,2,1.5,0.5', 'bob,1,0.5,1.0']
    """
    columns: dict[str, list[Any]] = {}
    for name in sorted(evaluation.clients, key=lambda name: name != "loss"):
        statistic = evaluation.clients[name]
        values, weight = np.asarray(statistic.result()), np.asarray(statistic.weight)
        if values.shape == weight.shape == (data.num_clients,):
            columns[name] = [plain(value) if counts else None for value, counts in zip(values, weight > 0, strict=True)]
    text = io.StringIO()
    if columns:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["id", "num_examples", *columns])
        writer.writerows(zip(data.client_ids, data.sizes.tolist(), *columns.values(), strict=True))
    return text.getvalue()


def score_name(line: Line, *others: Line) -> str | None:
    """Returns the key of the metric by which evaluations are ranked, one that all lines have; None if there is none.

    It is one of the validation data if the lines have such metrics, and otherwise one of the test data:
    the accuracy of the clients' personal models if there is one, otherwise the accuracy of the server's model, otherwise the
    loss, otherwise the first metric that says whether higher or lower values are better.

    >>> score_name({"round": 1, "test_loss": 0.5, "test_accuracy": 0.9}), score_name({"round": 1, "test_entropy": 0.5})
    ('test_accuracy', None)
    >>> score_name({"round": 1, "test_accuracy": 0.9, "validation_loss": 0.5})
    'validation_loss'
    >>> score_name({"round": 1, "test_accuracy": 0.9, "test_personal_accuracy": 0.8}, {"round": 1, "test_accuracy": 0.9})
    'test_accuracy'
    """
    for split in SPLITS:
        if metrics := [name for name in scalar_metrics(line, split) if all(name in other for other in others)]:
            names = [name for name in metrics if _better(line, name)]
            preferred = (f"{split}_{name}" for name in USUAL_METRICS)
            return next((name for name in preferred if name in names), names[0] if names else None)
    return None


def score(line: Line, name: str | None = None) -> float | None:
    """Returns a number by which evaluations are ranked, larger is better; None if there is none.

    A metric for which lower values are better is negated.

    Args:
      line: with an evaluation.
      name: the key of the metric; None: that of `score_name`.

    >>> score({"round": 1, "test_loss": 0.5})
    -0.5
    """
    name = name or score_name(line)
    value = None if name is None else line[name]
    return None if name is None or value is None else -value if _better(line, name) == "lower" else value


def is_better(line: Line, other: Line, name: str) -> bool:
    """Returns whether a metric has a better value in one line than in another; a value that is not finite is the worst.

    Raises:
      ValueError: it is not known which values are better, or they are arrays.

    >>> is_better({"test_loss": 0.5}, {"test_loss": 0.6}, "test_loss")
    True
    """
    if (better := _better(line, name)) is None:
        raise ValueError(f"It is not known whether higher or lower values of {name} are better: choose another metric.")
    value, known = line[name], other[name]
    if isinstance(value, list) or isinstance(known, list):
        raise ValueError(f"Expected a metric with one number, got {name}, which has an array: choose another metric.")
    if value is None or known is None:
        return value is not None
    return value < known if better == "lower" else value > known


def split_and_metric(name: str) -> tuple[str | None, str]:
    """Returns the split of a metric's key and the rest of it; None if it is not one of an evaluation.

    >>> split_and_metric("validation_accuracy"), split_and_metric("loss")
    (('validation', 'accuracy'), (None, 'loss'))
    """
    split, _, metric = name.partition("_")
    return (split, metric) if split in SPLITS else (None, name)


def _better(line: Line, key: str) -> Better | None:
    """Returns which values of a metric of an evaluation are better; None if this is not known."""
    return line.get("better", {}).get(key) or better_of(split_and_metric(key)[1], None)


def plain(value: Any) -> Any:
    """Returns a scalar or an array as JSON has it: arrays are nested lists, and NaN and infinities are None.

    >>> plain(np.array([[1, 2], [3, 4]])), plain(float("nan"))
    ([[1, 2], [3, 4]], None)
    """
    value = np.asarray(jax.device_get(value))
    if value.ndim:
        return [plain(entry) for entry in value]
    value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def best_round(history: Sequence[Line]) -> int | None:
    """Returns the round of the best evaluation: see `score_name`; None if there is none.

    >>> best_round([{"round": 1, "test_accuracy": 0.5}, {"round": 2, "test_accuracy": 0.9}, {"round": 3, "test_accuracy": 0.8}])
    2
    """
    scored = [(value, -line["round"]) for line in history if (value := score(line)) is not None]
    return -max(scored)[1] if scored else None
