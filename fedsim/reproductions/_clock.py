"""What the experiments on a virtual clock share: curves over simulated seconds, and two tasks.

The tasks are the digits, which need no download, and the writers of FEMNIST, each with a perceptron that is small enough for
two CPU cores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedsim import datasets, models
from fedsim.algorithm import Algorithm
from fedsim.configuration import scheduled
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate
from fedsim.model import Model
from fedsim.reproductions import _femnist as femnist
from fedsim.reproductions._curve import Curve, rounds_to_target, train
from fedsim.reproductions._reproduction import Case, Request, Row
from fedsim.samplers import Sampler
from fedsim.systems import Devices, LogNormal, Schedule

# A client keeps its speed. One in forty is seven times slower than the median.
SPEEDS = Devices(seconds_per_step=LogNormal(sigma=1.0))

# One model for all seeds, so that they share compiled programs.
_digits_model = functools.cache(models.digits_dense)
_femnist_model = functools.cache(functools.partial(models.emnist_dense, hidden=(64,)))


@dataclasses.dataclass(frozen=True)
class TimedCurve:
    """The scores of a run on a virtual clock.

    Attributes:
      curve: the scores by server step.
      schedule: the events of the whole run, of which the curve may be the beginning.
    """

    curve: Curve
    schedule: Schedule

    @property
    def times(self) -> np.ndarray:
        """The simulated seconds at each evaluation."""
        return self.schedule.steps.time[np.array(self.curve.rounds) - 1]

    @property
    def updates(self) -> np.ndarray:
        """The number of client updates that were aggregated until each evaluation."""
        return np.cumsum(self.schedule.steps.updates)[np.array(self.curve.rounds) - 1]

    def seconds_to_target(self, target: float) -> float | None:
        """Returns the simulated seconds to a score, see `rounds_to_target`."""
        return rounds_to_target(self.times.tolist(), self.curve.scores, target)

    def updates_to_target(self, target: float) -> float | None:
        """Returns the client updates to a score, see `rounds_to_target`."""
        return rounds_to_target(self.updates.tolist(), self.curve.scores, target)


def train_on_clock(
    algorithm: Algorithm,
    sampler: Sampler,
    *,
    updates: int,
    per_step: int = 1,
    every: int,
    score: Callable[[Any], float],
    until: float | None = None,
    **systems: Any,
) -> TimedCurve:
    """Trains as `fedsim.experiment.simulate` does, for a number of client updates or until a score is reached.

    Args:
      algorithm, sampler, score, until: those of `train`.
      updates: the run ends with the server step that aggregates the last of this many updates.
      per_step: a number of updates that every server step has at least.
      every: the number of updates between evaluations, which are made after the nearest server steps.
      **systems: the synchronization model, devices, faults and policy of `simulate`.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> scores = iter([0.2, 0.4])
    >>> found = train_on_clock(
    ...     algorithm, fedsim.UniformSampler(data, clients=4, seed=0), updates=16, per_step=4, every=8,
    ...     score=lambda state: next(scores))
    >>> found.curve.rounds, found.updates.tolist(), found.times.tolist(), round(found.updates_to_target(0.3), 6)
    ([2, 4], [8, 16], [6.0, 10.0], 12.0)
    """
    arguments = {"synchronization": None, "devices": None, "faults": None} | systems
    made = scheduled(algorithm, sampler, rounds=-(-updates // per_step), **arguments)
    counts = np.cumsum(made.schedule.steps.updates)
    rounds = int(np.searchsorted(counts, updates)) + 1
    each = max(1, round(every * rounds / float(counts[rounds - 1])))
    curve = train(made.algorithm, made.sampler, rounds=rounds, score=score, every=each, until=until)
    return TimedCurve(curve, made.schedule)


@dataclasses.dataclass(frozen=True)
class Task:
    """Data and a model.

    Attributes:
      title: its name in the table.
      model: a perceptron.
      train, test: the data.
      batches: those of local training.
      rate: the clients' learning rate.
      reduced: what is missing in the data; empty if nothing is.
    """

    title: str
    model: Model
    train: FederatedData
    test: FederatedData
    batches: Batches
    rate: float
    reduced: str = ""

    def accuracy(self, state: Any) -> float:
        """Returns the accuracy of the state's model over all test examples."""
        return evaluate(self.model, state.params, self.test).overall["accuracy"]


def digits(request: Request, seed: int, clients: int = 100, partition: str = "dirichlet") -> Task:
    """Returns the digits, divided among clients, by default with skewed labels; other clients for each seed."""
    del request
    splits = datasets.load("digits", clients=clients, partition=partition, seed=seed)
    return Task(
        "digits" if partition == "dirichlet" else f"digits, {partition}",
        _digits_model(),
        splits.train,
        splits.test,
        Batches(size=10, epochs=5),
        0.2,
    )


def femnist_writers(request: Request, seed: int) -> Task:
    """Returns the writers of FEMNIST, the same ones for each seed."""
    del seed
    train_data, test_data = femnist.load(request)
    missing = femnist.missing_writers(train_data)
    return Task("FEMNIST", _femnist_model(), train_data, test_data, femnist.BATCHES, femnist.RATE, missing)


def needs_data(request: Request, cases: Mapping[str, Case]) -> dict[str, Case]:
    """Returns the cases, of which those on FEMNIST return no rows, and say so, if no folder with data is given."""

    def skip() -> list[Row]:
        request.log("The cases on FEMNIST are not run: give --data DIR.")
        return []

    return {name: skip if name.startswith("femnist") and request.data is None else case for name, case in cases.items()}
