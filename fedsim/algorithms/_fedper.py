"""Federated learning with personalization layers (FedPer).

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, "Federated learning with personalization layers", 2019, Algorithms 1
and 2: https://arxiv.org/abs/1912.00818. The paper's base layers are called the body here, and its personalization layers the
head. Deviations: a cohort participates in each round, while in the paper all clients do. All heads start from the same random
parameters, which clients generate from a seed that the server sends.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import rng, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local
from fedsim.algorithms._representation import check_body
from fedsim.algorithms._server_step import first_state
from fedsim.data import FederatedData
from fedsim.model import PARTS_IN_WORDS, Params
from fedsim.rounds import Client, ClientUpdate
from fedsim.transfer import Head, head_of

if TYPE_CHECKING:
    Base = FedAvg
else:  # A mixin: the classes that have it are subclasses of FedAvg.
    Base = object


class FedPerState(NamedTuple):
    """`ServerState` of the body only, and the seed of the initial head, ``uint32 []``."""

    params: Params
    opt_state: Any
    round: jax.Array
    head_seed: jax.Array


class FedPerShared(NamedTuple):
    """What clients receive: `Shared` of the body only, and the seed of the initial head."""

    params: Params
    round: jax.Array
    head_seed: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OwnHead(Base):
    """What `FedPer`, FedRep and LG-FedAvg share: clients keep a part of a model, and train it with the other, which is sent.

    The part is the head, unless a class overrides `split`.

    Attributes:
      head: see `FedPer`.
    """

    capabilities = Capabilities(
        scalable=True,
        microbatches=True,
        refused_parts=dict.fromkeys(
            PARTS_IN_WORDS,
            "it divides a model by its own field head; use a model without, or FedAvg with model.with_parts(frozen=..., "
            "kept=...), where clients keep parameters, too",
        ),
    )

    head: Head | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None:
            head_of(self.model, self.head)  # raises ValueError

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_body(self.model, self.head)

    @functools.cached_property
    def _is_head(self) -> Head:
        return head_of(self.model, self.head)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Returns body and head: what is sent and what clients keep. `haiku.data_structures.merge` is the inverse."""
        head, body = hk.data_structures.partition(lambda module, name, value: self._is_head(module, name), params)
        return body, head

    def init(self, key: jax.Array) -> FedPerState:
        body, _ = self.split(self.model.init(key))
        head_seed = jax.random.bits(rng.stream(key, "head"), dtype=jnp.uint32)
        return FedPerState(*first_state(body, self.server_optimizer), head_seed)

    def broadcast(self, state: FedPerState) -> FedPerShared:
        return FedPerShared(state.params, state.round, state.head_seed)

    def client_memory(self, shared: FedPerShared) -> Params:
        return self.split(self.model.init(jax.random.key(shared.head_seed, impl=rng.IMPLEMENTATION)))[1]

    def personal_params(self, shared: FedPerShared, client: Client) -> Params:
        """Returns the parameters of the client's personal model."""
        return hk.data_structures.merge(shared.params, client.memory)

    def train(self, shared: FedPerShared, client: Client) -> Local:
        return self.local_training(shared, client).run(client, self.personal_params(shared, client))

    def client_update(self, shared: FedPerShared, client: Client) -> ClientUpdate:
        local = self.train(shared, client)
        body, head = self.split(local.params)
        movement = tree.subtract(shared.params, body)
        return ClientUpdate(movement, self.weight(client), {"loss": local.loss.result()}, head)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedPer(OwnHead, FedAvg):
    """FedAvg of the body of a network, while every client keeps its own head, which is never sent.

    Clients train both together. ``state.params`` holds only the body, so `fedsim.evaluate` cannot evaluate it.
    `fedsim.evaluate_personalized` combines the body with each client's head.

    Attributes:
      head: a function from a Haiku module's name and a parameter's name to whether the parameter belongs to the head, see
        `fedsim.transfer.head_of`: ``lambda module, name: "norm" in module``. With None, the head is the module that the model
        creates last, usually the output layer. If no parameter belongs to the head, the algorithm is FedAvg. If all do, clients
        train alone.

    >>> import optax, fedsim
    >>> algorithm = FedPer(model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=3))
    >>> state = algorithm.init(jax.random.key(0))
    >>> sorted(state.params), sorted(algorithm.client_memory(algorithm.broadcast(state)))
    (['linear', 'linear_1'], ['linear_2'])
    """
