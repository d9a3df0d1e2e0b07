"""Transfer: a federation with few examples that starts from the model of another one, with other labels or a shifted domain.

The methods are those of A. Kumar, A. Raghunathan, R. Jones, T. Ma, P. Liang, "Fine-tuning can distort pretrained features and
underperform out-of-distribution", ICLR 2022, https://arxiv.org/abs/2202.10054 (a frozen body, fine-tuning, and one after the
other), beside training from scratch, clients that train alone, and personal heads on a shared body (FedPer).
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import optax

from fedsim import datasets, models, rng
from fedsim.algorithms import FedAvg, FedPer
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate, evaluate_personalized
from fedsim.model import Model, Params
from fedsim.partitioners import hide_labels, noise, only_labelled, rotation
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import UniformSampler
from fedsim.transfer import Head, probe_then_tune, transfer_body

_RATES, _BATCHES, _COHORT, _FEW = (0.05, 0.2), Batches(size=10, epochs=5), 10, 0.1
_SOURCE_RATE, _SOURCE_ROUNDS, _PROBE, _EARLY = 0.2, 50, 0.3, 0.2
Domain = tuple[FederatedData, FederatedData, FederatedData]


def _classes(data: FederatedData, first: int) -> FederatedData:
    """Returns the examples of five classes, whose labels start at 0."""
    y = np.asarray(data.columns["y"]) - first
    columns = {**data.columns, "y": np.where((y >= 0) & (y < 5), y, -1).astype(np.int32)}
    return only_labelled(FederatedData(columns, data.offsets, data.client_ids))


def _other_labels(train: FederatedData, test: FederatedData) -> Domain:
    return _classes(train, 0), _classes(train, 5), _classes(test, 5)


def _shifted_domain(train: FederatedData, test: FederatedData) -> Domain:
    def shifted(data: FederatedData, seed: int) -> FederatedData:
        return noise(rotation(data, angles=[25]), sigma=2.0, seed=seed, equal=True)

    return train, shifted(train, 0), shifted(test, 1)


def _no_head(module: str, name: str) -> bool:
    return False


def _all_head(module: str, name: str) -> bool:
    return True


# The data, the number of classes, and what is a new head at the start.
_SHIFTS: dict[str, tuple[str, Callable[[FederatedData, FederatedData], Domain], int, Head | None]] = {
    "labels": ("digits 0 to 4, then 5 to 9", _other_labels, 5, None),
    "domain": ("upright digits, then rotated by 25° with noise", _shifted_domain, 10, _no_head),
}
_model = functools.cache(lambda classes: models.dense((8, 8, 1), classes, hidden=(128, 64), scale=16))


def _trained(
    algorithm: FedAvg, data: FederatedData, rounds: Sequence[int], seed: int, start: Params | None, head: Head | None
) -> list[Any]:
    """Returns the states after these numbers of rounds from the body of ``start``; None starts from random parameters."""
    sampler = UniformSampler(data, clients=_COHORT, seed=seed)
    state = algorithm.init(rng.stream(rng.root(seed), "init" if start is None else "transfer"))
    if start is not None:
        state = state._replace(params=transfer_body(algorithm.model, state.params, start, head=head))
    states = []
    for first, last in itertools.pairwise([0, *rounds]):
        state, _ = algorithm.apply_rounds(state, [sampler.cohort(round) for round in range(first, last)])
        states.append(state)
    return states


def _methods(model: Model, rounds: int) -> dict[str, tuple[Callable[[float], FedAvg], bool]]:
    """Returns the algorithm of each method, a function of the learning rate, and whether it starts from the other model."""
    made = functools.partial(FedAvg, model=model, batches=_BATCHES)
    personal = functools.partial(FedPer, model=model, batches=_BATCHES)

    def probed(rate: float, rounds: int) -> FedAvg:
        return made(client_optimizer=probe_then_tune(model, optax.sgd(rate), rounds=rounds))

    return {
        "from scratch": (lambda rate: made(client_optimizer=optax.sgd(rate)), False),
        "each client alone": (lambda rate: personal(client_optimizer=optax.sgd(rate), head=_all_head), False),
        "FedPer from scratch": (lambda rate: personal(client_optimizer=optax.sgd(rate)), False),
        "transferred body, head alone": (lambda rate: probed(rate, rounds), True),
        "transferred, head and then all": (lambda rate: probed(rate, max(1, round(_PROBE * rounds))), True),
        "transferred, all": (lambda rate: made(client_optimizer=optax.sgd(rate)), True),
        "FedPer from a transferred body": (lambda rate: personal(client_optimizer=optax.sgd(rate)), True),
    }


def _run(request: Request, title: str, domain: Callable[..., Domain], classes: int, head: Head | None) -> Iterator[Row]:
    extent, model = request.extent(seeds=3, rounds=50), _model(classes)
    first = FedAvg(model=model, batches=_BATCHES, client_optimizer=optax.sgd(_SOURCE_RATE))
    seen = sorted({max(1, round(_EARLY * extent.rounds)), extent.rounds})
    federations: dict[int, tuple[FederatedData, FederatedData, Params]] = {}
    for seed in extent.seeds:
        splits = datasets.load("digits", clients=20, seed=seed, test_fraction=0.5)
        source, target, test = domain(splits.train, splits.test)
        few = only_labelled(hide_labels(target, fraction=_FEW, seed=seed))
        trained = _trained(first, source, [min(_SOURCE_ROUNDS, 10 * extent.rounds)], seed, None, None)
        federations[seed] = few, test, trained[-1].params

    for name, (make, transferred) in _methods(model, extent.rounds).items():
        began = time.perf_counter()

        def accuracies(algorithm: FedAvg, seed: int, transferred: bool = transferred) -> list[float]:
            few, test, start = federations[seed]
            found = []
            for state in _trained(algorithm, few, seen, seed, start if transferred else None, head):
                if isinstance(algorithm, FedPer):
                    found.append(evaluate_personalized(algorithm, state, few, test))
                else:
                    found.append(evaluate(model, state.params, test))
            return [100 * each.overall["accuracy"] for each in found]

        algorithms = {rate: make(rate) for rate in _RATES}
        tried = {rate: accuracies(algorithm, extent.seeds[0]) for rate, algorithm in algorithms.items()}
        rate = max(tried, key=lambda each: tried[each][-1])
        values = [tried[rate], *(accuracies(algorithms[rate], seed) for seed in extent.seeds[1:])]
        request.log(f"{title}, {name}: rate {rate}, {np.round(values, 1).tolist()}")
        own = ", of each client's own model" * isinstance(algorithms[rate], FedPer)
        for number, rounds in enumerate(seen):
            at = [each[number] for each in values]
            yield Row.of_seeds(
                at,
                digits=1,
                case=f"{title}: {name}",
                measure=f"test accuracy after {rounds} rounds, %{own}",
                seconds=0.0 if number else time.perf_counter() - began,
                settings={"rate": rate, "rates": _RATES, "batches": str(_BATCHES), "clients per round": _COHORT},
                reduced=join_nonempty(extent.reduced()),
            )


def _cases(request: Request) -> Mapping[str, Case]:
    return {name: functools.partial(_run, request, *shift) for name, shift in _SHIFTS.items()}


TRANSFER = Reproduction(
    name="transfer",
    title="Transfer to a federation with few examples: other labels, or a shifted domain",
    paper="A. Kumar et al. Fine-tuning can distort pretrained features and underperform out-of-distribution. ICLR 2022. "
    "https://arxiv.org/abs/2202.10054",
    duration="about 5 minutes",
    required_data="none",
    cases=_cases,
    notes="This is a table of our own, without published numbers. The digits are divided among 20 clients with skewed labels; "
    "half of each client's examples are test examples. A perceptron is trained by FedAvg on the first federation for 50 "
    "rounds. The second has a tenth of the training examples of its clients (two to five each) and trains for 50 rounds, 10 "
    "clients per round, 5 epochs with batches of 10; each method has the learning rate of two with which seed 0 is best on "
    "the test examples at the end. With other labels the output layer is new; with a shifted domain all parameters are "
    "transferred. *Head alone* trains the output layer only, *head and then all* does so for 15 of the 50 rounds. A client's "
    "own model is tested on the client's test examples, which may have labels of which it has no training example.",
)
