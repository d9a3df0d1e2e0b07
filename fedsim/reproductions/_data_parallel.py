"""Data-parallel SGD with slow workers: synchronous, with backup workers, stale synchronous, asynchronous, and AD-PSGD.

J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, "Revisiting distributed synchronous SGD", 2016,
https://arxiv.org/abs/1604.00981 (synchronous, asynchronous, backup workers); Q. Ho et al., "More effective distributed ML via a
stale synchronous parallel parameter server", NeurIPS 2013; X. Lian et al., "Asynchronous decentralized parallel stochastic
gradient descent", ICML 2018, https://arxiv.org/abs/1710.06952 (AD-PSGD).

Eight workers have IID shards of the digits. A worker's step is the gradient of one batch, which the server multiplies by the
rate and subtracts, whichever the synchronization model. So every gradient counts the same. AD-PSGD has no server: a gradient
moves one of eight models, with eight times the rate. A step takes one second, times a factor from a log-normal law with σ =
0.3; slow workers take five times as long. Messages take no time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import optax

from fedsim import datasets, models
from fedsim.aggregators import Sum
from fedsim.algorithms import FedSGD
from fedsim.data import Batches, FederatedData
from fedsim.decentralized import ADPSGD, complete
from fedsim.decentralized.costs import epoch_seconds
from fedsim.evaluation import evaluate
from fedsim.reproductions._clock import train_on_clock
from fedsim.reproductions._curve import Curve, rounds_to_target, train
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, mean_and_std
from fedsim.samplers import UniformSampler
from fedsim.systems import Buffered, ConstantWeight, Devices, LogNormal, StaleSynchronous, Synchronization, Synchronous, Traces

WORKERS, EPOCHS, _BATCH, _RATE, _TARGET = 8, 10, 10, 0.05, 0.93
# As many batches as there are training examples, about, and a multiple of the workers.
EPOCH = 128
_SLOW, _SLOWNESS = (0, 1, 2, 4), 5.0
_ONE_BATCH = Batches(size=_BATCH, steps=1)
# The synchronization model, and the least number of gradients in a server step. None: AD-PSGD.
METHODS: dict[str, tuple[Synchronization | None, int]] = {
    "synchronous": (Synchronous(), WORKERS),
    "backup workers, 6 of 8": (Synchronous(over_selection=WORKERS / 6), 6),
    "stale synchronous, bound 2": (StaleSynchronous(bound=2), 1),
    "asynchronous": (Buffered(size=1, concurrency=WORKERS, staleness_weight=ConstantWeight()), 1),
    "AD-PSGD": (None, 1),
}
_model = functools.cache(functools.partial(models.digits_dense, hidden=(32,)))


def devices(slow: int, variation: float = 0.3) -> Devices:
    """Returns workers of which the first ones are slow.

    >>> devices(slow=2).availability.clients["1"]
    {'seconds_per_step': 5.0}
    """
    entries: dict[str, Any] = {
        str(worker): {"seconds_per_step": _SLOWNESS} if worker < slow else {} for worker in range(WORKERS)
    }
    return Devices(variation=LogNormal(sigma=variation), availability=Traces(entries))


class Run(NamedTuple):
    """The accuracies of a run, and at each of them the simulated seconds and the number of gradients so far."""

    curve: Curve
    times: np.ndarray
    updates: np.ndarray
    staleness: float | None

    @property
    def seconds_per_epoch(self) -> float:
        return float(self.times[-1] / self.updates[-1] * EPOCH)


def run(method: str, slow: int, train_data: FederatedData, test_data: FederatedData, epochs: int, seed: int) -> Run:
    """Trains by a method for a number of epochs, and evaluates twice in each."""
    model, (synchronization, least), updates = _model(), METHODS[method], epochs * EPOCH

    def score(state: Any) -> float:
        return evaluate(model, state.params, test_data).overall["accuracy"]

    if synchronization is None:
        algorithm = ADPSGD(
            model=model, client_optimizer=optax.sgd(WORKERS * _RATE), batches=_ONE_BATCH, topology=complete(WORKERS)
        )
        nodes = algorithm.sampler(train_data, clients=1, devices=devices(slow), seed=seed)
        curve = train(algorithm, nodes, rounds=updates, every=EPOCH // 2, score=score)
        times = np.array([nodes.cohort(round - 1).measures["simulated_seconds"] for round in curve.rounds])
        return Run(curve, times, np.array(curve.rounds), None)
    found = train_on_clock(
        FedSGD(model=model, server_optimizer=optax.sgd(_RATE), weighting="uniform", aggregator=Sum(), batches=_ONE_BATCH),
        UniformSampler(train_data, clients=WORKERS, seed=seed),
        updates=updates,
        per_step=least,
        every=EPOCH // 2,
        score=score,
        synchronization=synchronization,
        devices=devices(slow),
    )
    return Run(found.curve, found.times, found.updates, float(found.schedule.updates.staleness.mean()))


def _compare(request: Request, slow: int) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=EPOCHS)
    populations = [
        datasets.load("digits", clients=WORKERS, partition="iid", seed=seed, test_fraction=0.3) for seed in extent.seeds
    ]
    expected = [epoch_seconds([WORKERS], extent.rounds * EPOCH, devices(slow), seed=seed)[0] for seed in extent.seeds]
    formulas = {
        "synchronous": [each.synchronous / extent.rounds for each in expected],
        "asynchronous": [each.asynchronous / extent.rounds for each in expected],
    }
    for method in METHODS:
        runs = [run(method, slow, each.train, each.test, extent.rounds, seed) for seed, each in enumerate(populations)]
        epoch = [each.seconds_per_epoch for each in runs]
        accuracies = [100 * each.curve.scores[-1] for each in runs]
        reached = [rounds_to_target(each.times.tolist(), each.curve.scores, _TARGET) for each in runs]
        request.log(f"{slow} slow, {method}: {np.round(epoch, 1).tolist()} s per epoch, accuracies {np.round(accuracies, 1)}")
        staleness = [each.staleness for each in runs if each.staleness is not None]
        shared: dict[str, Any] = {
            "case": f"{slow} of {WORKERS} workers slow: {method}",
            "reduced": extent.reduced(),
        }
        formula = f"fedsim.decentralized.costs.epoch_seconds: {mean_and_std(formulas[method], 1)}" if method in formulas else ""
        yield Row.of_seeds(
            epoch,
            digits=1,
            measure=f"simulated seconds per epoch of {EPOCH} gradients",
            seconds=sum(each.curve.seconds for each in runs),
            settings={"rate": _RATE, "batch": _BATCH, "epochs": extent.rounds, "devices": str(devices(slow))},
            details={
                "seconds": [each.times.tolist() for each in runs],
                "gradients": [each.updates.tolist() for each in runs],
                "accuracy": [[100 * score for score in each.curve.scores] for each in runs],
            },
            note="; ".join(
                filter(None, [formula, f"mean staleness {np.mean(staleness):.2g} server steps" if any(staleness) else ""])
            ),
            **shared,
        )
        yield Row.of_seeds(
            accuracies,
            digits=1,
            measure=f"test accuracy after {extent.rounds} epochs, %",
            **shared,
        )
        yield Row.of_seeds(
            reached,
            digits=0,
            measure=f"simulated seconds to {_TARGET:.0%}",
            **shared,
        )


def _cases(request: Request) -> Mapping[str, Case]:
    return {f"slow-{slow}": functools.partial(_compare, request, slow) for slow in _SLOW}


DATA_PARALLEL = Reproduction(
    name="data_parallel",
    title="Data-parallel SGD with 0 to 4 of 8 workers slow: synchronous, stale, asynchronous and AD-PSGD, in simulated time",
    paper="J. Chen et al. Revisiting distributed synchronous SGD. 2016. https://arxiv.org/abs/1604.00981; X. Lian et al. "
    "Asynchronous decentralized parallel stochastic gradient descent. ICML, 2018. https://arxiv.org/abs/1710.06952. No "
    "published figures are compared",
    duration="half a minute per case of 3 seeds, 4 cases",
    required_data="none",
    cases=_cases,
    notes="Eight workers have IID shards of the digits; a step is the gradient of a batch of 10. Every gradient is subtracted "
    "with rate 0.05, whichever the synchronization model (AD-PSGD: from one of eight models with rate 0.4). A step takes one "
    "second, times a factor from a log-normal law with σ = 0.3; slow workers take five times as long. Messages take no time. "
    "Backup workers: the server goes on with the first 6 of 8 gradients. An epoch is 128 gradients that are used. "
    "The staleness of a gradient counts the server steps since its worker read the model. A step of stale synchronous SGD "
    "takes all gradients that arrived since the last one, often several, and a step of asynchronous SGD takes one gradient, so "
    "the two stalenesses have different units. Pictures: docs/four_ways.md.",
)
