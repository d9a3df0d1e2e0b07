"""Writes docs/datasets.md from the registry of datasets: ``python docs/write_datasets.py``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedsim import datasets, experiment
from fedsim.algorithms import ALGORITHMS

# Models that define another task on a dataset.
TASKS = {"emnist62": [None, "emnist_autoencoder"]}

HEAD = """\
# Datasets

The datasets that `fedsim.datasets.load(NAME)` and `fedsim run --dataset NAME` know by name. This page is written by
`python docs/write_datasets.py` from the registry; do not edit it. `fedsim datasets describe NAME --picture FILE.png` shows the
same in a shell, with statistics of the data and a picture. Options are written in parentheses:
`"mnist(partition='dirichlet', alpha=0.1)"`. Your own file is a
dataset without code, see [own data](own_data.md); to add a dataset as code see
[`examples/own_dataset.py`](../examples/own_dataset.py) and [the notebook](../colab/datasets.ipynb).

Numbers of clients and examples are the published ones, or those with default options if a dataset is generated or divided by a
partitioner. If there is one number of clients, all splits have the same clients.

`tfds:NAME`, your own tables and datasets of Hugging Face need the extra `formats`: `pip install "fedsim-jax[formats]"` where
fedsim is installed.

Datasets without clients of their own (`digits`, `mnist`, `fashion_mnist`, `cifar10`, `tfds:NAME`) are divided by one partition
for all splits: the shares of labels of a client are as equal in train and test as whole examples allow, and every test example
has exactly one client. Clients with few examples still differ: the mean distance is 0.65 for the 100 clients of `digits`, where
0 is equal and 2 is disjoint. `test_fraction=0.3` instead takes 30 % of each client's own examples for test.
`fedsim.datasets.partition_splits` and `partition_and_split` do the same for your own arrays, and
`fedsim.heterogeneity.split_distance` measures how far the label shares of train and test differ.

Datasets with clients of their own can be cut to fewer: `"emnist62(clients=360)"` keeps 360 writers, drawn by `seed`, in train
and test. Splits with other clients keep the same proportion of theirs: the test clients of `cifar100` and of MNIST's writers,
and `held_out` of Stack Overflow. Of the test users of Stack Overflow those stay that are among the drawn users of train. The
whole dataset is downloaded and converted once, client by client; after that, only the rows of the drawn clients are read.

`fedsim run` sets the option `seed` of a dataset to `--seed`, unless the name of the dataset gives another one, as in
`"digits(seed=3)"`. `fedsim.datasets.load` keeps the default.

In the set-ups below, values "chosen for fedsim" were not chosen on validation data: those of the digits were chosen on test
examples. To compare algorithms, choose the rates again with `--validation 0.2` and several values of
`--client-learning-rate`.
"""


def page() -> str:
    """Returns the whole page."""
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
        download = "none: provide the files with `data=DIR` or `--data DIR`"
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
    """Returns the defaults of `fedsim run`, or an empty text if the dataset has none of its own."""
    if not experiment.published(dataset, "fedavg", model).values:
        return ""
    # Algorithms without their own defaults for this dataset have those of `others`.
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
    return f"{title} (–: the general default, or no such option):\n\n{_table(('algorithm', *heads, 'from'), rows)}"


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
