"""`trace_round`: a round as one value, `RoundProgram`, which execution compiles and everything else reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var, jaxpr_as_fun
from jax.sharding import Mesh

from fedsim import rng, tree
from fedsim.aggregators import Aggregator
from fedsim.attacks import Attack
from fedsim.data import Batch, Batches, Cohort
from fedsim.execution._call import Call, compressed_floats
from fedsim.execution._client import ClientPlan, ClientUpdate, Step, batch_loop
from fedsim.execution._clients import Clients
from fedsim.execution._numbers import Numbers, with_numbers
from fedsim.execution._plan import RoundPlan
from fedsim.execution._state import (
    Average,
    ClientTable,
    FederatedAlgorithm,
    FederatedState,
    RoundInfo,
    Shared,
    State,
    new_average,
)
from fedsim.primitives._loop import strong

# A value that the round gets from outside once its shape is known, such as what a client kept for an aggregator, whose shape
# follows from the update. After the trace it is an argument.
_input_p = Primitive("round_input")
_input_p.multiple_results = True
_input_p.def_abstract_eval(lambda *, name, avals: list(avals))

# One call of the clients. Execution runs it, so it has no implementation.
_call_p = Primitive("call_clients")
_call_p.multiple_results = True
_call_p.def_abstract_eval(lambda *operands, call: call.result_avals)


class TraceOptions(NamedTuple):
    """What a trace depends on besides the algorithm, its numbers, the state and the columns of the data.

    Attributes:
      slots: the largest number of clients.
      rows: the number of rows of the columns that a client reads.
      attack: the attack on the cohorts.
      most_examples: the most examples of a client, which reverse-mode derivatives need; else None.
      axis: the name and the size of the axis of devices that run the round together; None for a single device.
      rows_mesh: the devices that the rows of `Clients.map_rows` are divided over; None if they are on every device.
      key: the dtype of the root key; None for that of `fedsim.rng.root`.
    """

    slots: int
    rows: int
    attack: Attack | None = None
    most_examples: int | None = None
    axis: tuple[str, int] | None = None
    rows_mesh: Mesh | None = None
    key: Any = None


class Closed:
    """A traced function whose values from outside are arguments.

    Args:
      function: the function, which returns a pytree of arrays.
      *args: its arguments, or their shapes and dtypes.

    Attributes:
      consts: the values from outside, at the time of the trace.
      inputs: the names of the values that the function asked for by `_input`, in order.
      shapes: of what the function returns.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        traced, self.shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        self.consts = traced.consts
        self.inputs, self._jaxpr = _with_inputs(traced.jaxpr)

    def __call__(self, consts: Sequence[Any], inputs: Mapping[str, Any], *args: Any) -> Any:
        """Returns what the function returns, for these values from outside, inputs by name, and arguments."""
        given = jax.tree.leaves([inputs[name] for name in self.inputs])
        results = jaxpr_as_fun(ClosedJaxpr(self._jaxpr, []))(*consts, *jax.tree.leaves(args), *given)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


def _input(name: str, like: Any) -> Any:
    """Returns a value like ``like``, which whoever runs the trace gives under this name."""
    leaves, structure = jax.tree.flatten(like)
    avals = tuple(_aval(x) for x in leaves)
    return jax.tree.unflatten(structure, _input_p.bind(name=name, avals=avals))


