"""`Debug`: a round in plain Python, for breakpoints, prints and errors that say where they happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.data import ClientDataset, Cohort
from fedsim.execution._cohort_loop import round_info, sanitize
from fedsim.execution._contract import Client, FederatedProgram, RoundInfo, State
from fedsim.execution._execution import Execution, check_cohorts, finish_round

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
        shared = _stage("broadcast", "the server", program.broadcast, state)
        accumulator, lines = None, []
        # Where nobody takes part, a client without examples says what updates and infos look like; it does not count.
        clients = list(zip(cohort.clients, cohort, strict=True)) or [_nobody(cohort)]
        for index, (client_id, dataset, key) in clients:
            who = f"client {client_id!r}"
            steps = program.batches.num_steps(len(dataset))
            client = Client(jnp.int32(index), jnp.int32(len(dataset)), jnp.int32(steps), key)
            client_state = _stage("client_init", who, program.client_init, shared, client)
            for batch in dataset.batches(program.batches, key):
                batch = jax.tree.map(jnp.asarray, batch)
                stage = f"client_step {int(batch.step)}"
                client_state = _stage(stage, who, program.client_step, shared, client_state, batch)
            result = _stage("client_final", who, program.client_final, shared, client_state, client)
            update, line = _stage("client_final", who, sanitize, result, client)
            if accumulator is None:
                accumulator = _stage("aggregator.zero", who, program.aggregator.zero, update)
            accumulate = program.aggregator.accumulate
            accumulator = _stage("aggregator.accumulate", who, accumulate, accumulator, update, line["weight"])
            lines.append(line)
        sizes = np.zeros(cohort.slots, np.int32)
        sizes[: len(cohort)] = cohort.sizes
        lines += [jax.tree.map(jnp.zeros_like, lines[0])] * (cohort.slots - len(lines))
        told = jax.tree.map(lambda *rows: jnp.stack(rows), *lines)
        info = round_info(program, told, jnp.asarray(sizes), jnp.int32(len(cohort)))
        state = _stage("server_update", "the server", finish_round, program, state, accumulator, info.num_aggregated)
        return state, info


def _nobody(cohort: Cohort) -> tuple[int, tuple[str, ClientDataset, jax.Array]]:
    examples = {name: column[:0] for name, column in cohort.data.columns.items()}
    return 0, ("nobody", ClientDataset("nobody", examples), cohort.key)


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
