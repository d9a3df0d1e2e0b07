"""Partitioners: seeded pure functions from labels to client index arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import rng


def dirichlet_partition(labels: Any, *, clients: int, alpha: float, seed: int, min_size: int = 1) -> list[np.ndarray]:
    """Label skew by a Dirichlet prior: each class is spread over the clients by its own draw from Dirichlet(alpha).

    The way of Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for federated visual
    classification" (2019) seen from the class, as most code does it. Every example goes to exactly one client. A client
    short of ``min_size`` examples is then given some from the largest clients.

    Args:
      labels: ``int [n]``.
      clients: number of clients.
      alpha: small means skewed, large means alike.
      seed: same seed, same partition.
      min_size: no client has fewer examples than this.

    Returns:
      One sorted ``int64`` index array per client: together each of ``0 .. n-1`` once.

    Raises:
      ValueError: ``alpha`` not positive, ``clients`` not positive, or fewer than ``clients * min_size`` examples.

    >>> parts = dirichlet_partition(np.arange(100) % 10, clients=5, alpha=0.3, seed=0)
    >>> sorted(np.concatenate(parts)) == list(range(100))
    True
    """
    labels = np.asarray(labels)
    if clients < 1:
        raise ValueError(f"Expected clients >= 1, got clients={clients}.")
    if not alpha > 0:
        raise ValueError(f"Expected alpha > 0, got alpha={alpha}: small is skewed, large is alike.")
    if len(labels) < clients * min_size:
        raise ValueError(f"{len(labels)} examples are too few for clients={clients} with min_size={min_size} each.")
    words = np.asarray(rng.words(rng.stream(rng.root(seed), "partition")))
    draw = np.random.Generator(np.random.Philox(words.astype(np.uint64)))
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(draw.dirichlet(np.full(clients, alpha)))[:-1] * len(rows)).astype(np.int64)
        for part, chunk in zip(parts, np.split(rows, cuts), strict=True):
            part.append(chunk)
    merged = [np.concatenate(part) for part in parts]
    for client, rows in enumerate(merged):
        while len(rows) < min_size:
            donor = max(range(clients), key=lambda c: len(merged[c]))
            merged[donor], given = merged[donor][:-1], merged[donor][-1:]
            rows = merged[client] = np.concatenate([rows, given])
    return [np.sort(rows) for rows in merged]
