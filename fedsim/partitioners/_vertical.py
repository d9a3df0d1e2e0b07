"""Parties that hold other features of the same examples.

Vertical federated learning: Q. Yang, Y. Liu, T. Chen, Y. Tong, "Federated machine learning: concept and applications", ACM
TIST 10(2), 2019: https://arxiv.org/abs/1902.04885.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import cut, even_sizes, generator


def vertical(
    features: Any,
    *,
    parties: int,
    sizes: Sequence[int] | None = None,
    order: Literal["contiguous", "random"] = "contiguous",
    seed: int = 0,
) -> list[np.ndarray]:
    """Divides features over parties.

    Args:
      features: their number, their names, or examples ``[n, features]``.
      parties: number of parties.
      sizes: how many each gets; None: equally many, up to one.
      order: ``"contiguous"``: blocks of neighbours, the first party the first; ``"random"``: any features.
      seed: for ``"random"``: same seed, same division.

    Returns:
      One sorted ``int64`` index array per party, of features: ``x[:, rows]`` is what it holds.

    Guarantees:
      - Every feature goes to exactly one party.
      - Every party has its size, and without ``sizes`` they differ by at most 1.
      - In ``"contiguous"`` order a party's features are neighbours.

    Raises:
      ValueError: ``parties`` not positive, more parties than features, sizes that are not one positive number per party or do
        not sum to the features, another order.

    >>> [block.tolist() for block in vertical(5, parties=2)]
    [[0, 1, 2], [3, 4]]
    """
    dimensions = np.ndim(features)
    number = operator.index(features) if dimensions == 0 else np.shape(features)[-1]
    if dimensions > 2:
        raise ValueError(f"Expected examples [n, features], got shape {list(np.shape(features))}: flatten them first.")
    checks.whole(1, number, parties=parties, remedy="as many as there are features, at most")
    if order not in ("contiguous", "random"):
        raise ValueError(f"Expected order to be 'contiguous' or 'random', got order={order!r}.")
    blocks = even_sizes(number, parties) if sizes is None else np.array([operator.index(size) for size in sizes])
    if len(blocks) != parties or blocks.min() < 1 or blocks.sum() != number:
        raise ValueError(f"Expected {parties} positive sizes that sum to {number}, got sizes={blocks.tolist()}.")
    everything = np.arange(number) if order == "contiguous" else generator(seed, "vertical").permutation(number)
    return cut(everything, blocks)
