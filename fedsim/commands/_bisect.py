"""``fedsim bisect``: where two runs that should agree differ first, or where a run went out of line."""

from __future__ import annotations

import itertools
import textwrap

from fedsim import experiment
from fedsim.commands._options import RUNS_CODE, TRUST, parse
from fedsim.commands._training import use_devices
from fedsim.experiment.driving import check_trusted, is_sweep

_ABOUT = (
    "Find the first round, client and array in which two runs that should agree differ, from their metrics and checkpoints and "
    f"by running both again; of a single run, the first client whose loss or update is out of line. {RUNS_CODE}"
)
_USAGE = f"""\
usage: fedsim bisect RUN_A [RUN_B] [--trust]

{textwrap.fill(_ABOUT, 100)}"""


def main(arguments: list[str]) -> int:
    """Runs ``fedsim bisect`` with these arguments and returns the exit status."""
    folders = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if not 1 <= len(folders) <= 2:
        print(_USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    chosen = parse({"trust": TRUST}, arguments[len(folders) :], "fedsim bisect RUN_A [RUN_B]", _ABOUT)
    for folder in folders if not chosen["trust"] else ():
        if not is_sweep(folder):
            check_trusted(folder, experiment.read_config(folder))
    use_devices()
    print(experiment.bisect(*folders))
    return 0
