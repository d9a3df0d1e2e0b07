"""FedBABU: federated averaging with body aggregation and body update.

J. Oh, S. Kim, S.-Y. Yun, "FedBABU: Towards enhanced representation for federated image classification", ICLR 2022, Algorithm 1:
https://arxiv.org/abs/2106.06042. The head keeps its initial values while clients train the body, which the server averages. For
evaluation, each client fine-tunes the result. Deviations: x, which the server sends in each round, has the head, which in the
paper clients have from the start; what clients send is 0 there and counts as sent. Clients are weighted by ``weighting``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining
from fedsim.algorithms._representation import check_body
from fedsim.data import FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, RoundInfo
from fedsim.transfer import Head, head_of, in_head


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedBABU(FedAvg):
    """FedAvg that trains the body of a network only, with a random head that never changes; clients fine-tune the result.

    For the fine-tuned models, give `fedsim.evaluate_personalized` an algorithm that trains the head, too, such as `FedAvg`.

    Attributes:
      head: a function from a Haiku module's name and a parameter's name to whether the parameter belongs to the head, see
        `fedsim.transfer.head_of`. With None, the head is the module that the model creates last, usually the output layer. If
        no parameter belongs to the head, the algorithm is FedAvg.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``head`` is neither a function nor None. Before the first round: all parameters are in one module, and
        ``head`` is None.

    >>> import fedsim
    >>> data = fedsim.datasets.load("digits", clients=2).train
    >>> settings = {"model": fedsim.models.digits_dense(), "client_optimizer": optax.sgd(0.1),
    ...             "batches": fedsim.Batches(size=20)}
    >>> algorithm, tuner = FedBABU(**settings), FedAvg(**settings)
    >>> start = algorithm.init(jax.random.key(0))
    >>> state, _ = algorithm.apply(start, fedsim.Cohort.of(data, ["0", "1"]))
    >>> [bool((state.params[name]["w"] == start.params[name]["w"]).all()) for name in ("linear", "linear_2")]
    [False, True]
    >>> tuned = fedsim.evaluate_personalized(algorithm, state, data, data, fine_tune=tuner).overall["accuracy"]
    >>> bool(tuned > fedsim.evaluate(algorithm.model, state.params, data).overall["accuracy"])
    True
    """

    capabilities = Capabilities(scalable=True, model_parts=True, microbatches=True)

    head: Head | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None:
            head_of(self.model, self.head)  # raises ValueError

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_body(self.model, self.head)

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        training = super().local_training(shared, client)

        def of_body(updates: Params, params: Params | None) -> Params:
            is_head = in_head(self.model, updates, self.head)
            return jax.tree.map(lambda head, update: jnp.zeros_like(update) if head else update, is_head, updates)

        # Before the optimizer, so that it does not clip by gradients of the head, and after it, for weight decay.
        body = optax.stateless(of_body)
        return dataclasses.replace(training, optimizer=optax.chain(body, training.optimizer, body))

    def server_update(self, state: Any, update: Any, info: RoundInfo) -> Any:
        # Noise of an aggregator and weight decay of the server would move the head.
        after = super().server_update(state, update, info)
        is_head = in_head(self.model, state.params, self.head)
        kept = jax.tree.map(lambda head, old, new: old if head else new, is_head, state.params, after.params)
        return after._replace(params=kept)
