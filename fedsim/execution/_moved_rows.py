"""Where clients' rows are while a dispatch runs: read in place or gathered, moved with clients, then written to the store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import tree
from fedsim.data import ClientRows
from fedsim.data._row_store import MemoryRows, RowStore
from fedsim.execution._cohort_loop import put_rows
from fedsim.execution._contract import ClientTable, State
from fedsim.execution._memory import split
from fedsim.execution._placement import AXIS
from fedsim.execution._plan import RoundPlan

# Of what a dispatch writes, whose room is kept for the next one.
_ROOM_BYTES = 2**28
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
      plans: of its rounds, pointing into both.
      who: whose rows each device has room for, ``int [n]``, in their order; who comes to several devices is in each.
    """

    before: ClientTable
    table: ClientTable
    plans: list[RoundPlan]
    who: list[np.ndarray]


def rows_for(clients: ClientRows, plans: Iterable[RoundPlan], slots: int, mesh: Mesh, max_rounds: int) -> Moved:
    """The rows of these rounds' clients, each for the device that trains its client.

    Who trains where is a matter of a round's cohort alone, so that what is dispatched together changes no sum. Where a client
    comes to another device than before, what it keeps moves there (`with_moves`).
    """
    devices = mesh.size
    capacity = min(most_rows(slots, devices) * max_rounds, len(clients.index))
    homes: list[dict[int, int]] = [{} for _ in range(devices)]  # of each device, from a client to its place there
    lately: dict[int, int] = {}  # from a client to the device that it came to last
    moved = []
    for plan in plans:
        keeps, moves, num_moves = np.full(slots, capacity, np.int32), np.full((slots, 2), -1, np.int32), 0
        for device, home in enumerate(homes):
            for at in _trained_by(plan, device):
                client = int(plan.client[at])
                keeps[at] = home.setdefault(client, len(home))
                last = lately.get(client, device)
                if last != device:
                    moves[num_moves] = last * capacity + homes[last][client], device * capacity + keeps[at]
                    num_moves += 1
                lately[client] = device
        moved.append(plan._replace(keeps=keeps, moves=moves))
    who = [np.array(list(home), np.int64) for home in homes]
    before, places = _in_place(clients, mesh) or (_gathered(clients, who, capacity, mesh), None)

    def reads(plan: RoundPlan) -> np.ndarray:
        there = plan.keeps if places is None else places[plan.client]
        return np.where(plan.keeps < capacity, there, -1).astype(np.int32)

    moved = [plan._replace(reads=reads(plan)) for plan in moved]
    return Moved(before, _room(clients.store, devices * capacity, mesh), moved, who)


def with_moves(table: ClientTable, moves: jax.Array) -> ClientTable:
    """A device's table after these moves, ``int32 [n, 2]`` as `RoundPlan` has them; a row that was not written stays away."""
    rows, device = len(table.seen), jax.lax.axis_index(AXIS)

    def bits(leaf: jax.Array) -> jax.Array:
        # Of floats the sum with zeros is not always what they were: -0.0 becomes 0.0. Few devices add up 8 or 16 bits.
        if tree.is_float(leaf):
            leaf = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
        return leaf if leaf.dtype.itemsize >= 4 else leaf.astype(jnp.uint32)

    def of_bits(number: jax.Array, leaf: jax.Array) -> jax.Array:
        if not tree.is_float(leaf):
            return number.astype(leaf.dtype)
        return jax.lax.bitcast_convert_type(number.astype(f"uint{8 * leaf.dtype.itemsize}"), leaf.dtype)

    def move(i: jax.Array, table: ClientTable) -> ClientTable:
        source, target = moves[i]
        leaves = source // rows == device
        at = jnp.where(leaves, source % rows, 0)
        going = jax.tree.map(lambda leaf: bits(leaf[at]), table)
        row, seen = tree.psum(tree.select(leaves, going, jax.tree.map(jnp.zeros_like, going)), AXIS)
        # With all flags of the row that leaves: of several phases, each tells by its own whether it wrote a row.
        table = jax.tree.map(lambda x: x.at[at].set(x[at] & ~leaves) if x.dtype == bool else x, table)
        to = jnp.where((target // rows == device) & (seen > 0), target % rows, rows)
        return put_rows(table, to, jax.tree.map(of_bits, row, table.rows))

    return jax.lax.fori_loop(0, jnp.sum(moves[:, 0] >= 0, dtype=jnp.int32), move, table)


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


def _gathered(clients: ClientRows, who: list[np.ndarray], capacity: int, mesh: Mesh) -> ClientTable:
    """A copy of these clients' rows, each device's on it, in the places where it keeps them."""
    rows = [np.empty((mesh.size * capacity, *leaf.shape), leaf.dtype) for leaf in clients.store.leaves]
    seen = np.zeros(mesh.size * capacity, bool)
    at = np.concatenate([device * capacity + np.arange(len(there)) for device, there in enumerate(who)])
    chosen = np.concatenate(who)
    seen[at] = clients.read(chosen, rows, at)
    for leaf in rows:
        leaf[~seen] = 0  # A row's parts may say themselves whether they were ever written.
    table = ClientTable(jax.tree.unflatten(clients.store.structure, rows), seen)
    return jax.device_put(table, NamedSharding(mesh, P(AXIS)))


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
