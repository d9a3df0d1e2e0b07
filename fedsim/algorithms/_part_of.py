"""What one algorithm does as a part of another: its clients go by the other's loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._gradient_server import GradientServer, ServerState
from fedsim.data import Batch
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PartOf(GradientServer):
    """A part of the algorithm ``whole``, whose clients descend that one's `client_loss`."""

    whole: Any

    def client_loss(self, shared: Any, params: Params, batch: Batch) -> jax.Array:
        return self.whole.client_loss(shared, params, batch)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LocalTraining(PartOf, FedAvg):
    """FedAvg's clients as such a part: they get what ``whole`` sends beside parameters, too."""

    def init(self, key: jax.Array) -> ServerState:
        start = super().init(key)
        return self.whole.init(key)._replace(params=start.params, opt_state=start.opt_state)

    def broadcast(self, state: ServerState) -> Any:
        return self.whole.broadcast(state)
