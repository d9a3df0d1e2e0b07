"""Federated expectation maximization for mixtures of Gaussians.

A. P. Dempster, N. M. Laird, D. B. Rubin, "Maximum likelihood from incomplete data via the EM algorithm", Journal of the Royal
Statistical Society B 39, 1977: https://doi.org/10.1111/j.2517-6161.1977.tb01600.x. One round is one iteration over the examples
of the cohort: clients compute responsibilities and send their moments of order 0, 1 and 2; the server maximizes. With everybody
in every round it is what a single machine with all the data computes, and the likelihood never falls.

Deviations: ``regularization`` is added to the variances, as everybody does (0 leaves it out); a component that nothing is
attributed to keeps its mean and covariance.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.algorithms._clusters import Clusters

_einsum = functools.partial(jnp.einsum, precision="highest")


class MixtureState(NamedTuple):
    """Weights ``[k]``, means ``[k, features]``, covariances ``[k, features]`` or ``[k, features, features]``, and how many
    means have been started, ``int32 []``."""

    weights: jax.Array
    means: jax.Array
    covariances: jax.Array
    num_started: jax.Array


class MixtureShared(NamedTuple):
    """What clients get: instead of covariances, ``factors`` that whiten: (x - mean) factor' has the identity for covariance."""

    weights: jax.Array
    means: jax.Array
    factors: jax.Array
    num_started: jax.Array


class Moments(NamedTuple):
    """Sums over examples of responsibilities ``[k]``, and of these times the difference from the old mean, and its square."""

    counts: jax.Array
    first: jax.Array
    second: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GaussianMixture(Clusters):
    """EM: the first ``num_clusters`` rounds draw starting points for the means, each later one is an iteration of EM.

    `evaluate` gives the ``log_likelihood``, its mean over examples.

    Attributes:
      covariance: ``"diagonal"`` or ``"full"``.
      regularization: at least 0, added to every variance: above 0, no component can shrink onto a point.
      start_variance: of every component before the first iteration, in all directions.
      num_features, num_clusters, start: see `Clusters`; a cluster is a component.
      feature, batches: see `Statistics`.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([[0.0], [2.0], [99.0], [101.0]], np.float32)}, sizes=[3, 1])
    >>> algorithm = GaussianMixture(num_features=1, num_clusters=2, start=[[0.0], [99.0]], regularization=0.0)
    >>> state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
    >>> state.weights.tolist(), state.means.tolist(), state.covariances.tolist()
    ([0.5, 0.5], [[1.0], [100.0]], [[1.0], [1.0]])
    """

    covariance: Literal["diagonal", "full"] = "diagonal"
    regularization: float = 1e-6
    start_variance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.one_of("diagonal", "full", covariance=self.covariance)
        checks.number(least=0, regularization=self.regularization)
        checks.positive(start_variance=self.start_variance)

    def init(self, key: jax.Array) -> MixtureState:
        means, num_started = self.points()
        weights = jnp.full(self.num_clusters, 1 / self.num_clusters, jnp.float32)
        return MixtureState(weights, means, self.start_variance * self._ones(), num_started)

    def broadcast(self, state: MixtureState) -> MixtureShared:
        if self.covariance == "diagonal":
            factors = jax.lax.rsqrt(state.covariances)
        else:
            lower = jnp.linalg.cholesky(state.covariances)
            factors = jax.scipy.linalg.solve_triangular(lower, jnp.broadcast_to(self._ones()[:1], lower.shape), lower=True)
        return MixtureShared(state.weights, state.means, factors, state.num_started)

    def no_moments(self) -> Moments:
        k, features = self.num_clusters, self.num_features
        return Moments(jnp.zeros(k, jnp.float32), jnp.zeros((k, features), jnp.float32), jnp.zeros_like(self._ones()))

    def moments(self, shared: MixtureShared, x: jax.Array, mask: jax.Array) -> Moments:
        joint, apart = self._log_joint(shared, x)
        shares = jnp.where(mask[:, None], jax.nn.softmax(joint, axis=1), 0.0)
        square = "nk,nki,nki->ki" if self.covariance == "diagonal" else "nk,nki,nkj->kij"
        return Moments(jnp.sum(shares, axis=0), _einsum("nk,nki->ki", shares, apart), _einsum(square, shares, apart, apart))

    def maximize(self, state: MixtureState, moments: Moments) -> MixtureState:
        some = moments.counts > 0
        counts = jnp.where(some, moments.counts, 1.0)
        shift = moments.first / counts[:, None]
        if self.covariance == "diagonal":
            covariances = moments.second / counts[:, None] - jnp.square(shift)
        else:
            covariances = moments.second / counts[:, None, None] - shift[:, :, None] * shift[:, None, :]
        covariances += self.regularization * self._ones()
        some = some.reshape(-1, *[1] * (covariances.ndim - 1))
        covariances = jnp.where(some, covariances, state.covariances)
        return MixtureState(moments.counts / jnp.sum(moments.counts), state.means + shift, covariances, state.num_started)

    def scores(self, shared: MixtureShared, x: jax.Array) -> dict[str, jax.Array]:
        return {"log_likelihood": jax.nn.logsumexp(self._log_joint(shared, x)[0], axis=1)}

    def _ones(self) -> jax.Array:
        """Unit covariances."""
        k, features = self.num_clusters, self.num_features
        one = jnp.ones(features, jnp.float32) if self.covariance == "diagonal" else jnp.eye(features, dtype=jnp.float32)
        return jnp.broadcast_to(one, (k, *one.shape))

    def _log_joint(self, shared: MixtureShared, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logarithm of each component's weight times density at each example ``[n, k]``, and differences from its mean."""
        apart = x[:, None, :] - shared.means[None]
        if self.covariance == "diagonal":
            scales, white = shared.factors, apart * shared.factors[None]
        else:
            scales = jnp.diagonal(shared.factors, axis1=1, axis2=2)
            white = _einsum("nki,kji->nkj", apart, shared.factors)
        constant = jnp.log(shared.weights) + jnp.sum(jnp.log(scales), axis=1) - self.num_features / 2 * math.log(2 * math.pi)
        return constant[None] - jnp.sum(jnp.square(white), axis=2) / 2, apart
