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
# Of a GPU's memory. There are three tables while a run goes on: of the round under way, the one it started from, and the one
# before, whose metrics are being written. So all take 3/8 at most; the data take up to 2/8 (`_placement`), and 3/8 are left for
# the model, the clients' work, the folds and the programs.
_RESIDENT_SHARE = 1 / 8
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
        _must_be_own(program, state)
        return state
    if vars(program).get("_forgets"):  # nothing to keep: known since its first round
        return state
    rows, aggregator, downlink = _beside(program, state)
    average: Any = ()
    if program.averaging is not None:
        if not hasattr(state, "params"):
            raise ValueError(
                f"averaging={program.averaging} is of state.params, which {type(program).__name__} has not: leave it out."
            )
        average = Average(state.params, jnp.float32(0))
    elif not jax.tree.leaves((rows, aggregator, downlink)):
        vars(program)["_forgets"] = True
        return state
    clients = ClientRows.empty(rows, data.num_clients) if jax.tree.leaves(rows) else ()
    return Remembered(state, clients, aggregator, downlink, average)


def _beside(program: FederatedProgram, state: State) -> tuple[Any, Any, Any]:
    """What lives beside a server's state at first: a client's row (shapes), the aggregator's memory, and the downlink's."""
    kept = vars(program).setdefault("_remembers", {})
    like = str(_layout(state))
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
    return kept[like]


def _must_be_own(program: FederatedProgram, state: Remembered) -> None:
    """Raises ``ValueError`` if ``state`` has other parts than this program's: another algorithm's, or another model's."""
    row: Any = ()
    if isinstance(state.clients, ClientRows):
        row = state.clients.store.like
    elif isinstance(state.clients, ClientTable):
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.clients.rows)
    there = state._replace(clients=row)
    leaves, structure = jax.tree.flatten(there)
    layout = structure, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
    known = vars(program).setdefault("_own", set())
    init = getattr(program, "init", None)  # Who only runs has none.
    if layout in known or init is None:
        return
    server = jax.eval_shape(init, jax.random.key(0))
    row, aggregator, downlink = _beside(program, server)
    average = Average(server.params, jnp.float32(0)) if program.averaging is not None and hasattr(server, "params") else ()
    here = Remembered(server, row if jax.tree.leaves(row) else (), aggregator, downlink, average)
    theirs, ours = _layout(there), _layout(here)
    if theirs != ours:
        name = next(name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name))
        raise ValueError(
            f"The state is not one of this {type(program).__name__}, but of another algorithm or model: it has "
            f"{theirs.get(name, 'nothing')} for {name}, and here that is {ours.get(name, 'nothing')}. Start with a state from "
            "init, or go on with what it was made by."
        )
    known.add(layout)


def _layout(state: Any) -> dict[str, str]:
    """Name, dtype and shape of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(np.shape(leaf))}" for path, leaf in leaves}


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

    On a device of its own a table is copied once a dispatch, at that memory's speed, and may take an eighth of it. On a CPU a
    copy of all costs more than moving the cohorts' rows, unless it is small.
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
