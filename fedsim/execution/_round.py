"""One round, or several, as compiled programs: what devices do side by side, and what the server makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedsim import rng, tree
from fedsim.attacks import Attack
from fedsim.execution import _devices, _placement
from fedsim.execution._cohort_loop import (
    Carry,
    Info,
    Lane,
    folding,
    put_rows,
    roster,
    round_info,
    run_sequential,
    run_side_by_side,
)
from fedsim.execution._contract import ClientTable, FederatedProgram, Remembered, RoundInfo, State, Turnout, update_shape
from fedsim.execution._memory import Turn, averaged, down, join, split, turns, with_clients, without_clients
from fedsim.execution._moved_rows import cleared, with_moves
from fedsim.execution._placement import AXIS
from fedsim.execution._plan import Layout, RoundPlan, of_phase


class Given(NamedTuple):
    """What devices read, and leave as it is: examples, and what clients kept ``before``, () where that is in the state."""

    columns: Any
    before: Any


class PhasePrograms(NamedTuple):
    """One phase of one round in three programs, for cohorts that are too long for one."""

    begin: Callable[..., Any]
    fold: Callable[..., Any]
    finish: Callable[..., Any]


class RoundPrograms(NamedTuple):
    """Whole rounds in one program; and the phases of one round."""

    rounds: Callable[..., Any]
    phases: tuple[PhasePrograms, ...]


def compiled_rounds(program: FederatedProgram, *how: Any) -> RoundPrograms:
    """The jitted functions of a program and a way of running it, kept with the program so that both go together."""
    kept = vars(program).setdefault("_compiled", {})
    if how not in kept:
        kept[how] = _compile(program, *how)
    return kept[how]


def _compile(
    program: FederatedProgram,
    mesh: Mesh,
    layout: Layout,
    resident: bool,
    before: P | None,
    stacked: bool,
    attack: Attack | None,
) -> RoundPrograms:
    """Compiles for columns that are ``resident`` or come with a dispatch, and for how clients' rows from ``before`` it lie.

    On every device, each on its own, or (None) in the state, which every device has.
    """
    moving = before is not None
    platform = mesh.devices.flat[0].platform

    def enter(turn: Turn, given: Given, state: State, key: jax.Array, packed: jax.Array) -> tuple[RoundPlan, Lane]:
        phase, parts, key = turn.phase, turn.sees(split(state)), turn.key(key)
        plan = of_phase(layout.unpack(packed), phase.batches, turn.last)
        shared, _, _ = down(phase, phase.broadcast(parts.server), parts.downlink, rng.round_key(key, plan.round, "downlink"))
        before = turn.part(given.before) if isinstance(given.before, ClientTable) else None
        return plan, Lane(phase, given.columns, shared, roster(plan, key), parts.aggregator, attack, before)

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
        lines, table = together(carry, plan.keeps)
        came = jnp.sum(plan.length, dtype=jnp.int32)
        return finish_round(turn, state, key, plan, carry.accumulator, lines, table, came, attack, axis=AXIS)

    def together(carry: Carry, keeps: jax.Array) -> tuple[Info, ClientTable | tuple[()]]:
        # Every client's line was written by one device only; elsewhere it is 0.
        table = carry.table
        if moving or mesh.size == 1 or not isinstance(table, ClientTable) or not jax.tree.leaves(table.rows):
            return tree.psum(carry.lines, AXIS), table
        # Each device has everybody's row, and the others get from it those that it wrote.
        at, wrote = jnp.minimum(keeps, len(table.seen) - 1), carry.lines["weight"] != 0
        written = jax.vmap(lambda wrote, rows: tree.select(wrote, rows, jax.tree.map(jnp.zeros_like, rows)))
        lines, rows = tree.psum((carry.lines, written(wrote, jax.tree.map(lambda leaf: leaf[at], table.rows))), AXIS)
        to = jnp.where(lines["weight"] != 0, keeps, len(table.seen))
        rows = jax.tree.map(lambda row, leaf: row.astype(leaf.dtype), rows, table.rows)
        if platform != "cpu":
            return lines, put_rows(table, to, rows)

        def one(slot: jax.Array, table: ClientTable) -> ClientTable:
            return put_rows(table, to[slot], jax.tree.map(lambda rows: rows[slot], rows))

        return lines, jax.lax.fori_loop(0, len(to), one, table)

    def one_round(given: Given, state: State, key: jax.Array, packed: jax.Array) -> tuple[State, RoundInfo]:
        infos = []
        for turn in turns(program):
            plan, lane = enter(turn, given, state, key, packed)
            windows = jnp.stack([jnp.zeros_like(plan.length), plan.length], axis=-1)
            state, info = gather(turn, state, key, plan, train(lane, plan, windows, empty(lane, turn, state)))
            infos.append(info)
        return state, whole_round(infos)

    def rounds(
        given: Given, table: Any, state: State, key: jax.Array, plan: jax.Array, num_rounds: jax.Array
    ) -> tuple[State, Any, RoundInfo]:
        state = with_clients(state, cleared(table) if moving else table)
        if not stacked:
            state, info = one_round(given, state, key, plan[0])
            return *without_clients(state), info

        def body(r: jax.Array, carry: tuple[State, RoundInfo]) -> tuple[State, RoundInfo]:
            state, infos = carry
            if moving and mesh.size > 1:
                state = with_clients(state, with_moves(split(state).clients, layout.unpack(plan[r]).moves))
            state, info = one_round(given, state, key, plan[r])
            return state, jax.tree.map(lambda rows, row: rows.at[r].set(row), infos, info)

        _, shapes = jax.eval_shape(lambda s: one_round(given, s, key, plan[0]), state)
        room = jax.tree.map(lambda x: jnp.zeros((plan.shape[0], *x.shape), x.dtype), shapes)
        state, infos = jax.lax.fori_loop(0, num_rounds, body, (state, room))
        return *without_clients(state), infos

    def in_parts(turn: Turn) -> PhasePrograms:
        def room(table: Any) -> Any:
            return cleared(table) if moving and not turn.place else table

        # Between the programs of one round every device keeps its own fold: a new first axis, over the devices.
        def begin(given: Given, table: Any, state: State, key: jax.Array, plan: jax.Array) -> Any:
            lane = enter(turn, given, state, key, plan[0])[1]
            return jax.tree.map(lambda x: x[None], empty(lane, turn, with_clients(state, room(table))))

        def fold(given: Given, state: State, key: jax.Array, packed: jax.Array, windows: jax.Array, carry: Any) -> Any:
            plan, lane = enter(turn, given, state, key, packed[0])
            carry = train(lane, plan, windows, jax.tree.map(lambda x: x[0], carry))
            return jax.tree.map(lambda x: x[None], carry)

        def finish(table: Any, state: State, key: jax.Array, packed: jax.Array, carry: Any) -> tuple[State, Any, RoundInfo]:
            carry = jax.tree.map(lambda x: x[0], carry)
            plan = of_phase(layout.unpack(packed[0]), turn.phase.batches, turn.last)
            state, info = gather(turn, with_clients(state, room(table)), key, plan, carry)
            return *without_clients(state), jax.tree.map(lambda x: x[None], info) if stacked else info

        return PhasePrograms(
            begin=compiled(begin, data, kept, P(), P(), P(), out=own),
            fold=compiled(fold, data, P(), P(), P(), P(), own, out=own, donated=5),
            finish=compiled(finish, kept, P(), P(), P(), own, out=(P(), kept, P())),
        )

    def compiled(function: Callable[..., Any], *specs: Any, out: Any, donated: int | None = None) -> Callable[..., Any]:
        return _devices.compiled(function, mesh, specs, out, donated)

    data = Given(P() if resident else P(AXIS), before)
    kept, own = P(AXIS) if moving else P(), P(AXIS)
    return RoundPrograms(
        # The table that was made for this dispatch is written in its place; a state's own is its user's.
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
    axis: str | None = None,
) -> tuple[State, RoundInfo]:
    """The server's part: a round in which nothing arrived leaves the state as it was.

    Args:
      turn: the algorithm, or a phase of it.
      state: before it.
      key: the run's root key.
      plan: of the round.
      accumulator: everybody's fold; with an ``axis``, this device's.
      lines: what `deliver` wrote, ``[slots, ...]``.
      table: what clients keep from now on; () if nothing.
      num_clients: of the cohort, ``int32 []``.
      attack: of the cohort.
      update: a client's update, for its shape, if one is at hand.
      axis: of the devices that make the round together, each of which has a fold.
    """
    phase, whole, key = turn.phase, split(state), turn.key(key)
    parts = turn.sees(whole)
    round_key = rng.round_key(key, plan.round, "downlink")
    shared, downlink, bits_down = down(phase, phase.broadcast(parts.server), parts.downlink, round_key)
    bits_down = tree.add_bits(bits_down, most=turn.of * tree.num_bits(shared))
    update = update_shape(phase, jax.eval_shape(phase.broadcast, parts.server)) if update is None else update
    fold, fold_key = folding(phase, attack, plan.attacker > 0), rng.round_key(key, plan.round, "aggregator")
    if axis is None:
        aggregate, aggregator = fold.conclude(accumulator, parts.aggregator, fold_key)
    else:
        aggregate, aggregator = fold.conclude_devices(accumulator, parts.aggregator, fold_key, axis)
    attackers = {} if attack is None else {"attacker": plan.attacker > 0}
    info = round_info(lines | attackers, plan, num_clients, bits_down, update, turn.of)
    weight = jnp.sum(lines["weight"], dtype=jnp.float32)
    server = phase.server_round(parts.server, aggregate, Turnout(info.num_aggregated, weight, *plan.population))
    server = jax.tree.map(_as_precise, server, parts.server)  # Sums are wider than the halves that they are of.
    average = averaged(phase.averaging if turn.last else None, parts.average, getattr(server, "params", ()))
    after = Remembered(server, (), aggregator, downlink, average)
    after = tree.select(info.num_aggregated > 0, after, parts._replace(clients=()))
    return join(turn.leaves(whole, after._replace(clients=table)), state), info


def _as_precise(new: Any, old: Any) -> Any:
    old = jnp.asarray(old)
    return jnp.asarray(new, old.dtype) if tree.is_float(old) and tree.is_float(jnp.asarray(new)) else new


def whole_round(infos: Sequence[RoundInfo]) -> RoundInfo:
    """A round's info from those of its phases: that of the last, with all that was sent and dropped on the way."""
    last, clients = infos[-1], dict(infos[-1].clients)
    for info in infos[:-1]:
        sent = ("bits_up", "bits_down", "entropy_bits_up")
        clients |= {name: tree.add_bits(clients[name], info.clients[name]) for name in sent}
        clients["dropped"] |= info.clients["dropped"]
    dropped = jnp.sum(clients["dropped"], axis=-1, dtype=jnp.int32) if len(infos) > 1 else last.num_dropped
    return last._replace(clients=clients, num_dropped=dropped)
