"""Label skew by a Dirichlet prior, seen from the client, with equal sizes.

T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019, section 3: https://arxiv.org/abs/1909.06335. Deviations: their parameter is alpha times the prior
distribution of the classes, so with K equally frequent classes their alpha is K times the one here (which is that of
`dirichlet`, and of FedLab's balanced Dirichlet partition). They say nothing of classes that run out; here clients take turns
at random, and a class without examples left is no longer drawn, so that the last clients are not left with the leftovers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, check_labels, deal, even_sizes, generator


def dirichlet_balanced(labels: Any, *, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Every client draws a mixture of classes from Dirichlet(alpha), and equally many examples by it.

    One example after another goes to a client whose turn it is, turns shuffled: a class drawn from the client's mixture,
    restricted to classes that have examples left, then an example of it. Towards the end few classes are left, so the
    clients are somewhat more alike than their mixtures.

    Args:
      labels: ``[n]``, whole numbers or names.
      clients: number of clients.
      alpha: of each class; small means skewed, large means alike.
      seed: same seed, same partition.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example goes to exactly one client.
      - Sizes differ by at most 1.

    Raises:
      ValueError: ``alpha`` not positive, ``clients`` not positive, or more clients than examples.

    >>> [len(rows) for rows in dirichlet_balanced(np.arange(100) % 10, clients=3, alpha=0.1, seed=0)]
    [34, 33, 33]
    """
    labels = check_labels(labels)
    checks.positive(alpha=alpha)
    check_clients(clients, len(labels), 1)
    draw = generator(seed, "dirichlet_balanced")
    classes, codes = np.unique(labels, return_inverse=True)
    mixtures = draw.dirichlet(np.full(len(classes), float(alpha)), size=clients)
    turns = draw.permutation(np.repeat(np.arange(clients), even_sizes(len(labels), clients)))
    return deal(turns, clients, codes, lambda people, left: mixtures[people] * left, draw)
