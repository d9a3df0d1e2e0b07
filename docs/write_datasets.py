"""Writes docs/datasets.md from what the registry says: ``python docs/write_datasets.py``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedsim import datasets, experiment
from fedsim.algorithms import ALGORITHMS

# Models that make another task of a dataset.
TASKS = {"emnist62": [None, "emnist_autoencoder"]}

HEAD = """\
# Datasets

What `fedsim.datasets.load(NAME)` and `fedsim run --dataset NAME` know by name. Written by `python docs/write_datasets.py`
from the registry, so do not edit it. `fedsim datasets describe NAME --picture FILE.png` shows the same in a shell, with
what was found in the data, and a picture. Options go in parentheses: `"mnist(partition='dirichlet', alpha=0.1)"`. How to
make one of your own: [`examples/own_dataset.py`](../examples/own_dataset.py), [the notebook](../colab/datasets.ipynb).

Clients and examples are those published or, of generated datasets and of those split by a partitioner, those by default. One
number of clients means that all splits have the same clients.
"""


def page() -> str:
    """The whole page."""
    descriptions = [datasets.describe(name) for name in datasets.names()]
    rows = [
        (
            f"[`{about.name}`](#{about.name.lower().replace(':', '')})",
            " + ".join(dict.fromkeys(_count(clients, "any") for clients, _ in about.splits.values())) or "any",
            " + ".join(_count(examples, "any") for _, examples in about.splits.values()) or "any",
            about.task,
            f"`{about.default_model}`" if about.default_model else "–",
            re.split(r" ?[;:(]", about.licence)[0],
        )
        for about in descriptions
    ]
    parts = [HEAD, _table(("name", "clients", "examples", "task", "default model", "licence"), rows)]
    return "\n".join([*parts, *map(_section, descriptions)]) + "\n"


def _section(about: datasets.Description) -> str:
    if about.needs_data:
        download = "none: bring the files, `data=DIR` or `--data DIR`"
    elif about.download_bytes == 0:
        download = "none"
    else:
        download = "size not published" if about.download_bytes is None else f"{about.download_bytes:,} bytes"
    facts = [("source", about.source), ("download", download), ("licence", about.licence), ("cite", about.citation)]
    splits = [
        f"{split}: {_count(clients, 'any number of')} clients, {_count(examples, 'any number of')} examples"
        for split, (clients, examples) in about.splits.items()
    ]
    facts = [("splits", "; ".join(splits)), *facts] if splits else facts
    facts += [("default model", f"`{about.default_model}`")] if about.default_model else []
    lines = [
        f"## {about.name}",
        "",
        f"{about.task[0].upper()}{about.task[1:]}.",
        "",
        *(f"- {name}: {fact}" for name, fact in facts),
    ]
    for title, features in (("In the source", about.source_features), ("Loaded", about.features)):
        if features:
            lines += ["", f"{title}:", "", *(f"- `{name}`: {meaning}" for name, meaning in features.items())]
    if about.defaults:
        lines += ["", "Options:", "", *(_option(about, option) for option in about.defaults)]
    setups = [_setup(about.name, model) for model in TASKS.get(about.name, [None])]
    return "\n".join([*lines, *(part for setup in setups if setup for part in ("", setup.rstrip()))]) + "\n"


def _option(about: datasets.Description, option: str) -> str:
    default = about.defaults[option]
    written = option if default is inspect.Parameter.empty else f"{option}={default!r}"
    return f"- `{written}`: {about.options[option]}"


def _setup(dataset: str, model: str | None) -> str:
    """What `fedsim run` takes unless told otherwise; empty if there is nothing that is the dataset's own."""
    if not experiment.published(dataset, "fedavg", model).values:
        return ""
    # Algorithms of which nothing of their own is known for this dataset train like `others`.
    others = experiment.published(dataset, "others", model)
    setups = {algorithm: experiment.published(dataset, algorithm, model) for algorithm in ALGORITHMS}
    setups = {name: setup for name, setup in setups.items() if name == "fedavg" or setup.values != others.values}
    names = list(dict.fromkeys(name for setup in setups.values() for name in setup.values))
    rows = []
    for algorithm, setup in setups.items():
        fields = {field.name for field in dataclasses.fields(ALGORITHMS[algorithm])}
        trains = "client_optimizer" in fields
        values = [setup.values.get(name) if trains or not name.startswith("client_") else None for name in names]
        rows.append((f"`{algorithm}`", *map(_value, values), setup.source))
    title = f"Set-up of `fedsim run` with `--model {model}`" if model else "Set-up of `fedsim run`"
    heads = [name.replace("_", " ") for name in names]
    return f"{title} (–: the general default, or none):\n\n{_table(('algorithm', *heads, 'from'), rows)}"


def _value(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def _count(count: int | None, unknown: str) -> str:
    return unknown if count is None else f"{count:,}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    Path(__file__).with_name("datasets.md").write_text(page(), encoding="utf-8")
