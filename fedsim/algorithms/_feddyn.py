"""FedDyn: dynamic regularization.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, "Federated learning based on dynamic
regularization", ICLR 2021, Algorithm 1: https://arxiv.org/abs/2111.04263. With h_k what client k keeps (the paper's ∇L_k at its
last parameters), h what the server keeps, all 0 at first, P the cohort, m the clients that have examples::

    θ_k = argmin_θ L_k(θ) - <h_k, θ> + α/2 ‖θ - x‖²
    h_k = h_k - α (θ_k - x)
    h = h - α / m Σ_P (θ_k - x),     x = mean_P θ_k - h / α

Deviations: the argmin is approached by ``client_optimizer``, as in the paper's experiments (and hence h_k approaches the
gradient). With ``weighting="examples"`` the mean is weighted, and 1 / m is a client's part of all examples, so that h stays the
mean of all h_k. Where what arrives of a client's movement is clipped or compressed, h_k goes by that, as h does; an attack, or
an aggregator that is no mean (a median, Krum) or adds noise, leaves h apart from their mean. ``server_optimizer`` takes x minus
the last line for its gradient; with its default that line holds.
"""

from __future__ import annotations

import dataclasses

import jax

from fedsim import checks, tree
from fedsim.algorithms._fedavg import ClientState
from fedsim.algorithms._gradient_server import ServerState, Shared
from fedsim.algorithms._tilted import Tilted
from fedsim.data import Batch
from fedsim.execution import Client, ClientUpdate, Turnout
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedDyn(Tilted):
    """FedAvg whose clients' losses are tilted, each round anew, so that they agree with the others' at the common optimum.

    A client keeps h_k between rounds (as much as the parameters), and sends and gets no more than in FedAvg.

    Attributes:
      alpha: above 0. The paper tries 0.1, 0.01 and 0.001; large is careful.
      weighting: default ``"uniform"``, the paper's; see `GradientServer`.
      model, client_optimizer, server_optimizer: see `FedAvg`.

    Raises:
      ValueError: ``alpha`` is not above 0.

    >>> import optax, fedsim
    >>> FedDyn(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), alpha=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected alpha > 0 and finite, got alpha=0.0.
    """

    alpha: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(alpha=self.alpha)

    def client_init(self, shared: Shared, client: Client) -> ClientState:
        # α (θ - x) - h_k is a pull to here: of two arrays a step reads one.
        center = tree.add(shared.params, tree.scale(client.memory, 1 / self.alpha))
        return super().client_init(shared, client)._replace(more=center)

    def client_gradient(self, shared: Shared, state: ClientState, batch: Batch) -> tuple[jax.Array, Params]:
        loss, gradient = super().client_gradient(shared, state, batch)
        return loss, tree.pulled(gradient, self.alpha, state.params, state.more)

    def objective(self, shared: Shared, params: Params, batch: Batch) -> jax.Array:
        apart = tree.squared_norm(tree.subtract(params, shared.params))
        return super().objective(shared, params, batch) + self.alpha / 2 * apart

    def client_sent(self, result: ClientUpdate, client: Client, arrived: Params) -> Params:
        return tree.add(client.memory, tree.scale(arrived, self.alpha))

    def server_round(self, state: ServerState, update: Params, turnout: Turnout) -> ServerState:
        tilt = tree.add(state.more, tree.scale(update, self.alpha * self.share(turnout)))
        return self.server_update(state, tree.add(update, tree.scale(tilt, 1 / self.alpha)))._replace(more=tilt)
