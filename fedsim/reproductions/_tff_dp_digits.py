"""User-level differential privacy on the digits of EMNIST, as in the tutorial of TensorFlow Federated.

The tutorial is "Differential privacy in TFF":
https://www.tensorflow.org/federated/tutorials/federated_learning_with_differential_privacy. It trains with growing noise and 50
of 3,383 writers in a round, and then with as many writers as an ε of 2 needs. The clipping norm adapts as in G. Andrew et al.,
"Differentially private learning with adaptive clipping", NeurIPS 2021, https://arxiv.org/abs/1905.03871.

A round with the same number of writers and the same noise differs from the tutorial's in how often a writer comes back, which
with fewer writers may raise the accuracy. ε cannot be compared, because it depends on the share of the writers in a round. The
row of a run states it for 3,383 writers and for those that are there, by privacy loss distributions. The tutorial's ε, such as
2 for 120 writers, is by Rényi divergences, which is larger; the accountant's row compares that.

As in the tutorial, paper is 1 and ink 0, which makes learning slower than the inverse, and Keras' initial weights are drawn.
The noise on the count of updates has the deviation of a twentieth of the writers in a round. Deviations: the split into
training and test images is that of files of all 62 classes, unless those of digits alone are given.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Literal

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from fedsim import datasets, privacy
from fedsim.aggregators import AdaptiveClip, GaussianMechanism
from fedsim.algorithms import FedAvg
from fedsim.data import Batches
from fedsim.evaluation import evaluate
from fedsim.model import Examples, Model
from fedsim.reproductions._curve import train
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty
from fedsim.samplers import PoissonSampler

WRITERS, ROUNDS, DELTA = 3383, 100, 1e-5


@dataclasses.dataclass(frozen=True)
class NoiseCase:
    """A run of the tutorial.

    Attributes:
      clients: the expected number of writers in a round.
      noise: the noise multiplier.
      accuracies: the tutorial's test accuracies, by the number of finished rounds.
    """

    clients: int
    noise: float
    accuracies: Mapping[int, float]

    def __str__(self) -> str:
        return f"{self.clients} writers, noise {self.noise:g}"


CASES = {
    "noise-0": NoiseCase(50, 0.0, {100: 0.805}),
    "noise-0.5": NoiseCase(50, 0.5, {100: 0.770}),
    "noise-0.75": NoiseCase(50, 0.75, {100: 0.709}),
    "noise-1": NoiseCase(50, 1.0, {100: 0.383}),
    "epsilon-2": NoiseCase(120, 1.2, {50: 0.700, 100: 0.796}),
}


def network() -> Model:
    """Returns the tutorial's perceptron with two hidden layers of 200 units, which sees paper as 1 and ink as 0."""

    def linear(x: jax.Array, units: int) -> jax.Array:
        return hk.Linear(units, w_init=hk.initializers.VarianceScaling(1.0, "fan_avg", "uniform"))(x)

    def logits(examples: Examples) -> jax.Array:
        x = 1 - examples["x"].reshape(examples["x"].shape[0], -1).astype(jnp.float32) / 255
        x = jax.nn.relu(linear(x, 200))
        return linear(jax.nn.relu(linear(x, 200)), 10)

    features = {"x": jax.ShapeDtypeStruct((28, 28, 1), jnp.uint8), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    return Model.from_haiku(hk.transform(logits), features=features, num_classes=10)


def epsilon(clients: int, noise: float, writers: int = WRITERS, method: Literal["pld", "rdp"] | None = None) -> float:
    """Returns ε of the rounds of the tutorial with so many of the writers in each.

    >>> round(epsilon(120, 1.2, method="rdp"), 2)
    1.99
    """
    share = privacy.Poisson(clients / writers) if clients < writers else privacy.EveryRound()
    return privacy.epsilon(noise, share, rounds=ROUNDS, delta=DELTA, method=method)


def smallest_cohort(target: float) -> int:
    """Returns how many writers a round needs for ε, if the noise multiplier is a hundredth of their number, as in the tutorial.

    >>> smallest_cohort(2.0)
    120
    """
    candidates = range(50, 500)
    return candidates[bisect.bisect_left(candidates, -target, key=lambda n: -epsilon(n, n / 100, method="rdp"))]


def _cases(request: Request) -> Mapping[str, Case]:
    return {"accountant": _accountant} | {name: functools.partial(_run, request, case) for name, case in CASES.items()}


def _accountant() -> Iterator[Row]:
    found = smallest_cohort(2.0)
    bounds = {"rdp": epsilon(found, found / 100, method="rdp"), "pld": epsilon(found, found / 100, method="pld")}
    yield Row(
        case="noise of a hundredth of the writers in a round",
        measure="fewest writers in a round for ε ≤ 2",
        paper="120",
        ours=str(found),
        seeds=1,
        settings={"writers": WRITERS, "rounds": ROUNDS, "delta": DELTA},
        details=bounds,
        note=f"ε is then {bounds['rdp']:.4f} by Rényi divergences, and {bounds['pld']:.4f} by privacy loss distributions",
    )


def _run(request: Request, case: NoiseCase) -> Iterator[Row]:
    extent = request.extent(seeds=5, rounds=ROUNDS)
    splits = datasets.load("emnist10", data=request.folder("emnist10", "femnist"))
    writers, model = splits.train.num_clients, network()
    algorithm = FedAvg(
        model=model,
        client_optimizer=optax.sgd(0.01),
        server_optimizer=optax.sgd(1.0, momentum=0.9),
        batches=Batches(size=32),
        weighting="uniform",
        aggregator=GaussianMechanism(case.noise, clip=AdaptiveClip(), denominator=case.clients),
    )
    curves = []
    for seed in extent.seeds:
        sampler = PoissonSampler(splits.train, probability=min(1.0, case.clients / writers), seed=seed)
        curves.append(
            train(
                algorithm,
                sampler,
                rounds=extent.rounds,
                score=lambda state: evaluate(model, state.params, splits.test).overall["accuracy"],
                every=10,
            )
        )
        request.log(f"{case}: seed {seed}: {curves[-1].scores[-1]:.3f}, {curves[-1].seconds:.0f} s")
    few = f"{writers:,} of {WRITERS:,} writers" if writers < WRITERS else ""
    bounds = {each: epsilon(case.clients, case.noise, each) for each in dict.fromkeys((WRITERS, writers))}
    evaluated = [at for at in case.accuracies if at in curves[0].rounds or at == ROUNDS]
    for at in evaluated:
        found = [curve.points()[min(at, extent.rounds)] for curve in curves]
        yield Row.of_seeds(
            found,
            case=str(case),
            measure=f"test accuracy after {min(at, extent.rounds)} rounds",
            paper=f"{case.accuracies[at]:.3f}",
            seconds=sum(curve.seconds for curve in curves) if at == evaluated[0] else 0.0,
            settings=dataclasses.asdict(case) | {"rounds": extent.rounds, "writers": writers, "delta": DELTA},
            details={"curves": [curve.points() for curve in curves], "epsilon by writers": bounds},
            reduced=join_nonempty(few, extent.reduced()),
            note="" if case.noise == 0 else f"ε after {ROUNDS} rounds is {_stated(bounds)}",
        )


def _stated(bounds: Mapping[int, float]) -> str:
    return ", and ".join(f"{bound:.3g} with {writers:,} writers" for writers, bound in bounds.items())


TFF_DP_DIGITS = Reproduction(
    name="tff_dp_digits",
    title="User-level differential privacy on the digits of EMNIST with an adaptive norm: accuracy and ε against noise",
    paper="Differential privacy in TFF, a tutorial of TensorFlow Federated. "
    "https://www.tensorflow.org/federated/tutorials/federated_learning_with_differential_privacy",
    duration="accountant: seconds; every other case: three minutes for five seeds",
    required_data="EMNIST digits: DIR/emnist10 or DIR/femnist in any form that `fedsim datasets describe emnist10` names, or a "
    "download",
    cases=_cases,
    notes="FedAvg with momentum on the server trains a perceptron for 100 rounds, in which every writer takes part with the "
    "same probability, independently. Clients train for one epoch with batches of 32 and the rate 0.01. Updates have "
    "equal weights, and are clipped to a norm that follows the median of their norms, from 0.1 on. The numbers of "
    "writers in a round and the noise are the tutorial's; with fewer writers, each comes back more often, which may raise "
    "the accuracy. ε cannot be compared, because it depends on the share of the writers that a round has. δ is 1e-5. ε in "
    "the remarks is that of privacy loss distributions, which is smaller than that of Rényi divergences; the tutorial's is "
    "the latter, which the first row compares. The tutorial's numbers are of one run each.",
)
