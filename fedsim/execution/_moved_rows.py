"""Where clients' rows are while a dispatch runs: read in place or gathered before it, and written to the store after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim.data import ClientRows
from fedsim.data._row_store import MemoryRows, RowStore
from fedsim.execution._contract import ClientTable, State
from fedsim.execution._memory import split
from fedsim.execution._placement import AXIS
from fedsim.execution._plan import RoundPlan

# Of what a dispatch writes, whose room is kept for the next one.
_ROOM_BYTES = 2**27
# Where rows are gathered for it: a C library keeps blocks of up to 32 MiB, and larger ones are new pages each time.
_GATHERED_BYTES = 2**25


def most_rounds(state: State, slots: int, mesh: Mesh) -> int:
    """How many rounds can go to the devices at once, so that the table of what their cohorts keep is no larger than it may."""
    clients = split(state).clients
    if not isinstance(clients, ClientRows):
        return 2**31
    most = _ROOM_BYTES if _in_place(clients, mesh) else _GATHERED_BYTES
    row_bytes = max(1, clients.store.row_bytes) * mesh.size
    if len(clients.index) * row_bytes <= most:
        return 2**31
    return max(1, most // (most_rows(slots, mesh.size) * row_bytes))


def most_rows(slots: int, devices: int) -> int:
    """Clients of a round whose rows one of several devices has room for: a quarter more than its share."""
    return min(slots, -(-5 * slots // (4 * devices)))


class Moved(NamedTuple):
    """What a dispatch reads and writes of what clients keep.

    Attributes:
      before: rows as they were before it.
      table: room for those that it writes, one device's after another's, to be `cleared`.
      plans: of the rounds that can go together, pointing into both.
      who: whose rows each device has room for, ``int [n]``, in their order.
    """

    before: ClientTable
    table: ClientTable
    plans: list[RoundPlan]
    who: list[np.ndarray]


def rows_for(clients: ClientRows, plans: Iterable[RoundPlan], slots: int, mesh: Mesh, max_rounds: int) -> Moved:
    """The rows of the clients of the first of these rounds, each for the device that trains its client.

    A round has to wait for the next dispatch if a client comes to another device than in a round before it: who trains where is
    a matter of its cohort alone, so that what is dispatched together changes no sum.
    """
    devices = mesh.size
    capacity = min(most_rows(slots, devices) * max_rounds, len(clients.index))
    homes: dict[int, tuple[int, int]] = {}
    who: list[list[int]] = [[] for _ in range(devices)]
    moved = []
    for plan in plans:
        seats = [(at, int(plan.client[at]), device) for device in range(devices) for at in _trained_by(plan, device)]
        if any(homes.get(client, (device,))[0] != device for _, client, device in seats):
            break
        keeps = np.full(slots, capacity, np.int32)
        for at, client, device in seats:
            if client not in homes:
                homes[client] = device, len(who[device])
                who[device].append(client)
            keeps[at] = homes[client][1]
        moved.append(plan._replace(keeps=keeps))
    of_devices = [np.array(there, np.int64) for there in who]
    before, places = _in_place(clients, mesh) or _gathered(clients, of_devices, capacity, mesh)
    moved = [plan._replace(reads=np.where(plan.keeps < capacity, places[plan.client], -1).astype(np.int32)) for plan in moved]
    return Moved(before, _room(clients.store, devices * capacity, mesh), moved, of_devices)


def _in_place(clients: ClientRows, mesh: Mesh) -> tuple[ClientTable, np.ndarray] | None:
    """All rows as every device of a CPU reads them where they are, and everybody's place, ``int [num_clients]``.

    A program sees what is written to them later. That is why a row is written when no program is under way that reads it:
    `rows_after` waits for the one whose rows it writes, and rows that somebody refers to are never written.
    """
    store = clients.store
    if not isinstance(store, MemoryRows) or mesh.devices.flat[0].platform != "cpu":
        return None
    if ("rows", mesh) not in store.kept:
        rows = jax.device_put(store.rows, NamedSharding(mesh, P()))
        copies = [
            leaf.size and shard.data.unsafe_buffer_pointer() != leaf.ctypes.data
            for leaf, there in zip(store.rows, rows, strict=True)
            for shard in there.addressable_shards
        ]
        seen = jax.device_put(np.ones(len(store.rows[0]), bool), NamedSharding(mesh, P()))
        store.kept["rows", mesh] = None if any(copies) else ClientTable(jax.tree.unflatten(store.structure, rows), seen)
    table = store.kept["rows", mesh]
    return None if table is None else (table, clients.index)


def _gathered(clients: ClientRows, who: list[np.ndarray], capacity: int, mesh: Mesh) -> tuple[ClientTable, np.ndarray]:
    """A copy of these clients' rows, each device's on it, and everybody's place there, ``int [num_clients]``."""
    rows = [np.empty((mesh.size * capacity, *leaf.shape), leaf.dtype) for leaf in clients.store.leaves]
    seen = np.zeros(mesh.size * capacity, bool)
    at = np.concatenate([device * capacity + np.arange(len(there)) for device, there in enumerate(who)])
    chosen = np.concatenate(who)
    seen[at] = clients.read(chosen, rows, at)
    for leaf in rows:
        leaf[~seen] = 0  # A row's parts may say themselves whether they were ever written.
    places = np.full(len(clients.index), -1, np.int64)
    places[chosen] = at % capacity
    table = ClientTable(jax.tree.unflatten(clients.store.structure, rows), seen)
    return jax.device_put(table, NamedSharding(mesh, P(AXIS))), places


