"""Several federations in one program: members of a population, which differ in numbers, states, cohorts and keys."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import tree
from fedsim.data import Cohort, FederatedData
from fedsim.execution import _devices, _memory, _placement
from fedsim.execution._device_clients import Setting
from fedsim.execution._execution import Jit, Pmap
from fedsim.execution._memory import remembered
from fedsim.execution._placement import AXIS
from fedsim.execution._plan import Layout, lanes_for, num_steps, plan_round, windows
from fedsim.execution._programs import Programs, programs_for
from fedsim.execution._state import FederatedAlgorithm, RoundInfo, State, parts_of, server_state

# Fewer rounds per dispatch show progress more often; more rounds wait less often for the host.
_ROUNDS_PER_DISPATCH = 32
# The states before and after a dispatch exist at the same time, and a loop over rounds may copy one more.
_COPIES_OF_STATE = 3
_SHARE_OF_MEMORY = 0.5
_KEPT_PLANS_BYTES = 2**28


class Member(NamedTuple):
    """One federation of a population.

    Attributes:
      algorithm: its algorithm. Those of all members share programs.
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
    if most_side_by_side(state, mesh, data) < 1:
        return "the states of the members do not fit the memory"
    outline = programs_for(algorithm, server_state(state), data)[0].outline
    if mesh.devices.flat[0].platform == "cpu":
        alone = Layout(cohort.slots, 1)
        plan = plan_round(cohort, alone, algorithm.batches, outline.loops)
        for call in outline.calls:
            if len(windows(plan, alone, num_steps(plan.size, plan.most_steps, algorithm.batches, call.batches))) > 1:
                return "their rounds are so long that a CPU runs each as several programs"
    return None


def most_side_by_side(state: State, mesh: Mesh, data: FederatedData) -> int:
    """Returns how many members' states, with the memories of all clients, fit the memory of one device."""
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
      advance: called with the number of finished rounds, of all members together, whenever some are finished.

    Returns:
      The states, leaves ``[members, ...]``, and the infos, leaves ``[members, rounds, ...]``, both on the host.
    """
    distinct = {member.plans: member for member in members}.values()
    widest = max((member.cohort(r) for member in distinct for r in range(rounds)), key=lambda cohort: cohort.slots)
    states, infos, start = [], [], 0
    packed: dict[Any, np.ndarray] = {}
    while start < len(members):
        together = members[start : start + side_by_side * execution.mesh().size]
        try:
            state, info = _run_wave(together, rounds, execution, side_by_side, widest, packed, advance)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or side_by_side == 1:
                raise
            warnings.warn(
                f"The device ran out of memory with {side_by_side} members side by side, so they run again with "
                f"{side_by_side // 2}.",
                stacklevel=3,
            )
            side_by_side //= 2
            continue
        states.append(state)
        infos.append(info)
        start += len(together)
    return joined(states, np.concatenate), joined(infos, np.concatenate)


def _run_wave(
    members: Sequence[Member], rounds: int, execution: Jit, side_by_side: int, widest: Cohort,
    known_plans: dict[Any, np.ndarray], advance: Callable[[int], object],
) -> tuple[State, RoundInfo]:  # fmt: skip
    """Runs as many members as run at a time."""
    mesh, data, count = execution.mesh(), widest.data, len(members)
    device = mesh.devices.flat[0]
    # Devices without a member of their own repeat the last one.
    members = [*members, *[members[-1]] * (side_by_side * mesh.size - count)]
    full = [remembered(member.algorithm, member.state, data) for member in members]
    programs, numbers = _programs_and_numbers(members, full, data)
    lanes = execution.lanes
    if lanes is None and device.platform != "cpu":
        lanes = max(1, lanes_for(programs.outline.state_bytes) // side_by_side)
    alone = Pmap(devices=(device,), lanes=lanes)
    layout = alone._layout(programs, widest, alone.mesh())
    setting = Setting(alone.mesh(), layout, True, True, widest.attack, execution.deterministic)
    programs.check(widest, setting)
    run = _compiled(programs, setting, mesh, side_by_side)
    placed = [_memory.placed(state, alone.mesh(), "resident") for state in full]
    table = [parts_of(state).clients for state in placed]
    state = [state._replace(clients=()) if clients != () else state for state, clients in zip(placed, table, strict=True)]
    target = NamedSharding(mesh, P(AXIS))
    keys = [member.cohort(0).key for member in members]
    table, state, key = (joined(jax.device_get(of_members), np.stack) for of_members in (table, state, keys))
    # Unlike NumPy, JAX keeps Python floats weakly typed here, as they are as arguments of a program.
    numbers = jax.tree.map(lambda *values: jnp.stack([jnp.asarray(value) for value in values]), *numbers)
    numbers, table, state, key = jax.device_put((numbers, table, state, key), target)
    columns = _placement.resident_columns(data, mesh)
    length, infos, unread = min(rounds, _ROUNDS_PER_DISPATCH), [], None

    def read(dispatched: tuple[Any, int]) -> None:
        info, of_dispatch = dispatched
        infos.append(jax.tree.map(lambda x: x[:count, :of_dispatch], jax.device_get(info)))
        advance(count * of_dispatch)

    for start in range(0, rounds, length):
        numbered = range(start, min(start + length, rounds))
        packed = np.stack([_packed(programs, layout, member, numbered, length, known_plans) for member in members])
        state, table, info = run(numbers, columns, table, state, key, packed, np.int32(len(numbered)))
        if unread:
            read(unread)
        unread = info, len(numbered)
    assert unread is not None
    read(unread)
    state, table = jax.tree.map(lambda x: x[:count], jax.device_get((state, table)))
    if table != ():
        state = state._replace(clients=table)
    info = joined(infos, functools.partial(np.concatenate, axis=1))
    if isinstance(info, RoundInfo):
        info = info._replace(clients=jax.tree.map(lambda x: x[:, :, : widest.slots], info.clients))
    return state, info


def _programs_and_numbers(members: Sequence[Member], states: Sequence[State], data: FederatedData) -> tuple[Programs, Any]:
    """Returns the programs that all members share, and each member's numbers."""
    found = [programs_for(member.algorithm, server_state(state), data) for member, state in zip(members, states, strict=True)]
    programs = found[0][0]
    assert all(own is programs for own, _ in found), "members that run together share programs"
    return programs, [numbers for _, numbers in found]


