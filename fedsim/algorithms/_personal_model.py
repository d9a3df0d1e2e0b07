"""What Ditto, APFL and pFedMe share: clients train a copy of the global model and a personal model side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedsim import tree
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local, LocalTraining, parts_of
from fedsim.data import Batch
from fedsim.model import ModelParts, Params, current_scope
from fedsim.rounds import Client, ClientUpdate

Models = tuple[Local, Local]


def first_model(shared: Any) -> Params:
    """Returns a client's personal model before its first round: the server's, with all parts that clients change."""
    return _with_parts(shared.params, current_scope().parts)


def start_of(training: LocalTraining, model: Params, client: Client) -> Local:
    """Returns a personal model before its first step, with parts of its own that it changes."""
    params, parts = parts_of(client).of_model(model)
    return training.start(params, parts)


def model_of(own: Local) -> Params:
    """Returns a personal model after local steps, in the form of `first_model`."""
    return _with_parts(own.params, parts_of(own))


def _with_parts(params: Params, parts: ModelParts) -> Params:
    return parts._replace(frozen=()).join(params)


def train_both(
    algorithm: FedAvg, shared: Any, client: Client, step: Callable[[Models, Batch], Models], start: Models
) -> tuple[ClientUpdate, Local]:
    """Trains both models, and returns the update of the global one, without a memory, and the personal model.

    Args:
      algorithm: gives the batches and the client's weight.
      shared: what the server sent.
      client: the client.
      step: takes a step of both models on a batch.
      start: the client's copy of the global model, and its personal model, before the first step.
    """
    copy, own = client.for_each_batch(algorithm.batches, step, start)
    info = {"loss": copy.loss.result(), "personal_loss": own.loss.result()}
    movement = tree.subtract(shared.params, copy.params)
    return ClientUpdate(movement, algorithm.weight(client), info, parts=copy.parts), own
