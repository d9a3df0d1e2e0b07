"""A round as a program of `fedsim.primitives`, which can be taken apart and checked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import primitives, rng
from fedsim.data import Cohort
from fedsim.execution._device_round import put_rows
from fedsim.execution._memory import remembered
from fedsim.execution._plan import Layout, plan_round
from fedsim.execution._programs import programs_for
from fedsim.execution._state import ClientTable, FederatedAlgorithm, FederatedState, State, parts_of, server_state
from fedsim.execution._trace import Operands, TracedCall, TraceOptions
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
    data, slots, most = cohort.data, cohort.slots, max(1, int(cohort.sizes.max(initial=1)))
    key = rng.typed(cohort.key)
    options = TraceOptions(slots=slots, rows=most, attack=cohort.attack, key=key.dtype)
    programs, numbers = programs_for(algorithm, server_state(state), data, options)
    state, traced = remembered(algorithm, state, data), programs.trace(options)
    placement, plan = Placement("clients", slots), plan_round(cohort, Layout(slots, 1), algorithm.batches)
    columns = {name: np.zeros((slots, most, *c.shape[1:]), c.dtype) for name, c in data.columns.items()}
    for slot, client in enumerate(cohort.clients):
        for name, rows in data.client(int(client)).examples.items():
            columns[name][slot, : len(rows)] = rows
    row = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), traced.first.clients)
    memories = ClientTable(row, jnp.zeros(slots, bool)) if jax.tree.leaves(row) else ()

    def program(numbers: Any, state: State, key: jax.Array, columns: Placed, memories: Any) -> tuple[State, Any, Any]:
        table = memories

        def run_call(call: TracedCall, operands: Operands) -> tuple[Any, Any]:
            nonlocal table
            folded, entries, table = _run(call, operands, placement, len(cohort), columns, table, traced.first_memories)
            return folded, entries

        own_plan = jax.tree.map(jnp.asarray, plan)
        after, info = traced.run(numbers, parts_of(state), key, own_plan, run_call)
        return after if isinstance(state, FederatedState) else after.server, info, table

    state = state._replace(clients=()) if parts_of(state).clients != () else state
    at_clients = functools.partial(primitives.place, placement=placement)
    return program, (numbers, state, key, at_clients(columns), at_clients(memories) if memories != () else ())


def _run(
    call: TracedCall, operands: Operands, placement: Placement, num_clients: int, columns: Placed, table: Any,
    first_memories: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Runs the clients of a call all together; returns the accumulator, the entries and the new memories."""
    clients = operands.clients._replace(start=jnp.zeros(placement.size, jnp.int32))  # in the client's own columns
    rows = jax.tree.map(lambda x: x[clients.position], operands.rows)

    def of_client(sent: Any, client: Any) -> Any:
        own, columns, row, stored = client
        consts, server_memory = sent
        return call.run(consts, server_memory, own, columns, row, stored, first_memories)

    stored = table.stacked if isinstance(table, Placed) else ()
    sent = primitives.broadcast((list(operands.work), operands.server_memory), placement)
    at_clients = Placed((clients, columns.stacked, rows, stored), placement)
    arrived, entries, stored = primitives.map(of_client, sent, at_clients).stacked
    table = Placed(stored, placement) if stored != () else table
    if call.rows is not None:
        exists = jnp.arange(placement.size) < num_clients
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), call.results[1])
        entries = put_rows(empty, jnp.where(exists, clients.position, call.num_entries), entries)
    if call.aggregator is None:
        return (), entries, table
    updates = Placed((arrived, entries["weight"], clients.slot), placement)
    name = type(call.aggregator.innermost).__name__
    assert call.zero is not None
    add = functools.partial(call.add_all, operands, call.zero(operands.zero, {}))
    return primitives.reduce(add, updates, name=name), entries, table
