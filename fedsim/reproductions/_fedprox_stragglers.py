"""FedProx with stragglers: dropping them, using their partial work, and using it with a proximal term.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated optimization in heterogeneous networks", MLSys
2020, Figures 1, 2 and 7, https://arxiv.org/abs/1812.06127. The settings are those of its code (litian96/FedProx): 30
synthetic devices, 10 per round, E = 20, B = 10, learning rate 0.01, 200 rounds. Of the ten, 0, 5 or 9 are stragglers, which
train 1 to 19 epochs with equal probability. FedAvg leaves them out of the round; FedProx uses their partial work. mu = 0 is
FedProx without its proximal term.

MNIST is set up as in Flower's replication (adap/flower, baselines/fedprox): 1,000 devices with two digits each, sizes by a
power law, learning rate 0.03, E = 10, 100 rounds, mu = 2, standardized pixels, and MNIST's own test set.

Deviations: every seed has other data, devices, stragglers and initial weights (the paper shows one run). Accuracy and loss
are means over the last 20 rounds, because with one device per round the last round depends on chance.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import optax

from fedsim import datasets, models
from fedsim.algorithms import FedAvg, FedProx
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate
from fedsim.model import Model
from fedsim.reproductions._curve import train
from fedsim.reproductions._reproduction import Case, Extent, Reproduction, Request, Row
from fedsim.samplers import Sampler, Stragglers, UniformSampler

_COHORT, _BATCH = 10, 10
_EVERY, _LAST = 5, 4  # Evaluations every 5 rounds; the result is the mean of the last 4.
_SYNTHETIC = {"iid": "Synthetic IID", "0,0": "Synthetic(0,0)", "0.5,0.5": "Synthetic(0.5,0.5)", "1,1": "Synthetic(1,1)"}


@dataclasses.dataclass(frozen=True)
class _Task:
    rate: float
    epochs: int
    mu: float
    rounds: int
    seeds: int
    quick_rounds: int


_SYNTHETIC_TASK = _Task(rate=0.01, epochs=20, mu=1.0, rounds=200, seeds=10, quick_rounds=10)
_MNIST_TASK = _Task(rate=0.03, epochs=10, mu=2.0, rounds=100, seeds=5, quick_rounds=5)


def two_digits(labels: np.ndarray, *, clients: int, seed: int, minimum: int = 5, sigma: float = 2.0) -> list[np.ndarray]:
    """Gives each client two neighbouring digits: ``minimum`` images of each, and a LogNormal(0, sigma) share of the rest.

    >>> parts = two_digits(np.arange(1000) % 10, clients=10, seed=0)
    >>> np.unique(np.arange(1000)[parts[9]] % 10).tolist(), min(map(len, parts)) >= 10
    ([0, 9], True)
    """
    draw = np.random.default_rng(seed)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for digit in range(10):
        holders = [client for client in range(clients) if digit in (client % 10, (client + 1) % 10)]
        rows = draw.permutation(np.flatnonzero(labels == digit))
        shares = draw.lognormal(0, sigma, len(holders))
        sizes = minimum + np.floor((len(rows) - minimum * len(holders)) * shares / shares.sum()).astype(int)
        for client, part in zip(holders, np.split(rows, np.cumsum(sizes)), strict=False):
            parts[client].append(part)
    return [np.concatenate(part) for part in parts]


def mnist_of_two_digits(request: Request, seed: int) -> tuple[FederatedData, FederatedData]:
    """Returns MNIST's training images at 1,000 clients of `two_digits`, and its test images, all with standardized pixels."""
    splits = datasets.load("mnist", data=request.folder("mnist"), partition="iid", clients=1)
    train_x = np.asarray(splits.train.columns["x"], np.float32)
    mean, std = train_x.mean(), train_x.std()
    train, test = (
        {"x": (np.asarray(split.columns["x"], np.float32) - mean) / std, "y": np.asarray(split.columns["y"])}
        for split in (splits.train, splits.test)
    )
    clients = min(1000, len(train_x) // 40)  # fewer clients if there are fewer images than in MNIST
    parts = two_digits(train["y"], clients=clients, seed=seed)
    return FederatedData.from_partition(train, parts), FederatedData.from_arrays(test, sizes=[len(test["y"])])


def _cases(request: Request) -> Mapping[str, Case]:
    levels = (0.0, 0.5, 0.9)
    cases: dict[str, Case] = {
        f"{name}-{level:.0%}".rstrip("%"): functools.partial(_synthetic, request, name, level)
        for name in _SYNTHETIC
        for level in levels
    }
    return cases | {"mnist-90": functools.partial(_mnist, request)}


def _synthetic(request: Request, name: str, fraction: float) -> Iterator[Row]:
    def load(seed: int) -> tuple[FederatedData, FederatedData]:
        if name == "iid":
            splits = datasets.load("synthetic_iid", seed=seed)
        else:
            alpha, beta = map(float, name.split(","))
            splits = datasets.load("synthetic", alpha=alpha, beta=beta, seed=seed)
        return splits.train, splits.test

    return _rows(request, _SYNTHETIC[name], fraction, _SYNTHETIC_TASK, models.synthetic_logistic(), load, {})


def _mnist(request: Request) -> Iterator[Row]:
    load = functools.partial(mnist_of_two_digits, request)
    replicated = {"FedAvg": "0.64 (replication)", "μ = 0": "0.80 (replication)", "μ = 2": "0.85 (replication)"}
    return _rows(request, "MNIST, 1,000 devices", 0.9, _MNIST_TASK, models.logistic((28, 28, 1), 10), load, replicated)


def _rows(
    request: Request, title: str, fraction: float, task: _Task, model: Model, load: Any, paper: Mapping[str, str]
) -> Iterator[Row]:
    extent = request.extent(seeds=task.seeds, rounds=task.rounds, quick_rounds=task.quick_rounds)
    proximal = f"μ = {task.mu:g}"
    # Without stragglers, FedAvg and mu = 0 are the same.
    methods = ["FedAvg", "μ = 0", proximal] if fraction else ["FedAvg", proximal]
    accuracy: dict[str, list[float]] = {method: [] for method in methods}
    loss: dict[str, list[float]] = {method: [] for method in methods}
    seconds = dict.fromkeys(methods, 0.0)
    for seed in extent.seeds:
        train_data, test_data = load(seed)
        for method in methods:
            mu = task.mu if method == proximal else 0.0
            optimizer, batches = optax.sgd(task.rate), Batches(size=_BATCH, epochs=task.epochs)
            algorithm: FedAvg = FedAvg(model=model, client_optimizer=optimizer, batches=batches)
            if mu:
                algorithm = FedProx(model=model, client_optimizer=optimizer, batches=batches, mu=mu)
            sampler: Sampler = UniformSampler(train_data, clients=min(_COHORT, train_data.num_clients), seed=seed)
            if fraction:
                sampler = Stragglers(sampler, fraction=fraction, epochs=task.epochs, drop=method == "FedAvg")
            losses: list[float] = []

            def score(state: Any, data: tuple[FederatedData, FederatedData] = (train_data, test_data)) -> float:
                losses.append(evaluate(model, state.params, data[0]).overall["loss"])  # noqa: B023 (called in this iteration only)
                return evaluate(model, state.params, data[1]).overall["accuracy"]

            curve = train(algorithm, sampler, rounds=extent.rounds, score=score, every=_EVERY)
            accuracy[method].append(curve.mean_of_last(_LAST))
            loss[method].append(float(np.mean(losses[-_LAST:])))
            seconds[method] += curve.seconds
            result = f"accuracy {accuracy[method][-1]:.3f}, loss {loss[method][-1]:.3f}, {curve.seconds:.0f} s"
            request.log(f"{title}, {fraction:.0%} stragglers: seed {seed}, {method}: {result}")
    yield from _method_rows(title, fraction, task, extent, accuracy, loss, seconds, paper)


def _method_rows(
    title: str,
    fraction: float,
    task: _Task,
    extent: Extent,
    accuracy: Mapping[str, list[float]],
    loss: Mapping[str, list[float]],
    seconds: Mapping[str, float],
    paper: Mapping[str, str],
) -> Iterator[Row]:
    place, methods = f"{title}, {fraction:.0%} stragglers", list(accuracy)
    settings = dataclasses.asdict(task) | {
        "cohort": _COHORT,
        "batch_size": _BATCH,
        "stragglers": fraction,
        "rounds": extent.rounds,
    }
    shared: dict[str, Any] = {"settings": settings, "reduced": extent.reduced()}
    for method in methods:
        for measure, values, stated in (
            ("test accuracy", accuracy[method], paper.get(method, "")),
            ("training loss", loss[method], ""),
        ):
            took = seconds[method] if measure == "test accuracy" else 0.0
            yield Row.of_seeds(
                values,
                case=f"{place}: {method}",
                measure=measure,
                paper=stated,
                seconds=took,
                **shared,
            )
    proximal = methods[-1]
    if fraction:
        for worse, better in (("FedAvg", "μ = 0"), ("μ = 0", proximal)):
            # Figure 2: on identical devices, the proximal term only slows training down.
            stated = "no" if "IID" in title and better == proximal else "yes"
            above = [a < b for a, b in zip(accuracy[worse], accuracy[better], strict=True)]
            yield Row.counted(
                above,
                case=place,
                measure=f"{better} above {worse} in accuracy",
                paper=stated,
                **shared,
            )
    else:
        below = [b < a for a, b in zip(loss["FedAvg"], loss[proximal], strict=True)]
        stated = "no" if "IID" in title else "yes"
        yield Row.counted(
            below,
            case=place,
            measure=f"{proximal} below FedAvg in loss",
            paper=stated,
            **shared,
        )


FEDPROX = Reproduction(
    name="fedprox",
    title="FedProx with 0, 50 and 90 % stragglers: FedAvg, which drops them, against their partial work with μ = 0 and μ = 1",
    paper="T. Li et al. Federated optimization in heterogeneous networks. MLSys, 2020, Figures 1, 2 and 7. "
    "https://arxiv.org/abs/1812.06127",
    duration="about 4 min per case of 10 seeds, 13 cases",
    required_data="nothing for the synthetic data, which are generated; mnist-90: DIR/mnist, or a download of 12 MB",
    cases=_cases,
    notes="Accuracy and loss are means over the last 20 rounds. Every seed has other data, devices, stragglers and initial "
    "weights. MNIST is set up as in Flower's replication (E = 10, μ = 2, 100 rounds), whose results are in the column "
    "paper.",
)
