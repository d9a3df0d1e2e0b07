"""The report at the end of a run: a table and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsim.execution import Execution, Jit, is_gpu
from fedsim.experiment._divergence import is_diverged
from fedsim.experiment._lines import Line, best_round, score_name
from fedsim.plots._canvas import BLUE, GREEN, GREY, ORANGE, add_legend, new_figure, shorten, whole_ticks
from fedsim.run_files import SPLITS, scalar_metrics, shown_number
from fedsim.samplers import Attacked

if TYPE_CHECKING:
    from fedsim.privacy import Guarantee

_MOST_SHOWN = 10


def devices_of(execution: Execution) -> str:
    """Returns the devices of an execution, and on GPUs also whether a seed repeats the run bit for bit.

    >>> devices_of(Jit())
    '1 x cpu'
    """
    mesh = (execution if isinstance(execution, Jit) else Jit()).mesh()
    text = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    if not is_gpu(mesh):
        return text
    return text + (", deterministic" if getattr(execution, "deterministic", False) else ", not deterministic")


def attackers_of(sampler: Any) -> str | None:
    """Returns who attacks in the cohorts of a sampler; None if it has no attackers.

    >>> from fedsim import FederatedData, UniformSampler, attacks
    >>> data = FederatedData.from_arrays({"x": [1.0, 2.0, 3.0, 4.0]}, sizes=[1] * 4)
    >>> attackers_of(Attacked(UniformSampler(data, clients=2, seed=0), attacks.SignFlip(), attackers=["1", "3"], seed=0))
    '2 of 4 clients: 1, 3'
    """
    while not isinstance(sampler, Attacked):
        if (sampler := getattr(sampler, "sampler", None)) is None:
            return None
    if (ids := sampler.attacker_ids) is None:
        share = f"{sampler.fraction:.0%}" if sampler.fraction >= 0.1 else f"{100 * sampler.fraction:.2g}%"
        return f"{share} of each cohort, drawn anew in every round"
    shown = ", ".join(ids[:_MOST_SHOWN]) + ", ..." * (len(ids) > _MOST_SHOWN)
    return f"{len(ids)} of {sampler.data.num_clients} clients" + f": {shown}" * bool(ids)


def closing_table(
    history: Sequence[Line],
    *,
    round: int,
    rounds: int,
    seconds: float,
    rate: float | None,
    devices: str,
    written: Sequence[str],
    attackers: str | None = None,
    warning: str | None = None,
    stopped: str | None = None,
    privacy: Guarantee | None = None,
) -> str:
    """Returns a table of the last evaluation (over all examples and over clients), the time, the devices and the files.

    Args:
      history: the lines of the metrics.
      round: the number of finished rounds.
      rounds: the number of rounds of the whole run.
      seconds: the wall time of this process's rounds, compilation and evaluations included.
      rate: rounds per second without compilation; None if it was not measured.
      devices: the text of `devices_of`.
      written: the files, one line each.
      attackers: the text of `attackers_of`.
      warning: a text below the table, for example about a loss that diverged.
      stopped: why the run ended before its last round; None if it did not.
      privacy: the guarantee of differential privacy, if there is one.

    >>> history = [{"round": 1, "test_accuracy": 0.5}]
    >>> print(closing_table(history, round=1, rounds=1, seconds=2.0, rate=None, devices="1 x cpu", written=["m.jsonl"]))
    after round 1 of 1
    <BLANKLINE>
    test                    all   mean   std  worst 10%
                       examples    over clients
    accuracy             0.5000      -     -          -
    <BLANKLINE>
    wall time  2.0 s
    devices    1 x cpu
    written    m.jsonl
    """
    rows = [f"after round {round} of {rounds}", ""]
    if stopped:
        rows[0] += f": {stopped}"
    evaluated = next((line for line in reversed(history) if scalar_metrics(line)), None)
    if evaluated is not None and evaluated["round"] != round:
        rows[0] += f"; evaluated after round {evaluated['round']}"
    if evaluated is not None:
        shown = [split for split in SPLITS if scalar_metrics(evaluated, split)]
        for split in shown:
            rows += [evaluation_table(evaluated, split, diverged=warning is not None), ""]
        rows += [*_best_by_validation(history), ""] if "validation" in shown else []
    rows.append(f"wall time  {seconds:.1f} s")
    if rate:
        shown_rate = f"{rate:{',.0f' if rate >= 10 else '.2f' if rate >= 0.01 else '.2g'}}"
        rows[-1] += f", {shown_rate} rounds/s without compilation and evaluations"
    clock = [line for line in history if "updates_late" in line]
    if clock:
        total = {name: sum(line[name] for line in clock) for name in ("updates_late", "updates_lost", "updates_dropped")}
        counts = ", ".join(f"{count:,} {name.removeprefix('updates_')}" for name, count in total.items())
        sent = sum(line["messages_down"] + line["messages_up"] for line in clock)
        kind = next(kind for kind in ("simulated", "elapsed") if f"{kind}_seconds" in clock[-1])
        rows.append(f"{kind:<11}{clock[-1][f'{kind}_seconds']:,.1f} s, {sent:,} messages; updates: {counts}")
    if attackers:
        rows.append(f"attackers  {attackers}")
    if privacy:
        rows += described_guarantee(privacy, round)
    rows.append(f"devices    {devices}")
    rows += [f"{'written' if i == 0 else '':<11}{place}" for i, place in enumerate(written)]
    if warning:
        rows += ["", textwrap.fill(f"warning    {warning}", 100, subsequent_indent=" " * 11)]
    return "\n".join(rows)


def described_guarantee(privacy: Guarantee, round: int) -> list[str]:
    """Returns lines that say what a guarantee is after a number of rounds, and what it assumes.

    >>> from fedsim.privacy import EveryRound, Guarantee
    >>> guarantee = Guarantee(noise_multiplier=4.0, participation=EveryRound(), delta=1e-5)
    >>> print("\\n".join(described_guarantee(guarantee, 10)[:2]))
    privacy    ε = 3.34 with δ = 1e-05 if a client is added or removed, with all of its examples.
               Of the sampling: every client takes part in every round (no amplification by sampling).
    """
    texts = [f"privacy    {privacy.text(round)}.", *[f"           {text}" for text in privacy.assumptions]]
    return [row for text in texts for row in textwrap.wrap(text, 100, subsequent_indent=" " * 11, drop_whitespace=True)]


def evaluation_table(line: Line, split: str = "test", *, diverged: bool = False) -> str:
    """Returns a table of an evaluation, over all examples and over clients.

    Args:
      line: of the metrics, see ``metrics.jsonl``.
      split: the name of the data, with which the names of metrics begin.
      diverged: whether the run had a loss that diverged.

    >>> print(evaluation_table({"round": 1, "train_accuracy": 0.5}, "train"))
    train                   all   mean   std  worst 10%
                       examples    over clients
    accuracy             0.5000      -     -          -
    """
    names = scalar_metrics(line, split)
    width = max([16, *(len(name) - 3 for name in names)])
    rows = []
    for name in names:
        mean, deviation, worst = (line.get(f"{name}_clients_{key}") for key in ("mean", "std", "worst10"))
        cells = [_number(line[name]), _number(mean, 3), _number(deviation, 3, beside=mean or 0.0), _number(worst, 3)]
        if is_diverged(line[name], diverged):
            cells = ["diverged", "-", "-", "-"]
        rows.append((name.removeprefix(f"{split}_"), *cells))
    every = [(split, "all", "mean", "std", "worst 10%"), *rows]
    widths = [max(least, *(len(row[i]) + 1 for row in every)) for i, least in enumerate((width, 11, 7, 6, 11))]
    head, *body = (
        f"{row[0]:<{widths[0]}}" + "".join(f"{x:>{n}}" for x, n in zip(row[1:], widths[1:], strict=True)) for row in every
    )
    above = f"{'':<{widths[0]}}{'examples':>{widths[1]}}{'over clients':>{widths[2] + widths[3] + 3}}"
    return "\n".join([head, above, *body])


def _best_by_validation(history: Sequence[Line]) -> list[str]:
    """Returns a line with the best round by the validation data, and the same metric of the test data after this round."""
    best = best_round(history)
    line = next((line for line in history if line["round"] == best and score_name(line)), None)
    if line is None or (name := score_name(line)) is None:
        return []
    metric = name.removeprefix("validation_")
    tested = f", test {metric} {_number(line[f'test_{metric}'])}" if f"test_{metric}" in line else ""
    return [f"best       round {best}, by validation {metric} {_number(line[name])}{tested}"]


def draw_learning_curve(history: Sequence[Line], path: Path, title: str) -> None:
    """Draws the test accuracy (or the first test metric) and below it the training loss over the rounds into a picture file.

    The same metric of the validation data is drawn beside it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "curve.png"
    >>> draw_learning_curve([{"round": 1, "loss": 0.7}, {"round": 2, "loss": 0.5}], path, "an example")
    >>> path.exists()
    True
    """
    loss = _series(history, "loss")
    tests = [name for line in history for name in scalar_metrics(line, "test")]
    metric = next((name for name in ("test_accuracy", "test_personal_accuracy") if name in tests), tests[0] if tests else None)
    panels = bool(metric) + bool(loss[0])
    figure = new_figure(7, 1.6 + 2.2 * max(1, panels))
    every: Any = figure.subplots(max(1, panels), sharex=True, squeeze=False)[:, 0]
    if metric:
        axes, name = every[0], metric.removeprefix("test_")
        axes.set_ylabel(f"test {name}")
        axes.plot(*_series(history, metric), color=BLUE, marker="o", markersize=3, label=f"test {name}")
        if metric == "test_accuracy" and "test_personal_accuracy" in tests:
            own = _series(history, "test_personal_accuracy")
            axes.plot(*own, color=ORANGE, marker="s", markersize=3, label="personal models")
        validation = _series(history, metric.replace("test_", "validation_", 1))
        if validation[0]:
            axes.plot(*validation, color=GREEN, marker="^", markersize=3, label=f"validation {name}")
        worst = _series(history, f"{metric}_clients_worst10")
        if worst[0]:
            axes.plot(*worst, color=BLUE, linestyle=":", marker="v", markersize=3, label="worst 10 % of clients")
        if name == "accuracy":
            axes.set_ylim(0, 1)
        if len(axes.lines) > 1:
            add_legend(figure, axes)
    if loss[0]:
        every[-1].set_ylabel("training loss\n(mean over the cohort)")
        every[-1].plot(*loss, color=GREY, linewidth=1, marker="o" if len(loss[0]) == 1 else None, markersize=3)
        every[-1].set_ylim(bottom=min(0, *loss[1]))
    every[0].set_title(shorten(title, 100), fontsize=11)
    every[-1].set_xlabel("round")
    whole_ticks(every[-1].xaxis)
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path)


def _series(history: Sequence[Line], name: str) -> tuple[list[int], list[float]]:
    points = [(line["round"], line[name]) for line in history if line.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]


def _number(value: float | None, digits: int = 4, beside: float = 0.0) -> str:
    return "-" if value is None else shown_number(value, beside=beside, digits=digits)
