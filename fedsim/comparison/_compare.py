"""`compare`: the settings of each group over their seeds, the best one of each group, and tests between the groups."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.comparison._grid import edge_of_grid
from fedsim.comparison._outcome import AT, At, has_virtual_clock, outcome_of
from fedsim.comparison._result import OPTIMISTIC, Comparison, GroupTest, SettingResult
from fedsim.comparison._runs import (
    SPLITS,
    RecordedRun,
    differing_fields,
    key_of,
    preferred_metric,
    setting_text,
    shown_value,
)
from fedsim.comparison._statistics import holm, interval, paired_test, seeds_needed
from fedsim.names import did_you_mean

_LEVEL, _POWER = 0.05, 0.8
_MOST_NAMED = 8
# Runs that differ in these have not solved the same task with the same budget.
_CONTEXT = ("dataset", "data", "validation", "labels", "rounds")


def compare(
    runs: Sequence[RecordedRun],
    *,
    group: Sequence[str] = ("algorithm",),
    metric: str | None = None,
    at: At = "last",
    target: tuple[str, float] | None = None,
    difference: float | None = None,
) -> Comparison:
    """Compares groups of runs, such as algorithms, over seeds.

    A setting is what differs between the runs of a group besides the seed. The best setting of each group is that with the best
    mean of the metric on validation data, if all runs have it, and otherwise on test data, which is said. The groups' best
    settings are compared by paired t tests over their common seeds, with Holm's correction for the number of tests. Runs that
    are not finished are left out, and so are repetitions of a setting with the same seed; notes say which.

    Args:
      runs: from `read_runs`.
      group: fields of the configuration, hyperparameters included; runs with equal values are a group.
      metric: what is compared, without the name of the split; default: the accuracy if there is one, otherwise the loss.
      at: which value of a run is compared: ``"last"`` is that after the last round, ``"best"`` that after the best round, and
        ``"last10"`` the mean of the last ten evaluations.
      target: a metric, without the name of the split, and a value of it on test data, whose cost is given.
      difference: a size of interest, for which the number of needed seeds is given; default: the observed difference.

    Raises:
      ValueError: no run is finished, no run has such a metric or field, or it is not known which values are better.

    >>> from pathlib import Path
    >>> runs = [RecordedRun(folder=Path("a"), fields={"algorithm": name}, seed=seed, rounds=1,
    ...                     history=[{"round": 1, "test_accuracy": base + seed * slope}])
    ...         for name, base, slope in (("fedavg", 0.5, 0.1), ("fedprox", 0.6, 0.11)) for seed in range(3)]
    >>> (test,) = compare(runs).tests
    >>> str(test.paired.difference), test.better
    ('-0.1100 ± 0.0248', 'fedprox')
    """
    if at not in AT:
        raise ValueError(f"Expected at to be last, best or last10, got at={at!r}: give one of these.")
    if difference is not None and not 0 < difference < math.inf:
        raise ValueError(f"Expected difference > 0, got difference={difference}: give a size, such as 0.01, or leave it out.")
    notes: list[str] = []
    finished = _finished(runs, notes)
    name = _metric_of(finished, metric)
    usable = _with_metric(finished, f"test_{name}", notes)
    reported = f"test_{name}"
    better = _better(usable, reported)
    selection = _selection(usable, name, notes)
    goal = None if target is None else (f"test_{target[0]}", target[1])
    if goal is not None:
        _with_metric(usable, goal[0], notes)
        _better(usable, goal[0])
    _check_fields(usable, group)
    context = [field for field in differing_fields(usable) if field in _CONTEXT and field not in group]
    groups = _grouped(usable, group, context)
    settings: list[SettingResult] = []
    for members in groups.values():
        settings += _settings(members, group, context, runs, reported, selection, goal, at, notes)
    tests = _tests(settings, at, better == "higher", difference)
    result = Comparison(
        settings=settings, tests=tests, metric=reported, higher=better == "higher", selection=selection, at=at, target=goal,
        difference=difference, simulated=all(map(has_virtual_clock, usable)), notes=notes,
    )  # fmt: skip
    if result.is_optimistic:
        notes.insert(0, f"{OPTIMISTIC.capitalize()}.")
    _note_choices(tests, settings, notes)
    _note_contexts(context, groups, notes)
    _note_confounders(groups, [*group, *context], notes)
    _note_conditions(usable, notes)
    if goal is not None and not result.simulated and any(map(has_virtual_clock, usable)):
        notes.append("Some runs have simulated seconds and others wall time: their seconds cannot be compared.")
    return result


def _finished(runs: Sequence[RecordedRun], notes: list[str]) -> list[RecordedRun]:
    if not runs:
        raise ValueError("Expected at least one run, got none: give the folders of runs or sweeps.")
    _note_runs("Left out, not finished", [run for run in runs if not run.is_finished], notes)
    _note_runs("Ended early", [run for run in runs if run.is_finished and run.ended_early], notes)
    sweeps: dict[Path, list[RecordedRun]] = {}
    for run in runs:
        if run.sweep_size:
            sweeps.setdefault(run.folder.parent, []).append(run)
    for folder, members in sweeps.items():
        if len(members) < members[0].sweep_size:
            notes.append(f"{len(members)} of the {members[0].sweep_size} runs of the sweep {folder} are here.")
    if not (finished := [run for run in runs if run.is_finished]):
        raise ValueError(f"Expected finished runs, got {runs[0].folder} ({runs[0].state}): finish it by fedsim resume.")
    return finished


def _note_runs(what: str, runs: Sequence[RecordedRun], notes: list[str]) -> None:
    """Names some runs, each with its state."""
    if runs:
        some = [f"{run.folder} ({run.state})" for run in runs[:_MOST_NAMED]]
        notes.append(f"{what}: {', '.join(some)}{f' and {len(runs) - len(some)} more' * (len(runs) > len(some))}.")


def _metric_of(runs: Sequence[RecordedRun], metric: str | None) -> str:
    names = [name for run in runs for name in run.last if name.startswith("test_")]
    if metric is None:
        of_all = [name for name in names if all(name in run.last for run in runs)]
        metric = (
            preferred_metric(of_all)
            or preferred_metric(names)
            or next((name.partition("_")[2] for run in runs for name in run.last if run.better(name)), None)
        )
    known = list(dict.fromkeys(name.partition("_")[2] for name in names))
    if metric not in known:
        has = f"the metrics {', '.join(known)}" if known else "no evaluation on test data"
        raise ValueError(f"Expected the name of a metric, got metric={metric}, and the runs have {has}: choose one of these.")
    return metric


def _with_metric(runs: Sequence[RecordedRun], metric: str, notes: list[str]) -> list[RecordedRun]:
    """Returns the runs that have a metric.

    Raises:
      ValueError: none has it.
    """
    if without := [run for run in runs if metric not in run.last]:
        if len(without) == len(runs):
            known = ", ".join(dict.fromkeys(name for run in runs for name in run.last))
            raise ValueError(f"Expected runs with {metric}, got runs with {known}: choose one of these.")
        notes.append(f"{len(without)} of {len(runs)} runs have no {metric}, such as {without[0].folder}.")
    return [run for run in runs if metric in run.last]


def _better(runs: Sequence[RecordedRun], metric: str) -> str:
    said = dict.fromkeys(run.better(metric) for run in runs)
    if len(said) > 1 or None in said:
        raise ValueError(
            f"Expected a metric of which higher or lower values are better, got {metric}, which does not say it: choose "
            "another metric, or let it say so, see fedsim.metrics.per_example."
        )
    return str(next(iter(said)))


def _selection(runs: Sequence[RecordedRun], metric: str, notes: list[str]) -> str:
    validation, test = (f"{split}_{metric}" for split in SPLITS)
    having = sum(validation in run.last for run in runs)
    if 0 < having < len(runs):
        notes.append(f"Only {having} of {len(runs)} runs have {validation}, so settings are selected by {test}.")
    return validation if having == len(runs) else test


def _check_fields(runs: Sequence[RecordedRun], group: Sequence[str]) -> None:
    known = list(dict.fromkeys(field for run in runs for field in run.fields))
    if not group:
        raise ValueError(
            "Expected at least one field in group, got none: give a field of the configuration, such as algorithm."
        )
    for field in group:
        if field not in known:
            differing = ", ".join(differing_fields(runs)) or "no field"
            raise ValueError(
                f"Expected group to name fields of the configuration, got {field!r}.{did_you_mean(field, known)} The runs "
                f"differ in {differing}."
            )


def _grouped(
    runs: Sequence[RecordedRun], group: Sequence[str], context: Sequence[str]
) -> dict[tuple[str, ...], list[RecordedRun]]:
    groups: dict[tuple[str, ...], list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(tuple(key_of(run.fields.get(field)) for field in [*group, *context]), []).append(run)
    return groups


def _settings(
    members: Sequence[RecordedRun], group: Sequence[str], context: Sequence[str], every_run: Sequence[RecordedRun],
    metric: str, selection: str, target: tuple[str, float] | None, at: At, notes: list[str],
) -> list[SettingResult]:  # fmt: skip
    """Returns the settings of one group and context."""
    fields = differing_fields(members)
    of_settings: dict[tuple[str, ...], dict[int | str, RecordedRun]] = {}
    repeated: list[RecordedRun] = []
    for run in members:
        by_seed = of_settings.setdefault(tuple(key_of(run.fields.get(field)) for field in fields), {})
        if by_seed.setdefault(run.seed, run) is not run:
            repeated.append(run)
    _note_runs("Left out, the setting and the seed of another run", repeated, notes)
    results = []
    for by_seed in of_settings.values():
        first = next(iter(by_seed.values()))
        results.append(
            SettingResult(
                group={field: first.fields.get(field) for field in group},
                context={field: first.fields.get(field) for field in context},
                setting={field: first.fields.get(field) for field in fields},
                runs=by_seed,
                outcomes={seed: outcome_of(run, metric, selection, target) for seed, run in by_seed.items()},
                selected=False,
            )
        )
    name = results[0].name
    for result in results:
        where = f"{name} {setting_text(result.setting)}".rstrip()
        if bad := [seed for seed, value in result.values(at).items() if not math.isfinite(value)]:
            seeds = ", ".join(map(str, bad))
            notes.append(f"{where}: {metric} is not finite with the seeds {seeds}, so it has no mean and is not selected.")
    if alone := sum(len(result.runs) == 1 for result in results):
        which = "" if len(results) == 1 else f"{alone} of {len(results)} settings have "
        notes.append(f"{name}: {which}one seed, so there is no interval and no test.")
    if len({frozenset(result.runs) for result in results}) > 1:
        notes.append(f"The settings of {name} have different seeds, which makes their means less comparable.")
    higher = members[0].better(selection) == "higher"
    most = max(len(result.runs) for result in results)  # The settings with fewer seeds may be those whose other runs failed.
    chosen = _best([result for result in results if len(result.runs) == most], at, higher)
    if chosen is None:
        of = f" of those with {most} seeds" if any(len(result.runs) < most for result in results) else ""
        notes.append(
            f"No setting of {name} is selected: none{of} has finite values of {metric} and {selection} with every seed."
        )
        return results
    best_of_all = _best(results, at, higher)
    if best_of_all is not None and (seeds_of := len(best_of_all.runs)) < most:
        which = f"{name} {setting_text(best_of_all.setting)}"
        notes.append(f"Not selected, {which}: it is better, but has {seeds_of} of {most} seeds.")
    own = {**chosen.group, **chosen.context}
    grids = [run for run in every_run if all(key_of(run.fields.get(name)) == key_of(value) for name, value in own.items())]
    drawn = any(run.drawn for run in grids)  # The ends of drawn values are not those of their ranges.
    for field, best in () if drawn else chosen.setting.items():
        tried = [value for run in grids for value in [run.fields.get(field), *run.grid.get(field, ())]]
        if edge := edge_of_grid(field, best, [value for value in tried if isinstance(value, int | float)]):
            notes.append(f"{name}: {edge}.")
    return [dataclasses.replace(result, selected=result is chosen) for result in results]


def _best(results: Sequence[SettingResult], at: At, higher: bool) -> SettingResult | None:
    scores = {}
    for i, result in enumerate(results):
        score = interval([outcome.selection[at] for outcome in result.outcomes.values()]).mean
        if math.isfinite(score) and math.isfinite(result.interval(at).mean):
            scores[i] = score if higher else -score
    return results[max(scores, key=scores.__getitem__)] if scores else None


def _tests(settings: Sequence[SettingResult], at: At, higher: bool, difference: float | None) -> list[GroupTest]:
    pairs = [
        (first, second)
        for first, second in itertools.combinations([result for result in settings if result.selected], 2)
        if first.context == second.context
    ]
    paired = [paired_test(first.values(at), second.values(at)) for first, second in pairs]  # type: ignore[arg-type]
    tested = [i for i, test in enumerate(paired) if test.p is not None]
    corrected = dict(zip(tested, holm([paired[i].p or 0.0 for i in tested]), strict=True))
    tests = []
    for i, ((first, second), test) in enumerate(zip(pairs, paired, strict=True)):
        better, needed = None, None
        if i in corrected:
            if corrected[i] < _LEVEL:
                better = (first if (test.difference.mean > 0) == higher else second).name
            # At this level a test has its power whatever the other tests give.
            size = test.difference.mean if difference is None else difference
            needed = seeds_needed(size, test.difference.deviation or 0.0, _LEVEL / len(tested), _POWER)
        tests.append(
            GroupTest(first=first, second=second, paired=test, p_holm=corrected.get(i), better=better, seeds_needed=needed)
        )
    return tests


def _note_choices(tests: Sequence[GroupTest], settings: Sequence[SettingResult], notes: list[str]) -> None:
    """Says if groups with different numbers of settings are tested: the best of more settings is better by chance alone."""
    tested = {result.name for test in tests for result in (test.first, test.second)}
    counts = {name: sum(result.name == name for result in settings) for name in tested}
    if len(set(counts.values())) > 1:
        texts = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        notes.append(
            f"The best of different numbers of settings are tested ({texts}) with the seeds that they were selected with, so a "
            "difference may come from the choice: run the selected settings with other seeds."
        )


def _note_contexts(context: Sequence[str], groups: Mapping[Any, Sequence[RecordedRun]], notes: list[str]) -> None:
    for field in context:
        values = dict.fromkeys(shown_value(members[0].fields.get(field)) for members in groups.values())
        notes.append(
            f"The runs have different {field}: {', '.join(values)}. They are groups of their own, and not tested against each "
            "other."
        )


def _note_confounders(groups: Mapping[Any, Sequence[RecordedRun]], named: Sequence[str], notes: list[str]) -> None:
    """Says what else differs between groups: a field that is not the same in all of them, or that only some have varied."""
    everything = [run for members in groups.values() for run in members]
    for field in differing_fields(everything):
        having = [members for members in groups.values() if any(field in run.fields for run in members)]
        if field in named or field == "code" or len(having) < 2:
            continue
        values = [{key_of(run.fields.get(field)): shown_value(run.fields.get(field)) for run in members} for members in having]
        if all(value.keys() == values[0].keys() for value in values):
            continue
        texts = []
        for members, value in zip(having, values, strict=True):
            of = ", ".join(shown_value(members[0].fields.get(name)) for name in named)
            texts.append(f"{of}: {', '.join(value.values())}")
        notes.append(f"The groups also differ in {field} ({'; '.join(texts)}).")


def _note_conditions(runs: Sequence[RecordedRun], notes: list[str]) -> None:
    """Says if runs that should have the same data have others, and if versions differ."""
    data: dict[tuple[str, ...], set[str]] = {}
    for run in runs:
        if run.data:
            data.setdefault((str(run.seed), *(key_of(run.fields.get(field)) for field in _CONTEXT)), set()).add(run.data)
    if seeds := sorted({key[0] for key, different in data.items() if len(different) > 1}):
        notes.append(f"Runs with the same seed have different training, validation or test data (seeds {', '.join(seeds)}).")
    names = dict.fromkeys(name for run in runs for name in run.versions)
    differing = {name: list(dict.fromkeys(str(run.versions.get(name)) for run in runs)) for name in names}
    if texts := [f"{name} {' and '.join(versions)}" for name, versions in differing.items() if len(versions) > 1]:
        notes.append(f"The runs had different versions: {', '.join(texts)}.")
