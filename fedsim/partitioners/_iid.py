"""No skew at all."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.partitioners._draw import check_clients, count_examples, cut, even_sizes, generator


def iid(examples: Any, *, clients: int, seed: int) -> list[np.ndarray]:
    """Examples shuffled and dealt out evenly.

    Args:
      examples: their number, or anything that has one row for each (labels, say).
      clients: number of clients.
      seed: same seed, same partition.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example goes to exactly one client.
      - Sizes differ by at most 1.
      - Which examples a client gets does not depend on what they are.

    Raises:
      ValueError: ``clients`` not positive, or more clients than examples.

    >>> [len(rows) for rows in iid(10, clients=3, seed=0)]
    [4, 3, 3]
    """
    number = count_examples(examples)
    check_clients(clients, number, 1)
    return cut(generator(seed, "iid").permutation(number), even_sizes(number, clients))
