"""`Execution`: how a cohort is run, as a value. Choosing it changes the speed and never the answer."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import checks, rng, tree
from fedsim.attacks import Attack
from fedsim.data import ClientRows, Cohort
from fedsim.execution import _memory, _placement
from fedsim.execution._cohort_loop import Carry, Info, Lane, folding, put, roster, round_info, run_sequential, run_side_by_side
from fedsim.execution._contract import ClientTable, FederatedProgram, Remembered, RoundInfo, State, Turnout, update_shape
from fedsim.execution._memory import Turn, averaged, down, join, joined, parted, placed, remember, split, turns
from fedsim.execution._placement import AXIS, Memory
from fedsim.execution._plan import Layout, RoundPlan, is_long, of_phase, plan_round, windows


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
        rounds = min(max(max_rounds or 0, len(cohorts)), _memory.most_rounds(state, first.slots, mesh.size))
        infos, start = [], 0
        while start < len(cohorts):
            state, info, count = self._dispatch(program, state, cohorts[start : start + rounds], rounds, stacked=True)
            infos.append((info, count))
            start += count
        if len(infos) == 1:
            return state, jax.tree.map(lambda x: x[:count], info) if count < rounds else info
        if isinstance(split(state).clients, ClientRows):
            # They are there, for rows were waited for; and on the host no new length has to be compiled.
            infos = [(jax.device_get(info), n) for info, n in infos]
        parts = [jax.tree.map(lambda x, n=n: x[:n], info) for info, n in infos]
        return state, jax.tree.map(lambda *rows: jnp.asarray(_concatenate(rows)), *parts)

    def run_one(self, program: FederatedProgram, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        check_cohorts(program, [cohort])
        mesh = self.mesh()
        state = placed(remember(program, state, cohort.data), mesh, self.memory)
        return self._dispatch(program, state, [cohort], 1, stacked=False)[:2]

    def _dispatch(
        self, program: FederatedProgram, state: State, cohorts: Sequence[Cohort], rounds: int, stacked: bool
    ) -> tuple[State, RoundInfo, int]:
        """Runs the first of these rounds, those that can go together; returns how many, too."""
        mesh, slots = self.mesh(), cohorts[0].slots
        layout = Layout(slots, mesh.size, self._lanes(slots, mesh))
        clients = split(state).clients
        moving = isinstance(clients, ClientRows)
        most = _memory.most_rows(slots, mesh.size) if moving else None
        planned = (plan_round(cohort, program.batches, mesh.size, layout.lanes, program.preview, most) for cohort in cohorts)
        planned = _short_or_alone(program, planned)
        if not isinstance(clients, ClientRows):
            plans = list(planned)
            return *self._run(program, state, moving, cohorts, plans, layout, rounds, stacked), len(plans)
        table, plans, who = _memory.brought(clients, planned, slots, mesh.size, rounds)
        table = jax.device_put(table, NamedSharding(mesh, P(AXIS)))
        after, infos = self._run(program, joined(state, table), moving, cohorts, plans, layout, rounds, stacked)
        return after._replace(clients=_memory.taken_back(clients, after.clients, who)), infos, len(plans)

    def _run(
        self,
        program: FederatedProgram,
        state: State,
        moving: bool,
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
        compiled = _compiled(program, mesh, layout, resident, moving, stacked, cohorts[0].attack)
        state, table = parted(state)
        state, key = _placement.replicate((state, cohorts[0].key), mesh)
        packed = layout.pack(plans, rounds)
        if not resident or _placement.must_wait(mesh):
            # Streaming: this dispatch's rows were gathered while the last one ran; waiting now keeps at most two around.
            jax.block_until_ready((state, table))
        windows_of = []
        if len(plans) == 1:
            own = [of_phase(plans[0], phase.batches, phase is program) for phase in program.phases]
            windows_of = [windows(plan, phase.preview) for plan, phase in zip(own, program.phases, strict=True)]
        if all(len(parts) < 2 for parts in windows_of):
            state, table, infos = compiled.rounds(columns, table, state, key, packed, np.int32(len(plans)))
            return joined(state, table), infos
        packed = packed[:1]
        of_phases = []
        for phase, parts in zip(compiled.phases, windows_of, strict=True):
            carry = phase.begin(columns, table, state, key, packed)
            for part in parts:
                carry = phase.fold(columns, state, key, packed, part, carry)
            state, table, info = phase.finish(table, state, key, packed, carry)
            of_phases.append(info)
        return joined(state, table), whole_round(of_phases)

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


def _short_or_alone(program: FederatedProgram, plans: Iterable[RoundPlan]) -> Generator[RoundPlan, None, None]:
    """The first of these rounds: a long one, which takes several programs, or those before the next long one.

    In several programs lanes are merged several times: so that sums are the same whatever it is dispatched with, a long round
    is always by itself.
    """
    for at, plan in enumerate(plans):
        long = any(is_long(of_phase(plan, phase.batches, phase is program), phase.preview) for phase in program.phases)
        if not long or at == 0:
            yield plan
        if long:
            return


def _concatenate(parts: Sequence[Any]) -> Any:
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else jnp.concatenate(parts)


class _Phase(NamedTuple):
    """One phase of one round in three programs, for cohorts that are too long for one."""

    begin: Callable[..., Any]
    fold: Callable[..., Any]
    finish: Callable[..., Any]


class _Compiled(NamedTuple):
    """Whole rounds in one program; and the phases of one round."""

    rounds: Callable[..., Any]
    phases: tuple[_Phase, ...]


def _compiled(program: FederatedProgram, *how: Any) -> _Compiled:
    """The jitted functions of a program and a way of running it, kept with the program so that both go together."""
    kept = vars(program).setdefault("_compiled", {})
    if how not in kept:
        kept[how] = _compile(program, *how)
    return kept[how]


def _compile(
    program: FederatedProgram, mesh: Mesh, layout: Layout, resident: bool, moving: bool, stacked: bool, attack: Attack | None
) -> _Compiled:
    """Compiles for columns that are ``resident`` or come with a dispatch, and for clients' rows that are ``moving`` or stay."""
    platform = mesh.devices.flat[0].platform

    def enter(turn: Turn, columns: Any, state: State, key: jax.Array, packed: jax.Array) -> tuple[RoundPlan, Lane]:
        phase, parts = turn.phase, turn.sees(split(state))
        plan = of_phase(layout.unpack(packed), phase.batches, turn.last)
        shared, _, _ = down(phase, phase.broadcast(parts.server), parts.downlink, rng.round_key(key, plan.round, "downlink"))
        return plan, Lane(phase, columns, shared, roster(plan, key), parts.aggregator, attack)

    def empty(lane: Lane, turn: Turn, state: State) -> Carry:
        carry = lane.empty(turn.sees(split(state)).clients)
        _placement.must_fit(lane.aggregator, carry.accumulator, layout.slots, layout.lanes, mesh)
        return carry

    def train(lane: Lane, plan: RoundPlan, windows: jax.Array, carry: Carry) -> Carry:
        device = jax.lax.axis_index(AXIS)
        if layout.lanes == 1:
            return run_sequential(lane, plan.queue[device][0], windows[device][0], carry)
        return run_side_by_side(lane, plan.queue[device], windows[device], carry, 1 if platform == "cpu" else 8)

    def gather(turn: Turn, state: State, key: jax.Array, plan: RoundPlan, carry: Carry) -> tuple[State, RoundInfo]:
        accumulator = folding(turn.phase, attack, plan.attacker > 0).merge_devices(carry.accumulator, AXIS)
        lines, table = together(carry, plan.keeps)
        came = jnp.sum(plan.length, dtype=jnp.int32)
        return finish_round(turn, state, key, plan, accumulator, lines, table, came, attack)

    def together(carry: Carry, keeps: jax.Array) -> tuple[Info, ClientTable | tuple[()]]:
        # Every client's line was written by one device only; elsewhere it is 0.
        table = carry.table
        if moving or mesh.size == 1 or not isinstance(table, ClientTable) or not jax.tree.leaves(table.rows):
            return jax.lax.psum(carry.lines, AXIS), table
        # Each device has everybody's row, and the others get from it those that it wrote.
        at, wrote = jnp.minimum(keeps, len(table.seen) - 1), carry.lines["weight"] != 0
        written = jax.vmap(lambda wrote, rows: tree.select(wrote, rows, jax.tree.map(jnp.zeros_like, rows)))
        lines, rows = jax.lax.psum((carry.lines, written(wrote, jax.tree.map(lambda leaf: leaf[at], table.rows))), AXIS)
        to = jnp.where(lines["weight"] != 0, keeps, len(table.seen))
        rows = jax.tree.map(lambda row, leaf: row.astype(leaf.dtype), rows, table.rows)
        if platform != "cpu":
            return lines, put(table, to, rows)

        def one(slot: jax.Array, table: ClientTable) -> ClientTable:
            return put(table, to[slot], jax.tree.map(lambda rows: rows[slot], rows))

        return lines, jax.lax.fori_loop(0, len(to), one, table)

    def one_round(columns: Any, state: State, key: jax.Array, packed: jax.Array) -> tuple[State, RoundInfo]:
        infos = []
        for turn in turns(program):
            plan, lane = enter(turn, columns, state, key, packed)
            windows = jnp.stack([jnp.zeros_like(plan.length), plan.length], axis=-1)
            state, info = gather(turn, state, key, plan, train(lane, plan, windows, empty(lane, turn, state)))
            infos.append(info)
        return state, whole_round(infos)

    def rounds(
        columns: Any, table: Any, state: State, key: jax.Array, plan: jax.Array, num_rounds: jax.Array
    ) -> tuple[State, Any, RoundInfo]:
        state = joined(state, table)
        if not stacked:
            state, info = one_round(columns, state, key, plan[0])
            return *parted(state), info

        def body(r: jax.Array, carry: tuple[State, RoundInfo]) -> tuple[State, RoundInfo]:
            state, infos = carry
            state, info = one_round(columns, state, key, plan[r])
            return state, jax.tree.map(lambda rows, row: rows.at[r].set(row), infos, info)

        _, shapes = jax.eval_shape(lambda s: one_round(columns, s, key, plan[0]), state)
        room = jax.tree.map(lambda x: jnp.zeros((plan.shape[0], *x.shape), x.dtype), shapes)
        state, infos = jax.lax.fori_loop(0, num_rounds, body, (state, room))
        return *parted(state), infos

    def in_parts(turn: Turn) -> _Phase:
        # Between the programs of one round every device keeps its own fold: a new first axis, over the devices.
        def begin(columns: Any, table: Any, state: State, key: jax.Array, plan: jax.Array) -> Any:
            lane = enter(turn, columns, state, key, plan[0])[1]
            return jax.tree.map(lambda x: x[None], empty(lane, turn, joined(state, table)))

        def fold(columns: Any, state: State, key: jax.Array, packed: jax.Array, windows: jax.Array, carry: Any) -> Any:
            plan, lane = enter(turn, columns, state, key, packed[0])
            carry = train(lane, plan, windows, jax.tree.map(lambda x: x[0], carry))
            return jax.tree.map(lambda x: x[None], carry)

        def finish(table: Any, state: State, key: jax.Array, packed: jax.Array, carry: Any) -> tuple[State, Any, RoundInfo]:
            carry = jax.tree.map(lambda x: x[0], carry)
            plan = of_phase(layout.unpack(packed[0]), turn.phase.batches, turn.last)
            state, info = gather(turn, joined(state, table), key, plan, carry)
            return *parted(state), jax.tree.map(lambda x: x[None], info) if stacked else info

        return _Phase(
            begin=compiled(begin, data, kept, P(), P(), P(), out=own),
            fold=compiled(fold, data, P(), P(), P(), P(), own, out=own, donated=5),
            finish=compiled(finish, kept, P(), P(), P(), own, out=(P(), kept, P())),
        )

    def compiled(function: Callable[..., Any], *specs: P, out: Any, donated: int | None = None) -> Callable[..., Any]:
        # check_vma asks that replicated outputs be proven so; the loops' bounds differ by device, which it cannot follow.
        function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        return jax.jit(function, donate_argnums=donated)

    data, kept, own = P() if resident else P(AXIS), P(AXIS) if moving else P(), P(AXIS)
    return _Compiled(
        # Rows that were brought for this dispatch are written in their place; a state's own table is its user's.
        rounds=compiled(rounds, data, kept, P(), P(), P(), P(), out=(P(), kept, P()), donated=1 if moving else None),
        phases=tuple(in_parts(turn) for turn in turns(program)),
    )


