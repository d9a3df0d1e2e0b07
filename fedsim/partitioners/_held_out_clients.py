"""Clients that take no part in training.

H. Yuan, W. Morningstar, L. Ning, K. Singhal, "What do we mean by generalization in federated learning?", ICLR 2022, which
measures the participation gap with such clients: https://arxiv.org/abs/2110.14216.
"""

from __future__ import annotations

import operator

import jax
import numpy as np

from fedsim import rng
from fedsim.data import FederatedData


def held_out_clients(data: FederatedData, *, clients: int, seed: int | jax.Array) -> tuple[FederatedData, FederatedData]:
    """Divides a population by client into clients for training and clients that are held out.

    Applied to the train and the test examples of the same clients, the same seed holds out the same clients of both.

    Args:
      data: the population; its rows are copied.
      clients: number of clients to hold out.
      seed: the same seed, or key, gives the same division.

    Returns:
      ``(training, held_out)``, each in the population's order.

    Guarantees:
      - Every client is in exactly one of the two, with its name and all its examples.
      - With the same seed, the clients held out by ``clients=k`` are also held out by ``clients=k + 1``.

    Raises:
      ValueError: ``clients`` is not positive, or not less than the number of clients.

    >>> data = FederatedData.from_arrays({"y": np.arange(4)}, sizes=[1, 1, 1, 1])
    >>> training, held_out = held_out_clients(data, clients=1, seed=0)
    >>> training.num_clients, held_out.num_clients
    (3, 1)
    """
    if not 1 <= operator.index(clients) < data.num_clients:
        raise ValueError(
            f"Expected 1 <= clients < {data.num_clients}, got clients={clients}: hold out at least one client, and leave at "
            "least one of the population for training."
        )
    words = np.asarray(rng.words(rng.stream(rng.root(seed), "held_out_clients")))
    is_held_out = np.zeros(data.num_clients, bool)
    is_held_out[rng.permute(words, 0, data.num_clients, np.arange(clients, dtype=np.int32), np)] = True
    positions = np.arange(data.num_clients)
    training, held_out = ([data.client_ids[int(i)] for i in positions[mask]] for mask in (~is_held_out, is_held_out))
    return data.select(training), data.select(held_out)
