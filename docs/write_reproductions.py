"""Writes ``docs/reproductions.md`` from ``docs/reproductions/*.json``: ``python docs/write_reproductions.py``."""

from __future__ import annotations

from pathlib import Path

from fedsim import reproductions

HERE = Path(__file__).parent
HEAD = """\
# Reproductions of published experiments, and comparisons without a published number

This page is written by `fedsim reproduce NAME --data DIR --out docs/reproductions/NAME.json` and
`python docs/write_reproductions.py`.
`fedsim reproduce` lists the experiments, `--only CASE` runs some cases of one, and `--quick` is a short test. The settings, the
values of every seed, the machine, the date, the commit and the versions of each row are in `docs/reproductions/NAME.json`.
*paper* is the number that the section's paper states, and a dash where it states none. The notes of a section say so if the
column has another source: scikit-learn in `vertical`, a replication in `fedprox`, recalled numbers in `unus_dssgd`.
`unus_faults`, `four_ways`, `data_parallel`, `diloco`, `few_labels` and `transfer` have no published numbers and compare methods
with each other. *ours* is the mean and the standard deviation over seeds; the error of a result with a single seed is unknown.
*time* is the time of all runs of a row on the machine below the table, which did other work at the same time, so it does not
measure speed. Experiments that are smaller than the paper's are marked REDUCED.
"""


def page() -> str:
    """Returns the whole page."""
    return "\n".join([HEAD, *map(_section, reproductions.REPRODUCTIONS.values())])


def _section(reproduction: reproductions.Reproduction) -> str:
    rows = reproductions.read(HERE / "reproductions" / f"{reproduction.name}.json", reproduction.name)
    lines = [f"## {reproduction.name}", "", f"{reproduction.title}.", "", reproduction.paper, "", reproduction.notes, ""]
    machines = dict.fromkeys(f"{row['cpu']}, {row['cores']} cores, {row['device']}, {row['date'][:10]}" for row in rows)
    done = {row["id"] for row in rows}
    missing = [case for case in reproduction.cases(reproductions.Request()) if case not in done]
    lines += [reproductions.markdown_table(rows), "", f"Machine: {'; '.join(machines)}.", ""] if rows else []
    if missing:
        names = " ".join(missing)
        lines += [f"Not yet run: `fedsim reproduce {reproduction.name} --only {names}`. Takes {reproduction.duration}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    (HERE / "reproductions.md").write_text(page(), encoding="utf-8")
