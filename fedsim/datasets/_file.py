"""Your own data in a file or a folder, divided among clients by a column or by a partition.

`fedsim.formats.read_rows` lists the formats. An example is a row, and its columns become:

Loaded:
  x: the features. Several columns, or one of numbers, become ``float32 [width]``. A single column of arrays keeps their shape:
    ``uint8`` and other whole numbers (pixels, token ids) their values, and fractions become ``float32``. A column of texts that
    is named by ``features`` becomes a 0 or 1 for each of its values (one-hot).
  y: the label. Classes are numbered in sorted order, ``int32 []``; the target of a regression is ``float32 []``.

Numbers are standardized, by the mean and the standard deviation of the training examples of all clients together: this
simulates a server that knows both, for example from an earlier round of secure aggregation. The values of a label and the
categories of a text are those of the whole file. Examples that a run sets apart for validation (``--validation``) are training
examples here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.datasets._partitioned import OPTIONS, check_partition, divide, partition_splits
from fedsim.datasets._registry import register
from fedsim.formats import Rows, read_rows
from fedsim.names import did_you_mean
from fedsim.partitioners import held_out_clients, split_within_clients
from fedsim.pinned_files import is_pinned, pinned_path, unpinned
from fedsim.text_files import is_number

_LABELS = ("y", "label")
_TASKS = ("classification", "regression")
_MAX_CLASSES = 20  # Whole numbers with more values may be classes or quantities.
_MAX_CATEGORIES = 100
_TEST_FRACTION = 0.2
_CLIENTS = 10
_WITHOUT_CLASSES = ("iid", "quantity_skew")
_UNSCALED = np.zeros((), bool)
_MOST_MARKS = 2  # different texts for a missing value, such as "?" and "n/a"
_WITH_COMMAS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")  # 1,234.5


def _remembered(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Keeps the last result while the file and the options are the same: a run needs the description before the data."""
    key: Any = None
    result: dict[str, Any] = {}

    @functools.wraps(load)
    def loaded(data: Path | None, cache: Path, *, name: str, **options: Any) -> dict[str, Any]:
        nonlocal key, result
        asked = data, name, repr(sorted(options.items())), _state_of(unpinned(name))
        if asked != key:
            key, result = None, {}  # The memory is free before the next file is read.
            result = load(data, cache, name=name, **options)
            for part in result.keys() - {"about"}:
                for column in result[part].columns.values():
                    column.setflags(write=False)  # Whoever loads the file again has the same arrays.
            key = asked
        return result

    return loaded


