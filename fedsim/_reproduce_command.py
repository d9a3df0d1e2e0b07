"""``fedsim reproduce``: a list of published experiments, and one of them run again."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import fedsim
from fedsim.experiment import reproductions


def main(arguments: Sequence[str]) -> int:
    """Runs ``fedsim reproduce`` with what follows it; wrong options end in ``SystemExit``."""
    options = _parser().parse_args(arguments)
    if options.name is None:
        width = max(map(len, reproductions.REPRODUCTIONS)) + 2
        for name, reproduction in reproductions.REPRODUCTIONS.items():
            print(f"{name:<{width}}{reproduction.title}\n{'':<{width}}takes {reproduction.takes}")
        print("\nTo run one: fedsim reproduce NAME --data DIR. To see that it runs: --quick. Results: docs/reproductions.md.")
        return 0
    reproduction = reproductions.get(options.name)
    request = reproductions.Request(
        data=Path(options.data).expanduser() if options.data else None,
        seeds=options.seeds,
        rounds=options.rounds,
        quick=options.quick,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if options.cases:
        print("\n".join(reproductions.chosen(reproduction, request, options.only)))
        return 0
    with warnings.catch_warnings():
        # In a process where JAX is running already, its devices are the caller's business.
        warnings.simplefilter("ignore", UserWarning)
        fedsim.use_all_cores()
    out = Path(options.out or f"reproductions/{reproduction.name}.json").expanduser()
    print(f"{reproduction.title}\n{reproduction.paper}\n", file=sys.stderr)
    records = reproductions.reproduce(reproduction, request, only=options.only, out=out)
    print(reproductions.text_table(records))
    print(f"\n{reproduction.about}\nAll rows so far: {out}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fedsim reproduce",
        description="Runs a published experiment again and prints paper | ours | seeds | time. Without a name: a list of them.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="which; `fedsim reproduce` lists them")
    parser.add_argument("--data", metavar="DIR", help="folder of the datasets' folders (DIR/mnist, ...), or of the files")
    parser.add_argument("--seeds", metavar="N", type=int, help="how many seeds; default: as many as the paper, or as is usual")
    parser.add_argument("--rounds", metavar="N", type=int, help="at most this many rounds; default: the paper's")
    parser.add_argument("--quick", action="store_true", help="a few rounds of one seed, to see that it runs")
    parser.add_argument("--only", metavar="CASE", nargs="+", default=[], help="these cases only; * stands for anything")
    parser.add_argument("--cases", action="store_true", help="list the cases, and run nothing")
    parser.add_argument("--out", metavar="FILE", help="JSON file that gets the rows; default: reproductions/NAME.json")
    return parser
