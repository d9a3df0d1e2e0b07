"""Label skew by a Dirichlet prior, seen from the class.

T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019: https://arxiv.org/abs/1909.06335. Deviation, which most code shares: they draw a mixture of classes for
each client, and here each class draws its mixture of clients (as M. Yurochkin et al., "Bayesian nonparametric federated
learning of neural networks", ICML 2019), so sizes vary, too. For theirs see `dirichlet_balanced`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, check_labels, generator


def dirichlet(labels: Any, *, clients: int, alpha: float, seed: int, min_size: int = 1) -> list[np.ndarray]:
    """Each class is spread over the clients by its own draw from Dirichlet(alpha): skewed labels, and skewed sizes.

    A client short of ``min_size`` examples is then given some from the largest clients.

    Args:
      labels: ``[n]``, whole numbers or names.
      clients: number of clients.
      alpha: small means skewed, large means alike.
      seed: same seed, same partition.
      min_size: no client has fewer examples than this.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example goes to exactly one client.
      - No client has fewer than ``min_size`` examples.

    Raises:
      ValueError: ``alpha`` not positive and finite, ``clients`` not positive, or fewer than ``clients * min_size`` examples.

    >>> parts = dirichlet(np.arange(100) % 10, clients=5, alpha=0.3, seed=0)
    >>> sorted(np.concatenate(parts)) == list(range(100))
    True
    """
    labels = check_labels(labels)
    checks.positive(alpha=alpha, remedy="small is skewed, large is alike")
    check_clients(clients, len(labels), min_size)
    draw = generator(seed)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(draw.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)).astype(np.int64)
        for part, chunk in zip(parts, np.split(rows, cuts), strict=True):
            part.append(chunk)
    merged = [np.concatenate([np.zeros(0, np.int64), *part]) for part in parts]
    for client, rows in enumerate(merged):
        while len(rows) < min_size:
            donor = max(range(clients), key=lambda c: len(merged[c]))
            merged[donor], given = merged[donor][:-1], merged[donor][-1:]
            rows = merged[client] = np.concatenate([rows, given])
    return [np.sort(rows) for rows in merged]
