"""`Debug`: a round in plain Python, for breakpoints, prints and errors that say where they happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fedsim import rng
from fedsim.data import Batch, ClientDataset, ClientRows, Cohort
from fedsim.execution import _memory, _moved_rows, _placement
from fedsim.execution._cohort_loop import Carry, Lane, roster
from fedsim.execution._contract import ClientTable, FederatedProgram, RoundInfo, State
from fedsim.execution._execution import Execution, Jit, check_cohorts
from fedsim.execution._memory import Turn, remember, split, turns, without_clients
from fedsim.execution._plan import RoundPlan, of_phase, plan_round
from fedsim.execution._round import finish_round, whole_round

T = TypeVar("T")


class StageError(RuntimeError):
    """An error inside an algorithm's hook, with the stage, the client and the shapes that the hook got."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Debug(Execution):
    """Not compiled: every hook sees concrete arrays, one client and one batch after another.

    An error is raised as a `StageError` that names stage, client id and the shapes it got, with the cause attached.

    >>> Debug()
    Debug()
    """

    def run(
        self, program: FederatedProgram, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        check_cohorts(program, cohorts)
        infos = []
        for cohort in cohorts:
            state, info = self.run_one(program, state, cohort)
            infos.append(info)
        return state, jax.tree.map(lambda *rows: jnp.stack(rows), *infos)

    def run_one(self, program: FederatedProgram, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        check_cohorts(program, [cohort])
        state = remember(program, state, cohort.data)
        plan = plan_round(cohort, program.batches, 1, 1)
        kept, before, mesh = split(state).clients, None, Jit().mesh()
        if isinstance(kept, ClientRows):
            before, table, (plan,), who = _moved_rows.rows_for(kept, [plan], cohort.slots, mesh, 1)
            state = _placement.replicate(without_clients(state)[0], mesh)._replace(clients=_moved_rows.cleared(table))
        infos = []
        for turn in turns(program):
            own = jax.tree.map(jnp.asarray, of_phase(plan, turn.phase.batches, turn.last))
            state, info = self._phase(turn, state, cohort, own, before and turn.part(before))
            infos.append(info)
        if isinstance(kept, ClientRows):
            state = state._replace(clients=_moved_rows.rows_after(kept, state.clients, who, len(program.phases), mesh))
        return state, whole_round(infos)

    def _phase(
        self, turn: Turn, state: State, cohort: Cohort, plan: RoundPlan, before: ClientTable | None
    ) -> tuple[State, RoundInfo]:
        phase, parts, root = turn.phase, turn.sees(split(state)), turn.key(cohort.key)
        down_key = rng.round_key(root, cohort.round, "downlink")
        shared = _stage("broadcast", "the server", phase.broadcast, parts.server)
        shared, _, _ = _stage("downlink", "the server", _memory.down, phase, shared, parts.downlink, down_key)
        lane = Lane(phase, {}, shared, roster(plan, root), parts.aggregator, cohort.attack, before)
        carry, table = None, parts.clients
        # Where nobody takes part, a client without examples says what updates and infos look like; it does not count.
        clients = list(enumerate(cohort)) or [(0, _nobody(cohort))]
        for slot, (client_id, dataset, _) in clients:
            who, position = f"client {client_id!r}", jnp.int32(slot)
            row = lane.row(position, table)
            client = lane.client(position, row)
            client_state = _stage("client_init", who, phase.client_init, shared, client)
            if phase.preview:
                for batch in dataset.batches(phase.preview, rng.stream(client.key, "preview")):
                    batch = _poisoned(lane, position, who, batch)
                    client_state = _step("client_preview", who, phase.client_preview, shared, client_state, batch)
            client_state = _stage("client_begin", who, phase.client_begin, shared, client_state, client)
            for batch in dataset.batches(phase.batches, client.key, int(client.num_steps)):
                batch = _poisoned(lane, position, who, batch)
                client_state = _step("client_step", who, phase.client_step, shared, client_state, batch)
            result = _stage("client_final", who, phase.client_final, shared, client_state, client)
            update, line, kept = _stage("client_final", who, lane.deliver, position, result, client, row)
            table = lane.keep(table, position, line, kept)
            if carry is None:
                _stage("aggregator.check", "the server", lane.aggregator.check, update, cohort.slots)
                folds = jax.eval_shape(lambda update=update: lane.aggregator.zero(update, cohort.slots))
                _placement.must_fit(lane.aggregator, folds, cohort.slots, 1, Jit().mesh())
                lines = jax.tree.map(lambda x: jnp.zeros((cohort.slots, *x.shape), x.dtype), line)
                carry = Carry(_stage("aggregator.zero", who, lane.aggregator.zero, update, cohort.slots), lines, table)
            accumulate = lane.aggregator.accumulate
            folded = _stage("aggregator.accumulate", who, accumulate, carry.accumulator, update, line["weight"], position)
            lines = {name: rows.at[slot].set(line[name]) for name, rows in carry.lines.items()}
            carry = Carry(folded, lines, table)
        assert carry is not None
        return _stage(
            "server_update",
            "the server",
            finish_round,
            turn,
            state,
            cohort.key,
            plan,
            *carry,
            jnp.int32(len(cohort)),
            cohort.attack,
            update,
        )


def _nobody(cohort: Cohort) -> tuple[str, ClientDataset, jax.Array]:
    examples = {name: column[:0] for name, column in cohort.data.columns.items()}
    return "nobody", ClientDataset("nobody", examples), cohort.key


def _poisoned(lane: Lane, position: jax.Array, who: str, batch: Batch) -> Batch:
    return _stage("attack.poison", who, lane.poisoned, position, jax.tree.map(jnp.asarray, batch))


def _step(name: str, who: str, hook: Callable[..., T], shared: Any, state: Any, batch: Batch) -> T:
    return _stage(f"{name} {int(batch.step)}", who, hook, shared, state, batch)


def _stage(stage: str, who: str, hook: Callable[..., T], *args: Any) -> T:
    try:
        return hook(*args)
    except Exception as error:
        got = "\n".join(f"  argument {i}: {_shapes(arg)}" for i, arg in enumerate(args))
        raise StageError(f"{type(error).__name__} in {stage} of {who}: {error}\nIt got:\n{got}") from error


def _shapes(value: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    shown = [
        f"{jax.tree_util.keystr(path)} {getattr(leaf, 'dtype', type(leaf).__name__)}{list(getattr(leaf, 'shape', []))}"
        for path, leaf in leaves[:12]
    ]
    return ", ".join(shown) + (f", and {len(leaves) - 12} more" if len(leaves) > 12 else "")
