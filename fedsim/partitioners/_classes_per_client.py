"""Partition with a fixed number of classes per client.

Q. Li, Y. Diao, Q. Chen, B. He, "Federated learning on non-IID data silos: an experimental study", ICDE 2022, section 4.1
(quantity-based label imbalance, "#C = k"): https://arxiv.org/abs/2102.02079. Deviation: they draw each client's classes
independently, so a class may have few clients or none; here the numbers of clients per class differ by at most 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, check_labels, generator


def classes_per_client(labels: Any, *, clients: int, classes: int, seed: int) -> list[np.ndarray]:
    """Gives every client exactly ``classes`` classes and divides each class evenly among the clients that hold it.

    Unlike with `shards`, the number of classes is exact, whatever the sizes of the classes. The sizes of the clients follow
    from those of their classes.

    Args:
      labels: ``[n]``, whole numbers or names.
      clients: number of clients.
      classes: number of classes per client.
      seed: the same seed gives the same partition.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example is assigned to exactly one client.
      - Every client has examples of exactly ``classes`` labels.
      - The numbers of clients that hold a label differ by at most 1 between labels.
      - The numbers of examples of one label differ by at most 1 between the clients that hold it.

    Raises:
      ValueError: a number is not positive, ``classes`` exceeds the number of labels, there are too few clients to hold every
        label, or a label has fewer examples than clients that hold it.

    >>> parts = classes_per_client(np.arange(100) % 10, clients=20, classes=3, seed=0)
    >>> {len(set(rows % 10)) for rows in parts}
    {3}
    """
    labels = check_labels(labels)
    check_clients(clients, len(labels))
    names, codes = np.unique(labels, return_inverse=True)
    checks.whole(1, len(names), classes=classes, remedy="at most the number of labels in the data")
    if clients * classes < len(names):
        raise ValueError(
            f"clients={clients} with classes={classes} each cannot hold all {len(names)} labels, and every example must be "
            f"assigned: give at least {-(-len(names) // classes)} clients."
        )
    draw = generator(seed, "classes_per_client")
    num_holders = np.zeros(len(names), np.int64)
    holds = np.zeros((clients, len(names)), bool)
    for client in draw.permutation(clients):
        # The labels with the fewest clients come first, with random ties, so that these numbers never differ by more than 1.
        chosen = np.lexsort((draw.random(len(names)), num_holders))[:classes]
        holds[client, chosen] = True
        num_holders[chosen] += 1
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for code, name in enumerate(names):
        rows = draw.permutation(np.flatnonzero(codes == code))
        if len(rows) < num_holders[code]:
            raise ValueError(
                f"Label {name!s} has {len(rows)} examples and should be held by {num_holders[code]} clients: give fewer "
                "clients or fewer classes each."
            )
        holders = draw.permutation(np.flatnonzero(holds[:, code]))
        for client, share in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[client].append(share)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]
