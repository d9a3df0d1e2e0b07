"""Federated averaging.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017 (Algorithm 1): https://arxiv.org/abs/1602.05629. The generalization to any client and server
optimizer: S. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, B. McMahan, "Adaptive federated
optimization", ICLR 2021 (Algorithm 1, FedOpt): https://arxiv.org/abs/2003.00295.
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
from fedsim.algorithm import Capabilities
from fedsim.algorithms._descent import check_descent, needs_loss, warn_of_lost_gradients
from fedsim.algorithms._gradient_server import GradientServer
from fedsim.data import Batch, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate

Schedule = Callable[[jax.Array], optax.GradientTransformation]
Gradient = Callable[[Params, Batch], tuple[jax.Array, Params]]


class Local(NamedTuple):
    """A client's local parameters, the state of its optimizer, and its training loss over the examples so far."""

    params: Params
    opt_state: optax.OptState
    loss: metrics.MeanLoss


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedAvg(GradientServer):
    """FedAvg: clients train from the server's parameters, and the server takes a step along the mean of their updates.

    Each client i takes local steps with ``client_optimizer`` from the server's parameters x to x_i, and sends the update
    x - x_i. The weighted mean of the updates is the gradient for ``server_optimizer``. With the default, SGD with learning rate
    1, x becomes the weighted mean of the x_i.

    Attributes:
      client_optimizer: an optax transformation. Every client starts every round with a new optimizer state. For a schedule over
        rounds, use a function from the number of server updates so far, ``int32 []``, to a transformation: ``lambda round:
        optax.sgd(0.1 * 0.99**round)``. An optimizer that accumulates the gradients of several steps (`optax.MultiSteps`) loses
        those that it holds after a client's last step; a warning says so.
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

    capabilities = Capabilities(scalable=True)

    client_optimizer: optax.GradientTransformation | Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.optimizer(or_schedule=True, client_optimizer=self.client_optimizer)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        # A schedule over rounds may start with learning rate 0. The optimizer of the first round alone then never moves.
        scheduled = not isinstance(self.client_optimizer, optax.GradientTransformation)
        optimizer = self.optimizer_of(jnp.int32(0))
        check_descent(self.model, client_optimizer=optimizer, may_be_zero=scheduled, has_loss=True)
        num_steps = self.batches.num_steps(data.sizes[data.sizes > 0])
        warn_of_lost_gradients(self.model, num_steps, client_optimizer=optimizer)

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        return self.update_of(shared, client, self.train(shared, client))

    def update_of(self, shared: Any, client: Client, local: Local) -> ClientUpdate:
        """Returns what a client sends after its local steps."""
        movement = tree.subtract(shared.params, local.params)
        return ClientUpdate(movement, self.weight(client), {"loss": local.loss.result()})

    def train(self, shared: Any, client: Client) -> Local:
        """Runs a client's local steps."""
        gradient = self.gradient_of(shared, client)

        def step(local: Local, batch: Batch) -> Local:
            return self.step(shared, local, batch, gradient(local.params, batch))

        return client.for_each_batch(self.batches, step, self.start(shared, self.client_params(shared, client)))

    def local_params(self, shared: Any, client: Client) -> Params:
        """Returns a client's parameters after its local steps, for fine-tuning."""
        return self.train(shared, client).params

    def client_params(self, shared: Any, client: Client) -> Params:
        """Returns the parameters from which a client's local steps start."""
        return shared.params

    def gradient_of(self, shared: Any, client: Client) -> Gradient:
        """Returns the gradient of a client's local steps, as a function of parameters and batch.

        Override this method if the gradient depends on the client.
        """
        return functools.partial(self.client_gradient, shared)

    def client_gradient(self, shared: Any, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        """Returns the loss of a batch, which is reported, and the gradient for the client's optimizer.

        Override this method to add terms to the gradient.
        """
        return self.loss_and_gradient(shared, params, batch)

    def objective(self, shared: Any, params: Params, batch: Batch) -> jax.Array:
        """Returns the value that local steps minimize, for optimizers that need it.

        Terms that are linear in the parameters may be left out, because they follow from the gradient.
        """
        return self.client_loss(shared, params, batch)

    def start(self, shared: Any, params: Params) -> Local:
        """Returns the state before the first local step from these parameters."""
        return Local(params, self.optimizer_of(shared.round).init(params), metrics.MeanLoss.zero())

    def step(
        self, shared: Any, local: Local, batch: Batch, slope: tuple[jax.Array, Params],
        objective: Callable[[Params], jax.Array] | None = None,
    ) -> Local:  # fmt: skip
        """Takes one step of the client's optimizer.

        Args:
          shared: what the server sent.
          local: the state before the step.
          batch: the examples of the step.
          slope: the loss to report, and the gradient of the step.
          objective: the function that the step minimizes, for optimizers that need it; default `objective`.
        """
        (loss, gradient), optimizer, extra = slope, self.optimizer_of(shared.round), {}
        if needs_loss(optimizer, local.params):  # as Polyak steps and line searches do
            descended = _with_gradient(
                objective or functools.partial(self.objective, shared, batch=batch), gradient, local.params
            )
            extra = {"value": descended(local.params), "grad": gradient, "value_fn": descended}
        updates, opt_state = optimizer.update(gradient, local.opt_state, local.params, **extra)
        count = jnp.sum(batch.mask, dtype=jnp.float32)
        return Local(optax.apply_updates(local.params, updates), opt_state, local.loss.add(loss, count))

    def optimizer_of(self, round_number: jax.Array) -> optax.GradientTransformation:
        """Returns the clients' optimizer in a round."""
        optimizer = self.client_optimizer
        return optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(round_number)


def _with_gradient(objective: Callable[[Params], jax.Array], gradient: Params, at: Params) -> Callable[[Params], jax.Array]:
    """Returns ``objective`` plus the linear function with which its gradient at the parameters ``at`` is ``gradient``."""
    missing = tree.subtract(gradient, jax.grad(objective)(at))

    def descended(params: Params) -> jax.Array:
        return objective(params).astype(jnp.float32) + tree.dot(missing, tree.subtract(params, at))

    return descended