@register(
    "file:NAME",
    task="your own file, e.g. \"people.csv(client='user', label='income')\": CSV, Parquet, JSON lines, NumPy arrays, packed or "
    "LEAF files, images in folders, datasets of Hugging Face on disk",
    features={},
    source_features={"columns": "those of the file; see fedsim datasets describe FILE"},
    options={
        "client": "column that names the client of each row; used instead of a partition",
        "label": "column that becomes y; default: y or label, or of images the innermost folder",
        "features": "columns that become x, separated by commas, also patterns such as 'x*'; default: all other columns of "
        "numbers",
        "task": "classification or regression; default: regression if the label has fractions",
        "partition": OPTIONS["partition"].replace(", one partition for all splits", "") + "; for files without clients",
        "clients": "number of clients of the partition; default: 10",
        "split": "what is set apart for test, unless the file has a test part: within_clients, examples of each client, or "
        "by_client, whole clients",
        "test_fraction": "fraction of the examples or clients for test; default: the file's own test part, or else 0.2",
        "standardize": "whether numbers in x, and y of a regression, get the mean 0 and the standard deviation 1",
        "missing": "what to do with a row without a value: refuse, or drop the row",
        "header": "whether the first line of a CSV file has the names of the columns",
        "seed": "seed of the partition and the split",
        "...": OPTIONS["..."],
    },
    source="a file or folder of yours",
    download_bytes=0,
    licence="that of your data",
    citation="the source of your data",
)
@_remembered
def load_file(
    data: Path | None,
    cache: Path,
    *,
    name: str,
    client: str = "",
    label: str = "",
    features: str = "",
    task: str = "",
    partition: str = "",
    clients: int | None = None,
    split: str = "within_clients",
    test_fraction: float | None = None,
    standardize: bool = True,
    missing: str = "refuse",
    header: bool | None = None,
    seed: int = 0,
    **partition_options: Any,
) -> dict[str, Any]:
    """Loads train and test of the file ``name``, which may have a hash (see `fedsim.datasets.with_hash`), and its description.

    If the file has parts ``train`` and ``test`` and also ``validation``, ``val`` or ``dev``, the latter is the validation data.

    Raises:
      ImportError: a library that the format needs is not installed.
      FileNotFoundError: there is no such file.
      FormatError: the file is damaged, or its format is unknown.
      ValueError: the file has changed; a column does not exist, lacks a value or has another type; an option is out of its
        range or would have no effect; or no examples are left for training or test.
    """
    del cache
    path = unpinned(name)
    if data is not None:
        raise ValueError(f"The dataset {path} is a file, got data={str(data)!r}: leave out data.")
    checks.one_of("within_clients", "by_client", split=split)
    checks.one_of("refuse", "drop", missing=missing)
    checks.one_of("", *_TASKS, task=task)
    checks.number(above=0, below=1, or_none=True, test_fraction=test_fraction)
    rows = _rows(name, _state_of(path), tuple(filter(None, [client])), header)
    table = _Table(path, rows)
    columns = table.chosen(client=client, label=label, features=features)
    if rows.clients is None and not client and not partition:
        raise ValueError(
            f"{path} does not say which client has which row: give the column with the clients, client= (--client-column), one "
            f"of {table.listed()}; or divide the rows by partition= (--partition), such as iid."
        )
    if client and partition:
        raise ValueError(f"Expected client or partition, got client={client!r} and partition={partition!r}: leave one out.")
    if partition:
        check_partition(partition, partition_options, clients=clients, test_fraction=test_fraction)
    elif partition_options or clients is not None:
        option = next(iter(partition_options), "clients")
        raise ValueError(f"The dataset {path} has no option {option!r} without a partition: leave it out.")
    if split == "by_client" and rows.test is not None and test_fraction is None:
        raise ValueError(
            f"{path} has its own test part, got split={split!r} (--split): leave it out, or give a test_fraction, with which "
            "all examples are divided again."
        )
    clients = clients or _CLIENTS
    kept = table.complete(columns, missing)
    target = table.target(columns.label, kept, task)
    if partition and not target.classes and partition not in _WITHOUT_CLASSES:
        raise ValueError(
            f"Expected a partition that needs no classes, because {columns.label!r} has none, got partition={partition!r} "
            f"(--partition): choose {' or '.join(_WITHOUT_CLASSES)}."
        )
    inputs = table.inputs(columns.features, kept)
    owners = None if partition else rows.clients if not client else rows.columns[client]
    parts = _divided(
        path,
        {"x": inputs.values, "y": target.values},
        owners=None if owners is None else np.array([str(owner) for owner in owners[kept]], object),
        parts=None if test_fraction is not None else _published_parts(rows, kept),
        stratify=bool(target.classes),
        split=split,
        test_fraction=test_fraction or _TEST_FRACTION,
        seed=seed,
        partition=functools.partial(divide, partition=partition, clients=clients, seed=seed, **partition_options),
        published=functools.partial(partition_splits, partition=partition, clients=clients, seed=seed, **partition_options),
    )
    notes = {"x": inputs.text, "y": target.text}
    for name_, is_scaled in (("x", inputs.scaled), ("y", target.scaled)):
        parts, note = _standardized(parts, name_, is_scaled if standardize else _UNSCALED)
        notes[name_] += note
    shapes = {name_: column.shape[1:] for name_, column in parts["train"].columns.items()}
    about = dict(
        task=f"{target.task} of {columns.label!r} in {path.name}".lstrip(),
        num_classes=len(target.classes) or None,
        class_names=target.classes,
        features={
            name_: f"{list(shapes[name_])} {parts['train'].columns[name_].dtype} {note}" for name_, note in notes.items()
        },
        splits={name_: (part.num_clients, part.num_examples) for name_, part in parts.items()},
        source=str(path),
        default_model=_default_model(inputs.values, target),
    )
    return {**parts, "about": about}


