"""Synthetic(alpha, beta): softmax regression whose clients differ in their models and in their features.

T. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127, section 5.1 and
appendix C.1. Details are those of the authors' code (litian96/FedProx, data/synthetic_*): client k has

  n_k = floor(LogNormal(4, 2)) + 50 examples,
  u_k ~ N(0, alpha^2), B_k ~ N(0, beta^2): alpha and beta are standard deviations,
  W_k [60, 10] and b_k [10], all entries ~ N(u_k, 1); mean v_k [60], all entries ~ N(B_k, 1),
  x ~ N(v_k, Sigma), Sigma = diag(j^-1.2) for j = 1 .. 60; y = argmax(x W_k + b_k),

and uses the first floor(0.9 n_k) for training and the rest for test. In the iid variant v_k = 0, and all clients
share one W and b with entries ~ N(0, 1). Note that u_k shifts all logits of an example equally, so alpha has no effect on the
labels, also in the authors' data. The clients' models differ at any alpha because each has its own draw.

Deviations: the random numbers differ (the authors' have no seed), and features are float32. Client k is the same whatever
the number of clients.

Loaded:
  x: [60] float32 features.
  y: [] int32 class.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim.data import FederatedData
from fedsim.datasets import _checks
from fedsim.datasets._random_access import generator
from fedsim.datasets._registry import register

_DIMENSION, _CLASSES = 60, 10
_STD = np.arange(1, _DIMENSION + 1) ** -0.6
_ABOUT = {
    "features": {"x": "[60] float32 features", "y": "[] int32 class"},
    "source_features": {"x": "[60] float64 features", "y": "[] int64 class"},
    "num_classes": _CLASSES,
    "default_model": "synthetic_logistic",
    "source": "generated, after litian96/FedProx, data/synthetic_*",
    "download_bytes": 0,
    "licence": "none needed: generated numbers",
    "citation": "T. Li et al. Federated Optimization in Heterogeneous Networks. MLSys, 2020. https://arxiv.org/abs/1812.06127",
}
_OPTIONS = {"clients": "number of clients", "seed": "seed of all random numbers"}


def synthetic(alpha: float, beta: float, *, clients: int = 30, seed: int = 0, iid: bool = False) -> dict[str, FederatedData]:
    """Generates train and test of Synthetic(alpha, beta), or of its iid variant, which ignores both parameters.

    Args:
      alpha: standard deviation of u_k; at least 0.
      beta: standard deviation of B_k, which controls how much clients' features differ; at least 0.
      clients: number of clients. They are named ``f_00000``, ``f_00001``, ..., and are the same in both splits.
      seed: seed of all random numbers.
      iid: whether all clients have the same model and the same distribution of features.

    Raises:
      ValueError: an argument is out of its range.

    >>> splits = synthetic(1, 1, clients=2)
    >>> splits["train"]["f_00001"]["x"].shape[1:], splits["test"].num_clients
    ((60,), 2)
    """
    for name, value in {"alpha": alpha, "beta": beta}.items():
        if not 0 <= value < np.inf:
            raise ValueError(f"Expected {name} >= 0, a standard deviation, got {name}={value}.")
    if clients < 1:
        raise ValueError(f"Expected clients >= 1, got clients={clients}.")
    shared = _model(generator(seed, "synthetic iid model"), 0.0)
    train, test = {}, {}
    for client in range(clients):
        draw = generator(seed, "synthetic", client)
        n = int(draw.lognormal(4, 2)) + 50
        center = 0.0 if iid else draw.normal(draw.normal(0, beta), 1, _DIMENSION)
        w, b = shared if iid else _model(draw, draw.normal(0, alpha))
        x = draw.normal(center, _STD, (n, _DIMENSION))
        y = np.argmax(x @ w + b, axis=1)
        kept, columns = int(0.9 * n), {"x": x.astype(np.float32), "y": y.astype(np.int32)}
        train[f"f_{client:05d}"] = {name: column[:kept] for name, column in columns.items()}
        test[f"f_{client:05d}"] = {name: column[kept:] for name, column in columns.items()}
    return {"train": FederatedData.from_clients(train), "test": FederatedData.from_clients(test)}


def _model(draw: np.random.Generator, center: float) -> tuple[np.ndarray, np.ndarray]:
    return draw.normal(center, 1, (_DIMENSION, _CLASSES)), draw.normal(center, 1, _CLASSES)


@register(
    "synthetic",
    task="softmax regression on clients that differ in models, features and sizes; generated",
    options={
        "alpha": "FedProx's alpha, which shifts all logits equally",
        "beta": "how much features differ between clients",
        **_OPTIONS,
    },
    splits={"train": (30, 10_551), "test": (30, 1_189)},
    **_ABOUT,
)
def load_synthetic(
    data: Path | None, cache: Path, *, alpha: float = 1.0, beta: float = 1.0, clients: int = 30, seed: int = 0
) -> dict[str, FederatedData]:
    """Loads train and test; see `synthetic`.

    Raises:
      ValueError: an argument is out of its range, or a folder ``data`` is given.
    """
    _checks.no_folder("synthetic", data)
    return synthetic(alpha, beta, clients=clients, seed=seed)


@register(
    "synthetic_iid",
    task="softmax regression on clients that differ only in size; generated",
    options=_OPTIONS,
    splits={"train": (30, 10_551), "test": (30, 1_189)},
    **_ABOUT,
)
def load_synthetic_iid(data: Path | None, cache: Path, *, clients: int = 30, seed: int = 0) -> dict[str, FederatedData]:
    """Loads train and test; see `synthetic`.

    Raises:
      ValueError: an argument is out of its range, or a folder ``data`` is given.
    """
    _checks.no_folder("synthetic_iid", data)
    return synthetic(0, 0, clients=clients, seed=seed, iid=True)
