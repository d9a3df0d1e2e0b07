"""``fedsim runs``: lists runs with their settings and last metrics."""

from __future__ import annotations

from fedsim.comparison import read_runs, runs_table

_USAGE = """\
usage: fedsim runs [FOLDER]

List the runs below FOLDER (default: runs) with their state, their last metrics and the options in which they differ."""


def main(arguments: list[str]) -> int:
    """Runs ``fedsim runs`` with these arguments and returns the exit status."""
    if len(arguments) > 1 or (arguments[:1] and arguments[0].startswith("-")):
        print(_USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    folder = arguments[0] if arguments else "runs"
    print(runs_table(read_runs(folder), folder))
    return 0
