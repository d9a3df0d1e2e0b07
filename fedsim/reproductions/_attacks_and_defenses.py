"""Attacks on the privacy of clients, against the defences of fedsim, on the handwritten digits of scikit-learn.

This is not a table of a paper. The attacks are those of `fedsim.privacy.attacks`: membership of clients by the loss of their
examples (Yeom et al., https://arxiv.org/abs/1709.01604) and by likelihood ratios (Carlini et al.,
https://arxiv.org/abs/2112.03570), images from an update (Geiping et al., https://arxiv.org/abs/2003.14053), and a property of a
client from its update (Melis et al., https://arxiv.org/abs/1805.04049). Expected results: clipping alone stops none of them;
differential privacy stops all, but 50 clients
are too few to learn anything under its noise; a sum of many clients stops the attacks on
updates and hardly those on the final model; several local steps make images harder to find.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim import datasets, models, rng, tree
from fedsim.aggregators import Aggregator, GaussianMechanism, Mean, SecureMean
from fedsim.algorithms import FedAvg
from fedsim.data import Batch, Batches, Cohort, FederatedData
from fedsim.evaluation import evaluate
from fedsim.model import Model
from fedsim.privacy import FixedSize, Scores, attacks, noise_multiplier
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row
from fedsim.sweeps import population

_CLIENTS, _COHORT, _LARGE, _RATE, _CLIP, _DELTA = 100, 10, 25, 0.3, 1.0, 0.01
_SUM_CLIP = 8.0  # to which a secure sum clips, because it is one of whole numbers
_IMAGES, _SHADOWS, _SIZE, _SHARES = 4, 60, 20, (0.7, 0.3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Defence:
    """How a run differs from one without defence; ``epsilon`` is that of the whole run."""

    title: str
    clip: float | None = None
    epsilon: float | None = None
    cohort: int = _COHORT
    epochs: int = 5

    def noise(self, rounds: int) -> float:
        if self.epsilon is None:
            return 0.0
        return noise_multiplier(self.epsilon, FixedSize(self.cohort, _CLIENTS // 2), rounds=rounds, delta=_DELTA)

    def aggregator(self, rounds: int) -> Aggregator:
        if self.cohort > _COHORT:
            return SecureMean(max_weight=1.0, clip=_SUM_CLIP, minimum=_COHORT)
        if self.clip is None:
            return Mean()
        return GaussianMechanism(self.noise(rounds), clip=self.clip, denominator=self.cohort)

    def released(self, updates: np.ndarray, rounds: int, seed: int) -> np.ndarray:
        """Returns what an observer of single rounds sees of updates ``[n, d]``: alone in the round, or among other clients."""
        draw, clip = np.random.default_rng(seed), _SUM_CLIP if self.cohort > _COHORT else self.clip or np.inf
        updates = updates * np.minimum(1, clip / np.linalg.norm(updates, axis=1, keepdims=True))
        if self.cohort > _COHORT:
            clients = np.arange(len(updates))
            others = [draw.choice(clients[clients != i], self.cohort - 1, replace=False) for i in clients]
            return np.stack([own + updates[rows].sum(axis=0) for own, rows in zip(updates, others, strict=True)])
        noise = self.noise(rounds)
        return updates + noise * clip * draw.normal(size=updates.shape) if noise else updates


_DEFENCES = {
    "none": _Defence(title="no defence"),
    "clip": _Defence(title=f"updates clipped to norm {_CLIP:g}", clip=_CLIP),
    "dp-8": _Defence(title="differential privacy, ε = 8", clip=_CLIP, epsilon=8.0),
    "dp-1": _Defence(title="differential privacy, ε = 1", clip=_CLIP, epsilon=1.0),
    "secure": _Defence(title=f"secure sum of {_LARGE} clients", cohort=_LARGE),
    "steps": _Defence(title="20 local epochs in place of 5", epochs=20),
}


def _cases(request: Request) -> Mapping[str, Case]:
    return {name: functools.partial(_run, request, defence) for name, defence in _DEFENCES.items()}


def _run(request: Request, defence: _Defence) -> Iterator[Row]:
    extent = request.extent(seeds=16, rounds=40)
    splits = datasets.load(f"digits(clients={_CLIENTS})")
    model, runs = models.digits_dense(), max(4, len(extent.seeds))
    began = time.perf_counter()
    of_run, accuracies = _membership(model, defence, splits, runs, extent.rounds)
    of_run, accuracies = of_run[: len(extent.seeds)], accuracies[: len(extent.seeds)]
    decibels = _inversion(model, defence, splits.train, extent.rounds, 200 if request.quick else 2000)[: len(extent.seeds)]
    inferred = _property(model, defence, splits.train, extent.rounds, len(extent.seeds))
    seconds = time.perf_counter() - began
    settings = {"noise": defence.noise(extent.rounds), **dataclasses.asdict(defence), "rounds": extent.rounds, "rate": _RATE}
    results: dict[str, tuple[list[float], int]] = {
        "test accuracy, %": (accuracies, 1),
        "membership by loss, AUC": ([loss.auc for loss, _ in of_run], 2),
        "membership by likelihood ratio, AUC": ([ratio.auc for _, ratio in of_run], 2),
        "the same, % found with 5 % false alarms": ([100 * ratio.true_positive_rate(0.05) for _, ratio in of_run], 1),
        "images from an update, dB": (decibels, 1),
        "property of a client, AUC": (inferred, 2),
    }
    for measure, (values, digits) in results.items():
        first = measure == "test accuracy, %"
        request.log(f"{defence.title}: {measure} {np.mean(values):.2f}, {seconds:.0f} s")
        yield Row.of_seeds(
            values,
            digits=digits,
            case=defence.title,
            measure=measure,
            seconds=seconds if first else 0.0,
            settings=settings,
            reduced=extent.reduced(),
        )


def _algorithm(model: Model, defence: _Defence, rounds: int, **options: Any) -> FedAvg:
    own: dict[str, Any] = {
        "batches": Batches(size=10, epochs=defence.epochs),
        "client_optimizer": optax.sgd(_RATE),
        "weighting": "uniform",
        "aggregator": defence.aggregator(rounds),
    }
    return FedAvg(model=model, **own | options)


def _membership(
    model: Model, defence: _Defence, splits: datasets.FederatedSplits, runs: int, rounds: int
) -> tuple[list[tuple[Scores, Scores]], list[float]]:
    """Returns the scores of the two attacks on each run, the others being the shadows, and the accuracies."""
    data = splits.train
    samplers = [attacks.ShadowSampler(data, clients=defence.cohort, seed=seed) for seed in range(runs)]
    trained = population(
        lambda rate: _algorithm(model, defence, rounds, client_optimizer=optax.sgd(rate)),
        {"rate": [_RATE]},
        seeds=runs,
        sampler=lambda seed: samplers[seed],
        rounds=rounds,
        progress=False,
    )
    params = [trained.state_of(0, seed).params for seed in range(runs)]
    client = np.repeat(np.arange(data.num_clients), data.sizes)

    def by_client(values: np.ndarray) -> np.ndarray:
        return np.bincount(client, values) / np.maximum(data.sizes, 1)

    losses = [attacks.losses(model, own, data) for own in params]
    confidences = np.stack([by_client(attacks.confidences(values)) for values in losses])
    known, members = np.asarray(data.sizes) > 0, np.stack([sampler.members for sampler in samplers])
    found = []
    for run in range(runs):
        others = np.arange(runs) != run
        enough = known & ((~members[others]).sum(axis=0) >= 2)
        ratios = attacks.likelihood_ratios(confidences[run, enough], confidences[others][:, enough], members[others][:, enough])
        inside, loss = members[run, enough], -by_client(losses[run])[enough]
        found.append((Scores(loss[inside], loss[~inside]), Scores(ratios[inside], ratios[~inside])))
    accuracies = [100 * float(evaluate(model, own, splits.test).overall["accuracy"]) for own in params]
    return found, accuracies


def _inversion(model: Model, defence: _Defence, data: FederatedData, rounds: int, steps: int) -> list[float]:
    """Returns the likeness of four images of different digits that a client with only these has, from its one local step.

    With more local epochs, the attacker still assumes one step.
    """
    x, y = np.asarray(data.columns["x"]), np.asarray(data.columns["y"])
    rows = np.stack([np.flatnonzero(y == digit)[:_LARGE] for digit in range(_IMAGES)], axis=1)
    clients = FederatedData.from_arrays({"x": x[rows.ravel()], "y": y[rows.ravel()]}, sizes=[_IMAGES] * len(rows))
    batches = Batches(size=_IMAGES, epochs=defence.epochs // 5 * 5 if defence.epochs > 5 else 1)
    algorithm = _algorithm(model, defence, rounds, batches=batches, aggregator=Mean())
    params = model.init(rng.root(0))
    state = algorithm.init(rng.root(0))._replace(params=params)
    updates = attacks.sent_updates(algorithm, state, Cohort.of(clients, clients.client_ids))
    observed = tree.unflat(jnp.asarray(defence.released(updates, rounds, seed=0)[0], jnp.float32), params)
    labels = jnp.asarray(y[rows[0]])

    def update_of(images: jax.Array) -> Any:
        batch = Batch({"x": images, "y": labels}, jnp.ones(_IMAGES, bool), rng.root(0), 0)
        return jax.grad(model.train_loss)(params, batch)

    images = x[rows[0]].astype(np.float32) / 16
    options: dict[str, Any] = {"steps": steps, "total_variation": 1e-3}
    return attacks.likeness(attacks.invert(update_of, observed, images.shape, key=rng.root(1), **options), images).tolist()


def _property(model: Model, defence: _Defence, data: FederatedData, rounds: int, repeats: int) -> list[float]:
    """Returns the AUC of whether 70 %, and not 30 %, of a client's images are of the first five digits."""
    x, y = np.asarray(data.columns["x"]), np.asarray(data.columns["y"])
    found, algorithm = [], _algorithm(model, defence, rounds, aggregator=Mean())
    state, has = algorithm.init(rng.root(0)), np.arange(2 * _SHADOWS) % 2 == 0
    for seed in range(min(repeats, 4)):
        draw = np.random.default_rng(seed)
        first = draw.random((2 * _SHADOWS, _SIZE)) < np.where(has, *_SHARES)[:, None]
        low, high = (draw.choice(np.flatnonzero(chosen), first.shape) for chosen in (y < 5, y >= 5))
        rows = np.where(first, low, high)
        clients = FederatedData.from_arrays({"x": x[rows.ravel()], "y": y[rows.ravel()]}, sizes=[_SIZE] * len(has))
        seen = attacks.sent_updates(algorithm, state, Cohort.of(clients, clients.client_ids))
        halves = [defence.released(half, rounds, 2 * seed + n) for n, half in enumerate(np.split(seen, 2))]
        scores, own = attacks.property_scores(halves[0], has[:_SHADOWS], halves[1]), has[_SHADOWS:]
        found.append(Scores(scores[own], scores[~own]).auc)
    return found


