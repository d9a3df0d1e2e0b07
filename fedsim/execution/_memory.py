"""The memories of clients, aggregators and downlinks: their initial values, their checks, and where they are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedsim import distributed
from fedsim.data import ClientRows, FederatedData
from fedsim.execution._placement import Memory, memory_limit, moved, shardings_of
from fedsim.execution._traced_rounds import traced_rounds
from fedsim.model import WHOLE, Division
from fedsim.rounds import (
    Average,
    ClientTable,
    FederatedAlgorithm,
    FederatedState,
    RoundPlan,
    RoundProgram,
    State,
    form_of,
    kept_with,
    parts_of,
    server_state,
)

_RESIDENT_BYTES_ON_CPU = 2**22
# While rounds run there are up to four tables: two of the current round, that of the state before the dispatch, and that of the
# dispatch whose metrics are being written. So tables take at most half of a GPU's memory. The examples take at most a quarter,
# and a quarter remains for everything else.
_RESIDENT_SHARE = 1 / 8


def remembered(algorithm: FederatedAlgorithm, state: State, data: FederatedData) -> State:
    """Adds the memories of clients, aggregators and the downlink to a server's state.

    Args:
      algorithm: the algorithm to run.
      state: a server's state, or a `FederatedState`, which is checked and returned as it is.
      data: the population.

    Returns:
      A `FederatedState`, or ``state`` itself if there are no memories.

    Raises:
      ValueError: the state belongs to another population, algorithm or model, or the algorithm has ``averaging`` and the
        server's state no ``params``, or ``params`` in half precision, which an algorithm that accumulates refuses, too.

    >>> import optax, fedsim
    >>> data, model = fedsim.datasets.load("digits(clients=5)").train, fedsim.models.digits_logistic()
    >>> algorithm = fedsim.algorithms.SCAFFOLD(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> state = remembered(algorithm, algorithm.init(jax.random.key(0)), data)
    >>> type(state).__name__, num_remembered(state.clients)
    ('FederatedState', 5)
    """
    kept = kept_with(algorithm)
    known_forms = kept.setdefault("forms of states", set())
    if isinstance(state, FederatedState) and not _is_from_init(state):
        if state.clients != () and (known := num_remembered(state.clients)) != data.num_clients:
            raise ValueError(
                f"Expected a state with the memories of {data.num_clients} clients, as many as the population has, got one of "
                f"{known} clients: start with a state from init."
            )
        given = state._replace(clients=row_shapes(state.clients) if state.clients != () else ())
        if (form := form_of(given)) not in known_forms:
            server = jax.eval_shape(algorithm.init, jax.random.key(0))
            first = _first(algorithm, server_state(server), traced_rounds(algorithm, server, data)[0].trace())
            check_alike(algorithm, given, first._replace(parts=parts_of(server).parts))
            known_forms.add(form)
        return state
    if kept.get("remembers nothing"):
        return state
    state, parts = server_state(state), parts_of(state).parts
    if parts == () and (expected := jax.eval_shape(algorithm.model_parts, jax.random.key(0))) != ():
        names = [name for name, part in zip(expected._fields, expected, strict=True) if part != ()]
        raise ValueError(
            f"Expected a state with all parts of the model, got one without {', '.join(names)}: start with a state from init."
        )
    if algorithm.averaging is not None and not hasattr(state, "params"):
        raise ValueError(
            f"averaging={algorithm.averaging} averages state.params, but the state of {type(algorithm).__name__} has no "
            "params: set averaging=None."
        )
    if algorithm.averaging is not None and (half := _half_precision(state.params)):
        raise ValueError(
            f"averaging={algorithm.averaging} needs parameters of at least float32, got {half} in the state of "
            f"{type(algorithm).__name__}: an average of that precision does not change by small steps. Give the model float32 "
            "parameters, with which Model.with_precision computes in half precision, or set averaging=None."
        )
    if algorithm.capabilities.accumulates and (half := _half_precision(getattr(state, "params", ()))):
        raise ValueError(
            f"{type(algorithm).__name__} needs parameters of at least float32, got {half}: it keeps sums over rounds, which in "
            "that precision would lose small terms. Give the model float32 parameters, with which Model.with_precision "
            "computes in half precision."
        )
    first = _first(algorithm, state, traced_rounds(algorithm, state, data)[0].trace())._replace(parts=parts)
    if not jax.tree.leaves(first._replace(server=())):
        kept["remembers nothing"] = True
        return state
    known_forms.add(form_of(first))
    return first._replace(clients=ClientRows.empty(first.clients, data.num_clients) if first.clients != () else ())


def _is_from_init(state: FederatedState) -> bool:
    """Returns whether a state has the server's state and the parts of the model alone, and memories are still to be added."""
    return state.parts != () and state.clients == () and not jax.tree.leaves(state._replace(server=(), parts=()))


def _half_precision(params: Any) -> str:
    """Returns the dtype of the first parameters in half precision, "" if there are none."""
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(params)]
    return next((str(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4), "")


def _first(algorithm: FederatedAlgorithm, server: State, program: RoundProgram) -> FederatedState:
    """Returns the state before the first round, with the shapes of one client's row instead of all rows."""
    average = Average(server.params, jnp.float32(0)) if algorithm.averaging is not None and hasattr(server, "params") else ()
    return program.first._replace(server=server, average=average)


def check_alike(algorithm: Any, given: Any, expected: Any) -> None:
    """Raises ``ValueError`` unless two states have leaves of the same names, shapes and dtypes.

    Args:
      algorithm: which the error names.
      given, expected: the states, pytrees of arrays or ``jax.ShapeDtypeStruct``.

    >>> import fedsim
    >>> histogram = fedsim.algorithms.Histogram(bins=2)
    >>> check_alike(histogram, {"w": jnp.zeros(3)}, {"w": jnp.zeros(4)})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: The state is not one of this Histogram, ...: it has float32[3] for ['w'], expected float32[4]. ...
    """
    theirs, ours = (
        {
            jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(np.shape(leaf))}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        for state in (given, expected)
    )
    if theirs != ours:
        name = next(name for name in [*ours, *theirs] if ours.get(name) != theirs.get(name))
        raise ValueError(
            f"The state is not one of this {type(algorithm).__name__}, but of another algorithm or model: it has "
            f"{theirs.get(name, 'nothing')} for {name}, expected {ours.get(name, 'nothing')}. Start with a state from init, or "
            "use the algorithm that made the state."
        )


def num_remembered(clients: ClientRows | ClientTable) -> int:
    """Returns the number of clients of the population that these memories belong to.

    >>> num_remembered(ClientTable(rows={"w": jnp.zeros([5, 2])}, seen=jnp.zeros(5, bool)))
    5
    """
    return len(clients.index if isinstance(clients, ClientRows) else clients.seen)


def row_shapes(clients: ClientRows | ClientTable) -> Any:
    """Returns the shapes and dtypes of one client's row, as ``jax.ShapeDtypeStruct``.

    >>> row_shapes(ClientTable(rows={"w": jnp.zeros([5, 2])}, seen=jnp.zeros(5, bool)))["w"].shape
    (2,)
    """
    if isinstance(clients, ClientRows):
        return clients.store.like
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), clients.rows)


