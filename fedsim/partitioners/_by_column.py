"""The partition that the data brings along."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.partitioners._draw import check_labels


def by_column(column: Any) -> list[np.ndarray]:
    """One client per value of a column: a writer, a user, a hospital.

    The clients come in the order of ``np.unique(column)``, which are their names. `fedsim.FederatedData.from_arrays` with
    ``clients=column`` does the same and keeps the names.

    Args:
      column: ``[n]``, the owner of each example, whole numbers or names.

    Returns:
      One sorted ``int64`` index array per value.

    Guarantees:
      - Every example goes to exactly one client.
      - Two examples have one client if and only if they have one value.

    Raises:
      ValueError: not one value per example, or none at all.

    >>> [rows.tolist() for rows in by_column(["bob", "ann", "bob"])]
    [[1], [0, 2]]
    """
    column = check_labels(column)
    if not len(column):
        raise ValueError("The column is empty: expected at least one example.")
    _, owner = np.unique(column, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner))[:-1])
