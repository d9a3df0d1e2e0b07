"""A metric for each domain of the examples."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.metrics._statistics import Examples, Metric, Sparse, is_sparse, per_example


@dataclasses.dataclass(frozen=True)
class PerDomain:
    """Computes a metric for the examples of each domain.

    The result has a leading axis of domains: ``[num_domains]`` for a metric whose value is a number. Examples whose domain is
    not in ``[0, num_domains)`` do not count.

    Attributes:
      metric: the metric.
      num_domains: the number of domains.
      feature: the feature of the examples with the domain, ``int [n]``.

    Raises:
      ValueError: ``num_domains`` is not a positive whole number, or the examples do not have the feature.

    >>> from fedsim.metrics import accuracy
    >>> examples = {"y": jnp.array([1, 1, 1]), "domain_id": jnp.array([0, 2, 2])}
    >>> mean = PerDomain(accuracy, num_domains=3)(examples, jnp.array([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]))
    >>> mean.total.dense().sum(0).tolist(), mean.weight.dense().sum(0).tolist()
    ([1, 0, 1], [1, 0, 2])
    """

    metric: Metric
    num_domains: int
    feature: str = "domain_id"

    def __post_init__(self) -> None:
        checks.whole(1, num_domains=self.num_domains)

    def __call__(self, examples: Examples, outputs: Any) -> Any:
        if self.feature not in examples:
            raise ValueError(
                f"PerDomain reads the domain from feature {self.feature!r}, and the examples have {sorted(examples)}. "
                "Set feature to the column with the domains."
            )
        statistic = self.metric(examples, outputs)
        if hasattr(statistic, "shape") and not is_sparse(statistic):
            statistic = per_example(statistic)
        domain = examples[self.feature].astype(jnp.int32)[:, None]
        in_range = (domain >= 0) & (domain < self.num_domains)

        def by_domain(leaf: Any) -> Sparse:
            if is_sparse(leaf):
                index, values, shape = leaf.index, leaf.values, leaf.shape
            else:
                shape = leaf.shape[1:]
                index, values = jnp.arange(int(np.prod(shape)))[None], leaf.reshape(len(leaf), -1)
            index = jnp.where(in_range, domain * int(np.prod(shape)) + index, -1)
            return Sparse.of(index, (self.num_domains, *shape), values)

        return jax.tree.map(by_domain, statistic, is_leaf=is_sparse)
