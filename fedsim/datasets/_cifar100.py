"""Federated CIFAR-100: 60,000 colour images of 100 kinds of things, over 500 + 100 clients by the Pachinko allocation.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html.
The partition is that of S. Reddi et al., "Adaptive federated optimization", ICLR 2021, https://arxiv.org/abs/2003.00295,
appendix F: 100 images a client, drawn by a Dirichlet(0.1) over the 20 coarse labels and a Dirichlet(10) over the fine ones
in each. Clients of test are others than those of train, though both are called by numbers from 0.

Files are TensorFlow Federated's; hash and size of the SQLite archive are those that FedJAX checks
(fedjax/datasets/cifar100.py), the hash of the HDF5 archive is TensorFlow Federated's own (simulation/datasets/cifar100.py
up to 2021).

Source:
  image: [32, 32, 3] uint8 (SQLite: int64) red, green, blue.
  label: [] int64 fine label, 0-99.
  coarse_label: [] int64, 0-19; not loaded.

Loaded:
  x: [32, 32, 3] uint8 red, green, blue.
  y: [] int32 fine label, 0-99.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim.data import FederatedData
from fedsim.datasets._checks import images, labels
from fedsim.datasets._download import Download
from fedsim.datasets._registry import register
from fedsim.datasets._source import Source, load_converted
from fedsim.formats import read_tff_hdf5, read_tff_sqlite

_TFF = "https://storage.googleapis.com/tff-datasets-public"
_SPLITS = ("train", "test")
_SHAPES = {"image": ((32, 32, 3), np.uint8), "label": ((), np.int64)}

_SOURCES = [
    Source(
        "TFF's SQLite",
        dict.fromkeys(_SPLITS, ("cifar100.sqlite", "cifar100.sqlite.lzma")),
        lambda path, split: read_tff_sqlite(path, split, _SHAPES),
        downloads=[
            Download(
                f"{_TFF}/cifar100.sqlite.lzma",
                ("cifar100.sqlite",),
                "23d3916c9caa33395737ee560cc7cb77bbd05fc7b73647ee7be3a7e764172939",
                153_019_920,
            )
        ],
    ),
    Source(
        "TFF's HDF5",
        {split: (f"*cifar100_{split}.h5",) for split in _SPLITS},
        lambda path, split: read_tff_hdf5(path, list(_SHAPES)),
        downloads=[
            Download(
                f"{_TFF}/fed_cifar100.tar.bz2",
                ("fed_cifar100_train.h5", "fed_cifar100_test.h5"),
                "e8575e22c038ecef1ce6c7d492d7abee7da13b1e1ba9b70a7fc18531ba7590de",
            )
        ],
    ),
]


@register(
    "cifar100",
    task="tell which of 100 things a 32 by 32 colour image shows; 500 clients of 100 images, others for test",
    features={"x": "[32, 32, 3] uint8 red, green, blue", "y": "[] int32 fine label, 0-99"},
    source_features={
        "image": "[32, 32, 3] uint8 (SQLite: int64) red, green, blue",
        "label": "[] int64 fine label, 0-99",
        "coarse_label": "[] int64 coarse label, 0-19, not loaded",
    },
    splits={"train": (500, 50_000), "test": (100, 10_000)},
    num_classes=100,
    default_model="cifar100_resnet18",
    source=f"{_TFF}/cifar100.sqlite.lzma; or TFF's HDF5",
    download_bytes=153_019_920,
    licence="not stated (its authors ask for the citation); TFF's partition: Apache 2.0",
    citation="A. Krizhevsky. Learning multiple layers of features from tiny images. 2009. "
    "https://www.cs.toronto.edu/~kriz/cifar.html; S. Reddi et al. Adaptive federated optimization. ICLR, 2021. "
    "https://arxiv.org/abs/2003.00295 (the partition)",
)
def load_cifar100(data: Path | None, cache: Path) -> dict[str, FederatedData]:
    """The two splits, from ``data``, or from the cache, fetched and converted into it once.

    Raises:
      FileNotFoundError: ``data`` has none of the forms.
      FormatError: a file that is damaged, or whose features break the contract.
      DownloadError: nothing could be fetched; says the ways out.
    """
    return load_converted("cifar100", data, cache, _SOURCES, _columns)


def _columns(client_id: str, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        "x": images(client_id, "image", examples["image"], (32, 32, 3)),
        "y": labels(client_id, "label", examples["label"], 100),
    }
