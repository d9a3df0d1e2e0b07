"""Federated expectation maximization for mixtures of Gaussians.

A. P. Dempster, N. M. Laird, D. B. Rubin, "Maximum likelihood from incomplete data via the EM algorithm", Journal of the Royal
Statistical Society B 39, 1977: https://doi.org/10.1111/j.2517-6161.1977.tb01600.x. One round is one iteration over the examples
of the cohort. Clients compute responsibilities and send moments of order 0, 1 and 2. The server takes the maximization step. If
all clients participate in every round, the result is the same as on a single machine with all the data, and the likelihood
never decreases.

Deviations: ``regularization`` is added to the variances, which is common practice (0 disables it). A component without
responsibility for any example keeps its mean and covariance. Covariances are computed as E[d d'] - E[d] E[d]', where d is the
difference from the old mean. If the old mean is far away (an initial point that is hundreds of standard deviations off), this
has large rounding errors. So no variance is below the precision of E[d]², and a full covariance is reduced to its diagonal if
one of its variances is less than a hundred times this precision, or if it is not positive definite. The covariance of the next
round is accurate again, because the mean is then close.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithms._clusters import Clusters
from fedsim.algorithms._covariances import Diagonal, Full
from fedsim.metrics import Better

_FORMS = {"diagonal": Diagonal(), "full": Full()}


class MixtureState(NamedTuple):
    """The state of the server.

    Attributes:
      weights: ``[k]``.
      means: ``[k, features]``.
      covariances: ``[k, features]`` or ``[k, features, features]``.
      num_started: how many means have been initialized, ``int32 []``.
    """

    weights: jax.Array
    means: jax.Array
    covariances: jax.Array
    num_started: jax.Array


class MixtureShared(NamedTuple):
    """What clients receive. ``factors`` replace the covariances: (x - mean) factor' has the identity as its covariance."""

    weights: jax.Array
    means: jax.Array
    factors: jax.Array
    num_started: jax.Array


class Moments(NamedTuple):
    """Sums over examples.

    Attributes:
      counts: of the responsibilities, ``[k]``.
      first: of the responsibilities times the difference from the old mean, ``[k, features]``.
      second: of the responsibilities times the square of this difference, in the shape of the covariances.
    """

    counts: jax.Array
    first: jax.Array
    second: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GaussianMixture(Clusters):
    """Fits a mixture of Gaussians by expectation maximization (EM), with one iteration per round.

    Unless ``start`` is set, the first ``num_clusters`` rounds choose the initial means.

    `evaluate` returns the ``log_likelihood``, its mean over examples.

    Attributes:
      covariance: ``"diagonal"`` or ``"full"``.
      regularization: at least 0, added to every variance. Above 0, no component can collapse onto a point. Use a larger value
        for a full covariance of features that depend on each other.
      start_variance: the variance of every component before the first iteration, in all directions.
      num_features, num_clusters, start: see `Clusters`. A cluster is a component.
      feature, batches: see `Statistics`.

    Raises:
      ValueError: ``regularization`` is negative, ``start_variance`` is not positive, or see `Clusters`.

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

    better: ClassVar[Better] = "higher"

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
        return MixtureShared(state.weights, state.means, self._form.factors(state.covariances), state.num_started)

    def no_moments(self) -> Moments:
        k, features = self.num_clusters, self.num_features
        return Moments(jnp.zeros(k, jnp.float32), jnp.zeros((k, features), jnp.float32), jnp.zeros_like(self._ones()))

    def moments(self, shared: MixtureShared, x: jax.Array, mask: jax.Array) -> Moments:
        joint, apart = self._log_joint(shared, x)
        shares = jnp.where(mask[:, None], jax.nn.softmax(joint, axis=1), 0.0)
        first = jnp.einsum("nk,nki->ki", shares, apart, precision="highest")
        return Moments(jnp.sum(shares, axis=0), first, self._form.weighted_squares(apart, shares))

    def maximize(self, state: MixtureState, moments: Moments) -> MixtureState:
        counts = jnp.where(moments.counts > 0, moments.counts, 1.0)
        shift = moments.first / counts[:, None]
        squares = self._form.weighted_squares(shift[None], jnp.ones((1, self.num_clusters), jnp.float32))
        some, of_each = (tree.per_row(x, squares) for x in (moments.counts > 0, counts))
        covariances = moments.second / of_each - squares + self.regularization * self._ones()
        errors = jnp.finfo(jnp.float32).eps * jnp.square(shift)
        covariances = jnp.where(some, self._form.corrected(covariances, errors, self.regularization), state.covariances)
        return MixtureState(moments.counts / jnp.sum(moments.counts), state.means + shift, covariances, state.num_started)

    def scores(self, shared: MixtureShared, x: jax.Array) -> dict[str, jax.Array]:
        return {"log_likelihood": jax.nn.logsumexp(self._log_joint(shared, x)[0], axis=1)}

    @property
    def _form(self) -> Diagonal:
        return _FORMS[self.covariance]

    def _ones(self) -> jax.Array:
        """Returns identity covariances."""
        return jnp.stack([self._form.unit(self.num_features)] * self.num_clusters)

    def _log_joint(self, shared: MixtureShared, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns two arrays: the logarithm of each component's weight times its density at each example, ``[n, k]``, and the
        differences of the examples from the means, ``[n, k, features]``.
        """
        apart = x[:, None, :] - shared.means[None]
        volumes = jnp.sum(jnp.log(self._form.scales(shared.factors)), axis=1)
        constant = jnp.log(shared.weights) + volumes - self.num_features / 2 * math.log(2 * math.pi)
        return constant[None] - jnp.sum(jnp.square(self._form.whiten(apart, shared.factors)), axis=2) / 2, apart
