"""Partition without skew."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.partitioners._draw import check_clients, count_examples, cut, even_sizes, generator


def iid(examples: Any, *, clients: int, seed: int) -> list[np.ndarray]:
    """Shuffles the examples and divides them evenly among the clients.

    Args:
      examples: the number of examples, or an array with one row per example (the labels, for instance).
      clients: number of clients.
      seed: the same seed gives the same partition.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example is assigned to exactly one client.
      - Sizes differ by at most 1.
      - The assignment does not depend on the content of the examples.

    Raises:
      ValueError: ``clients`` is not positive, or there are more clients than examples.

    >>> [len(rows) for rows in iid(10, clients=3, seed=0)]
    [4, 3, 3]
    """
    number = count_examples(examples)
    check_clients(clients, number, 1)
    return cut(generator(seed, "iid").permutation(number), even_sizes(number, clients))
