"""The same labels, seen otherwise by every client.

Rotation: A. Ghosh, J. Chung, D. Yin, K. Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020
(Rotated MNIST: 0, 90, 180 and 270 degrees): https://arxiv.org/abs/2006.04088. Multiples of 90, which move pixels and invent
none. Deviation: which client has which angle is not drawn, but goes round, so that the clusters are known and even.

Noise: Q. Li, Y. Diao, Q. Chen, B. He, "Federated learning on non-IID data silos: an experimental study", ICDE 2022, section
4.2: https://arxiv.org/abs/2102.02079: party i of N adds Gau(sigma * i / N). That is a variance in the paper and a standard
deviation in the authors' code; here it is a standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsim import checks, rng
from fedsim.data import FederatedData, TextColumn


def rotation(data: FederatedData, *, angles: Sequence[int] = (0, 90, 180, 270), feature: str = "x") -> FederatedData:
    """Turns the images of client i counter-clockwise by ``angles[i % len(angles)]`` degrees.

    Args:
      data: the population; the feature is copied, all else is shared.
      angles: multiples of 90.
      feature: images ``[rows, height, width]`` or ``[rows, height, width, channels]``.

    Guarantees:
      - Clients, labels and dtype stay; every image keeps its pixels.
      - As many clients have one angle as another, up to one.

    Raises:
      ValueError: no such feature, not images, an angle that is not a multiple of 90, or of 180 with images that are not
        square.

    >>> data = FederatedData.from_arrays({"x": [[[1, 2], [3, 4]]] * 2}, sizes=[1, 1])
    >>> rotation(data, angles=[0, 90]).columns["x"].tolist()
    [[[1, 2], [3, 4]], [[2, 4], [1, 3]]]
    """
    column = _column(data, feature)
    if column.ndim not in (3, 4):
        raise ValueError(f"Feature {feature!r} is {list(column.shape[1:])} per example: expected images [height, width, ...].")
    if not len(angles) or any(angle % 90 for angle in angles):
        raise ValueError(f"Expected angles that are multiples of 90, got angles={list(angles)}.")
    if column.shape[1] != column.shape[2] and any(angle % 180 for angle in angles):
        raise ValueError(
            f"Images of {column.shape[1]} by {column.shape[2]} cannot be turned by {list(angles)} degrees: crop them square, "
            "or use multiples of 180."
        )
    turned = np.empty(column.shape, column.dtype)
    for client in range(data.num_clients):
        rows = slice(*data.offsets[client : client + 2])
        turned[rows] = np.rot90(column[rows], angles[client % len(angles)] // 90, axes=(1, 2))
    return _with(data, feature, turned)


def noise(data: FederatedData, *, sigma: float, seed: int, feature: str = "x") -> FederatedData:
    """Adds Gaussian noise to every client's features: of N clients, the i-th (from 1) gets standard deviation sigma * i / N.

    Args:
      data: the population; the feature is copied, all else is shared.
      sigma: the last client's standard deviation, in the feature's own units (of 255, for bytes).
      seed: same seed, same noise.
      feature: which. Whole numbers stay so: noise is rounded, and cut off at the dtype's ends.

    Guarantees:
      - Clients, labels, shapes and dtype stay; ``sigma=0`` changes nothing.
      - A client's noise depends on the seed, its position and the number of clients, and not on what others hold.

    Raises:
      ValueError: no such feature, one that is not of numbers, ``sigma`` negative or not finite.

    >>> data = FederatedData.from_arrays({"x": np.zeros(2000)}, sizes=[1000, 1000])
    >>> [round(float(client["x"].std()), 1) for client in noise(data, sigma=1.0, seed=0).clients()]
    [0.5, 1.0]
    """
    column = _column(data, feature)
    checks.number(least=0, sigma=sigma)
    if column.dtype.kind not in "iuf":
        raise ValueError(f"Feature {feature!r} has dtype {column.dtype}: noise is added to numbers.")
    words = np.asarray(rng.words(rng.stream(rng.root(seed), "noise"))).astype(np.uint64)
    noisy = np.empty(column.shape, column.dtype)
    for client in range(data.num_clients):
        rows = slice(*data.offsets[client : client + 2])
        draw = np.random.Generator(np.random.Philox(key=words, counter=[0, 0, 0, client]))
        level = sigma * (client + 1) / data.num_clients
        changed = column[rows] + level * draw.standard_normal(column[rows].shape)
        if column.dtype.kind in "iu":
            limits = np.iinfo(column.dtype)
            changed = np.clip(np.rint(changed), limits.min, limits.max)
        noisy[rows] = changed
    return _with(data, feature, noisy)


def _column(data: FederatedData, feature: str) -> np.ndarray:
    if feature not in data.columns:
        raise ValueError(f"There is no feature {feature!r}; the data has {sorted(data.columns)}.")
    column = data.columns[feature]
    if isinstance(column, TextColumn):
        raise ValueError(f"Feature {feature!r} is text: expected numbers.")
    return column


def _with(data: FederatedData, feature: str, column: np.ndarray) -> FederatedData:
    return FederatedData({**data.columns, feature: column}, data.offsets, data.client_ids)
