"""Label skew from a Dirichlet distribution over clients, drawn for each class.

T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019: https://arxiv.org/abs/1909.06335. Deviation: they draw a mixture of classes for each client. Here each
class draws a mixture of clients, as in M. Yurochkin et al., "Bayesian nonparametric federated learning of neural networks",
ICML 2019, so the sizes of the clients vary, too. For the method of Hsu et al. see `dirichlet_balanced`.

Libraries differ in what they do with clients that are already large. With ``capped=False`` nothing is done. With
``capped=True`` a client that holds at least n / clients of the n examples gets none of the classes that follow, as in
NIID-Bench (Q. Li, Y. Diao, Q. Chen, B. He, "Federated learning on non-IID data silos: an experimental study", ICDE 2022,
https://arxiv.org/abs/2102.02079), in FedLab (``hetero_dir_partition``), and in much code derived from these; Flower's
``DirichletPartitioner`` calls it ``self_balancing``. Deviation: when a client has too few examples, these libraries draw the
whole partition again; here the largest clients give it some of theirs, drawn uniformly.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, check_labels, generator


def dirichlet(
    labels: Any, *, clients: int, alpha: float, seed: int, min_size: int = 1, capped: bool = False
) -> list[np.ndarray]:
    """Divides each class over the clients by shares drawn from Dirichlet(alpha), which skews both labels and sizes.

    A client that has fewer than ``min_size`` examples is then given some of those of the largest clients, drawn uniformly.

    Args:
      labels: ``[n]``, whole numbers or names.
      clients: number of clients.
      alpha: concentration. Small values give skewed clients, large values similar ones.
      seed: the same seed gives the same partition.
      min_size: smallest number of examples of a client.
      capped: if true, a client that already holds at least n / clients examples gets no examples of further classes, as in
        FedLab and NIID-Bench. Classes are divided in ascending order. Sizes vary less then. As in their code, the last client
        may nevertheless get one example of such a class, because cumulative sums of shares are rounded.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example is assigned to exactly one client.
      - No client has fewer than ``min_size`` examples.

    Raises:
      ValueError: ``alpha`` is not positive and finite, ``clients`` is not positive, or there are fewer than
        ``clients * min_size`` examples.

    >>> parts = dirichlet(np.arange(100) % 10, clients=5, alpha=0.3, seed=0)
    >>> sorted(np.concatenate(parts)) == list(range(100))
    True
    """
    labels = check_labels(labels)
    checks.positive(alpha=alpha, remedy="small values give skewed clients, large values similar ones")
    checks.truth(capped=capped)
    check_clients(clients, len(labels), min_size)
    draw = generator(seed)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, np.int64)
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        shares = draw.dirichlet(np.full(clients, alpha))
        if capped:
            below = sizes * clients < len(labels)
            shares = shares * below
            # With a tiny alpha, all clients below the cap may have drawn a share of 0.
            shares = shares / shares.sum() if shares.sum() > 0 else below / below.sum()
        cuts = (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for client, chunk in enumerate(np.split(rows, cuts)):
            parts[client].append(chunk)
            sizes[client] += len(chunk)
    merged = [np.concatenate([np.zeros(0, np.int64), *part]) for part in parts]
    _top_up(merged, min_size, generator(seed, "min_size"))
    return [np.sort(rows) for rows in merged]


def _top_up(parts: list[np.ndarray], min_size: int, draw: np.random.Generator) -> None:
    """Moves random examples of the clients that are the largest at that moment to those with fewer than ``min_size``."""
    donors = [(-len(rows), client) for client, rows in enumerate(parts) if len(rows) > min_size]
    heapq.heapify(donors)
    shuffled = set()
    for client, rows in enumerate(parts):
        while len(rows) < min_size:
            size, donor = donors[0]
            if donor not in shuffled:
                parts[donor] = draw.permutation(parts[donor])  # They are in the order of their classes.
                shuffled.add(donor)
            parts[donor], given = parts[donor][:-1], parts[donor][-1:]
            rows = parts[client] = np.concatenate([rows, given])
            heapq.heapreplace(donors, (size + 1, donor))
