"""Partition by a column of the data."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.partitioners._draw import check_labels


def by_column(column: Any) -> list[np.ndarray]:
    """Makes one client of each distinct value of a column, for example of each writer, user or hospital.

    The clients are in the order of ``np.unique(column)``, which also gives their names. `fedsim.FederatedData.from_arrays` with
    ``clients=column`` does the same and keeps the names.

    Args:
      column: ``[n]``, the owner of each example, as whole numbers or names.

    Returns:
      One sorted ``int64`` index array per value.

    Guarantees:
      - Every example is assigned to exactly one client.
      - Two examples have the same client if and only if they have the same value.

    Raises:
      ValueError: the column is empty or does not have one value per example.

    >>> [rows.tolist() for rows in by_column(["bob", "ann", "bob"])]
    [[1], [0, 2]]
    """
    column = check_labels(column, may_be_hidden=True)
    if not len(column):
        raise ValueError("The column is empty: expected at least one example.")
    _, owner = np.unique(column, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner))[:-1])
