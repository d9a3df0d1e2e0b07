"""A reader for datasets of Hugging Face's `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedsim.data import ClientStream, FormatError
from fedsim.formats._client_index import ClientIndex
from fedsim.formats._source import Columns, Features, locating_errors, selected, stream
from fedsim.formats._table import arrow_column

_ROWS = 1 << 16


def read_huggingface(dataset: Any, client: str, features: Features = None) -> ClientStream:
    """Reads a `datasets.Dataset` that has a column of client ids.

    Clients are in the order of their first appearance. Only one integer per row and one client are in memory.

    Args:
      dataset: one split, as returned by ``datasets.load_dataset(..., split="train")``.
      client: the column with the client ids, of text or numbers.
      features: the names of the features to read, or a mapping from names to ``(shape, dtype)``; None: every column except
        ``client``. Strings become text, lists of equal length become a further dimension, and images become uint8.

    Raises:
      ValueError: there is no such column, or ``dataset`` has several splits.
      FormatError: a value is missing, or rows have different shapes; raised when the data is read.

    >>> import datasets
    >>> dataset = datasets.Dataset.from_dict({"who": ["bob", "ann", "bob"], "y": [1, 2, 3]})
    >>> {each.client_id: each["y"].tolist() for each in read_huggingface(dataset, "who")}
    {'bob': [1, 3], 'ann': [2]}
    """
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"Expected one split of the dataset, got the splits {list(dataset)}: give dataset[...] with one of these names."
        )
    if client not in dataset.column_names:
        raise ValueError(f"client= must be one of the columns {dataset.column_names}, got client={client!r}.")
    wanted = [name for name in features or dataset.column_names if name != client]
    absent = [name for name in wanted if name not in dataset.column_names]
    if absent:
        raise ValueError(f"Feature {absent[0]!r} is missing: the dataset has columns {dataset.column_names}.")
    images = [name for name in wanted if type(dataset.features[name]).__name__ == "Image"]
    others = [name for name in wanted if name not in images]
    client_column = dataset.select_columns([client]).with_format("arrow")
    starts = range(0, len(client_column), _ROWS)
    ids = (client_column[start : start + _ROWS][client].to_pylist() for start in starts)
    client_index = ClientIndex((chunk, np.arange(len(chunk))) for chunk in ids)

    def read() -> Iterator[tuple[str, Columns]]:
        table = dataset.select_columns(others).with_format("arrow")
        image_rows = dataset.select_columns(images).with_format("numpy")
        for client_id, rows in client_index.groups():
            with locating_errors(f"client {client_id!r}"):
                columns = {}
                if others:
                    selection = table[rows]
                    columns = {name: arrow_column(name, selection[name].combine_chunks()) for name in others}
                if images:
                    columns |= {name: _images(name, array) for name, array in image_rows[rows].items()}
                yield client_id, selected({name: columns[name] for name in wanted}, features)

    return stream(getattr(dataset.info, "dataset_name", None) or "the dataset", read, len(client_index.names))


def _images(name: str, images: Any) -> np.ndarray:
    shapes = {np.shape(image) for image in images}
    if len(shapes) > 1:
        raise FormatError(f"Feature {name!r} has images of shapes {sorted(shapes)[:4]}: resize them first, or leave it out.")
    return np.stack(list(images))
