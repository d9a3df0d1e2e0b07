"""Differential privacy of writers in FEMNIST: independent noise, a binary tree and banded matrices with the same ε.

The order of the results is that of P. Kairouz et al., "Practical and private (deep) learning without sampling or shuffling",
ICML 2021, https://arxiv.org/abs/2103.00039, and C. A. Choquette-Choo et al., "(Amplified) banded matrix factorization: a
unified approach to private training", NeurIPS 2023, https://arxiv.org/abs/2306.08153, whose figures compare them on Stack
Overflow: a tree is better than independent noise where sampling does not amplify privacy, and banded matrices are better than
a tree.

Deviations: the data is FEMNIST and the model a logistic regression. The papers have hundreds of thousands of clients, and so
far less noise in a mean, so only the order is compared. Writers take turns, a tenth of them in a round.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import optax

from fedsim import models, privacy
from fedsim.aggregators import BandedToeplitz, GaussianMechanism, NoiseMatrix
from fedsim.algorithm import Algorithm
from fedsim.algorithms import FedAvg
from fedsim.reproductions import _femnist as femnist
from fedsim.reproductions._curve import train
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import CyclicSampler

_EPSILON, _TURN, _CLIP = 4.0, 10, 0.5
_KINDS = {"none": "no noise", "independent": "independent noise", "tree": "binary tree", "banded": "banded Toeplitz matrix"}
_ORDER = {"independent": "below the tree", "tree": "above independent noise", "banded": "above the tree"}


def _cases(request: Request) -> Mapping[str, Case]:
    return {name: functools.partial(_run, request, name) for name in _KINDS}


def _run(request: Request, name: str) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=100)
    train_data, test_data = femnist.load(request)
    model, delta = models.emnist_logistic(), 1 / (2 * train_data.num_clients)
    clients = max(1, train_data.num_clients // _TURN)
    accuracies, seconds, loss, noise = [], 0.0, 0.0, 0.0
    for seed in extent.seeds:
        sampler = CyclicSampler(train_data, clients=clients, seed=seed)
        algorithm = FedAvg(
            model=model,
            client_optimizer=optax.sgd(femnist.RATE),
            batches=femnist.BATCHES,
            aggregator=GaussianMechanism(0.0, clip=_CLIP, denominator=clients),
            weighting="uniform",
        )
        private: Algorithm = algorithm
        matrix: NoiseMatrix = BandedToeplitz(rounds=extent.rounds, coefficients=(1.0,))
        if name in ("tree", "banded"):
            matrix = privacy.noise_matrix("tree" if name == "tree" else "banded", sampler, rounds=extent.rounds)
            private = privacy.correlated(algorithm, matrix)
        if name != "none":
            private = privacy.calibrated(private, sampler, epsilon=_EPSILON, delta=delta, rounds=extent.rounds)
            loss, noise = (
                privacy.max_loss(matrix, sampler),
                privacy.Guarantee.of(private, sampler, delta=delta).noise_multiplier,
            )
        curve = train(
            private,
            sampler,
            rounds=extent.rounds,
            score=lambda state: femnist.accuracy(model, state.params, test_data),
            every=25,
        )
        accuracies.append(100 * curve.scores[-1])
        seconds += curve.seconds
        request.log(f"{_KINDS[name]}: seed {seed}: {accuracies[-1]:.1f} %, {curve.seconds:.0f} s")
    yield Row.of_seeds(
        accuracies,
        digits=1,
        case=_KINDS[name] if name == "none" else f"{_KINDS[name]}, ε = {_EPSILON:g}",
        measure="test accuracy, %",
        paper=_ORDER.get(name, ""),
        seconds=seconds,
        settings={"clients": clients, "rounds": extent.rounds, "clip": _CLIP, "noise_multiplier": round(noise, 4)},
        details={"max_loss": round(loss, 3)},
        reduced=join_nonempty(femnist.missing_writers(train_data), extent.reduced()),
    )


DP_FTRL_FEMNIST = Reproduction(
    name="dp_ftrl_femnist",
    title="User-level differential privacy on FEMNIST with the same ε: independent noise, a binary tree and a banded matrix",
    paper="C. A. Choquette-Choo et al. (Amplified) banded matrix factorization: a unified approach to private training. "
    "NeurIPS, 2023. https://arxiv.org/abs/2306.08153 (the order of the results in its figures)",
    duration="a few minutes per case of 3 seeds, 4 cases",
    required_data=femnist.NEEDS,
    cases=_cases,
    notes="FedAvg trains a logistic regression for 100 rounds, in which a tenth of the writers take part in turns, with "
    "updates clipped to the norm 0.5. δ is half of one over the number of writers. The papers have far more clients, and so "
    "far less noise in a mean; here only the order is compared. ε = 4 was chosen after ε = 20 and ε = 100, where one seed of "
    "each that was run was within a point of the run without noise. The tree has only the nodes of the sums, without the "
    "further ones of more precise estimates. With ten participations of each writer, the largest deviation of its noise in a "
    "sum of rounds (`privacy.max_loss`) is 25.2, which is little below the 31.6 of independent noise; that of the banded "
    "matrix is 12.1.",
)
