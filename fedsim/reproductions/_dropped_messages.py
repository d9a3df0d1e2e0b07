"""Label skew and dropped messages without a server: the accuracy of the worst node.

T. Vogels, L. He, A. Koloskova, T. Lin, S. P. Karimireddy, S. Stich, M. Jaggi, "RelaySum for decentralized deep learning on
heterogeneous data", NeurIPS 2021: https://arxiv.org/abs/2110.04175. The paper trains VGG-11 on CIFAR-10. Here a small network
is trained on the embedded digits, so only the order of the methods and the effect of dropped messages can be compared.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedsim import datasets, models, rng
from fedsim.data import Batches, Cohort, FederatedData
from fedsim.decentralized import (
    D2,
    DPSGD,
    DecentralizedAlgorithm,
    DFedAvg,
    QuasiGlobalMomentum,
    RelaySGD,
    StochasticGradientPush,
    Topology,
    binary_tree,
    complete,
    one_peer_exponential,
    ring,
)
from fedsim.execution import share_programs
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty, mean_and_std

_NODES, _ROUNDS, _MOST_TOGETHER = 16, 400, 100
_RATES = (0.03, 0.1, 0.3)
_LARGEST = 1e4  # A model with a larger parameter has diverged.


class _Method(NamedTuple):
    """A method, its published accuracies with Dirichlet 1, 0.1 and 0.01, and those with 0, 1 and 10 % of messages dropped.

    Without the last two, it does not run with dropped messages.
    """

    cls: type[DecentralizedAlgorithm]
    topology: Callable[[int], Topology]
    skewed: tuple[str, str, str]
    dropped: tuple[str, ...] = ("", "", "")


_METHODS = {
    "all-reduce": _Method(DFedAvg, complete, ("87.0", "", "")),
    "RelaySGD, binary tree": _Method(RelaySGD, binary_tree, ("87.4", "86.9", "84.6"), ("89.2", "89.3", "89.3")),
    "SGP, one-peer exponential": _Method(
        StochasticGradientPush, one_peer_exponential, ("87.4", "86.7", "86.7"), ("88.5", "88.6", "88.1")
    ),
    "D-PSGD, ring": _Method(DPSGD, ring, ("87.4", "79.9", "53.9")),
    "quasi-global momentum, ring": _Method(
        QuasiGlobalMomentum, ring, ("89.5", "84.8", "63.3"), ("69.3", "diverges", "diverges")
    ),
    "D², ring": _Method(D2, ring, ("87.2", "84.0", "38.2"), ("87.4",)),
}


def worst_node(
    algorithm: DecentralizedAlgorithm, data: FederatedData, test: Mapping[str, Any], rounds: int, seed: int
) -> float | None:
    """Trains, and returns the accuracy of the worst node's model over all test examples, %; None if a model diverges."""
    state: Any = algorithm.init(rng.root(seed))
    everyone = np.arange(data.num_clients)
    for done in range(0, rounds, _MOST_TOGETHER):
        cohorts = [Cohort(data, everyone, at, rng.root(seed)) for at in range(done, min(done + _MOST_TOGETHER, rounds))]
        state, _ = algorithm.apply_rounds(state, cohorts, max_rounds=_MOST_TOGETHER)
        found = algorithm.node_models(state)
        if not max(float(jnp.abs(x).max()) for x in jax.tree.leaves(found)) < _LARGEST:
            return None
    outputs = jax.vmap(algorithm.model.apply_for_eval, in_axes=(0, None))(found, test)
    return float(100 * jnp.mean(jnp.argmax(outputs, -1) == test["y"][None], axis=1).min())


