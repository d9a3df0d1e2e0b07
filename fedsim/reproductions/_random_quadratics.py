"""Random quadratics without a server: the rounds that decentralized algorithms take to the optimum.

T. Vogels, L. He, A. Koloskova, T. Lin, S. P. Karimireddy, S. Stich, M. Jaggi, "RelaySum for decentralized deep learning on
heterogeneous data", NeurIPS 2021, and its code: https://arxiv.org/abs/2110.04175.

Node i has f_i(x) = 1/2 x' H_i x - b_i' x in d = 10 dimensions. The H_i are products A A' of random normal matrices, changed by
the same affine function so that the eigenvalues of their mean extend from mu = 0.5 to L = 1. The b_i have mean 0, so that the
optimum is 0, and mean squared norm zeta² (the squared norms of the gradients at the optimum). All nodes start from the same
random x with squared norm r0. A run ends when the mean over nodes of the squared distance to the optimum is below 1e-6; the
learning rate of every method, problem and size is the best of a grid. The published figures were read from the paper's table;
how the H_i are drawn was not, and was chosen so that all-reduce has about the same figures.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedsim import rng
from fedsim.data import Batches
from fedsim.decentralized import (
    D2,
    DecentralizedAlgorithm,
    DFedAvg,
    GradientTracking,
    RelaySGD,
    Topology,
    binary_tree,
    complete,
    line,
    ring,
)
from fedsim.execution import Jit, share_programs
from fedsim.model import Model
from fedsim.reproductions._quadratics import functions, measure_rounds, quadratic
from fedsim.reproductions._reproduction import Case, Reproduction, Request, Row, join_nonempty

_DIMENSIONS, _MU, _L, _TARGET = 10, 0.5, 1.0, 1e-6
_SIZES = (6, 12, 24)


class _Method:
    """A method of the table: its name and published rounds, the class, the topology, and the learning rates to try."""

    def __init__(
        self, published: tuple[int, int, int], cls: type[DecentralizedAlgorithm], topology: Callable[[int], Topology],
        rates: np.ndarray, *, zeta2: float = 1.0, r0: float = 100.0,
    ) -> None:  # fmt: skip
        self.published, self.cls, self.topology, self.rates = published, cls, topology, rates
        self.zeta2, self.r0 = zeta2, r0


_METHODS = {
    "all-reduce": _Method((9, 7, 7), DFedAvg, complete, np.geomspace(0.8, 2, 12)),
    "RelaySGD, chain": _Method((21, 38, 71), RelaySGD, line, np.geomspace(0.1, 2, 16)),
    "RelaySGD, binary tree": _Method((15, 21, 27), RelaySGD, binary_tree, np.geomspace(0.2, 2, 14)),
    "D², ring": _Method((19, 45, 73), D2, ring, np.geomspace(0.1, 2, 16)),
    "gradient tracking, ring": _Method((49, 199, 715), GradientTracking, ring, np.geomspace(0.01, 1, 20)),
    "gradient tracking, binary tree": _Method((163, 406, 890), GradientTracking, binary_tree, np.geomspace(0.01, 0.6, 18)),
    "D-PSGD, ring": _Method((276, 616, 1362), DFedAvg, ring, np.geomspace(0.003, 0.1, 8), zeta2=0.01, r0=10.0),
}


def problem(nodes: int, seed: int, zeta2: float, r0: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws a problem: the H_i ``float32 [nodes, 10, 10]``, the b_i ``[nodes, 10]``, and the first x ``[10]``.

    >>> hessians, slopes, start = problem(nodes=6, seed=0, zeta2=1.0, r0=100.0)
    >>> np.linalg.eigvalsh(hessians.mean(0))[[0, -1]].round(3).tolist(), round(float(start @ start), 2)
    ([0.5, 1.0], 100.0)
    """
    generator = np.random.default_rng(seed)
    factors = generator.standard_normal((nodes, _DIMENSIONS, _DIMENSIONS))
    hessians = factors @ factors.transpose(0, 2, 1)
    values = np.linalg.eigvalsh(hessians.mean(0))
    scale = (_L - _MU) / (values[-1] - values[0])
    hessians = scale * hessians + (_MU - scale * values[0]) * np.eye(_DIMENSIONS)
    slopes = generator.standard_normal((nodes, _DIMENSIONS))
    slopes -= slopes.mean(0)
    slopes *= np.sqrt(zeta2 / np.square(slopes).sum(1).mean())
    start = generator.standard_normal(_DIMENSIONS)
    start *= np.sqrt(r0) / np.linalg.norm(start)
    return hessians.astype(np.float32), slopes.astype(np.float32), start.astype(np.float32)