def finish_round(
    turn: Turn,
    state: State,
    key: jax.Array,
    plan: RoundPlan,
    accumulator: Any,
    lines: Info,
    table: Any,
    num_clients: jax.Array,
    attack: Attack | None = None,
    update: Any = None,
) -> tuple[State, RoundInfo]:
    """The server's part: a round in which nothing arrived leaves the state as it was.

    Args:
      turn: the algorithm, or a phase of it.
      state: before it.
      key: the run's root key.
      plan: of the round.
      accumulator: everybody's fold.
      lines: what `deliver` wrote, ``[slots, ...]``.
      table: what clients keep from now on; () if nothing.
      num_clients: of the cohort, ``int32 []``.
      attack: of the cohort.
      update: a client's update, for its shape, if one is at hand.
    """
    phase, whole = turn.phase, split(state)
    parts = turn.sees(whole)
    round_key = rng.round_key(key, plan.round, "downlink")
    shared, downlink, bits_down = down(phase, phase.broadcast(parts.server), parts.downlink, round_key)
    bits_down = tree.add_bits(bits_down, most=turn.of * tree.num_bits(shared))
    update = update_shape(phase, jax.eval_shape(phase.broadcast, parts.server)) if update is None else update
    aggregate, aggregator = folding(phase, attack, plan.attacker > 0).conclude(
        accumulator,
        parts.aggregator,
        # The same noise in two phases would cancel in the difference of what they send.
        rng.round_key(key, plan.round, "aggregator" if turn.last else f"aggregator of phase {turn.place}"),
    )
    attackers = {} if attack is None else {"attacker": plan.attacker > 0}
    info = round_info(lines | attackers, plan, num_clients, bits_down, update, turn.of)
    weight = jnp.sum(lines["weight"], dtype=jnp.float32)
    server = phase.server_round(parts.server, aggregate, Turnout(info.num_aggregated, weight, *plan.population))
    average = averaged(phase.averaging if turn.last else None, parts.average, getattr(server, "params", ()))
    after = Remembered(server, (), aggregator, downlink, average)
    after = tree.select(info.num_aggregated > 0, after, parts._replace(clients=()))
    return join(turn.leaves(whole, after._replace(clients=table)), state), info


def whole_round(infos: Sequence[RoundInfo]) -> RoundInfo:
    """A round's info from those of its phases: that of the last, with all that was sent and dropped on the way."""
    last, clients = infos[-1], dict(infos[-1].clients)
    for info in infos[:-1]:
        sent = ("bits_up", "bits_down", "entropy_bits_up")
        clients |= {name: tree.add_bits(clients[name], info.clients[name]) for name in sent}
        clients["dropped"] |= info.clients["dropped"]
    dropped = jnp.sum(clients["dropped"], axis=-1, dtype=jnp.int32) if len(infos) > 1 else last.num_dropped
    return last._replace(clients=clients, num_dropped=dropped)
