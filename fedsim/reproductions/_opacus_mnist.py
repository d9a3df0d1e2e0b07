"""DP-SGD on MNIST as rounds of FedSGD: 60,000 clients of one image each, of which Poisson sampling chooses 240 in a round.

The commands, the network and the table are those of Opacus, A. Yousefpour et al., "Opacus: user-friendly differential privacy
library in PyTorch", 2021, https://arxiv.org/abs/2109.12298, in its repository under examples/mnist.py and
examples/mnist_README.md. If a client is one image, differential privacy of clients is that of examples, so clipping, sampling,
noise and the accountant of fedsim must give the accuracy of another library: a wrong scale of the noise or a wrong
denominator changes it.

Its README states ε of the same commands as 6.86, 2.91 and 1.16 in one version and as 7.10, 3.01 and 1.19 in another. Its
sample rate is 0.004, so an epoch has 250 rounds. With these, the accountant that Opacus used, Rényi divergences and
ε = ρ(α) + log(1/δ) / (α - 1), gives the former; the latter are within 0.3 % of those of a sample rate of 256/60,000.

Deviations: none that is known. Initial weights are drawn from PyTorch's distributions, and images are standardized by the same
mean and deviation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.special import gammaln, logsumexp

from fedsim import datasets, models, privacy
from fedsim.aggregators import Aggregator, GaussianMechanism, Mean
from fedsim.algorithms import FedSGD
from fedsim.data import Batches, FederatedData
from fedsim.evaluation import evaluate
from fedsim.model import Examples, Model
from fedsim.reproductions._curve import train
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row
from fedsim.samplers import PoissonSampler

RATE, ROUNDS_PER_EPOCH, DELTA = 0.004, 250, 1e-5


@dataclasses.dataclass(frozen=True)
class OpacusCase:
    """A row of Opacus' table.

    Attributes:
      epochs, learning_rate, noise, clip: of the command; None: no differential privacy.
      epsilon: what the README states in one version and in another.
      accuracy: the accuracy of ten runs that it states, in percent.
    """

    epochs: int
    learning_rate: float
    noise: float | None
    clip: float | None
    epsilon: tuple[float, float] | None
    accuracy: str

    @property
    def rounds(self) -> int:
        return self.epochs * ROUNDS_PER_EPOCH

    def __str__(self) -> str:
        if self.noise is None:
            return f"no differential privacy, {self.epochs} epochs"
        return f"noise {self.noise}, norm {self.clip}, {self.epochs} epochs"


CASES = {
    "epsilon-7": OpacusCase(45, 0.25, 0.7, 1.5, (6.86, 7.10), "97.09 ± 0.17"),
    "epsilon-3": OpacusCase(60, 0.15, 1.1, 1.0, (2.91, 3.01), "96.78 ± 0.21"),
    "epsilon-1": OpacusCase(15, 0.25, 1.3, 1.5, (1.16, 1.19), "94.63 ± 0.34"),
    "no-privacy": OpacusCase(20, 0.1, None, None, None, "98.94 ± 0.32"),
}


def network() -> Model:
    """Returns Opacus' network: two convolutions, each with max pooling of stride 1, and a hidden layer of 32 units."""

    def convolution(x: jax.Array, channels: int, size: int) -> jax.Array:
        x = jax.nn.relu(models.Conv2D(channels, size, 2, padding="VALID", **_initializers(size * size * x.shape[-1]))(x))
        x = jnp.maximum(x[:, 1:], x[:, :-1])
        return jnp.maximum(x[:, :, 1:], x[:, :, :-1])

    def linear(x: jax.Array, units: int) -> jax.Array:
        return hk.Linear(units, **_initializers(x.shape[-1]))(x)

    def logits(examples: Examples) -> jax.Array:
        x = (examples["x"].astype(jnp.float32) / 255 - 0.1307) / 0.3081
        x = jnp.pad(x, ((0, 0), (3, 3), (3, 3), (0, 0)))
        x = convolution(convolution(x, 16, 8), 32, 4)
        return linear(jax.nn.relu(linear(x.reshape(x.shape[0], -1), 32)), 10)

    features = {"x": jax.ShapeDtypeStruct((28, 28, 1), jnp.uint8), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    return Model.from_haiku(hk.transform(logits), features=features, num_classes=10)


def _initializers(fan_in: int) -> dict[str, hk.initializers.Initializer]:
    """Returns PyTorch's: weights and biases are uniform up to 1 / √fan_in."""
    uniform = hk.initializers.RandomUniform(-(fan_in**-0.5), fan_in**-0.5)
    return {"w_init": uniform, "b_init": uniform}


def earlier_epsilon(noise: float, rounds: int, rate: float = RATE, delta: float = DELTA) -> float:
    """Returns ε as accountants computed it in 2021: by Rényi divergences of whole orders and their first conversion.

    I. Mironov, K. Talwar, L. Zhang, "Rényi differential privacy of the sampled Gaussian mechanism", 2019, section 3.3:
    https://arxiv.org/abs/1908.10530; I. Mironov, "Rényi differential privacy", CSF 2017, proposition 3.

    >>> round(earlier_epsilon(1.3, 15 * 250), 2)
    1.16
    """

    def divergence(order: int) -> float:
        k = np.arange(order + 1)
        combinations = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        chances = combinations + k * np.log(rate) + (order - k) * np.log1p(-rate)
        return float(logsumexp(chances + (k * k - k) / (2 * noise**2))) / (order - 1)

    return min(rounds * divergence(order) - math.log(delta) / (order - 1) for order in range(2, 64))


def _cases(request: Request) -> Mapping[str, Case]:
    return {"accountant": _accountant} | {name: functools.partial(_run, request, case) for name, case in CASES.items()}


def _accountant() -> Iterator[Row]:
    for case in CASES.values():
        if case.noise is None or case.epsilon is None:
            continue
        tight = privacy.epsilon(case.noise, privacy.Poisson(RATE), rounds=case.rounds, delta=DELTA)
        yield Row(
            case=str(case),
            measure="ε with δ = 1e-5",
            paper=f"{case.epsilon[0]:.2f}",
            ours=f"{earlier_epsilon(case.noise, case.rounds):.2f}",
            seeds=1,
            settings={"rate": RATE, "rounds": case.rounds},
            details={"by privacy loss distributions": tight},
            note=f"another version of the README: {case.epsilon[1]:.2f}. By privacy loss distributions, ε is {tight:.2f}",
        )


def _run(request: Request, case: OpacusCase) -> Iterator[Row]:
    extent = request.extent(seeds=10, rounds=case.rounds)
    splits = datasets.load("mnist", data=request.folder("mnist"), partition="iid", clients=1, seed=0)
    columns = splits.train.columns
    clients = FederatedData.from_arrays(columns, sizes=np.ones(len(columns["y"]), np.int64))
    model = network()
    accuracies, seconds = [], 0.0
    for seed in extent.seeds:
        aggregator: Aggregator = Mean()
        if case.noise is not None and case.clip is not None:
            aggregator = GaussianMechanism(case.noise, clip=case.clip, denominator=RATE * clients.num_clients)
        algorithm = FedSGD(
            model=model,
            server_optimizer=optax.sgd(case.learning_rate),
            weighting="uniform",
            batches=Batches(size=1, shuffle=False),
            aggregator=aggregator,
        )
        sampler = PoissonSampler(clients, probability=RATE, seed=seed)
        curve = train(
            algorithm,
            sampler,
            rounds=extent.rounds,
            score=lambda state: evaluate(model, state.params, splits.test).overall["accuracy"],
            every=ROUNDS_PER_EPOCH,
        )
        accuracies.append(100 * curve.scores[-1])
        seconds += curve.seconds
        request.log(f"{case}: seed {seed}: {accuracies[-1]:.2f} %, {curve.seconds:.0f} s")
    yield Row.of_seeds(
        accuracies,
        digits=2,
        case=str(case),
        measure="test accuracy, %",
        paper=case.accuracy,
        seconds=seconds,
        settings=dataclasses.asdict(case) | {"rate": RATE, "rounds": extent.rounds, "clients": clients.num_clients},
        details={"curve of the last seed": curve.points()},
        reduced=extent.reduced(),
    )


OPACUS_MNIST = Reproduction(
    name="opacus_mnist",
    title="DP-SGD on MNIST, as rounds of FedSGD with 60,000 clients of one image each: accuracy and ε",
    paper="A. Yousefpour et al. Opacus: user-friendly differential privacy library in PyTorch. 2021. "
    "https://arxiv.org/abs/2109.12298 (the table is that of examples/mnist_README.md in its repository)",
    duration="accountant: seconds; 15 epochs: 4 min for each seed, 60 epochs: 15 min",
    required_data="MNIST: DIR/mnist with the four idx files, or a download of 12 MB",
    cases=_cases,
    notes="A client is one image, and every client takes part in a round with probability 0.004. Its gradient is clipped, and "
    "the sum of a round is divided by 240, with Gaussian noise. Opacus' README states ε of the same commands as 6.86, 2.91 and "
    "1.16 in one version and as 7.10, 3.01 and 1.19 in another; the former belong to the sample rate 0.004 and 250 rounds per "
    "epoch. *ours* is ε as Opacus computed it, by Rényi divergences. The network and its initial distribution are Opacus'.",
)
