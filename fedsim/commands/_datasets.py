"""``fedsim datasets``: lists all datasets, describes one with a picture, converts files, and verifies packed files."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from fedsim import datasets, formats, heterogeneity, plots
from fedsim.commands._listing import print_facts, print_task, shown_population
from fedsim.commands._options import DataOptions, say_repeated, shown_as
from fedsim.data import FederatedData

_COUNT_LABELS_UP_TO = 10_000_000
_PLACES = 5
_MAX_LISTED = 6
_PICTURES = (".png", ".pdf", ".svg")


@dataclasses.dataclass(frozen=True)
class List:
    """Print a table of all datasets. SIZE is that of the download at first use."""

    def run(self) -> int:
        rows = [("NAME", "CLIENTS", "EXAMPLES", "SIZE", "CACHED", "LICENCE", "TASK")]
        for name in datasets.names():
            about = datasets.describe(name)
            clients = [count for count, _ in about.splits.values()]
            rows.append(
                (
                    name,
                    " + ".join(dict.fromkeys(map(_short, clients))) or "any",
                    " + ".join(_short(count) for _, count in about.splits.values()) or "any",
                    "your own" if about.needs_data else _size(about.download_bytes),
                    "–" if about.needs_data or about.download_bytes == 0 else "yes" if datasets.is_cached(name) else "no",
                    re.split(r" ?[;:(]", about.licence)[0],
                    about.task,
                )
            )
        if shutil.get_terminal_size((200, 24)).columns < sum(_widths(rows)) + 40:
            _print_narrow(rows)
        else:
            _table(rows)
        print("\nTo describe one: fedsim datasets describe NAME\nTo train on one: fedsim run --dataset NAME")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Describe(DataOptions):
    """Print the features of a dataset before and after preprocessing, its options, its source and its citation; draw it.

    If the dataset is available (cached, generated, or given by --data), also print statistics of its clients. Of a file of your
    own, first print its columns, with the values that are missing; with --label and --client-column or --partition, also what
    fedsim run would train on.

    Attributes:
      name: NAME, 'NAME(option=value)', FILE.py:FUNCTION, or a file or folder of your own data
      data: folder with the files of the dataset, instead of the cache
      picture: draw client sizes, labels and examples into this file (.png, .pdf or .svg); the data are downloaded if necessary
    """

    name: Annotated[str, tyro.conf.Positional, shown_as("NAME")]
    data: Annotated[str | None, shown_as("DIR")] = None
    picture: Annotated[str | None, shown_as("FILE.png")] = None

    def run(self) -> int:
        if self.picture:
            _check_picture(Path(self.picture))
        name = datasets.with_options(self.name, self.given())
        if datasets.is_file(name):
            self._describe_file(name)
            return 0
        about = datasets.describe(name)
        cached = datasets.is_cached(about.name)
        loaded = None
        if self.data or self.picture or cached or about.download_bytes == 0:
            loaded = datasets.load(name, data=self.data)
            about = loaded.description
        model = about.default_model
        facts = [
            ("task", about.task),
            *((split, shown_population(*counts)) for split, counts in about.splits.items()),
            *([("classes", str(about.num_classes))] if about.num_classes else []),
            *([("model", model if isinstance(model, str) else getattr(model, "__name__", str(model)))] if model else []),
            ("before", [f"{feature}: {text}" for feature, text in about.source_features.items()]),
            ("after", [f"{feature}: {text}" for feature, text in about.features.items()]),
            ("options", [_option(about, option) for option in about.defaults] or "none"),
            ("source", about.source),
            ("download", _download(about, cached)),
            ("licence", about.licence),
            ("cite", about.citation),
        ]
        print(about.name)
        print_facts(facts)
        if loaded is None:
            print(f"\n{_how_to_load(name, about)}")
            return 0
        print(f"\nStatistics{f' of {self.data}' if self.data else ''}")
        self._measure(loaded)
        return 0

    def _describe_file(self, name: str) -> None:
        """Prints the columns of a file and then, if its label and its clients are given, what would be trained on."""
        path, options = datasets.file_of(name)
        rows = formats.read_rows(path, header=options.get("header"), text_columns=[*filter(None, [options.get("client")])])
        print(f"{path}: {len(rows):,} rows{'' if rows.clients is None else f' of {len(set(rows.clients)):,} clients'}\n")
        _table([("COLUMN", "TYPE", "MISSING", "VALUES"), *(_described(rows, column) for column in rows.columns)])
        for column, kind in rows.unsupported.items():
            print(f"{column}  {kind}, which cannot be used")
        for column, absent in rows.missing.items():
            places = [rows.place(int(row)) for row in np.flatnonzero(absent)[:_PLACES]]
            print(f"\nMissing in {column}: {', '.join(places)}{', ...' if absent.sum() > _PLACES else ''}")
        has_clients = rows.clients is not None or {"client", "partition"} & options.keys()
        if not has_clients or not ({"y", "label"} & rows.columns.keys() or "image" in rows.columns or "label" in options):
            if self.picture:
                raise ValueError(
                    f"Expected the label and the clients with --picture {self.picture}, got a file alone: give --label COLUMN, "
                    "and --client-column COLUMN or --partition iid."
                )
            print(
                f"\nTo see what would be trained on: fedsim datasets describe {shlex.quote(self.name)} --client-column COLUMN "
                "--label COLUMN\n(without such a column, --partition iid instead of --client-column)"
            )
            return
        print()
        loaded = datasets.load(name, data=self.data)
        print_task(loaded.description)
        print("\nStatistics")
        self._measure(loaded)

    def _measure(self, loaded: datasets.FederatedSplits) -> None:
        """Prints statistics of the clients, and draws them."""
        about = loaded.description
        splits = ((split, getattr(loaded, split)) for split in ("train", "validation", "test", "held_out"))
        print_facts((split, _measured(population, about)) for split, population in splits if population is not None)
        if _has_labels(loaded.train, about) and list(loaded.train.client_ids) == list(loaded.test.client_ids):
            distance = heterogeneity.split_distance(loaded.train, loaded.test)
            print_facts(
                [
                    (
                        "clients",
                        f"mean distance between a client's label shares in train and test {distance:.2f} (0 equal, 2 disjoint)",
                    )
                ]
            )
        if self.picture:
            figure = plots.plot_overview(loaded, title=about.name, names=about.class_names or None, decode=loaded.decode)
            figure.savefig(self.picture)
            print(f"\nThe picture is in {self.picture}.")


@dataclasses.dataclass(frozen=True)
class Convert:
    """Convert a file of federated data from one format to another, client by client.

    Example: fedsim datasets convert shakespeare.sqlite train.h5 --split train

    Attributes:
      source: the file or folder to read, in a format that is recognized by its content: fedsim's packed files, TFF's HDF5 and
        SQLite, FedJAX's SQLite, LEAF's JSON (a file or a folder), JSON lines, CSV, Parquet, or a folder of TensorFlow Datasets
      target: the file to write, in the format of its suffix (.h5: packed, which FederatedData.open memory-maps; .json: LEAF; or
        a table: .csv, .tsv, .parquet)
      split: the split of IN to read, if it has several
      client: the column with the client ids, for tables (CSV, Parquet) and TensorFlow Datasets
      format: the format of OUT: packed, leaf, csv, parquet, fedjax_sqlite, tff_sqlite or tff_hdf5; default: by its suffix
      source_format: the format of IN; default: recognized by its content
    """

    source: Annotated[str, tyro.conf.Positional, shown_as("IN")]
    target: Annotated[str, tyro.conf.Positional, shown_as("OUT")]
    split: Annotated[str | None, shown_as("NAME")] = None
    client: Annotated[str | None, shown_as("COLUMN")] = None
    format: Annotated[str | None, shown_as("FORMAT")] = None
    source_format: Annotated[str | None, shown_as("FORMAT")] = None

    def run(self) -> int:
        formats.convert(
            self.source,
            self.target,
            split=self.split,
            client=self.client,
            source_format=self.source_format,
            target_format=self.format,
        )
        print(f"Wrote {self.target} ({_size(Path(self.target).stat().st_size)}).")
        return 0


@dataclasses.dataclass(frozen=True)
class Verify:
    """Compare a packed file with the checksums that were stored when it was written, and name the columns that differ.

    Files of up to 64 MiB are also compared whenever they are opened. Exit status: 0 if everything agrees, 1 if an earlier
    version of fedsim wrote the file, without checksums, 2 if it is damaged.

    Attributes:
      file: a packed file (.h5), in the cache or written by convert or FederatedData.save
    """

    file: Annotated[str, tyro.conf.Positional, shown_as("FILE")]

    def run(self) -> int:
        size = _size(Path(self.file).stat().st_size) if Path(self.file).is_file() else ""
        if FederatedData.verify(self.file):
            print(f"{self.file} ({size}) is intact: all columns, offsets and client ids agree with their checksums.")
            return 0
        print(
            f"{self.file} ({size}) has no checksums of its columns, because an earlier version of fedsim wrote it. Its "
            "structure, offsets and client ids are intact. To add checksums: fedsim datasets convert "
            f"{shlex.quote(self.file)} NEW.h5"
        )
        return 1


def main(arguments: list[str]) -> int:
    """Runs ``fedsim datasets`` with these arguments and returns the exit status. Wrong options raise ``SystemExit``."""
    commands: Any = List | Describe | Convert | Verify
    about = "List the datasets, describe one, convert files, or verify a packed file."
    say_repeated(arguments)
    chosen = tyro.cli(commands, args=arguments, default=List(), prog="fedsim datasets", description=about)
    return chosen.run()


def _check_picture(path: Path) -> None:
    if path.suffix not in _PICTURES:
        raise ValueError(f"Expected the name of the picture to end in {', '.join(_PICTURES)}, got {str(path)!r}.")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.resolve().parent} for the picture. Create it first.")


def _described(rows: formats.Rows, name: str) -> tuple[str, str, str, str]:
    """Returns the name of a column, its type, how many values are missing, and its range or its most frequent values."""
    column, absent = rows.columns[name], rows.missing.get(name)
    present = column if absent is None else column[~absent]
    kind = "text" if column.dtype == object else f"{column.dtype} {list(column.shape[1:]) if column.ndim > 1 else ''}".strip()
    if not len(present):
        values = ""
    elif column.ndim > 1:
        values = f"{present.min():.6g} to {present.max():.6g}"
    else:
        distinct, counts = np.unique(present, return_counts=True)
        values = f"{len(distinct):,} different"
        if len(distinct) <= _MAX_LISTED or column.dtype == object:
            frequent = np.argsort(-counts, kind="stable")[:_MAX_LISTED]
            values += f": {', '.join(f'{distinct[i]} {counts[i] / len(present):.0%}' for i in frequent)}"
            values += ", ..." if len(distinct) > _MAX_LISTED else ""
        else:
            values += f", {present.min():.6g} to {present.max():.6g}, mean {present.mean():.6g}"
    return name, kind, f"{absent.sum():,}" if absent is not None else "", values


def _how_to_load(name: str, about: datasets.Description) -> str:
    if name.endswith(":NAME"):
        return f"{name} is a pattern for many datasets: replace NAME by the name of one."
    quoted = name if re.fullmatch(r"[\w./:-]+", name) else shlex.quote(name) if '"' in name else f'"{name}"'
    if about.needs_data:
        return f"The dataset is not available. To read it: fedsim datasets describe {quoted} --data DIR"
    verb = "load" if about.source == "" else "download"
    return f"The dataset is not available. To {verb} and draw it: fedsim datasets describe {quoted} --picture FILE.png"


def _measured(population: Any, about: datasets.Description) -> list[str]:
    sizes = population.sizes
    lines = [
        shown_population(population.num_clients, population.num_examples),
        f"examples per client: {sizes.min():,} to {sizes.max():,}, median {int(np.median(sizes)):,}; "
        f"Gini coefficient {heterogeneity.gini(population):.2f}",
    ]
    if _has_labels(population, about):
        lines.append(
            f"labels: mean distance between the distributions of a client and of the population "
            f"{heterogeneity.label_emd(population):.2f} (0 equal, 2 disjoint); effective number of classes per client "
            f"{np.mean(heterogeneity.effective_classes(population)):.1f}"
        )
    return lines


def _has_labels(population: Any, about: datasets.Description) -> bool:
    label = population.columns.get("y")
    return bool(about.num_classes and label is not None and label.ndim == 1 and len(label) <= _COUNT_LABELS_UP_TO)


def _download(about: datasets.Description, cached: bool) -> str:
    if about.needs_data:
        return "not possible: give a folder with the files, --data DIR"
    if about.download_bytes == 0:
        return "not necessary"
    if not about.source:
        return ""
    size = "size not published" if about.download_bytes is None else _size(about.download_bytes)
    return f"{size}, {'in the cache' if cached else 'once, into the cache'}"


def _option(about: datasets.Description, option: str) -> str:
    default = about.defaults[option]
    shown = "" if default is inspect.Parameter.empty else f"={default!r}"
    return f"{option}{shown}: {about.options.get(option, '')}".rstrip(": ")


def _short(count: int | None) -> str:
    """Returns a count in few characters: 715, 3,400, 67.2k, 136M."""
    if count is None:
        return "any"
    if count >= 10**6:
        return f"{count / 10**6:.3g}M"
    return f"{count / 10**3:.3g}k" if count >= 10**4 else f"{count:,}"


def _size(count: int | None) -> str:
    if count is None:
        return "not stated"
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B" if count else "none"


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Returns the widths of all columns but the last one."""
    return [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]


def _print_narrow(rows: Sequence[Sequence[str]]) -> None:
    """Prints the list of datasets in a narrow terminal, in which each dataset takes a few lines."""
    edge = shutil.get_terminal_size((200, 24)).columns
    for name, clients, examples, size, cached, licence, task in rows[1:]:
        kept = {"yes": ", cached", "no": ", not cached"}.get(cached, "")
        print(name)
        for text in (task, f"{clients} clients, {examples} examples; download: {size}{kept}; licence: {licence}"):
            print(textwrap.fill(text, edge, initial_indent="  ", subsequent_indent="    "))


def _table(rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, of which the last column is cut at the edge of the terminal."""
    widths, edge = _widths(rows), shutil.get_terminal_size((200, 24)).columns
    for row in rows:
        line = "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False)) + "  " + row[-1]
        print(line if len(line) <= edge else line[: edge - 1] + "…")
