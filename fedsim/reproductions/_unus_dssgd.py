"""Distributed selective SGD on MNIST: accuracy by the share of uploaded parameters, and by the order of participants.

R. Shokri, V. Shmatikov, "Privacy-preserving deep learning", CCS 2015, https://doi.org/10.1145/2810103.2813687. The column
"paper" has the results of its convolutional network, which were recalled and not read in the paper.

Participants: 30, each with 1 % of the training images, drawn at random, and B = 32. A participant downloads all parameters
(θ_d = 1), trains for one epoch, and uploads the fraction θ_u of its changes that are largest, which the server adds.

- Round robin and random order: one participant at a time, as in the paper.
- Asynchronous: all participants work all the time, at speeds that they draw once, and the server adds what arrives at once
  (`Buffered` of size 1 with constant weights; updates of DSSGD have no other scale than 1).
- Alone: a participant that trains with its own images only. Pooled: one participant with the images of all.

Deviations: a perceptron with hidden layers of 128 and 64 units replaces the paper's networks, because a convolutional one takes
too long on two CPU cores; another learning rate; 20 epochs; no noise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import numpy as np
import optax

from fedsim import datasets, models
from fedsim.algorithms import DSSGD
from fedsim.configuration import RunConfig
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate
from fedsim.reproductions._clock import SPEEDS, TimedCurve, train_on_clock
from fedsim.reproductions._on_nodes import on_nodes
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row
from fedsim.samplers import Sampler, ScheduleSampler, ShuffledSampler
from fedsim.systems import Buffered, ConstantWeight, Synchronization, Synchronous

_PARTICIPANTS, _HIDDEN, _LAST, _RATE = 30, (128, 64), 4, 0.1


@dataclasses.dataclass(frozen=True)
class _Case:
    title: str
    theta_u: float = 1.0
    order: str = "round robin"
    data: str = "distributed"
    paper: str = ""
    rate: float = _RATE


_CASES = {
    "pooled": _Case("all images pooled", data="pooled", paper="99.17 (recalled)"),
    "upload-1": _Case("θ_u = 1"),
    "upload-0.1": _Case("θ_u = 0.1", 0.1, paper="99.14 (recalled)"),
    "upload-0.01": _Case("θ_u = 0.01", 0.01, paper="98.71 (recalled)"),
    "random-0.1": _Case("θ_u = 0.1, random order", 0.1, "random"),
    "asynchronous-0.1": _Case("θ_u = 0.1, asynchronous", 0.1, "asynchronous"),
    "asynchronous-0.1-slow": _Case("θ_u = 0.1, asynchronous, learning rate 0.001", 0.1, "asynchronous", rate=0.001),
    "alone": _Case("one participant alone", data="alone", paper="93.16 (recalled)"),
}


def _participants(train_data: FederatedData, form: str) -> FederatedData:
    """Returns the participants' data: that of several, that of the first one, or all of it as that of one."""
    ids = train_data.client_ids[: 1 if form == "alone" else _PARTICIPANTS]
    chosen = train_data.select(ids)
    if form != "pooled":
        return chosen
    columns = {name: chosen.gather(name, np.arange(chosen.num_clients)) for name in chosen.columns}
    return FederatedData.from_arrays(columns, sizes=[chosen.num_examples])


def _order(data: FederatedData, order: str, seed: int) -> tuple[Sampler, Synchronization]:
    if order == "round robin":
        return ScheduleSampler(data, [[each] for each in data.client_ids], seed=seed, repeat=True), Synchronous()
    at_once = Buffered(size=1, concurrency=data.num_clients, staleness_weight=ConstantWeight())
    return ShuffledSampler(data, clients=1, seed=seed), Synchronous() if order == "random" else at_once


def _cases(request: Request) -> Mapping[str, Case]:
    cases: dict[str, Case] = {name: functools.partial(_run, request, case) for name, case in _CASES.items()}
    return cases | {"deployed": functools.partial(_deployed, request)}


