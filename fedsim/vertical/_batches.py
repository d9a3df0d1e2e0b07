"""Batches of aligned data: the same people at all parties."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from fedsim import checks, rng
from fedsim.data import Batches
from fedsim.vertical._data import VerticalData


class VerticalBatch(NamedTuple):
    """What the parties hold of the people of one exchange.

    Attributes:
      features: ``float32 [size, width]`` by party.
      labels: ``[size]``, at the party with the labels.
      key: the key of the round, for compression and for parties that go missing.

    >>> VerticalBatch({"shop": np.zeros([2, 3])}, np.zeros(2, np.int32), jax.random.key(0)).labels.shape
    (2,)
    """

    features: dict[str, jax.Array | np.ndarray]
    labels: jax.Array | np.ndarray
    key: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class BatchSampler:
    """Samples the people of every exchange, in a new order in every epoch.

    All parties can draw the same batches from a seed that they share, so naming the people of a batch takes no message. Batches
    are cut from the concatenated epochs, so all have the same size.

    Attributes:
      data: the aligned data.
      size: the number of people per batch.
      seed: the seed of the run, or its root key.

    Raises:
      ValueError: ``data`` is no `VerticalData`, or ``size`` is not in [1, number of people].

    >>> data = VerticalData(features={"shop": np.arange(4.0)[:, None]}, labels=np.arange(4), labels_at="bank",
    ...     columns={"shop": ("x",)}, ids=tuple("abcd"))
    >>> sampler = BatchSampler(data, size=2, seed=0)
    >>> sorted(np.concatenate([batch.labels for batch in sampler.rounds(2)]).tolist())  # the first epoch
    [0, 1, 2, 3]
    """

    data: VerticalData
    _: dataclasses.KW_ONLY
    size: int
    seed: int | jax.Array = 0

    def __post_init__(self) -> None:
        checks.instance(VerticalData, "vertical.align(parties, secret=...)", data=self.data)
        checks.whole(1, len(self.data), size=self.size, remedy="at most the number of people")

    @functools.cached_property
    def _root(self) -> jax.Array:
        return rng.root(self.seed)

    @functools.cached_property
    def _words(self) -> np.ndarray:
        return np.asarray(rng.words(rng.stream(self._root, "sampling")))

    def batch(self, round: int) -> VerticalBatch:
        """Returns the batch of a round, which depends on the seed and the round only."""
        rows, _ = Batches(size=self.size).indices(self._words, len(self.data), round, np)
        features = {party: values[rows] for party, values in self.data.features.items()}
        return VerticalBatch(features, self.data.labels[rows], _round_key(self._root, round))

    def rounds(self, stop: int, start: int = 0) -> Iterator[VerticalBatch]:
        """Returns the batches of rounds ``start`` to ``stop - 1``."""
        return (self.batch(round) for round in range(start, stop))


@jax.jit  # One by one, its operations take longer than the exchange of a small batch.
def _round_key(root: jax.Array, round: int) -> jax.Array:
    return rng.round_key(root, round, "vertical")
