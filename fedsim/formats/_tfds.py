"""TensorFlow Datasets, through their ArrayRecord files and `as_data_source`: without TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import ClientStream, FormatError
from fedsim.formats._owners import Owners
from fedsim.formats._source import Columns, Features, StrPath, located, selected, stream, texts

_ROWS = 1024  # decoded at once
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, RuntimeError, OSError, AssertionError)


def arrays_from_tfds(
    dataset: Any, split: str = "train", features: Features = None, *, data_dir: StrPath | None = None
) -> dict[str, np.ndarray]:
    """One split of a TensorFlow dataset as columns in memory, to be split over clients by a partitioner.

    Args:
      dataset: a name (``"mnist"``), a builder, or the folder of a prepared dataset. What is not there yet is downloaded and
        prepared by TensorFlow Datasets, which itself needs TensorFlow to encode images then; reading needs none.
      split: the split, also a part of it: ``"train[:1000]"``.
      features: names of those to keep, or name to ``(shape, dtype)``; by default all, images as uint8, texts as bytes.
      data_dir: where datasets are kept; TensorFlow Datasets' own default.

    Raises:
      ImportError: tensorflow-datasets or array_record is not installed.
      ValueError: no such dataset or split.
      FormatError: a damaged file; features nested, or of different shapes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # the name of no dataset
    ...     arrays_from_tfds("no_such", data_dir=folder)
    Traceback (most recent call last):
    ...
    ValueError: TensorFlow Datasets has no dataset 'no_such', nor is it the folder of a prepared one.
    """
    opened = _Split(dataset, split, data_dir)
    columns: dict[str, np.ndarray] = {}
    for start in range(0, len(opened), _ROWS):
        part = opened.columns(range(start, min(start + _ROWS, len(opened))), features)
        if not columns:
            columns = {name: np.empty((len(opened), *array.shape[1:]), array.dtype) for name, array in part.items()}
        for name, array in part.items():
            like = columns[name]
            if array.shape[1:] != like.shape[1:] or array.dtype != like.dtype:
                raise FormatError(f"{opened.name}: Feature {name!r} has examples of different shapes: no column holds them.")
            like[start : start + len(array)] = array
    return columns


def read_tfds(
    dataset: Any,
    split: str = "train",
    features: Features = None,
    *,
    client: str,
    data_dir: StrPath | None = None,
) -> ClientStream:
    """Reads a TensorFlow dataset that says whose each example is; see `arrays_from_tfds` for those that do not.

    Clients come in order of first appearance. One integer an example is kept in memory, and one client.

    Args:
      dataset: as for `arrays_from_tfds`.
      split: likewise.
      features: likewise; by default all but ``client``.
      client: the feature that names the client: text or a number.
      data_dir: as for `arrays_from_tfds`.

    Raises:
      ImportError: tensorflow-datasets or array_record is not installed.
      ValueError: no such dataset or split.
      FormatError: when opened or read, no such feature, a damaged file; features nested, or of different shapes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # the name of no dataset
    ...     read_tfds("no_such", client="user_id", data_dir=folder)
    Traceback (most recent call last):
    ...
    ValueError: TensorFlow Datasets has no dataset 'no_such', nor is it the folder of a prepared one.
    """
    opened = _Split(dataset, split, data_dir)
    owners = opened.owners(client)

    def read() -> Iterator[tuple[str, Columns]]:
        for client_id, rows in owners.groups():
            with located(f"client {client_id!r}"):
                yield client_id, opened.columns(rows.tolist(), features, without=client)

    return stream(opened.name, read, len(owners.names))


def _prepare(builder: Any, name: str) -> None:
    """Fetches and converts what is not there yet; says in one line what to do where that cannot be."""
    remedy = "Prepare it where it can be, and give the folder that holds it (--data DIR, or data_dir=DIR)"
    try:
        builder.download_and_prepare()
    except OSError as error:
        reason = str(error).partition("\n")[0][:200]
        raise OSError(f"{name} is not prepared in {builder.data_dir} and could not be fetched ({reason}). {remedy}.") from error
    except ImportError as error:
        raise ImportError(
            f"{name} is not prepared in {builder.data_dir}, and preparing it needs {error.name or 'more'}: only reading does "
            f"not. {remedy}."
        ) from error


class _Split:
    """A split's rows by number."""

    def __init__(self, dataset: Any, split: str, data_dir: StrPath | None) -> None:
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise ImportError("TensorFlow Datasets are read by: pip install 'fedsim-jax[formats]'.") from error
        self.name = os.fspath(dataset) if isinstance(dataset, (str, os.PathLike)) else dataset.info.full_name
        builder = dataset
        if isinstance(dataset, (str, os.PathLike)):
            if (Path(dataset) / "dataset_info.json").is_file():
                with located(self.name, *_DAMAGE):
                    builder = tfds.builder_from_directory(os.fspath(dataset))
            else:
                try:
                    builder = tfds.builder(self.name, data_dir=data_dir, file_format="array_record")
                except tfds.core.registered.DatasetNotFoundError:
                    raise ValueError(
                        f"TensorFlow Datasets has no dataset {self.name!r}, nor is it the folder of a prepared one."
                    ) from None
                _prepare(builder, self.name)
        self.features = dict(builder.info.features)
        whole = split.partition("[")[0]
        if whole not in builder.info.splits and whole != "all":
            raise ValueError(f"Expected split= one of {sorted(builder.info.splits)} of {self.name}, got split={split!r}.")
        self._builder, self._split, self._tfds = builder, split, tfds
        with located(self.name, *_DAMAGE):
            self._source = builder.as_data_source(split)

    def __len__(self) -> int:
        return len(self._source)

    def owners(self, client: str) -> Owners:
        if client not in self.features:
            raise FormatError(f"{self.name}: client= must be one of {sorted(self.features)}, got client={client!r}.")
        with located(self.name, *_DAMAGE):
            skipped = {name: self._tfds.decode.SkipDecoding() for name in self.features if self._is_image(name)}
            names = self._builder.as_data_source(self._split, decoders=skipped)
            chunks = (range(start, min(start + _ROWS, len(names))) for start in range(0, len(names), _ROWS))
            return Owners(([row[client] for row in names.__getitems__(list(chunk))], np.arange(len(chunk))) for chunk in chunks)

    def _is_image(self, name: str) -> bool:
        return isinstance(self.features[name], self._tfds.features.Image)

    def columns(self, rows: Sequence[int], features: Features, without: str | None = None) -> dict[str, np.ndarray]:
        with located(self.name, *_DAMAGE):
            examples = self._source.__getitems__(list(rows))
        names = [name for name in self.features if name != without] if features is None else list(features)
        absent = [name for name in names if name not in self.features]
        if absent:
            raise FormatError(f"{self.name}: Feature {absent[0]!r} is missing: there are {sorted(self.features)}.")
        columns = {name: _column(name, [example[name] for example in examples], self.features[name]) for name in names}
        return dict(selected(columns, features))


def _column(name: str, values: list[Any], feature: Any) -> np.ndarray:
    if isinstance(values[0], Mapping):
        raise FormatError(f"Feature {name!r} is nested: leave it out by features=.")
    if isinstance(values[0], bytes):
        return texts(values)
    arrays = [np.asarray(value, feature.np_dtype) for value in values]  # Scalars come as Python's own.
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or arrays[0].dtype == object:
        raise FormatError(f"Feature {name!r} has examples of shapes {sorted(shapes)[:4]}: no column holds them, leave it out.")
    return np.stack(arrays)
