"""`simulate`: a run whose clients need time, start from older models and fail, on a virtual clock."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim.algorithm import Algorithm
from fedsim.configuration import scheduled
from fedsim.experiment._lines import observed
from fedsim.experiment._loop import Result, run
from fedsim.samplers import Sampler
from fedsim.systems import ClockedSampler, Devices, Faults, FaultSchedule, Policy, Schedule, Synchronization

# A run until a time ends after so many server steps nevertheless, because durations may be zero.
_MOST_ROUNDS = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation(Result):
    """The result of `simulate`.

    Attributes:
      schedule: the events of the run.
      algorithm: the algorithm with the `fedsim.Staleness` of the run, to which ``state`` belongs: continue with
        ``result.algorithm.apply``, and restore checkpoints with it.

    >>> [field.name for field in dataclasses.fields(Simulation)][-2:]
    ['schedule', 'algorithm']
    """

    schedule: Schedule
    algorithm: Algorithm


def simulate(
    algorithm: Algorithm,
    sampler: Sampler,
    *,
    rounds: int | None = None,
    seconds: float | None = None,
    synchronization: Synchronization | None = None,
    devices: Devices | None = None,
    faults: Faults | FaultSchedule | None = None,
    policy: Policy | None = None,
    bytes_down: int | None = None,
    bytes_up: int | None = None,
    **options: Any,
) -> Simulation:
    """Trains like `run`, with clients that need time to compute and to communicate, start from older models, and fail.

    The events are simulated on a virtual clock in seconds before training starts, because they do not depend on the values of
    models. Then every server step is a round of the clients whose updates it aggregates, each from the version of the model
    that it started from. Clients without examples take no step and answer after the transfers alone; their updates take part in
    server steps without changing the model.

    The metrics of a round also have ``simulated_seconds``, the time at the end of the server step; the mean and the largest
    ``staleness`` of its updates, and ``staleness_counts``, how many have each staleness from 0 on; and ``clients_in_flight``
    before the server sends the new model. Since the server step before, they count the updates that were not used
    (``updates_late``, ``updates_lost``, ``updates_dropped``) and, of all clients whose outcome became known, ``messages_down``
    and ``messages_up`` with their ``bytes_down`` and ``bytes_up``, ``messages_lost``, ``messages_doubled``, ``client_steps``
    and ``client_steps_wasted``. (``bits_down`` and ``bits_up`` are those of the aggregated updates alone, after compression.)

    Args:
      algorithm: an algorithm whose round is one aggregation of updates.
      sampler: selects the clients: those of its cohorts, one cohort after the other, as far as they are available.
      rounds: the number of server steps; None: as many as there are in ``seconds``.
      seconds: the simulated time at which the run ends, if it has fewer server steps until then.
      synchronization: when clients are sent a model and when the server aggregates; None: synchronous rounds.
      devices: how fast clients are; None: one second per local step, and messages take no time.
      faults: what goes wrong; None: nothing does.
      policy: what the server does if there is no answer.
      bytes_down, bytes_up: the sizes of the messages; None: those of the uncompressed model and update.
      **options: those of `run`.

    Raises:
      ValueError: the algorithm overrides ``apply``, its round is more than one aggregation, or its updates must not be scaled
        and the synchronization model does; the run cannot go on.

    >>> import fedsim, optax
    >>> from fedsim import systems
    >>> data = fedsim.datasets.load("digits").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> result = simulate(
    ...     algorithm, fedsim.UniformSampler(data, clients=10, seed=0), rounds=5, progress=False,
    ...     devices=systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0)),
    ...     synchronization=systems.Buffered(size=3, concurrency=10))
    >>> [line["round"] for line in result.history], result.history[-1]["largest_staleness"] > 0
    ([1, 2, 3, 4, 5], True)
    """
    if rounds is None and seconds is None:
        raise ValueError("Expected rounds or seconds, got neither: give rounds=100, for example.")
    made = scheduled(
        algorithm,
        sampler,
        rounds=_MOST_ROUNDS if rounds is None else rounds,
        seconds=seconds,
        synchronization=synchronization,
        devices=devices,
        faults=faults,
        policy=policy,
        bytes_down=bytes_down,
        bytes_up=bytes_up,
    )
    steps = rounds if rounds is not None and isinstance(made.sampler, ClockedSampler) else len(made.schedule.steps.time)
    result = run(made.algorithm, made.sampler, rounds=steps, **options)
    known: Any = observed(made.sampler, result.history)
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return Simulation(**fields, schedule=known.schedule, algorithm=made.algorithm)
