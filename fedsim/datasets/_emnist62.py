"""Federated EMNIST with 62 classes: characters by 3,400 writers, a client each.

S. Caldas et al., "LEAF: a benchmark for federated settings", 2018, https://arxiv.org/abs/1812.01097, made from G. Cohen
et al., "EMNIST: extending MNIST to handwritten letters", IJCNN 2017, https://arxiv.org/abs/1702.05373. Split and files
are TensorFlow Federated's: 671,585 images to train on and 77,483 for test, every writer in both.

The archive's address and its SHA-256 are those that TensorFlow Federated published in its own loader
(tensorflow_federated/python/simulation/datasets/emnist/load_data.py, up to 2021). It published no byte count; what the
server announces is checked instead.

Source, /examples/<writer>/<feature> in fed_emnist_train.h5 and fed_emnist_test.h5:
  pixels: [28, 28] float32, 1.0 = paper, 0.0 = ink (or uint8, 255 = paper, 0 = ink: the same, not yet divided).
  label: [] int32, 0-9 digits, 10-35 A-Z, 36-61 a-z.

Loaded:
  x: [28, 28, 1] uint8, 0 = paper, 255 = ink: the other way round, as Reddi et al. (2021) and FedJAX train on it.
  y: [] int32, the label, as it was.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim.data import FederatedData
from fedsim.datasets import _download
from fedsim.datasets._registry import register
from fedsim.formats import read_tff_hdf5

URL = "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2"
SHA256 = "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0"
_MEMBERS = ("fed_emnist_train.h5", "fed_emnist_test.h5")


@register(
    "emnist62",
    task="tell which of 62 characters a 28 by 28 image shows; 3,400 writers, a client each",
    features={
        "x": "[28, 28, 1] uint8 image, 0 = paper, 255 = ink",
        "y": "[] int32 character: 0-9 digits, 10-35 A-Z, 36-61 a-z",
    },
    source_features={
        "pixels": "[28, 28] float32 image, 1.0 = paper, 0.0 = ink (or uint8, 255 = paper)",
        "label": "[] int32 character: 0-9 digits, 10-35 A-Z, 36-61 a-z",
    },
    num_classes=62,
    default_model="emnist_cnn",
    source=URL,
    licence="images: NIST Special Database 19, a work of the US government; LEAF's code: BSD 2-clause",
    citation="S. Caldas et al. LEAF: a benchmark for federated settings. 2018. https://arxiv.org/abs/1812.01097; "
    "G. Cohen et al. EMNIST: extending MNIST to handwritten letters. IJCNN, 2017. https://arxiv.org/abs/1702.05373",
)
def load_emnist62(data: Path | None, cache: Path) -> tuple[FederatedData, FederatedData]:
    """The two splits: from ``data``'s ``*_train.h5`` and ``*_test.h5``, or from the cache, fetched into it once.

    Raises:
      FileNotFoundError: ``data`` has not exactly one file of each kind.
      ValueError: a file that is not HDF5, truncated, not in TFF's layout, or whose features break the contract.
      DownloadError: the archive could not be fetched; says the two ways out.
    """
    folder = _fetched(cache) if data is None else data
    return _read(_only(folder, "*_train.h5")), _read(_only(folder, "*_test.h5"))


def _fetched(cache: Path) -> Path:
    archive = cache / URL.rpartition("/")[2]
    try:
        _download.fetch_members(URL, cache, _MEMBERS, sha256=SHA256)
    except _download.DownloadError as error:
        raise _download.DownloadError(
            f"Could not fetch 'emnist62': {error} Two ways out: give a folder with TFF-layout files *_train.h5 and "
            f"*_test.h5 (--data DIR, or data=DIR in Python); or fetch {URL} by hand and put it at {archive}."
        ) from None
    return cache


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) == 1:
        return found[0]
    present = [path.name for path in found] or sorted(path.name for path in folder.iterdir())[:20]
    raise FileNotFoundError(
        f"Expected exactly one file {pattern} in {folder}, found {len(found)}; "
        f"{'they are' if found else 'the folder holds'} {', '.join(present) or 'nothing'}."
    )


def _read(path: Path) -> FederatedData:
    return read_tff_hdf5(path, ["pixels", "label"]).map(_inked).load()


def _inked(client_id: str, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    pixels, label = examples["pixels"], examples["label"]
    if pixels.shape[1:] != (28, 28) or label.shape[1:] != ():
        raise ValueError(
            f"Client {client_id!r} has pixels {list(pixels.shape[1:])} and label {list(label.shape[1:])} per example: "
            "expected [28, 28] and []."
        )
    if label.dtype.kind not in "iu":
        raise ValueError(f"Feature 'label' of client {client_id!r} is {label.dtype}: expected integers.")
    if label.size and not (label.min() >= 0 and label.max() < 2**31):
        raise ValueError(f"Client {client_id!r} has labels from {label.min()} to {label.max()}: expected 0 to 61.")
    if pixels.dtype.kind == "f":
        # Written so that a NaN fails too.
        if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
            raise ValueError(
                f"Feature 'pixels' of client {client_id!r} reaches from {pixels.min()} to {pixels.max()}: floats must "
                "lie in [0, 1], 1 = paper."
            )
        pixels = np.rint(pixels * 255).astype(np.uint8)
    elif pixels.dtype != np.uint8:
        raise ValueError(f"Feature 'pixels' of client {client_id!r} is {pixels.dtype}: expected uint8 or floats.")
    return {"x": (255 - pixels)[..., np.newaxis], "y": label.astype(np.int32)}
