"""Writes ``docs/reproductions.md`` from ``docs/reproductions/*.json``: ``python docs/write_reproductions.py``."""

from __future__ import annotations

from pathlib import Path

from fedsim.experiment import reproductions

HERE = Path(__file__).parent
HEAD = """\
# Published experiments, run again

Made by `fedsim reproduce NAME --data DIR --out docs/reproductions/NAME.json` and `python docs/write_reproductions.py`.
`fedsim reproduce` lists the experiments, `--only CASE` runs a part of one, `--quick` shows that it runs. Settings, values of
every seed, machine, date, commit and versions of each row are in `docs/reproductions/NAME.json`. *paper* is what the paper
states, *ours* the mean and the standard deviation over seeds; *time* is that of all its runs on the machine below it, shared
with other work, and no measure of speed. What is smaller than the paper's experiment says REDUCED.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(_section, reproductions.REPRODUCTIONS.values())])


def _section(reproduction: reproductions.Reproduction) -> str:
    rows = reproductions.read(HERE / "reproductions" / f"{reproduction.name}.json", reproduction.name)
    lines = [f"## {reproduction.name}", "", f"{reproduction.title}.", "", reproduction.paper, "", reproduction.about, ""]
    machines = dict.fromkeys(f"{row['cpu']}, {row['cores']} cores, {row['device']}, {row['date'][:10]}" for row in rows)
    done = {row["id"] for row in rows}
    missing = [case for case in reproduction.cases(reproductions.Request()) if case not in done]
    lines += [reproductions.markdown_table(rows), "", f"Machine: {'; '.join(machines)}.", ""] if rows else []
    if missing:
        names = " ".join(missing)
        lines += [f"Not run yet: `fedsim reproduce {reproduction.name} --only {names}`. Takes {reproduction.takes}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    (HERE / "reproductions.md").write_text(page(), encoding="utf-8")
