"""Several federations in one program: members of a population, which differ in numbers, states, cohorts and keys."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import rng, tree
from fedsim.data import ClientRows, Cohort, FederatedData
from fedsim.execution import _memory, _placement
from fedsim.execution._compile import CompiledFunction, compiled
from fedsim.execution._device_round import CompileOptions
from fedsim.execution._execution import Jit, Pmap
from fedsim.execution._layout import Layout, lanes_for, num_steps, plan_round, windows
from fedsim.execution._memory import remembered
from fedsim.execution._placement import AXIS
from fedsim.execution._traced_rounds import TracedRounds, traced_rounds
from fedsim.rounds import FederatedAlgorithm, RoundInfo, RoundPlan, State, parts_of, server_state

# Fewer rounds per dispatch show progress more often; more rounds wait less often for the host.
_ROUNDS_PER_DISPATCH = 32
# The states before and after a dispatch exist at the same time, and a loop over rounds may copy one more.
_COPIES_OF_STATE = 3
_SHARE_OF_MEMORY = 0.5
_KEPT_PLANS_BYTES = 2**28

_T = TypeVar("_T")
_Result = TypeVar("_Result")


class Member(NamedTuple):
    """One federation of a population.

    Attributes:
      algorithm: its algorithm. Those of all members share programs, see `fedsim.execution.share_programs`.
      state: the state before the first round.
      cohort: ``round -> Cohort``. Members with equal ``plans`` have the same cohorts.
      plans: identifies the cohorts, for example by their seed.
    """

    algorithm: FederatedAlgorithm
    state: State
    cohort: Callable[[int], Cohort]
    plans: Any


def obstacle(algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> str | None:
    """Returns why members with this algorithm cannot run in one program; None if they can.

    Args:
      algorithm: of one member.
      state: its state before the first round.
      cohort: its largest cohort.
    """
    execution, data = getattr(algorithm, "execution", None), cohort.data
    if not isinstance(execution, Jit) or execution.differentiable:
        return f"their execution is {execution}"
    mesh = execution.mesh()
    if not _placement.is_resident(data, mesh, execution.memory):
        return "the examples are not all on the device"
    state = remembered(algorithm, state, data)
    clients = parts_of(state).clients
    if isinstance(clients, ClientRows) and _memory.stay_on_host(clients, mesh, execution.memory):
        return (
            "the clients' memories are not all on the device (memory='resident' of the execution, or --memory resident, places "
            "them there)"
        )
    if most_side_by_side(state, mesh, data) < 1:
        return "the states of the members do not fit the memory"
    program = traced_rounds(algorithm, server_state(state), data)[0].trace()
    if mesh.devices.flat[0].platform == "cpu":
        alone = Layout(cohort.slots, 1)
        plan = plan_round(cohort, alone, algorithm.batches, program.loops)
        for call in program.calls:
            if len(windows(plan, alone, num_steps(plan.size, algorithm.batches, call.batches, plan.most_steps))) > 1:
                return "their rounds are so long that a CPU runs each as several programs"
    return None


def most_side_by_side(state: State, mesh: Mesh, data: FederatedData) -> int:
    """Returns how many members' states, with the memories of all clients, fit the memory of one device."""
    import psutil

    clients = parts_of(state).clients
    rest = state._replace(clients=()) if clients != () else state
    size = tree.num_bits(rest) // 8
    if clients != ():
        size += data.num_clients * (tree.num_bits(_memory.row_shapes(clients)) // 8 + 1)
    device, free = mesh.devices.flat[0], psutil.virtual_memory().available
    available = free // mesh.size if device.platform == "cpu" else _placement.memory_limit(device)
    return int(_SHARE_OF_MEMORY * available) // max(1, _COPIES_OF_STATE * size)


def run_members(
    members: Sequence[Member], rounds: int, execution: Jit, *, side_by_side: int, advance: Callable[[int], object]
) -> tuple[State, RoundInfo]:
    """Runs all rounds of all members in one compiled program, which is called as often as necessary.

    Every device runs some members: one after another, or several side by side (`jax.vmap`). No device waits for another one.

    Args:
      members: one or more, for which `obstacle` returns None.
      rounds: the number of rounds.
      execution: the devices, and the number of clients that run side by side in all members of a device together.
      side_by_side: how many members run side by side on a device.
      advance: called with the number of finished rounds, of all members together, whenever some are finished. A negative
        number of rounds must run again.

    Returns:
      The states, leaves ``[members, ...]``, and the infos, leaves ``[members, rounds, ...]``, both on the host.
    """
    distinct = {member.plans: member for member in members}.values()
    widest = max((member.cohort(r) for member in distinct for r in range(rounds)), key=lambda cohort: cohort.slots)
    length, plans = min(rounds, _ROUNDS_PER_DISPATCH), KnownPlans()

    def run(together: Sequence[Member], side_by_side: int) -> tuple[State, RoundInfo]:
        wave = Wave(together, execution, side_by_side=side_by_side, widest=widest, length=length, plans=plans)
        return _run_all_rounds(wave, rounds, length, advance)

    states, infos = zip(*in_turns(run, members, side_by_side, execution.mesh().size), strict=True)
    return joined(states, np.concatenate), joined(infos, np.concatenate)


def _run_all_rounds(wave: Wave, rounds: int, length: int, advance: Callable[[int], object]) -> tuple[State, RoundInfo]:
    """Returns states and infos as `run_members` does. A dispatch is read while the next one runs."""
    infos: list[Any] = []
    dispatched: list[tuple[Any, int]] = []
    advanced = 0

    def read_oldest() -> None:
        nonlocal advanced
        info, of_dispatch = dispatched.pop(0)
        infos.append(wave.read_infos(info, of_dispatch))
        advance(wave.size * of_dispatch)
        advanced += wave.size * of_dispatch

    try:
        for start in range(0, rounds, length):
            numbered = range(start, min(start + length, rounds))
            dispatched.append((wave.run([numbered] * wave.size), len(numbered)))
            if len(dispatched) > 1:
                read_oldest()
        read_oldest()
        return wave.read_states(wave.states), joined(infos, functools.partial(np.concatenate, axis=1))
    except jax.errors.JaxRuntimeError:
        advance(-advanced)
        raise


def in_turns(
    run: Callable[[Sequence[_T], int], _Result], members: Sequence[_T], side_by_side: int, num_devices: int
) -> list[_Result]:
    """Runs as many members at a time as the devices run; half as many, with a warning, after a device ran out of memory.

    Args:
      run: ``(members, side_by_side) -> result``, which runs at most ``side_by_side`` members on each device.
      members: all members.
      side_by_side: how many members run side by side on a device.
      num_devices: the number of devices.

    Returns:
      The results of the calls that did not run out of memory.

    >>> in_turns(lambda members, side_by_side: "".join(members), "abcde", 1, 2)
    ['ab', 'cd', 'e']
    """
    results, start = [], 0
    while start < len(members):
        together = members[start : start + side_by_side * num_devices]
        try:
            results.append(run(together, side_by_side))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or side_by_side == 1:
                raise
            warnings.warn(
                f"The device ran out of memory with {side_by_side} members side by side, so they run again with "
                f"{side_by_side // 2}.",
                stacklevel=5,
            )
            side_by_side //= 2
        else:
            start += len(together)
    return results


class KnownPlans:
    """The plans of rounds, which members with the same cohorts share. They are forgotten before they take 256 MB."""

    def __init__(self) -> None:
        self._known: dict[Any, RoundPlan] = {}
        self._bytes = 0

    def stacked(self, traced: TracedRounds, layout: Layout, member: Member, rounds: range, length: int) -> RoundPlan:
        """Returns the plans of some rounds of a member, leaves ``[length, ...]``; see `RoundPlan.stacked`."""
        name = layout, member.plans, rounds, length
        if name not in self._known:
            batches, loops = member.algorithm.batches, traced.trace().loops
            found = RoundPlan.stacked(
                [plan_round(member.cohort(r), layout, batches, loops) for r in rounds or range(1)], length
            )
            found = found if rounds else jax.tree.map(np.zeros_like, found)  # rounds without clients
            self._bytes += (size := sum(x.nbytes for x in found))
            if self._bytes > _KEPT_PLANS_BYTES:
                self._known.clear()
                self._bytes = size
            self._known[name] = found
        return self._known[name]


class Wave:
    """Members that run at the same time. Their states stay on the devices between dispatches.

    Args:
      members: one or more, at most ``side_by_side`` for each device, for which `obstacle` returns None.
      execution: see `run_members`.
      side_by_side: how many members run side by side on a device.
      widest: the cohort with the most slots of all members.
      length: the number of rounds that a dispatch has space for. Waves with equal lengths share one compiled program.
      plans: the plans that members of this wave share with those of other waves.

    Attributes:
      size: the number of members.
      states: the states of all members and their tables of clients' memories, on the devices, for `read_states`.
    """

    def __init__(
        self, members: Sequence[Member], execution: Jit, *, side_by_side: int, widest: Cohort, length: int, plans: KnownPlans
    ) -> None:
        mesh, data = execution.mesh(), widest.data
        assert all(member.cohort(0).data is data for member in members), "members that run together have the same data"
        device = mesh.devices.flat[0]
        self.size, self._length, self._slots, self._plans = len(members), length, widest.slots, plans
        # Places without a member have the state of the last one and run no round.
        self._members = [*members, *[members[-1]] * (side_by_side * mesh.size - self.size)]
        full = [remembered(member.algorithm, member.state, data) for member in self._members]
        self._traced, numbers = _traced_and_numbers(self._members, full, data)
        lanes = execution.lanes
        if lanes is None and device.platform != "cpu":
            lanes = max(1, lanes_for(self._traced.trace().state_bytes) // side_by_side)
        alone = Pmap(devices=(device,), lanes=lanes)
        self._layout = alone._layout(self._traced, widest, alone.mesh())
        self._columns = _placement.resident_columns(data, mesh)
        rows, keys = max(1, data.num_examples), [rng.typed(member.cohort(0).key) for member in self._members]
        options = CompileOptions(
            alone.mesh(), self._layout, True, True, widest.attack, execution.deterministic, rows, keys[0].dtype
        )
        self._traced.check(widest, options)
        self._run = _compiled(self._traced, options, mesh, side_by_side)
        placed = [_memory.placed(state, alone.mesh(), "resident") for state in full]
        tables = [parts_of(state).clients for state in placed]
        states = [state._replace(clients=()) if clients != () else state for state, clients in zip(placed, tables, strict=True)]
        table, state, key = (joined(jax.device_get(of_members), np.stack) for of_members in (tables, states, keys))
        # Unlike NumPy, JAX keeps Python floats weakly typed here, as they are as arguments of a program.
        numbers = jax.tree.map(lambda *values: jnp.stack([jnp.asarray(value) for value in values]), *numbers)
        own = NamedSharding(mesh, P(AXIS))
        self._numbers, self._key, self.states = jax.device_put((numbers, key, (state, table)), own)
        self._members = [member._replace(state=None) for member in self._members]  # frees the memory of the first states

    def run(self, rounds: Sequence[range]) -> Any:
        """Dispatches the next rounds of every member.

        Args:
          rounds: for each member. All have the same number of rounds; a member with an empty range runs no round, and its state
            must not be used afterwards.

        Returns:
          The infos of the rounds on the devices, for `read_infos`.
        """
        numbered = [*rounds, *[range(0)] * (len(self._members) - len(rounds))]
        plans = [
            self._plans.stacked(self._traced, self._layout, member, own, self._length)
            for member, own in zip(self._members, numbered, strict=True)
        ]
        of_members = jax.tree.map(lambda *fields: np.stack(fields), *plans)
        state, table = self.states
        state, table, info = self._run(
            self._numbers, self._columns, table, state, self._key, of_members, np.int32(max(map(len, rounds)))
        )
        self.states = state, table
        return info

    def read_infos(self, info: Any, rounds: int) -> Any:
        """Waits for a dispatch of ``rounds`` rounds; returns its infos on the host, leaves ``[members, rounds, ...]``."""
        info = jax.tree.map(lambda x: x[: self.size, :rounds], jax.device_get(info))
        if isinstance(info, RoundInfo):
            info = info._replace(clients=jax.tree.map(lambda x: x[:, :, : self._slots], info.clients))
        return info

    def read_states(self, states: Any) -> State:
        """Returns states on the host, leaves ``[members, ...]``; ``states`` is a value that the attribute had."""
        state, table = jax.tree.map(lambda x: x[: self.size], jax.device_get(states))
        return state._replace(clients=table) if table != () else state


def _traced_and_numbers(members: Sequence[Member], states: Sequence[State], data: FederatedData) -> tuple[TracedRounds, Any]:
    """Returns the programs that all members share, and each member's numbers."""
    found = [traced_rounds(member.algorithm, server_state(state), data) for member, state in zip(members, states, strict=True)]
    traced = found[0][0]
    assert all(own is traced for own, _ in found), "members that run together share programs"
    return traced, [numbers for _, numbers in found]


@functools.lru_cache(maxsize=32)
def _compiled(traced: TracedRounds, options: CompileOptions, mesh: Mesh, side_by_side: int) -> CompiledFunction:
    """Compiles the rounds of ``side_by_side`` members per device."""
    rounds = traced.compiled(options).run_rounds

    def together(
        numbers: Any, columns: Any, table: Any, state: State, key: jax.Array, plans: RoundPlan, num_rounds: jax.Array
    ) -> tuple[State, Any, RoundInfo]:
        if side_by_side == 1:
            own = jax.tree.map(lambda x: x[0], (numbers, table, state, key, plans))
            numbers, table, state, key, plans = own
            return jax.tree.map(lambda x: x[None], rounds(numbers, columns, table, state, key, plans, num_rounds))
        return jax.vmap(rounds, in_axes=(0, None, 0, 0, 0, 0, None))(numbers, columns, table, state, key, plans, num_rounds)

    own = P(AXIS)
    specs = (own, P(), own, own, own, own, P())
    return compiled(together, mesh, (specs, own), deterministic=options.deterministic)


def joined(parts: Sequence[Any], join: Callable[..., np.ndarray]) -> Any:
    """Joins the leaves of pytrees on the host, with `np.stack`, for example. Arrays of random keys stay JAX arrays.

    >>> joined([{"w": np.zeros(3)}, {"w": np.ones(3)}], np.stack)["w"].shape
    (2, 3)
    """

    def join_leaves(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.Array) and jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
            words = join([np.asarray(jax.random.key_data(leaf)) for leaf in leaves])
            return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(leaves[0]))
        return join([np.asarray(leaf) for leaf in leaves])

    return jax.tree.map(join_leaves, *parts)
