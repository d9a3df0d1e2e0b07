"""What lives from round to round beside the server's own state: of the clients, the aggregator and the downlink."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedsim import tree
from fedsim.aggregators import Aggregator
from fedsim.data import ClientRows, FederatedData
from fedsim.execution._contract import Average, Client, ClientTable, FederatedProgram, Remembered, Shared, State
from fedsim.execution._plan import RoundPlan

_RESIDENT_BYTES_ON_CPU = 2**22
_RESIDENT_SHARE = 0.25
_TABLE_BYTES = 2**27


def update_shape(program: FederatedProgram, server: State) -> Any:
    """A client's update, as ``jax.ShapeDtypeStruct``."""

    def final(server: State) -> Any:
        shared, number = program.broadcast(server), jnp.int32(0)
        client = Client(number, number, number, jax.random.key(0), program.client_memory(shared))
        return program.client_final(shared, program.client_init(shared, client), client).update

    return jax.eval_shape(final, server)


def remember(program: FederatedProgram, state: State, data: FederatedData) -> State:
    """``state``, joined by what lives beside it if there is anything; without effect if that has been done.

    Raises:
      ValueError: the state is one of another population.
    """
    if isinstance(state, Remembered):
        clients = state.clients
        known = len(clients.index if isinstance(clients, ClientRows) else clients.seen) if clients != () else data.num_clients
        if known != data.num_clients:
            raise ValueError(
                f"The state remembers a population of {known} clients, and this one has {data.num_clients}: start with a state "
                "from init."
            )
        return state
    if vars(program).get("_forgets"):  # nothing to keep: known since its first round
        return state
    kept = vars(program).setdefault("_remembers", {})
    like = str(jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), state))
    if like not in kept:
        row = jax.eval_shape(lambda server: program.client_memory(program.broadcast(server)), state)
        of_aggregator: Any = ()
        aggregator: Any = ()
        downlink: Any = ()
        # What keeps nothing is not asked for shapes of updates: in `Debug`, hooks want to see arrays.
        if any(getattr(type(program.aggregator), hook) is not getattr(Aggregator, hook) for hook in ("init", "client_memory")):
            update = update_shape(program, state)
            of_aggregator = jax.eval_shape(program.aggregator.client_memory, update)
            aggregator = program.aggregator.init(_zeros(update))
        if program.downlink is not None:
            sent = jax.eval_shape(program.broadcast, state)
            downlink = program.downlink.init(_zeros(_floats(sent)))
        kept[like] = (row, of_aggregator), aggregator, downlink
    average: Any = ()
    if program.averaging is not None:
        if not hasattr(state, "params"):
            raise ValueError(
                f"averaging={program.averaging} is of state.params, which {type(program).__name__} has not: leave it out."
            )
        average = Average(state.params, jnp.float32(0))
    elif not jax.tree.leaves(kept[like]):
        vars(program)["_forgets"] = True
        return state
    rows, aggregator, downlink = kept[like]
    clients = ClientRows.empty(rows, data.num_clients) if jax.tree.leaves(rows) else ()
    return Remembered(state, clients, aggregator, downlink, average)


def averaged(decay: float | None, average: Any, params: Any) -> Any:
    """The average after a round that ended with ``params``: decay of the old one and 1 - decay of the new, made to sum to 1."""
    if decay is None:
        return average
    weight = decay * average.weight + (1 - decay)
    step = tree.scale(tree.subtract(params, average.params), (1 - decay) / weight)
    return Average(tree.add(average.params, step), weight)


def split(state: State) -> Remembered:
    """The parts of a state, of one that remembers nothing, too.

    >>> split({"w": 1.0}).server
    {'w': 1.0}
    """
    return state if isinstance(state, Remembered) else Remembered(state)


def join(parts: Remembered, like: State) -> State:
    """The inverse of `split`."""
    return parts if isinstance(like, Remembered) else parts.server


def down(program: FederatedProgram, shared: Shared, memory: Any, key: jax.Array) -> tuple[Shared, Any, jax.Array]:
    """What clients receive of ``shared``, the sender's memory, and the size of the message (see `fedsim.tree.bits_dtype`)."""
    plain = tree.num_bits(shared)
    if program.downlink is None:
        return shared, memory, tree.add_bits(plain, most=plain)
    floats = _floats(shared)
    sent = program.downlink.transmit(floats, key, memory)
    received = iter(sent.value)
    shared = jax.tree.map(lambda x: next(received) if _is_float(x) else x, shared)
    return shared, sent.memory, tree.add_bits(sent.bits, plain - tree.num_bits(floats), most=plain)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _floats(shared: Shared) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(shared) if _is_float(leaf)]


def is_resident(rows: ClientRows | ClientTable, data: FederatedData, mesh: Mesh, memory: str) -> bool:
    """Whether every client's row is kept on every device, rather than those of a dispatch's cohorts.

    On a device of its own a table is copied once a dispatch, at that memory's speed. On a CPU a copy of all costs more than
    moving the cohorts' rows, unless it is small.
    """
    if memory != "auto":
        return memory == "resident"
    if isinstance(rows, ClientTable):
        return True
    table_bytes = rows.store.row_bytes * data.num_clients
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return table_bytes <= _RESIDENT_BYTES_ON_CPU
    return table_bytes <= _RESIDENT_SHARE * (device.memory_stats() or {}).get("bytes_limit", 8 * 2**30)


def most_rounds(state: State, data: FederatedData, slots: int, mesh: Mesh, memory: str) -> int:
    """How many rounds can go to the device at once: what their cohorts keep has to fit there, next to its copies."""
    clients = split(state).clients
    if not isinstance(clients, ClientRows) or is_resident(clients, data, mesh, memory):
        return 2**31
    return max(1, _TABLE_BYTES // max(1, slots * clients.store.row_bytes))


def to_device(
    clients: ClientRows | ClientTable, plans: list[RoundPlan], resident: bool, max_rounds: int
) -> tuple[ClientTable, list[RoundPlan], np.ndarray]:
    """The table that a dispatch reads and writes, its plans pointing into it, and whose rows it holds, ``int [n]``."""
    if resident:
        if isinstance(clients, ClientTable):
            return clients, plans, np.arange(len(clients.seen))
        everyone = np.arange(len(clients.index))
        return ClientTable(*clients.gather(everyone)), plans, everyone
    together = [plan.client[: int(plan.length.sum())] for plan in plans]
    who, where = np.unique(np.concatenate(together), return_inverse=True)
    slots = len(plans[0].client)
    capacity = slots * max_rounds
    parts = np.split(where, np.cumsum([len(clients) for clients in together])[:-1])
    moved = []
    for plan, part in zip(plans, parts, strict=True):
        keeps = np.full(slots, capacity, np.int32)
        keeps[: len(part)] = part
        moved.append(plan._replace(keeps=keeps))
    return ClientTable(*_rows(clients).gather(who, capacity)), moved, who


def from_device(
    before: ClientRows | ClientTable, table: ClientTable, who: np.ndarray, resident: bool
) -> ClientRows | ClientTable:
    """What clients keep after a dispatch; waits for it unless it stays on the device."""
    if resident:
        return table
    return _rows(before).written(who, table.rows, np.asarray(table.seen)[: len(who)])


def _rows(clients: ClientRows | ClientTable) -> ClientRows:
    if isinstance(clients, ClientRows):
        return clients
    seen = np.asarray(clients.seen)
    empty = ClientRows.empty(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), clients.rows), len(seen))
    return empty.written(np.arange(len(seen)), clients.rows, seen)
