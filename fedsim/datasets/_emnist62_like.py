"""A synthetic stand-in for Federated EMNIST with as many writers as the real one, or more.

It serves to measure speed and memory without the download. Accuracy on it says nothing about EMNIST.

These properties are real: the clients' sizes, drawn from the quantiles of the 3,400 writers' training examples in TensorFlow
Federated's files (3,400 clients of seed 0 have 679,555 examples together; the real ones have 671,585), with a ninth as many
test examples; the shapes, dtypes and number of classes; and the frequencies of the classes, those of EMNIST's "by class" test
split (G. Cohen et al., 2017). These are synthetic: every class is a few random strokes. A writer has a slant, a width, a pen
and one of two forms of each character, and every image is bent, shifted and inked a little differently. A writer's class
frequencies are one of 4,096 draws from Dirichlet(concentration * frequencies). The class frequencies of real writers differ
only by chance (an infinite concentration fits 300 of them best); the skew is meant for experiments on skewed labels.

Loaded, as `emnist62`:
  x: [28, 28, 1] uint8, 0 = paper, 255 = ink.
  y: [] int32, the class, 0 to 61.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.datasets import _stand_in
from fedsim.datasets._random_access import bits, generator, normal, streams, uniform
from fedsim.datasets._registry import register

# Quantiles 0, 1, ... 100% of the 3,400 writers' numbers of training examples.
_SIZES = """
16 87 97 106 115 120 123 125 128 131 132 134 135 137 139 140 141 141 142 143 144 145 146 147 147 148 149 150 150 150 150 151
152 152 153 153 153 154 155 155 155 156 156 157 157 158 158 158 159 159 159 159 159 160 160 161 161 161 162 162 163 163 164
164 168 188 200 211 219 224 232 239 244 250 256 262 267 271 275 280 285 288 293 297 302 306 311 313 317 320 325 329 332 338
341 348 353 357 364 375 418
"""
# Frequency of each class, per mille, in EMNIST "by class", test.
_FREQUENCIES = """
49.7 54.4 50.5 51.3 48.3 44.6 49.0 52.8 48.4 48.9 9.1 5.6 14.9 6.7 7.3 12.4 3.8 4.5 17.6 5.4 3.3 7.0 12.8 11.6 35.7 12.0 3.6
7.0 30.2 13.5 17.2 6.8 6.9 3.7 6.9 4.0 14.1 7.3 3.7 14.5 35.2 3.4 5.1 12.7 3.7 2.7 4.0 21.8 4.0 16.3 4.0 3.2 4.3 19.9 3.8
25.5 4.1 4.0 4.0 4.0 3.3 3.9
"""
_CLASSES, _FORMS, _SIDE = 62, 2, 28
# Characters are drawn on a grid of half pixels with a margin, as distances to the nearest stroke in 1/16 of a pixel.
_GRID, _BENDS = 128, 256


class _Alphabet:
    """Data shared by all writers of a seed."""

    def __init__(self, seed: int, concentration: float) -> None:
        frequencies = np.array(_FREQUENCIES.split(), float)
        self.mixes = _stand_in.dirichlet_mixes(seed, "emnist62_like mixes", frequencies / frequencies.sum(), concentration)
        draw = generator(seed, "emnist62_like alphabet")
        # Corners of quadratic curves, in pixels from the centre: [class, form, stroke, corner, (down, right)].
        corners = draw.uniform(-11, 11, (_CLASSES, 1, 3, 3, 2)) + draw.normal(0, 1.0, (_CLASSES, _FORMS, 3, 3, 2))
        t = np.linspace(0, 1, 32)[:, None]
        curve = np.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2])[..., 0]
        points = np.einsum("kfscd,ct->kfstd", corners, curve).reshape(_CLASSES * _FORMS, -1, 2)
        axis = (np.arange(_GRID) - _GRID / 2) / 2
        squares = ((axis[:, None] - points[..., None, :, 0]) ** 2, (axis[:, None] - points[..., None, :, 1]) ** 2)
        nearest = [(down[:, None] + right[None]).min(-1) for down, right in zip(*squares, strict=True)]
        self.distance = np.minimum(16 * np.sqrt(nearest), 255).astype(np.uint8).ravel()
        # Smooth displacements, in half pixels, as offsets into the grid: a few long waves.
        phase, tilt = draw.uniform(0, 2 * np.pi, (2, 2, _BENDS, 3, 1, 1))
        wave = np.arange(_SIDE) / _SIDE * 2 * np.pi * np.array([0.5, 0.9, 1.3])[:, None]
        waves = np.cos(np.cos(tilt) * wave[..., None] + np.sin(tilt) * wave[:, None] + phase).sum(2)
        down, right = np.rint(1.3 * waves).astype(np.int32)
        self.bend = (down * _GRID + right).reshape(_BENDS, _SIDE, _SIDE)


_alphabet = functools.lru_cache(maxsize=2)(_Alphabet)


def rows(client: np.ndarray, number: np.ndarray, *, split: int, seed: int, concentration: float) -> Mapping[str, np.ndarray]:
    """Returns the examples with these numbers of these clients, each ``int64 [n]``.

    >>> {name: column.shape for name, column in rows(np.array([7]), np.array([0]), split=0, seed=0, concentration=50).items()}
    {'x': (1, 28, 28, 1), 'y': (1,)}
    """
    alphabet = _alphabet(seed, concentration)
    writer = streams(seed, "emnist62_like writer", client)
    image = streams(seed, "emnist62_like image", client, number * 2 + split)
    label = _stand_in.pick(alphabet.mixes, (bits(writer, 0) % len(alphabet.mixes)).astype(np.int64), uniform(image, 0))
    form = _form(writer, label)
    slant = 0.25 * normal(writer, 1) + 0.05 * normal(image, 1)
    width, height = (np.exp(0.12 * normal(writer, k) + 0.06 * normal(image, k)) for k in (3, 5))
    pen = np.clip(20 + 5 * normal(writer, 7) + 2 * normal(image, 7), 8, 36)
    down, right = (2.4 * normal(image, k) for k in (9, 11))
    bend = alphabet.bend[(bits(image, 13) % _BENDS).astype(np.int64)]

    # From here on units are half pixels, in single precision, because this part takes most of the time.
    pixel = np.arange(_SIDE, dtype=np.float32) * 2 - (_SIDE - 1)
    slants, widths, heights, downs, rights = (v.astype(np.float32)[:, None] for v in (slant, width, height, down, right))
    at_down = _on_grid(pixel * heights + downs)
    at_right = _on_grid((pixel * widths + rights)[:, None, :] + (slants * pixel)[:, :, None])
    start = ((label * _FORMS + form) * _GRID * _GRID).astype(np.int32)
    at_right += bend
    at_right += (at_down * _GRID + start[:, None])[:, :, None]
    distance = alphabet.distance.take(at_right, mode="clip")
    ink = np.clip((pen.astype(np.int16)[:, None, None] - distance) * np.int16(16) + np.int16(128), 0, 255)
    return {"x": ink.astype(np.uint8)[..., None], "y": label.astype(np.int32)}


def _form(writer: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Returns the form that a writer always gives a character."""
    return ((bits(writer, 20) >> label.astype(np.uint64)) & np.uint64(_FORMS - 1)).astype(np.int64)


