"""What algorithms without gradients share: clients add up statistics of their examples, and the server adds these up."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import tree
from fedsim.aggregators import Aggregator, Sum
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.data import Batch, Batches, FederatedData
from fedsim.execution import Client, ClientUpdate


class ClientState(NamedTuple):
    """Statistics so far, and how many examples they are of, ``float32 []``."""

    statistics: Any
    seen: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Statistics(Algorithm):
    """An algorithm whose clients send a sum over their examples: subclasses write ``nothing``, ``statistics``, `server_update`.

    Each example counts once, however ``batches`` has it read: a client that read only some of its examples (a straggler), or
    some twice, sends what it found per example, times how many it has.

    Attributes:
      feature: the column to read.
      aggregator: a sum, by default.
      batches: default: one pass, 256 examples at a time, in stored order.

    >>> Statistics(feature="x").batches.shuffle
    False
    """

    capabilities = Capabilities(minimizes=False, ordered=False, aggregators=False)

    batches: Batches = dataclasses.field(default_factory=lambda: Batches(size=256, shuffle=False))
    aggregator: Aggregator = dataclasses.field(default_factory=Sum)
    feature: str = "x"

    def check(self, data: FederatedData) -> None:
        super().check(data)
        if self.feature not in data.columns:
            raise ValueError(
                f"{type(self).__name__} reads feature {self.feature!r}, which the data lacks; it has {sorted(data.columns)}: "
                "name one of these by feature."
            )
        _check_width(data, self.feature)
        data.check_finite()

    def nothing(self, shared: Any) -> Any:
        """The statistics of no examples."""
        raise NotImplementedError(f"{type(self).__name__} must define nothing(shared).")

    def statistics(self, shared: Any, batch: Batch) -> Any:
        """The statistics of a batch's examples, a pytree of sums over them; what ``batch.mask`` marks False must not count."""
        raise NotImplementedError(f"{type(self).__name__} must define statistics(shared, batch).")

    def merge(self, a: Any, b: Any) -> Any:
        """The statistics of both; by default their sum."""
        return tree.add(a, b)

    def values(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """All numbers of the feature in a batch, end to end, and which of them count."""
        column = batch.examples[self.feature].reshape(len(batch.mask), -1)
        return column.ravel(), jnp.broadcast_to(batch.mask[:, None], column.shape).ravel()

    def client_init(self, shared: Any, client: Client) -> ClientState:
        return ClientState(self.nothing(shared), jnp.float32(0))

    def client_step(self, shared: Any, state: ClientState, batch: Batch) -> ClientState:
        seen = jnp.sum(batch.mask, dtype=jnp.float32)
        return ClientState(self.merge(state.statistics, self.statistics(shared, batch)), state.seen + seen)

    def client_final(self, shared: Any, state: ClientState, client: Client) -> ClientUpdate:
        share = client.num_examples.astype(jnp.float32) / jnp.maximum(state.seen, 1)
        return ClientUpdate(tree.scale(state.statistics, share), jnp.float32(1))


def _check_width(data: FederatedData, feature: str) -> None:
    """Raises ``ValueError`` for an integer that a device would wrap: without x64 it has 32 bits where the data has 64."""
    dtype = np.dtype(data.columns[feature].dtype)
    on_device = jax.dtypes.canonicalize_dtype(dtype)
    if dtype.kind not in "iu" or dtype == on_device:
        return
    fits = np.iinfo(on_device)
    wrong = next((value for value in data.label_range(feature) or () if not fits.min <= value <= fits.max), None)
    if wrong is not None:
        raise ValueError(
            f"Feature {feature!r} is {dtype} and holds {wrong}, which {fits.dtype} of a device cannot: number its values anew, "
            "drop that example, or set jax_enable_x64."
        )