def _measured(cls: type[DecentralizedAlgorithm]) -> type[DecentralizedAlgorithm]:
    """Returns a subclass whose info also has the mean squared distance of the nodes' models to the optimum, 0."""

    class Measured(cls):  # type: ignore[misc, valid-type]
        def round(self, state: Any, clients: Any) -> Any:
            state, info = super().round(state, clients)
            distance = jnp.mean(jnp.sum(jnp.square(self.node_models(state)["x"]), axis=1))
            return state, {**info, "squared_distance": distance}

    return Measured


def rounds_to_optimum(
    make: Callable[[float], DecentralizedAlgorithm], rate: float, nodes: int, seed: int, most: int, zeta2: float, r0: float
) -> int | None:
    """Returns the rounds until the mean squared distance to the optimum is below 1e-6; None if there are more than ``most``."""
    hessians, slopes, start = problem(nodes, seed, zeta2, r0)
    algorithm: Any = make(rate)
    share_programs([algorithm], make, [{"rate": rate}])
    models = {"x": jnp.broadcast_to(start, (nodes, _DIMENSIONS))}
    state = algorithm.init(rng.root(0))._replace(models=models, memory=algorithm.node_memory(models))
    found = measure_rounds(
        algorithm,
        state,
        functions(hessians, slopes),
        measure=lambda info: info["squared_distance"],
        target=_TARGET,
        most=most,
    )
    return len(found) if found[-1] < _TARGET else None


def _run(request: Request, name: str) -> Iterator[Row]:
    method = _METHODS[name]
    extent = request.extent(seeds=5, rounds=3 * method.published[-1], quick_rounds=60)
    for nodes, published in zip(_SIZES[:1] if request.quick else _SIZES, method.published, strict=False):
        topology, cls, model = method.topology(nodes), _measured(method.cls), quadratic(np.zeros(_DIMENSIONS, np.float32))

        def make(rate: float, topology: Topology = topology, cls: Any = cls, model: Model = model) -> DecentralizedAlgorithm:
            return cls(
                model=model, client_optimizer=optax.sgd(rate), batches=Batches(size=1), topology=topology, execution=Jit()
            )

        began, best, rates = time.perf_counter(), [], []
        for seed in extent.seeds:
            found: dict[float, int] = {}
            for rate in method.rates:
                most = min([extent.rounds, *found.values()])  # More rounds than with the best rate so far do not help.
                if rounds := rounds_to_optimum(make, float(rate), nodes, seed, most, method.zeta2, method.r0):
                    found[float(rate)] = rounds
            request.log(f"{name}, {nodes} nodes, seed {seed}: {min(found.values(), default=None)} rounds")
            best.append(min(found.values(), default=None))
            rates.append(min(found, key=found.__getitem__, default=None))
        reached = [rounds for rounds in best if rounds is not None]
        yield Row(
            case=f"{name}, {nodes} nodes",
            measure="rounds, median",
            paper=str(published),
            ours=f"{np.median(reached):g} ({min(reached)} to {max(reached)})" if reached else "not reached",
            values=best,
            seeds=len(extent.seeds),
            seconds=time.perf_counter() - began,
            settings={"zeta2": method.zeta2, "r0": method.r0, "rates": rates, "tried": method.rates.round(5).tolist()},
            reduced=join_nonempty(extent.reduced()),
        )


def _cases(request: Request) -> Mapping[str, Case]:
    names = {name: name.lower().replace(", ", "-").replace(" ", "-").replace("²", "2") for name in _METHODS}
    return {short: functools.partial(_run, request, name) for name, short in names.items()}


RANDOM_QUADRATICS = Reproduction(
    name="random_quadratics",
    title="Random quadratics without a server: rounds to the optimum for seven methods and 6, 12 and 24 nodes",
    paper="T. Vogels et al. RelaySum for decentralized deep learning on heterogeneous data. NeurIPS 2021. "
    "https://arxiv.org/abs/2110.04175",
    duration="about 10 minutes",
    required_data="none",
    cases=_cases,
    notes="Node i has f_i(x) = 1/2 x' H_i x - b_i' x in 10 dimensions; the mean of the H_i has eigenvalues from 0.5 to 1, "
    "and the optimum of the sum is 0. A run ends when the mean over nodes of the squared distance to it is below "
    "1e-6, from 100 (D-PSGD: 10); the gradients at the optimum have mean squared norm 1 (D-PSGD: 0.01). The "
    "learning rate is the best of a grid for every problem. How the paper draws the H_i was not read: here they are "
    "products of random normal matrices, shifted and scaled. Rounds: median and range over random problems. "
    "Arithmetic in float32. In the paper, the runs of D-PSGD ended by another rule, which was not read. Here "
    "D-PSGD mixes after the step, as the others do: its nodes stay apart by the rate times the heterogeneity of their data, so "
    "only small rates reach this distance.",
)
