"""FedSAM: sharpness-aware minimization by clients.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu, "Generalized federated learning via sharpness aware minimization", ICML 2022,
Algorithm 1: https://arxiv.org/abs/2206.02618. D. Caldarola, B. Caputo, M. Ciccone, "Improving generalization in federated
learning by seeking flat minima", ECCV 2022, propose the same clients: https://arxiv.org/abs/2203.11834. With g_i(·) the
gradient of client i on the batch of a step, and η the learning rate of ``client_optimizer``::

    y = y - η g_i(y + ρ g_i(y) / ‖g_i(y)‖)

Deviations: clients are weighted by ``weighting`` as in FedAvg (the papers average uniformly). MoFedSAM, the variant with
momentum, is not included; `fedsim.algorithms.FedCM` has its momentum. Terms that a subclass adds to the loss are not perturbed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Gradient, LocalTraining
from fedsim.data import Batch
from fedsim.model import Params
from fedsim.rounds import Client


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedSAM(FedAvg):
    """FedAvg whose clients take sharpness-aware steps: with the gradient at the worst point at distance ρ, to first order.

    Clients prefer flat minima, which agree better after averaging. A step computes two gradients of its batch, one after the
    other. The ``loss`` in a round's info is that of the client's parameters, without the perturbation.

    Attributes:
      rho: ρ, at least 0. With 0, the algorithm is FedAvg.
      model, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``rho`` is negative.

    >>> import optax, fedsim
    >>> FedSAM(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), rho=-0.1)
    Traceback (most recent call last):
    ...
    ValueError: Expected rho >= 0 and finite, got rho=-0.1.
    """

    capabilities = Capabilities(scalable=True, model_parts=True, microbatches=True)

    rho: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, rho=self.rho)

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        training = super().local_training(shared, client)
        training.check_not_private(type(self).__name__, "its two gradients of a batch would have the same noise")
        return dataclasses.replace(training, gradient=_perturbed(training.gradient or training.loss_and_gradient, self.rho))


def _perturbed(gradient: Gradient, rho: float) -> Gradient:
    """Returns a function like ``gradient``, whose gradient is that at the distance ``rho`` in its own direction."""

    def of_worst_point(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        loss, slope = gradient(params, batch)
        square = tree.squared_norm(slope)
        # At a stationary point there is no direction, and the derivative of a root at 0 would not be finite.
        inverse = jnp.where(square > 0, jax.lax.rsqrt(jnp.where(square > 0, square, 1.0)), 0.0)
        return loss, gradient(tree.add(params, tree.scale(slope, rho * inverse)), batch)[1]

    return of_worst_point
