"""Personalized federated averaging (Per-FedAvg).

A. Fallah, A. Mokhtari, A. Ozdaglar, "Personalized federated learning: a meta-learning approach", NeurIPS 2020, Algorithm 1 with
the two approximations of its experiments: https://arxiv.org/abs/2002.07948. In a client's step from w, on batches D, D', D''::

    w' = w - alpha ∇f(w; D)
    w  = w - β (g - alpha H),                 g = ∇f(w'; D'),   H ≈ ∇²f(w; D'') g
    H  = 0                                                                        first order (FO)
    H  = (∇f(w + delta g; D'') - ∇f(w - delta g; D'')) / (2 delta)                Hessian-free (HF)

β is the client optimizer's rate. Deviations: D, D' and D'' are a step's batch dealt out in turn, so they are drawn without
replacement; clients are weighted by ``weighting`` (the paper averages uniformly). The loss reported is f(w'; D'), the mean over
a client's batches by their sizes, all parts counted: a batch of one example, whose D' is empty, adds a loss of 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedsim import checks, tree
from fedsim.algorithms._fedavg import ClientState, FedAvg
from fedsim.algorithms._gradient_server import Shared
from fedsim.algorithms._part_of import LocalTraining
from fedsim.data import Batch, Batches, FederatedData
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PerFedAvg(FedAvg):
    """FedAvg of a start from which one gradient step on a client's own examples does best: min mean F_i(w - alpha ∇F_i(w)).

    Give ``batches`` a size of two (first order) or three (Hessian-free) times that of a gradient's batch: a client whose batch
    holds one example stays where it is. `fedsim.evaluate_personalized` evaluates every client after that one step.

    Attributes:
      alpha: at least 0, the rate of that step. The paper takes 0.001 to 0.1 or so.
      variant: ``"first_order"``, of two gradients a step; ``"hessian_free"``, of four on three thirds of a batch.
      delta: above 0, of the Hessian-free variant: small, and far above the precision of floats.

    >>> import optax, fedsim
    >>> algorithm = PerFedAvg(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=Batches(size=20))
    >>> algorithm.fine_tune.batches.num_steps(100)
    1
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
                f"Expected batches of at least {self._parts} examples, which {self.variant} deals out, got batches of "
                f"{self.batches.size}."
            )

    @functools.cached_property
    def fine_tune(self) -> FedAvg:
        """The one step by which a client makes the server's parameters its own, on a batch of ``batches.size`` examples."""
        batches = Batches(size=self.batches.size, max_steps=1, shuffle=self.batches.shuffle)
        return LocalTraining(
            whole=self, model=self.model, batches=batches, client_optimizer=optax.sgd(self.alpha), execution=self.execution
        )

    def client_gradient(self, shared: Shared, state: ClientState, batch: Batch) -> tuple[jax.Array, Params]:
        def slope(params: Params, part: int) -> tuple[jax.Array, Params]:
            return tree.value_and_grad(lambda params: self.client_loss(shared, params, parts[part]), params)

        def moved(by: jax.Array | float, along: Params) -> Params:
            return tree.add(state.params, tree.scale(along, by))

        parts = deal(batch, self._parts)
        loss, gradient = slope(moved(-self.alpha, slope(state.params, 0)[1]), 1)
        if self.variant == "first_order":
            return loss, gradient
        ahead, behind = (slope(moved(delta, gradient), 2)[1] for delta in (self.delta, -self.delta))
        return loss, tree.add(gradient, tree.scale(tree.subtract(ahead, behind), -self.alpha / (2 * self.delta)))


def deal(batch: Batch, parts: int) -> list[Batch]:
    """A batch's examples dealt out in turn, so that of a partial one all get some; those left over are padding.

    >>> batch = Batch({"x": jnp.arange(5)}, jnp.array([True, True, True, True, False]), jax.random.key(0), 0)
    >>> [part.examples["x"][part.mask].tolist() for part in deal(batch, 2)]
    [[0, 2], [1, 3]]
    """
    size = -(-len(batch.mask) // parts)
    row = jnp.arange(size) * parts

    def part(i: int) -> Batch:
        at = jnp.minimum(row + i, len(batch.mask) - 1)
        mask = batch.mask[at] & (row + i < len(batch.mask))
        return Batch(jax.tree.map(lambda x: x[at], batch.examples), mask, jax.random.fold_in(batch.key, i), batch.step)

    return [part(i) for i in range(parts)]
