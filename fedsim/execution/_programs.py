"""Compiled programs: whole rounds, or pieces of a round that is too long for one program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fedsim.data import Cohort, FederatedData
from fedsim.execution._compile import Program, compiled, settings_of_jax
from fedsim.execution._device_round import DeviceRound, ProgramOptions
from fedsim.execution._numbers import Made, Numbers, form_of, kept_with, numbers_of
from fedsim.execution._placement import AXIS, must_fit, shardings_of
from fedsim.execution._plan import RoundPlan
from fedsim.execution._round_program import RoundProgram, Values
from fedsim.execution._state import FederatedAlgorithm, FederatedState, State, parts_of
from fedsim.execution._trace import TraceOptions, trace_round
from fedsim.primitives import bounded_loop


class Programs:
    """The programs of an algorithm for states and data of given shapes.

    Args:
      algorithm: the algorithm; its numbers are arguments of the programs.
      numbers: these numbers, or others of the same shapes.
      state: a server's state of these shapes.
      data: a population of these shapes.
    """

    def __init__(self, algorithm: FederatedAlgorithm, numbers: Numbers, state: State, data: FederatedData) -> None:
        self.algorithm = algorithm
        self.fewer_lanes: dict[Any, int] = {}  # by mesh; set after a mesh ran out of memory with more
        self._shapes = jax.tree.map(_shape, (numbers, state, dict(data.columns)))
        self._traces: dict[TraceOptions, RoundProgram] = {}
        self._by_options: dict[ProgramOptions, RoundPrograms] = {}
        self._fits: set[Any] = set()

    def trace(self, options: TraceOptions | None = None) -> RoundProgram:
        """Returns the traced round; with None, of any options."""
        if options is None:
            options = next(iter(self._traces), TraceOptions(slots=1, rows=1))
        if options not in self._traces:
            numbers, state, columns = self._shapes
            self._traces[options] = trace_round(self.algorithm, numbers, state, columns, options)
        return self._traces[options]

    def by_options(self, options: ProgramOptions) -> RoundPrograms:
        """Returns the programs for some options. They are compiled when they are first called."""
        if options not in self._by_options:
            self._by_options[options] = RoundPrograms(self.trace(options.of_trace), options)
        return self._by_options[options]

    def check(self, cohort: Cohort, options: ProgramOptions) -> None:
        """Raises ``ValueError`` if such a cohort cannot run on these devices, or not with a state of these shapes."""
        kind = cohort.slots, cohort.data.num_clients, options
        if kind in self._fits:
            return
        slots = options.layout.slots
        for call in self.trace().calls:
            if call.rows not in (None, cohort.data.num_clients):
                raise ValueError(
                    f"Expected the rows of clients.map_rows to have leaves [{cohort.data.num_clients}, ...], an entry for each "
                    f"client of the population, got {call.rows} entries: start with a state for this population."
                )
            if (fold := call.aggregator) is not None:
                if cohort.attack is not None:
                    fold = cohort.attack.wrap_aggregator(fold, jnp.zeros(slots, bool))
                fold.check(call.arrived, cohort.slots)
                must_fit(fold, jax.eval_shape(lambda fold=fold, call=call: fold.zero(call.arrived, slots)), slots, options.mesh)
        self._fits.add(kind)


class AlgorithmPrograms:
    """The programs of an algorithm, by the shapes of states and data.

    Args:
      algorithm: the algorithm; its numbers may be replaced.

    Attributes:
      needs_values: whether the algorithm's code needs the value of a number, so that numbers cannot be arguments.
    """

    def __init__(self, algorithm: FederatedAlgorithm) -> None:
        self.algorithm = algorithm
        self.needs_values = False
        self._by_shapes: dict[Any, Programs] = {}

    def programs(self, numbers: Numbers, state: State, data: FederatedData) -> Programs:
        """Returns the programs for such numbers, states and data."""
        columns = tuple((name, column.shape[1:], column.dtype) for name, column in data.columns.items())
        shapes = form_of((numbers, state)), columns, settings_of_jax()
        if shapes not in self._by_shapes:
            self._by_shapes[shapes] = Programs(self.algorithm, numbers, state, data)
        return self._by_shapes[shapes]


def programs_for(
    algorithm: FederatedAlgorithm, state: State, data: FederatedData, options: TraceOptions | None = None
) -> tuple[Programs, Numbers]:
    """Returns the programs of an algorithm, whose round has been traced, and the numbers to call them with.

    Every algorithm object is traced. Algorithms that differ only in their numbers (see `fedsim.execution._numbers.numbers_of`)
    give the same text, and share executables, see `fedsim.execution._compile.Program`. If the algorithm's code needs the value
    of a number, all of its numbers are constants of the text.

    Args:
      algorithm: the algorithm to run.
      state: a server's state, of arrays or ``jax.ShapeDtypeStruct``.
      data: the population.
      options: what the trace depends on, if the round is to run; None if any trace will do.
    """
    kept = kept_with(algorithm)
    if "programs" not in kept:
        kept["programs"] = AlgorithmPrograms(algorithm), numbers_of(algorithm)
    own, numbers = kept["programs"]
    if not own.needs_values:
        programs = own.programs(numbers, state, data)
        try:
            programs.trace(options)
            return programs, numbers
        except Exception:  # JAX has no common class for errors of code that needs the value of a number.
            if not numbers:
                raise
    # An error of the algorithm itself is raised again here, with values instead of tracers.
    constant = AlgorithmPrograms(algorithm)
    programs = constant.programs({}, state, data)
    programs.trace(options)
    own.needs_values, kept["programs"] = True, (constant, {})
    return programs, {}


def share_programs(
    algorithms: Sequence[FederatedAlgorithm], make: Callable[..., Any], numbers: Sequence[Mapping[str, Any]]
) -> None:
    """Lets algorithms that one function makes from different numbers use the same programs, whose arguments are the numbers.

    The numbers may be inside other objects, such as the learning rate of `optax.sgd`. If the code of ``make`` or of an
    algorithm needs the value of a number, every algorithm gets its own programs, see `programs_for`.

    Args:
      algorithms: the algorithms ``make(**numbers[i])``.
      make: a function of traced numbers, too.
      numbers: floats and JAX arrays by name, for each algorithm.
    """
    shared = AlgorithmPrograms(Made(make))
    for algorithm, own in zip(algorithms, numbers, strict=True):
        kept_with(algorithm)["programs"] = shared, {"numbers": dict(own)}


class RoundPrograms:
    """Compiled functions that run rounds.

    All take numbers, columns, the table of memories, the state without it, the root key, and plans ``[rounds, ...]``.
    ``rounds`` also takes the number of rounds, and returns the state, the table and the infos. `run_in_parts` runs one long
    round by functions that are cut at its calls, which also take what the parts before them computed.

    Args:
      program: the traced round.
      options: how to run it.
    """

    def __init__(self, program: RoundProgram, options: ProgramOptions) -> None:
        self.program, self.options = program, options
        own = P(AXIS)
        self.rounds = self._compiled(self.run_rounds, P(), out=P())
        calls = range(len(program.calls))
        self._advance = [self._compiled(functools.partial(self._to_call, i), P(), own, out=(P(), own)) for i in calls]
        self._fold = [
            self._compiled(functools.partial(self._window, i), P(), own, P(), out=own, donated=len(_ARGUMENTS) + 1)
            for i in calls
        ]
        self._finish = self._compiled(self._to_end, P(), own, out=P())

    def _compiled(self, function: Callable[..., Any], *specs: Any, out: Any, donated: int | None = None) -> Program:
        of_columns = P() if self.options.resident else P(AXIS)
        given = [of_columns if name == "columns" else P() for name in _ARGUMENTS]
        divided = None if self.options.is_divided else ((*given, *specs), out)
        return compiled(function, self.options.mesh, divided, donated, self.options.deterministic)

    def run_in_parts(self, arguments: tuple[Any, ...], windows_of_calls: Sequence[Sequence[Any]]) -> Any:
        """Runs one long round as several programs, which run the windows of each of its calls."""
        kept: Any = []
        carry: Any = None
        for number, of_call in enumerate(windows_of_calls):
            kept, carry = self._advance[number](*arguments, kept, carry)
            for window in of_call:
                carry = self._fold[number](*arguments, kept, carry, window)
        # It waits, because CPU programs that are dispatched later may occupy the threads that its all-reduce needs.
        return jax.block_until_ready(self._finish(*arguments, kept, carry))

    def run_rounds(
        self, numbers: Numbers, columns: Any, table: Any, state: State, key: jax.Array, plans: RoundPlan, num_rounds: jax.Array
    ) -> tuple[State, Any, Any]:
        """Runs the first ``num_rounds`` rounds of the plans; see above."""

        def one(state: State, table: Any, plan: RoundPlan) -> tuple[State, Any, Any]:
            on_device = self._on_device(plan, columns, table)
            after, info = self.program.run(numbers, parts_of(state), key, plan, on_device.run)
            return self._state_after(state, after), on_device.table, info

        def plan_of(r: Any) -> RoundPlan:
            return jax.tree.map(lambda x: x[r], plans)

        if not self.options.stacked:
            return one(state, table, plan_of(0))

        def body(r: jax.Array, carry: tuple[State, Any, Any]) -> tuple[State, Any, Any]:
            state, table, info = one(carry[0], carry[1], plan_of(r))
            return state, table, jax.tree.map(lambda rows, row: rows.at[r].set(row), carry[2], info)

        most = len(plans.round)
        infos = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), self.program.info_shapes)
        return bounded_loop(num_rounds, body, (state, table, infos), most_steps=most)

    def _on_device(self, plan: RoundPlan, columns: Any, table: Any) -> DeviceRound:
        return DeviceRound(self.options, self.program, plan, columns, table)

    def _state_after(self, before: State, after: FederatedState) -> State:
        """Returns the state in the form that it had before, on the devices where it was."""
        state = after if isinstance(before, FederatedState) else after.server
        if not self.options.is_divided:
            return state
        return jax.lax.with_sharding_constraint(state, shardings_of(state, self.options.mesh, self.options.layout))

    def _begun(self, number: int, arguments: Sequence[Any], kept: Sequence[Any]) -> tuple[Values, DeviceRound]:
        """Returns the values at a call, the arguments included, and the clients of the round on this device."""
        numbers, columns, table, state, key, plans = arguments
        plan = jax.tree.map(lambda x: x[0], plans)
        values = self.program.start(numbers, parts_of(state), key, plan)
        if number >= 0:
            self.program.restore(number, values, kept)
        return values, self._on_device(plan, columns, table)

    def _to_call(self, number: int, *arguments: Any) -> Any:
        """Ends the call before this one, runs the server up to this one, and returns what the windows of the call need."""
        *arguments, kept, carry = arguments  # type: ignore[assignment]
        values, on_device = self._begun(number - 1, arguments, kept)
        if number:
            self._end(number - 1, values, on_device, carry)
        self.program.advance(number, values)
        call = self.program.calls[number]
        carry = on_device.start(call, self.program.operands(number, values))
        return self.program.live_values(number, values), self._stacked(carry)

    def _window(self, number: int, *arguments: Any) -> Any:
        *arguments, kept, carry, window = arguments  # type: ignore[assignment]
        values, on_device = self._begun(number, arguments, kept)
        operands = self.program.operands(number, values)
        return self._stacked(on_device.run_groups(self.program.calls[number], operands, self._unstacked(carry), window))

    def _to_end(self, *arguments: Any) -> Any:
        *arguments, kept, carry = arguments  # type: ignore[assignment]
        last, state = len(self.program.calls) - 1, arguments[3]
        values, on_device = self._begun(last, arguments, kept)
        self._end(last, values, on_device, carry)
        self.program.advance(last + 1, values)
        after, info = self.program.results(values)
        info = jax.tree.map(lambda x: x[None], info) if self.options.stacked else info
        return self._state_after(state, after), on_device.table, info

    def _end(self, number: int, values: Values, on_device: DeviceRound, carry: Any) -> None:
        self.program.put(number, values, on_device.end(self.program.calls[number], self._unstacked(carry)))

    # Between programs, the values that devices carry have a leading axis over the devices, unless they are rows.
    def _stacked(self, carry: Any) -> Any:
        return carry if self.options.is_divided else jax.tree.map(lambda x: x[None], carry)

    def _unstacked(self, carry: Any) -> Any:
        return carry if self.options.is_divided else jax.tree.map(lambda x: x[0], carry)


# The arguments of all functions of `RoundPrograms`, in order.
_ARGUMENTS = ("numbers", "columns", "table", "state", "key", "plans")


def _shape(x: Any) -> Any:
    """Returns the shape and dtype of a leaf; Python numbers, whose dtypes are weak, stay what they are."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x
