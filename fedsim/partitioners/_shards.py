"""The "pathological" partition of the FedAvg paper.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, section 3: https://arxiv.org/abs/1602.05629: MNIST sorted by digit, 200 shards of 300
examples, 2 for each of 100 clients. No deviations.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, check_labels, generator


def shards(labels: Any, *, clients: int, shards_per_client: int = 2, seed: int) -> list[np.ndarray]:
    """Sorts the examples by label, cuts them into equal shards, and gives each client some of these at random.

    Args:
      labels: ``[n]``, whole numbers or names. Examples with the same label keep their order.
      clients: number of clients.
      shards_per_client: number of shards per client.
      seed: the same seed gives the same partition.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example is assigned to exactly one client.
      - Sizes of shards differ by at most 1, and sizes of clients by at most ``shards_per_client``.
      - If no shard is larger than the rarest label, no client has more than ``2 * shards_per_client`` labels. If the shard size
        divides the number of examples of every label, no client has more than ``shards_per_client``.

    Raises:
      ValueError: a number is not positive, or there are more shards than examples.

    >>> parts = shards(np.arange(40) % 4, clients=4, seed=0)
    >>> max(len(set(rows % 4)) for rows in parts)
    2
    """
    labels = check_labels(labels)
    check_clients(clients, len(labels))
    checks.whole(1, shards_per_client=shards_per_client)
    if clients * shards_per_client > len(labels):
        raise ValueError(
            f"{len(labels)} examples are too few for clients={clients} with shards_per_client={shards_per_client}: "
            f"{clients * shards_per_client} shards."
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), clients * shards_per_client)
    shards_of_clients = generator(seed, "shards").permutation(len(pieces)).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([pieces[i] for i in chosen])).astype(np.int64) for chosen in shards_of_clients]
