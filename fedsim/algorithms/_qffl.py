"""Fair resource allocation: q-FedAvg and q-FedSGD.

T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair resource allocation in federated learning", ICLR 2020 (Algorithm 1, q-FedSGD, and
Algorithm 2, q-FedAvg): https://arxiv.org/abs/1905.10497. The paper's q is ``q`` and its L is ``lipschitz``. Its F_k(w) is the
client's mean loss over all its examples at the server's parameters (``loss_before`` in the info of q-FedAvg).

Deviations: the paper samples client k with probability p_k and sums uniformly. With the defaults, ``weighting="examples"`` and
uniform sampling, the sums are weighted by p_k instead, which has the same expectation. For the paper's sampling, use a
`fedsim.samplers.WeightedSampler` and ``weighting="uniform"``. Losses below 1e-10 count as 1e-10, because F^(q-1) could be
infinite. F_k is the training loss, which is random with dropout. The result of the sums is a gradient for any
``server_optimizer``. The paper uses SGD with learning rate 1, the default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators import AuxMean, WithAux
from fedsim.algorithm import Capabilities
from fedsim.algorithms._descent import check_needs_no_loss, constants, waits
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._fedsgd import FedSGD
from fedsim.algorithms._local_training import optimizer_of_round, with_kept
from fedsim.algorithms._server_step import check_weights_all_alike
from fedsim.data import FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo

_SMALLEST_LOSS = 1e-10
_TWO_SUMS = "the server divides the sum of the Δ_k by that of the h_k"


def reweighted(gradient: Params, loss: jax.Array, q: jax.Array | float, lipschitz: jax.Array | float) -> WithAux:
    """Returns Δ_k = F_k^q ∇_k, and h_k = q F_k^(q-1) |∇_k|² + L F_k^q as auxiliary data.

    ``gradient`` is a gradient, or an update that is used as one.
    """
    loss = jnp.maximum(loss, _SMALLEST_LOSS)
    return WithAux(tree.scale(gradient, loss**q), q * loss ** (q - 1) * tree.squared_norm(gradient) + lipschitz * loss**q)


def fair_step(update: WithAux) -> Params:
    """Returns ΣΔ_k / Σh_k, the gradient for the server. It is 0 if no client could move, so that Σh_k is 0."""
    delta, h = update
    return tree.scale(delta, jnp.where(h > 0, 1 / jnp.where(h > 0, h, 1), 0))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QFedSGD(FedSGD):
    """q-FedSGD: FedSGD with gradients weighted by the q-th power of the clients' losses, for fairness.

    With q = 0, the algorithm is `FedSGD` with a learning rate of 1 / ``lipschitz``.

    Attributes:
      q: at least 0. With 0, clients have the same weights as in the algorithm without fairness. Larger values give more weight
        to clients with large losses.
      lipschitz: an estimate of the gradient's Lipschitz constant: 1 over the best learning rate for FedSGD.
      model, batches, server_optimizer, weighting: see `FedSGD`.

    Raises:
      ValueError: ``q`` is negative, ``lipschitz`` is not positive, or see `FedSGD`. Before the first round: the aggregator is
        `PartlyUniform`.

    >>> import fedsim
    >>> QFedSGD(model=fedsim.models.digits_logistic(), lipschitz=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected lipschitz > 0 and finite, got lipschitz=0.0.
    """

    capabilities = Capabilities(
        ordered=False, scalable=False, model_parts=True, refused_parts=FedSGD.capabilities.refused_parts
    )

    q: float = 1.0
    lipschitz: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "aggregator", AuxMean.wrap(self.aggregator))
        checks.number(least=0, q=self.q)
        checks.positive(lipschitz=self.lipschitz)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_weights_all_alike(self, _TWO_SUMS)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        result = super().client_update(shared, client)
        return result._replace(update=reweighted(result.update, result.info["loss"], self.q, self.lipschitz))

    def server_update(self, state: Any, update: WithAux, info: RoundInfo) -> Any:
        return super().server_update(state, fair_step(update), info)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QFedAvg(FedAvg):
    """q-FedAvg: FedAvg with updates weighted by the q-th power of the clients' losses, for fairness.

    L times a client's update is used in place of its gradient in `QFedSGD`.

    With q = 0, the algorithm is `FedAvg`. A client makes one more pass over its examples than in FedAvg, to compute its loss
    before training.

    Attributes:
      lipschitz: L. None takes 1 over the client's learning rate, as in the paper. The learning rate is measured as the mean
        length of the client optimizer's first step along a gradient of ones. For SGD this is exact, also if the rate changes
        from round to round. A client optimizer whose first step is always 0, as in a warm-up over steps, needs a number.
      q: see `QFedSGD`.
      model, batches, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    Raises:
      ValueError: ``q`` is negative, or ``lipschitz`` is not positive. Before the first round: the aggregator is
        `PartlyUniform`, or, without ``lipschitz``, the client optimizer needs the loss, or its first step of a round is 0 and a
        later one is not.

    >>> import numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = QFedAvg(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1),
    ...                     batches=fedsim.Batches(size=2), q=2.0)
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> np.allclose(info.clients["loss_before"], np.log(62))
    True
    """

    capabilities = Capabilities(scalable=False, model_parts=True, microbatches=True)
    preview = "the loss before training"

    q: float = 1.0
    lipschitz: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "aggregator", AuxMean.wrap(self.aggregator))
        checks.number(least=0, q=self.q)
        checks.positive(or_none=True, lipschitz=self.lipschitz)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        before = self.local_training(shared, client).mean_loss(client, shared.params)
        result = super().client_update(shared, client)
        lipschitz = self._lipschitz(shared, client)
        update = reweighted(tree.scale(result.update, lipschitz), before, self.q, lipschitz)
        return result._replace(update=update, info={**result.info, "loss_before": before})

    def server_update(self, state: Any, update: WithAux, info: RoundInfo) -> Any:
        return super().server_update(state, fair_step(update), info)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_weights_all_alike(self, _TWO_SUMS)
        if self.lipschitz is not None:
            return
        params = constants(self.model, 0, kept=True)
        for round in (0, 1):
            optimizer = optimizer_of_round(self.client_optimizer, jnp.int32(round))
            check_needs_no_loss("QFedAvg and lipschitz=None", optimizer, params)
            if waits(optimizer, params):
                raise ValueError(
                    "Expected a client_optimizer whose first step is not 0 with QFedAvg and lipschitz=None, which takes 1 over "
                    f"the length of this step, got one that moves later in round {round}, as with a warm-up or "
                    "optax.MultiSteps: set lipschitz to 1 over the learning rate."
                )

    def _lipschitz(self, shared: Any, client: Client) -> jax.Array | float:
        if self.lipschitz is not None:
            return self.lipschitz
        optimizer = optimizer_of_round(self.client_optimizer, shared.round)
        params = with_kept(shared.params, client.parts)
        ones, zeros = (jax.tree.map(lambda x, v=v: jnp.full_like(x, v), params) for v in (1, 0))
        steps = jax.tree.leaves(optimizer.update(ones, optimizer.init(zeros), zeros)[0])
        rate = -sum(jnp.sum(x, dtype=jnp.float32) for x in steps) / sum(x.size for x in steps)
        return jnp.where(rate == 0, 0.0, 1 / jnp.where(rate == 0, 1.0, rate))  # with rate 0, no client moves