@functools.lru_cache(maxsize=1)
def _rows(name: str, state: Any, text_columns: tuple[str, ...], header: bool | None) -> Rows:
    """Reads a file after a check of its hash, once for as long as its ``state`` is the same."""
    del state
    return read_rows(pinned_path(name) if is_pinned(name) else unpinned(name), text_columns=text_columns, header=header)


def _state_of(path: Path) -> tuple[Any, ...]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists())


@dataclasses.dataclass(frozen=True)
class _Chosen:
    label: str
    features: list[str]
    used: list[str]


@dataclasses.dataclass(frozen=True, eq=False)
class _Values:
    """A feature of the dataset.

    Attributes:
      values: ``[n, ...]``; numbers that may be standardized are float64.
      text: what it consists of.
      scaled: ``bool [...]``, which of the values of an example may be standardized.
    """

    values: np.ndarray
    text: str
    scaled: np.ndarray
    task: str = ""
    classes: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class _Table:
    path: Path
    rows: Rows

    def chosen(self, *, client: str, label: str, features: str) -> _Chosen:
        """Returns the columns that are used. By default, features are all columns of numbers besides label and client."""
        columns = self.rows.columns
        if client:
            self._check("client", "--client-column", client)
            if columns[client].ndim > 1:
                raise ValueError(
                    f"{self.path}: column {client!r} has arrays {list(columns[client].shape[1:])}, got client={client!r} "
                    f"(--client-column): give a column with one value per row, one of {self.listed()}."
                )
        if label:
            self._check("label", "--label", label)
        else:
            folders = [each for each in columns if "image" in columns and each.startswith("folder") and each != client]
            label = next((each for each in (*_LABELS, *reversed(folders)) if each in columns), "")
        if not label:
            raise ValueError(f"{self.path}: give the column with the labels, label= (--label), one of {self.listed()}.")
        others = [each for each in columns if each not in (client, label)]
        names: list[str] = []
        for pattern in filter(None, (part.strip() for part in features.split(","))):
            # A name such as "age [years]" is no pattern.
            matching = [pattern] if pattern in others else [each for each in others if fnmatch.fnmatchcase(each, pattern)]
            found = [each for each in matching if each not in names]
            if not matching:
                if pattern in (client, label):
                    raise ValueError(f"features={features!r} (--features) has {pattern!r}, the label or client: leave it out.")
                self._check("features", "--features", pattern)
            names += found
        for each in names if features else others:
            self._check_numbers_in_text(each, "leave the column out of features= (--features)", is_named=bool(features))
        if not features:
            # A column without a name is usually that of row numbers, which pandas writes.
            names = [each for each in others if columns[each].dtype != object and each]
            left_out = [each for each in (*others, *self.rows.unsupported) if each not in names]
            if left_out and "image" not in columns:
                warnings.warn(
                    f"{self.path.name}: left out {', '.join(each or 'the column without a name' for each in left_out)}; texts "
                    "that are categories can be named in features= (--features).",
                    stacklevel=5,
                )
        if not names:
            raise ValueError(
                f"{self.path} has no column of numbers besides the label and the client: name others in features=."
            )
        return _Chosen(label, names, [*names, label, *([client] if client else [])])

    def listed(self) -> str:
        """Returns the names of the columns with one value per row, which may be those of labels and clients."""
        return ", ".join(name for name, column in self.rows.columns.items() if column.ndim == 1)

    def _check(self, option: str, flag: str, name: str) -> None:
        if name in self.rows.unsupported:
            raise ValueError(
                f"{self.path}: column {name!r} has the type {self.rows.unsupported[name]}: expected numbers, texts or lists of "
                f"one length, got {option}={name!r} ({flag})."
            )
        if name not in self.rows.columns:
            columns = list(self.rows.columns)
            raise ValueError(
                f"{self.path} has no column {name!r}.{did_you_mean(name, columns)} Its columns are {', '.join(columns)}: "
                f"correct {option}= ({flag})."
            )

    def _check_numbers_in_text(self, name: str, otherwise: str, *, is_named: bool = False) -> None:
        """Raises ``ValueError`` for texts that seem to be numbers, with commas or with a few others such as ``?``.

        A feature that is named may be one of codes, most of which look like numbers, such as 250, 401 and V57.
        """
        column, absent = self.rows.columns[name], self.rows.missing.get(name, np.False_)
        if column.dtype != object:
            return
        texts = {text for text in set(column.tolist()) if text and not is_number(text)}
        wrong = [row for row, text in enumerate(column) if text in texts]
        others = [row for row in wrong if not _WITH_COMMAS.fullmatch(column[row])]
        if is_named and len({column[row] for row in others}) > _MOST_MARKS:
            return
        if wrong and 2 * len(others) < len(column) - int(absent.sum()):
            text = column[wrong[0]]
            if wrong[0] in others:
                remedy = "correct it, leave the field empty if the value is missing"
            else:
                remedy = f"write numbers without commas, as {text.replace(',', '')}"
            place = f"{self.path}: {self.rows.place(wrong[0])}"
            raise ValueError(f"{place}: column {name!r} has {text!r} among numbers: {remedy}, or {otherwise}.")

    def complete(self, columns: _Chosen, missing: str) -> np.ndarray:
        """Returns the rows ``int64 [n]`` that have all values that are used."""
        absent = np.zeros(len(self.rows), bool)
        for name in columns.used:
            lacking = self.rows.missing.get(name)
            if lacking is not None and missing == "refuse":
                others = f" and {lacking.sum() - 1:,} more rows have" if lacking.sum() > 1 else " has"
                raise ValueError(
                    f"{self.path}: {self.rows.place(int(lacking.argmax()))}{others} no value of {name!r}: fill it in, drop "
                    "such rows by missing='drop' (--missing drop), or leave the column out of features= (--features)."
                )
            absent |= False if lacking is None else lacking
            values = self.rows.columns[name]
            if values.dtype.kind == "f" and (infinite := np.isinf(values).reshape(len(values), -1).any(axis=1)).any():
                raise ValueError(
                    f"{self.path}: {self.rows.place(int(infinite.argmax()))} has an infinite {name!r}: correct it."
                )
        if absent.all():
            raise ValueError(
                f"{self.path}: every row lacks a value of {', '.join(columns.used)}: leave out columns by features=."
            )
        if absent.any():
            warnings.warn(
                f"{self.path.name}: dropped {absent.sum():,} of {len(absent):,} rows, which lack a value.", stacklevel=5
            )
        return np.flatnonzero(~absent)

    def target(self, name: str, kept: np.ndarray, task: str) -> _Values:
        """Returns the label, with the task: that which is given, or that which the values show."""
        values = self.rows.columns[name][kept]
        if values.ndim > 1:
            if task:
                raise ValueError(
                    f"{self.path}: label {name!r} has arrays {list(values.shape[1:])}, got task={task!r}: leave it out."
                )
            return _Values(_narrow(values), name, _UNSCALED)
        is_text = values.dtype == object
        if task != "classification":
            self._check_numbers_in_text(name, "give task='classification' (--task) if the texts are classes")
        has_fractions = values.dtype.kind == "f" and bool((values % 1).any())
        distinct = np.unique(values)
        if not task and not is_text and not has_fractions and len(distinct) > _MAX_CLASSES:
            raise ValueError(
                f"{self.path}: label {name!r} has {len(distinct)} different whole numbers, which may be classes or quantities: "
                "give task='classification' or task='regression' (--task)."
            )
        task = task or ("regression" if has_fractions else "classification")
        if task == "regression":
            if is_text:
                raise ValueError(
                    f"{self.path}: label {name!r} is text, such as {values[0]!r}, got task='regression' (--task): give a "
                    "column of numbers, or task='classification'."
                )
            return _Values(values.astype(np.float64), name, ~_UNSCALED, task)
        if len(distinct) < 2:
            raise ValueError(f"{self.path}: label {name!r} has one value only, {distinct[0]}: expected at least two classes.")
        if has_fractions:
            raise ValueError(f"{self.path}: label {name!r} has fractions, got task='classification': give task='regression'.")
        distinct, codes = np.unique(values, return_inverse=True)
        classes = [str(int(each) if values.dtype.kind == "f" else each) for each in distinct]
        return _Values(codes.astype(np.int32), f"{name}: {_shares(classes, codes)}", _UNSCALED, task, classes)

    def inputs(self, names: Sequence[str], kept: np.ndarray) -> _Values:
        """Returns the features as one array."""
        columns = {name: self.rows.columns[name][kept] for name in names}
        if len(names) == 1 and columns[names[0]].ndim > 1:
            values = columns[names[0]]
            scaled = values.dtype.kind == "f"
            return _Values(
                values.astype(np.float64) if scaled else _narrow(values), names[0], np.full(values.shape[1:], scaled)
            )
        parts, texts, scaled_parts = [], [], []
        for name, values in columns.items():
            if values.dtype == object:
                distinct, codes = np.unique(values, return_inverse=True)
                if len(distinct) > _MAX_CATEGORIES:
                    raise ValueError(
                        f"{self.path}: column {name!r} has {len(distinct):,} different texts, at most {_MAX_CATEGORIES} can be "
                        "categories: leave it out of features= (--features), or convert it to numbers."
                    )
                part = np.eye(len(distinct))[codes]
                texts.append(f"{name} ({len(distinct)} categories)")
            else:
                part = values.reshape(len(values), -1).astype(np.float64)
                texts.append(name)
            parts.append(part)
            scaled_parts.append(np.full(part.shape[1], values.dtype.kind in "iuf"))
        return _Values(np.concatenate(parts, axis=1), ", ".join(texts), np.concatenate(scaled_parts))


