"""What Ditto, APFL and pFedMe share: clients train a copy of the global model and a personal model side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedsim import tree
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local
from fedsim.data import Batch
from fedsim.rounds import Client, ClientUpdate

Models = tuple[Local, Local]


def train_both(
    algorithm: FedAvg, shared: Any, client: Client, step: Callable[[Models, Batch], Models], start: Models
) -> ClientUpdate:
    """Trains both models, and returns the update of the global one. The client keeps the parameters of the personal one.

    Args:
      algorithm: gives the batches and the client's weight.
      shared: what the server sent.
      client: the client.
      step: takes a step of both models on a batch.
      start: the client's copy of the global model, and its personal model, before the first step.
    """
    copy, own = client.for_each_batch(algorithm.batches, step, start)
    info = {"loss": copy.loss.result(), "personal_loss": own.loss.result()}
    return ClientUpdate(tree.subtract(shared.params, copy.params), algorithm.weight(client), info, own.params)