def _room(store: RowStore, rows: int, mesh: Mesh) -> ClientTable:
    """A table for rows, the last dispatch's if there is one: new memory can take longer to get than rows to write."""
    room, sharding = store.kept.pop(("room", mesh), None), NamedSharding(mesh, P(AXIS))
    if room is None or len(room.seen) != rows:
        zeros = [np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in store.leaves]
        room = jax.device_put(ClientTable(jax.tree.unflatten(store.structure, zeros), np.zeros(rows, bool)), sharding)
    return room


def cleared(table: ClientTable) -> ClientTable:
    """Room without what it says of rows that were there: whose they were, and which phases wrote them."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if leaf.dtype == bool else leaf, table)


def _trained_by(plan: RoundPlan, device: int) -> list[int]:
    """Positions in the cohort."""
    lanes = zip(plan.queue[device], plan.length[device], strict=True)
    return [at for queue, length in lanes for at in queue[:length].tolist()]


def rows_after(before: ClientRows, table: ClientTable, who: list[np.ndarray], phases: int, mesh: Mesh) -> ClientRows:
    """What clients keep after a dispatch of a program of these many phases, for which it waits; ``who`` as `Moved` says."""
    # Of what is on several devices alike, as after steps out of a program, the first copy.
    shards = [[shard.data for shard in leaf.addressable_shards[: len(who)]] for leaf in jax.tree.leaves(table)]
    parts = []
    for there, leaves in zip(who, zip(*shards, strict=True), strict=True):
        *rows, seen = map(np.asarray, leaves)
        seen = seen[: len(there)]
        parts.append((there, _completed(before, there, rows, seen) if phases > 1 else rows, seen))
    after = before.all_written(parts)
    before.store.kept["room", mesh] = table
    return after


def _completed(before: ClientRows, who: np.ndarray, rows: list[np.ndarray], seen: np.ndarray) -> list[np.ndarray]:
    """Rows of several phases, of which those that a phase did not write have its part as it was."""
    wrote = np.stack(
        [part[-1] | (len(jax.tree.leaves(part)) == 1) for part in jax.tree.unflatten(before.store.structure, rows)]
    )
    lacking = np.flatnonzero(seen & ~np.all(wrote[:, : len(who)], axis=0))
    if not len(lacking):
        return rows
    rows = [leaf.copy() for leaf in rows]
    parts = jax.tree.unflatten(before.store.structure, rows), before.gather(who[lacking])[0]
    for new, old, of_phase in zip(*parts, wrote[:, lacking], strict=True):
        for leaf, was in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
            leaf[lacking[~of_phase]] = was[~of_phase]
    return rows
