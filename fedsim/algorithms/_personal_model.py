"""Base class of Ditto, APFL and pFedMe: FedAvg in which every client also trains a personal model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg, Local
from fedsim.data import Batch
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate

Models = tuple[Local, Local]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PersonalModel(FedAvg):
    """FedAvg in which every client also trains and keeps a personal model. Subclasses define `personal_loss`.

    In every step, the client's copy of the global model and its personal model each take one step of ``client_optimizer`` on
    the same batch. `fedsim.evaluate_personalized` evaluates `personal_params`, which are computed from what the client keeps.
    """

    capabilities = Capabilities(scalable=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        loss, gradient = (
            next(place for place, cls in enumerate(type(self).__mro__) if name in vars(cls))
            for name in ("personal_loss", "personal_gradient")
        )
        if loss < gradient and type(self).__mro__[gradient] is not PersonalModel:
            raise TypeError(
                f"{type(self).__name__} overrides personal_loss, but inherits its gradient, personal_gradient, from "
                f"{type(self).__mro__[gradient].__name__}: override personal_gradient, too."
            )

    local_params = None  # type: ignore[assignment]  # There is no single local model, because clients train two.

    def client_memory(self, shared: Any) -> Any:
        return shared.params

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the parameters of the client's personal model."""
        return client.memory

    def personal_loss(self, shared: Any, copy: Params, own: Any, batch: Batch) -> jax.Array:
        """Returns the loss that ``own`` minimizes. ``copy`` is the client's copy of the global model before the step."""
        raise NotImplementedError(f"{type(self).__name__} must define personal_loss.")

    def personal_gradient(self, shared: Any, copy: Params, own: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """Returns the loss to report, and the gradient of `personal_loss` with respect to ``own``.

        A subclass that overrides `personal_loss` must also override this method, unless it inherits it from `PersonalModel`.
        """
        return jax.value_and_grad(self.personal_loss, argnums=2)(shared, copy, own, batch)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        start = self.start(shared, shared.params), self.start(shared, client.memory)
        copy, own = client.for_each_batch(self.batches, functools.partial(self.two_steps, shared), start)
        result = self.update_of(shared, client, copy)
        return result._replace(info={**result.info, "personal_loss": own.loss.result()}, memory=own.params)

    def two_steps(self, shared: Any, models: Models, batch: Batch) -> Models:
        """Takes one step of the client's copy of the global model, and one step of its personal model."""
        copy, own = models
        slope = self.personal_gradient(shared, copy.params, own.params, batch)
        own = self.step(shared, own, batch, slope, lambda own: self.personal_loss(shared, copy.params, own, batch))
        return self.step(shared, copy, batch, self.client_gradient(shared, copy.params, batch)), own
