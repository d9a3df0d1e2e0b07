"""Label skew from a Dirichlet distribution over classes, drawn for each client, with equal sizes.

T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019, section 3: https://arxiv.org/abs/1909.06335. Deviations: their parameter is alpha times the prior
distribution of the classes, so with K equally frequent classes their alpha is K times the one here (which is that of
`dirichlet`, and of FedLab's balanced Dirichlet partition). The paper does not say what happens when a class runs out. Here
clients take turns in random order, and a class without examples left is not drawn any more, so the last clients do not have to
take whatever is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import assign_by_label, check_clients, check_labels, even_sizes, generator


def dirichlet_balanced(labels: Any, *, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Draws a mixture of classes for every client from Dirichlet(alpha), and equally many examples for each by its mixture.

    Examples are assigned one at a time to clients in a shuffled order of turns: a class is drawn from the client's mixture,
    restricted to classes with examples left, and then an example of that class. Towards the end few classes are left, so the
    clients are somewhat more similar than their mixtures.

    Args:
      labels: ``[n]``, whole numbers or names.
      clients: number of clients.
      alpha: concentration of each class. Small values give skewed clients, large values similar ones.
      seed: the same seed gives the same partition.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example is assigned to exactly one client.
      - Sizes differ by at most 1.

    Raises:
      ValueError: ``alpha`` or ``clients`` is not positive, or there are more clients than examples.

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
    return assign_by_label(turns, clients, codes, lambda receivers, left: mixtures[receivers] * left, draw)
