"""`scheduled`: an algorithm and a sampler for a run on a virtual clock."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import checks, rng, tree
from fedsim.algorithm import Algorithm
from fedsim.algorithms import FedAvg
from fedsim.attacks import Collusion
from fedsim.data import Cohort
from fedsim.execution import num_steps, rounded_slots, traced_rounds
from fedsim.rounds import RoundProgram, Staleness, check_scalable, check_scales
from fedsim.samplers import Sampler, checked_cohort, is_steered
from fedsim.systems import (
    Asynchronous,
    Buffered,
    ClockedSampler,
    FedBuff,
    Schedule,
    ScheduledSampler,
    StaleSynchronous,
    Synchronization,
    schedule,
)


class Scheduled(NamedTuple):
    """An algorithm that keeps as many versions as its clients need, the sampler of its cohorts, and the schedule."""

    algorithm: Algorithm
    sampler: ScheduledSampler | ClockedSampler
    schedule: Schedule


def scheduled(
    algorithm: Algorithm,
    sampler: Sampler,
    *,
    rounds: int,
    seconds: float | None = None,
    synchronization: Synchronization | None = None,
    bytes_down: int | None = None,
    bytes_up: int | None = None,
    **others: Any,
) -> Scheduled:
    """Simulates the events of a run before it trains, and returns an algorithm and a sampler that train by them.

    `fedsim.experiment.simulate` runs what this returns. Here the run is yours: ``algorithm.apply`` on the sampler's cohorts.

    Args:
      algorithm, sampler, rounds, seconds, synchronization, bytes_down, bytes_up: those of `fedsim.experiment.simulate`.
      **others: the devices, the faults and the policy, see `fedsim.systems.schedule`.

    Returns:
      The ``algorithm``, which keeps as many versions of the model as its clients need; the ``sampler``, whose round r has the
      clients whose updates server step r aggregates; and the ``schedule`` of the events. If values steer the sampler, it is
      a `fedsim.systems.ClockedSampler`, and the schedule has the events of the first round alone.

    Raises:
      ValueError: see `fedsim.experiment.simulate`.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> made = scheduled(algorithm, fedsim.UniformSampler(data, clients=4, seed=0), rounds=3)
    >>> made.algorithm.staleness, made.sampler.cohort(2).slots, len(made.schedule.steps.time)
    (Staleness(bound=0, mixing=False), 4, 3)
    """
    checks.whole(1, rounds=rounds)
    ready = prepared(algorithm, sampler, synchronization)
    algorithm, mixing = ready.algorithm, ready.mixing
    arguments = {
        "steps": ready.steps,
        "synchronization": synchronization,
        **others,
        "bytes_down": ready.bytes_down if bytes_down is None else bytes_down,
        "bytes_up": ready.bytes_up if bytes_up is None else bytes_up,
    }
    if is_steered(sampler):
        if seconds is not None:
            raise ValueError(
                f"Expected rounds for {type(sampler).__name__}, whose events depend on values of the run, got seconds="
                f"{seconds}: give rounds, and stop_when='spent(seconds=...)'."
            )
        clocked = ClockedSampler(sampler, **arguments)
        return Scheduled(dataclasses.replace(algorithm, staleness=Staleness(bound=0)), clocked, clocked.schedule)
    return following(algorithm, sampler, schedule(sampler, rounds, seconds=seconds, **arguments), mixing=mixing)


def following(algorithm: Algorithm, sampler: Sampler, plan: Schedule, *, mixing: bool) -> Scheduled:
    """Returns what trains by a schedule: that of a simulation, or the record of a deployment.

    Args:
      algorithm: as `prepared` returns it.
      sampler: which has selected the clients.
      plan: the schedule.
      mixing: see `fedsim.Staleness`.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4, np.float32)}, sizes=[1] * 4)
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=0)
    >>> plan = schedule(sampler, 2, steps=np.ones(4, int))
    >>> following(fedsim.algorithms.Histogram(bins=2), sampler, plan, mixing=False).algorithm.staleness
    Staleness(bound=0, mixing=False)
    """
    check_scales(algorithm, plan.updates.weight, plan.updates.scale)
    # Rounded up, so that seeds and lengths of a run share programs.
    bound = rounded_slots(plan.largest_staleness) if plan.largest_staleness else 0
    stale = dataclasses.replace(algorithm, staleness=Staleness(bound=bound, mixing=mixing))
    return Scheduled(stale, ScheduledSampler(sampler, plan), plan)


class Prepared(NamedTuple):
    """What a synchronization model needs to know of an algorithm.

    Attributes:
      algorithm: with the weighting of the model.
      mixing: whether the updates are mixed into the model, see `fedsim.Staleness`.
      steps: the local steps of each client, ``int64 [population]``.
      bytes_down, bytes_up: the sizes of the uncompressed model and update, both with running statistics.

    >>> Prepared._fields
    ('algorithm', 'mixing', 'steps', 'bytes_down', 'bytes_up')
    """

    algorithm: Algorithm
    mixing: bool
    steps: np.ndarray
    bytes_down: int
    bytes_up: int


def prepared(algorithm: Algorithm, sampler: Sampler, synchronization: Synchronization | None) -> Prepared:
    """Prepares an algorithm for a synchronization model, on a virtual clock or on a network.

    Raises:
      ValueError: the clients of this algorithm cannot start from older models, or this model does not fit it.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(4, np.float32)}, sizes=[1, 3])
    >>> prepared(fedsim.algorithms.Histogram(bins=2), fedsim.UniformSampler(data, clients=2, seed=0), None).steps.tolist()
    [1, 1]
    """
    if type(algorithm).apply is not Algorithm.apply:
        raise ValueError(
            f"{type(algorithm).__name__} overrides apply, so its clients cannot be simulated: override round or client_update."
        )
    first = checked_cohort(sampler, 0)
    algorithm.check(first.data)
    mixing = isinstance(synchronization, Asynchronous)
    if mixing and not isinstance(algorithm, FedAvg):
        raise ValueError(
            f"Asynchronous mixes the models of clients, and those of {type(algorithm).__name__} send none: use Buffered, or an "
            "algorithm such as FedAvg."
        )
    if isinstance(synchronization, StaleSynchronous) and (first.work is not None or first.attack is not None):
        raise ValueError(
            "StaleSynchronous has the same workers in all rounds, so it cannot run with stragglers or attackers of a sampler: "
            "use a sampler without them, or another synchronization model."
        )
    alone = mixing or (isinstance(synchronization, Buffered) and synchronization.size == 1)
    if alone and isinstance(first.attack, Collusion):
        raise ValueError(
            f"{type(first.attack).__name__} needs honest updates in every server step, from which attackers compute theirs, "
            f"and those of {synchronization} have one update: use Synchronous, Buffered with a larger size, or an attack "
            "without collusion, such as SignFlip."
        )
    if isinstance(synchronization, FedBuff) and getattr(algorithm, "weighting", None) != "uniform":
        if not any(field.name == "weighting" and field.init for field in dataclasses.fields(algorithm)):
            raise ValueError(
                f"FedBuff gives clients equal weights, and {type(algorithm).__name__} takes no weighting: use Buffered, in "
                "which the algorithm weights them."
            )
        equal: Any = {"weighting": "uniform"}
        algorithm = dataclasses.replace(algorithm, **equal)
    # This also checks that clients of this algorithm can start from older models. The sizes do not depend on the bound.
    program = _traced(algorithm, first, Staleness(bound=0))
    call = program.calls[0]
    if mixing:
        check_scalable(algorithm)
        _traced(algorithm, first, Staleness(bound=0, mixing=True))  # checks that the updates are differences of parameters
    return Prepared(
        algorithm=algorithm,
        mixing=mixing,
        steps=num_steps(first.data.sizes, algorithm.batches, program.loops),
        bytes_down=tree.num_bits((call.shared, call.statistics)) // 8,
        bytes_up=tree.num_bits(call.update) // 8,
    )


def _traced(algorithm: Algorithm, cohort: Cohort, staleness: Staleness) -> RoundProgram:
    stale = dataclasses.replace(algorithm, staleness=staleness)
    state = jax.eval_shape(stale.init, rng.stream(cohort.key, "init"))
    return traced_rounds(stale, state, cohort.data)[0].trace()
