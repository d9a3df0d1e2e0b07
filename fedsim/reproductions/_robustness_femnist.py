"""Malicious writers in FEMNIST: the effect of 20 % of them on the mean and on robust aggregators.

This is not a table of a paper. The attacks are sign flips, of the update and of four times the update, as in L. Li et al.,
"RSA", AAAI 2019, https://arxiv.org/abs/1811.03761, and ALIE, G. Baruch, M. Baruch, Y. Goldberg, "A little is enough",
NeurIPS 2019, https://arxiv.org/abs/1902.06156, with z = 1.5. The aggregators are the mean and every robust aggregator of
fedsim. In every round 6 of 30 writers attack, which are drawn again for each round. Expected results: without attackers,
all aggregators are close to the mean; under sign flips times 4, the mean is worse than the robust aggregators. ALIE is
designed against robust aggregators, so an aggregator that is worse than the mean under ALIE agrees with its paper.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import optax

from fedsim import models
from fedsim.aggregators import (
    Aggregator,
    Bulyan,
    CentredClipping,
    Clipped,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    Mean,
    TrimmedMean,
)
from fedsim.algorithms import FedAvg
from fedsim.attacks import ALittleIsEnough, Attack, SignFlip
from fedsim.reproductions import _femnist as femnist
from fedsim.reproductions._curve import train
from fedsim.reproductions._reproduction import (
    Case,
    Reproduction,
    Request,
    Row,
    join_nonempty,
)
from fedsim.samplers import Attacked, Sampler, UniformSampler

_COHORT, _FRACTION, _EVERY, _LAST = 30, 0.2, 25, 4
_ATTACKS: dict[str, tuple[str, Attack | None]] = {
    "none": ("no attackers", None),
    "sign-flip": ("sign flip", SignFlip()),
    "sign-flip-4": ("sign flip times 4", SignFlip(scale=4.0)),
    "alie": ("ALIE, z = 1.5", ALittleIsEnough(z=1.5)),
}


def _aggregators(attackers: int) -> dict[str, tuple[str, Aggregator]]:
    """Returns title and aggregator of each case; some aggregators need the number of attackers."""
    return {
        "mean": ("mean", Mean()),
        "median": ("coordinate median", CoordinateMedian()),
        "trimmed": ("trimmed mean, 20 %", TrimmedMean(trim=_FRACTION)),
        "krum": ("Krum", Krum(attackers=attackers)),
        "multi-krum": ("multi-Krum", Krum(attackers=attackers, selected=attackers + 1)),
        "bulyan": ("Bulyan", Bulyan(attackers=attackers)),
        "geometric": ("geometric median", GeometricMedian()),
        "centred": ("centred clipping, radius 1", CentredClipping(radius=1.0)),
        "clipped": ("clipped to norm 1, mean", Clipped(1.0)),
    }


def _cases(request: Request) -> Mapping[str, Case]:
    return {name: functools.partial(_run, request, name) for name in _aggregators(0)}


def _run(request: Request, name: str) -> Iterator[Row]:
    extent = request.extent(seeds=3, rounds=500)
    train_data, test_data = femnist.load(request)
    model = models.emnist_dense()
    cohort = min(_COHORT, train_data.num_clients)
    title, aggregator = _aggregators(round(_FRACTION * cohort))[name]
    found: dict[str, list[float]] = {}
    reduced = join_nonempty(femnist.missing_writers(train_data), extent.reduced())
    for attack_title, attack in _ATTACKS.values():
        seconds, accuracies = 0.0, found.setdefault(attack_title, [])
        for seed in extent.seeds:
            sampler: Sampler = UniformSampler(train_data, clients=cohort, seed=seed)
            if attack is not None:
                sampler = Attacked(sampler, attack, fraction=_FRACTION, every_round=True, seed=seed)
            # Uniform weights, so that an attacker's influence does not depend on its number of examples.
            algorithm = FedAvg(
                model=model,
                client_optimizer=optax.sgd(femnist.RATE),
                batches=femnist.BATCHES,
                aggregator=aggregator,
                weighting="uniform",
            )
            curve = train(
                algorithm,
                sampler,
                rounds=extent.rounds,
                score=lambda state: femnist.accuracy(model, state.params, test_data),
                every=_EVERY,
            )
            accuracies.append(100 * curve.mean_of_last(_LAST))
            seconds += curve.seconds
            request.log(f"{title}, {attack_title}: seed {seed}: {accuracies[-1]:.1f} %, {curve.seconds:.0f} s")
        settings: dict[str, Any] = {"rate": femnist.RATE, "cohort": cohort, "attackers": _FRACTION, "rounds": extent.rounds}
        yield Row.of_seeds(
            accuracies,
            digits=1,
            case=f"{title}; {attack_title}",
            measure="test accuracy, %",
            seconds=seconds,
            settings=settings,
            reduced=reduced,
        )
    clean, flipped = (found[_ATTACKS[each][0]] for each in ("none", "sign-flip-4"))
    robust = [without - attacked < 5 for without, attacked in zip(clean, flipped, strict=True)]
    yield Row.counted(
        robust,
        case=title,
        measure="loses less than 5 points under sign flips times 4",
        paper="no" if name == "mean" else "yes",
        reduced=reduced,
    )


ROBUSTNESS = Reproduction(
    name="robustness",
    title="Robust aggregation on FEMNIST: the mean and eight aggregators, with 20 % of the clients sending sign flips or ALIE",
    paper="G. Baruch, M. Baruch, Y. Goldberg. A little is enough: circumventing defenses for distributed learning. "
    "NeurIPS, 2019. https://arxiv.org/abs/1902.06156 (the attack; no table of it is reproduced)",
    duration="9 to 15 min per case of 3 seeds and 4 settings, 9 cases",
    required_data=femnist.NEEDS,
    cases=_cases,
    notes="FedAvg trains a perceptron with two hidden layers of 200 units for 500 rounds, with 30 writers per round of equal "
    "weight. 6 of them attack, which are drawn again for each round. The accuracy is the mean of the last four "
    "evaluations, which are 25 rounds apart.",
)
