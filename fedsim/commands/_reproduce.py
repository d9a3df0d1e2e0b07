"""``fedsim reproduce``: lists published experiments, and repeats one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from fedsim import reproductions
from fedsim.commands._options import say_repeated, shown_as
from fedsim.commands._training import use_devices


def main(arguments: list[str]) -> int:
    """Runs ``fedsim reproduce`` with these arguments and returns the exit status. Wrong options raise ``SystemExit``."""
    say_repeated(arguments)
    return tyro.cli(reproduce, args=arguments, prog="fedsim reproduce", config=(tyro.conf.FlagCreatePairsOff,))


def reproduce(
    name: Annotated[str | None, tyro.conf.Positional, shown_as("[NAME]")] = None,
    data: Annotated[str | None, shown_as("DIR")] = None,
    seeds: Annotated[int | None, shown_as("N")] = None,
    rounds: Annotated[int | None, shown_as("N")] = None,
    quick: bool = False,
    only: Annotated[tuple[str, ...], shown_as("CASE ...")] = (),
    cases: bool = False,
    out: Annotated[str | None, shown_as("FILE")] = None,
) -> int:
    """Repeat a published experiment, and print the paper's results next to those of fedsim.

    The number of seeds and the time are printed, too. Without a name, list the experiments.

    Args:
      name: name of the experiment; `fedsim reproduce` lists them
      data: folder with a folder for each dataset (DIR/mnist, ...), or with the files themselves
      seeds: number of seeds; default: that of the paper, or a usual number
      rounds: largest number of rounds; default: that of the paper
      quick: run only a few rounds of one seed, as a test
      only: run only these cases; * matches any characters
      cases: list the cases and exit
      out: JSON file to which the results are added; default: reproductions/NAME.json
    """
    if name is None:
        width = max(map(len, reproductions.REPRODUCTIONS)) + 2
        for each, reproduction in reproductions.REPRODUCTIONS.items():
            print(f"{each:<{width}}{reproduction.title}\n{'':<{width}}takes {reproduction.duration}")
        print("\nTo run one: fedsim reproduce NAME --data DIR. For a short test: --quick. Results: docs/reproductions.md.")
        return 0
    reproduction = reproductions.get(name)
    request = reproductions.Request(
        data=Path(data).expanduser() if data else None,
        seeds=seeds,
        rounds=rounds,
        quick=quick,
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if cases:
        print("\n".join(reproductions.select_cases(reproduction, request, only)))
        return 0
    use_devices()
    results = Path(out or f"reproductions/{reproduction.name}.json").expanduser()
    print(f"{reproduction.title}\n{reproduction.paper}\n", file=sys.stderr)
    records = reproductions.reproduce(reproduction, request, only=only, out=results)
    print(reproductions.text_table(records))
    print(f"\n{reproduction.notes}\nAll results so far: {results}.")
    return 0
