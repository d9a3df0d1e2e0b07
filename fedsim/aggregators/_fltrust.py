"""FLTrust.

X. Cao, M. Fang, J. Liu, N. Z. Gong, "FLTrust: Byzantine-robust federated learning via trust bootstrapping", NDSS 2021,
equations 2 to 4: https://arxiv.org/abs/2012.13995. ``reference`` is the paper's server model update g_0. There are no
deviations; how the server trains on its root dataset is up to the algorithm that computes g_0.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators._aggregator import Mean, Update, WeightedTotal
from fedsim.aggregators._clipped import check_floats


@dataclasses.dataclass(frozen=True, eq=False)
class FLTrust(Mean):
    """The mean of updates, scaled to the norm of the server's own update, with the cosine to it as weight if it is positive.

    The server trains on a few examples of its own in every round, so an algorithm makes the aggregator in its round. Clients
    count by these weights alone, whatever the algorithm's ``weighting``. If no cosine is positive, the aggregate is 0. Memory
    does not grow with the cohort.

    Attributes:
      reference: g_0, the update that the server sends itself, of the form of a client's update.

    Raises:
      ValueError: before the first round, if ``reference`` has another form than an update, or an update has leaves that are not
        floats.

    >>> import fedsim, optax
    >>> data, model = fedsim.datasets.load("digits", clients=5), fedsim.models.digits_logistic()
    >>> root = fedsim.Batch({k: jnp.asarray(x[:50]) for k, x in data.test.columns.items()}, jnp.ones(50, bool), None, 0)
    >>> class Trusting(fedsim.algorithms.FedAvg):
    ...     def round(self, state, clients):
    ...         shared = self.broadcast(state)
    ...         own = tree.scale(jax.grad(self.model.train_loss)(shared.params, root), 0.1)  # a step of the server
    ...         update, info = clients.aggregate(self.client_update, shared, aggregator=FLTrust(own))
    ...         return self.server_update(state, update, info), info
    >>> trusting = Trusting(model=model, client_optimizer=optax.sgd(0.05), batches=fedsim.Batches(size=10))
    >>> cohort = fedsim.Cohort.of(data.train, data.train.client_ids[:3])
    >>> state, _ = trusting.apply(trusting.init(jax.random.key(0)), cohort)
    >>> int(state.round)
    1
    """

    reference: Update

    @property
    def is_scalable(self) -> bool:
        return False  # Updates get the norm of the reference, so a scale would have no effect.

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_floats("FLTrust", update)
        got, expected = (
            f"{jax.tree.structure(form)} {[jnp.shape(x) for x in jax.tree.leaves(form)]}" for form in (self.reference, update)
        )
        if got != expected:
            raise ValueError(
                f"Expected a reference of the form of an update, {expected}, got {got}: give the server's own update."
            )

    def accumulate(self, accumulator: WeightedTotal, update: Update, weight: jax.Array, slot: jax.Array) -> WeightedTotal:
        squares = tree.squared_norm(update), tree.squared_norm(self.reference)
        norm, norm_of_server = (jnp.sqrt(jnp.where(square > 0, square, 1)) for square in squares)
        exists = (weight != 0) & (squares[0] > 0) & (squares[1] > 0)
        trust = jnp.where(exists, jnp.maximum(tree.dot(update, self.reference) / norm / norm_of_server, 0), 0)
        return super().accumulate(accumulator, tree.scale(update, norm_of_server / norm), trust, slot)
