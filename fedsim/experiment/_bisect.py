"""`bisect`: where two runs that should agree differ first, and where a run that diverged went out of line."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim import rng
from fedsim.data import is_rows
from fedsim.execution import call_of_updates, run_client
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._folder import read_config
from fedsim.experiment._lines import Line
from fedsim.experiment._metrics_file import read_metrics
from fedsim.experiment._replay import RunRound, only_errors
from fedsim.experiment._run import State
from fedsim.rounds import FederatedState

_FACTOR = 5.0  # A client is out of line if its loss or norm is larger than this times the median of the cohort.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What `bisect` has found. Printed, it is a text.

    Attributes:
      text: what was found, in sentences.
      round: the first round in which the runs differ, or that is out of line, from 1; 0 for the initial state; None for none.
      client: the first client of this round whose work differs, or is out of line; None if there is none.
      leaf: the first array that differs, of the client's update or of the state.

    >>> print(Finding(text="The runs agree in all 3 rounds."))
    The runs agree in all 3 rounds.
    """

    text: str
    round: int | None = None
    client: str | None = None
    leaf: str | None = None

    def __str__(self) -> str:
        return self.text


def bisect(folder: str | Path, other: str | Path | None = None) -> Finding:
    """Returns the first round, client and array in which two runs differ; of a single run, where it went out of line.

    Two runs are compared by their checkpoints, and by the metrics that both have. Then both run again, from the newest
    checkpoint that they have in common, until their states differ, and the clients of this round one by one. If both give the
    same results here, the text says so, with the versions of packages in which their folders differ. If only evaluations
    differ, it says in which metrics. Nothing is written.

    Of a single run, the first round is taken whose loss is not finite, that dropped updates, or whose loss is more than five
    times the median of the rounds before; and in it the first client whose update or loss is not finite, or more than five
    times the median of its cohort.

    Args:
      folder, other: run folders. If a configuration names Python code, that code runs.

    Raises:
      ValueError: a folder holds no run, a sweep, or a run that was started in Python.

    >>> bisect("no such folder")
    Traceback (most recent call last):
    ...
    ValueError: There is no run in no such folder: cannot read no such folder/config.json (FileNotFoundError).
    """
    first = RunRound.read(folder, 1)
    if other is None:
        return _out_of_line(first, Path(folder))
    second = RunRound.read(other, 1)
    runs = _Rerun(first), _Rerun(second)
    histories = [read_metrics(Path(each) / "metrics.jsonl") for each in (folder, other)]
    rounds = min(int(lines[-1]["round"]) if lines else 0 for lines in histories)
    by_metrics, _ = _first_difference(*histories, evaluations=False)
    by_scores, scores = _first_difference(*histories, evaluations=True)
    start, by_states = _common_start(runs, by_metrics)
    if start is None:
        states = [run.state for run in runs]
        leaf = _differing_state(*states)
        return Finding(round=0, leaf=leaf, text=f"The initial states differ: {_shown(leaf, *states)}.")
    of_states = [round for round in (by_metrics, by_states) if round is not None]
    agree = f"The runs agree in all {rounds} rounds that both have: metrics, and the last common checkpoint."
    if not of_states and by_scores is None:
        return Finding(text=agree)
    only = f"Only evaluations differ, first that after round {by_scores}, in {', '.join(scores)}"
    if not of_states and by_scores is not None and by_scores <= start:
        return Finding(round=by_scores, text=f"{agree} {only}. So they were not of the same data or not by the same metrics.")
    known = min(of_states, default=by_scores or 0)
    while runs[0].position < known:
        before = [run.state for run in runs]
        cohorts = [run.advance() for run in runs]
        after = [run.state for run in runs]
        leaf = _differing_state(after[0], after[1], cohorts[0].clients)
        if leaf is not None or not np.array_equal(cohorts[0].clients, cohorts[1].clients):
            return _in_round(runs, before, after, leaf)
    found, why = f"The folders differ in round {known}", "the difference comes from where they ran"
    if not of_states:
        found, why = only, f"they were not of the same data, not by the same metrics, or {why}"
    return Finding(
        round=known,
        text=f"{found}, and both runs give the same state up to this round if they run again here, from round {start}. "
        f"So {why}.{_environments(folder, other)}",
    )


