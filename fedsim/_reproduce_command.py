"""``fedsim reproduce``: lists published experiments, and repeats one of them."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import fedsim


def main(arguments: Sequence[str]) -> int:
    """Runs ``fedsim reproduce`` with these arguments. Wrong options raise ``SystemExit``."""
    from fedsim import reproductions  # only this command imports it

    options = _parser().parse_args(arguments)
    if options.name is None:
        width = max(map(len, reproductions.REPRODUCTIONS)) + 2
        for name, reproduction in reproductions.REPRODUCTIONS.items():
            print(f"{name:<{width}}{reproduction.title}\n{'':<{width}}takes {reproduction.duration}")
        print("\nTo run one: fedsim reproduce NAME --data DIR. For a short test: --quick. Results: docs/reproductions.md.")
        return 0
    reproduction = reproductions.get(options.name)
    request = reproductions.Request(
        data=Path(options.data).expanduser() if options.data else None,
        seeds=options.seeds,
        rounds=options.rounds,
        quick=options.quick,
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if options.cases:
        print("\n".join(reproductions.select_cases(reproduction, request, options.only)))
        return 0
    with warnings.catch_warnings():
        # If JAX has started already, the caller has chosen its devices.
        warnings.simplefilter("ignore", UserWarning)
        fedsim.use_all_cores()
    out = Path(options.out or f"reproductions/{reproduction.name}.json").expanduser()
    print(f"{reproduction.title}\n{reproduction.paper}\n", file=sys.stderr)
    records = reproductions.reproduce(reproduction, request, only=options.only, out=out)
    print(reproductions.text_table(records))
    print(f"\n{reproduction.notes}\nAll results so far: {out}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "fedsim reproduce",
        description="Repeat a published experiment, and print the paper's results next to those of fedsim, with the number of "
        "seeds and the time. Without a name, list the experiments.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of the experiment; `fedsim reproduce` lists them")
    parser.add_argument(
        "--data", metavar="DIR", help="folder with a folder for each dataset (DIR/mnist, ...), or with the files themselves"
    )
    parser.add_argument("--seeds", metavar="N", type=int, help="number of seeds; default: that of the paper, or a usual number")
    parser.add_argument("--rounds", metavar="N", type=int, help="largest number of rounds; default: that of the paper")
    parser.add_argument("--quick", action="store_true", help="run only a few rounds of one seed, as a test")
    parser.add_argument("--only", metavar="CASE", nargs="+", default=[], help="run only these cases; * matches any characters")
    parser.add_argument("--cases", action="store_true", help="list the cases and exit")
    parser.add_argument(
        "--out", metavar="FILE", help="JSON file to which the results are added; default: reproductions/NAME.json"
    )
    return parser
