"""`RoundProgram`: a round as one value, which execution compiles and everything else reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var, jaxpr_as_fun
from jax.interpreters import partial_eval

from fedsim import tree
from fedsim.aggregators import Aggregator
from fedsim.data import Batch, Batches, Cohort
from fedsim.rounds._client import ClientPlan
from fedsim.rounds._dependence import depends
from fedsim.rounds._numbers import Numbers
from fedsim.rounds._plan import RoundPlan
from fedsim.rounds._state import ClientTable, FederatedState

# A value that the round gets from outside once its shape is known, such as what a client kept for an aggregator, whose shape
# follows from the update. After the trace it is an argument.
input_p = Primitive("round_input")
input_p.multiple_results = True
input_p.def_abstract_eval(lambda *, name, avals: list(avals))

# One call of the clients. Execution runs it, so it has no implementation.
call_p = Primitive("call_clients")
call_p.multiple_results = True
call_p.def_abstract_eval(lambda *operands, call: call.result_avals)


class TracedFunction:
    """A traced function whose values from outside are arguments.

    Args:
      function: the function, which returns a pytree of arrays.
      *args: its arguments, or their shapes and dtypes.

    Attributes:
      consts: the values from outside, at the time of the trace.
      inputs: the names of the values that the function asked for by `ask_for`, in order.
      shapes: of what the function returns.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        traced, self.shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        self.consts = traced.consts
        self.inputs, self._jaxpr = with_inputs(traced.jaxpr)
        self._sizes = [len(equation.outvars) for equation in traced.jaxpr.eqns if equation.primitive is input_p]

    def __call__(self, consts: Sequence[Any], inputs: Mapping[str, Any], *args: Any) -> Any:
        """Returns what the function returns, for these values from outside, inputs by name, and arguments."""
        given = jax.tree.leaves([inputs[name] for name in self.inputs])
        results = jaxpr_as_fun(ClosedJaxpr(self._jaxpr, []))(*consts, *jax.tree.leaves(args), *given)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)

    def depends_on(self, names: Iterable[str]) -> Any:
        """Returns for each result whether it depends on one of the inputs with these names."""
        marked = set(names)
        of_inputs = [name in marked for name, size in zip(self.inputs, self._sizes, strict=True) for _ in range(size)]
        others = len(self._jaxpr.invars) - len(of_inputs)
        return jax.tree.unflatten(jax.tree.structure(self.shapes), depends(self._jaxpr, [False] * others + of_inputs))


def ask_for(name: str, like: Any) -> Any:
    """Returns a value like ``like``, which whoever runs the trace gives under this name."""
    leaves, structure = jax.tree.flatten(like)
    avals = tuple(aval_of(x) for x in leaves)
    return jax.tree.unflatten(structure, input_p.bind(name=name, avals=avals))


def with_inputs(jaxpr: Jaxpr) -> tuple[list[str], Jaxpr]:
    """Makes the values of `ask_for`, and constants, arguments of a jaxpr; returns the names of the former in order."""
    asked = [equation for equation in jaxpr.eqns if equation.primitive is input_p]
    added = [var for equation in asked for var in equation.outvars]
    rest = [equation for equation in jaxpr.eqns if equation.primitive is not input_p]
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
      statistics: the shapes of the running statistics of the model that they receive besides; () if there are none.
      downlink: compresses what clients receive; None sends it as it is.
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

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> traced, _ = fedsim.execution.traced_rounds(algorithm, algorithm.init(jax.random.key(0)), data)
    >>> (call,) = traced.trace().calls
    >>> call.name, call.batches[0].size, call.update.shape  # values in the two bins, below and above
    ('update', 256, (4,))
    """

    name: str
    shared: Any
    statistics: Any
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
    work: TracedFunction
    zero: TracedFunction | None
    accumulate: TracedFunction | None
    merge: TracedFunction | None
    operands: Any

    @property
    def batches(self) -> tuple[Batches, ...]:
        """The batches of each loop of a client."""
        return tuple(loop.batches for loop in self.loops)

    @property
    def reads_memory(self) -> bool:
        """Whether what the server receives of a client depends on what it has kept since earlier rounds."""
        arrived, *_ = self.work.depends_on(["seen", "memory", "aggregator memory"])
        return any(jax.tree.leaves(arrived))

    @property
    def results(self) -> Any:
        """The shapes of the results of the call: the accumulator with all updates, and the entries of all clients."""
        entries = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.num_entries, *x.shape), x.dtype), self.entries)
        return (() if self.zero is None else self.zero.shapes), entries

    @property
    def result_avals(self) -> list[Any]:
        """The leaves of `results` as abstract values of JAX, for its tracer."""
        return [aval_of(x) for x in jax.tree.leaves(self.results)]

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
          What arrives of its update, () for `Clients.map`; its entries; and its new row of the table, () without one.
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
        counts = own.keeps(entries["weight"])
        return arrived, entries, ClientTable(tree.select(counts, new, stored.rows), stored.seen | counts)

    def add_all(self, operands: Operands, accumulator: Any, updates: tuple[Any, jax.Array, jax.Array]) -> Any:
        """Adds updates to an accumulator, one after another.

        Args:
          operands: of the call.
          accumulator: what ``zero`` returned, or an earlier accumulator.
          updates: what has arrived, leaves ``[n, ...]``; the weights, ``float32 [n]``; and the slots, ``int32 [n]``.

        Returns:
          The accumulator with these updates.
        """
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

    The server's part of a round computes them, up to the call:

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> state, plan = algorithm.init(jax.random.key(0)), jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), RoundPlan.shapes(1))
    >>> traced, numbers = fedsim.execution.traced_rounds(algorithm, state, data)
    >>> values = traced.trace().start(numbers, FederatedState(state), jax.random.key(0), plan)
    >>> traced.trace().advance(0, values)
    >>> traced.trace().operands(0, values).clients.size.tolist()
    [1]
    """

    clients: ClientPlan
    server_memory: Any
    rows: Any
    work: Sequence[Any]
    zero: Sequence[Any]
    accumulate: Sequence[Any]
    merge: Sequence[Any]