def _with_inputs(jaxpr: Jaxpr) -> tuple[list[str], Jaxpr]:
    """Makes the values of `_input`, and constants, arguments of a jaxpr; returns the names of the former in order."""
    asked = [equation for equation in jaxpr.eqns if equation.primitive is _input_p]
    added = [var for equation in asked for var in equation.outvars]
    rest = [equation for equation in jaxpr.eqns if equation.primitive is not _input_p]
    whole = Jaxpr([], [*jaxpr.constvars, *jaxpr.invars, *added], jaxpr.outvars, rest, jaxpr.effects, jaxpr.debug_info)
    return [equation.params["name"] for equation in asked], whole


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """A loop over a client's batches.

    Attributes:
      batches: how the examples are cut into batches.
      purpose: see `Client.for_each_batch`.
      jaxpr: one step, a function of ``constants``, the state and the batch.
      constants: the shapes of the values that the step reads besides its arguments.
      state: the shapes of the loop's state.
    """

    batches: Batches
    purpose: str | None
    jaxpr: Jaxpr
    constants: list[jax.ShapeDtypeStruct]
    state: Any

    def step(self, constants: Sequence[Any], state: Any, batch: Batch) -> Any:
        """Takes one step."""
        results = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, list(constants)))(*jax.tree.leaves((state, batch)))
        return jax.tree.unflatten(jax.tree.structure(self.state), results)

    def num_steps(self, cohort: Cohort, training: Batches) -> np.ndarray:
        """Returns the number of steps of each client, ``int64 [n]``; only stragglers' loops for training stop early."""
        steps = self.batches.num_steps(cohort.sizes)
        return steps if self.purpose is not None or cohort.work is None else np.minimum(steps, cohort.num_steps(training))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TracedCall:
    """A call of `Clients.aggregate`, `Clients.map` or `Clients.map_rows` in a traced round.

    Attributes:
      name: unique in the round.
      shared: the shapes of what clients receive.
      downlink: compresses it; None sends it as it is.
      update: the shapes of what a client sends; () for `Clients.map`.
      arrived: the shapes of what the server receives of it.
      entries: the shapes of what a client adds to the round's info; for `Clients.map` those of its result.
      num_entries: the number of clients that have a place among the entries.
      aggregator: of the call; None for `Clients.map`.
      first_memory: what a client keeps for the aggregator before its first round.
      loops: a client's loops.
      rows: the number of rows of `Clients.map_rows`; None for the other calls.
      is_divisible: whether the rows may be divided over devices.
      work: one client's work, ``(ClientPlan, columns) -> (arrived, entries, memory, memory for the aggregator)``. Its inputs
        are among ``seen`` (whether the client has kept something), ``memory``, ``aggregator memory``, ``server memory`` (of the
        aggregator), and ``row`` (of `Clients.map_rows`).
      zero: returns an empty accumulator; None for `Clients.map`, as the next two.
      accumulate: ``(accumulator, arrived, weight, slot) -> accumulator``.
      merge: ``(accumulator, accumulator) -> accumulator``.
      operands: the structure of the operands, `Operands`.
    """

    name: str
    shared: Any
    downlink: Any
    update: Any
    arrived: Any
    entries: Any
    num_entries: int
    aggregator: Aggregator | None
    first_memory: Any
    loops: tuple[Loop, ...]
    rows: int | None
    is_divisible: bool
    work: Closed
    zero: Closed | None
    accumulate: Closed | None
    merge: Closed | None
    operands: Any

    @property
    def batches(self) -> tuple[Batches, ...]:
        """The batches of each loop of a client."""
        return tuple(loop.batches for loop in self.loops)

    @property
    def results(self) -> Any:
        """The shapes of the results of the call: the accumulator with all updates, and the entries of all clients."""
        entries = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.num_entries, *x.shape), x.dtype), self.entries)
        return (() if self.zero is None else self.zero.shapes), entries

    @property
    def result_avals(self) -> list[Any]:
        return [_aval(x) for x in jax.tree.leaves(self.results)]

    def run(
        self, shared: tuple[Sequence[Any], Any], client: tuple[ClientPlan, Any, Any, Any], first_memories: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Runs one client.

        Args:
          shared: what all clients get: the values from outside of ``work``, and what the server keeps for the aggregator.
          client: what is known of the client; the columns that have its examples; its row in a call of `Clients.map_rows`, else
            (); and its row of the table of memories, a `ClientTable`, () without one.
          first_memories: ``first_memory`` of each call of the round.

        Returns:
          What arrives of its update, () for `Clients.map`; its entries; and its new row of the table, or ``stored``.
        """
        (consts, server_memory), (own, columns, row, stored) = shared, client
        inputs: dict[str, Any] = {"row": row, "server memory": server_memory}
        if isinstance(stored, ClientTable):
            memory, by_call = stored.rows
            inputs |= {"seen": stored.seen, "memory": memory, "aggregator memory": by_call.get(self.name, ())}
        results = self.work(consts, inputs, own, columns)
        if self.aggregator is None:
            return (), results, stored
        arrived, entries, memory, aggregator_memory = results
        if not isinstance(stored, ClientTable):
            return arrived, entries, stored
        # A client that keeps something for the first time has kept for other calls what it had before its first round.
        others = tree.select(stored.seen, by_call, {name: first_memories[name] for name in by_call})
        new = memory, {name: aggregator_memory if name == self.name else kept for name, kept in others.items()}
        counts = entries["weight"] != 0
        return arrived, entries, ClientTable(tree.select(counts, new, stored.rows), stored.seen | counts)

    def add_all(self, operands: Operands, accumulator: Any, updates: tuple[Any, jax.Array, jax.Array]) -> Any:
        """Adds updates ``[n, ...]`` with their weights and slots ``[n]`` to an accumulator, one after another."""
        assert self.accumulate is not None
        add = functools.partial(self.accumulate, operands.accumulate, {})
        return jax.lax.scan(lambda total, one: (add(total, *one), None), accumulator, updates)[0]


class Operands(NamedTuple):
    """What execution gets for a call.

    Attributes:
      clients: `ClientPlan`, leaves ``[slots, ...]``.
      server_memory: what the server keeps for the aggregator.
      rows: the clients' own values, for `Clients.map_rows`; else ().
      work, zero, accumulate, merge: the values from outside of each of these functions of the call.
    """

    clients: ClientPlan
    server_memory: Any
    rows: Any
    work: Sequence[Any]
    zero: Sequence[Any]
    accumulate: Sequence[Any]
    merge: Sequence[Any]


Values = dict[Var, Any]
# (the call, its operands) -> its results: the accumulator and the entries.
RunCall = Callable[[TracedCall, Operands], tuple[Any, Any]]


class RoundProgram:
    """A traced round: pieces of the server's computation, and the call of the clients between each two of them.

    `run` runs all of it. A long round runs piece by piece: ``values = start(...)``, then ``advance(values)`` runs the server up
    to the next call, whose results are given to ``put(values, call, results)``.

    Args:
      jaxpr: the round as a jaxpr of numbers, state, key and plan, with an equation for each call.
      shapes: of the results, the state and the info.
      batches: the algorithm's.
      first: the state before the first round, without what ``init`` returns and without an average. Its ``clients`` are the
        shapes of one client's row, () if clients keep nothing.

    Attributes:
      calls: the calls in their order.
    """

    def __init__(self, jaxpr: ClosedJaxpr, shapes: Any, batches: Batches, first: FederatedState) -> None:
        self.batches, self.first, self._shapes = batches, first, shapes
        self._inputs, self._jaxpr = _with_inputs(jaxpr.jaxpr)
        self._consts = jaxpr.consts
        self._equations = [equation for equation in self._jaxpr.eqns if equation.primitive is _call_p]
        self.calls: tuple[TracedCall, ...] = tuple(equation.params["call"] for equation in self._equations)

    @property
    def info_shapes(self) -> Any:
        """The shapes of the info of a round."""
        return self._shapes[1]

    @property
    def loops(self) -> list[Batches]:
        """The batches of every loop of a client, in all calls."""
        return [batches for call in self.calls for batches in call.batches]

    @property
    def state_bytes(self) -> int:
        """The size of the largest state of a client's loop."""
        return max((tree.num_bits(loop.state) // 8 for call in self.calls for loop in call.loops), default=0)

    @property
    def first_memories(self) -> dict[str, Any]:
        """What a client keeps for the aggregator of each call before its first round, by the name of the call."""
        return {call.name: call.first_memory for call in self.calls}

    def run(self, numbers: Numbers, state: FederatedState, key: jax.Array, plan: RoundPlan, run_call: RunCall) -> Any:
        """Returns the state and the info after the round.

        Args:
          numbers: the algorithm's numbers.
          state: the state before the round; its ``clients`` are not read.
          key: the run's root key.
          plan: the plan of the round.
          run_call: runs the clients.
        """
        values = self.start(numbers, state, key, plan)
        for number, call in enumerate(self.calls):
            self.advance(number, values)
            self.put(number, values, run_call(call, self.operands(number, values)))
        self.advance(len(self.calls), values)
        return self.results(values)

    def start(self, numbers: Numbers, state: FederatedState, key: jax.Array, plan: RoundPlan) -> Values:
        """Returns the values of the arguments."""
        args = jax.tree.leaves((numbers, state.server, key, plan.of_clients()))
        kept = {"past": state.past, "average": state.average}
        kept |= {f"aggregator {name}": memory for name, memory in state.aggregator.items()}
        kept |= {f"downlink {name}": memory for name, memory in state.downlink.items()}
        inputs = jax.tree.leaves([kept[name] for name in self._inputs])
        return dict(zip(self._jaxpr.invars, [*self._consts, *args, *inputs], strict=True))

    def advance(self, number: int, values: Values) -> None:
        """Runs the server up to a call, or after the last call to the end."""
        piece = self._pieces[number]
        results = jaxpr_as_fun(ClosedJaxpr(piece, []))(*[values[var] for var in piece.invars])
        values |= dict(zip(_variables(piece.outvars), results, strict=True))

    def operands(self, number: int, values: Values) -> Operands:
        """Returns the operands of a call that `advance` has reached."""
        leaves = [_read(values, x) for x in self._equations[number].invars]
        return jax.tree.unflatten(self.calls[number].operands, leaves)

    def put(self, number: int, values: Values, results: tuple[Any, Any]) -> None:
        """Stores the results of a call."""
        values |= dict(zip(self._equations[number].outvars, jax.tree.leaves(results), strict=True))

    def results(self, values: Values) -> tuple[FederatedState, Any]:
        """Returns the state and the info after the round, when the server has reached the end."""
        return jax.tree.unflatten(jax.tree.structure(self._shapes), [_read(values, x) for x in self._jaxpr.outvars])

    def kept(self, number: int, values: Values) -> list[Any]:
        """Returns the values at a call that later parts of the round need, without the arguments of the round."""
        return [values[var] for var in self._live[number]]

    def restored(self, number: int, values: Values, kept: Sequence[Any]) -> None:
        """Stores what `kept` returned."""
        values |= dict(zip(self._live[number], kept, strict=True))

    @functools.cached_property
    def _sections(self) -> list[list[Any]]:
        """The server's equations before each call and after the last one."""
        sections: list[list[Any]] = [[]]
        for equation in self._jaxpr.eqns:
            if equation.primitive is _call_p:
                sections.append([])
            else:
                sections[-1].append(equation)
        return sections

    @functools.cached_property
    def _needed(self) -> list[dict[Var, None]]:
        """The variables that the round reads from each call on, the call included, and at the end."""
        needed = dict.fromkeys(_variables(self._jaxpr.outvars))
        found = [needed]
        for section, call in zip(self._sections[:0:-1], self._equations[::-1], strict=True):
            needed = dict(needed)
            for equation in (call, *section):
                needed |= dict.fromkeys(_variables(equation.invars))
            found.append(needed)
        return found[::-1]

    @functools.cached_property
    def _pieces(self) -> list[Jaxpr]:
        pieces = []
        for section, needed in zip(self._sections, self._needed, strict=True):
            computed = dict.fromkeys(var for equation in section for var in equation.outvars)
            read = dict.fromkeys(var for equation in section for var in _variables(equation.invars))
            effects = set().union(*[equation.effects for equation in section])
            given, wanted = [var for var in read if var not in computed], [var for var in computed if var in needed]
            pieces.append(Jaxpr([], given, wanted, section, effects, self._jaxpr.debug_info))
        return pieces

    @functools.cached_property
    def _live(self) -> list[list[Var]]:
        """For each call, the variables that were computed before it and that the call or what follows reads."""
        known: set[Var] = set()
        live = []
        for number, equation in enumerate(self._equations):
            known.update(_variables(self._pieces[number].outvars))
            live.append([var for var in self._needed[number] if var in known])
            known.update(equation.outvars)
        return live


class _TracedClients(Clients):
    """Traces the work of a client in each call.

    Args:
      algorithm, plan, key: see `Clients`.
      columns: the shapes of the columns.
      options: see `TraceOptions`.

    Attributes:
      before: what the server keeps for aggregators and for downlinks, and what it sent in the last rounds, before this round.
      row: the shapes of what a client keeps, see `FederatedState.clients`.
    """

    def __init__(
        self, algorithm: FederatedAlgorithm, plan: RoundPlan, key: jax.Array, columns: Any, options: TraceOptions
    ) -> None:
        super().__init__(algorithm, plan, key, options.attack, options.axis and options.axis[0])
        self.columns, self.options, self.rows_mesh = columns, options, options.rows_mesh
        self.before = FederatedState((), (), {}, {})
        self._first: dict[tuple[str, str], tuple[Any, Any]] = {}  # what has a first state, and the shapes that determine it
        self._sent: Any = ()
        self._memory: Any = ()
        self._aggregator_memories: dict[str, Any] = {}
        self.loop = self._recorded_loop
        self._loops: list[Loop] = []

    @property
    def row(self) -> Any:
        row = self._memory, self._aggregator_memories
        return tree.shapes(row) if jax.tree.leaves(row) else ()

    def first(self) -> FederatedState:
        """Returns the state before the first round, see `RoundProgram`, with shapes of a client's row."""
        states: dict[str, dict[str, Any]] = {"aggregator": {}, "downlink": {}}
        for (kind, name), (keeper, like) in self._first.items():
            states[kind][name] = keeper.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))
        past = () if self.algorithm.staleness is None else self.algorithm.staleness.first(self._sent)
        return FederatedState((), self.row, states["aggregator"], states["downlink"], (), past)

    def _downlink_memory(self, name: str, downlink: Any, shared: Shared) -> Any:
        floats = compressed_floats(shared)
        memory = jax.eval_shape(downlink.init, floats)
        if not jax.tree.leaves(memory):
            return ()
        self._first["downlink", name] = downlink, tree.shapes(floats)
        return self._kept_by_server("downlink", name, memory)

    def _kept_by_server(self, kind: str, name: str, like: Any) -> Any:
        memory = _input(f"{kind} {name}", like)
        getattr(self.before, kind)[name] = memory
        return memory

    def _keep_sent(self, received: Shared) -> None:
        staleness = self.algorithm.staleness
        assert staleness is not None
        self._sent = tree.shapes(received)
        past = _input("past", jax.eval_shape(staleness.first, self._sent))
        self.before = self.before._replace(past=past)
        self.past = staleness.kept(past, received, self.plan.round)

    def _aggregate(self, call: Call, work: Callable[..., ClientUpdate]) -> Any:
        fold, aggregator = call.fold, call.aggregator
        assert fold is not None and aggregator is not None

        update: Any = ()

        def of_client(own: ClientPlan, columns: Any) -> Any:
            nonlocal update
            *results, sent = self.update_of(call, work, own, columns, _kept)
            update = tree.shapes(sent)
            return tuple(results)

        one = self._closed(of_client, call)
        arrived, entries, self._memory, aggregator_memory = one.shapes
        if jax.tree.leaves(aggregator_memory):
            self._aggregator_memories[call.name] = aggregator_memory
        slots, axis = self.options.slots, self.axis
        zero = Closed(lambda: fold.zero(arrived, slots) if axis is None else fold.zero_devices(arrived, slots, axis))
        weight, slot = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.int32)
        accumulate = Closed(fold.accumulate, zero.shapes, arrived, weight, slot)
        merge = Closed(fold.merge, zero.shapes, zero.shapes)
        memory: Any = ()
        if "server memory" in one.inputs:
            like = jax.eval_shape(aggregator.init, update)
            self._first["aggregator", call.name] = aggregator, update
            memory = self._kept_by_server("aggregator", call.name, like)
        with jax.ensure_compile_time_eval():
            first_memory = aggregator.client_memory(update)
        folded, found = self._bind(call, one, memory, update, arrived, entries, first_memory, zero, accumulate, merge)
        return self._conclude(call, update, folded, memory, found)

    def _map(self, call: Call, work: Callable[..., Any]) -> Any:
        row = None if call.rows is None else jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), call.rows)

        def of_client(own: ClientPlan, columns: Any) -> Any:
            return self.result_of(call, work, own, columns, _kept, None if row is None else _input("row", row))

        one = self._closed(of_client, call)
        return self._bind(call, one, (), (), (), one.shapes)[1]

    def _closed(self, of_client: Callable[..., Any], call: Call) -> Closed:
        self._loops = []
        own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), call.clients)
        return Closed(of_client, own, self.columns)

    def _bind(
        self, call: Call, work: Closed, memory: Any, update: Any, arrived: Any, entries: Any, first_memory: Any = (),
        *fold: Closed,
    ) -> tuple[Any, Any]:  # fmt: skip
        zero, accumulate, merge = fold or (None, None, None)
        consts = [() if part is None else part.consts for part in (work, zero, accumulate, merge)]
        operands, structure = jax.tree.flatten(
            Operands(call.clients, memory, call.rows if call.rows is not None else (), *consts)
        )
        traced = TracedCall(
            name=call.name,
            shared=tree.shapes(call.shared),
            downlink=call.downlink,
            update=update,
            arrived=arrived,
            entries=entries,
            num_entries=call.num_entries,
            aggregator=call.aggregator,
            first_memory=first_memory,
            loops=tuple(self._loops),
            rows=None if call.rows is None else call.num_entries,
            is_divisible=call.is_divisible,
            work=work,
            zero=zero,
            accumulate=accumulate,
            merge=merge,
            operands=structure,
        )
        results = _call_p.bind(*map(jnp.asarray, operands), call=traced)
        return jax.tree.unflatten(jax.tree.structure(traced.results), results)

    def _recorded_loop(
        self, batches: Batches, purpose: str | None, num_steps: jax.Array, batch_at: Callable[[jax.Array], Batch], step: Step,
        state: Any,
    ) -> Any:  # fmt: skip
        """Runs a loop in the trace of a client, and records it."""
        state = jax.tree.map(strong, state)
        batch = jax.eval_shape(batch_at, jnp.int32(0))
        traced, after = jax.make_jaxpr(step, return_shape=True)(state, batch)
        self._loops.append(Loop(batches, purpose, traced.jaxpr, tree.shapes(traced.consts), tree.shapes(state)))
        structure = jax.tree.structure(after)

        def run(state: Any, batch: Batch) -> Any:
            return jax.tree.unflatten(structure, jaxpr_as_fun(traced)(*jax.tree.leaves((state, batch))))

        return batch_loop(self.options.most_examples)(batches, purpose, num_steps, batch_at, run, state)


