"""``fedsim report``: writes runs as one HTML page."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

from fedsim.commands._options import Option, parse
from fedsim.comparison import read_runs, report
from fedsim.durable_files import replace_text

_ABOUT = (
    "Write a page of runs: what differs between them, their metrics and costs, curves, and results of clients. It is one HTML "
    "file that needs no network. No code that a configuration names is run."
)
_USAGE = f"""\
usage: fedsim report RUN|SWEEP ... [--out report.html] [--title TITLE]

{textwrap.fill(_ABOUT, 100)}"""
_OPTIONS = {
    "out": Option("", str, "report.html", "The HTML file."),
    "title": Option("", str, "fedsim: report of runs", "Title of the page."),
}


def main(arguments: list[str]) -> int:
    """Runs ``fedsim report`` with these arguments and returns the exit status."""
    folders = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if not folders:
        print(_USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    chosen = parse(_OPTIONS, arguments[len(folders) :], "fedsim report RUN|SWEEP ...", _ABOUT)
    runs, out = read_runs(*folders), Path(chosen["out"])
    if not out.absolute().parent.is_dir():
        raise ValueError(f"Expected --out in a folder that exists, got {out}: create {out.parent} first.")
    replace_text(out, report(runs, chosen["title"]))
    print(f"written    {out}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, {out.stat().st_size / 1e6:.2f} MB")
    return 0
