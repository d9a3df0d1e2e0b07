"""`Execution`: how a cohort is run, as a value. Choosing it changes the speed and never the answer."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Generator, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedsim import checks
from fedsim.data import ClientRows, Cohort
from fedsim.execution import _moved_rows, _placement
from fedsim.execution._contract import ClientTable, FederatedProgram, RoundInfo, State
from fedsim.execution._memory import placed, remember, split, with_clients, without_clients
from fedsim.execution._placement import AXIS, Memory
from fedsim.execution._plan import Layout, RoundPlan, is_long, of_phase, plan_round, windows
from fedsim.execution._round import Given, compiled_rounds, whole_round


class Execution:
    """How rounds are run. Subclasses are frozen dataclasses: recorded with a run, never a global.

    States come back on the devices that ran the round; another execution takes them from there. To mix states of two
    executions in arithmetic of your own, bring them to the host first, by `jax.device_get`.

    Guarantees:
      - A cohort gives the same answer whatever its slots, up to the order of floating-point sums.
      - Cohorts of equal slots share one compiled program, whatever their sizes.
      - A cohort without clients leaves the state as it was, to the bit.
    """

    def run(
        self, program: FederatedProgram, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        """Runs one round per cohort, in order.

        Args:
          program: the algorithm.
          state: its state before the first of these rounds; not changed.
          cohorts: one or more, all of the same population, root key and number of slots (by default, of clients).
          max_rounds: calls with any number of cohorts up to this share one compiled program; default: as many as given.

        Returns:
          The state after the last round, and each round's info, stacked: leaves ``[rounds, ...]``.
        """
        raise NotImplementedError

    def run_one(self, program: FederatedProgram, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """`run` for a single round, with an info that is not stacked."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jit(Execution):
    """Compiled, on one device.

    Attributes:
      lanes: clients side by side on the device, at most as many as it has. None: 1 on a CPU (more are slower there), up to
        16 elsewhere.
      memory: ``"resident"``: the whole population on the device; ``"stream"``: only the cohorts' rows, gathered while the
        previous rounds train; ``"auto"``: resident if it fits. What clients keep between rounds goes by the same setting.

    >>> Jit(lanes=4)
    Jit(lanes=4, memory='auto')
    """

    lanes: int | None = None
    memory: Memory = "auto"

    def __post_init__(self) -> None:
        checks.whole(1, or_none=True, lanes=self.lanes, remedy="None chooses by the device")
        checks.one_of("auto", "resident", "stream", memory=self.memory)

    def mesh(self) -> Mesh:
        """The devices in use."""
        return _mesh(1)

    def run(
        self, program: FederatedProgram, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        check_cohorts(program, cohorts)
        first, mesh = cohorts[0], self.mesh()
        state = placed(remember(program, state, first.data), mesh, self.memory)
        rounds = min(max(max_rounds or 0, len(cohorts)), _moved_rows.most_rounds(state, first.slots, mesh))
        infos, start = [], 0
        while start < len(cohorts):
            state, info, count = self._dispatch(program, state, cohorts[start : start + rounds], rounds, stacked=True)
            infos.append((info, count))
            start += count
        if len(infos) == 1:
            return state, jax.tree.map(lambda x: x[:count], info) if count < rounds else info
        # On the host, for a device would compile every new number of rounds.
        parts = [jax.tree.map(lambda x, n=n: x[:n], info) for info, n in jax.device_get(infos)]
        return state, jax.tree.map(lambda *rows: jnp.asarray(np.concatenate(rows)), *parts)

    def run_one(self, program: FederatedProgram, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        check_cohorts(program, [cohort])
        mesh = self.mesh()  # first, for it may not be there
        state = placed(remember(program, state, cohort.data), mesh, self.memory)
        return self._dispatch(program, state, [cohort], 1, stacked=False)[:2]

    def _dispatch(
        self, program: FederatedProgram, state: State, cohorts: Sequence[Cohort], rounds: int, stacked: bool
    ) -> tuple[State, RoundInfo, int]:
        """Runs the first of these rounds, those that can go together; returns how many, too."""
        mesh, slots = self.mesh(), cohorts[0].slots
        layout = Layout(slots, mesh.size, self._lanes(slots, mesh))
        clients = split(state).clients
        limit = _moved_rows.most_rows(slots, mesh.size) if isinstance(clients, ClientRows) else None
        planned = (plan_round(cohort, program.batches, mesh.size, layout.lanes, program.preview, limit) for cohort in cohorts)
        planned = _short_or_alone(program, planned)
        if not isinstance(clients, ClientRows):
            plans = list(planned)
            return *self._run(program, state, (), cohorts, plans, layout, rounds, stacked), len(plans)
        before, table, plans, who = _moved_rows.rows_for(clients, planned, slots, mesh, rounds)
        after, infos = self._run(program, with_clients(state, table), before, cohorts, plans, layout, rounds, stacked)
        return (
            after._replace(clients=_moved_rows.rows_after(clients, after.clients, who, len(program.phases), mesh)),
            infos,
            len(plans),
        )

    def _run(
        self,
        program: FederatedProgram,
        state: State,
        before: ClientTable | tuple[()],
        cohorts: Sequence[Cohort],
        plans: Sequence[RoundPlan],
        layout: Layout,
        rounds: int,
        stacked: bool,
    ) -> tuple[State, RoundInfo]:
        data, mesh = cohorts[0].data, self.mesh()
        resident = _placement.is_resident(data, mesh, self.memory)
        if resident:
            columns = _placement.resident_columns(data, mesh)
        else:
            columns, plans = _placement.streamed_columns(data, plans, mesh, rounds)
        lies = before.seen.sharding.spec if isinstance(before, ClientTable) else None
        compiled = compiled_rounds(program, mesh, layout, resident, lies, stacked, cohorts[0].attack)
        given = Given(columns, before)
        state, table = without_clients(state)
        state, key = _placement.replicate(state, mesh), _placement.resident_key(data, cohorts[0].key, mesh)
        packed = layout.pack(plans, rounds)
        if not resident or _placement.must_wait(mesh):
            # Streaming: this dispatch's rows were gathered while the last one ran; waiting now keeps at most two around.
            jax.block_until_ready((state, table))
        if len(plans) > 1 or not _is_long(program, plans[0]):
            state, table, infos = compiled.rounds(given, table, state, key, packed, np.int32(len(plans)))
            return with_clients(state, table), infos
        packed = packed[:1]
        of_phases = []
        for whole, phase in zip(program.phases, compiled.phases, strict=True):
            carry = phase.begin(given, table, state, key, packed)
            for part in windows(of_phase(plans[0], whole.batches, whole is program), whole.preview):
                carry = phase.fold(given, state, key, packed, part, carry)
            state, table, info = phase.finish(table, state, key, packed, carry)
            of_phases.append(info)
        after = with_clients(state, table), whole_round(of_phases)
        # Of several programs under way, what is dispatched behind them can take the threads that an all-reduce needs.
        return jax.block_until_ready(after) if _placement.must_wait(mesh) else after

    def _lanes(self, clients: int, mesh: Mesh) -> int:
        if self.lanes is not None:
            return min(self.lanes, -(-clients // mesh.size))
        return 1 if mesh.devices.flat[0].platform == "cpu" else min(16, -(-clients // mesh.size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pmap(Jit):
    """Compiled, the cohort spread over several local devices (`jax.shard_map`, the modern pmap), one all-reduce a round.

    On a CPU make every core a device before JAX starts: `fedsim.use_all_cores`.

    Attributes:
      devices: how many local devices; None: all.

    Raises:
      ValueError: more devices than there are.

    >>> Pmap(devices=2)
    Pmap(lanes=None, memory='auto', devices=2)
    """

    devices: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(1, or_none=True, devices=self.devices, remedy="None takes all")

    def mesh(self) -> Mesh:
        there = jax.local_device_count()
        if self.devices is not None and self.devices > there:
            raise ValueError(
                f"devices={self.devices} are asked for, and there are {there}. Ask for fewer; on a CPU call "
                f"fedsim.use_all_cores({self.devices}) before JAX starts."
            )
        return _mesh(self.devices or there)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(Pmap):
    """`Pmap` over all local devices, which is `Jit` where there is one.

    >>> Auto().mesh().size == jax.local_device_count()
    True
    """


@functools.cache
def _mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.local_devices()[:devices]), (AXIS,))


def check_cohorts(program: FederatedProgram, cohorts: Sequence[Cohort]) -> None:
    """Raises ``ValueError`` before anything is compiled: data that the program cannot read, cohorts that do not match."""
    if not cohorts:
        raise ValueError("Expected at least one cohort, got none.")
    first = cohorts[0]
    for cohort in cohorts:
        if not runs_with(cohort, first):
            raise ValueError(
                "Cohorts that run together need one population, number of slots, root key and attack: run them apart."
            )
    checked = vars(program).setdefault("_checked", weakref.WeakSet())
    if first.data not in checked:
        first.data.check_dtypes()
        program.check(first.data)
        checked.add(first.data)
    attacked = vars(first.data).setdefault("_attacked", set())
    if first.attack is not None and first.attack not in attacked:
        first.attack.check(first.data)
        attacked.add(first.attack)


def runs_with(cohort: Cohort, other: Cohort) -> bool:
    """Whether two cohorts can run in one dispatch: one population, one number of slots, one root key, one attack.

    >>> from fedsim.data import FederatedData
    >>> from fedsim.samplers import UniformSampler
    >>> data = FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[1, 2])
    >>> first, second = UniformSampler(data, clients=1, seed=0).rounds(2)
    >>> runs_with(second, first), runs_with(UniformSampler(data, clients=1, seed=1).cohort(0), first)
    (True, False)
    """
    same_key = cohort.key is other.key or bool(cohort.key == other.key)
    return cohort.data is other.data and cohort.slots == other.slots and same_key and cohort.attack == other.attack


def _is_long(program: FederatedProgram, plan: RoundPlan) -> bool:
    """Whether the round may be more than one program, for one of its phases."""
    return any(is_long(of_phase(plan, phase.batches, phase is program), phase.preview) for phase in program.phases)


def _short_or_alone(program: FederatedProgram, plans: Iterable[RoundPlan]) -> Generator[RoundPlan, None, None]:
    """The first of these rounds: a long one, which takes several programs, or those before the next long one.

    In several programs lanes are merged several times: so that sums are the same whatever it is dispatched with, a long round
    is always by itself.
    """
    for at, plan in enumerate(plans):
        long = _is_long(program, plan)
        if not long or at == 0:
            yield plan
        if long:
            return