def placed(state: State, mesh: Mesh, memory: Memory, division: Division = WHOLE) -> State:
    """Moves the clients' memories to where they are used: a `ClientTable` on every device, or `ClientRows` on the host.

    A table is copied once per dispatch. On a GPU or TPU this is fast, and the table may take an eighth of the memory. On a CPU
    it takes longer than moving the rows of a cohort, unless the table is small.

    Args:
      state: a server's state or a `FederatedState`.
      mesh: the devices.
      memory: ``"resident"`` moves them to the devices, ``"stream"`` to the host. ``"auto"`` moves them to the devices if they
        are small, and leaves them there if they are there. With the devices of several processes it moves them to the host,
        where each process keeps those of its own clients only.
      division: how the model is divided over devices, and memories like it.

    >>> import fedsim
    >>> memories = ClientRows.empty({"w": jax.ShapeDtypeStruct((2,), np.float32)}, num_clients=5)
    >>> on_device = placed(FederatedState((), memories), fedsim.Jit().mesh(), "resident").clients
    >>> type(on_device).__name__, on_device.rows["w"].shape, on_device.seen.tolist()
    ('ClientTable', (5, 2), [False, False, False, False, False])
    """
    clients = parts_of(state).clients
    if clients == ():
        return state
    if isinstance(clients, ClientRows):
        if stay_on_host(clients, mesh, memory):
            return state
        clients = ClientTable(*clients.gather_from_owners(np.arange(len(clients.index))))
    elif memory == "stream" or (memory == "auto" and mesh.is_multi_process):
        everyone = np.arange(num_remembered(clients))
        empty = ClientRows.empty(row_shapes(clients), len(everyone))
        return state._replace(clients=_with_own(empty, everyone, *distributed.on_host(tuple(clients))))
    return state._replace(clients=moved(clients, shardings_of(clients, mesh, division=division)))


def stay_on_host(clients: ClientRows, mesh: Mesh, memory: Memory) -> bool:
    """Returns whether clients' memories stay on the host, from which the rows of each cohort are gathered."""
    device, table_bytes = mesh.devices.flat[0], clients.store.row_bytes * len(clients.index)
    limit = _RESIDENT_BYTES_ON_CPU if device.platform == "cpu" else _RESIDENT_SHARE * memory_limit(device)
    return memory == "stream" or (memory == "auto" and (mesh.is_multi_process or table_bytes > limit))


def gathered(
    clients: ClientRows, plan: RoundPlan, count: int, mesh: Mesh, division: Division = WHOLE
) -> tuple[ClientTable, RoundPlan]:
    """Gathers the rows of a cohort of ``count`` clients into a table on the devices; returns it and a plan for this table."""
    slots = len(plan.client)
    table = ClientTable(*clients.gather_from_owners(plan.client[:count].astype(np.int64), slots))
    memory = np.where(np.arange(slots) < count, np.arange(slots), slots).astype(np.int32)
    return moved(table, shardings_of(table, mesh, division=division)), plan._replace(memory=memory)


def written_back(clients: ClientRows, table: Any, plan: RoundPlan, count: int) -> ClientRows:
    """Waits for the round, and writes the table that was `gathered` back, each process the rows of its own clients."""
    return _with_own(clients, plan.client[:count].astype(np.int64), *distributed.on_host(tuple(table)))


def _with_own(clients: ClientRows, positions: np.ndarray, rows: Any, seen: np.ndarray) -> ClientRows:
    """Writes the rows ``[>= n, ...]`` of the clients at these positions ``[n]`` that are seen, and that this process keeps."""
    is_own = distributed.owners(positions) == jax.process_index()
    return clients.written(positions, rows, seen[: len(positions)] & is_own)