def _kept(name: str, start: Any) -> Any:
    """Returns what was kept under this name as an input of the trace, and ``start`` for a client that has kept nothing."""
    if not jax.tree.leaves(start):
        return start
    kept = _input(name, tree.shapes(start))
    return kept if name == "server memory" else tree.select(_input("seen", jax.ShapeDtypeStruct((), np.bool_)), kept, start)


def trace_round(
    algorithm: FederatedAlgorithm, numbers: Numbers, state: State, columns: Mapping[str, Any], options: TraceOptions
) -> RoundProgram:
    """Traces a round with shapes instead of arrays, so nothing is computed.

    Args:
      algorithm: whose rounds run.
      numbers: replace the algorithm's numbers, see `fedsim.execution._numbers.numbers_of`.
      state: a server's state, of arrays or ``jax.ShapeDtypeStruct``.
      columns: the columns of the data, of which only dtypes and the shapes of examples are read.
      options: see `TraceOptions`.

    Raises:
      ValueError: the round does not keep to the contract of `fedsim.Algorithm`, or it calls its clients inside a function that
        JAX transforms.
    """
    shapes = {
        name: jax.ShapeDtypeStruct((options.rows, *c.shape[1:]), jax.dtypes.canonicalize_dtype(c.dtype))
        for name, c in columns.items()
    }
    seen: list[_TracedClients] = []

    def round(numbers: Numbers, before: State, key: jax.Array, plan: RoundPlan) -> tuple[FederatedState, Any]:
        own = with_numbers(algorithm, numbers)
        clients = _TracedClients(own, plan, key, shapes, options)
        seen.append(clients)
        average: Any = ()
        if own.averaging is not None:
            average = _input("average", Average(tree.shapes(before.params), jax.ShapeDtypeStruct((), np.float32)))
        server, info = own.round(before, clients)
        return finished(own, before, average, clients, server, info), info

    plan = RoundPlan.shapes(options.slots)
    axes = [options.axis] if options.axis else []
    key = jax.eval_shape(lambda: rng.root(0)) if options.key is None else jax.ShapeDtypeStruct((), options.key)
    jaxpr, results = jax.make_jaxpr(round, axis_env=axes, return_shape=True)(numbers, state, key, plan)
    (clients,) = seen
    names = [equation.params["call"].name for equation in jaxpr.eqns if equation.primitive is _call_p]
    if names != clients.names:
        inside = next(name for name in clients.names if name not in names)
        raise ValueError(
            f"The round of {type(algorithm).__name__} has the call {inside!r} of its clients inside a function that JAX "
            "transforms, such as jax.jit or jax.lax.scan: call clients.aggregate and clients.map directly in round."
        )
    return RoundProgram(jaxpr, results, clients.algorithm.batches, clients.first())


