"""Transfer: a federation with few examples that starts from the model of another one, with other labels or a shifted domain.

The methods are those of A. Kumar, A. Raghunathan, R. Jones, T. Ma, P. Liang, "Fine-tuning can distort pretrained features and
underperform out-of-distribution", ICLR 2022, https://arxiv.org/abs/2202.10054 (a frozen body, fine-tuning, and one after the
other), beside training from scratch, clients that train alone, and personal heads on a shared body (FedPer).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import optax

from fedsim import datasets, models, rng
from fedsim.algorithms import FedAvg, FedPer
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate, evaluate_personalized
from fedsim.experiment.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty, mean_and_std
from fedsim.model import Params
from fedsim.partitioners import hide_labels, noise, only_labelled, rotation
from fedsim.samplers import UniformSampler
from fedsim.transfer import Head, probe_then_tune, transfer_body

_RATE, _BATCHES, _COHORT, _FEW = 0.2, Batches(size=10, epochs=5), 10, 0.1
_SOURCE_ROUNDS, _PROBE = 50, 0.3
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
        return noise(rotation(data, angles=[40]), sigma=3.0, seed=seed, equal=True)

    return train, shifted(train, 0), shifted(test, 1)


def _no_head(module: str, name: str) -> bool:
    return False


def _all_head(module: str, name: str) -> bool:
    return True


# The data, the number of classes, and what is a new head at the start.
_SHIFTS: dict[str, tuple[str, Callable[[FederatedData, FederatedData], Domain], int, Head | None]] = {
    "labels": ("digits 0 to 4, then 5 to 9", _other_labels, 5, None),
    "domain": ("upright digits, then rotated by 40° with noise", _shifted_domain, 10, _no_head),
}
_model = functools.cache(lambda classes: models.dense((8, 8, 1), classes, hidden=(128, 64), scale=16))


def _trained(algorithm: FedAvg, data: FederatedData, rounds: int, seed: int, start: Params | None, head: Head | None) -> Any:
    """Returns the state after some rounds from the body of ``start``; None starts from random parameters."""
    sampler = UniformSampler(data, clients=_COHORT, seed=seed)
    state = algorithm.init(rng.stream(rng.root(seed), "init" if start is None else "transfer"))
    if start is not None:
        state = state._replace(params=transfer_body(algorithm.model, state.params, start, head=head))
    return algorithm.apply_rounds(state, [sampler.cohort(round) for round in range(rounds)])[0]


def _run(request: Request, title: str, domain: Callable[..., Domain], classes: int, head: Head | None) -> Iterator[Row]:
    plan, model = request.plan(seeds=3, rounds=50), _model(classes)
    made = functools.partial(FedAvg, model=model, batches=_BATCHES)
    personal = functools.partial(FedPer, model=model, batches=_BATCHES, client_optimizer=optax.sgd(_RATE))
    probing = max(1, round(_PROBE * plan.rounds))
    probe = functools.partial(probe_then_tune, model, optax.sgd(_RATE))
    # The algorithm, and whether it starts from the other federation's model.
    methods: dict[str, tuple[FedAvg, bool]] = {
        "from scratch": (made(client_optimizer=optax.sgd(_RATE)), False),
        "each client alone": (personal(head=_all_head), False),
        "FedPer from scratch": (personal(), False),
        "transferred body, head alone": (made(client_optimizer=probe(rounds=plan.rounds)), True),
        "transferred, head and then all": (made(client_optimizer=probe(rounds=probing)), True),
        "transferred, all": (made(client_optimizer=optax.sgd(_RATE)), True),
        "FedPer from a transferred body": (personal(), True),
    }
    accuracies: dict[str, list[float]] = {name: [] for name in methods}
    seconds = dict.fromkeys(methods, 0.0)
    for seed in plan.seeds:
        splits = datasets.load("digits", clients=20, seed=seed, test_fraction=0.5)
        source, target, test = domain(splits.train, splits.test)
        few = only_labelled(hide_labels(target, fraction=_FEW, seed=seed))
        first = made(client_optimizer=optax.sgd(_RATE))
        start = _trained(first, source, min(_SOURCE_ROUNDS, 10 * plan.rounds), seed, None, None).params
        for name, (algorithm, transferred) in methods.items():
            began = time.perf_counter()
            state = _trained(algorithm, few, plan.rounds, seed, start if transferred else None, head)
            if isinstance(algorithm, FedPer):
                found = evaluate_personalized(algorithm, state, few, test)
            else:
                found = evaluate(model, state.params, test)
            accuracies[name].append(100 * found.overall["accuracy"])
            seconds[name] += time.perf_counter() - began
        request.log(f"{title}: seed {seed}, " + ", ".join(f"{name} {each[-1]:.1f}" for name, each in accuracies.items()))
    for name, (algorithm, _) in methods.items():
        yield Row(
            case=f"{title}: {name}",
            measure="test accuracy, %" + ", of each client's own model" * isinstance(algorithm, FedPer),
            paper="",
            ours=mean_and_std(accuracies[name], 1),
            values=accuracies[name],
            seeds=len(plan.seeds),
            seconds=seconds[name],
            settings={"rate": _RATE, "batches": str(_BATCHES), "clients per round": _COHORT, "probing rounds": probing},
            reduced=join_nonempty(plan.reduced()),
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
    notes="This is a table of our own, without published numbers. The digits are divided among 20 clients with skewed "
    "labels; half of each client's examples are test examples. A perceptron is trained by FedAvg on the first "
    "federation for 50 rounds. The second has a tenth of the training examples of its clients (two to five each) and "
    "trains for 50 rounds, 10 clients per round, 5 epochs with batches of 10, learning rate 0.2. With other labels "
    "the output layer is new; with a shifted domain all parameters are transferred. *Head alone* trains the output "
    "layer only, *head and then all* does so for 15 of the 50 rounds. A client's own model is tested on the client's "
    "test examples, which may have labels of which it has no training example.",
)
