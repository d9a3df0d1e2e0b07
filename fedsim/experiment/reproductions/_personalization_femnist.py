"""Personalization on FEMNIST's real writers: one model for all, against one for each.

FedJAX (J. H. Ro, A. T. Suresh, K. Wu, 2021, https://arxiv.org/abs/2108.02117) has a notebook in which fine-tuning the global
model on each writer's training examples raises the mean accuracy from 84.6 to 87.9 % on all of FEMNIST. Here FedAvg, and
FedAvg fine-tuned, stand beside Per-FedAvg (https://arxiv.org/abs/2002.07948), APFL (https://arxiv.org/abs/2003.13461), Ditto
(https://arxiv.org/abs/2012.04221) and FedRep (https://arxiv.org/abs/2102.07078), all with the same network, rounds and
cohorts. Every writer is tested on its own test examples; what counts is the distribution over writers, and not only its
mean.

Deviations: a perceptron for the convolutional network, and the writers that are at hand. A writer who never took part starts,
when it is tested, as one who does for the first time. FedRep trains heads for ten epochs and then the body for one, as in its
paper, where all others train for one; it is tested twice: with the heads that writers have, and after each has trained once
more, for in the last round of its authors' code all clients train.
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
from fedsim.experiment.reproductions import _femnist as femnist
from fedsim.experiment.reproductions._curve import train
from fedsim.experiment.reproductions._reproduction import Case, Reproduction, Request, Row, joined, spread
from fedsim.samplers import UniformSampler

_COHORT = 10
_MEASURES = ("accuracy, all examples", "mean over writers", "deviation over writers", "worst 10 % of writers")


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


def over_writers(evaluation: Evaluation) -> tuple[dict[str, float], list[float]]:
    """What is compared, in percent, and the deciles of the accuracy over writers with test examples."""
    over = evaluation.over_clients("accuracy")
    numbers = (evaluation.overall["accuracy"], over["mean"], over["std"], over["worst 10%"])
    mean = evaluation.clients["accuracy"]
    weight = np.asarray(mean.weight)
    accuracies = np.asarray(mean.total)[weight > 0] / weight[weight > 0]
    deciles = np.percentile(accuracies, range(0, 101, 10))
    return {name: 100 * float(number) for name, number in zip(_MEASURES, numbers, strict=True)}, deciles.round(4).tolist()


def _run(request: Request, title: str, make: Callable[..., Algorithm]) -> Iterator[Row]:
    plan = request.plan(seeds=3, rounds=1000)
    train_data, test_data = femnist.load(request)
    model = models.emnist_dense()
    found: dict[str, list[tuple[dict[str, float], list[float]]]] = {}
    seconds, cohort = 0.0, min(_COHORT, train_data.num_clients)
    for seed in plan.seeds:
        algorithm = make(model=model, client_optimizer=optax.sgd(femnist.RATE), batches=femnist.BATCHES)
        sampler = UniformSampler(train_data, clients=cohort, seed=seed)
        curve = train(algorithm, sampler, rounds=plan.rounds, score=lambda state: 0.0, every=plan.rounds)
        everyone = functools.partial(evaluate_personalized, algorithm, curve.state, train_data, test_data)
        if make is FedAvg:
            evaluations = {"FedAvg, one model for all": evaluate(model, curve.state.params, test_data)}
        else:
            evaluations = {title: everyone()}
        if make in (FedAvg, _fedrep):  # a head is as old as its writer's last round, and the body is not
            evaluations[f"{title}, fine-tuned"] = everyone(fine_tune=algorithm)
        for name, evaluation in evaluations.items():
            found.setdefault(name, []).append(over_writers(evaluation))
            told = ", ".join(f"{measure} {value:.1f}" for measure, value in found[name][-1][0].items())
            request.say(f"{name}: seed {seed}: {told}, {curve.seconds:.0f} s")
        seconds += curve.seconds
    reduced = joined(femnist.which(train_data), plan.reduced())
    for number, (name, of_seeds) in enumerate(found.items()):
        stated = {"FedAvg, one model for all": "84.6 (notebook)", "FedAvg, fine-tuned": "87.9 (notebook)"}.get(name, "")
        for measure in _MEASURES:
            values = [numbers[measure] for numbers, _ in of_seeds]
            first = measure == _MEASURES[0]
            yield Row(
                case=name,
                measure=measure,
                paper=stated if measure == "mean over writers" else "",
                ours=spread(values, 1),
                values=values,
                seeds=len(values),
                seconds=seconds if first and not number else 0.0,
                settings={"rate": femnist.RATE, "cohort": cohort, "batch_size": femnist.BATCHES.size, "rounds": plan.rounds},
                details={"deciles over writers, seed 0": of_seeds[0][1]} if first else {},
                reduced=reduced,
            )


PERSONALIZATION = Reproduction(
    name="personalization",
    title="Personalization on FEMNIST's writers: one model for all against fine-tuning, Per-FedAvg, APFL, Ditto and FedRep",
    paper="J. H. Ro, A. T. Suresh, K. Wu. FedJAX: federated learning simulation with JAX. 2021 (its notebook on "
    "personalization). https://arxiv.org/abs/2108.02117",
    takes="2 to 10 min a case of 3 seeds, 5 cases",
    needs=femnist.NEEDS,
    cases=_cases,
    about="A perceptron of two layers of 200, 10 writers a round, 1,000 rounds. Every writer is tested on its own test "
    "examples, with what it has trained for itself; deciles over writers are in the JSON file. The notebook has a "
    "convolutional network and all writers. FedRep's heads are their writers' alone, who have few examples of 62 classes.",
)
