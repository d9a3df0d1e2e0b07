"""Personalized federated averaging (Per-FedAvg).

A. Fallah, A. Mokhtari, A. Ozdaglar, "Personalized federated learning: a meta-learning approach", NeurIPS 2020, Algorithm 1 with
the two approximations of its experiments: https://arxiv.org/abs/2002.07948. A client's step from w, on batches D, D', D'',
computes::

    w' = w - alpha ∇f(w; D)
    w  = w - β (g - alpha H),                 g = ∇f(w'; D'),   H ≈ ∇²f(w; D'') g
    H  = 0                                                                        first order (FO)
    H  = (∇f(w + delta g; D'') - ∇f(w - delta g; D'')) / (2 delta)                Hessian-free (HF)

β is the learning rate of the client optimizer. Deviations: D, D' and D'' are disjoint parts of the step's batch, so they are
drawn without replacement. Clients are weighted by ``weighting`` (the paper averages uniformly). The reported loss is f(w'; D'),
averaged over a client's batches, which are weighted by their sizes including all parts. A batch of one example has an empty D'
and adds a loss of 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from fedsim import checks, tree
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import LocalTraining, divided, with_kept
from fedsim.data import Batch, FederatedData
from fedsim.model import Params
from fedsim.rounds import Client


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PerFedAvg(FedAvg):
    """Learns parameters that fit each client well after one local gradient step: min mean F_i(w - alpha ∇F_i(w)).

    Set the size of ``batches`` to two times (first order) or three times (Hessian-free) the batch size of a gradient. A client
    whose batch holds one example does not move. `fedsim.evaluate_personalized` evaluates every client after that one step.

    Attributes:
      alpha: the learning rate of that step, at least 0. The paper uses about 0.001 to 0.1.
      variant: ``"first_order"`` computes two gradients per step. ``"hessian_free"`` computes four, on three thirds of a batch.
      delta: the difference step of the Hessian-free variant, above 0. It must be small, but far above the precision of floats.

    Raises:
      ValueError: ``alpha`` is negative, ``delta`` is not positive, ``variant`` is another text, or see `FedAvg`.

    >>> import optax, fedsim
    >>> PerFedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20), alpha=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected alpha >= 0 and finite, got alpha=-1.0.
    """

    alpha: float = 0.01
    variant: Literal["first_order", "hessian_free"] = "first_order"
    delta: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("first_order", "hessian_free", variant=self.variant)
        checks.positive(delta=self.delta)
        checks.number(least=0, alpha=self.alpha)

    @property
    def _parts(self) -> int:
        return 2 if self.variant == "first_order" else 3

    def check(self, data: FederatedData) -> None:
        super().check(data)
        if self.batches.size < self._parts:
            raise ValueError(
                f"Expected batches of at least {self._parts} examples, because variant={self.variant!r} splits each batch into "
                f"{self._parts}, got batches of {self.batches.size}."
            )

    def personal_params(self, shared: Any, client: Client) -> Params:
        """Returns the server's parameters, and those that the client keeps, after one step of rate ``alpha`` on a batch of
        ``batches.size`` of its examples.
        """
        once = dataclasses.replace(self.batches, epochs=1, steps=None, max_steps=1, microbatch=None)
        training = super().local_training(shared, client)

        def step(params: Params, batch: Batch) -> Params:
            _, gradient = training.loss_and_gradient(params, batch)
            return tree.subtract(params, tree.scale(gradient, self.alpha))

        return client.for_each_batch(once, step, with_kept(shared.params, client.parts))

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        training = super().local_training(shared, client)

        def gradient(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
            def slope(params: Params, part: int) -> tuple[jax.Array, Params]:
                return training.loss_and_gradient(params, parts[part])

            def moved(by: jax.Array | float, along: Params) -> Params:
                return tree.add(params, tree.scale(along, by))

            split = divided(batch, self._parts)
            parts = [jax.tree.map(lambda x, i=i: x[i], split) for i in range(self._parts)]
            loss, gradient = slope(moved(-self.alpha, slope(params, 0)[1]), 1)
            if self.variant == "first_order":
                return loss, gradient
            ahead, behind = (slope(moved(delta, gradient), 2)[1] for delta in (self.delta, -self.delta))
            return loss, tree.add(gradient, tree.scale(tree.subtract(ahead, behind), -self.alpha / (2 * self.delta)))

        return dataclasses.replace(training, gradient=gradient)
