"""A fixed number of classes a client.

Q. Li, Y. Diao, Q. Chen, B. He, "Federated learning on non-IID data silos: an experimental study", ICDE 2022, section 4.1
(quantity-based label imbalance, "#C = k"): https://arxiv.org/abs/2102.02079. Deviation: they draw each client's classes
independently, so a class may end up with few clients or none; here every class has equally many, up to one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, check_labels, generator


def classes_per_client(labels: Any, *, clients: int, classes: int, seed: int) -> list[np.ndarray]:
    """Every client holds exactly so many classes; a class's examples are shared evenly by the clients that hold it.

    Unlike `shards`, the number of classes is exact whatever the classes' sizes, and the clients' sizes follow from them.

    Args:
      labels: ``[n]``, whole numbers or names.
      clients: number of clients.
      classes: how many each holds.
      seed: same seed, same partition.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example goes to exactly one client.
      - Every client has examples of exactly ``classes`` labels.
      - The numbers of clients that hold a label differ by at most 1 between labels.
      - Of one label, the clients that hold it have equally many examples, up to one.

    Raises:
      ValueError: a number not positive, more classes a client than there are, too few clients to hold every class, or a
        class with fewer examples than clients that hold it.

    >>> parts = classes_per_client(np.arange(100) % 10, clients=20, classes=3, seed=0)
    >>> {len(set(rows % 10)) for rows in parts}
    {3}
    """
    labels = check_labels(labels)
    check_clients(clients, len(labels))
    names, codes = np.unique(labels, return_inverse=True)
    checks.whole(1, len(names), classes=classes, remedy="as many as occur, at most")
    if clients * classes < len(names):
        raise ValueError(
            f"clients={clients} with classes={classes} each cannot hold {len(names)} classes, and no example may be lost: "
            f"give at least {-(-len(names) // classes)} clients."
        )
    draw = generator(seed, "classes_per_client")
    holders = np.zeros(len(names), np.int64)
    held = np.zeros((clients, len(names)), bool)
    for client in draw.permutation(clients):
        # Those that the fewest hold, ties at random: so the numbers of holders never differ by more than 1.
        chosen = np.lexsort((draw.random(len(names)), holders))[:classes]
        held[client, chosen] = True
        holders[chosen] += 1
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for code, name in enumerate(names):
        rows = draw.permutation(np.flatnonzero(codes == code))
        if len(rows) < holders[code]:
            raise ValueError(
                f"Label {name!s} has {len(rows)} examples, and {holders[code]} clients are to hold some: give fewer clients or "
                "fewer classes each."
            )
        mine = draw.permutation(np.flatnonzero(held[:, code]))
        for client, share in zip(mine, np.array_split(rows, len(mine)), strict=True):
            parts[client].append(share)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]
