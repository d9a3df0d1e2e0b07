"""`Outline`: the calls of a round and the shapes of what clients send and keep, from a trace before anything is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng, tree
from fedsim.aggregators import Aggregator
from fedsim.data import Batches, FederatedData
from fedsim.execution._call import Call, CallShape, check_update, compressed_floats
from fedsim.execution._client import Client, ClientPlan, ClientUpdate, batch_loop
from fedsim.execution._clients import Clients, Row
from fedsim.execution._numbers import Numbers, with_numbers
from fedsim.execution._plan import Layout
from fedsim.execution._state import FederatedAlgorithm, FederatedState, RoundInfo, State

_LAYOUT = Layout(slots=1, devices=1)


class Outline(NamedTuple):
    """The calls of a round, and what is kept for them between rounds.

    Attributes:
      calls: in their order.
      row: the shapes of what one client keeps, see `FederatedState.clients`; () if nothing.
      aggregator: what the server keeps for the aggregators before the first round, see `FederatedState`.
      downlink: what the server keeps for the downlinks before the first round.
      sent: the shapes of what clients receive in the only call, if the algorithm has ``staleness``; else ().
    """

    calls: tuple[CallShape, ...]
    row: Any
    aggregator: dict[str, Any]
    downlink: dict[str, Any]
    sent: Any

    @property
    def shapes(self) -> dict[str, CallShape]:
        """The calls by name."""
        return {call.name: call for call in self.calls}

    @property
    def loops(self) -> list[Batches]:
        """The batches of every loop of a client, in all calls."""
        return [batches for call in self.calls for batches in call.batches]

    @property
    def state_bytes(self) -> int:
        """The size of the largest state of a client's loop."""
        return max((call.state_bytes for call in self.calls), default=0)


def outline(algorithm: FederatedAlgorithm, numbers: Numbers, state: State, data: FederatedData) -> Outline:
    """Traces a round with shapes instead of arrays, so nothing is computed.

    Args:
      algorithm: whose rounds run.
      numbers: replace the algorithm's numbers by traced ones, see `fedsim.execution._numbers.numbers_of`.
      state: a server's state, of arrays or ``jax.ShapeDtypeStruct``.
      data: the population.
    """
    columns = {
        name: jax.ShapeDtypeStruct((1, *c.shape[1:]), jax.dtypes.canonicalize_dtype(c.dtype))
        for name, c in data.columns.items()
    }
    seen: list[_TracedClients] = []

    def run(numbers: Numbers, server: State, columns: Any, packed: jax.Array, key: jax.Array) -> Any:
        traced = with_numbers(algorithm, numbers)
        seen.append(_TracedClients(traced, _LAYOUT.unpack(packed), key, FederatedState(server), columns, (), {}))
        return traced.round(server, seen[-1])[1]

    packed = jax.ShapeDtypeStruct(_LAYOUT.pack([], 1)[0].shape, np.int32)
    jax.eval_shape(run, numbers, state, columns, packed, jax.eval_shape(lambda: rng.root(0)))
    (clients,) = seen
    aggregator, downlink = map(_initial, (clients.aggregators, clients.downlinks))
    return Outline(tuple(clients.shapes.values()), clients.row, aggregator, downlink, clients.sent)


class _TracedClients(Clients):
    """Traces one client of every call and records shapes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.row: Any = ()
        self.sent: Any = ()
        self.aggregators: dict[str, tuple[Any, Any]] = {}
        self.downlinks: dict[str, tuple[Any, Any]] = {}
        self._client_memories: dict[str, Any] = {}

    def _begin(self, name: str, work: Callable[..., Any], shared: Any, aggregator: Aggregator | None, downlink: Any) -> Call:
        if downlink is not None:
            floats = compressed_floats(shared)
            if jax.tree.leaves(start := downlink.init(floats)):
                self.downlinks[name] = downlink, _shapes(floats)
                self.downlink_states[name] = start
        call = super()._begin(name, work, shared, aggregator, downlink)
        if self.algorithm.staleness is not None:
            self.sent = _shapes(call.shared)
        return call

    def _keep_sent(self, received: Any) -> None:
        pass  # nothing is kept yet

    def _row(self, call: Call, stored: Any) -> Row:
        return self.algorithm.client_memory(call.shared), dict(self._client_memories)

    def _aggregate(self, call: Call, work: Callable[..., ClientUpdate]) -> tuple[Any, RoundInfo, Any]:
        aggregator, fold, sent = call.aggregator, call.fold, []
        assert aggregator is not None and fold is not None

        @functools.wraps(work)
        def with_shapes(shared: Any, client: Client) -> ClientUpdate:
            result = work(shared, client)
            check_update(call.work_name, result)
            sent.append(_shapes(result.update))
            return result

        if any(
            getattr(type(aggregator), work_name) is not getattr(Aggregator, work_name)
            for work_name in ("init", "client_memory")
        ):

            def only_work(own: ClientPlan) -> None:
                with_shapes(call.shared, self.client(call, own, self.columns, self._row(call, ())))

            jax.eval_shape(only_work, _first(call.clients))
            if jax.tree.leaves(start := aggregator.client_memory(sent[0])):
                self._client_memories[call.name] = start
            if jax.tree.leaves(memory := aggregator.init(_zeros(sent[0]))):
                self.aggregators[call.name] = aggregator, sent[0]
                self.aggregator_states[call.name] = memory
                call = call._replace(aggregator_state=memory)
        arrived, entries, row = self._traced(call, functools.partial(self._update, with_shapes), lambda: sent[-1])
        if jax.tree.leaves(row):
            self.row = row
        return self._conclude(call, fold.zero(arrived, 1), entries)

    def _map(self, call: Call, work: Callable[..., Any]) -> Any:
        if call.rows is not None:
            shapes = [list(jnp.shape(x)) for x in jax.tree.leaves(call.rows.values)]
            lengths = {shape[0] if shape else None for shape in shapes}
            if len(lengths) != 1 or None in lengths:
                raise ValueError(
                    "Expected the rows of clients.map_rows to have leaves [clients, ...], an entry for each client of the "
                    f"population, got {shapes}."
                )
        return self._traced(call, functools.partial(self._result, work), lambda: ())[1]

    def _traced(self, call: Call, one: Callable[..., Any], sent: Callable[[], Any]) -> tuple[Any, Any, Any]:
        """Returns the shapes of what a client sends and stores, and zeros as the entries of all clients."""
        batches: list[Batches] = []
        state_bytes = 0

        def loop(of: Batches, num_steps: jax.Array, batch_at: Any, step: Any, state: Any) -> Any:
            nonlocal state_bytes
            batches.append(of)
            state_bytes = max(state_bytes, tree.num_bits(state) // 8)
            return batch_loop()(of, num_steps, batch_at, step, state)

        self.loop, plain = loop, self.loop
        arrived, entries, row = jax.eval_shape(
            lambda own: one(call, own, self.columns, self._row(call, ())), _first(call.clients)
        )
        self.loop = plain
        rows, loops = None if call.rows is None else call.rows.num_clients, tuple(batches)
        self.shapes[call.name] = CallShape(
            call.name, sent(), arrived, entries, call.aggregator, loops, state_bytes, rows, call.is_divisible
        )
        return arrived, jax.tree.map(lambda x: jnp.zeros((call.num_entries, *x.shape), x.dtype), entries), row


def _initial(keepers: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Returns the states of aggregators or downlinks before the first round."""
    return {name: keeper.init(_zeros(shapes)) for name, (keeper, shapes) in keepers.items()}


def _first(clients: ClientPlan) -> ClientPlan:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), clients)


def _shapes(value: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