@functools.lru_cache(maxsize=32)
def _compiled(programs: Programs, setting: Setting, mesh: Mesh, side_by_side: int) -> Callable[..., Any]:
    """Compiles the rounds of ``side_by_side`` members per device."""
    rounds = programs.by_setting(setting)._rounds

    def together(
        numbers: Any, columns: Any, table: Any, state: State, key: jax.Array, packed: jax.Array, num_rounds: jax.Array
    ) -> tuple[State, Any, RoundInfo]:
        if side_by_side == 1:
            own = jax.tree.map(lambda x: x[0], (numbers, table, state, key, packed))
            numbers, table, state, key, packed = own
            return jax.tree.map(lambda x: x[None], rounds(numbers, columns, table, state, key, packed, num_rounds))
        return jax.vmap(rounds, in_axes=(0, None, 0, 0, 0, 0, None))(numbers, columns, table, state, key, packed, num_rounds)

    own = P(AXIS)
    specs = (own, P(), own, own, own, own, P())
    return _devices.compiled(together, mesh, specs, own, deterministic=setting.deterministic)


def _packed(
    programs: Programs, layout: Layout, member: Member, rounds: range, length: int, known: dict[Any, np.ndarray]
) -> np.ndarray:
    """Returns the plans of some rounds of a member. Members with the same cohorts use the same plans."""
    name = layout, member.plans, rounds
    if name not in known:
        batches, loops = member.algorithm.batches, programs.outline.loops
        plans = [plan_round(member.cohort(r), layout, batches, loops) for r in rounds]
        if sum(packed.nbytes for packed in known.values()) > _KEPT_PLANS_BYTES:
            known.clear()
        known[name] = layout.pack(plans, length)
    return known[name]


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