def _on_grid(x: np.ndarray) -> np.ndarray:
    """Returns the nearest position on the grid, with a margin for the bends."""
    return np.clip(np.rint(x) + np.float32(_GRID // 2), 8, _GRID - 9).astype(np.int32)


def sizes(clients: int, seed: int, max_examples: int | None) -> dict[str, np.ndarray]:
    """Returns the numbers of train and test examples of each client, ``int64 [clients]``.

    >>> sizes(3, 0, None)["train"].shape
    (3,)
    """
    quantiles = np.array(_SIZES.split(), float)
    u = uniform(streams(seed, "emnist62_like size", np.arange(clients)), 0)
    train = np.rint(np.interp(u, np.linspace(0, 1, len(quantiles)), quantiles)).astype(np.int64)
    train = np.minimum(train, max_examples or train.max())
    return {"train": train, "test": -(-train // 9)}


@register(
    "emnist62_like",
    task="a synthetic stand-in for emnist62 without a download: any number of writers, with real sizes; generated",
    features={"x": "[28, 28, 1] uint8 image, 0 = paper, 255 = ink", "y": "[] int32 synthetic character, 0 to 61"},
    source_features={"x": "[28, 28, 1] uint8 image, 0 = paper, 255 = ink", "y": "[] int32 synthetic character, 0 to 61"},
    options={
        "clients": "number of clients, 1 to 10,000,000",
        "max_examples": "largest number of training examples of a client; None: the real sizes",
        "concentration": "of the clients' class frequencies; small values give skewed clients, large values similar ones",
        "seed": "seed of all random numbers",
    },
    splits={"train": (3_400, 679_555), "test": (3_400, 76_919)},
    num_classes=_CLASSES,
    default_model="emnist_cnn",
    source="generated; stored in the cache if larger than a gigabyte",
    download_bytes=0,
    licence="none needed: generated images",
    citation="for the sizes: S. Caldas et al. LEAF: a benchmark for federated settings. 2018. https://arxiv.org/abs/1812.01097",
)
def load_emnist62_like(
    data: Path | None,
    cache: Path,
    *,
    clients: int = 3400,
    max_examples: int | None = None,
    concentration: float = 50.0,
    seed: int = 0,
) -> dict[str, FederatedData]:
    """Generates train and test in memory, or above a gigabyte once into the cache, from where they are memory-mapped.

    Raises:
      ValueError: an argument is out of its range, or a folder ``data`` is given.
      OSError: the cache is full or cannot be written.
    """
    options: dict[str, Any] = dict(clients=clients, max_examples=max_examples, concentration=concentration, seed=seed)
    return _stand_in.load("emnist62_like", data, cache, sizes, rows, **options)