class _Rerun:
    """A run that is run again, round by round, from the initial state or from a checkpoint."""

    def __init__(self, run: RunRound) -> None:
        self.algorithm, self.sampler, self.first = run.algorithm, run.sampler, run.first
        self.checkpoints = Checkpoints(run.paths.checkpoints, {"algorithm": type(run.algorithm).__name__})
        with only_errors():
            key = rng.stream(run.first.key, "init")
            self.state = self.algorithm.with_memory(self.algorithm.init(key), run.first.data)
            self.like = self.algorithm.with_memory(jax.eval_shape(self.algorithm.init, key), run.first.data)
        self.position = 0

    def saved(self, round: int) -> State:
        return self.checkpoints.load(round, self.like, separate_rows=True)

    def advance(self) -> Any:
        """Runs the next round, and returns its cohort."""
        cohort = self.sampler.cohort(self.position)
        with only_errors():
            self.state, _ = self.algorithm.apply_rounds(self.state, [cohort])
        self.position += 1
        return cohort


def _common_start(runs: Sequence[_Rerun], by_metrics: int | None) -> tuple[int | None, int | None]:
    """Moves both runs to the newest round in which they have equal states; returns it, and the first in which they differ.

    The first is None if their initial states differ.
    """
    if _differing_state(*(run.state for run in runs)) is not None:
        return None, 0
    start, differs = 0, None
    for round in sorted(set(runs[0].checkpoints.rounds()) & set(runs[1].checkpoints.rounds())):
        if by_metrics is not None and round >= by_metrics:
            break
        states = [run.saved(round) for run in runs]
        if _differing_state(*states) is not None:
            differs = round
            break
        start = round
        for run, state in zip(runs, states, strict=True):
            run.state, run.position = state, round
    return start, differs


def _in_round(runs: Sequence[_Rerun], before: Sequence[State], after: Sequence[State], leaf: str | None) -> Finding:
    """Returns the first client of a round whose work differs, or that the server's step does."""
    round = runs[0].position
    cohorts = [run.sampler.cohort(round - 1) for run in runs]
    title = f"The runs differ first in round {round}"
    if not np.array_equal(cohorts[0].clients, cohorts[1].clients):
        names = [", ".join(cohort.client_ids[:5]) for cohort in cohorts]
        return Finding(round=round, text=f"{title}: the cohorts have other clients, {names[0]} and {names[1]}.")
    for slot, client in enumerate(cohorts[0].client_ids):
        done = [_client(run, state, cohort, slot) for run, state, cohort in zip(runs, before, cohorts, strict=True)]
        for what in ("examples", "steps", "started", "update", "received"):
            values = [each[what] for each in done]
            if (name := _differing_leaf(*values)) is not None:
                shown = _shown(name, *values)
                return Finding(
                    round=round, client=client, leaf=name, text=f"{title}, in the {_WHAT[what]} of client {client}: {shown}."
                )
    return Finding(
        round=round,
        leaf=leaf,
        text=f"{title}, in what the server makes of equal updates of all {len(cohorts[0].clients)} clients: "
        f"{_shown(leaf, *after)}.",
    )


_WHAT = {
    "examples": "examples",
    "steps": "number of steps",
    "started": "parameters that it received",
    "update": "update",
    "received": "update that the server received",
}


def _client(run: _Rerun, state: State, cohort: Any, slot: int) -> dict[str, Any]:
    """Returns what one client of a round has and computes."""
    with only_errors():
        done = run_client(run.algorithm, state, cohort, slot, call_of_updates(run.algorithm, state, cohort.data))
    return {
        "examples": cohort.client(slot).examples,
        "steps": np.asarray(done.num_steps),
        "started": done.shared,
        "update": done.result.update,
        "received": done.received,
    }


def _out_of_line(run: RunRound, folder: Path) -> Finding:
    """Returns the first round and client of a run that are out of line."""
    found = _first_bad_round(read_metrics(folder / "metrics.jsonl"))
    if found is None:
        return Finding(text="No round has a loss that is not finite or much larger than before, and no update was dropped.")
    round, why = found
    at = dataclasses.replace(run, round=round, cohort=run.sampler.cohort(round - 1))
    clients = [at.replay(client) for client in at.cohort.client_ids]
    sizes = {"norm of its update": [each.norm for each in clients]}
    if all("loss" in each.metrics for each in clients):
        sizes["loss"] = [float(each.metrics["loss"]) for each in clients]
    for number, each in enumerate(clients):
        for what, values in sizes.items():
            middle = statistics.median([value for value in values if math.isfinite(value)] or [0.0])
            value = values[number]
            if not math.isfinite(value) or value > _FACTOR * middle:
                return Finding(
                    round=round,
                    client=each.client,
                    text=f"Round {round} {why}. Client {each.client} is the first that is out of line: the {what} is "
                    f"{value:.4g}, and the median of the cohort {middle:.4g}. To look at it: fedsim replay {folder} --round "
                    f"{round} --client {each.client}",
                )
    return Finding(round=round, text=f"Round {round} {why}, and no client is out of line: losses and norms are similar.")