# The values of the variables of a round that have been computed so far.
Values = dict[Var, Any]
# (the call, its operands) -> its results: the accumulator and the entries.
RunCall = Callable[[TracedCall, Operands], tuple[Any, Any]]


class RoundProgram:
    """A traced round: pieces of the server's computation, and the call of the clients between each two of them.

    `run` runs all of it. A long round runs piece by piece: after ``values = start(...)``, ``advance(number, values)`` runs the
    server up to each call, and ``put(number, values, results)`` stores what its clients gave. A last `advance` ends the round.

    Args:
      jaxpr: the round as a jaxpr of numbers, state, key and plan, with an equation for each call.
      shapes: of the results, the state and the info.
      batches: the algorithm's.
      first: the state before the first round, without what ``init`` returns and without an average. Its ``clients`` are the
        shapes of one client's row, () if clients keep nothing.

    Attributes:
      calls: the calls in their order.

    Here no client sends anything, so the state stays as it is:

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> algorithm = fedsim.algorithms.Histogram(bins=2)
    >>> state, plan = algorithm.init(jax.random.key(0)), jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), RoundPlan.shapes(1))
    >>> traced, numbers = fedsim.execution.traced_rounds(algorithm, state, data)
    >>> def run_nobody(call, operands): return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), call.results)
    >>> after, info = traced.trace().run(numbers, FederatedState(state), jax.random.key(0), plan, run_nobody)
    >>> after.server.counts.tolist(), info.num_aggregated.item()
    ([0, 0, 0, 0], 0)
    """

    def __init__(self, jaxpr: ClosedJaxpr, shapes: Any, batches: Batches, first: FederatedState) -> None:
        self.batches, self.first, self._shapes = batches, first, shapes
        self._inputs, self._jaxpr = with_inputs(jaxpr.jaxpr)
        self._num_state = len(jax.tree.leaves(shapes[0]))
        self._plan = dict(zip(jaxpr.jaxpr.invars[-len(_OF_CLIENTS) :], _OF_CLIENTS, strict=True))
        self._consts = jaxpr.consts
        self._equations = [equation for equation in self._jaxpr.eqns if equation.primitive is call_p]
        self.calls: tuple[TracedCall, ...] = tuple(equation.params["call"] for equation in self._equations)

    @property
    def info_shapes(self) -> Any:
        """The shapes of the info of a round."""
        return self._shapes[1]

    @functools.cached_property
    def loops(self) -> list[Batches]:
        """The batches of every loop of a client, in all calls."""
        return [batches for call in self.calls for batches in call.batches]

    @functools.cached_property
    def state_bytes(self) -> int:
        """The size of the largest state of a client's loop, in bytes."""
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
          run_call: runs the clients, ``(call, operands) -> results``, see `TracedCall.results`.
        """
        values = self.start(numbers, state, key, plan)
        for number, call in enumerate(self.calls):
            self.advance(number, values)
            self.put(number, values, run_call(call, self.operands(number, values)))
        self.advance(len(self.calls), values)
        return self.results(values)

    def start(self, numbers: Numbers, state: FederatedState, key: jax.Array, plan: RoundPlan) -> Values:
        """Begins a round that runs piece by piece: returns the values of its arguments, see `run`."""
        args = jax.tree.leaves((numbers, state.server, key, plan.of_clients()))
        kept = {"past": state.past, "average": state.average, "parts": state.parts}
        kept |= {f"aggregator {name}": memory for name, memory in state.aggregator.items()}
        kept |= {f"downlink {name}": memory for name, memory in state.downlink.items()}
        inputs = jax.tree.leaves([kept[name] for name in self._inputs])
        return dict(zip(self._jaxpr.invars, [*self._consts, *args, *inputs], strict=True))

    def advance(self, number: int, values: Values) -> None:
        """Runs the server up to call ``number``, or after the last call to the end; adds what it computes to ``values``."""
        piece = self._pieces[number]
        results = jaxpr_as_fun(ClosedJaxpr(piece, []))(*[values[var] for var in piece.invars])
        values |= dict(zip(_variables(piece.outvars), results, strict=True))

    def operands(self, number: int, values: Values) -> Operands:
        """Returns the operands of call ``number``, which `advance` has reached."""
        leaves = [_read(values, x) for x in self._equations[number].invars]
        return jax.tree.unflatten(self.calls[number].operands, leaves)

    def operand_shapes(self, number: int) -> Operands:
        """Returns the shapes and dtypes of the operands of call ``number``, as ``jax.ShapeDtypeStruct``."""
        avals: list[Any] = [x.aval for x in self._equations[number].invars]
        leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return jax.tree.unflatten(self.calls[number].operands, leaves)

    def put(self, number: int, values: Values, results: tuple[Any, Any]) -> None:
        """Adds the results of call ``number``, the accumulator and the entries, to ``values``."""
        values |= dict(zip(self._equations[number].outvars, jax.tree.leaves(results), strict=True))

    def results(self, values: Values) -> tuple[FederatedState, Any]:
        """Returns the state and the info after the round, when the server has reached the end."""
        return jax.tree.unflatten(jax.tree.structure(self._shapes), [_read(values, x) for x in self._jaxpr.outvars])

    def sent(self, values: Values) -> Any:
        """Returns what the server sends in a round of an algorithm with ``Staleness(bound=0)``, once the call is reached.

        With running statistics of the model, it is a pair of the rest and of these.
        """
        past = jax.tree.unflatten(jax.tree.structure(self._shapes), self._jaxpr.outvars)[0].past
        return jax.tree.map(lambda x: _read(values, x)[0], past)

    def reads_of_server(self) -> dict[str, list[str]]:
        """Returns what the server's state after the round depends on besides the accumulators of calls, by where it is from.

        The keys are ``"plan"``, with fields of `RoundPlan` other than the round's number, and the names of calls, with the
        names of entries of the info, or "result" for `Clients.map`. The work of clients may depend on their own plan; what
        all clients receive is followed like the state.

        >>> import fedsim
        >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
        >>> algorithm = fedsim.algorithms.Histogram(bins=2)
        >>> traced, _ = fedsim.execution.traced_rounds(algorithm, algorithm.init(jax.random.key(0)), data)
        >>> traced.trace().reads_of_server()  # If no update counts, the state stays as it is.
        {'update': ['weight']}
        """
        whole = [number < self._num_state for number in range(len(self._jaxpr.outvars))]
        # The names of arguments are those of the trace, which had fewer.
        unnamed = self._jaxpr.replace(debug_info=self._jaxpr.debug_info.with_unknown_names())
        kept, _ = partial_eval.dce_jaxpr(unnamed, whole, instantiate=True)
        needed, found = set(_variables(kept.outvars)), dict[str, list[str]]()
        for equation in reversed(kept.eqns):
            if not needed & set(equation.outvars):
                continue
            if equation.primitive is not call_p:
                needed |= set(_variables(equation.invars))
                continue
            call = equation.params["call"]
            _, entries = jax.tree.unflatten(jax.tree.structure(call.results), equation.outvars)
            for path, var in jax.tree_util.tree_leaves_with_path(entries):
                if var in needed:
                    name = "result" if call.zero is None else jax.tree_util.keystr(path, simple=True, separator="/")
                    found.setdefault(call.name, []).append(name)
            operands = jax.tree.unflatten(call.operands, equation.invars)
            needed |= set(_variables(jax.tree.leaves(operands._replace(clients=()), is_leaf=lambda x: isinstance(x, Literal))))
        inputs = dict(zip(kept.invars, self._jaxpr.invars, strict=True))
        plan = [self._plan[inputs[var]] for var in kept.invars if var in needed and inputs[var] in self._plan]
        return found | ({"plan": others} if (others := [name for name in plan if name != "round"]) else {})

    def live_values(self, number: int, values: Values) -> list[Any]:
        """Returns the values at a call that later parts of the round need, without the arguments of the round."""
        return [values[var] for var in self._live[number]]

    def restore(self, number: int, values: Values, live: Sequence[Any]) -> None:
        """Adds what `live_values` returned for call ``number`` to ``values``, which `start` has begun in another program."""
        values |= dict(zip(self._live[number], live, strict=True))

    @functools.cached_property
    def _sections(self) -> list[list[Any]]:
        """The server's equations before each call and after the last one."""
        sections: list[list[Any]] = [[]]
        for equation in self._jaxpr.eqns:
            if equation.primitive is call_p:
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


# The fields of a plan that a round reads, in the order of the leaves.
_OF_CLIENTS = RoundPlan._fields[:-4]


def aval_of(x: Any) -> Any:
    return jax.core.ShapedArray(jnp.shape(x), jnp.result_type(x))


def _read(values: Values, x: Any) -> Any:
    return x.val if isinstance(x, Literal) else values[x]


def _variables(atoms: Iterable[Any]) -> Iterable[Var]:
    return (x for x in atoms if not isinstance(x, Literal))