def finished(
    algorithm: FederatedAlgorithm, before: State, average: Any, clients: Clients, server: State, info: Any
) -> FederatedState:
    """Returns the state after a round, without the clients' memories. If no update counts, it is the state before the round.

    Args:
      algorithm: whose round it is.
      before: the server's state before the round.
      average: the average of its parameters, () without one.
      clients: the clients of the round.
      server, info: what the round returned.
    """
    if clients.info is not None and not isinstance(info, RoundInfo):
        raise ValueError(
            f"Expected {type(algorithm).__name__}.round to return the info of clients.aggregate, got {type(info).__name__}. "
            "Put other numbers into ClientUpdate.info or into the state."
        )
    old, new = jax.tree.structure(before), jax.tree.structure(server)
    if old != new:  # type: ignore[operator]
        raise ValueError(
            f"Expected a round of {type(algorithm).__name__} to return a server state with the structure that init returns, "
            f"{old}, got {new}: check what server_update returns."
        )
    # Sums are computed in a wider dtype than parameters in half precision.
    server = jax.tree.map(_in_dtype_of, server, before)
    after = FederatedState(
        server,
        (),
        clients.aggregator_states,
        clients.downlink_states,
        new_average(algorithm.averaging, average, getattr(server, "params", ())),
    )
    if isinstance(info, RoundInfo):
        kept = clients.before._replace(server=before, average=average, past=())
        after = tree.select(info.num_aggregated > 0, after, kept)
    return after._replace(past=clients.past)


def _in_dtype_of(new: Any, old: Any) -> Any:
    old = jnp.asarray(old)
    return jnp.asarray(new, old.dtype) if tree.is_float(old) and tree.is_float(jnp.asarray(new)) else new


def _aval(x: Any) -> Any:
    return jax.core.ShapedArray(jnp.shape(x), jnp.result_type(x))


def _read(values: Values, x: Any) -> Any:
    return x.val if isinstance(x, Literal) else values[x]


def _variables(atoms: Iterable[Any]) -> Iterable[Var]:
    return (x for x in atoms if not isinstance(x, Literal))
