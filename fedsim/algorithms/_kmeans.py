"""Federated k-means.

S. P. Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory 28, 1982:
https://doi.org/10.1109/TIT.1982.1056489, initialized as in k-means++ (see `Clusters`). One round is one Lloyd iteration over
the examples of the cohort. Clients assign their examples to clusters, and send sums and counts. If all clients participate in
every round, the result is the same as on a single machine with all the data. There are no deviations. A cluster without
examples keeps its mean, which Lloyd does not specify.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim.algorithms._clusters import Clusters
from fedsim.algorithms._seeding import squared_distances


class KMeansState(NamedTuple):
    """The means of the clusters, ``[clusters, features]``, and how many of them have been initialized, ``int32 []``."""

    means: jax.Array
    num_started: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class KMeans(Clusters):
    """k-means clustering of the examples of all clients, with one Lloyd iteration per round.

    Unless ``start`` is set, the first ``num_clusters`` rounds choose the initial means. Each later round moves every mean to
    the mean of the examples that are assigned to it. `evaluate` returns the ``cost``: the mean squared distance to the nearest
    mean.

    Attributes:
      num_features, num_clusters, start: see `Clusters`.
      feature, batches: see `Statistics`.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([[0.0], [1.0], [10.0], [12.0]], np.float32)}, sizes=[3, 1])
    >>> algorithm = KMeans(num_features=1, num_clusters=2, start=[[0.0], [9.0]])
    >>> state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> state.means.tolist(), algorithm.evaluate(state, data).overall
    ([[0.5], [11.0]], {'cost': 0.625})
    """

    not_differentiable = "assigns each example to the nearest mean"

    def init(self, key: jax.Array) -> KMeansState:
        return KMeansState(*self.points())

    def no_moments(self) -> Any:
        return jnp.zeros((self.num_clusters, self.num_features), jnp.float32), jnp.zeros(self.num_clusters, jnp.float32)

    def moments(self, shared: KMeansState, x: jax.Array, mask: jax.Array) -> Any:
        # Sums of differences from the old means are more precise than sums of examples if the examples are far from zero.
        nearest = jnp.argmin(squared_distances(x, shared.means), axis=1)
        sums, counts = self.no_moments()
        moved = jnp.where(mask[:, None], x - shared.means[nearest], 0.0)
        return sums.at[nearest].add(moved), counts.at[nearest].add(mask.astype(jnp.float32))

    def maximize(self, state: KMeansState, moments: Any) -> KMeansState:
        sums, counts = moments
        # A client that reads an example more often than others counts it in part, so counts may be below 1.
        return state._replace(means=state.means + sums / jnp.where(counts > 0, counts, 1)[:, None])

    def scores(self, shared: KMeansState, x: jax.Array) -> dict[str, jax.Array]:
        return {"cost": jnp.min(squared_distances(x, shared.means), axis=1)}
