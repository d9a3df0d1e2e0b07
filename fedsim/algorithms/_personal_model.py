"""What Ditto, APFL and pFedMe share: FedAvg, and beside it a model of its own for every client."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

from fedsim import tree
from fedsim.algorithms._fedavg import ClientState, FedAvg
from fedsim.algorithms._gradient_server import Shared
from fedsim.data import Batch
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


class TwoModels(NamedTuple):
    """The client's copy of the global model, and what it trains for itself."""

    copy: ClientState
    own: ClientState


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PersonalModel(FedAvg):
    """FedAvg, and beside it every client trains something of its own, which it keeps: subclasses write `personal_loss`.

    In every step both take a step of ``client_optimizer`` on the same batch. `fedsim.evaluate_personalized` evaluates what
    `personal_params` makes of what clients keep.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        loss, gradient = (
            next(place for place, cls in enumerate(type(self).__mro__) if name in vars(cls))
            for name in ("personal_loss", "personal_gradient")
        )
        if loss < gradient and type(self).__mro__[gradient] is not PersonalModel:
            raise TypeError(
                f"{type(self).__name__} overrides personal_loss, and clients descend personal_gradient, which is that of "
                f"{type(self).__mro__[gradient].__name__}: override it, too."
            )

    def client_memory(self, shared: Shared) -> Any:
        return shared.params

    def personal_params(self, shared: Shared, memory: Any) -> Params:
        """The parameters that a client of this memory uses for itself."""
        return memory

    def personal_loss(self, shared: Shared, copy: Params, own: Any, batch: Batch) -> jax.Array:
        """What ``own`` descends; ``copy`` is the client's copy of the global model before the step."""
        raise NotImplementedError(f"{type(self).__name__} must define personal_loss.")

    def personal_gradient(self, shared: Shared, copy: Params, own: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """The loss that is reported, and the gradient of `personal_loss` in ``own``: whoever overrides one, overrides both, or
        inherits from this class."""
        return tree.value_and_grad(lambda own: self.personal_loss(shared, copy, own, batch), own)

    def client_init(self, shared: Shared, client: Client) -> Any:
        return TwoModels(self.set_out(shared, shared.params), self.set_out(shared, client.memory))

    def client_step(self, shared: Shared, state: Any, batch: Batch) -> Any:
        def loss(own: Any) -> jax.Array:
            return self.personal_loss(shared, state.copy.params, own, batch)

        slope = self.personal_gradient(shared, state.copy.params, state.own.params, batch)
        own = self.walk(shared, state.own, batch, slope, loss)
        later = batch._replace(mask=tree.after(batch.mask, own.params))  # This slope may read the copy.
        return TwoModels(super().client_step(shared, state.copy, later), own)

    def client_final(self, shared: Shared, state: Any, client: Client) -> ClientUpdate:
        sent = super().client_final(shared, state.copy, client)
        return sent._replace(info={**sent.info, "personal_loss": state.own.loss.result()}, memory=state.own.params)
