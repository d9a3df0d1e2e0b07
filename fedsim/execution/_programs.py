"""Compiled programs: whole rounds, or pieces of a round that is too long for one program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import jit
from jax.sharding import PartitionSpec as P

from fedsim import tree
from fedsim.data import Cohort, FederatedData
from fedsim.execution._clients import Clients
from fedsim.execution._compile import Program, compiled
from fedsim.execution._device_clients import DeviceClients, EndOfProgram, PartialClients, Setting
from fedsim.execution._numbers import Made, Numbers, form_of, kept_with, numbers_of, with_numbers
from fedsim.execution._outline import Outline, outline
from fedsim.execution._placement import AXIS, must_fit, shardings_of
from fedsim.execution._state import (
    FederatedAlgorithm,
    FederatedState,
    RoundInfo,
    State,
    new_average,
    parts_of,
)
from fedsim.primitives import bounded_loop


class Programs:
    """The programs of an algorithm for states and data of given shapes.

    Args:
      algorithm: the algorithm; its numbers are arguments of the programs.
      outline: the outline of its round.
    """

    def __init__(self, algorithm: FederatedAlgorithm, outline: Outline) -> None:
        self.algorithm, self.outline = algorithm, outline
        self.fewer_lanes: dict[Any, int] = {}  # by mesh; set after a mesh ran out of memory with more
        self._by_setting: dict[Setting, RoundPrograms] = {}
        self._fits: set[Any] = set()

    def by_setting(self, setting: Setting) -> RoundPrograms:
        """Returns the programs for a setting. They are compiled when they are first called."""
        if setting not in self._by_setting:
            self._by_setting[setting] = RoundPrograms(self.algorithm, self.outline, setting)
        return self._by_setting[setting]

    def check(self, cohort: Cohort, setting: Setting) -> None:
        """Raises ``ValueError`` if such a cohort cannot run on these devices, or not with a state of these shapes."""
        kind = cohort.slots, cohort.data.num_clients, setting
        if kind in self._fits:
            return
        slots = setting.layout.slots
        for call in self.outline.calls:
            if call.rows not in (None, cohort.data.num_clients):
                raise ValueError(
                    f"Expected the rows of clients.map_rows to have leaves [{cohort.data.num_clients}, ...], an entry for each "
                    f"client of the population, got {call.rows} entries: start with a state for this population."
                )
            if (fold := call.aggregator) is not None:
                if cohort.attack is not None:
                    fold = cohort.attack.wrap_aggregator(fold, jnp.zeros(slots, bool))
                fold.check(call.arrived, cohort.slots)
                must_fit(fold, jax.eval_shape(lambda fold=fold, call=call: fold.zero(call.arrived, slots)), slots, setting.mesh)
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
        shapes = form_of((numbers, state)), columns
        if shapes not in self._by_shapes:
            self._by_shapes[shapes] = Programs(self.algorithm, outline(self.algorithm, numbers, state, data))
        return self._by_shapes[shapes]


def programs_for(algorithm: FederatedAlgorithm, state: State, data: FederatedData) -> tuple[Programs, Numbers]:
    """Returns the programs of an algorithm, and the numbers to call them with.

    Every algorithm object is traced. Algorithms that differ only in their numbers (see `fedsim.execution._numbers.numbers_of`)
    give the same text, and share executables, see `fedsim.execution._compile.Program`. If the algorithm's code needs the value
    of a number, all of its numbers are constants of the text.

    Args:
      algorithm: the algorithm to run.
      state: a server's state, of arrays or ``jax.ShapeDtypeStruct``.
      data: the population.
    """
    kept = kept_with(algorithm)
    if "programs" not in kept:
        kept["programs"] = AlgorithmPrograms(algorithm), numbers_of(algorithm)
    own, numbers = kept["programs"]
    if not own.needs_values:
        try:
            return own.programs(numbers, state, data), numbers
        except Exception:  # JAX has no common class for errors of code that needs the value of a number.
            if not numbers:
                raise
    # An error of the algorithm itself is raised again here, with values instead of tracers.
    constant = AlgorithmPrograms(algorithm)
    programs = constant.programs({}, state, data)
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
    """Jitted functions that run rounds.

    All take numbers, columns, the table of memories, the state without it, the root key and packed plans.

    - ``rounds`` also takes the number of rounds, and returns the state, the table and the infos.
    - ``advance``, ``fold`` and ``finish`` run one long round, see `PartialClients`. They also take the results of the calls
      that have ended and what devices carry; ``fold`` takes a window, too.

    Args:
      algorithm: the algorithm to run.
      outline: the outline of its round.
      setting: how to run it.
    """

    def __init__(self, algorithm: FederatedAlgorithm, outline: Outline, setting: Setting) -> None:
        self.algorithm, self.outline, self.setting = algorithm, outline, setting
        everywhere, own = P(), P(AXIS)
        common = everywhere, everywhere if setting.resident else own, *[everywhere] * 4
        self.rounds = self._jit(self._rounds, *common, everywhere, out=everywhere)
        self.advance = self._jit(self._part, *common, everywhere, own, out=(everywhere, own))
        self.fold = self._jit(self._part, *common, everywhere, own, everywhere, out=own, donated=7)
        self.finish = self._jit(self._part, *common, everywhere, own, out=everywhere)

    def _jit(self, function: Callable[..., Any], *specs: Any, out: Any, donated: int | None = None) -> Program:
        divided = None if self.setting.is_divided else (specs, out)
        return compiled(function, self.setting.mesh, divided, donated, self.setting.deterministic)

    def _round(
        self, numbers: Numbers, columns: Any, table: Any, state: State, key: jax.Array, row: jax.Array,
        clients_of: Callable[..., DeviceClients] = DeviceClients,
    ) -> tuple[State, Any, Any]:  # fmt: skip
        algorithm, parts, plan = with_numbers(self.algorithm, numbers), parts_of(state), self.setting.layout.unpack(row)
        setting, shapes = self.setting, self.outline.shapes
        clients = clients_of(setting, algorithm, plan, key, parts, columns, table, shapes, setting.attack, setting.axis)
        server, info = algorithm.round(parts.server, clients)
        after = finished(algorithm, state, clients, server, info)
        if setting.is_divided:
            after = jax.lax.with_sharding_constraint(after, shardings_of(after, setting.mesh, setting.layout))
        return after, clients.table, info

    def _rounds(
        self, numbers: Numbers, columns: Any, table: Any, state: State, key: jax.Array, packed: jax.Array, num_rounds: jax.Array
    ) -> tuple[State, Any, Any]:
        # Jitted, so that it is traced only once, although it is used twice below.
        @functools.partial(jit, inline=True)
        def one(columns: Any, table: Any, state: State, row: jax.Array) -> tuple[State, Any, Any]:
            return self._round(numbers, columns, table, state, key, row)

        if not self.setting.stacked:
            return one(columns, table, state, packed[0])

        def body(r: jax.Array, carry: tuple[State, Any, Any]) -> tuple[State, Any, Any]:
            state, table, info = one(columns, carry[1], carry[0], packed[r])
            return state, table, jax.tree.map(lambda rows, row: rows.at[r].set(row), carry[2], info)

        shapes = jax.eval_shape(one, columns, table, state, packed[0])[2]
        infos = jax.tree.map(lambda x: jnp.zeros((packed.shape[0], *x.shape), x.dtype), shapes)
        return bounded_loop(num_rounds, body, (state, table, infos), most_steps=packed.shape[0])

    def _part(
        self, numbers: Numbers, columns: Any, table: Any, state: State, key: jax.Array, packed: jax.Array,
        results: tuple[Any, ...], carry: Any = None, window: Any = None,
    ) -> Any:  # fmt: skip
        # Between programs, the values that devices carry have a leading axis over the devices, unless they are rows.
        stacked = (lambda carry: carry) if self.setting.is_divided else _stacked
        own = carry if self.setting.is_divided else jax.tree.map(lambda x: x[0], carry)
        clients_of = functools.partial(PartialClients, results, own, window)
        try:
            state, table, info = self._round(numbers, columns, table, state, key, packed[0], clients_of)
        except EndOfProgram as end:
            if window is not None:
                return stacked(end.value)
            results, carry = end.value
            return results, stacked(carry)
        return state, table, _stacked(info) if self.setting.stacked else info


def _stacked(a: Any) -> Any:
    return jax.tree.map(lambda x: x[None], a)


def finished(algorithm: FederatedAlgorithm, state: State, clients: Clients, server: Any, info: Any) -> State:
    """Returns the state after a round, without the clients' memories, which are in ``clients.table``.

    If no update counts, this is the state before the round.
    """
    before = parts_of(state)
    if clients.info is not None and not isinstance(info, RoundInfo):
        raise ValueError(
            f"Expected {type(algorithm).__name__}.round to return the info of clients.aggregate, got {type(info).__name__}. "
            "Put other numbers into ClientUpdate.info or into the state."
        )
    old, new = jax.tree.structure(before.server), jax.tree.structure(server)
    if old != new:  # type: ignore[operator]
        raise ValueError(
            f"Expected a round of {type(algorithm).__name__} to return a server state with the structure that init returns, "
            f"{old}, got {new}: check what server_update returns."
        )
    # Sums are computed in a wider dtype than parameters in half precision.
    server = jax.tree.map(_in_dtype_of, server, before.server)
    average = new_average(algorithm.averaging, before.average, getattr(server, "params", ()))
    after = FederatedState(server, (), clients.aggregator_states, clients.downlink_states, average)
    if isinstance(info, RoundInfo):
        after = tree.select(info.num_aggregated > 0, after, before._replace(clients=(), past=()))
    after = after._replace(past=clients.past)
    return after if isinstance(state, FederatedState) else after.server


def _in_dtype_of(new: Any, old: Any) -> Any:
    old = jnp.asarray(old)
    return jnp.asarray(new, old.dtype) if tree.is_float(old) and tree.is_float(jnp.asarray(new)) else new
