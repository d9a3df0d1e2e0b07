"""Few labels: FixMatch and FedMatch between training on the labels alone and training with all labels.

The settings are those of W. Jeong, J. Yoon, E. Yang, S. J. Hwang, "Federated semi-supervised learning with inter-client
consistency & disjoint learning", ICLR 2021, https://arxiv.org/abs/2006.12097: a fraction of the labels at every client, or no
labels at clients and some at the server. Training on the labels alone is what E. Diao, J. Ding, V. Tarokh, "SemiFL:
semi-supervised federated learning for unlabeled clients with alternate training", NeurIPS 2022,
https://arxiv.org/abs/2106.01432, call partially supervised; they report that FedMatch does not improve on it. The papers' data
(CIFAR-10 and others, convolutional networks) need more than a CPU, so there are no published numbers for this table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optax

from fedsim import augmentations
from fedsim.algorithm import Algorithm
from fedsim.algorithms import FedAvg, FedMatch, FixMatch
from fedsim.data import Batches, FederatedData
from fedsim.partitioners import hide_labels, only_labelled
from fedsim.reproductions._clock import Task, digits, femnist_writers, needs_data
from fedsim.reproductions._curve import train
from fedsim.reproductions._femnist import NEEDS
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import UniformSampler

_COHORT, _EVERY, _LAST = 10, 10, 3
_TASKS: dict[str, Callable[[Request, int], Task]] = {
    "digits": functools.partial(digits, clients=20),
    "digits-iid": functools.partial(digits, clients=20, partition="iid"),
    "femnist": femnist_writers,
}


@dataclasses.dataclass(frozen=True)
class _Method:
    """A row of the table: the algorithm, its learning rate, whether it reads unlabelled examples, and further arguments."""

    cls: Any
    rate: float
    unlabelled: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_METHODS = {
    "labels alone": _Method(FedAvg, 0.3, unlabelled=False),
    "labels alone, strongly augmented": _Method(
        FixMatch, 0.3, unlabelled=False, options={"weak": augmentations.strong, "unlabelled_weight": 0.0}
    ),
    "FixMatch": _Method(FixMatch, 0.1),
    "FedMatch": _Method(FedMatch, 0.01),
}
_ALL_LABELS = {"all labels": _Method(FedAvg, 0.3, unlabelled=False)}


def _build(task: Task, method: _Method, few: FederatedData, place: str) -> tuple[Algorithm, FederatedData]:
    """Returns a method and its training data, if the labels of ``few`` are at the clients or at the server."""
    labelled, options = only_labelled(few), dict(method.options)
    if not method.unlabelled:
        data = labelled if place == "clients" else FederatedData.from_clients({"server": dict(labelled.columns)})
    elif place == "clients":
        data = few
    else:
        data, options["server_examples"] = hide_labels(few, fraction=0.0, seed=0), dict(labelled.columns)
    optimizer = optax.sgd(method.rate)
    return method.cls(model=task.model, client_optimizer=optimizer, batches=Batches(size=20, epochs=5), **options), data


def _run(request: Request, load: Callable[[Request, int], Task], place: str, percent: int) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=100)
    for name, method in (_METHODS if percent < 100 else _ALL_LABELS).items():
        accuracies, seconds = [], 0.0
        for seed in extent.seeds:
            task = load(request, seed)
            few = hide_labels(task.train, fraction=percent / 100, seed=seed)
            algorithm, data = _build(task, method, few, place)
            sampler = UniformSampler(data, clients=min(_COHORT, data.num_clients), seed=seed)
            curve = train(algorithm, sampler, rounds=extent.rounds, every=_EVERY, score=task.accuracy)
            accuracies.append(100 * curve.mean_of_last(_LAST))
            seconds += curve.seconds
            request.log(f"{task.title}, {percent} % at the {place}, {name}: seed {seed}, {accuracies[-1]:.1f} %")
        yield Row.of_seeds(
            accuracies,
            digits=1,
            case=f"{task.title}, {percent} % of the labels at the {place}, {name}",
            measure=f"test accuracy, mean of the last {_LAST} evaluations, %",
            seconds=seconds,
            settings={"rate": method.rate, "clients per round": sampler.clients, "batches": str(algorithm.batches)},
            reduced=join_nonempty(task.reduced, extent.reduced()),
        )


def _cases(request: Request) -> Mapping[str, Case]:
    settings = [("clients", 2), ("clients", 10), ("server", 2), ("server", 10), ("clients", 100)]
    cases: dict[str, Case] = {
        f"{task}-{place}-{percent}": functools.partial(_run, request, _TASKS[task], place, percent)
        for task in _TASKS
        for place, percent in settings
    }
    return needs_data(request, cases)


FEW_LABELS = Reproduction(
    name="few_labels",
    title="Few labels, at the clients or at the server: FixMatch and FedMatch between the labels alone and all labels",
    paper="W. Jeong et al. Federated semi-supervised learning with inter-client consistency & disjoint learning. ICLR 2021. "
    "https://arxiv.org/abs/2006.12097; K. Sohn et al. FixMatch. NeurIPS 2020. https://arxiv.org/abs/2001.07685",
    duration="about 10 minutes without FEMNIST",
    required_data=f"digits: none; {NEEDS}",
    cases=_cases,
    notes="This is a table of our own: the papers' data and networks need more than a CPU, so there are no published "
    "numbers to compare with. 20 clients, 10 per round, 5 epochs with batches of 20, 100 rounds. *Labels alone* is "
    "federated averaging of the labelled examples, or training at the server on its own ones: the lower bound, which "
    "Diao et al. (SemiFL, https://arxiv.org/abs/2106.01432) call partially supervised and report to be as good as "
    "FedMatch. *Strongly augmented* is the same with the strong augmentation of FixMatch, which shows what "
    "augmentation alone contributes. *All labels* is the upper bound. The learning rates (0.3 for labels alone and "
    "all labels, 0.1 for FixMatch, 0.01 for FedMatch) were the better of two or more for seeds 0 and 1 with 10 % of "
    "the labels at clients, by the test accuracy; all else has fedsim's defaults.",
)
