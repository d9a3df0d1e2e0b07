"""Linear regression with optima in closed form, for tests of algorithms.

The data of client k follow its own weights, ``w_k = w + heterogeneity * z_k`` with standard normal ``w`` and ``z_k``, and
its features have their own scale::

    y = x . w_k + noise * e,    x ~ N(0, scale_k^2 I),    log2(scale_k) ~ U(-1, 1),    e ~ N(0, 1).

The best weights for a client's own data are its least-squares solution (``w_k`` if ``noise`` is 0). The best weights for all
clients together, weighted by examples, are the solution for all rows: ``solve(sum X_k'X_k, sum X_k'y_k)``. Rounds with a single
step of gradient descent converge to it. Rounds with t steps at learning rate h on all data of all clients converge to the
solution of ``sum p_k (I - (I - h A_k)^t) (w - w_k*) = 0`` instead, with ``A_k = 2 X_k'X_k / n_k``, shares ``p_k`` and
least-squares solutions ``w_k*``: client drift, in closed form (Z. Charles and J. Konečný, "Convergence and Accuracy Trade-Offs
in Federated Learning and Meta-Learning", AISTATS 2021, https://arxiv.org/abs/2103.05032).

This is not FedJAX's dataset of the same name, in which the task is to find the centre of points under agnostic losses.

Loaded:
  x: [dimension] float32 features.
  y: [] float32 target.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim.data import FederatedData
from fedsim.datasets import _checks
from fedsim.datasets._random_access import generator
from fedsim.datasets._registry import register


@register(
    "toy_regression",
    task="linear regression with optima in closed form, for tests of algorithms; generated",
    features={"x": "[2] float32 features ([dimension] in general)", "y": "[] float32 target"},
    source_features={"x": "[2] float64 features ([dimension] in general)", "y": "[] float64 target"},
    options={
        "clients": "number of clients",
        "dimension": "number of features",
        "heterogeneity": "standard deviation of the clients' weights",
        "noise": "standard deviation of the noise in the targets",
        "seed": "seed of all random numbers",
    },
    splits={"train": (20, 906), "test": (20, 200)},
    default_model="toy_regression(dimension={dimension})",
    source="generated",
    download_bytes=0,
    licence="none needed: generated numbers",
    citation="Z. Charles and J. Konečný. Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning. AISTATS, "
    "2021. https://arxiv.org/abs/2103.05032 (for the closed forms)",
)
def load_toy_regression(
    data: Path | None,
    cache: Path,
    *,
    clients: int = 20,
    dimension: int = 2,
    heterogeneity: float = 1.0,
    noise: float = 0.1,
    seed: int = 0,
) -> dict[str, FederatedData]:
    """Generates train and test: each client has 10 to 99 training examples and 10 test examples.

    Raises:
      ValueError: an argument is out of its range, or a folder ``data`` is given.
    """
    _checks.no_folder("toy_regression", data)
    for name, value, least in (("clients", clients, 1), ("dimension", dimension, 1)):
        if value < least:
            raise ValueError(f"Expected {name} >= {least}, got {name}={value}.")
    for name, spread in (("heterogeneity", heterogeneity), ("noise", noise)):
        if not 0 <= spread < np.inf:
            raise ValueError(f"Expected {name} >= 0, a standard deviation, got {name}={spread}.")
    center = generator(seed, "toy regression center").normal(size=dimension)
    splits: dict[str, dict[str, dict[str, np.ndarray]]] = {"train": {}, "test": {}}
    for client in range(clients):
        draw = generator(seed, "toy regression", client)
        weights = center + heterogeneity * draw.normal(size=dimension)
        scale, train_size = 2 ** draw.uniform(-1, 1), int(draw.integers(10, 100))
        for split, n in (("train", train_size), ("test", 10)):
            x = scale * draw.normal(size=(n, dimension))
            y = x @ weights + noise * draw.normal(size=n)
            splits[split][f"client_{client}"] = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return {split: FederatedData.from_clients(examples) for split, examples in splits.items()}
