"""`DeviceRound`: runs the clients of a round in a compiled program, one after another or in groups that run side by side."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedsim import tree
from fedsim.attacks import Attack
from fedsim.execution._layout import Layout
from fedsim.execution._placement import AXIS, batch_sharding, in_lockstep, whole_on_client
from fedsim.model import WHOLE, Division
from fedsim.primitives import bounded_loop
from fedsim.primitives._closed import constant_unless_counted
from fedsim.rounds import ClientPlan, ClientTable, Operands, RoundPlan, RoundProgram, TracedCall, TraceOptions, training_steps

T = TypeVar("T")
# What a call has computed so far: the accumulator, the entries of the clients that have finished, and the table of memories.
Carry = tuple[Any, Any, Any]

# If an aggregator's accumulator is at most this many times as large as an update, each of the clients that run side by side has
# an accumulator, and these are merged. Otherwise the updates are accumulated one after another.
_SMALL_ACCUMULATOR = 4


class CompileOptions(NamedTuple):
    """What a compiled program depends on besides the algorithm and the shapes of arrays.

    Attributes:
      mesh: the devices.
      layout: the layout of the plan.
      resident: True if every device has all examples, False if each device has only those of its clients.
      stacked: True for several rounds in one program, with infos ``[rounds, ...]``; False for one round.
      attack: the attack on the cohorts.
      deterministic: whether a GPU adds numbers in a fixed order.
      rows: the number of rows of the columns on a device.
      key: the dtype of the root key.
      division: how the model is divided over devices that train a client together.
    """

    mesh: Mesh
    layout: Layout
    resident: bool
    stacked: bool
    attack: Attack | None
    deterministic: bool
    rows: int
    key: Any
    division: Division = WHOLE

    @property
    def axis(self) -> str | None:
        """The name of the axis of devices, each of which runs the program; None if one program describes the work of all."""
        return AXIS if self.mesh.shape[AXIS] > 1 and not self.is_divided else None

    @property
    def is_divided(self) -> bool:
        """Whether each device has its own block of the population, see `Clients.map_rows`."""
        return self.layout.block is not None

    @property
    def of_trace(self) -> TraceOptions:
        """What the trace of the round depends on."""
        return TraceOptions(
            slots=self.layout.slots,
            rows=self.rows,
            attack=self.attack,
            most_examples=self.layout.most_examples,
            axis=(AXIS, self.mesh.shape[AXIS]) if self.axis else None,
            rows_mesh=self.mesh if self.is_divided else None,
            key=self.key,
            batch_sharding=batch_sharding(self.mesh),
            whole=whole_on_client(self.mesh),
            lockstep=in_lockstep(self.mesh),
        )


class DeviceRound:
    """The clients of one round that a device runs.

    Args:
      options: how to run them.
      program: the traced round.
      plan: the plan of the round.
      columns: the examples.
      table: the clients' memories, or ().

    Attributes:
      table: the memories after the calls that have ended.
    """

    def __init__(self, options: CompileOptions, program: RoundProgram, plan: RoundPlan, columns: Any, table: Any) -> None:
        self.options, self.layout, self.program, self.plan = options, options.layout, program, plan
        self.columns, self.table = columns, table
        self.axis = options.axis

    def run(self, call: TracedCall, operands: Operands) -> tuple[Any, Any]:
        """Runs all clients of a call; returns the accumulator of this device and the entries of all clients."""
        return self.end(call, self.run_groups(call, operands, self.start(call, operands)))

    def start(self, call: TracedCall, operands: Operands) -> Carry:
        """Returns the initial values of a call: an empty accumulator, zeros for all entries, and the table of memories."""
        accumulator = () if call.zero is None else call.zero(operands.zero, {})
        return accumulator, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), call.results[1]), self.table

    def run_groups(self, call: TracedCall, operands: Operands, carry: Carry, window: Any = None) -> Carry:
        """Runs the groups of this device, all or those of a window, see `fedsim.execution._layout.windows`.

        If the population is divided, it does so on every device.
        """
        if not self.options.is_divided:
            return self._run_own_groups(call, operands, 0, carry, window)
        accumulator, entries, table = carry
        block = self.layout.block
        assert call.rows is not None and block is not None

        def on_device(rows: Any, entries: Any, columns: Any) -> Any:
            own = copy.copy(self)
            own.axis, own.columns = AXIS, columns
            first = jax.lax.axis_index(AXIS) * block
            return own._run_own_groups(call, operands._replace(rows=rows), first, (accumulator, entries, table), window)[1]

        specs = P(AXIS), P(AXIS), P() if self.options.resident else P(AXIS)
        # As in `fedsim.execution._compile.compiled`, the bounds of loops differ between devices.
        run = jax.shard_map(on_device, mesh=self.options.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)
        return accumulator, run(operands.rows, entries, self.columns), table

    def end(self, call: TracedCall, carry: Carry) -> tuple[Any, Any]:
        """Combines what each device wrote: entries, which are zeros on the other devices, and rows of the table."""
        accumulator, entries, self.table = carry
        if self.axis is None:
            return accumulator, entries
        if call.aggregator is None or not isinstance(self.table, ClientTable):
            return accumulator, self._summed(entries)
        table, at = self.table, jnp.asarray(self.plan.memory)
        wrote = jax.vmap(lambda wrote, row: tree.select(wrote, row, jax.tree.map(jnp.zeros_like, row)))
        rows = wrote(entries["weight"] != 0, rows_of(table, at))
        entries, rows = self._summed((entries, rows))
        self.table = put_rows(table, jnp.where(entries["weight"] != 0, at, len(table.seen)), rows)
        return accumulator, entries

    def _summed(self, a: Any) -> Any:
        assert self.axis is not None
        return jax.tree.map(lambda total, one: total.astype(one.dtype), tree.psum(a, self.axis), a)

    def _run_own_groups(self, call: TracedCall, operands: Operands, first_row: Any, carry: Carry, window: Any) -> Carry:
        """Runs this device's groups; ``first_row`` is the position in the population of the first row of ``operands.rows``."""
        device = jax.lax.axis_index(self.axis) if self.axis else 0
        queue, length, starts, groups = (
            x[device] for x in (self.plan.queue, self.plan.length, self.plan.starts, self.plan.groups)
        )
        for number, width in enumerate(self.layout.widths):
            first, last = (0, groups[number]) if window is None else window[device, number]

            def run(
                i: jax.Array, carry: Carry, number: int = number, width: int = width, first: Any = first, last: Any = last
            ) -> Carry:
                at = starts[number, first + i] + jnp.arange(width, dtype=jnp.int32)
                slots = queue[jnp.minimum(at, len(queue) - 1)]
                return self._run_group(call, operands, first_row, slots, (at < length) & (first + i < last), carry)

            count = jax.lax.pmax(last - first, AXIS) if in_lockstep(self.options.mesh) else last - first
            carry = bounded_loop(count, run, carry, most_steps=self.layout.slots)
        return carry

    def _run_group(
        self, call: TracedCall, operands: Operands, first_row: Any, slots: jax.Array, exists: jax.Array, carry: Carry
    ) -> Carry:
        """Runs the clients in these slots side by side; a group at the end of the queue may have fewer than its width."""
        accumulator, entries, table = carry
        clients: ClientPlan = jax.tree.map(lambda x: x[slots], operands.clients)
        clients = clients._replace(size=jnp.where(exists, clients.size, 0))
        stored = rows_of(table, clients.memory) if isinstance(table, ClientTable) else ()
        places = clients.slot if call.rows is None else clients.position - first_row
        rows = jax.tree.map(lambda x: x[places], operands.rows)
        run = functools.partial(self._run_client, call, operands)
        if len(slots) == 1:  # The work of a single client has no axis of clients.
            alone = run(*jax.tree.map(lambda x: x[0], (clients, stored, rows)))
            arrived, own, stored = jax.tree.map(lambda x: jnp.asarray(x)[None], alone)
        else:
            arrived, own, stored = jax.vmap(run)(clients, stored, rows)
        entries = put_rows(entries, jnp.where(exists, places, call.num_entries), own)
        if call.aggregator is None:
            return accumulator, entries, table
        accumulator = _accumulated(call, operands, accumulator, (arrived, own["weight"], clients.slot))
        if isinstance(table, ClientTable):
            # The rows are written after the updates are accumulated, because an update may be computed from the old row.
            # Otherwise XLA would copy the table.
            at = tree.after(jnp.where(exists, clients.memory, len(table.seen)), accumulator)
            table = put_rows(table, at, stored)
        return accumulator, entries, table

    def _run_client(self, call: TracedCall, operands: Operands, own: ClientPlan, stored: Any, row: Any) -> Any:
        """Runs one client; returns what arrives of its update, its entries, and its new row of the table, () without one."""

        def work() -> Any:
            shared, client = (operands.work, operands.server_memory), (own, self.columns, row, stored)
            return call.run(shared, client, self.program.first_memories)

        if self.layout.most_examples is None or call.aggregator is None:
            return work()
        return constant_unless_counted(lambda: self._counted(own, work()))

    def _counted(self, own: ClientPlan, results: Any) -> tuple[Any, jax.Array]:
        took_part = training_steps(self.program.batches, own.size, own.most_steps) > 0
        return results, took_part & (results[1]["dropped"] == 0)


