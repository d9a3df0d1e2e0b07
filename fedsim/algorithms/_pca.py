"""Federated principal component analysis by subspace iteration.

G. H. Golub, C. F. Van Loan, "Matrix Computations", 4th edition, 2013, section 8.2.4 (orthogonal iteration), and its
variant that separates the vectors of the subspace by a small eigenvalue problem. One round is one iteration over the examples
of the cohort. Clients send sums over their examples, from which the server computes C Q, where C is the covariance of all these
examples and Q are the current components. Neither examples nor a matrix ``[features, features]`` are sent. If all clients
participate in every round, the components converge to those of a single machine with all the data.

A. Grammenos, R. Mendoza-Smith, J. Crowcroft, C. Mascolo, "Federated principal component analysis", NeurIPS 2020:
https://arxiv.org/abs/1907.08059, is another method, which merges the clients' own subspaces in one pass.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng
from fedsim.algorithms._flat_features import check_num_features, evaluate_scores, scorer, vectors
from fedsim.algorithms._statistics import Statistics
from fedsim.data import Batch, FederatedData
from fedsim.evaluation import Evaluation
from fedsim.model import Model
from fedsim.rounds import RoundInfo


class PCAState(NamedTuple):
    """The state of the server.

    Attributes:
      mean: of the examples, ``[features]``.
      components: orthonormal columns, ``[features, components]``, by decreasing variance.
      variances: of the examples along the components, ``[components]``.
    """

    mean: jax.Array
    components: jax.Array
    variances: jax.Array


class Products(NamedTuple):
    """Sums over examples, of which ``d`` is the difference from the old mean.

    Attributes:
      size: the number of examples, ``float32 []``.
      first: the sum of d, ``[features]``.
      second: the sum of d (d' Q), ``[features, components]``.
    """

    size: jax.Array
    first: jax.Array
    second: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PCA(Statistics):
    """Finds the directions of largest variance of the examples of all clients, with one step of subspace iteration per round.

    The error decreases by a factor per round that is the ratio of the variances along the first component that is left out and
    the one before. The sign of a component is such that its entry of largest magnitude is positive. `evaluate` returns the
    ``error``: the mean over features of the squared difference from the projection onto the components.

    Attributes:
      num_components: at most ``num_features``.
      num_features: numbers per example. An example of another shape is flattened.
      feature, batches: see `Statistics`.

    Raises:
      ValueError: ``num_features`` is not a positive whole number, or ``num_components`` is not in ``[1, num_features]``.

    >>> import numpy as np, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.float32([[9, 1], [1, 1], [3, 2], [7, 2]])}, sizes=[3, 1])
    >>> algorithm = PCA(num_features=2, num_components=1)
    >>> state = algorithm.init(jax.random.key(0))
    >>> for round in range(5):
    ...     state, _ = algorithm.apply(state, fedsim.Cohort.of(data, ["0", "1"], round=round))
    >>> state.mean.tolist(), abs(state.components.round(3)).tolist(), state.variances.round(3).tolist()
    ([5.0, 1.5], [[1.0], [0.0]], [10.0])
    """

    num_features: int
    num_components: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, num_features=self.num_features)
        checks.whole(1, self.num_features, num_components=self.num_components)

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_num_features(self.num_features, self.feature, data)

    def init(self, key: jax.Array) -> PCAState:
        draw = jax.random.normal(rng.stream(key, "components"), (self.num_features, self.num_components), jnp.float32)
        return PCAState(
            jnp.zeros(self.num_features, jnp.float32), jnp.linalg.qr(draw)[0], jnp.zeros(self.num_components, jnp.float32)
        )

    def zero_statistics(self, shared: PCAState) -> Products:
        return Products(jnp.float32(0), jnp.zeros_like(shared.mean), jnp.zeros_like(shared.components))

    def statistics(self, shared: PCAState, batch: Batch) -> Products:
        # Differences from the old mean are more precise than examples if these are far from zero.
        apart = jnp.where(batch.mask[:, None], vectors(batch.examples[self.feature]) - shared.mean[None], 0.0)
        second = jnp.matmul(apart.T, jnp.matmul(apart, shared.components, precision="highest"), precision="highest")
        return Products(jnp.sum(batch.mask, dtype=jnp.float32), jnp.sum(apart, axis=0), second)

    def server_update(self, state: PCAState, update: Products, info: RoundInfo) -> PCAState:
        dot = functools.partial(jnp.matmul, precision="highest")
        size = jnp.where(update.size > 0, update.size, 1)  # below 1 if a staleness weight multiplies few examples
        shift = update.first / size
        product = update.second / size - jnp.outer(shift, dot(shift, state.components))
        # The eigenvectors of Q'CQ turn the basis of the subspace, so that columns are single components in the right order.
        variances, turn = jnp.linalg.eigh(dot(state.components.T, product))
        components = jnp.linalg.qr(dot(product, turn[:, ::-1]))[0]
        largest = jnp.take_along_axis(components, jnp.argmax(jnp.abs(components), axis=0)[None], axis=0)
        return PCAState(state.mean + shift, components * jnp.where(largest < 0, -1.0, 1.0), variances[::-1])

    def scores(self, shared: PCAState, x: jax.Array) -> dict[str, jax.Array]:
        """Returns the ``error`` of each example, ``float32 [n]``, for ``x float32 [n, features]``."""
        apart = x - shared.mean[None]
        return {"error": jnp.mean(jnp.square(apart - apart @ shared.components @ shared.components.T), axis=1)}

    def evaluate(self, state: PCAState, data: FederatedData) -> Evaluation:
        """Returns the mean of the ``error`` over all examples, and over the examples of each client."""
        return evaluate_scores(self, self._scorer, state, data)

    @functools.cached_property
    def _scorer(self) -> Model:
        return scorer(self, "lower")
