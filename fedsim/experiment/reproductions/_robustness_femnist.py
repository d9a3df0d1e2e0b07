"""Attackers among FEMNIST's writers: what 20 % of them do to the mean, and what robust aggregators make of it.

No single paper's table. Sign flipping, of the update itself and of four times it, as in L. Li et al., "RSA", AAAI 2019,
https://arxiv.org/abs/1811.03761, and ALIE, G. Baruch, M. Baruch, Y. Goldberg, "A little is enough", NeurIPS 2019,
https://arxiv.org/abs/1902.06156, with z = 1.5, against the plain mean and every robust aggregator of fedsim. In every round
6 of 30 writers attack, drawn anew. What must hold: without attackers all come near the mean; under sign flips times 4 the
mean falls behind the robust ones. ALIE is made to pass robust aggregators: who loses to the mean there, loses as its paper
says.
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
from fedsim.experiment.reproductions import _femnist as femnist
from fedsim.experiment.reproductions._curve import train
from fedsim.experiment.reproductions._reproduction import Case, Reproduction, Request, Row, holds, joined, spread
from fedsim.samplers import Attacked, Sampler, UniformSampler

_COHORT, _FRACTION, _EVERY, _LAST = 30, 0.2, 25, 4
_ATTACKS: dict[str, tuple[str, Attack | None]] = {
    "none": ("no attackers", None),
    "sign-flip": ("sign flip", SignFlip()),
    "sign-flip-4": ("sign flip times 4", SignFlip(scale=4.0)),
    "alie": ("ALIE, z = 1.5", ALittleIsEnough(z=1.5)),
}


def _aggregators(attackers: int) -> dict[str, tuple[str, Aggregator]]:
    """Case to title and aggregator; those who must know how many attack are told."""
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
    plan = request.plan(seeds=3, rounds=500)
    train_data, test_data = femnist.load(request)
    model = models.emnist_dense()
    cohort = min(_COHORT, train_data.num_clients)
    title, aggregator = _aggregators(round(_FRACTION * cohort))[name]
    found: dict[str, list[float]] = {}
    reduced = joined(femnist.which(train_data), plan.reduced())
    for attack_title, attack in _ATTACKS.values():
        seconds, accuracies = 0.0, found.setdefault(attack_title, [])
        for seed in plan.seeds:
            sampler: Sampler = UniformSampler(train_data, clients=cohort, seed=seed)
            if attack is not None:
                sampler = Attacked(sampler, attack, fraction=_FRACTION, every_round=True, seed=seed)
            # Alike: an attacker must not gain by its number of examples.
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
                rounds=plan.rounds,
                score=lambda state: femnist.accuracy(model, state.params, test_data),
                every=_EVERY,
            )
            accuracies.append(100 * curve.settled(_LAST))
            seconds += curve.seconds
            request.say(f"{title}, {attack_title}: seed {seed}: {accuracies[-1]:.1f} %, {curve.seconds:.0f} s")
        settings: dict[str, Any] = {"rate": femnist.RATE, "cohort": cohort, "attackers": _FRACTION, "rounds": plan.rounds}
        yield Row(
            case=f"{title}; {attack_title}",
            measure="test accuracy, %",
            paper="",
            ours=spread(accuracies, 1),
            values=accuracies,
            seeds=len(accuracies),
            seconds=seconds,
            settings=settings,
            reduced=reduced,
        )
    clean, flipped = (found[_ATTACKS[each][0]] for each in ("none", "sign-flip-4"))
    stands = [without - attacked < 5 for without, attacked in zip(clean, flipped, strict=True)]
    yield Row(
        case=title,
        measure="loses less than 5 points to sign flips times 4",
        paper="no" if name == "mean" else "yes",
        ours=holds(stands),
        seeds=len(stands),
        seconds=0.0,
        reduced=reduced,
    )


ROBUSTNESS = Reproduction(
    name="robustness",
    title="Robust aggregation on FEMNIST: 20 % of the clients flip signs or send ALIE, the mean against eight aggregators",
    paper="G. Baruch, M. Baruch, Y. Goldberg. A little is enough: circumventing defenses for distributed learning. "
    "NeurIPS, 2019. https://arxiv.org/abs/1902.06156 (the attack; no table of it is reproduced)",
    takes="9 to 15 min a case of 3 seeds and 4 settings, 9 cases",
    needs=femnist.NEEDS,
    cases=_cases,
    about="FedAvg with a perceptron of two layers of 200, 30 writers a round, all counted alike, of whom 6 attack, drawn "
    "anew in every round, 500 rounds; accuracy is the mean of the last four evaluations, 25 rounds apart.",
)
