"""``fedsim replay``: runs one client's round of a run again, alone and in plain Python."""

from __future__ import annotations

import dataclasses
import textwrap

from fedsim.commands._options import RUNS_CODE, TRUST, Option
from fedsim.commands._training import options_of_stored_run
from fedsim.experiment.driving import RunRound

_ABOUT = (
    "Run one client's round of the run in FOLDER again, alone and in plain Python, so that prints and breakpoints in the "
    f"algorithm work. Nothing is written into the folder. {RUNS_CODE}"
)
_USAGE = f"""\
usage: fedsim replay FOLDER --round R [--client C] [OPTIONS]

{textwrap.fill(_ABOUT, 100)}
Without --client, list the clients of the round. `fedsim replay FOLDER --help` lists the options."""
_OPTIONS = {
    "round": Option("", int, dataclasses.MISSING, "The round, from 1 as in metrics.jsonl."),
    "client": Option(
        "", str | None, None, "Id of a client, or its position in the population; default: list the clients of the round."
    ),
    "trust": TRUST,
}


def main(arguments: list[str]) -> int:
    """Runs ``fedsim replay`` with these arguments and returns the exit status."""
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    folder, *rest = arguments
    chosen, settings = options_of_stored_run(folder, rest, _OPTIONS, "fedsim replay FOLDER", _ABOUT)
    of_run = RunRound.read(folder, chosen["round"], settings)
    print(of_run.table() if chosen["client"] is None else of_run.replay(chosen["client"]))
    return 0
