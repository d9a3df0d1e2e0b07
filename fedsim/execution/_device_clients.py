"""`DeviceClients`: a round's clients inside a compiled program, one after another or in groups that run side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fedsim import tree
from fedsim.attacks import Attack
from fedsim.execution._call import Call
from fedsim.execution._client import ClientUpdate, batch_loop
from fedsim.execution._clients import Clients, Work
from fedsim.execution._placement import AXIS
from fedsim.execution._plan import Layout
from fedsim.execution._state import ClientTable, RoundInfo
from fedsim.primitives import bounded_loop

# If an aggregator's accumulator is at most this many times as large as an update, each of the clients that run side by side has
# an accumulator, and these are merged. Otherwise the updates are accumulated one after another.
_SMALL_ACCUMULATOR = 4


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
        """The name of the axis of devices; None for a single device."""
        return AXIS if self.mesh.size > 1 else None


class DeviceClients(Clients):
    """The clients that one device runs.

    Args:
      setting: how to run them.
      *args: see `Clients`.
    """

    def __init__(self, setting: Setting, *args: Any) -> None:
        super().__init__(*args)
        self.layout = setting.layout
        self.loop = batch_loop(setting.layout.most_examples)

    def _run(self, call: Call, work: Work) -> tuple[Any, Any]:
        return self._exchange(call, self._run_groups(call, work, self._empty(call)))

    def _empty(self, call: Call) -> tuple[Any, Any, Any]:
        """Returns the initial values of a call: an empty accumulator, zeros for all entries, and the table of memories."""
        shape, slots = self.shapes[call.name], self.layout.slots
        entries = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), shape.entries)
        return self._zero(call), entries, self.table

    def _zero(self, call: Call) -> Any:
        if call.fold is None:
            return ()
        arrived, slots = self.shapes[call.name].arrived, self.layout.slots
        return call.fold.zero_devices(arrived, slots, self.axis) if self.axis else call.fold.zero(arrived, slots)

    def _run_groups(self, call: Call, work: Work, carry: Any, window: Any = None) -> Any:
        """Runs the groups of this device, all or those of a window, see `fedsim.execution._plan.windows`."""
        device = jax.lax.axis_index(self.axis) if self.axis else 0
        queue, length, starts, groups = (
            x[device] for x in (self.plan.queue, self.plan.length, self.plan.starts, self.plan.groups)
        )
        for number, width in enumerate(self.layout.widths):
            if width == 1:
                run = functools.partial(self._run_one, call, work, queue, starts[number])
            else:
                run = functools.partial(self._run_group, call, work, queue, starts[number], length, width)
            first, last = (0, groups[number]) if window is None else window[device, number]

            def from_first(i: jax.Array, carry: Any, run: Callable[..., Any] = run, first: Any = first) -> Any:
                return run(first + i, carry)

            carry = bounded_loop(last - first, from_first, carry, most_steps=self.layout.slots)
        return carry

    def _run_one(self, call: Call, work: Work, queue: jax.Array, starts: jax.Array, i: jax.Array, carry: Any) -> Any:
        """Runs one client."""
        accumulator, entries, table = carry
        slot = queue[starts[i]]
        client = jax.tree.map(lambda x: x[slot], call.clients)
        arrived, own, row = work(call, client, self.loop, self._row(call, client, table))
        if call.fold is not None:
            accumulator = call.fold.accumulate(accumulator, arrived, own["weight"], slot)
        entries = jax.tree.map(functools.partial(put, slot), entries, own)
        # The row is written after the update is accumulated, because the update may be computed from the old row. Otherwise XLA
        # would copy the table.
        return accumulator, entries, self._keep(call, table, tree.after(slot, accumulator), own, row)

    def _run_group(
        self, call: Call, work: Work, queue: jax.Array, starts: jax.Array, length: jax.Array, width: int, i: jax.Array,
        carry: Any,
    ) -> Any:  # fmt: skip
        """Runs a group of clients side by side."""
        accumulator, entries, table = carry
        at = starts[i] + jnp.arange(width, dtype=jnp.int32)
        exists = at < length
        slots = queue[jnp.minimum(at, len(queue) - 1)]
        clients = jax.tree.map(lambda x: x[slots], call.clients)
        clients = clients._replace(size=jnp.where(exists, clients.size, 0))
        arrived, own, row = jax.vmap(lambda client: work(call, client, self.loop, self._row(call, client, table)))(clients)
        if call.fold is not None:
            accumulator = self._folded(call, accumulator, arrived, own["weight"], slots)
        slots = jnp.where(exists, slots, len(queue))
        entries = jax.tree.map(functools.partial(put, slots), entries, own)
        return accumulator, entries, self._keep(call, table, slots, own, row)

    def _folded(self, call: Call, accumulator: Any, arrived: Any, weights: jax.Array, slots: jax.Array) -> Any:
        fold, zero = call.fold, self._zero(call)
        assert fold is not None
        if tree.num_bits(zero) <= _SMALL_ACCUMULATOR * tree.num_bits(self.shapes[call.name].arrived):
            each = jax.vmap(functools.partial(fold.accumulate, zero))(arrived, weights, slots)
            return fold.merge(accumulator, fold.merge_stacked(each))

        def accumulate(so_far: Any, one: tuple[Any, jax.Array, jax.Array]) -> tuple[Any, None]:
            return fold.accumulate(so_far, *one), None

        return jax.lax.scan(accumulate, accumulator, (arrived, weights, slots))[0]

    def _keep(self, call: Call, table: Any, slots: jax.Array, own: Any, rows: Any) -> Any:
        """Writes the rows of clients whose update counts."""
        if call.aggregator is None or not isinstance(table, ClientTable):
            return table
        beyond = len(table.seen)
        at = jnp.where(own["weight"] != 0, self.plan.memory.at[slots].get(mode="fill", fill_value=beyond), beyond)
        return put_rows(table, at, rows)

    def _exchange(self, call: Call, carry: Any) -> tuple[Any, Any]:
        """Combines what each device wrote: entries, which are zeros on the other devices, and rows of the table."""
        accumulator, entries, self.table = carry
        if self.axis is None:
            return accumulator, entries
        if call.aggregator is None or not isinstance(self.table, ClientTable):
            return accumulator, self._summed(entries)
        table, at = self.table, self.plan.memory
        beyond = len(table.seen)
        rows = jax.tree.map(lambda rows: rows[jnp.minimum(at, beyond - 1)], table.rows)
        wrote = jax.vmap(lambda wrote, row: tree.select(wrote, row, jax.tree.map(jnp.zeros_like, row)))
        entries, rows = self._summed((entries, wrote(entries["weight"] != 0, rows)))
        self.table = put_rows(table, jnp.where(entries["weight"] != 0, at, beyond), rows)
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
    """Writes ``new`` at one index of ``rows`` or at several, all different. Indices beyond the end are not written."""
    if not at.ndim:
        return rows.at[at].set(new, mode="drop")
    # ``unique_indices`` requires that indices beyond the end differ, too. Without it, a deterministic GPU writes one row after
    # another.
    at = jnp.where(at < len(rows), at, len(rows) + jnp.arange(len(at), dtype=at.dtype))
    return rows.at[at].set(new, mode="drop", unique_indices=True)


def put_rows(table: ClientTable, at: jax.Array, rows: Any) -> ClientTable:
    """Writes a row at one index of a table, or rows ``[n, ...]`` at several. Indices beyond the end are not written."""
    written = ClientTable(rows, jnp.ones(at.shape, bool))
    if at.ndim or not isinstance(at, jax.core.Tracer):
        return jax.tree.map(functools.partial(put, at), table, written)

    def write(_: jax.Array, table: ClientTable) -> ClientTable:
        return jax.tree.map(lambda leaf, row: jax.lax.dynamic_update_index_in_dim(leaf, row, at, 0), table, written)

    # A loop of one step or none writes in place. On a CPU a scatter, or a selection between two tables, copies the table.
    return bounded_loop(at < len(table.seen), write, table, most_steps=1)