def _first_bad_round(history: Sequence[Line]) -> tuple[int, str] | None:
    """Returns the first round of the metrics that is out of line, and why."""
    losses: list[float] = []
    for line in history:
        if "seconds" not in line:
            continue
        if line.get("dropped"):
            return line["round"], f"dropped {line['dropped']} updates"
        if "loss" in line:
            if line["loss"] is None:
                return line["round"], "has a loss that is not finite"
            if losses and line["loss"] > _FACTOR * (before := statistics.median(losses)):
                return line["round"], f"has the loss {line['loss']:.4g}, and the median before is {before:.4g}"
            losses.append(line["loss"])
    return None


def _first_difference(one: Sequence[Line], other: Sequence[Line], *, evaluations: bool) -> tuple[int | None, list[str]]:
    """Returns the first round whose lines, or whose evaluations, have other values, and the names of these; None without one.

    What only one of the runs has is no difference: it may evaluate other rounds, or by further metrics. Times are none, either.
    """
    mine, theirs = ({line["round"]: line for line in lines if ("seconds" not in line) == evaluations} for lines in (one, other))
    for round in sorted(mine.keys() & theirs.keys()):
        shared = [name for name in mine[round] if name in theirs[round] and name != "seconds"]
        if names := [name for name in shared if mine[round][name] != theirs[round][name]]:
            return round, names
    return None, []


def _differing_state(one: State, other: State, clients: np.ndarray | None = None) -> str | None:
    """Returns the name of the first array in which two states differ, without the models that clients may still start from.

    On a virtual clock, how many of these a state has depends on the number of rounds.
    """
    mine, theirs = (state._replace(past=()) if isinstance(state, FederatedState) else state for state in (one, other))
    return _differing_leaf(mine, theirs, clients)


def _differing_leaf(one: Any, other: Any, clients: np.ndarray | None = None) -> str | None:
    """Returns the name of the first array in which two pytrees differ in a bit; None if they are equal."""
    mine, theirs = (dict(_arrays(tree, clients)) for tree in (one, other))
    for name in {**mine, **theirs}:
        if name not in mine or name not in theirs or not _same_bits(mine[name], theirs[name]):
            return name
    return None


def _arrays(tree: Any, clients: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and values of the arrays of a pytree, of clients' rows those of some clients."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_rows):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if is_rows(leaf):
            which = np.flatnonzero(leaf.index >= 0) if clients is None else clients.astype(np.int64)
            for below, value in _arrays(leaf.gather(which), None):
                yield f"{name}/{below}", value
        elif isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            yield name, np.asarray(jax.random.key_data(leaf))
        else:
            yield name, np.asarray(jax.device_get(leaf))


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _shown(leaf: str | None, one: Any, other: Any) -> str:
    """Returns the name of an array, and where and how much it differs."""
    mine, theirs = (dict(_arrays(tree, None)).get(leaf or "") for tree in (one, other))
    name = leaf or "the value"
    if mine is None or theirs is None:
        return f"only one of them has {name}"
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"{name} is {mine.dtype}{list(mine.shape)} and {theirs.dtype}{list(theirs.shape)}"
    where = np.flatnonzero(mine.reshape(-1) != theirs.reshape(-1))
    if not where.size:
        return f"{name} differs in bits that are equal as numbers"
    a, b = (array.reshape(-1)[where[0]] for array in (mine, theirs))
    place = [int(i) for i in np.unravel_index(where[0], mine.shape)]
    return f"{name} differs in {where.size:,} of {mine.size:,} numbers, first at {place}: {a!s} and {b!s}"


def _environments(folder: str | Path, other: str | Path) -> str:
    """Returns a sentence about the versions and devices in which two folders differ."""
    recorded = [read_config(each) for each in (folder, other)]
    differences = [
        f"{name} {mine} and {theirs}"
        for entry in ("versions", "jax_settings", "devices")
        for name, mine, theirs in _pairs(recorded[0].get(entry), recorded[1].get(entry), entry)
        if mine != theirs
    ]
    return f" They differ in {', '.join(differences)}." if differences else " The folders record the same versions and devices."


def _pairs(one: Any, other: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield key, one.get(key), other.get(key)
    else:
        yield name, one, other
