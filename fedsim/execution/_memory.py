"""What lives from round to round beside the server's own state: of the clients, the aggregator and the downlink."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedsim import rng, tree
from fedsim.aggregators import Aggregator
from fedsim.data import ClientRows, FederatedData
from fedsim.execution._contract import Average, ClientTable, FederatedProgram, Remembered, Shared, State, update_shape
from fedsim.execution._placement import Memory, replicate

_RESIDENT_BYTES_ON_CPU = 2**22
# Of a GPU's memory. There are up to four tables while a run goes on: of the round under way (two, between the programs of a
# long one), the one it started from, and the one before, whose metrics are being written. So all take 4/8 at most; the data
# take up to 2/8 (`_placement`), and 2/8 are left for the model, the clients' work, the folds and the programs.
_RESIDENT_SHARE = 1 / 8


class Turn(NamedTuple):
    """A phase, and where it comes among those of a round: what is kept for it, nobody else sees."""

    phase: FederatedProgram
    place: int
    of: int

    @property
    def last(self) -> bool:
        """Whether it is the algorithm itself."""
        return self.place == self.of - 1

    def key(self, root: jax.Array) -> jax.Array:
        """What it draws from: two phases alike would send the same noise, which cancels in their difference."""
        return root if self.last else rng.stream(root, f"phase {self.place}")

    def sees(self, parts: Remembered) -> Remembered:
        """What is its own of all that is kept, in the form that it has where there is but one phase."""
        clients, aggregator, downlink = parts.clients, parts.aggregator, parts.downlink
        if clients != ():
            clients = self.part(clients)
        if self.of > 1 and aggregator != ():
            aggregator, downlink = aggregator[self.place], downlink[self.place]
        return parts._replace(clients=clients, aggregator=aggregator, downlink=downlink)

    def part(self, table: ClientTable) -> ClientTable:
        """What is its own of a table of clients' rows."""
        if self.of == 1:
            return table
        *row, seen = table.rows[self.place]
        return ClientTable(tuple(row), seen)

    def leaves(self, parts: Remembered, own: Remembered) -> Remembered:
        """``parts`` after this phase, for which ``own`` is now what it `sees`."""
        clients, aggregator, downlink = own.clients, own.aggregator, own.downlink
        if self.of > 1 and clients != ():
            rows = self._put(parts.clients.rows, (*clients.rows, clients.seen))
            clients = ClientTable(rows, parts.clients.seen | clients.seen)
        if self.of > 1 and parts.aggregator != ():
            aggregator, downlink = self._put(parts.aggregator, aggregator), self._put(parts.downlink, downlink)
        return own._replace(clients=clients, aggregator=aggregator, downlink=downlink)

    def _put(self, entries: tuple[Any, ...], entry: Any) -> tuple[Any, ...]:
        return (*entries[: self.place], entry, *entries[self.place + 1 :])


def turns(program: FederatedProgram) -> list[Turn]:
    """The phases of a round in their order."""
    phases = program.phases
    return [Turn(phase, place, len(phases)) for place, phase in enumerate(phases)]


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
        rows, *of_server = zip(*(_beginning(phase, state) for phase in program.phases), strict=True)
        if len(rows) > 1:
            flag = jax.ShapeDtypeStruct((), np.bool_)
            kept[like] = (tuple((*row, flag) for row in rows) if jax.tree.leaves(rows) else ()), *of_server
        else:
            kept[like] = rows[0], *(entries[0] for entries in of_server)
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
    must_be_alike(program, there, here)
    known.add(layout)


def must_be_alike(program: FederatedProgram, there: Any, here: Any) -> None:
    """Raises ``ValueError`` unless what a state holds has names, shapes and dtypes of what is this program's."""
    theirs, ours = _layout(there), _layout(here)
    if theirs != ours:
        name = next(name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name))
        raise ValueError(
            f"The state is not one of this {type(program).__name__}, but of another algorithm or model: it has "
            f"{theirs.get(name, 'nothing')} for {name}, and here that is {ours.get(name, 'nothing')}. Start with a state from "
            "init, or go on with what it was made by."
        )


