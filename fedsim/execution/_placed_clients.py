"""`place_clients`: a cohort's clients, with datasets of any sizes, as values of `fedsim.primitives`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedsim.data import Batches, Cohort
from fedsim.execution._execution import without_arrivals
from fedsim.execution._layout import Layout, plan_round
from fedsim.primitives import Placed, Placement, without_mesh_of_context
from fedsim.rounds import Client, ClientPlan, batch_loop
from fedsim.rounds._client import client_of, client_plans
from fedsim.samplers import check_is_cohort


class PlacedClients(Placed):
    """Clients at a placement: a function that is mapped over them gets each as a `Client`."""

    def __init__(
        self, stacked: ClientPlan, columns: Mapping[str, Any], batches: Batches, most: int, placement: Placement
    ) -> None:
        super().__init__(stacked, placement)
        self.columns, self.batches, self.most_examples = columns, batches, most

    @property
    def of_all(self) -> Mapping[str, Any]:
        return self.columns

    def of_client(self, own: ClientPlan, of_all: Mapping[str, Any]) -> Client:
        return client_of(own, self.batches, of_all, batch_loop(self.most_examples))


jax.tree_util.register_pytree_node(
    PlacedClients,
    lambda value: ((value.stacked, value.columns), (value.batches, value.most_examples, value.placement)),
    lambda static, children: PlacedClients(*children, *static),
)


@without_mesh_of_context()
def place_clients(
    cohort: Cohort, batches: Batches | None = None, *, name: str = "clients", devices: Sequence[jax.Device] | None = None
) -> PlacedClients:
    """Returns a cohort's clients as a value of `fedsim.primitives`, each with its own dataset, number of steps and key.

    `fedsim.primitives.map` gives each to its function as a `Client`. Its ``for_each_batch`` takes exactly the client's own
    steps, in derivatives, too. Shuffles and keys are those of a round of an algorithm.

    Args:
      cohort: the clients.
      batches: what ``client.num_steps`` counts; default: one example at a time.
      name: of the placement.
      devices: the devices that the clients are divided over; None for a single device. Every device gets the examples of all.

    Raises:
      ValueError: the number of clients is no multiple of the number of devices; the cohort has an attack, or clients that have
        started in earlier rounds; a feature is text or has numbers that change on a device, see `FederatedData.check_range`.

    >>> import fedsim
    >>> from fedsim import primitives as fed
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([1.0, 2.0, 6.0], np.float32)}, sizes=[2, 1])
    >>> clients = place_clients(fedsim.Cohort.of(data, ["0", "1"]))
    >>> def total(scale, client):
    ...     def add(total, batch): return total + jnp.sum(scale * batch.examples["x"], where=batch.mask)
    ...     return client.for_each_batch(fedsim.Batches(size=1), add, jnp.zeros(()))
    >>> def mean(scale): return fed.mean(fed.map(lambda client: total(scale, client), clients))
    >>> mean(1.0).item(), jax.grad(mean)(1.0).item()
    (4.5, 4.5)
    """
    check_is_cohort(cohort, "place_clients got")
    cohort = without_arrivals(cohort, "place_clients")
    if cohort.attack is not None:
        raise ValueError(
            f"Expected a cohort without an attack for place_clients, got one with {cohort.attack}, whose attackers would train "
            "like all others: give the cohort of a sampler without Attacked, and change the attackers' examples or results."
        )
    batches = batches or Batches(size=1, shuffle=False)
    cohort.data.check_dtypes()
    cohort.data.check_range(cohort.data.columns)
    batches.check(cohort.sizes)
    data, slots = cohort.data, len(cohort)
    sizes, first_rows = cohort.sizes, cohort.starts
    ranges = [np.arange(first, first + size) for first, size in zip(first_rows, sizes, strict=True)]
    rows = np.concatenate([np.zeros(0, np.int64), *ranges])  # only the examples of the cohort
    columns = {
        column: jnp.asarray(values[rows] if len(rows) else np.zeros((1, *values.shape[1:]), values.dtype))
        for column, values in data.columns.items()
    }
    placement = Placement(name, slots, None if devices is None else tuple(devices))
    plan = plan_round(cohort, Layout(slots, 1), batches)
    own = client_plans(plan, cohort.keys())
    own = own._replace(start=jnp.asarray(np.cumsum(sizes) - sizes, jnp.int32))
    own = jax.tree.map(placement.divided, own)
    if placement.mesh is not None:
        columns = jax.device_put(columns, NamedSharding(placement.mesh, PartitionSpec()))  # once, not in every call
    return PlacedClients(own, columns, batches, int(sizes.max(initial=1)), placement)
