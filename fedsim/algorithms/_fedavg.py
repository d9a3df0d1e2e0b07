"""Federated averaging.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017 (Algorithm 1), generalized to any client and server optimizer by S. Reddi, Z. Charles,
M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, B. McMahan, "Adaptive federated optimization", ICLR 2021
(Algorithm 1, FedOpt): https://arxiv.org/abs/1602.05629, https://arxiv.org/abs/2003.00295.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, metrics, tree
from fedsim.algorithms._descent import must_descend
from fedsim.algorithms._gradient_server import GradientServer, Shared
from fedsim.data import Batch, FederatedData
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params

Schedule = Callable[[jax.Array], optax.GradientTransformation]
Loss = Callable[[Params], jax.Array]


class ClientState(NamedTuple):
    """Local parameters, the client optimizer's state, the sum of training losses over examples seen, what a subclass adds."""

    params: Params
    opt_state: optax.OptState
    loss: metrics.Mean
    more: Any = ()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedAvg(GradientServer):
    """FedAvg: clients train from the server's parameters, the server steps along the mean of their movements.

    Each client i takes its local steps with ``client_optimizer`` from x and sends x - x_i; the server treats the weighted
    mean as a gradient of ``server_optimizer``. With the default, SGD of rate 1, x becomes the weighted mean of the x_i.

    Attributes:
      client_optimizer: an optax transformation, made anew for every client and round; or, for a schedule over rounds, a
        function from the number of server updates so far, ``int32 []``, to one: ``lambda round: optax.sgd(0.1 * 0.99**round)``.
      model, server_optimizer, weighting: see `GradientServer`.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays(
    ...     {"x": np.zeros([6, 28, 28, 1], np.uint8), "y": np.zeros(6, np.int32)}, sizes=[4, 2])
    >>> algorithm = FedAvg(model=fedsim.models.emnist_logistic(), client_optimizer=optax.sgd(0.1),
    ...                    batches=fedsim.Batches(size=2))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> info.clients["num_steps"].tolist(), info.clients["weight"].tolist()
    ([2, 1], [4.0, 2.0])
    """

    client_optimizer: optax.GradientTransformation | Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.optimizer(or_schedule=True, client_optimizer=self.client_optimizer)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        # A schedule over rounds may start from 0, which its first optimizer alone would never leave.
        scheduled = not isinstance(self.client_optimizer, optax.GradientTransformation)
        must_descend(self.model, client_optimizer=self._client_optimizer(jnp.int32(0)), may_rest=scheduled)

    def objective(self, shared: Shared, params: Params, batch: Batch) -> jax.Array:
        """All that a step descends, for optimizers that ask for its value: of those whose `client_gradient` adds terms that
        are not linear in the parameters; those that are follow from the gradient."""
        return self.client_loss(shared, params, batch)

    def client_gradient(self, shared: Shared, state: ClientState, batch: Batch) -> tuple[jax.Array, Params]:
        """The loss to report of a batch, and the gradient for the client's optimizer: the hook of SCAFFOLD and its kin, which
        add to this one."""
        return tree.value_and_grad(lambda params: self.client_loss(shared, params, batch), state.params)

    def client_init(self, shared: Shared, client: Client) -> ClientState:
        return self.set_out(shared, shared.params)

    def set_out(self, shared: Shared, params: Params) -> ClientState:
        """A client's state before its first step from these parameters."""
        optimizer = self._client_optimizer(shared.round)
        return ClientState(params, optimizer.init(params), metrics.Mean(jnp.float32(0), jnp.float32(0)))

    def client_step(self, shared: Shared, state: ClientState, batch: Batch) -> ClientState:
        slope = self.client_gradient(shared, state, batch)
        objective = functools.partial(self.objective, shared, batch=batch)
        if type(self).client_gradient is FedAvg.client_gradient:
            return self.walk(shared, state, batch, slope, objective)
        # Who corrects the gradient by what is constant in a step descends this. Where nobody asks for it, it is left out.
        more = tree.subtract(slope[1], jax.grad(objective)(state.params))

        def corrected(params: Params) -> jax.Array:
            return objective(params).astype(jnp.float32) + tree.dot(more, tree.subtract(params, state.params))

        return self.walk(shared, state, batch, slope, corrected)

    def descend(self, shared: Shared, state: ClientState, batch: Batch, loss_fn: Loss) -> ClientState:
        """One step of the client optimizer down a loss: for those who train several models, or parts of one."""
        return self.walk(shared, state, batch, tree.value_and_grad(loss_fn, state.params), loss_fn)

    def walk(
        self, shared: Shared, state: ClientState, batch: Batch, slope: tuple[jax.Array, Params], loss_fn: Loss
    ) -> ClientState:
        """One step of the client optimizer along a gradient of ``loss_fn``; ``slope``: the loss to report, and the gradient,
        made by `tree.value_and_grad` if the step is to be in place."""
        loss, gradient = slope
        optimizer = optax.with_extra_args_support(self._client_optimizer(shared.round))
        # value, grad and value_fn are for those that ask for them (Polyak steps, line searches). The value is that of what is
        # descended, the loss what is reported; what nobody asks for, and what is computed already, a compiler leaves out.
        updates, opt_state = optimizer.update(
            gradient, state.opt_state, state.params, value=loss_fn(state.params), grad=gradient, value_fn=loss_fn
        )
        seen = jnp.sum(batch.mask, dtype=jnp.float32)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state, loss=state.loss.merge(metrics.Mean(loss * seen, seen)))

    def client_final(self, shared: Shared, state: ClientState, client: Client) -> ClientUpdate:
        return ClientUpdate(tree.subtract(shared.params, state.params), self.weight(client), {"loss": state.loss.result()})

    def _client_optimizer(self, round_number: jax.Array) -> optax.GradientTransformation:
        optimizer = self.client_optimizer
        return optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(round_number)