def _layout(state: Any) -> dict[str, str]:
    """Name, dtype and shape of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(np.shape(leaf))}" for path, leaf in leaves}


def _beginning(phase: FederatedProgram, state: State) -> tuple[Any, Any, Any]:
    """The shapes of a client's row, and what the server keeps for the aggregator and the downlink before the first round."""
    row = jax.eval_shape(lambda server: phase.client_memory(phase.broadcast(server)), state)
    of_aggregator: Any = ()
    aggregator: Any = ()
    downlink: Any = ()
    # What keeps nothing is not asked for shapes of updates: in `Debug`, hooks want to see arrays.
    if any(getattr(type(phase.aggregator), hook) is not getattr(Aggregator, hook) for hook in ("init", "client_memory")):
        update = update_shape(phase, jax.eval_shape(phase.broadcast, state))
        of_aggregator = jax.eval_shape(phase.aggregator.client_memory, update)
        aggregator = phase.aggregator.init(_zeros(update))
    if phase.downlink is not None:
        downlink = phase.downlink.init(_zeros(_floats(jax.eval_shape(phase.broadcast, state))))
    return (row, of_aggregator), aggregator, downlink


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


def without_clients(state: State) -> tuple[State, Any]:
    """A state without what clients keep, and that; () if they keep nothing."""
    clients = split(state).clients
    return (state, ()) if clients == () else (state._replace(clients=()), clients)


def with_clients(state: State, clients: Any) -> State:
    """The inverse of `without_clients`."""
    return state if clients == () else state._replace(clients=clients)


def down(program: FederatedProgram, shared: Shared, memory: Any, key: jax.Array) -> tuple[Shared, Any, jax.Array]:
    """What clients receive of ``shared``, the sender's memory, and the size of the message (see `fedsim.tree.bits_dtype`)."""
    plain = tree.num_bits(shared)
    if program.downlink is None:
        return shared, memory, tree.add_bits(plain, most=plain)
    floats = _floats(shared)
    sent = program.downlink.transmit(floats, key, memory)
    received = iter(sent.value)
    shared = with_params(shared, jax.tree.map(lambda x: next(received) if tree.is_float(x) else x, _params(shared)))
    return shared, sent.memory, tree.add_bits(sent.bits, plain - tree.num_bits(floats), most=plain)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _floats(shared: Shared) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(_params(shared)) if tree.is_float(leaf)]


def _params(shared: Shared) -> Any:
    """What a compressor may change: not the strengths, weights and statistics that an algorithm sends beside parameters."""
    return getattr(shared, "params", shared)


def with_params(shared: Any, params: Any) -> Any:
    """A named tuple or dataclass with these in the place of its ``params``; of anything else, these."""
    if not hasattr(shared, "params"):
        return params
    return (getattr(shared, "_replace", None) or functools.partial(dataclasses.replace, shared))(params=params)


def placed(state: State, mesh: Mesh, memory: Memory) -> State:
    """``state`` with what clients keep where it is to be: a `ClientTable` of everybody on every device, or `ClientRows`.

    On a device of its own a table is copied once a dispatch, at that memory's speed, and may take an eighth of it. On a CPU a
    copy of all costs more than moving the cohorts' rows, unless it is small.
    """
    clients = split(state).clients
    if clients == ():
        return state
    if memory == "stream" or (memory == "auto" and isinstance(clients, ClientRows) and not _is_small(clients, mesh)):
        return state._replace(clients=_rows(clients))
    if isinstance(clients, ClientRows):
        clients = ClientTable(*clients.gather(np.arange(len(clients.index))))
    return state._replace(clients=replicate(clients, mesh))


def _is_small(clients: ClientRows, mesh: Mesh) -> bool:
    table_bytes, device = clients.store.row_bytes * len(clients.index), mesh.devices.flat[0]
    if device.platform == "cpu":
        return table_bytes <= _RESIDENT_BYTES_ON_CPU
    return table_bytes <= _RESIDENT_SHARE * (device.memory_stats() or {}).get("bytes_limit", 8 * 2**30)


def _rows(clients: ClientRows | ClientTable) -> ClientRows:
    if isinstance(clients, ClientRows):
        return clients
    seen = np.asarray(clients.seen)
    empty = ClientRows.empty(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), clients.rows), len(seen))
    return empty.written(np.arange(len(seen)), clients.rows, seen)
