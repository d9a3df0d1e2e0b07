"""A round as a program of `fedsim.primitives`, which can be taken apart and checked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import primitives
from fedsim.data import Cohort
from fedsim.execution._call import Call
from fedsim.execution._clients import ClientGroup, Clients, Work
from fedsim.execution._device_clients import put_rows
from fedsim.execution._memory import remembered
from fedsim.execution._numbers import with_numbers
from fedsim.execution._plan import Layout, plan_round
from fedsim.execution._programs import finished, programs_for
from fedsim.execution._state import ClientTable, FederatedAlgorithm, State, parts_of, server_state
from fedsim.primitives import Placed, Placement


def federated_round(
    algorithm: FederatedAlgorithm, state: State, cohort: Cohort
) -> tuple[Callable[..., tuple[State, Any, Any]], tuple[Any, ...]]:
    """Returns a round as a federated program, and its arguments.

    The program takes the algorithm's numbers, the state without the clients' memories, the root key, and the clients' examples
    ``[slots, most examples, ...]`` and memories, each at its client. It returns the state, the round's info, and the memories.
    The result is that of `fedsim.Algorithm.apply`, up to the order of sums.

    Args:
      algorithm: whose round it is; it must not override ``apply``.
      state: the state before the round.
      cohort: the clients.
    """
    data, state = cohort.data, remembered(algorithm, state, cohort.data)
    programs, numbers = programs_for(algorithm, server_state(state), data)
    shapes, placement = programs.outline.shapes, Placement("clients", cohort.slots)
    plan = plan_round(cohort, Layout(cohort.slots, 1), algorithm.batches)
    most = max(1, int(cohort.sizes.max(initial=1)))
    columns = {name: np.zeros((cohort.slots, most, *c.shape[1:]), c.dtype) for name, c in data.columns.items()}
    for slot, client in enumerate(cohort.clients):
        for name, rows in data.client(int(client)).examples.items():
            columns[name][slot, : len(rows)] = rows
    row = jax.tree.map(lambda x: jnp.zeros((cohort.slots, *x.shape), x.dtype), programs.outline.row)
    seen = jnp.zeros(cohort.slots, bool)
    memories = ClientTable(row, seen) if jax.tree.leaves(row) else ()

    def program(numbers: Any, state: State, key: jax.Array, columns: Placed, memories: Any) -> tuple[State, Any, Any]:
        table = memories.stacked if isinstance(memories, Placed) else ()
        own_plan = jax.tree.map(jnp.asarray, plan._replace(memory=np.arange(cohort.slots, dtype=np.int32)))
        own = with_numbers(algorithm, numbers)
        clients = FederatedClients(columns, own, own_plan, key, parts_of(state), {}, table, shapes, cohort.attack)
        server, info = own.round(parts_of(state).server, clients)
        after = finished(own, state, clients, server, info)
        return after, info, Placed(clients.table, placement) if table != () else ()

    state = state._replace(clients=()) if parts_of(state).clients != () else state
    at_clients = functools.partial(primitives.place, placement=placement)
    own_memories = at_clients(memories) if memories != () else ()
    return program, (numbers, state, cohort.key, at_clients(columns), own_memories)


class FederatedClients(Clients):
    """Clients that run all together, each with the columns of its own examples.

    Args:
      examples: each client's columns.
      *args: see `Clients`.
    """

    def __init__(self, examples: Placed, *args: Any) -> None:
        super().__init__(*args)
        self.examples = examples

    def _run(self, call: Call, work: Work) -> tuple[Any, Any]:
        columns, placement = self.examples.stacked, self.examples.placement
        own = call.clients._replace(start=jnp.zeros(placement.size, jnp.int32))  # in the client's own columns
        clients = Placed(ClientGroup(own, self.table, columns), placement)
        accumulated, entries, self.table = self.run_together(call, work, clients, self._zero(call))
        if call.rows is not None:
            exists = jnp.arange(placement.size) < self.num_clients
            empty = jax.tree.map(lambda x: jnp.zeros((call.num_entries, *x.shape[1:]), x.dtype), entries)
            entries = put_rows(empty, jnp.where(exists, call.places(own), call.num_entries), entries)
        return accumulated, entries