def _narrow(values: np.ndarray) -> np.ndarray:
    """Returns arrays in the dtypes of models: ``uint8`` as it is, other whole numbers ``int32``, fractions ``float32``."""
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind in "iu" and values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ValueError(f"Expected whole numbers of 32 bits, got values from {values.min()} to {values.max()}: scale them.")
    return values.astype(np.int32)


def _shares(classes: Sequence[str], codes: np.ndarray) -> str:
    counts = np.bincount(codes, minlength=len(classes))
    order = np.argsort(-counts, kind="stable")
    shown = [f"{classes[i]} {counts[i] / len(codes):.0%}" for i in order[:5]]
    return f"{len(classes)} classes, {', '.join(shown)}{', ...' if len(classes) > 5 else ''}"


def _divided(
    path: Path,
    columns: Mapping[str, np.ndarray],
    *,
    owners: np.ndarray | None,
    parts: Mapping[str, np.ndarray] | None,
    stratify: bool,
    split: str,
    test_fraction: float,
    seed: int,
    partition: Any,
    published: Any,
) -> dict[str, FederatedData]:
    """Divides the rows among clients, and into train and test: as the file's own parts say, or by the split."""
    if parts is not None:
        chosen = {name: {feature: column[mask] for feature, column in columns.items()} for name, mask in parts.items()}
        if owners is None:
            divided: dict[str, FederatedData] = published(chosen)
        else:
            divided = {name: FederatedData.from_arrays(chosen[name], clients=owners[mask]) for name, mask in parts.items()}
        return divided
    if owners is None:
        data = FederatedData.from_partition(columns, partition(columns["y"]))
    else:
        data = FederatedData.from_arrays(columns, clients=owners)
    if split == "by_client":
        if data.num_clients < 2:
            raise ValueError(f"{path} has one client, which cannot be set apart: give split='within_clients' (--split).")
        count = min(max(1, round(test_fraction * data.num_clients)), data.num_clients - 1)
        train, apart = held_out_clients(data, clients=count, seed=seed)
    else:
        fractions = {"train": 1 - test_fraction, "test": test_fraction}
        splits = split_within_clients(data, fractions, seed=seed, labels="y" if stratify else None)
        train, apart = splits["train"], splits["test"]
    for name, part in (("train", train), ("test", apart)):
        if not part.num_examples:
            raise ValueError(
                f"{path}: no examples are left for {name}, because the {data.num_clients} clients have "
                f"{data.num_examples / data.num_clients:.1f} on average: set clients apart by split='by_client' (--split), or "
                "give another test_fraction."
            )
    if data.num_clients == 1:
        warnings.warn(f"{path.name} has one client, so that its training is that of one machine.", stacklevel=5)
    return {"train": train, "test": apart}


