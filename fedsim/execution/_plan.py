"""The plan of a round: who runs where, as a few integers of fixed shape, so that one trace serves any cohort."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedsim.data import Batches, Cohort

_STEPS_PER_PROGRAM = 500


class RoundPlan(NamedTuple):
    """One round's plan, all ``int32``; ``slots`` means clients in cohort order, then zeros up to the cohort's slots.

    Slots beyond the cohort are in no queue: they cost a few integers, and no step.

    Attributes:
      round: ``[]``.
      population: ``[2]``, clients that have examples, and how many examples there are in all.
      client: ``[slots]``, position in the population.
      start: ``[slots]``, first row in the columns that the device reads.
      size: ``[slots]``, number of rows.
      steps: ``[slots]``, batches to train on.
      reads: ``[slots]``, where the row that it had before the dispatch is, in a table of its own; -1: nowhere.
      keeps: ``[slots]``, where its row is in the table of what clients keep that its device has; beyond it for empty slots.
      moves: ``[slots, 2]``, which rows of all devices' tables, one after another, go where before it begins; -1: no more.
      attacker: ``[slots]``, 1 for those who carry out the cohort's attack.
      queue: ``[devices, lanes, slots]``, positions in the cohort, in the order in which the lane trains them.
      length: ``[devices, lanes]``, how many entries of each queue count.
    """

    round: Any
    population: Any
    client: Any
    start: Any
    size: Any
    steps: Any
    reads: Any
    keeps: Any
    moves: Any
    attacker: Any
    queue: Any
    length: Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shape of a plan. Packed end to end it is one array, hence one transfer a dispatch."""

    slots: int
    devices: int
    lanes: int

    def pack(self, plans: Sequence[RoundPlan], rounds: int) -> np.ndarray:
        """``int32 [rounds, words]``; rounds beyond the plans are zeros."""
        packed = np.zeros((rounds, sum(math.prod(shape) for shape in self._shapes())), np.int32)
        for row, plan in zip(packed, plans, strict=False):
            np.concatenate([np.ravel(field) for field in plan], out=row, casting="same_kind")
        return packed

    def unpack(self, row: Any) -> RoundPlan:
        """The inverse, for one packed row, traced or not."""
        fields, at = [], 0
        for shape in self._shapes():
            words = math.prod(shape)
            fields.append(row[at : at + words].reshape(shape))
            at += words
        return RoundPlan(*fields)

    def _shapes(self) -> list[tuple[int, ...]]:
        """Of a plan's fields."""
        of_slots, of_lanes = (self.slots,), (self.devices, self.lanes)
        return [(), (2,), *[of_slots] * 6, (self.slots, 2), of_slots, (*of_lanes, self.slots), of_lanes]


def plan_round(
    cohort: Cohort, batches: Batches, devices: int, lanes: int, preview: Batches | None = None, limit: int | None = None
) -> RoundPlan:
    """Longest client first onto the least loaded lane (Graham 1969: at most 4/3 of the best makespan, where ``limit`` is None).

    Args:
      cohort: who comes.
      batches: of the algorithm.
      devices: how many.
      lanes: of each device.
      preview: the algorithm's.
      limit: clients that a device takes, at most; None: any number.
    """
    sizes, slots, steps = cohort.sizes, cohort.slots, cohort.num_steps(batches)
    # Starting and folding a client takes about as long as half a step.
    work = 2 * steps + 1 + (2 * preview.num_steps(sizes) if preview else 0)
    queues: list[list[int]] = [[] for _ in range(devices * lanes)]
    # Lane-major order spreads a small cohort over the devices before it fills any device's lanes.
    load = [(0, lane, device) for lane in range(lanes) for device in range(devices)]
    taken = [0] * devices
    for position in np.argsort(-work, kind="stable").tolist():
        busy, lane, device = heapq.heappop(load)
        while taken[device] == limit:
            busy, lane, device = heapq.heappop(load)
        taken[device] += 1
        queues[device * lanes + lane].append(position)
        heapq.heappush(load, (busy + int(work[position]), lane, device))
    queue = np.zeros((devices * lanes, slots), np.int32)
    for row, positions in zip(queue, queues, strict=True):
        row[: len(positions)] = positions
    return RoundPlan(
        round=np.int32(cohort.round),
        population=np.array([cohort.data.num_nonempty, cohort.data.num_examples], np.int32),
        client=_fill(cohort.clients, slots),
        start=_fill(cohort.data.offsets[cohort.clients], slots),
        size=_fill(sizes, slots),
        steps=_fill(steps, slots),
        reads=_fill(np.zeros(0), slots, -1),
        keeps=_fill(cohort.clients, slots, cohort.data.num_clients),
        moves=np.full((slots, 2), -1, np.int32),
        attacker=_fill(np.zeros(0) if cohort.attackers is None else cohort.attackers, slots),
        queue=queue.reshape(devices, lanes, slots),
        length=np.array([len(q) for q in queues], np.int32).reshape(devices, lanes),
    )


def of_phase(plan: RoundPlan, own: Batches, last: bool) -> RoundPlan:
    """A round's plan, made for the batches of its ``last`` phase, as a phase with batches of its ``own`` follows it.

    The same clients, and whoever takes no step in the last takes none in the others. A straggler is one in the last only.
    """
    if last:
        return plan
    steps = own.num_steps(plan.size) * (plan.steps > 0).astype(np.int32)
    return plan._replace(steps=steps.astype(np.int32))


def _fill(values: np.ndarray, slots: int, empty: int = 0) -> np.ndarray:
    filled = np.full(slots, empty, np.int32)
    filled[: len(values)] = values
    return filled


def is_long(plan: RoundPlan, preview: Batches | None = None) -> bool:
    """Whether the round may be more than one program, by all steps of its cohort: it is then dispatched by itself."""
    return int(_work(plan, preview).sum()) > _STEPS_PER_PROGRAM and len(windows(plan, preview)) > 1


def _work(plan: RoundPlan, preview: Batches | None) -> np.ndarray:
    return plan.steps + 1 + (preview.num_steps(plan.size) if preview else 0)


def windows(plan: RoundPlan, preview: Batches | None = None) -> list[np.ndarray]:
    """Cuts a long round into parts of some hundred steps a lane: ``int32 [devices, lanes, 2]`` each, from and up to.

    A client is never cut. XLA's CPU runtime holds on to memory for every step of a program until the program ends (some 90
    kB a step of the EMNIST CNN on two devices, jax 0.10.2), so a round of a thousand clients is not one program.
    """
    steps = _work(plan, preview)[plan.queue]
    steps[np.arange(plan.queue.shape[-1]) >= plan.length[..., None]] = 0
    done = np.cumsum(steps, axis=-1)
    parts = max(1, -(-int(done[..., -1].max()) // _STEPS_PER_PROGRAM))
    # The number of clients that end within the first k shares of the lane's steps.
    bounds = [(done <= k * _STEPS_PER_PROGRAM).sum(-1).clip(max=plan.length) for k in range(parts)] + [plan.length]
    return [np.stack([low, high], axis=-1).astype(np.int32) for low, high in itertools.pairwise(bounds)]
