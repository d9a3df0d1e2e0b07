"""Makes the tables of fedsim's benchmarks: ``python -m benchmarks``. See README.md."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import catalogue, hardware, tables
from benchmarks.tables import MODELS, PEERS
from benchmarks.worker import ContenderError

TABLES = tables.TABLES | catalogue.TABLES


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="tables to make; default: all")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="models to train; the default depends on the table")
    parser.add_argument(
        "--contenders", nargs="+", choices=("fedsim", "floor", *PEERS), help="contenders of the table rounds; default: all"
    )
    parser.add_argument("--without", nargs="+", choices=PEERS, default=(), help="libraries to leave out of the table rounds")
    parser.add_argument("--repeats", type=int, default=5, help="number of turns of each contender")
    parser.add_argument("--seconds", type=float, default=4.0, help="approximate length of a turn")
    parser.add_argument("--unchecked", action="store_true", help="skip the check that contenders compute the same")
    parser.add_argument("--femnist", type=Path, metavar="DIR", help="folder with femnist_train.h5 and femnist_test.h5")
    parser.add_argument("--femnist-rounds", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3, help="number of runs on FEMNIST")
    parser.add_argument("--sizes", type=Path, metavar="CSV", help="number of test examples per EMNIST writer, for evaluation")
    parser.add_argument("--sqlite", type=Path, metavar="FILE", help="a file of clients written by FedJAX, for conversion")
    parser.add_argument("--emnist", type=Path, metavar="DIR", help="folder with client_sizes and emnist_byclass, for data")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON files")
    return parser.parse_args()


def text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.4g}"
    return str(value)


def show(rows: list[dict[str, Any]]) -> None:
    """Prints rows as a Markdown table."""
    heads = [head for head in dict.fromkeys(k for row in rows for k in row) if any(r.get(head) is not None for r in rows)]
    for line in (heads, ["---"] * len(heads), *([text(row.get(head)) for head in heads] for row in rows)):
        print("| " + " | ".join(line) + " |", flush=True)
    print()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    for table in args.only:
        stamp = hardware.stamp(args.device)
        parts: list[dict[str, Any]] = []
        print(f"\n{table}: {TABLES[table].__doc__}\n", flush=True)
        try:
            for part in TABLES[table](args):
                parts.append(part)
                show(part["rows"])
        except ContenderError as failure:
            print(f"{table}: {failure}", file=sys.stderr)
        if parts:  # also if a later part failed
            record = {"table": table, **stamp, "parts": parts}
            (args.out / f"{args.device}-{table}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
