"""Federated EMNIST: handwritten characters, or digits only, of 3,400 writers; each writer is a client.

S. Caldas et al., "LEAF: a benchmark for federated settings", 2018, https://arxiv.org/abs/1812.01097, made from G. Cohen et
al., "EMNIST: extending MNIST to handwritten letters", IJCNN 2017, https://arxiv.org/abs/1702.05373. The splits and
files are TensorFlow Federated's; every writer is in both splits.

The addresses, hashes and numbers of examples are those of FedJAX's and TensorFlow Federated's own loaders
(fedjax/datasets/emnist.py; tensorflow_federated/python/simulation/datasets/emnist.py, and emnist/load_data.py up to 2021
for HDF5). No hash or size of the SQLite files is published, so the size is checked against the one that the server announces.

Source, in each of the formats below:
  pixels: [28, 28] float32, 1.0 = paper, 0.0 = ink (or uint8, 255 = paper, 0 = ink: the same values before division by 255).
  label: [] int32, 0-9 digits, 10-35 A-Z, 36-61 a-z.

Loaded:
  x: [28, 28, 1] uint8, 0 = paper, 255 = ink: inverted, as in FedJAX. The code of Reddi et al. (2021) inverts
    for its autoencoder, but not for classification, where 1.0 = paper.
  y: [] int32, the label, unchanged.

Clients are in the order of the file. The names in FedJAX's files start with a hash, which is removed. ``emnist10`` read from
files of all 62 classes keeps the split of these files, which differs from the one that TensorFlow Federated drew for digits
only, and it keeps writers without digits as empty clients.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import ClientStream, FederatedData
from fedsim.datasets._checks import labels
from fedsim.datasets._chosen_clients import OPTIONS, choose_clients
from fedsim.datasets._download import Download
from fedsim.datasets._registry import register
from fedsim.datasets._source import Source, load_converted, read_fedjax
from fedsim.formats import read_leaf, read_tff_hdf5, read_tff_sqlite

_FEDJAX = "https://storage.googleapis.com/gresearch/fedjax/emnist"
_TFF = "https://storage.googleapis.com/tff-datasets-public"
_SPLITS = ("train", "test")
_DIGITS = "digitsonly"


def _read_tff(prefix: str) -> Any:
    shapes = {"pixels": ((28, 28), np.float32), "label": ((), np.int64)}
    return lambda path, split: read_tff_sqlite(path, f"{prefix}_{split}", shapes)


def _read_hdf5(path: Path, split: str) -> ClientStream:
    return read_tff_hdf5(path, ["pixels", "label"])


def _read_leaf(path: Path, split: str) -> ClientStream:
    images = read_leaf(path, {"x": ((28, 28), np.float32), "y": ((), np.int64)})
    return images.map(lambda client_id, examples: {"pixels": examples["x"], "label": examples["y"]})


def _sources(digits: bool) -> list[Source]:
    """The file formats of all classes, or of digits only."""
    infix, excluded = (f"{_DIGITS}_", "") if digits else ("", _DIGITS)
    sqlite = ("emnist_all.sqlite", "emnist_all.sqlite.lzma")
    sha256 = (
        "55333deb8546765427c385710ca5e7301e16f4ed8b60c1dc5ae224b42bd5b14b"
        if digits
        else "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0"
    )
    hdf5 = {split: f"fed_emnist_{infix}{split}.h5" for split in _SPLITS}
    fedjax = {split: f"federated_emnist_{infix}{split}.sqlite" for split in _SPLITS}
    return [
        Source(
            "FedJAX's SQLite",
            {split: (f"*_{infix}{split}.sqlite",) for split in _SPLITS},
            lambda path, split: read_fedjax(path, ["pixels", "label"]),
            excluded,
            [Download(f"{_FEDJAX}/{file}", (file,)) for file in fedjax.values()],
        ),
        Source(
            "TFF's SQLite",
            dict.fromkeys(_SPLITS, sqlite),
            _read_tff("digits_only" if digits else "all"),
            downloads=[Download(f"{_TFF}/emnist_all.sqlite.lzma", sqlite[:1])],
        ),
        Source(
            "TFF's HDF5",
            {split: (f"*_{infix}{split}.h5",) for split in _SPLITS},
            _read_hdf5,
            excluded,
            [Download(f"{_TFF}/fed_emnist{'_digitsonly' if digits else ''}.tar.bz2", tuple(hdf5.values()), sha256)],
        ),
    ]


_LEAF = Source("LEAF's JSON", {split: (f"{split}/",) for split in _SPLITS}, _read_leaf)
_SOURCE_FEATURES = {
    "pixels": "[28, 28] float32 image, 1.0 = paper, 0.0 = ink (or uint8, 255 = paper)",
    "label": "[] int32 character: 0-9 digits, 10-35 A-Z, 36-61 a-z",
}
_LICENCE = "public domain (NIST Special Database 19, a work of the US government); LEAF's code: BSD 2-clause"
_CITATION = (
    "S. Caldas et al. LEAF: a benchmark for federated settings. 2018. https://arxiv.org/abs/1812.01097; "
    "G. Cohen et al. EMNIST: extending MNIST to handwritten letters. IJCNN, 2017. https://arxiv.org/abs/1702.05373"
)


@register(
    "emnist62",
    task="classify 28 by 28 images of 62 characters; each of 3,400 writers is a client",
    features={
        "x": "[28, 28, 1] uint8 image, 0 = paper, 255 = ink",
        "y": "[] int32 character: 0-9 digits, 10-35 A-Z, 36-61 a-z",
    },
    source_features=_SOURCE_FEATURES,
    splits={"train": (3400, 671_585), "test": (3400, 77_483)},
    num_classes=62,
    class_names=string.digits + string.ascii_uppercase + string.ascii_lowercase,
    default_model="emnist_cnn",
    options=OPTIONS,
    source=f"{_FEDJAX}/federated_emnist_train.sqlite and _test.sqlite (no hash or size is published); or TFF's SQLite or "
    "HDF5, or LEAF's JSON",
    licence=_LICENCE,
    citation=_CITATION,
)
def load_emnist62(data: Path | None, cache: Path, *, clients: int | None = None, seed: int = 0) -> dict[str, FederatedData]:
    """Loads train and test from ``data``, or from the cache, into which they are downloaded and converted once.

    Raises:
      FileNotFoundError: ``data`` holds the dataset in none of its formats.
      FormatError: a file is damaged, or its features have other shapes or dtypes.
      ValueError: ``clients`` exceeds the number of clients.
      DownloadError: the files could not be downloaded; the message says what to do instead.
    """
    checks.whole(1, or_none=True, clients=clients)
    splits = load_converted("emnist62", data, cache, [*_sources(digits=False), _LEAF], _inverted)
    return choose_clients("emnist62", splits, clients, seed, cache)


@register(
    "emnist10",
    task="classify 28 by 28 images of digits; each of 3,383 writers is a client",
    features={"x": "[28, 28, 1] uint8 image, 0 = paper, 255 = ink", "y": "[] int32 the digit"},
    source_features=_SOURCE_FEATURES,
    splits={"train": (3383, 341_873), "test": (3383, 40_832)},
    num_classes=10,
    default_model="emnist_cnn(num_classes=10)",
    options=OPTIONS,
    source=f"{_FEDJAX}/federated_emnist_digitsonly_train.sqlite and _test.sqlite (no hash or size is published); or TFF's "
    "SQLite or HDF5; or the digits in files of all classes",
    licence=_LICENCE,
    citation=_CITATION,
)
def load_emnist10(data: Path | None, cache: Path, *, clients: int | None = None, seed: int = 0) -> dict[str, FederatedData]:
    """Loads train and test; see `load_emnist62`. ``data`` may also hold files of all 62 classes."""
    checks.whole(1, or_none=True, clients=clients)
    sources = _sources(digits=True)
    if data is not None:
        sources += [*_sources(digits=False), _LEAF]
    splits = load_converted("emnist10", data, cache, sources, _inverted_digits)
    return choose_clients("emnist10", splits, clients, seed, cache)


def _inverted_digits(client_id: str, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    inverted = _inverted(client_id, examples)
    digits = inverted["y"] < 10
    return {name: column[digits] for name, column in inverted.items()}


def _inverted(client_id: str, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    pixels, label = examples["pixels"], examples["label"]
    if pixels.shape[1:] != (28, 28) or label.shape[1:] != ():
        raise ValueError(
            f"Client {client_id!r} has pixels {list(pixels.shape[1:])} and label {list(label.shape[1:])} per example: "
            "expected [28, 28] and []."
        )
    if pixels.dtype.kind == "f":
        # Written as a negation so that a NaN fails, too.
        if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError(
                f"Feature 'pixels' of client {client_id!r} has values from {pixels.min()} to {pixels.max()}: floats "
                "must be in [0, 1], where 1 is paper."
            )
        pixels = np.rint(pixels * 255).astype(np.uint8)
    elif pixels.dtype != np.uint8:
        raise ValueError(f"Feature 'pixels' of client {client_id!r} is {pixels.dtype}: expected uint8 or floats.")
    return {"x": (255 - pixels)[..., np.newaxis], "y": labels(client_id, "label", label, 62)}
