"""Base class of algorithms without gradients: clients sum statistics of their examples, and the server sums these."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import tree
from fedsim.aggregators import Aggregator, Sum
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.data import Batch, Batches, FederatedData
from fedsim.rounds import Client, ClientUpdate


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Statistics(Algorithm):
    """An algorithm whose clients send a sum over their examples. Subclasses define `zero_statistics`, ``statistics`` and
    `server_update`.

    Every example counts once, however ``batches`` reads it. A client that read only some of its examples (a straggler), or some
    of them twice, sends its statistics per example times its number of examples.

    Attributes:
      feature: the column to read.
      aggregator: a sum by default.
      batches: default: one pass, 256 examples at a time, in stored order.

    >>> Statistics(feature="x").batches.shuffle
    False
    """

    capabilities = Capabilities(minimizes=False, ordered=False, aggregators=False, scalable=False)

    batches: Batches = dataclasses.field(default_factory=lambda: Batches(size=256, shuffle=False))
    aggregator: Aggregator = dataclasses.field(default_factory=Sum)
    feature: str = "x"

    def check(self, data: FederatedData) -> None:
        super().check(data)
        if self.feature not in data.columns:
            raise ValueError(
                f"{type(self).__name__} needs feature {self.feature!r}, which the data does not have. Set feature to one of "
                f"{sorted(data.columns)}."
            )
        if np.dtype(data.columns[self.feature].dtype).kind == "c":
            raise ValueError(
                f"{type(self).__name__} reads real numbers, got feature {self.feature!r} of "
                f"{data.columns[self.feature].dtype}: give its real and imaginary parts as two features."
            )
        data.check_range([self.feature])
        data.check_finite()

    def zero_statistics(self, shared: Any) -> Any:
        """Returns the statistics of no examples."""
        raise NotImplementedError(f"{type(self).__name__} must define zero_statistics(shared).")

    def statistics(self, shared: Any, batch: Batch) -> Any:
        """Returns the statistics of a batch's examples, a pytree of sums. Examples where ``batch.mask`` is False must not
        count.
        """
        raise NotImplementedError(f"{type(self).__name__} must define statistics(shared, batch).")

    def merge(self, a: Any, b: Any) -> Any:
        """Returns the statistics of both sets of examples together; by default the sum, whose rounding errors do not add up."""
        return tree.add(a, b)

    def values(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns all numbers of the feature in a batch as one vector, and a mask that is True for the numbers that count."""
        column = batch.examples[self.feature].reshape(len(batch.mask), -1)
        return column.ravel(), jnp.broadcast_to(batch.mask[:, None], column.shape).ravel()

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        statistics, share = self.collect(shared, client)
        return ClientUpdate(tree.scale(statistics, share), jnp.float32(1))

    def collect(self, shared: Any, client: Client) -> tuple[Any, jax.Array]:
        """Returns the statistics of the examples that a client reads, and its number of examples divided by the number that it
        reads.
        """

        is_sum = type(self).merge is Statistics.merge

        def add(so_far: tuple[Any, tree.Total], batch: Batch) -> tuple[Any, tree.Total]:
            statistics = self.statistics(shared, batch)
            merged = so_far[0].add(statistics) if is_sum else self.merge(so_far[0], statistics)
            return merged, so_far[1].add(jnp.sum(batch.mask, dtype=jnp.float32))

        none = self.zero_statistics(shared)
        start = tree.Total.of(none) if is_sum else none, tree.Total.of(jnp.float32(0))
        statistics, count = client.for_each_batch(self.batches, add, start)
        share = client.num_examples.astype(jnp.float32) / jnp.maximum(count.value(), 1)
        return statistics.value() if is_sum else statistics, share
