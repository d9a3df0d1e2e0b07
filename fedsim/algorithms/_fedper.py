"""Federated learning with personalization layers (FedPer).

M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, "Federated learning with personalization layers", 2019, Algorithms 1
and 2: https://arxiv.org/abs/1912.00818. Its base layers are the body here, its personalization layers the head. Deviations: a
cohort takes part in a round where the paper has all clients do so; and all heads start from the same random parameters, which
clients draw for themselves, from a seed that the server sends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import rng
from fedsim.algorithms._fedavg import ClientState, FedAvg
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.data import FederatedData
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedPer(FedAvg):
    """FedAvg of the body of a network, whose head every client keeps for itself: no head is ever sent.

    Clients train both together. ``state.params`` is the body alone, so `fedsim.evaluate` has no model to evaluate;
    `fedsim.evaluate_personalized` joins it to each client's head.

    Attributes:
      head: of a Haiku module's name and a parameter's, whether it is the head's: ``lambda module, name: "norm" in module``.
        None: all of the module that the model makes last, its output layer as a rule. If nothing is the head, this is FedAvg;
        if everything is, clients train alone.

    >>> import optax, fedsim
    >>> algorithm = FedPer(model=fedsim.models.digits_dense(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=3))
    >>> state = algorithm.init(jax.random.key(0))
    >>> sorted(state.params), sorted(algorithm.client_memory(algorithm.broadcast(state)))
    (['linear', 'linear_1'], ['linear_2'])
    """

    head: Callable[[str, str], bool] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and not callable(self.head):
            raise ValueError(
                f"Expected head to be a function of a module's and a parameter's name, or None, got head={self.head!r}."
            )

    def check(self, data: FederatedData) -> None:
        super().check(data)
        if self.head is None and len(self._modules) == 1:
            raise ValueError(
                f"All parameters are in one module, {self._modules[0]!r}, which would be the head: nothing is left to share. "
                "Take a deeper model, or say by head= which parameters clients keep."
            )

    @functools.cached_property
    def _modules(self) -> list[str]:
        """Names in the order in which the model makes them, which a transformation of its parameters would forget."""
        names: list[str] = []
        jax.eval_shape(lambda key: names.extend(self.model.init(key)), jax.random.key(0))
        return names

    def split(self, params: Params) -> tuple[Params, Params]:
        """Body and head; `haiku.data_structures.merge` is the inverse."""
        is_head = self.head or (lambda module, name: module == self._modules[-1])
        head, body = hk.data_structures.partition(lambda module, name, value: is_head(module, name), params)
        return body, head

    def init(self, key: jax.Array) -> ServerState:
        body, _ = self.split(self.model.init(key))
        head_seed = jax.random.bits(rng.stream(key, "head"), dtype=jnp.uint32)
        return ServerState(body, self.server_optimizer.init(body), jnp.zeros((), jnp.int32), head_seed)

    def broadcast(self, state: ServerState) -> Shared:
        return Shared(state.params, state.round, state.more)

    def client_memory(self, shared: Shared) -> Params:
        return self.split(self.model.init(jax.random.key(shared.more)))[1]

    def personal_params(self, shared: Shared, memory: Params) -> Params:
        """The parameters that a client with this head uses for itself."""
        return hk.data_structures.merge(shared.params, memory)

    def client_init(self, shared: Shared, client: Client) -> Any:
        return self.set_out(shared, self.personal_params(shared, client.memory))

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        body, head = self.split(state.params)
        return super().client_final(shared, state._replace(params=body), client)._replace(memory=head)
