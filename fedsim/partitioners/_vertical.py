"""Vertical partition: parties that hold different features of the same examples.

Q. Yang, Y. Liu, T. Chen, Y. Tong, "Federated machine learning: concept and applications", ACM
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
    """Divides features among parties.

    Args:
      features: the number of features, their names, or examples ``[n, features]``.
      parties: number of parties.
      sizes: number of features of each party; None gives sizes that differ by at most 1.
      order: ``"contiguous"`` gives blocks of neighbouring features, the first block to the first party; ``"random"`` shuffles
        the features first.
      seed: used by ``"random"``: the same seed gives the same division.

    Returns:
      One sorted ``int64`` array of feature indices per party: ``x[:, indices]`` are the party's features.

    Guarantees:
      - Every feature is assigned to exactly one party.
      - Every party has its size in ``sizes``; without ``sizes``, the sizes differ by at most 1.
      - In ``"contiguous"`` order a party's features are neighbours.

    Raises:
      ValueError: ``parties`` is not positive, there are more parties than features, the sizes are not one positive number per
        party or do not sum to the number of features, or ``order`` is neither of the two.

    >>> [block.tolist() for block in vertical(5, parties=2)]
    [[0, 1, 2], [3, 4]]
    """
    dimensions = np.ndim(features)
    number = operator.index(features) if dimensions == 0 else np.shape(features)[-1]
    if dimensions > 2:
        raise ValueError(f"Expected examples [n, features], got shape {list(np.shape(features))}: flatten them first.")
    checks.whole(1, number, parties=parties, remedy="at most the number of features")
    if order not in ("contiguous", "random"):
        raise ValueError(f"Expected order to be 'contiguous' or 'random', got order={order!r}.")
    blocks = even_sizes(number, parties) if sizes is None else np.array([operator.index(size) for size in sizes])
    if len(blocks) != parties or blocks.min() < 1 or blocks.sum() != number:
        raise ValueError(f"Expected {parties} positive sizes that sum to {number}, got sizes={blocks.tolist()}.")
    everything = np.arange(number) if order == "contiguous" else generator(seed, "vertical").permutation(number)
    return cut(everything, blocks)
