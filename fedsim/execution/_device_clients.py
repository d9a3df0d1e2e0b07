"""`DeviceClients`: a round's clients inside a compiled program, one after another or in groups that run side by side."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedsim import primitives, tree
from fedsim.attacks import Attack
from fedsim.execution._call import Call, Rows
from fedsim.execution._client import ClientPlan, ClientUpdate, batch_loop, training_steps
from fedsim.execution._clients import ClientGroup, Clients, Work
from fedsim.execution._placement import AXIS
from fedsim.execution._plan import Layout
from fedsim.execution._state import ClientTable, RoundInfo
from fedsim.primitives import Placed, Placement, bounded_loop
from fedsim.primitives._closed import constant_unless_counted

T = TypeVar("T")


class Setting(NamedTuple):
    """What a compiled program depends on besides the algorithm and the shapes of arrays.

    Attributes:
      mesh: the devices.
      layout: the layout of the plan.
      resident: True if every device has all examples, False if each device has only those of its clients.
      stacked: True for several rounds in one program, with infos ``[rounds, ...]``; False for one round.
      attack: the attack on the cohorts.
      deterministic: whether a GPU adds numbers in a fixed order.
    """

    mesh: Mesh
    layout: Layout
    resident: bool
    stacked: bool
    attack: Attack | None
    deterministic: bool

    @property
    def axis(self) -> str | None:
        """The name of the axis of devices, each of which runs the program; None if one program describes the work of all."""
        return AXIS if self.mesh.size > 1 and not self.is_divided else None

    @property
    def is_divided(self) -> bool:
        """Whether each device has its own block of the population, see `Clients.map_rows`."""
        return self.layout.block is not None


class DeviceClients(Clients):
    """The clients that one device runs.

    Args:
      setting: how to run them.
      *args: see `Clients`.
    """

    def __init__(self, setting: Setting, *args: Any) -> None:
        super().__init__(*args)
        self.setting, self.layout = setting, setting.layout
        self.rows_mesh = setting.mesh if setting.is_divided else None
        self.loop = batch_loop(setting.layout.most_examples)

    def _run(self, call: Call, work: Work) -> tuple[Any, Any]:
        return self._exchange(call, self._run_groups(call, work, self._empty(call)))

    def _update(self, work: Callable[..., ClientUpdate], call: Call, own: ClientPlan, *rest: Any) -> Any:
        update = functools.partial(super()._update, work, call, own, *rest)
        if self.layout.most_examples is None:
            return update()

        def counted() -> tuple[Any, jax.Array]:
            updated = update()
            took_part = training_steps(self.algorithm.batches, own.size, own.most_steps) > 0
            return updated, took_part & (updated[1]["dropped"] == 0)

        return constant_unless_counted(counted)

    def _empty(self, call: Call) -> tuple[Any, Any, Any]:
        """Returns the initial values of a call: an empty accumulator, zeros for all entries, and the table of memories."""
        shape = self.shapes[call.name].entries
        entries = jax.tree.map(lambda x: jnp.zeros((call.num_entries, *x.shape), x.dtype), shape)
        return self._zero(call), entries, self.table

    def _run_groups(self, call: Call, work: Work, carry: Any, window: Any = None) -> Any:
        """Runs the groups of this device, all or those of a window, see `fedsim.execution._plan.windows`.

        If the population is divided, it does so on every device.
        """
        if not self.setting.is_divided:
            return self._run_own_groups(call, work, carry, window)
        accumulator, entries, table = carry
        block = self.layout.block
        assert call.rows is not None and block is not None

        def on_device(rows: Any, entries: Any, columns: Any) -> Any:
            clients = copy.copy(self)
            clients.axis, clients.columns = AXIS, columns
            own = call._replace(rows=Rows(rows, jax.lax.axis_index(AXIS) * block))
            return clients._run_own_groups(own, work, (accumulator, entries, table), window)[1]

        specs = P(AXIS), P(AXIS), P() if self.setting.resident else P(AXIS)
        # As in `fedsim.execution._compile.compiled`, the bounds of loops differ between devices.
        run = jax.shard_map(on_device, mesh=self.setting.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)
        entries = run(call.rows.values, entries, self.columns)
        return accumulator, entries, table

    def _run_own_groups(self, call: Call, work: Work, carry: Any, window: Any) -> Any:
        """Does what `_run_groups` does on the device that runs this code."""
        device = jax.lax.axis_index(self.axis) if self.axis else 0
        queue, length, starts, groups = (
            x[device] for x in (self.plan.queue, self.plan.length, self.plan.starts, self.plan.groups)
        )
        for number, width in enumerate(self.layout.widths):
            first, last = (0, groups[number]) if window is None else window[device, number]

            def run(i: jax.Array, carry: Any, number: int = number, width: int = width, first: Any = first) -> Any:
                at = starts[number, first + i] + jnp.arange(width, dtype=jnp.int32)
                slots = queue[jnp.minimum(at, len(queue) - 1)]
                return self._run_group(call, work, slots, at < length, carry)

            carry = bounded_loop(last - first, run, carry, most_steps=self.layout.slots)
        return carry

    def _run_group(self, call: Call, work: Work, slots: jax.Array, exists: jax.Array, carry: Any) -> Any:
        """Runs the clients in these slots side by side; a group at the end of the queue may have fewer than its width."""
        accumulator, entries, table = carry
        clients = jax.tree.map(lambda x: x[slots], call.clients)
        clients = clients._replace(size=jnp.where(exists, clients.size, 0))
        stored = rows_of(table, clients.memory) if isinstance(table, ClientTable) else ()
        # As one program, the clients read what the server sends without a copy for each of them. The loop over groups computes
        # a group again in a backward pass, so the group itself need not.
        run = primitives.program(functools.partial(self.run_together, call, work, side_by_side=True), recompute=False)
        accumulator, own, rows = run(Placed(ClientGroup(clients, stored), Placement("clients", len(slots))), accumulator)
        entries = put_rows(entries, jnp.where(exists, call.places(clients), call.num_entries), own)
        if call.aggregator is not None and isinstance(table, ClientTable):
            # The rows are written after the updates are accumulated, because an update may be computed from the old row.
            # Otherwise XLA would copy the table.
            at = tree.after(jnp.where(exists, clients.memory, len(table.seen)), accumulator)
            table = put_rows(table, at, rows)
        return accumulator, entries, table

    def _exchange(self, call: Call, carry: Any) -> tuple[Any, Any]:
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


class EndOfProgram(BaseException):
    """Ends the trace of ``Algorithm.round`` where a program ends; ``value`` is what the program returns."""

    def __init__(self, value: Any) -> None:
        self.value = value


class PartialClients(DeviceClients):
    """The clients of a round that several programs run. Each program traces the round from its start and ends inside a call.

    - ``fold`` runs a window of the clients of a call and accumulates their updates.
    - ``advance`` ends a call and returns the initial values of the next call.
    - ``finish`` ends the last call and the round.

    Args:
      results: the results of the calls that have ended.
      carry: accumulator, entries and table of the current call; None before the first call.
      window: which groups to run; None to end the current call.
      *args: see `DeviceClients`.
    """

    def __init__(self, results: tuple[Any, ...], carry: Any, window: Any, *args: Any) -> None:
        super().__init__(*args)
        self.results, self.carry, self.window = list(results), carry, window
        self.num_ended = len(results)

    def _aggregate(self, call: Call, work: Callable[..., ClientUpdate]) -> tuple[Any, RoundInfo, Any]:
        if len(self.names) <= self.num_ended:
            self._count_bits(call)
            return self.results[len(self.names) - 1]
        self.results.append(super()._aggregate(call, work))
        return self.results[-1]

    def _map(self, call: Call, work: Callable[..., Any]) -> Any:
        if len(self.names) <= self.num_ended:
            return self.results[len(self.names) - 1]
        self.results.append(super()._map(call, work))
        return self.results[-1]

    def _run(self, call: Call, work: Work) -> tuple[Any, Any]:
        if self.carry is None or len(self.results) > self.num_ended:
            raise EndOfProgram((tuple(self.results), self._empty(call)))
        if self.window is not None:
            raise EndOfProgram(self._run_groups(call, work, self.carry, self.window))
        return self._exchange(call, self.carry)


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
