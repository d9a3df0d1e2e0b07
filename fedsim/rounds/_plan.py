"""`RoundPlan`: the clients of one round and how they run, as arrays of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class RoundPlan(NamedTuple):
    """One round's plan, ``int32`` if not stated otherwise. Arrays ``[slots]`` are in cohort order, with zeros beyond it.

    The round itself reads all but the last four fields, see `of_clients`. These say how execution runs its clients.

    Attributes:
      round: ``[]``, the round's number.
      count: ``[]``, the number of clients.
      population: ``[2]``, the number of clients that have examples, and the number of all examples.
      client: ``[slots]``, index in the population.
      start: ``[slots]``, first row in the columns on the device.
      size: ``[slots]``, number of examples.
      most_steps: ``[slots]``, the most steps of a training loop.
      memory: ``[slots]``, row in the table of memories; beyond its end for slots without a client.
      attacker: ``bool [slots]``.
      staleness, key_round: ``[slots]``, see `fedsim.data.Arrivals`.
      weight, scale: ``float32 [slots]``, see `fedsim.data.Arrivals`.
      queue: ``[devices, slots]``, the slots that a device runs, in order.
      length: ``[devices]``, the number of clients in each queue.
      starts: ``[devices, widths, slots]``, where in the queue the groups of each width begin.
      groups: ``[devices, widths]``, the number of groups of each width.

    >>> shapes = RoundPlan.shapes(slots=20)
    >>> shapes.size.shape, shapes.weight.dtype, shapes.queue
    ((20,), dtype('float32'), ())
    """

    round: Any
    count: Any
    population: Any
    client: Any
    start: Any
    size: Any
    most_steps: Any
    memory: Any
    attacker: Any
    staleness: Any
    key_round: Any
    weight: Any
    scale: Any
    queue: Any = ()
    length: Any = ()
    starts: Any = ()
    groups: Any = ()

    def of_clients(self) -> RoundPlan:
        """Returns the plan without the fields that only execution reads."""
        return self._replace(queue=(), length=(), starts=(), groups=())

    @staticmethod
    def shapes(slots: int) -> RoundPlan:
        """Returns the shapes and dtypes of `of_clients`, as ``jax.ShapeDtypeStruct``, for at most ``slots`` clients."""
        kinds = {"attacker": np.bool_, "weight": np.float32, "scale": np.float32}
        sizes: dict[str, tuple[int, ...]] = {"round": (), "count": (), "population": (2,)}
        names = RoundPlan._fields[:-4]
        return RoundPlan(*[jax.ShapeDtypeStruct(sizes.get(name, (slots,)), kinds.get(name, np.int32)) for name in names])

    @staticmethod
    def stacked(plans: Sequence[RoundPlan], rounds: int) -> RoundPlan:
        """Stacks the plans of several rounds, leaves ``[rounds, ...]``; missing rounds are zeros.

        Args:
          plans: at most ``rounds`` plans, one or more, with arrays of equal shapes.
          rounds: the number of rounds that a program has space for.

        >>> plan = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), RoundPlan.shapes(slots=20))
        >>> stacked = RoundPlan.stacked([plan, plan], rounds=3)
        >>> stacked.count.tolist(), stacked.size.shape
        ([1, 1, 0], (3, 20))
        """

        def stack(*fields: np.ndarray) -> np.ndarray:
            rows = np.zeros((rounds, *fields[0].shape), fields[0].dtype)
            rows[: len(fields)] = fields
            return rows

        return jax.tree.map(stack, *plans)