def _deployed(request: Request) -> Iterator[Row]:
    place = request.folder("mnist")
    config = RunConfig(
        dataset="mnist(partition='iid', clients=100)",
        data=None if place is None else str(place),
        model="mnist_2nn",
        algorithm="dssgd",
        hyperparameters={"theta_u": 0.1},
        sampler="shuffled",
        clients=1,
        batch_size=32,
        client_learning_rate=_RATE,
    )
    yield from on_nodes(request, config, "θ_u = 0.1, random order, 2NN, on 4 nodes")


def _run(request: Request, case: _Case) -> Iterator[Row]:
    extent, model = request.extent(seeds=3, rounds=20), models.emnist_dense(10, hidden=_HIDDEN)
    found: list[TimedCurve] = []
    for seed in extent.seeds:
        splits = datasets.load("mnist", data=request.folder("mnist"), partition="iid", clients=100, seed=seed)
        data = _participants(splits.train, case.data)
        sampler, synchronization = _order(data, case.order, seed)
        found.append(
            train_on_clock(
                DSSGD(model=model, client_optimizer=optax.sgd(case.rate), batches=Batches(size=32), theta_u=case.theta_u),
                sampler,
                updates=extent.rounds * data.num_clients,
                every=data.num_clients,
                score=lambda state: evaluate(model, state.params, splits.test).overall["accuracy"],  # noqa: B023 (called in this iteration only)
                synchronization=synchronization,
                devices=SPEEDS,
            )
        )
        best = max(found[-1].curve.scores)
        request.log(f"{case.title}: seed {seed}, best accuracy {best:.4f}, {found[-1].curve.seconds:.0f} s")
    accuracies = [100 * each.curve.mean_of_last(_LAST) for each in found]
    simulated = [float(each.times[-1]) for each in found]
    staleness = float(np.mean([each.schedule.updates.staleness.mean() for each in found]))
    yield Row.of_seeds(
        accuracies,
        digits=2,
        case=case.title,
        measure=f"test accuracy after {extent.rounds} epochs, %",
        paper=case.paper,
        seconds=sum(each.curve.seconds for each in found),
        settings=dataclasses.asdict(case) | {"participants": data.num_clients, "devices": str(SPEEDS), "rounds": extent.rounds},
        details={"simulated seconds": simulated, "curve of seed 0": found[0].curve.points()},
        reduced=extent.reduced(),
        note=f"{np.mean(simulated):,.0f} simulated seconds" + (f"; mean staleness {staleness:.1f}" if staleness else ""),
    )


UNUS_DSSGD = Reproduction(
    name="unus_dssgd",
    title="Distributed selective SGD on MNIST: the share of uploaded parameters, and the order of participants",
    paper="R. Shokri, V. Shmatikov. Privacy-preserving deep learning. CCS, 2015. https://doi.org/10.1145/2810103.2813687",
    duration="1 to 2 min per case of 3 seeds, 8 cases",
    required_data="MNIST: DIR/mnist with the four idx files, or a download of 12 MB",
    cases=_cases,
    notes="The column paper has the accuracies of the paper's convolutional network, which were recalled and not read in the "
    "paper. Here a perceptron with 109,386 parameters trains, so only the differences between the rows can be compared. 30 "
    "participants have 600 random images each, and train in round robin with B = 32 and learning rate 0.1, without noise, "
    "downloading all parameters (θ_d = 1). The accuracy is the mean of the last four epochs. On the virtual clock each "
    "participant draws once how long a local step takes, from a log-normal law with median 1 second and σ = 1; in round "
    "robin and in random order one participant works at a time, and in the asynchronous order all of them always do "
    "(Buffered with size 1 and constant weights, because updates of DSSGD must not be scaled). The server then adds updates "
    "from models that are on average 27 server steps old, which does not converge with learning rate 0.1. With 0.001, 20 "
    "epochs are too few, and the seeds end between 70 and 85 %. The case `deployed` runs a few rounds of one participant on "
    "four nodes, see [Deployment](deployment.md), and compares the parameters.",
)
