"""Federated CIFAR-100: 60,000 colour images of 100 classes, divided among 500 + 100 clients by Pachinko allocation.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html.
The partition is that of S. Reddi et al., "Adaptive federated optimization", ICLR 2021, https://arxiv.org/abs/2003.00295,
appendix F: 100 images per client, drawn by Dirichlet(0.1) over the 20 coarse labels and Dirichlet(10) over the fine labels
below each. The clients of test are not those of train, although both are named by numbers from 0 in the files, so the ids of
test begin with ``test_`` here. So personal models of the training clients cannot be evaluated on test;
`fedsim.partitioners.split_within_clients` divides the training clients' images.

The files are TensorFlow Federated's. The hash and size of the SQLite archive are those that FedJAX checks
(fedjax/datasets/cifar100.py); the hash of the HDF5 archive is TensorFlow Federated's own (simulation/datasets/cifar100.py
up to 2021).

Source:
  image: [32, 32, 3] uint8 (SQLite: int64) red, green, blue.
  label: [] int64 fine label, 0-99.
  coarse_label: [] int64 coarse label, 0-19; not loaded.

Loaded:
  x: [32, 32, 3] uint8 red, green, blue.
  y: [] int32 fine label, 0-99.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.datasets._checks import images, labels
from fedsim.datasets._chosen_clients import OPTIONS, choose_clients
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
    task="classify 32 by 32 colour images, 100 classes; 500 clients with 100 images each, and 100 other clients for test",
    features={"x": "[32, 32, 3] uint8 red, green, blue", "y": "[] int32 fine label, 0-99"},
    source_features={
        "image": "[32, 32, 3] uint8 (SQLite: int64) red, green, blue",
        "label": "[] int64 fine label, 0-99",
        "coarse_label": "[] int64 coarse label, 0-19, not loaded",
    },
    splits={"train": (500, 50_000), "test": (100, 10_000)},
    num_classes=100,
    default_model="cifar100_resnet18",
    options=OPTIONS | {"clients": f"{OPTIONS['clients']}; test keeps the same proportion of its own clients"},
    source=f"{_TFF}/cifar100.sqlite.lzma; or TFF's HDF5",
    download_bytes=153_019_920,
    licence="not stated (the authors ask for a citation); TFF's partition: Apache 2.0",
    citation="A. Krizhevsky. Learning multiple layers of features from tiny images. 2009. "
    "https://www.cs.toronto.edu/~kriz/cifar.html; S. Reddi et al. Adaptive federated optimization. ICLR, 2021. "
    "https://arxiv.org/abs/2003.00295 (the partition)",
)
def load_cifar100(data: Path | None, cache: Path, *, clients: int | None = None, seed: int = 0) -> dict[str, FederatedData]:
    """Loads train and test from ``data``, or from the cache, into which they are downloaded and converted once.

    Raises:
      FileNotFoundError: ``data`` holds the dataset in none of its formats.
      FormatError: a file is damaged, or its features have other shapes or dtypes.
      ValueError: ``clients`` exceeds the number of clients.
      DownloadError: the files could not be downloaded; the message says what to do instead.
    """
    checks.whole(1, or_none=True, clients=clients)
    splits = load_converted("cifar100", data, cache, _SOURCES, _columns)
    return choose_clients("cifar100", splits, clients, seed, cache, same_clients=())


def _columns(client_id: str, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        "x": images(client_id, "image", examples["image"], (32, 32, 3)),
        "y": labels(client_id, "label", examples["label"], 100),
    }
