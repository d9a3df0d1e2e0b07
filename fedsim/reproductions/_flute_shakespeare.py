"""FLUTE's benchmark of next-character prediction: Shakespeare's 715 roles, an LSTM, about 57 % after 1,200 rounds.

M. Hipolito Garcia, A. Manoel, D. Madrigal Diaz, F. Mireshghallah, R. Sim, D. Dimitriadis, "FLUTE: a scalable, extensible
framework for high-performance federated learning simulations", 2022, https://arxiv.org/abs/2203.13789, and the README of its
repository (microsoft/msrflute), which has "~57" for FLUTE and for FedML: FedAvg, 10 of 715 clients a round, B = 4, one epoch,
SGD with learning rate 0.8, 1,200 rounds, a test every 50. The data are TensorFlow Federated's, and the model is that of S.
Reddi et al., "Adaptive federated optimization", ICLR 2021, https://arxiv.org/abs/2003.00295, whose FedAvg reaches 56.9 %.

Deviations: the speeches of a role are joined before they are cut into sequences of 80, as in FedJAX, whereas FLUTE cuts each
speech by itself, so its clients take more steps with more padding. The loss is the mean over the positions of a sequence,
where the loss of padding is 0; FLUTE's is the mean over all characters of a batch without padding. The accuracy is that of
characters; FLUTE and the code of Reddi et al. count the end of a speech and unknown characters, too (``accuracy_with_eos``). A
test every 25 rounds shows how the accuracy grows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import optax

from fedsim import datasets, models
from fedsim.algorithms import FedAvg
from fedsim.data import Batches
from fedsim.evaluation import evaluate
from fedsim.reproductions._curve import Curve, train
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row
from fedsim.samplers import UniformSampler

_COHORT, _BATCH, _RATE, _EVERY = 10, 4, 0.8, 25
_SHOWN = (25, 50, 100, 200, 400, 800)


def _run(request: Request) -> Iterator[Row]:
    extent = request.extent(seeds=1, rounds=1200)
    splits = datasets.load("shakespeare", data=request.folder("shakespeare_tff", "shakespeare"))
    model = models.shakespeare_lstm()
    algorithm = FedAvg(model=model, client_optimizer=optax.sgd(_RATE), batches=Batches(size=_BATCH))
    curves: list[Curve] = []

    def score(state: Any) -> float:
        accuracy = 100 * evaluate(model, state.params, splits.test).overall["accuracy"]
        request.log(f"after {state.round} rounds: {accuracy:.1f} %")
        return accuracy

    for seed in extent.seeds:
        sampler = UniformSampler(splits.train, clients=min(_COHORT, splits.train.num_clients), seed=seed)
        curves.append(train(algorithm, sampler, rounds=extent.rounds, score=score, every=_EVERY))
    settings = {"rate": _RATE, "cohort": _COHORT, "batch_size": _BATCH, "rounds": extent.rounds}
    shown = [*(at for at in _SHOWN if at < extent.rounds), extent.rounds]
    for at in shown:
        first, last = at == shown[0], at == extent.rounds
        yield Row.of_seeds(
            [curve.points()[at] for curve in curves],
            digits=1,
            case=f"after {at:,} rounds",
            measure="test accuracy of the next character, %",
            paper="57" if last else "",
            seconds=sum(curve.seconds for curve in curves) if first else 0.0,
            settings=settings,
            details={"accuracy": [curve.points() for curve in curves]} if first else {},
            reduced=extent.reduced(),
        )


def _cases(request: Request) -> Mapping[str, Case]:
    return {"fedavg": functools.partial(_run, request)}


FLUTE_SHAKESPEARE = Reproduction(
    name="flute_shakespeare",
    title="FLUTE's LSTM on Shakespeare: 715 roles, 10 a round, the next character, 1,200 rounds",
    paper="M. Hipolito Garcia et al. FLUTE: a scalable, extensible framework for high-performance federated learning "
    "simulations. 2022, and the README of microsoft/msrflute. https://arxiv.org/abs/2203.13789",
    duration="1 to 2 hours for 1,200 rounds",
    required_data="TFF's Shakespeare: DIR/shakespeare_tff in any form that `fedsim datasets describe shakespeare` names, or a "
    "download",
    cases=_cases,
    notes="FLUTE states about 57 % for itself and for FedML. FedAvg with the rate 0.8, batches of 4 and one epoch trains two "
    "LSTM layers of 256 units, 820,522 parameters, on TensorFlow Federated's training and test examples. The speeches of a "
    "role are joined before they are cut into sequences of 80, whereas FLUTE cuts each by itself, so its clients take more "
    "steps; and it counts the end of a speech in the accuracy, which here is that of characters. The paper states no "
    "accuracy after fewer rounds, so a reduced run, whose accuracy still grows when it ends, is compared with that after "
    "1,200. A run with the rate 1 and at most 50 steps of a client has 45.5 % after 100 rounds, see [Runs](runs.md).",
)
