"""FedAvg on MNIST on a virtual clock: rounds and simulated time to a test accuracy, in synchronous rounds.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017, Table 1, https://arxiv.org/abs/1602.05629. The cases are those of the reproduction
`fedavg`, with the learning rate at which its search starts.

The case `deployed` runs a few rounds on four nodes over Flower's network.

The clock does not change what synchronous rounds compute, so the rounds must be those of `fedavg` with the same rate. The
simulated time is not of the paper: a client takes one step in a time that it draws once from a log-normal law with median 1
and σ = 1, and messages take no time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedsim import models
from fedsim.configuration import RunConfig
from fedsim.reproductions._clock import SPEEDS, train_on_clock
from fedsim.reproductions._fedavg_mnist import CASES, COHORT, FEDAVG, MnistCase
from fedsim.reproductions._on_nodes import on_nodes
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row
from fedsim.systems import Synchronous


def _cases(request: Request) -> Mapping[str, Case]:
    cases: dict[str, Case] = {name: functools.partial(_run, request, case) for name, case in CASES.items()}
    return cases | {"deployed": functools.partial(_deployed, request)}


def _deployed(request: Request) -> Iterator[Row]:
    case = CASES["2nn-iid-b10"]
    place = request.folder("mnist")
    config = RunConfig(
        dataset=f"mnist(partition='{case.partition}')",
        data=None if place is None else str(place),
        model=case.model,
        clients=COHORT,
        batch_size=case.batch_size or 1,
        epochs=case.epochs,
        client_learning_rate=10 ** (case.start / 3),
    )
    yield from on_nodes(request, config, f"{case}, on 4 nodes")


def _run(request: Request, case: MnistCase) -> Iterator[Row]:
    extent, rate = request.extent(seeds=case.seeds, rounds=case.rounds), 10 ** (case.start / 3)
    model = models.get(case.model)
    rounds, times, shares, seconds = [], [], [], 0.0
    for seed in extent.seeds:
        algorithm, sampler, score = case.build(request, model, seed, rate)
        found = train_on_clock(
            algorithm,
            sampler,
            updates=extent.rounds * COHORT,
            per_step=COHORT,
            every=case.every * COHORT,
            score=score,
            until=case.target,
            synchronization=Synchronous(),
            devices=SPEEDS,
        )
        rounds.append(found.curve.rounds_to_target(case.target))
        times.append(found.seconds_to_target(case.target))
        updates = found.schedule.updates
        shares.append(float(np.sum(updates.stop - updates.start) / (COHORT * found.schedule.seconds)))
        seconds += found.curve.seconds
        request.log(f"{case}: seed {seed}: {rounds[-1]} rounds, {times[-1]} simulated seconds, {found.curve.seconds:.0f} s")
    shared: dict[str, Any] = {
        "case": str(case),
        "settings": dataclasses.asdict(case)
        | {"cohort": COHORT, "rounds": extent.rounds, "rate": rate, "devices": str(SPEEDS)},
        "reduced": extent.reduced(rounds=not all(rounds)),
    }
    yield Row.of_seeds(
        rounds,
        digits=0,
        measure=f"rounds to {case.target:.0%}",
        paper=case.paper,
        seconds=seconds,
        note=f"learning rate {rate:.3g}, not tuned",
        **shared,
    )
    yield Row.of_seeds(
        times,
        digits=0,
        measure=f"simulated seconds to {case.target:.0%}",
        note=f"clients of a cohort work {np.mean(shares):.0%} of the time, and wait for the slowest otherwise",
        **shared,
    )


UNUS_FEDAVG = Reproduction(
    name="unus_fedavg",
    title="FedAvg on MNIST in synchronous rounds on a virtual clock: rounds and simulated time to 97 % (2NN) and 99 % (CNN)",
    paper=FEDAVG.paper,
    duration="2NN: 1 min IID, 5 min non-IID; CNN: 20 min IID, hours non-IID and with B = ∞",
    required_data=FEDAVG.required_data,
    cases=_cases,
    notes="The cases of `fedavg`, with the learning rate at which its search starts. The clock does not change synchronous "
    "rounds, so the number of rounds is that of `fedavg` with the same rate, whose notes explain the differences from the "
    "paper. The paper has no times: here each of 100 clients draws once how long a local step takes, from a log-normal law "
    "with median 1 second and σ = 1, and messages take no time. A round takes as long as the slowest of its 10 clients. The "
    "case `deployed` runs the first rounds on four nodes, see [Deployment](deployment.md), and compares the parameters.",
)
