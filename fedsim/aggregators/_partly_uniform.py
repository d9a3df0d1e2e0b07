"""`PartlyUniform`: the weighted mean of the updates, in which clients have equal weights for some parameters."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators._aggregator import Mean, SumAggregator, Update, WeightedTotal
from fedsim.names import did_you_mean


class TwoTotals(NamedTuple):
    """The sums for all leaves: with the clients' weights, and with equal ones. Either has None in place of the other's."""

    weighted: WeightedTotal
    uniform: WeightedTotal


@dataclasses.dataclass(frozen=True, eq=False)
class PartlyUniform(SumAggregator):
    """The weighted mean of the updates, in which all clients have equal weights for some parameters.

    A client whose weight is 0 has it for these, too. Other weights, such as those of stale updates, have no effect on them.

    Attributes:
      names: patterns of `fnmatch` for the names of the parameters with equal weights, such as ``"linear_2/*"``. They are names
        in the update; where this has more than one array for a parameter, as in MimeLite, a name begins with ``0/`` or ``1/``.

    Raises:
      ValueError: ``names`` are no patterns, or, when the first round is traced, a pattern matches no array of the update.

    >>> mean = PartlyUniform("head/*")
    >>> one, other = ({"body": {"w": jnp.float32(x)}, "head": {"w": jnp.float32(x)}} for x in (0, 4))
    >>> total = mean.accumulate(mean.zero(one, slots=2), one, jnp.float32(1), 0)
    >>> mean.finish(mean.accumulate(total, other, jnp.float32(3), 1))
    {'body': {'w': Array(3., dtype=float32)}, 'head': {'w': Array(2., dtype=float32)}}
    """

    names: str | Sequence[str]

    def __post_init__(self) -> None:
        if not self._patterns or not all(isinstance(pattern, str) for pattern in self._patterns):
            raise ValueError(
                f"Expected patterns of names of parameters, got names={self.names!r}: give 'linear_2/*', for example."
            )

    def check(self, update: Update, slots: int) -> None:
        known = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(update)]
        for pattern in self._patterns:
            if not fnmatch.filter(known, pattern):
                raise ValueError(
                    f"There is no parameter {pattern!r} to be averaged with equal weights.{did_you_mean(pattern, known)} The "
                    f"arrays of an update are {', '.join(known)}."
                )

    @property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(self.names) if isinstance(self.names, (list, tuple)) else (self.names,)  # type: ignore[return-value]

    def _divided(self, update: Update) -> tuple[Update, Update]:
        """Returns the update twice, with None in place of the leaves with equal weights, and of the others."""

        def mark(path: Any, x: Any) -> Any:
            return x if any(fnmatch.fnmatch(_name(path), pattern) for pattern in self._patterns) else None

        uniform = jax.tree_util.tree_map_with_path(mark, update)
        return tree.masked(update, uniform, inverted=True), uniform

    def zero(self, update: Update, slots: int) -> TwoTotals:
        return TwoTotals(*(_MEAN.zero(each, slots) for each in self._divided(update)))

    def accumulate(self, accumulator: TwoTotals, update: Update, weight: jax.Array, slot: jax.Array) -> TwoTotals:
        weighted, uniform = self._divided(update)
        return TwoTotals(
            _MEAN.accumulate(accumulator.weighted, weighted, weight, slot),
            _MEAN.accumulate(accumulator.uniform, uniform, jnp.asarray(weight != 0, jnp.float32), slot),
        )

    def finish(self, accumulator: TwoTotals) -> Update:
        return tree.merge(*map(_MEAN.finish, accumulator))


_MEAN = Mean()


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
