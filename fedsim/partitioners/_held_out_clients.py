"""Clients that training never sees.

H. Yuan, W. Morningstar, L. Ning, K. Singhal, "What do we mean by generalization in federated learning?", ICLR 2022, which
tells the participation gap by them: https://arxiv.org/abs/2110.14216.
"""

from __future__ import annotations

import operator

import numpy as np

from fedsim import rng
from fedsim.data import FederatedData


def held_out_clients(data: FederatedData, *, clients: int, seed: int) -> tuple[FederatedData, FederatedData]:
    """Splits a population by client: those to train on, and those held out.

    Args:
      data: the population; its rows are copied.
      clients: how many to hold out.
      seed: same seed, same split.

    Returns:
      ``(seen, held_out)``, each in the population's order.

    Guarantees:
      - Every client is in exactly one of the two, with its name and all its examples.
      - Whoever is held out of ``clients=k`` is held out of ``clients=k + 1``, too, by the same seed.

    Raises:
      ValueError: ``clients`` not positive, or not less than there are.

    >>> data = FederatedData.from_arrays({"y": np.arange(4)}, sizes=[1, 1, 1, 1])
    >>> seen, held_out = held_out_clients(data, clients=1, seed=0)
    >>> seen.num_clients, held_out.num_clients
    (3, 1)
    """
    if not 1 <= operator.index(clients) < data.num_clients:
        raise ValueError(
            f"Expected 1 <= clients < {data.num_clients} (the population), got clients={clients}: some to hold out."
        )
    words = np.asarray(rng.words(rng.stream(rng.root(seed), "held_out_clients")))
    out = np.zeros(data.num_clients, bool)
    out[rng.permute(words, 0, data.num_clients, np.arange(clients, dtype=np.int32), np)] = True
    names = np.arange(data.num_clients)
    seen, held_out = ([data.client_ids[int(i)] for i in names[mask]] for mask in (~out, out))
    return data.select(seen), data.select(held_out)
