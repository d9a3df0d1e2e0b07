"""FLUTE's benchmark of logistic regression on MNIST: 1,000 clients with two digits each, about 81 % after 100 rounds.

M. Hipolito Garcia, A. Manoel, D. Madrigal Diaz, F. Mireshghallah, R. Sim, D. Dimitriadis, "FLUTE: a scalable, extensible
framework for high-performance federated learning simulations", 2022, https://arxiv.org/abs/2203.13789, and the README of its
repository (microsoft/msrflute), which also has "~81" for FedML and 79 to 80 for Flower: FedAvg, 10 of 1,000 clients a round,
B = 10, one epoch, SGD with learning rate 0.03, 100 rounds, a test every 20. The data are those of FedProx.

The model of FLUTE's code, which is FedML's, applies a sigmoid to the outputs of the linear layer before the softmax of the
loss. Both are run: softmax regression, and this.

Deviations: FedML's file of the clients is not available, so MNIST is divided as in `fedprox`: two digits per client, sizes by a
power law, standardized pixels, other clients for every seed. Accuracy is that on MNIST's test images, and not on a tenth of
each client's images. A round has ten clients with two digits each, so the accuracy changes by many points from one round to
the next, and that of one round depends on chance.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax

from fedsim import models
from fedsim.algorithms import FedAvg
from fedsim.data import Batches
from fedsim.evaluation import evaluate
from fedsim.model import Model
from fedsim.reproductions._curve import Curve, train
from fedsim.reproductions._fedprox_stragglers import mnist_of_two_digits
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row
from fedsim.samplers import UniformSampler

_COHORT, _BATCH, _RATE, _EVERY, _LAST = 10, 10, 0.03, 5, 4


def with_sigmoid(model: Model) -> Model:
    """Returns the model with a sigmoid of its outputs, which are the logits of the loss, as in FLUTE and FedML.

    >>> import jax.numpy as jnp
    >>> model = with_sigmoid(models.logistic([2], 3, scale=1))
    >>> model.apply_for_eval(model.init(jax.random.key(0)), {"x": jnp.zeros([1, 2])}).tolist()
    [[0.5, 0.5, 0.5]]
    """
    return dataclasses.replace(
        model,
        apply_for_train=lambda *arguments: jax.nn.sigmoid(model.apply_for_train(*arguments)),
        apply_for_eval=lambda *arguments: jax.nn.sigmoid(model.apply_for_eval(*arguments)),
    )


def _run(request: Request, title: str, model: Model) -> Iterator[Row]:
    extent = request.extent(seeds=5, rounds=100)
    curves: list[Curve] = []
    for seed in extent.seeds:
        train_data, test_data = mnist_of_two_digits(request, seed)
        algorithm = FedAvg(model=model, client_optimizer=optax.sgd(_RATE), batches=Batches(size=_BATCH))
        score = functools.partial(lambda data, state: 100 * evaluate(model, state.params, data).overall["accuracy"], test_data)
        sampler = UniformSampler(train_data, clients=min(_COHORT, train_data.num_clients), seed=seed)
        curves.append(train(algorithm, sampler, rounds=extent.rounds, score=score, every=_EVERY))
        request.log(f"{title}: seed {seed}: {curves[-1].scores[-1]:.1f} %, {curves[-1].seconds:.0f} s")
    settings = {"rate": _RATE, "cohort": _COHORT, "batch_size": _BATCH, "rounds": extent.rounds}
    shared: dict[str, Any] = {"case": title, "settings": settings, "reduced": extent.reduced(), "digits": 1}
    yield Row.of_seeds(
        [curve.scores[-1] for curve in curves],
        measure="test accuracy after the last round, %",
        paper="81",
        seconds=sum(curve.seconds for curve in curves),
        details={"accuracy": [curve.points() for curve in curves]},
        **shared,
    )
    means = [curve.mean_of_last(_LAST) for curve in curves]
    yield Row.of_seeds(means, measure=f"mean of the last {_LAST} tests, 5 rounds apart, %", **shared)
    best = [max(curve.scores[20 // _EVERY - 1 :: 20 // _EVERY] or curve.scores) for curve in curves]
    yield Row.of_seeds(best, measure="best of the tests every 20 rounds, %", **shared)


def _cases(request: Request) -> Mapping[str, Case]:
    softmax = models.logistic((28, 28, 1), 10)
    return {
        "softmax": functools.partial(_run, request, "softmax regression", softmax),
        "sigmoid": functools.partial(_run, request, "with a sigmoid before the softmax", with_sigmoid(softmax)),
    }


FLUTE_MNIST = Reproduction(
    name="flute_mnist",
    title="FLUTE's logistic regression on MNIST: 1,000 clients with two digits each, 10 a round, 100 rounds",
    paper="M. Hipolito Garcia et al. FLUTE: a scalable, extensible framework for high-performance federated learning "
    "simulations. 2022, and the README of microsoft/msrflute. https://arxiv.org/abs/2203.13789",
    duration="about 3 min per case of 5 seeds",
    required_data="DIR/mnist, or a download of 12 MB",
    cases=_cases,
    notes="FLUTE states about 81 % for itself and for FedML, and 79 to 80 % for Flower. The model of its code applies a "
    "sigmoid before the loss's softmax. The clients are drawn as in `fedprox`, others for every seed, because FedML's file of "
    "them is not available, and the test images are MNIST's. Ten clients with two digits each change the accuracy by many "
    "points from one round to the next.",
)
