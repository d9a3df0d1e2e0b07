"""The layout of a round: which device runs which clients, in which order and in which groups."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.data import Arrivals, Batches, Cohort
from fedsim.rounds import RoundPlan

_ALL_STEPS = 2**31 - 1
_STEPS_PER_PROGRAM = 500
# A step of a group of w clients takes a fixed time (mostly for starting kernels) and w times the time of one client. The fixed
# time is that of clients whose states have 64 MB in total. Measured on an H100, 2026-11-26: 1,000 clients of the dense model
# (0.84 MB each) took 236 ms in groups of 16 and 71 ms in groups of 256, while groups of 16 LSTMs (16 MB each) were too large.
_FIXED_BYTES = 2**26
_MOST_LANES = 256


@dataclasses.dataclass(frozen=True)
class Layout:
    """The parameters that a plan and a compiled program have in common.

    Attributes:
      slots: the largest number of clients.
      devices: number of devices.
      widths: numbers of clients that run side by side in a group, the largest first; ``(1,)`` runs one client after another.
      overhead: the fixed time of a step, in multiples of the time of one client.
      most_examples: the most examples of a client, which reverse-mode derivatives need; else None.
      block: the number of clients of the population that belong to each device; None: any device runs any client.
    """

    slots: int
    devices: int
    widths: tuple[int, ...] = (1,)
    overhead: float = 0.0
    most_examples: int | None = None
    block: int | None = None


def rounded_slots(clients: int) -> int:
    """Rounds a number of clients up to 1, 2 or 5 times a power of ten, so that cohorts of many sizes share few programs.

    >>> [rounded_slots(n) for n in (1, 3, 10, 11, 30, 60)]
    [1, 5, 10, 20, 50, 100]
    """
    power = 10 ** (len(str(clients)) - 1)
    return next(step * power for step in (1, 2, 5, 10) if clients <= step * power)


def overhead_of(state_bytes: int) -> float:
    """Returns the fixed time of a step on a GPU or TPU, in multiples of the time of a client with a loop state of this size.

    >>> overhead_of(840_000) > 16 > overhead_of(16_000_000)
    True
    """
    return _FIXED_BYTES / max(1, state_bytes)


def lanes_for(state_bytes: int) -> int:
    """Returns how many clients run side by side on a GPU or TPU: the fixed time is a fifth of a step's, or 256 clients.

    >>> lanes_for(840_000), lanes_for(4_800_000), lanes_for(16_000_000)
    (256, 55, 16)
    """
    return int(np.clip(4 * overhead_of(state_bytes), 1, _MOST_LANES))


def widths_for(lanes: int) -> tuple[int, ...]:
    """Returns the widths of groups: all lanes, a quarter of them, and 1 for clients of unusual length. Each is compiled.

    >>> widths_for(16), widths_for(2), widths_for(1)
    ((16, 4, 1), (2, 1), (1,))
    """
    return tuple(sorted({lanes, -(-lanes // 4), 1}, reverse=True))


def plan_round(cohort: Cohort, layout: Layout, batches: Batches, loops: Sequence[Batches] | None = None) -> RoundPlan:
    """Plans a round: the longest client goes first, to the device with the least work so far, or to its own device.

    In the first case the last device ends after at most 4/3 of the shortest possible time (R. L. Graham, 1969).

    Args:
      cohort: the clients.
      layout: the layout of the plan.
      batches: the algorithm's batches.
      loops: the batches of every loop of a client; default: one loop over ``batches``.
    """
    sizes, slots, devices = cohort.sizes, layout.slots, layout.devices
    most_steps = np.full(len(sizes), _ALL_STEPS) if cohort.work is None else cohort.num_steps(batches)
    # Starting a client and accumulating its update takes about as long as half a step.
    work = 1 + 2 * num_steps(sizes, batches, [batches] if loops is None else loops, most_steps)
    order = np.argsort(-work, kind="stable")
    if devices == 1:
        queues = [order.tolist()]
    elif layout.block is not None:
        device_of = cohort.clients[order] // layout.block
        queues = [order[device_of == device].tolist() for device in range(devices)]
    else:
        queues = [[] for _ in range(devices)]
        load = [(0, device) for device in range(devices)]
        for slot in order.tolist():
            so_far, device = heapq.heappop(load)
            queues[device].append(slot)
            heapq.heappush(load, (so_far + int(work[slot]), device))
    arrivals = cohort.arrivals or Arrivals.of(np.zeros(len(sizes)), round=cohort.round)
    queue, length = np.zeros((devices, slots), np.int32), np.array([len(slots) for slots in queues], np.int32)
    starts = np.zeros((devices, len(layout.widths), slots), np.int32)
    groups = np.zeros((devices, len(layout.widths)), np.int32)
    for device, own in enumerate(queues):
        queue[device, : len(own)] = own
        for number, first in enumerate(_grouped(work[own], layout)):
            starts[device, number, : len(first)] = first
            groups[device, number] = len(first)
    return RoundPlan(
        round=np.int32(cohort.round),
        count=np.int32(len(sizes)),
        population=np.array([cohort.data.num_nonempty, cohort.data.num_examples], np.int32),
        client=_filled(cohort.clients, slots),
        start=_filled(cohort.starts, slots),
        size=_filled(sizes, slots),
        most_steps=_filled(most_steps, slots),
        memory=_filled(cohort.clients, slots, cohort.data.num_clients),
        attacker=_filled(np.zeros(0) if cohort.attackers is None else cohort.attackers, slots, dtype=np.bool_),
        staleness=_filled(arrivals.staleness, slots),
        key_round=_filled(arrivals.key_rounds, slots),
        weight=_filled(arrivals.weights, slots, dtype=np.float32),
        scale=_filled(arrivals.scales, slots, dtype=np.float32),
        queue=queue,
        length=length,
        starts=starts,
        groups=groups,
    )


def num_steps(
    sizes: np.ndarray, batches: Batches, loops: Sequence[Batches], most_steps: np.ndarray | None = None
) -> np.ndarray:
    """Estimates the number of steps of each client in all of its loops, ``int64 [clients]``.

    It assumes that stragglers stop early in the loops over the algorithm's own batches and in no other.

    Args:
      sizes: the clients' numbers of examples.
      batches: the algorithm's batches.
      loops: the batches of every loop of a client.
      most_steps: the most steps of each client in a loop over ``batches``; None if all of them are taken.

    >>> ten = Batches(size=10)
    >>> num_steps(np.array([20, 50]), ten, [ten, Batches(size=10, epochs=2)], most_steps=np.array([9, 1])).tolist()
    [6, 11]
    """
    total = np.zeros(len(sizes), np.int64)
    for own in loops:
        steps = own.num_steps(sizes)
        total += steps if most_steps is None or own != batches else np.minimum(steps, most_steps)
    return total


def _grouped(work: np.ndarray, layout: Layout) -> list[list[int]]:
    """Divides a queue, the longest client first, into groups; returns for each width where its groups begin.

    A group takes as long as its longest client. The result is the division that takes the least time in total. So clients of
    similar length run side by side, and a client of unusual length runs alone.
    """
    count, steps, widths = len(work), work.tolist(), layout.widths
    if widths == (1,):
        return [list(range(count))]
    least = [0.0] * (count + 1)  # the time of all clients from this one on
    best = [0] * count  # the width of the group that starts with this client
    for first in reversed(range(count)):
        times = [steps[first] * (layout.overhead + width) + least[min(first + width, count)] for width in widths]
        least[first] = min(times)
        best[first] = times.index(least[first])
    starts: list[list[int]] = [[] for _ in widths]
    first = 0
    while first < count:
        starts[best[first]].append(first)
        first += widths[best[first]]
    return starts


def _filled(values: np.ndarray, slots: int, empty: int = 0, dtype: Any = np.int32) -> np.ndarray:
    filled = np.full(slots, empty, dtype)
    filled[: len(values)] = values
    return filled


def windows(plan: RoundPlan, layout: Layout, steps: np.ndarray) -> list[np.ndarray]:
    """Divides a round into windows of about 500 steps per device, at the borders of groups.

    XLA on a CPU keeps memory for every step of a program until the program ends (about 90 kB per step of the EMNIST CNN
    on two devices, jax 0.10.2), so a round of a thousand clients runs as several programs.

    Args:
      plan: the plan of the round.
      layout: the layout of the plan.
      steps: the number of steps of each client, ``int [slots]``.

    Returns:
      For each window, the first group of each width and the one after the last: ``int32 [devices, widths, 2]``.
    """
    if steps.sum() <= _STEPS_PER_PROGRAM:
        return [np.stack([np.zeros_like(plan.groups), plan.groups], axis=-1)]
    done = []  # for each device, the number of steps after each of its groups
    for queue, starts, groups in zip(plan.queue, plan.starts, plan.groups, strict=True):
        first = [starts[number, :count] for number, count in enumerate(groups)]
        done.append(np.cumsum(1 + steps[queue[np.concatenate(first)]]))
    parts = max(1, -(-max(int(of_device[-1]) if len(of_device) else 0 for of_device in done) // _STEPS_PER_PROGRAM))
    before = np.cumsum(plan.groups, axis=1) - plan.groups
    bounds = []
    for part in range(parts + 1):
        ended = np.array([np.count_nonzero(of_device <= part * _STEPS_PER_PROGRAM) for of_device in done])
        bounds.append(np.clip(ended[:, None] - before, 0, plan.groups) if part < parts else plan.groups)
    return [np.stack([low, high], axis=-1).astype(np.int32) for low, high in itertools.pairwise(bounds)]
