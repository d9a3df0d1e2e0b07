"""FoolsGold.

C. Fung, C. J. M. Yoon, I. Beschastnikh, "The limitations of federated learning in sybil settings", RAID 2020, algorithm 1:
https://arxiv.org/abs/1808.04866. ``confidence`` is the paper's κ. Deviations: all parameters count equally in similarities (the
paper's optional importance S of the features is 1). The aggregate is the mean with weights α_i times the clients' weights; in
the paper it is the sum of α_i times the update. A similarity below 0 counts as 0, as in the authors' implementation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.aggregators._aggregator import Memory, Sent, Update, accumulation_dtype
from fedsim.aggregators._clipped import check_floats
from fedsim.aggregators._rows import cosine_similarities, mean, widen
from fedsim.aggregators._stack import StackAggregator


class WithHistory(NamedTuple):
    """An update, and the sum of this and of all earlier updates of the client, which the server knows.

    >>> WithHistory(jnp.ones(2), history=jnp.full(2, 7.0)).history.tolist()
    [7.0, 7.0]
    """

    update: Update
    history: Any


@dataclasses.dataclass(frozen=True, eq=False)
class FoolsGold(StackAggregator):
    """The mean in which clients count less, the more similar the sum of their updates is to that of another client.

    Many attackers with one goal send similar updates in the long run; honest clients differ, as their data do. The number of
    attackers need not be known, but honest clients with equal data count as little as attackers. There is no defense against a
    single attacker.

    The sums of the clients' updates over all of their rounds are stored with the clients' memory, though in a real system the
    server would keep them. For each pair, the cosine of their sums is reduced if the other client is the more suspicious one.
    A client's weight is multiplied by α = confidence * (ln(a / (1 - a)) + 1/2), clipped to [0, 1], where a is 1 minus its
    largest similarity, divided by the largest such number of the round. If no client differs from all others, nobody counts.

    Attributes:
      confidence: κ, positive. A larger number separates clients more strictly.

    Raises:
      ValueError: ``confidence`` is not positive and finite. Before the first round: an update has leaves that are not floats;
        the attackers collude, as they have no history; or clients keep what they compute from the received update, as in
        SCAFFOLD.

    >>> updates = jnp.array([[1.0, 0.0], [0.0, 1.0], [-3.0, -2.9], [-3.0, -3.0]])
    >>> history = jnp.array([[1.0, 0.1], [0.0, 1.0], [-3.0, -2.9], [-3.0, -3.0]])
    >>> FoolsGold().combine(WithHistory(updates, history), jnp.ones(4)).tolist()
    [0.5, 0.5]
    """

    confidence: float = 1.0

    def __post_init__(self) -> None:
        checks.positive(confidence=self.confidence)

    def check(self, update: WithHistory, slots: int) -> None:
        super().check(update, slots)
        check_floats("FoolsGold", update)

    def client_memory(self, update: Update) -> Memory:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), update)

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        sent = super().send(update, server_memory, memory, key)
        history = jax.tree.map(lambda sum, x: sum + x.astype(sum.dtype), memory, update)
        return sent._replace(update=WithHistory(update, history), memory=history)

    def combine(self, updates: WithHistory, weights: jax.Array) -> Update:
        exists = weights != 0
        others = exists[:, None] & exists[None, :] & ~jnp.eye(len(weights), dtype=bool)
        similarity = jnp.where(others, jnp.maximum(cosine_similarities(updates.history), 0), 0)
        most = jnp.max(similarity, axis=1)
        # A client is pardoned for its similarity to one that is more similar to somebody else.
        ratio = jnp.minimum(most[:, None] / jnp.where(most > 0, most, 1)[None, :], 1)
        distinct = jnp.where(exists, jnp.clip(1 - jnp.max(similarity * ratio, axis=1), 0, 1), 0)
        largest = jnp.max(distinct)
        # Not 0 or 1, where the logarithm and its derivative are infinite.
        share = jnp.clip(distinct / jnp.where(largest > 0, largest, 1), 1e-6, 1 - 1e-6)
        alpha = jnp.clip(self.confidence * (jnp.log(share / (1 - share)) + 0.5), 0, 1)
        counted = jnp.where(largest > 0, alpha * weights, 0)
        return jax.tree.map(lambda rows: mean(widen(rows), counted), updates.update)
