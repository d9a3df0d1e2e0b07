"""What SCAFFOLD and FedDyn share: the server and every client keep something like a gradient, by which losses are tilted."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Tilted(FedAvg):
    """FedAvg in which server and clients keep as much as the parameters, 0 at first: the server the mean of the clients'."""

    weighting: Literal["examples", "uniform"] = "uniform"

    def init(self, key: jax.Array) -> ServerState:
        state = super().init(key)
        return state._replace(more=jax.tree.map(jnp.zeros_like, state.params))

    def client_memory(self, shared: Shared) -> Params:
        return jax.tree.map(jnp.zeros_like, shared.params)