def _run(request: Request, name: str) -> Iterator[Row]:
    method, model = _METHODS[name], models.digits_dense(hidden=(32,))
    topology = method.topology(_NODES)
    extent = request.extent(seeds=3, rounds=_ROUNDS, quick_rounds=20)
    skewed, dropped = list(method.skewed), method.dropped
    skewed[-1] += f"; {dropped[0]} with momentum" if dropped[0] else ""

    def make(loss: float) -> Callable[[float], DecentralizedAlgorithm]:
        return lambda rate: method.cls(
            model=model, client_optimizer=optax.sgd(rate), batches=Batches(size=20, steps=1),
            topology=topology, message_loss=loss,
        )  # fmt: skip

    makers = {loss: make(loss) for loss in (0.0, 0.01, 0.1)}

    def accuracy(alpha: float, loss: float, rate: float, seed: int) -> float | None:
        splits = datasets.load("digits", clients=_NODES, partition="dirichlet_balanced", alpha=alpha, seed=seed)
        columns = {name: jnp.asarray(column) for name, column in splits.test.columns.items()}
        algorithm = makers[loss](rate)
        share_programs([algorithm], makers[loss], [{"rate": rate}])
        return worst_node(algorithm, splits.train, columns, extent.rounds, seed)

    settings = [(alpha, 0.0, paper) for alpha, paper in zip((1.0, 0.1, 0.01), skewed, strict=True)]
    settings += [(0.01, loss, paper) for loss, paper in zip((0.01, 0.1), dropped[1:], strict=False)]
    rates: dict[float, float] = {}
    for alpha, loss, paper in settings:
        began = time.perf_counter()
        if alpha not in rates:
            tried = {rate: accuracy(alpha, 0.0, rate, 0) or 0.0 for rate in _RATES}
            rates[alpha] = max(tried, key=tried.__getitem__)
        values = [accuracy(alpha, loss, rates[alpha], seed) for seed in extent.seeds]
        finite = [value for value in values if value is not None]
        diverged = f"{len(values) - len(finite)} of {len(values)} diverge" if len(finite) < len(values) else ""
        ours = join_nonempty(mean_and_std(finite, 1) if finite else "", diverged)
        request.log(f"{name}, alpha {alpha}, loss {loss}: rate {rates[alpha]}, {values}")
        where = f"{loss:.0%} of messages dropped, α = {alpha:g}" if loss else f"α = {alpha:g}"
        yield Row(
            case=f"{name}: {where}",
            measure="worst node, %",
            paper=paper and f"{paper} (CIFAR-10)",
            ours=ours,
            values=values,
            seeds=len(extent.seeds),
            seconds=time.perf_counter() - began,
            settings={"rate": rates[alpha], "rates": _RATES, "rounds": extent.rounds, "nodes": _NODES},
            reduced=join_nonempty(extent.reduced()),
        )


def _cases(request: Request) -> Mapping[str, Case]:
    names = {name: name.lower().split(",")[0].replace(" ", "-").replace("²", "2") for name in _METHODS}
    return {short: functools.partial(_run, request, name) for name, short in names.items()}


DROPPED_MESSAGES = Reproduction(
    name="dropped_messages",
    title="Label skew and dropped messages without a server: the worst of 16 nodes, six methods",
    paper="T. Vogels et al. RelaySum for decentralized deep learning on heterogeneous data. NeurIPS 2021. "
    "https://arxiv.org/abs/2110.04175",
    duration="about 5 minutes",
    required_data="none",
    cases=_cases,
    notes="The paper trains VGG-11 on CIFAR-10; here a perceptron with 32 hidden units is trained on the digits, so only the "
    "order of the methods and the effect of dropped messages can be compared. 16 nodes, batches of 20, 400 rounds of one step, "
    "momentum only in quasi-global momentum. The partition is Dirichlet(α) with equal sizes. The learning rate is the best of "
    "a grid on the test examples of seed 0, without dropped messages. The accuracy is that of the worst node's model on all "
    "test examples. A node uses its own model in place of one that was dropped; in SGP the sender keeps it, and in RelaySGD it "
    "is left out of the sum and of its count. The paper's runs with dropped messages have momentum. D², which diverges there "
    "with dropped messages, does not run with them here.",
)