def _accumulated(call: TracedCall, operands: Operands, accumulator: Any, updates: tuple[Any, jax.Array, jax.Array]) -> Any:
    """Adds updates ``[n, ...]`` with their weights and slots ``[n]`` to an accumulator."""
    assert call.zero is not None and call.accumulate is not None and call.merge is not None
    accumulate = functools.partial(call.accumulate, operands.accumulate, {})
    count = len(updates[1])
    if count == 1:
        return accumulate(accumulator, *jax.tree.map(lambda x: x[0], updates))
    if tree.num_bits(call.zero.shapes) > _SMALL_ACCUMULATOR * tree.num_bits(call.arrived):
        return call.add_all(operands, accumulator, updates)
    merge = functools.partial(call.merge, operands.merge, {})
    parts = jax.vmap(functools.partial(accumulate, call.zero(operands.zero, {})))(*updates)
    while count > 1:  # The first half takes over the second one.
        half = count // 2
        first, second, rest = (
            jax.tree.map(lambda x, at=at: x[at], parts) for at in (slice(half), slice(half, 2 * half), slice(2 * half, None))
        )
        parts = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), jax.vmap(merge)(first, second), rest)
        count -= half
    return merge(accumulator, jax.tree.map(lambda x: x[0], parts))


def put(at: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """Writes ``new`` ``[n, ...]`` at indices ``[n]`` of ``rows``, all different. Indices beyond the end are not written."""
    # ``unique_indices`` requires that indices beyond the end differ, too. Without it, a deterministic GPU writes one row after
    # another.
    at = jnp.where(at < len(rows), at, len(rows) + jnp.arange(len(at), dtype=at.dtype))
    return rows.at[at].set(new, mode="drop", unique_indices=True)


def rows_of(table: ClientTable, at: jax.Array) -> ClientTable:
    """Returns the rows at indices ``[n]`` of a table, leaves ``[n, ...]``. Rows beyond the end are not seen."""
    exists = at < len(table.seen)
    rows, seen = jax.tree.map(lambda x: x[jnp.where(exists, at, 0)], tuple(table))
    return ClientTable(rows, seen & exists)


def put_rows(table: T, at: jax.Array, rows: T) -> T:
    """Writes rows, leaves ``[n, ...]``, at indices ``[n]`` of a pytree of arrays. Indices beyond the end are not written."""
    leaves = jax.tree.leaves(table)
    if not leaves:
        return table
    if len(at) > 1 or not isinstance(at, jax.core.Tracer):  # `fedsim.Debug` writes concrete rows, which compiles no loop.
        return jax.tree.map(functools.partial(put, at), table, rows)

    def write(_: jax.Array, table: T) -> T:
        return jax.tree.map(lambda leaf, row: jax.lax.dynamic_update_index_in_dim(leaf, row[0], at[0], 0), table, rows)

    # A loop of one step or none writes in place. On a CPU a scatter, or a selection between two tables, copies the table.
    return bounded_loop(at[0] < len(leaves[0]), write, table, most_steps=1)
