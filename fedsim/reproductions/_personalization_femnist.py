"""Personalization on the writers of FEMNIST: one model for all, against one model for each.

FedJAX (J. H. Ro, A. T. Suresh, K. Wu, 2021, https://arxiv.org/abs/2108.02117) has a notebook in which fine-tuning the
global model on each writer's training examples raises the mean accuracy from 84.6 to 87.9 % on all of FEMNIST. Here FedAvg,
with and without fine-tuning, is compared with Per-FedAvg (https://arxiv.org/abs/2002.07948), APFL
(https://arxiv.org/abs/2003.13461), Ditto (https://arxiv.org/abs/2012.04221) and FedRep (https://arxiv.org/abs/2102.07078),
all with the same network, rounds and cohorts. Every writer is evaluated on its own test examples. The distribution over
writers is compared, not only its mean.

Deviations: a perceptron replaces the convolutional network, and only the available writers take part. A writer that was
never sampled is evaluated with the initial values of its memory. FedRep trains heads for ten epochs and then the body for
one, as in its paper, where all other algorithms train for one epoch. It is evaluated twice: with the heads that writers
have, and after each writer has trained once more, because in the last round of its authors' code all clients train.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import optax

from fedsim import models
from fedsim.algorithm import Algorithm
from fedsim.algorithms import APFL, Ditto, FedAvg, FedRep, PerFedAvg
from fedsim.data import Batches
from fedsim.evaluation import Evaluation, evaluate, evaluate_personalized
from fedsim.reproductions import _femnist as femnist
from fedsim.reproductions._curve import train
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import UniformSampler

_COHORT = 10
_MEASURES = ("accuracy, all examples", "mean over writers", "standard deviation over writers", "worst 10 % of writers")


def _fedrep(batches: Batches, **settings: Any) -> FedRep:
    return FedRep(batches=dataclasses.replace(batches, epochs=11), head_fraction=10 / 11, **settings)


def _methods() -> dict[str, tuple[str, Callable[..., Algorithm]]]:
    return {
        "fedavg": ("FedAvg", FedAvg),
        "perfedavg": ("Per-FedAvg, first order", PerFedAvg),
        "apfl": ("APFL, adaptive", functools.partial(APFL, adaptive=True)),
        "ditto": ("Ditto, λ = 1", functools.partial(Ditto, lam=1.0)),
        "fedrep": ("FedRep", _fedrep),
    }


def _cases(request: Request) -> Mapping[str, Case]:
    return {name: functools.partial(_run, request, *method) for name, method in _methods().items()}


def writer_statistics(evaluation: Evaluation) -> tuple[dict[str, float], list[float]]:
    """Returns the measures in percent, and the deciles of the accuracy over the writers with test examples."""
    over = evaluation.over_clients("accuracy")
    numbers = (evaluation.overall["accuracy"], over["mean"], over["std"], over["worst 10%"])
    mean = evaluation.clients["accuracy"]
    weight = np.asarray(mean.weight)
    accuracies = np.asarray(mean.total)[weight > 0] / weight[weight > 0]
    deciles = np.percentile(accuracies, range(0, 101, 10))
    return {name: 100 * float(number) for name, number in zip(_MEASURES, numbers, strict=True)}, deciles.round(4).tolist()


def _run(request: Request, title: str, make: Callable[..., Algorithm]) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=1000)
    train_data, test_data = femnist.load(request)
    model = models.emnist_dense()
    results: dict[str, list[tuple[dict[str, float], list[float]]]] = {}
    seconds, cohort = 0.0, min(_COHORT, train_data.num_clients)
    for seed in extent.seeds:
        algorithm = make(model=model, client_optimizer=optax.sgd(femnist.RATE), batches=femnist.BATCHES)
        sampler = UniformSampler(train_data, clients=cohort, seed=seed)
        curve = train(algorithm, sampler, rounds=extent.rounds, score=lambda state: 0.0, every=extent.rounds)
        everyone = functools.partial(evaluate_personalized, algorithm, curve.state, train_data, test_data)
        if make is FedAvg:
            evaluations = {"FedAvg, one model for all": evaluate(model, curve.state.params, test_data)}
        else:
            evaluations = {title: everyone()}
        if make in (FedAvg, _fedrep):  # a head was trained in its writer's last round, the body in the last round of all
            evaluations[f"{title}, fine-tuned"] = everyone(fine_tune=algorithm)
        for name, evaluation in evaluations.items():
            results.setdefault(name, []).append(writer_statistics(evaluation))
            text = ", ".join(f"{measure} {value:.1f}" for measure, value in results[name][-1][0].items())
            request.log(f"{name}: seed {seed}: {text}, {curve.seconds:.0f} s")
        seconds += curve.seconds
    reduced = join_nonempty(femnist.missing_writers(train_data), extent.reduced())
    for number, (name, of_seeds) in enumerate(results.items()):
        stated = {"FedAvg, one model for all": "84.6 (notebook)", "FedAvg, fine-tuned": "87.9 (notebook)"}.get(name, "")
        for measure in _MEASURES:
            values = [numbers[measure] for numbers, _ in of_seeds]
            first = measure == _MEASURES[0]
            yield Row.of_seeds(
                values,
                digits=1,
                case=name,
                measure=measure,
                paper=stated if measure == "mean over writers" else "",
                seconds=seconds if first and not number else 0.0,
                settings={"rate": femnist.RATE, "cohort": cohort, "batch_size": femnist.BATCHES.size, "rounds": extent.rounds},
                details={"deciles over writers, seed 0": of_seeds[0][1]} if first else {},
                reduced=reduced,
            )


PERSONALIZATION = Reproduction(
    name="personalization",
    title="Personalization on FEMNIST's writers: one model for all against fine-tuning, Per-FedAvg, APFL, Ditto and FedRep",
    paper="J. H. Ro, A. T. Suresh, K. Wu. FedJAX: federated learning simulation with JAX. 2021 (its notebook on "
    "personalization). https://arxiv.org/abs/2108.02117",
    duration="2 to 10 min per case of 3 seeds, 5 cases",
    required_data=femnist.NEEDS,
    cases=_cases,
    notes="A perceptron with two hidden layers of 200 units, 10 writers per round, 1,000 rounds. Every writer is evaluated on "
    "its own test examples with its personal model; deciles over writers are in the JSON file. The notebook uses a "
    "convolutional network and all writers. Each of FedRep's heads is trained by one writer only, which has few examples "
    "of 62 classes.",
)
