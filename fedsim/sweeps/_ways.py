"""Which members of a population or a sweep run at the same time, and how."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedsim import checks
from fedsim.algorithm import Algorithm
from fedsim.configuration import How
from fedsim.data import Cohort, FederatedData
from fedsim.execution import arguments_of, most_side_by_side, obstacle, remembered, traced_rounds
from fedsim.experiment.driving import Rounds
from fedsim.sweeps._grid import named


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """A member that is to run.

    Attributes:
      name: its name in messages.
      algorithm: its algorithm.
      like: the shapes of its state before the first round.
      widest: its cohort with the most slots.
      rounds: the number of its rounds.
      data: what it places on the devices.
      start: begins its rounds, or continues those in its folder. It is called again after a device ran out of memory.
      is_finished: whether its folder has all rounds.
      numbers: names of numbers in which it differs from members with the same code.
    """

    name: str
    algorithm: Algorithm
    like: Any
    widest: Cohort
    rounds: int
    data: Sequence[FederatedData]
    start: Callable[[], Rounds]
    is_finished: bool = False
    numbers: Sequence[str] = ()

    def why_alone(self) -> str | None:
        """Returns why the member cannot run beside others; None if it can."""
        if type(self.algorithm).apply is not Algorithm.apply:
            return f"{type(self.algorithm).__name__}.apply is not compiled"
        if reason := obstacle(self.algorithm, self.like, self.widest):
            return reason
        if self.numbers and not arguments_of(self.algorithm):
            names = ", ".join(self.numbers)
            return f"the code needs the values of numbers ({names}), so it is compiled for every setting"
        return None

    @property
    def execution(self) -> Any:
        """The algorithm's execution, which has a ``mesh`` if the member can run beside others."""
        return self.algorithm.execution


def chosen_way(how: How | None) -> How:
    """Returns ``how``; None is ``"devices"`` on a CPU and ``"vmap"`` otherwise, and ``"sequential"`` in several processes.

    >>> chosen_way("sequential")
    'sequential'
    """
    several = jax.process_count() > 1
    if how is None:
        return "sequential" if several else "devices" if jax.default_backend() == "cpu" else "vmap"
    checks.one_of("vmap", "devices", "sequential", how=how, remedy="None chooses by the device")
    if several and how != "sequential":
        raise ValueError(
            f"Expected how='sequential' in several processes, where members run one after another, got how={how!r}: leave it "
            "out, and continue in one process what began in one."
        )
    return how


def ways(jobs: Sequence[Job], how: How, *, alike: bool) -> list[tuple[How, list[Job]]]:
    """Divides members into groups that share programs and data, and says how each group runs.

    Members that cannot run beside others run one after another, and a warning gives the reason. The groups contain finished
    members, too, so that the others run as they did when a sweep began.

    Args:
      jobs: the members.
      how: how they are to run.
      alike: whether all run one after another if one of them has to. If not, groups that would use fewer devices than one of
        its members alone do so, too.
    """
    groups: dict[Any, list[Job]] = {}
    reasons: list[str] = []
    for job in jobs if how != "sequential" else ():
        with named(job.name):
            key: Any = None
            if reason := job.why_alone():
                reasons.append(reason)
            else:
                data = job.widest.data
                key = traced_rounds(job.algorithm, job.like, data)[0], job.widest.slots, job.widest.attack, id(data)
        groups.setdefault(key, []).append(job)
    for reason in list(dict.fromkeys(reasons))[: 1 if alike else None]:
        who = "The members run" if alike else f"{reasons.count(reason)} of {len(jobs)} runs run"
        warnings.warn(f"{who} one after another (how='sequential'), because {reason}.", stacklevel=3)
    if how == "sequential" or (alike and reasons):
        return [("sequential", list(jobs))]

    def leave_devices_idle(group: Sequence[Job]) -> bool:
        return len(group) < max(2, min(group[0].execution.mesh().size, group[0].widest.slots))

    alone = [key is None or (not alike and leave_devices_idle(group)) for key, group in groups.items()]
    return [("sequential" if own else how, group) for own, group in zip(alone, groups.values(), strict=True)]


def side_by_side(how: How, jobs: Sequence[Job]) -> int:
    """Returns how many members of a group run side by side on a device, and warns if the memory does not suffice for all."""
    if how != "vmap":
        return 1
    first, mesh, data = jobs[0], jobs[0].execution.mesh(), jobs[0].widest.data
    most, wanted = most_side_by_side(remembered(first.algorithm, first.like, data), mesh, data), -(-len(jobs) // mesh.size)
    if most < wanted:
        warnings.warn(
            f"The memory suffices for {most} of {wanted} members side by side on a device, so they run in turns.",
            stacklevel=4,
        )
    return min(most, wanted)
