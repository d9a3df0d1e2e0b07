"""FLAME.

T. D. Nguyen, P. Rieger, H. Chen, H. Yalame, H. Möllering, H. Fereidooni, S. Marchal, M. Miettinen, A. Mirhoseini, S. Zeitouni,
F. Koushanfar, A.-R. Sadeghi, T. Schneider, "FLAME: taming backdoors in federated learning", USENIX Security 2022, algorithm 1:
https://arxiv.org/abs/2101.02281. ``noise`` is the paper's λ. Deviation: angles are those of updates, not of whole models, which
an aggregator does not see.

The paper's HDBSCAN has min_cluster_size = floor(n / 2) + 1, min_samples = 1 and allow_single_cluster. Three facts reduce it to
a computation on the device. With min_samples = 1, the distances that it works with are the given ones. No two disjoint sets of
clients have more than n / 2 members each, so there is only one cluster, the root. Its members are those clients that have not
left when it falls apart. So the cluster is the first connected set of more than n / 2 clients that appears when pairs of
clients are connected in the order of their distances (single linkage). Of several pairs with exactly the same distance, all are
connected at once; there, HDBSCAN depends on the order of the clients.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.aggregators._aggregator import Memory, Update
from fedsim.aggregators._clipped import check_floats
from fedsim.aggregators._rows import cosine_similarities, median_of_sorted, squared_norms, total, widen
from fedsim.aggregators._stack import StackAggregator, StackedUpdates


def majority(distances: jax.Array, exists: jax.Array) -> jax.Array:
    """Returns the first set of more than half of the clients that pairs connect, in the order of their distances.

    Args:
      distances: of all pairs of clients, ``float32 [slots, slots]``.
      exists: which clients there are, ``bool [slots]``.

    Returns:
      Which clients are in the set, ``bool [slots]``.

    >>> x = jnp.array([0.0, 1.0, 2.5, 9.0, 10.0])
    >>> majority(jnp.abs(x[:, None] - x[None, :]), jnp.ones(5, bool)).tolist()
    [True, True, True, False, False]
    """
    n, own = jnp.sum(exists), jnp.eye(len(exists), dtype=bool)
    pair = exists[:, None] & exists[None, :]
    direct = jnp.where(pair, jnp.where(own, 0, distances), jnp.inf)

    # The longest distance on the best path of two clients, by the algorithm of Floyd and Warshall.
    def through(k: jax.Array, best: jax.Array) -> jax.Array:
        return jnp.minimum(best, jnp.maximum(best[:, k][:, None], best[k][None, :]))

    connected = jax.lax.fori_loop(0, len(exists), through, direct)
    radius = jnp.where(exists, jnp.sort(connected, axis=1)[:, n // 2], jnp.inf)  # where a client is in a set of n // 2 + 1
    first = jnp.argmin(radius)
    return exists & (connected[first] <= radius[first])


@dataclasses.dataclass(frozen=True, eq=False)
class FLAME(StackAggregator):
    """The mean of the majority of updates with similar directions, clipped to the median norm, with noise.

    The majority is the cluster of more than half of the clients that HDBSCAN finds by the cosines of their updates. Norms are
    clipped to the median of all clients, and the aggregate gets Gaussian noise of standard deviation ``noise`` times that
    median in every coordinate. Clients count equally, whatever the algorithm's ``weighting``.

    Attributes:
      noise: λ, at least 0.

    Raises:
      ValueError: ``noise`` is negative. Before the first round: an update has leaves that are not floats.

    >>> flame = FLAME(noise=0.0)
    >>> accumulator = flame.zero(jnp.zeros(2), slots=3)
    >>> for slot, x in enumerate([[1.0, 0.0], [2.0, 0.1], [-9.0, 0.0]]):
    ...     accumulator = flame.accumulate(accumulator, jnp.array(x), jnp.float32(1), slot)
    >>> [round(x, 2) for x in flame.finish_round(accumulator, (), jax.random.key(0))[0].tolist()]
    [1.5, 0.05]
    """

    not_differentiable = "selects updates"

    noise: float = 0.001

    def __post_init__(self) -> None:
        checks.number(least=0, noise=self.noise)

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_floats("FLAME", update)

    def finish_round(self, accumulator: StackedUpdates, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        updates, weights = self.stacked(accumulator)
        exists = weights != 0
        chosen = majority(1 - cosine_similarities(updates), exists)
        norms = jnp.sqrt(squared_norms(updates))
        median = median_of_sorted(jnp.sort(jnp.where(exists, norms, jnp.inf)), jnp.sum(exists))
        scales = jnp.where(norms > median, median / jnp.where(norms > 0, norms, 1), 1)
        shares = jnp.where(chosen, scales, 0) / jnp.maximum(jnp.sum(chosen, dtype=jnp.float32), 1)
        clipped = jax.tree.map(lambda rows: total(widen(rows), shares), updates)
        return tree.add(clipped, tree.scale(rng.normal_like(rng.stream(key, "noise"), clipped), self.noise * median)), memory
