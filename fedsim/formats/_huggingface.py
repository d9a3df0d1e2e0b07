"""Datasets of Hugging Face's `datasets` library, which keeps them as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedsim.data import ClientStream, FormatError
from fedsim.formats._owners import Owners
from fedsim.formats._source import Columns, Features, located, selected, stream
from fedsim.formats._table import arrow_column

_ROWS = 1 << 16


def read_huggingface(dataset: Any, client: str, features: Features = None) -> ClientStream:
    """Reads a `datasets.Dataset` that has a column of client ids, clients in order of first appearance.

    One integer a row is kept in memory, and one client.

    Args:
      dataset: one split, as ``datasets.load_dataset(..., split="train")`` gives it.
      client: the column of client ids: text or a number.
      features: names of those to keep, or name to ``(shape, dtype)``; by default every column but ``client``. Strings become
        text, lists of one length a further dimension, images uint8.

    Raises:
      ValueError: no such column; all splits at once.
      FormatError: when read, a missing value, rows of different shapes.

    >>> import datasets
    >>> dataset = datasets.Dataset.from_dict({"who": ["bob", "ann", "bob"], "y": [1, 2, 3]})
    >>> {each.client_id: each["y"].tolist() for each in read_huggingface(dataset, "who")}
    {'bob': [1, 3], 'ann': [2]}
    """
    if isinstance(dataset, Mapping):
        raise ValueError(f"Give one split of the dataset, dataset[...] of {list(dataset)}.")
    if client not in dataset.column_names:
        raise ValueError(f"client= must be one of the columns {dataset.column_names}, got client={client!r}.")
    wanted = [name for name in features or dataset.column_names if name != client]
    absent = [name for name in wanted if name not in dataset.column_names]
    if absent:
        raise ValueError(f"Feature {absent[0]!r} is missing: the dataset has columns {dataset.column_names}.")
    images = [name for name in wanted if type(dataset.features[name]).__name__ == "Image"]
    others = [name for name in wanted if name not in images]
    owned = dataset.select_columns([client]).with_format("arrow")
    starts = range(0, len(owned), _ROWS)
    ids = (owned[start : start + _ROWS][client].to_pylist() for start in starts)
    owners = Owners((chunk, np.arange(len(chunk))) for chunk in ids)

    def read() -> Iterator[tuple[str, Columns]]:
        table = dataset.select_columns(others).with_format("arrow")
        pictures = dataset.select_columns(images).with_format("numpy")
        for client_id, rows in owners.groups():
            with located(f"client {client_id!r}"):
                columns = {}
                if others:
                    found = table[rows]
                    columns = {name: arrow_column(name, found[name].combine_chunks()) for name in others}
                if images:
                    columns |= {name: _images(name, array) for name, array in pictures[rows].items()}
                yield client_id, selected({name: columns[name] for name in wanted}, features)

    return stream(getattr(dataset.info, "dataset_name", None) or "the dataset", read, len(owners.names))


def _images(name: str, images: Any) -> np.ndarray:
    shapes = {np.shape(image) for image in images}
    if len(shapes) > 1:
        raise FormatError(f"Feature {name!r} has images of shapes {sorted(shapes)[:4]}: resize them first, or leave it out.")
    return np.stack(list(images))
