"""Readers for TensorFlow Datasets, by their ArrayRecord files and `as_data_source`, without TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import ClientStream, FormatError
from fedsim.formats._client_index import ClientIndex
from fedsim.formats._source import Columns, Features, StrPath, locating_errors, selected, stream, texts

_ROWS = 1024  # examples decoded at a time
_DAMAGE_ERRORS = (ValueError, KeyError, TypeError, IndexError, RuntimeError, OSError, AssertionError)


def arrays_from_tfds(
    dataset: Any, split: str = "train", features: Features = None, *, data_dir: StrPath | None = None
) -> dict[str, np.ndarray]:
    """Reads one split of a TensorFlow dataset into columns in memory; divide them among clients by a partitioner.

    Args:
      dataset: a name (``"mnist"``), a builder, or the folder of a prepared dataset. A dataset that is not prepared yet is
        downloaded and prepared by TensorFlow Datasets, which needs TensorFlow to encode images. Reading does not need it.
      split: the split, or a slice of it such as ``"train[:1000]"``.
      features: the names of the features to read, or a mapping from names to ``(shape, dtype)``; None: all features, with
        images as uint8 and text as bytes.
      data_dir: the folder of prepared datasets; None: the default of TensorFlow Datasets.

    Raises:
      ImportError: tensorflow-datasets or array_record is not installed.
      ValueError: there is no such dataset or split.
      FormatError: a file is damaged; a feature is nested, or its examples have different shapes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # There is no dataset of this name.
    ...     arrays_from_tfds("no_such", data_dir=folder)
    Traceback (most recent call last):
    ...
    ValueError: TensorFlow Datasets has no dataset 'no_such', and 'no_such' is not the folder of a prepared dataset.
    """
    opened = _Split(dataset, split, data_dir)
    columns: dict[str, np.ndarray] = {}
    for start in range(0, len(opened), _ROWS):
        chunk = opened.columns(range(start, min(start + _ROWS, len(opened))), features)
        if not columns:
            columns = {name: np.empty((len(opened), *array.shape[1:]), array.dtype) for name, array in chunk.items()}
        for name, array in chunk.items():
            column = columns[name]
            if array.shape[1:] != column.shape[1:] or array.dtype != column.dtype:
                raise FormatError(
                    f"{opened.name}: Feature {name!r} has examples of different shapes: leave it out by features=[...]."
                )
            column[start : start + len(array)] = array
    return columns


def read_tfds(
    dataset: Any,
    split: str = "train",
    features: Features = None,
    *,
    client: str,
    data_dir: StrPath | None = None,
) -> ClientStream:
    """Reads a TensorFlow dataset that has a feature with the client of each example; otherwise use `arrays_from_tfds`.

    Clients are in the order of their first appearance. Only one integer per example and one client are in memory.

    Args:
      dataset: as in `arrays_from_tfds`.
      split: as in `arrays_from_tfds`.
      features: as in `arrays_from_tfds`; None: all features except ``client``.
      client: the feature with the client id, of text or numbers.
      data_dir: as in `arrays_from_tfds`.

    Raises:
      ImportError: tensorflow-datasets or array_record is not installed.
      ValueError: there is no such dataset or split.
      FormatError: there is no such feature; a file is damaged; a feature is nested, or its examples have different shapes.
        Raised when the data is opened or read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # There is no dataset of this name.
    ...     read_tfds("no_such", client="user_id", data_dir=folder)
    Traceback (most recent call last):
    ...
    ValueError: TensorFlow Datasets has no dataset 'no_such', and 'no_such' is not the folder of a prepared dataset.
    """
    opened = _Split(dataset, split, data_dir)
    client_index = opened.client_index(client)

    def read() -> Iterator[tuple[str, Columns]]:
        for client_id, rows in client_index.groups():
            with locating_errors(f"client {client_id!r}"):
                yield client_id, opened.columns(rows.tolist(), features, without=client)

    return stream(opened.name, read, len(client_index.names))


def _prepare(builder: Any, name: str) -> None:
    """Downloads and prepares a dataset if necessary; an error explains the remedy in one line."""
    remedy = "Prepare it on another machine, and give the folder that contains it (--data DIR, or data_dir=DIR)"
    try:
        builder.download_and_prepare()
    except OSError as error:
        reason = str(error).partition("\n")[0][:200]
        raise OSError(
            f"{name} is not prepared in {builder.data_dir} and could not be downloaded ({reason}). {remedy}."
        ) from error
    except ImportError as error:
        raise ImportError(
            f"{name} is not prepared in {builder.data_dir}, and preparing it needs {error.name or 'further packages'}, "
            f"unlike reading. {remedy}."
        ) from error


class _Split:
    """Access to the examples of a split by their numbers."""

    def __init__(self, dataset: Any, split: str, data_dir: StrPath | None) -> None:
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise ImportError("TensorFlow Datasets need further packages: pip install 'fedsim-jax[formats]'.") from error
        self.name = os.fspath(dataset) if isinstance(dataset, (str, os.PathLike)) else dataset.info.full_name
        builder = dataset
        if isinstance(dataset, (str, os.PathLike)):
            if (Path(dataset) / "dataset_info.json").is_file():
                with locating_errors(self.name, *_DAMAGE_ERRORS):
                    builder = tfds.builder_from_directory(os.fspath(dataset))
            else:
                try:
                    builder = tfds.builder(self.name, data_dir=data_dir, file_format="array_record")
                except tfds.core.registered.DatasetNotFoundError:
                    raise ValueError(
                        f"TensorFlow Datasets has no dataset {self.name!r}, and {self.name!r} is not the folder of a "
                        "prepared dataset."
                    ) from None
                _prepare(builder, self.name)
        self.features = dict(builder.info.features)
        whole = split.partition("[")[0]
        if whole not in builder.info.splits and whole != "all":
            raise ValueError(f"Expected split= one of {sorted(builder.info.splits)} of {self.name}, got split={split!r}.")
        self._builder, self._split, self._tfds = builder, split, tfds
        with locating_errors(self.name, *_DAMAGE_ERRORS):
            self._source = builder.as_data_source(split)

    def __len__(self) -> int:
        return len(self._source)

    def client_index(self, client: str) -> ClientIndex:
        if client not in self.features:
            raise FormatError(f"{self.name}: client= must be one of {sorted(self.features)}, got client={client!r}.")
        with locating_errors(self.name, *_DAMAGE_ERRORS):
            skipped = {name: self._tfds.decode.SkipDecoding() for name in self.features if self._is_image(name)}
            names = self._builder.as_data_source(self._split, decoders=skipped)
            chunks = (range(start, min(start + _ROWS, len(names))) for start in range(0, len(names), _ROWS))
            return ClientIndex(
                ([row[client] for row in names.__getitems__(list(chunk))], np.arange(len(chunk))) for chunk in chunks
            )

    def _is_image(self, name: str) -> bool:
        return isinstance(self.features[name], self._tfds.features.Image)

    def columns(self, rows: Sequence[int], features: Features, without: str | None = None) -> dict[str, np.ndarray]:
        with locating_errors(self.name, *_DAMAGE_ERRORS):
            examples = self._source.__getitems__(list(rows))
        names = [name for name in self.features if name != without] if features is None else list(features)
        absent = [name for name in names if name not in self.features]
        if absent:
            raise FormatError(f"{self.name}: Feature {absent[0]!r} is missing: the features are {sorted(self.features)}.")
        columns = {name: _column(name, [example[name] for example in examples], self.features[name]) for name in names}
        return dict(selected(columns, features))


def _column(name: str, values: list[Any], feature: Any) -> np.ndarray:
    if isinstance(values[0], Mapping):
        raise FormatError(f"Feature {name!r} is nested, which is not supported: leave it out by features=[...].")
    if isinstance(values[0], bytes):
        return texts(values)
    arrays = [np.asarray(value, feature.np_dtype) for value in values]  # Scalars are Python numbers.
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or arrays[0].dtype == object:
        raise FormatError(f"Feature {name!r} has examples of shapes {sorted(shapes)[:4]}: leave it out by features=[...].")
    return np.stack(arrays)
