"""Clients with the same labels whose features differ: rotated images, and noise.

Rotation: A. Ghosh, J. Chung, D. Yin, K. Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020
(Rotated MNIST: 0, 90, 180 and 270 degrees): https://arxiv.org/abs/2006.04088. With multiples of 90 degrees no pixel has to be
interpolated. Deviation: angles are not drawn; clients take them in turn, so the clusters are known and equally large.

Noise: Q. Li, Y. Diao, Q. Chen, B. He, "Federated learning on non-IID data silos: an experimental study", ICDE 2022, section
4.2: https://arxiv.org/abs/2102.02079: party i of N adds Gau(sigma * i / N). The paper calls that a variance, and the authors'
code takes it as a standard deviation, as this module does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsim import checks, rng
from fedsim.data import FederatedData, TextColumn


def rotation(data: FederatedData, *, angles: Sequence[float] = (0, 90, 180, 270), feature: str = "x") -> FederatedData:
    """Rotates the images of client i counter-clockwise by ``angles[i % len(angles)]`` degrees.

    Train and test examples of the same clients get the same angles, because the angle depends on the client's position only.

    Args:
      data: the population. The feature is copied; all other columns are shared with the result.
      angles: degrees. A single one shifts the domain of the whole population. Unless an angle is a multiple of 90, pixels are
        interpolated bilinearly, and corners that come from outside of an image are 0.
      feature: name of the images ``[rows, height, width]`` or ``[rows, height, width, channels]``.

    Guarantees:
      - Clients, labels and dtype do not change; with multiples of 90, every image keeps its pixels.
      - The numbers of clients per angle differ by at most 1.

    Raises:
      ValueError: there is no such feature, it does not hold images, an angle is not finite, or it is an odd multiple of 90 and
        the images are not square.

    >>> data = FederatedData.from_arrays({"x": [[[1, 2], [3, 4]]] * 2}, sizes=[1, 1])
    >>> rotation(data, angles=[0, 90]).columns["x"].tolist()
    [[[1, 2], [3, 4]], [[2, 4], [1, 3]]]
    """
    column = _column(data, feature)
    if column.ndim not in (3, 4):
        raise ValueError(f"Feature {feature!r} is {list(column.shape[1:])} per example: expected images [height, width, ...].")
    if not len(angles) or not np.all(np.isfinite(angles)):
        raise ValueError(f"Expected finite angles in degrees, got angles={list(angles)}: give one or more, such as [0, 90].")
    if column.shape[1] != column.shape[2] and any(angle % 180 == 90 for angle in angles):
        raise ValueError(
            f"Images of {column.shape[1]} by {column.shape[2]} cannot be rotated by {list(angles)} degrees: crop them "
            "square, or use multiples of 180."
        )
    rotated = np.empty(column.shape, column.dtype)
    for client in range(data.num_clients):
        rows = slice(*data.offsets[client : client + 2])
        rotated[rows] = _rotated(column[rows], angles[client % len(angles)])
    return _with(data, feature, rotated)


def _rotated(images: np.ndarray, angle: float) -> np.ndarray:
    if angle % 90 == 0:
        return np.rot90(images, int(angle) // 90, axes=(1, 2))
    from scipy import ndimage  # SciPy takes long to import, and other partitioners do not need it.

    return ndimage.rotate(images, angle, axes=(2, 1), reshape=False, order=1)


def noise(data: FederatedData, *, sigma: float, seed: int, feature: str = "x", equal: bool = False) -> FederatedData:
    """Adds Gaussian noise to every client's features; client i of N, counted from 1, gets standard deviation sigma * i / N.

    Use another seed for the test examples than for the training examples of the same clients; with the same seed, row j of a
    client gets the same noise in both.

    Args:
      data: the population. The feature is copied; all other columns are shared with the result.
      sigma: standard deviation for the last client, in the feature's units (out of 255 for bytes).
      seed: the same seed gives the same noise.
      feature: name of the feature. If it has an integer dtype, the result is rounded and clipped to the range of the dtype.
      equal: whether all clients get the standard deviation ``sigma``, which shifts the domain of the whole population.

    Guarantees:
      - Clients, labels, shapes and dtype do not change; ``sigma=0`` changes nothing.
      - A client's noise depends on the seed, its position and the number of clients, and not on the data of other clients.

    Raises:
      ValueError: there is no such feature, it is not numeric, or ``sigma`` is negative or not finite.

    >>> data = FederatedData.from_arrays({"x": np.zeros(2000)}, sizes=[1000, 1000])
    >>> [round(float(client["x"].std()), 1) for client in noise(data, sigma=1.0, seed=0).clients()]
    [0.5, 1.0]
    """
    column = _column(data, feature)
    checks.number(least=0, sigma=sigma)
    checks.truth(equal=equal)
    if column.dtype.kind not in "iuf":
        raise ValueError(f"Feature {feature!r} has dtype {column.dtype}: noise is added to numbers, so give a numeric feature.")
    words = np.asarray(rng.words(rng.stream(rng.root(seed), "noise")))
    noisy = np.empty(column.shape, column.dtype)
    for client in range(data.num_clients):
        rows = slice(*data.offsets[client : client + 2])
        draw = rng.generator(words, client)
        level = sigma if equal else sigma * (client + 1) / data.num_clients
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
        raise ValueError(f"Feature {feature!r} is text: give a feature that holds numbers.")
    return column


def _with(data: FederatedData, feature: str, column: np.ndarray) -> FederatedData:
    return FederatedData({**data.columns, feature: column}, data.offsets, data.client_ids)
