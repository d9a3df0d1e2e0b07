"""`CompiledRounds`: the compiled functions that run whole rounds, or the parts of a round that is too long for one program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from fedsim.execution._compile import CompiledFunction, compiled
from fedsim.execution._device_round import CompileOptions, DeviceRound
from fedsim.execution._placement import AXIS, shardings_of
from fedsim.primitives import bounded_loop
from fedsim.rounds import (
    FederatedState,
    Numbers,
    RoundPlan,
    RoundProgram,
    State,
    Values,
    parts_of,
)


class CompiledRounds:
    """Compiled functions that run rounds.

    All take numbers, columns, the table of memories, the state without it, the root key, and plans ``[rounds, ...]``.
    ``rounds`` also takes the number of rounds, and returns the state, the table and the infos. `run_in_parts` runs one long
    round by functions that are cut at its calls, which also take what the parts before them computed.

    Args:
      program: the traced round.
      options: how to run it.
    """

    def __init__(self, program: RoundProgram, options: CompileOptions) -> None:
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

    def _compiled(self, function: Callable[..., Any], *specs: Any, out: Any, donated: int | None = None) -> CompiledFunction:
        of_columns = P() if self.options.resident else P(AXIS)
        given = [of_columns if name == "columns" else P() for name in _ARGUMENTS]
        divided = None if self.options.is_divided else ((*given, *specs), out)
        return compiled(function, self.options.mesh, divided, donated, self.options.deterministic, self.options.division)

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
        return jax.lax.with_sharding_constraint(state, shardings_of(state, self.options.mesh, self.options.layout.block))

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


# The arguments of all functions of `CompiledRounds`, in order.
_ARGUMENTS = ("numbers", "columns", "table", "state", "key", "plans")
