"""``fedsim export``: writes the parameters of a run to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import fedsim
from fedsim.commands._options import Option, parse
from fedsim.experiment import saved_round
from fedsim.saved_arrays import checkpoint_folder

_ABOUT = "Write the parameters of the run in FOLDER to a file, by their names in the model, such as linear/w."
_USAGE = f"""\
usage: fedsim export FOLDER FILE.safetensors|FILE.npz [--which last|best]

{_ABOUT}"""
_OPTIONS = {
    "which": Option("", Literal["last", "best"], "last", "The checkpoint: the newest one, or that of the best evaluation.")
}


def main(arguments: list[str]) -> int:
    """Runs ``fedsim export`` with these arguments and returns the exit status."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(_USAGE)
        return 0 if {"-h", "--help"} & set(arguments) else 2
    folder, file, *rest = arguments
    chosen = parse(_OPTIONS, rest, "fedsim export FOLDER FILE", _ABOUT)
    round = saved_round(folder, chosen["which"])
    params = fedsim.read_params(checkpoint_folder(Path(folder) / "checkpoints", round))
    fedsim.write_params(file, params)
    size = sum(array.size for array in params.values())
    print(f"{file}: {len(params)} arrays with {size:,} numbers, after round {round}")
    return 0
