"""Checks of clients' features and of arguments that several datasets share."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def labels(client_id: str, feature: str, values: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns ``values [n]`` as int32 labels.

    Raises:
      ValueError: the values are not one whole number in ``[0, num_classes)`` per example.

    >>> labels("ann", "label", np.array([3, 10]), 10)
    Traceback (most recent call last):
    ...
    ValueError: Feature 'label' of client 'ann' has values from 3 to 10: expected 0 to 9.
    """
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise ValueError(
            f"Feature {feature!r} of client {client_id!r} is {values.dtype} {list(values.shape[1:])} per example: expected "
            "whole numbers, one per example."
        )
    if values.size and not 0 <= values.min() <= values.max() < num_classes:
        raise ValueError(
            f"Feature {feature!r} of client {client_id!r} has values from {values.min()} to {values.max()}: expected 0 to "
            f"{num_classes - 1}."
        )
    return values.astype(np.int32)


def images(client_id: str, feature: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``values [n, *shape]`` as uint8.

    Raises:
      ValueError: the values have another shape, or are not whole numbers from 0 to 255.

    >>> images("ann", "image", np.zeros([2, 8, 8]), (8, 8))
    Traceback (most recent call last):
    ...
    ValueError: Feature 'image' of client 'ann' is float64 [8, 8] per example: expected whole numbers from 0 to 255, [8, 8].
    """
    whole = values.dtype.kind in "iu" and (not values.size or (values.min() >= 0 and values.max() <= 255))
    if not whole or values.shape[1:] != shape:
        raise ValueError(
            f"Feature {feature!r} of client {client_id!r} is {values.dtype} {list(values.shape[1:])} per example: expected "
            f"whole numbers from 0 to 255, {list(shape)}."
        )
    return values.astype(np.uint8)


def no_folder(name: str, data: Path | None) -> None:
    """Raises ``ValueError`` if a folder is given for a dataset that is generated or embedded.

    >>> no_folder("synthetic", None)
    """
    if data is not None:
        raise ValueError(f"The dataset {name!r} reads no files, got data={str(data)!r}: leave out data.")
