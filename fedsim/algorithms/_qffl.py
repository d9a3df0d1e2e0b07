"""Fair resource allocation: q-FedAvg and q-FedSGD.

T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair resource allocation in federated learning", ICLR 2020 (Algorithm 1, q-FedSGD, and
Algorithm 2, q-FedAvg): https://arxiv.org/abs/1905.10497. The paper's q is ``q``, its L is ``lipschitz``, its F_k(w) is the
client's mean loss over all its examples at what the server sent (``loss_before`` in the info of q-FedAvg).

Deviations: the paper samples client k with probability p_k and sums uniformly; with ``weighting="examples"`` and uniform
sampling, the default, the sums are weighted by p_k instead, which has the same expectation (for the paper's way take a
`fedsim.samplers.WeightedSampler` and ``weighting="uniform"``). Losses below 1e-10 count as 1e-10, where F^(q-1) would be
infinite. F_k is the loss of training: with dropout it is random. What the sums give may pass through any
``server_optimizer``; the paper's is SGD of rate 1, the default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators import Beside, Noted
from fedsim.algorithms._fedavg import ClientState
from fedsim.algorithms._fedsgd import FedSGD
from fedsim.algorithms._gradient_server import GradientServer, ServerState, Shared
from fedsim.algorithms._loss_before import LossBefore
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params

_SMALLEST_LOSS = 1e-10


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FairServer(GradientServer):
    """What both have in common: the objective Σ p_k F_k^(q+1) / (q+1), and a step whose size needs no tuning for each q.

    Attributes:
      q: at least 0; with 0 all clients weigh as in the unfair algorithm, and the larger, the more do those of large losses.

    >>> import fedsim
    >>> FairServer(model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=20), q=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected q >= 0 and finite, got q=-1.0.
    """

    q: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "aggregator", Beside.around(self.aggregator))
        checks.number(least=0, q=self.q)

    def reweighted(self, gradient: Params, loss: jax.Array, lipschitz: jax.Array | float) -> Noted:
        """Δ_k = F_k^q ∇_k and, beside it, h_k = q F_k^(q-1) |∇_k|² + L F_k^q: for a gradient, or what stands for one."""
        loss = jnp.maximum(loss, _SMALLEST_LOSS)
        delta = tree.scale(gradient, loss**self.q)
        return Noted(delta, self.q * loss ** (self.q - 1) * tree.squared_norm(gradient) + lipschitz * loss**self.q)

    def server_update(self, state: ServerState, update: Noted) -> ServerState:
        """The step is along ΣΔ_k / Σh_k; where nobody could move there is none."""
        delta, h = update
        return super().server_update(state, tree.scale(delta, jnp.where(h > 0, 1 / jnp.where(h > 0, h, 1), 0)))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QFedSGD(FedSGD, FairServer):
    """q-FedSGD: clients send their gradients and losses, reweighted by how large the losses are.

    With q = 0 this is `FedSGD` with a learning rate of 1 / ``lipschitz``.

    Attributes:
      lipschitz: estimate of the gradient's Lipschitz constant: 1 over the learning rate that is best for FedSGD.
      q: see `FairServer`.
      model, batches, server_optimizer, weighting: see `FedSGD`.

    >>> import fedsim
    >>> QFedSGD(model=fedsim.models.digits_logistic(), lipschitz=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected lipschitz > 0 and finite, got lipschitz=0.0.
    """

    lipschitz: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(lipschitz=self.lipschitz)

    def client_final(self, shared: Shared, state: Any, client: Client) -> ClientUpdate:
        result = super().client_final(shared, state, client)
        update = self.reweighted(result.update, result.info["loss"], self.lipschitz)
        return result._replace(update=update)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class QFedAvg(LossBefore, FairServer):
    """q-FedAvg: clients train as in FedAvg; L times their movement stands for the gradient.

    With q = 0 this is `FedAvg`. A client reads its examples once more than in FedAvg, for its loss before training.

    Attributes:
      lipschitz: L; None: 1 over the client's learning rate, as in the paper. The rate is the mean length of the client
        optimizer's first step along a gradient of ones: that of SGD exactly, also if it changes from round to round.
      q: see `FairServer`.
      model, batches, client_optimizer, server_optimizer, weighting: see `FedAvg`.

    >>> import numpy as np, optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = QFedAvg(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1),
    ...                     batches=fedsim.Batches(size=2), q=2.0)
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> np.allclose(info.clients["loss_before"], np.log(62))
    True
    """

    lipschitz: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(or_none=True, lipschitz=self.lipschitz)

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        result = super().client_final(shared, state, client)
        lipschitz, before = self._lipschitz(shared), self.loss_before(state)
        update = self.reweighted(tree.scale(result.update, lipschitz), before, lipschitz)
        return result._replace(update=update, info={**result.info, "loss_before": before})

    def _lipschitz(self, shared: Shared) -> jax.Array | float:
        if self.lipschitz is not None:
            return self.lipschitz
        optimizer = self._client_optimizer(shared.round)
        ones, zeros = (jax.tree.map(lambda x, v=v: jnp.full_like(x, v), shared.params) for v in (1, 0))
        steps = jax.tree.leaves(optimizer.update(ones, optimizer.init(zeros), zeros)[0])
        rate = -sum(jnp.sum(x, dtype=jnp.float32) for x in steps) / sum(x.size for x in steps)
        return jnp.where(rate == 0, 0.0, 1 / jnp.where(rate == 0, 1.0, rate))  # a round of rate 0 moves nobody
