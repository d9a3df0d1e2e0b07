"""``fedsim compare``: compares algorithms, or runs that differ in another option, over seeds."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Literal

from fedsim.commands._options import Option, parse
from fedsim.comparison import compare, read_runs
from fedsim.durable_files import writing

_ABOUT = (
    "Compare groups of runs over seeds: means with 95 % intervals, the best setting of each group by validation data, what a "
    "target costs, and paired tests. No code that a configuration names is run."
)
_USAGE = f"""\
usage: fedsim compare RUN|SWEEP ... [--group algorithm] [--target accuracy=0.8] [OPTIONS]

{textwrap.fill(_ABOUT, 100)}
`fedsim compare --help` lists the options."""
_OPTIONS = {
    "group": Option("", str, "algorithm", "Fields of the configuration by which runs are grouped, separated by commas."),
    "metric": Option("", str | None, None, "What is compared, such as accuracy or loss; default: the accuracy, if any."),
    "at": Option(
        "",
        Literal["last", "best", "last10"],
        "last",
        "Which value of a run is compared: after the last round, after the best one, or the mean of the last ten evaluations.",
    ),
    "target": Option("", str | None, None, "A metric and its value, such as accuracy=0.8: rounds, MB and seconds to it."),
    "difference": Option(
        "",
        float | None,
        None,
        "Say how many more seeds a difference of this size needs, such as 0.01; default: the observed.",
    ),
    "csv": Option("output", str | None, None, "Write a line for each setting to this CSV file."),
    "latex": Option("output", str | None, None, "Write a table of the best settings to this LaTeX file, for booktabs."),
    "figure": Option("output", str | None, None, "Draw means with 95 % bands into this .pdf or .png file."),
    "against": Option("output", Literal["rounds", "bytes", "seconds"], "rounds", "What the figure has on its horizontal axis."),
}


def main(arguments: list[str]) -> int:
    """Runs ``fedsim compare`` with these arguments and returns the exit status."""
    folders = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if not folders and not {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 2
    chosen = parse(_OPTIONS, arguments[len(folders) :], "fedsim compare RUN|SWEEP ...", _ABOUT)
    figure = chosen["figure"]
    if figure is not None and Path(figure).suffix not in (".pdf", ".png"):
        raise ValueError(f"Expected --figure to be a .pdf or .png file, got {figure}: give FILE.pdf or FILE.png.")
    files = {name: Path(chosen[name]) for name in ("csv", "latex", "figure") if chosen[name] is not None}
    for name, file in files.items():
        if not file.absolute().parent.is_dir():
            raise ValueError(f"Expected --{name} in a folder that exists, got {file}: create {file.parent} first.")
    comparison = compare(
        read_runs(*folders),
        group=[name.strip().replace("-", "_") for name in chosen["group"].split(",") if name.strip()],
        metric=chosen["metric"],
        at=chosen["at"],
        target=None if chosen["target"] is None else _target(chosen["target"]),
        difference=chosen["difference"],
    )
    print(comparison.table())
    for name, text in (("csv", comparison.csv), ("latex", comparison.latex)):
        if name in files:
            with writing(files[name]):
                files[name].write_text(text(), encoding="utf-8")
    if figure is not None:
        with writing(files["figure"]):
            comparison.plot(chosen["against"]).savefig(figure)
    if files:
        print(f"\nwritten  {', '.join(map(str, files.values()))}")
    return 0


def _target(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip().removeprefix("test_"), float(value)
    except ValueError:
        raise ValueError(f"Expected --target METRIC=NUMBER, got {text}: give accuracy=0.8, for example.") from None