ATTACKS_AND_DEFENSES = Reproduction(
    name="attacks_and_defenses",
    title="Attacks on privacy: membership, images and properties, against clipping, noise, secure sums and local steps",
    paper="N. Carlini, S. Chien, M. Nasr, S. Song, A. Terzis, F. Tramèr. Membership inference attacks from first principles. "
    "S&P, 2022. https://arxiv.org/abs/2112.03570 (the strongest of the attacks; no table of it is reproduced)",
    duration="1 to 3 min per case, 6 cases",
    required_data="none: the digits come with scikit-learn",
    cases=_cases,
    notes="FedAvg trains a perceptron on 50 of 100 clients with 14 digits each, 10 per round, for 40 rounds. The observer sees "
    "the final model, and which of all 100 clients took part is asked in 16 runs; the 15 others are shadow runs of "
    "each. Images (four of different digits, whose labels are known) and a property (whether 70 % or 30 % of 20 images are of "
    "the first five digits) are inferred from what a single round reveals, in which the client is alone, except for the "
    "secure sum. An AUC of 0.5 is chance; with 20 dB, pixels are wrong by a tenth of the range. ε is that of a replaced client "
    "over all rounds with δ = 0.01. With 50 clients, its noise is so large that the model learns nothing: these rows show that "
    "the attacks then fail, not that privacy is cheap. The standard deviation of membership "
    "and accuracy is over runs, that of images over images, and that of properties over draws of clients.",
)
