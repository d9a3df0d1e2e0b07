"""Clients that differ in size only.

Log-normal sizes: T. Li et al., "Federated optimization in heterogeneous networks", MLSys 2020 (FedProx's synthetic data):
https://arxiv.org/abs/1812.06127. Power law: sizes by rank, as in Zipf's law.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, count_examples, cut, generator


def quantity_skew(
    examples: Any,
    *,
    clients: int,
    sigma: float | None = None,
    exponent: float | None = None,
    seed: int,
    min_size: int = 1,
) -> list[np.ndarray]:
    """Divides shuffled examples into clients whose sizes follow a log-normal distribution or a power law.

    Every client gets ``min_size`` examples. The remaining examples are divided in proportion to the clients' shares, rounded by
    largest remainders.

    Args:
      examples: the number of examples, or an array with one row per example.
      clients: number of clients.
      sigma: the share of each client is drawn from LogNormal(0, sigma); 0 gives equal sizes.
      exponent: instead of ``sigma``: shares are proportional to k ** -exponent for k = 1, 2, ..., in random order.
      seed: the same seed gives the same partition.
      min_size: smallest number of examples of a client.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example is assigned to exactly one client.
      - No client has fewer than ``min_size`` examples.
      - With ``min_size=0``, a client's size is its share of the number of examples, rounded up or down.

    Raises:
      ValueError: neither or both of ``sigma`` and ``exponent`` are given, one of them is negative, ``clients`` is not positive,
        or there are fewer than ``clients * min_size`` examples.

    >>> sorted(len(rows) for rows in quantity_skew(60, clients=3, exponent=1.0, seed=0, min_size=0))
    [11, 16, 33]
    """
    number = count_examples(examples)
    check_clients(clients, number, min_size)
    if (sigma is None) == (exponent is None):
        raise ValueError(f"Give either sigma (log-normal) or exponent (power law), got sigma={sigma}, exponent={exponent}.")
    checks.number(least=0, or_none=True, sigma=sigma, exponent=exponent, remedy="0 means no skew")
    draw = generator(seed, "quantity_skew")
    if exponent is None:
        logarithms = np.float64(sigma) * draw.standard_normal(clients)
    else:
        logarithms = -exponent * np.log(draw.permutation(clients) + 1.0)
    shares = np.exp(logarithms - logarithms.max())
    sizes = min_size + _apportion(shares / shares.sum(), number - clients * min_size)
    return cut(draw.permutation(number), sizes)


def _apportion(shares: np.ndarray, total: int) -> np.ndarray:
    exact = shares * total
    sizes = np.floor(exact).astype(np.int64)
    missing = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:missing]] += 1
    return sizes