def _published_parts(rows: Rows, kept: np.ndarray) -> dict[str, np.ndarray] | None:
    """Returns which of the kept rows are in each of the file's own parts, ``bool [n]``; None if it has no test part."""
    if rows.test is None:
        return None
    others = {"test": rows.test, "validation": rows.validation}
    masks = {name: mask[kept] for name, mask in others.items() if mask is not None}
    return {"train": ~np.any(list(masks.values()), axis=0), **masks}


def _standardized(parts: Mapping[str, FederatedData], name: str, scaled: np.ndarray) -> tuple[dict[str, FederatedData], str]:
    """Standardizes the values of a feature by those in train, and makes fractions float32. Returns a note on it, too."""
    train = np.asarray(parts["train"].columns[name])
    if train.dtype.kind != "f":
        return dict(parts), ""
    mean, deviation = np.zeros(train.shape[1:]), np.ones(train.shape[1:])
    if scaled.any():
        axes = 0 if train.ndim <= 2 else None  # The pixels of an image are standardized together.
        mean = np.where(scaled, train.mean(axis=axes), 0.0)
        found = train.std(axis=axes)
        # The deviation of a constant column may be a rounding error of its mean.
        is_constant = found <= 1e-13 * np.abs(train).max(axis=axes)
        deviation = np.where(scaled & ~is_constant, found, 1.0)
    note = ""
    if scaled.any():
        note = ", standardized" if train.ndim > 1 else f", standardized: ({name} - {float(mean):.6g}) / {float(deviation):.6g}"
    result = {}
    for split, part in parts.items():
        with np.errstate(over="ignore"):
            values = ((np.asarray(part.columns[name]) - mean) / deviation).astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"Feature {name!r} has values that float32 cannot represent: scale the columns of the file.")
        result[split] = dataclasses.replace(part, columns={**part.columns, name: values})
    return result, note


def _default_model(inputs: np.ndarray, target: _Values) -> str | None:
    """Returns a model that fits: linear in the features of a table, and two hidden layers for images and other arrays."""
    shape = list(inputs.shape[1:])
    if not target.task or not (inputs.dtype == np.uint8 or inputs.dtype.kind == "f"):
        return None
    if target.task == "regression":
        return f"linear_regression(shape={shape})" if len(shape) == 1 else f"dense_regression(shape={shape})"
    return f"{'logistic' if len(shape) == 1 else 'dense'}(shape={shape}, num_classes={len(target.classes)})"
