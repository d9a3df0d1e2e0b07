"""Base class of algorithms without gradients: clients sum statistics of their examples, and the server sums these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import tree
from fedsim.aggregators import Aggregator, Sum
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.data import Batch, Batches, FederatedData
from fedsim.rounds import Client, ClientUpdate


def one_pass() -> Batches:
    """Returns the default batches: one pass, 256 examples at a time, in stored order."""
    return Batches(size=256, shuffle=False)


def check_numbers(user: str, feature: str, data: FederatedData) -> None:
    """Raises ``ValueError`` unless ``data`` has the feature that ``user`` reads, and it holds real, finite numbers in range."""
    if feature not in data.columns:
        raise ValueError(
            f"{user} needs feature {feature!r}, which the data does not have. Set feature to one of {sorted(data.columns)}."
        )
    if (dtype := np.dtype(data.columns[feature].dtype)).kind == "c":
        raise ValueError(
            f"{user} reads real numbers, got feature {feature!r} of {dtype}: give its real and imaginary parts as two features."
        )
    data.check_range([feature])
    data.check_finite()


def check_exact(user: str, feature: str, edges: np.ndarray, data: FederatedData) -> None:
    """Raises ``ValueError`` unless comparisons of the feature with the edges, ``float32 [n]`` in ascending order, are exact."""
    low, high = edges[0], edges[-1]
    if not (np.diff(edges) > 0).all():
        raise ValueError(
            f"{user} needs edges that differ in float32, got {len(edges)} from {low} to {high}: give fewer bins, or subtract a "
            "constant from the feature, and scale it."
        )
    # Rounding keeps the order, so smaller edges are on the right side of every whole number.
    whole = np.dtype(data.columns[feature].dtype).kind in "iu" and max(-low, high) >= 2**24
    if whole and (found := data.label_range(feature)) and max(-found[0], found[1]) > 2**24:
        raise ValueError(
            f"{user} reads {feature!r} as float32, which has all whole numbers up to 2**24 only, got {found[0]} to {found[1]}: "
            "subtract a constant from the feature, or, if the rounding is meant, convert the column to float32."
        )


def over_examples(client: Client, batches: Batches, add: Callable[[Any, Batch], Any], none: Any) -> tuple[Any, jax.Array]:
    """Returns what ``add`` makes of the batches that a client reads, from ``none``, and the share by which sums over these
    examples are to be multiplied: the client's number of examples divided by the number that it reads, ``float32 []``.
    """

    def step(so_far: tuple[Any, tree.Total], batch: Batch) -> tuple[Any, tree.Total]:
        return add(so_far[0], batch), so_far[1].add(jnp.sum(batch.mask, dtype=jnp.float32))

    found, count = client.for_each_batch(batches, step, (none, tree.Total.of(jnp.float32(0))))
    return found, client.num_examples.astype(jnp.float32) / jnp.maximum(count.value(), 1)


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

    batches: Batches = dataclasses.field(default_factory=one_pass)
    aggregator: Aggregator = dataclasses.field(default_factory=Sum)
    feature: str = "x"

    def check(self, data: FederatedData) -> None:
        super().check(data)
        check_numbers(type(self).__name__, self.feature, data)

    def zero_statistics(self, shared: Any) -> Any:
        """Returns the statistics of no examples."""
        raise NotImplementedError(f"{type(self).__name__} must define zero_statistics(shared).")

    def statistics(self, shared: Any, batch: Batch) -> Any:
        """Returns the statistics of a batch's examples, a pytree of sums. Examples where ``batch.mask`` is False must not
        count.
        """
        raise NotImplementedError(f"{type(self).__name__} must define statistics(shared, batch).")

    def values(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns all numbers of the feature in a batch as one vector, and a mask that is True for the numbers that count."""
        column = batch.examples[self.feature].reshape(len(batch.mask), -1)
        return column.ravel(), jnp.broadcast_to(batch.mask[:, None], column.shape).ravel()

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        def add(total: tree.Total, batch: Batch) -> tree.Total:
            return total.add(self.statistics(shared, batch))

        total, share = over_examples(client, self.batches, add, tree.Total.of(self.zero_statistics(shared)))
        return ClientUpdate(tree.scale(total.value(), share), jnp.float32(1))
