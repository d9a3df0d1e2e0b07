"""CIFAR-10: 60,000 colour images of ten classes, divided among clients by a partitioner.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009, https://www.cs.toronto.edu/~kriz/cifar.html.
The default partition, Dirichlet label skew with 100 clients, follows T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the
effects of non-identical data distribution for federated visual classification", 2019, https://arxiv.org/abs/1909.06335.

The address, hash and size are those that TensorFlow Datasets publishes (url_checksums/cifar10.txt).

Source, data_batch_1.bin to data_batch_5.bin and test_batch.bin, 10,000 records of 3,073 bytes each:
  label: [] uint8.
  image: [3, 32, 32] uint8 red, green, blue.

Loaded:
  x: [32, 32, 3] uint8 red, green, blue.
  y: [] int32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FederatedData, FormatError
from fedsim.datasets._checks import labels
from fedsim.datasets._download import Download
from fedsim.datasets._partitioned import OPTIONS, check_partition, partition_dataset
from fedsim.datasets._registry import register
from fedsim.datasets._source import Source, locate

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_NUM_BYTES = 170_052_171
_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_ALL = tuple(name for names in _FILES.values() for name in names)
_SOURCE = Source(
    "CIFAR-10's binary files",
    {name: (name,) for name in _ALL},
    downloads=[Download(_URL, _ALL, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", _NUM_BYTES)],
)
_RECORD = 1 + 3 * 32 * 32


@register(
    "cifar10",
    task="classify 32 by 32 colour images, ten classes; 100 clients, Dirichlet(0.5) label skew, or another partition",
    features={"x": "[32, 32, 3] uint8 red, green, blue", "y": "[] int32 class, 0-9"},
    source_features={"image": "[3, 32, 32] uint8 red, green, blue", "label": "[] uint8 class, 0-9"},
    splits={"train": (100, 50_000), "test": (100, 10_000)},
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    num_classes=10,
    default_model="cifar10_cnn",
    options=OPTIONS,
    source=_URL,
    download_bytes=_NUM_BYTES,
    licence="not stated (the authors ask for a citation)",
    citation="A. Krizhevsky. Learning multiple layers of features from tiny images. 2009. "
    "https://www.cs.toronto.edu/~kriz/cifar.html",
)
def load_cifar10(
    data: Path | None,
    cache: Path,
    *,
    partition: str = "dirichlet",
    clients: int = 100,
    seed: int = 0,
    test_fraction: float | None = None,
    **partition_options: Any,
) -> dict[str, FederatedData]:
    """Loads train and test, which have the same clients with the same label shares.

    Raises:
      FileNotFoundError: ``data`` lacks one of the six files.
      FormatError: a file is damaged.
      ValueError: there is no such partition, or it has no such option.
      DownloadError: the files could not be downloaded; the message says what to do instead.
    """
    check_partition(partition, partition_options, clients=clients, test_fraction=test_fraction)
    _, files = locate("cifar10", data, cache, [_SOURCE])
    read = {name: _read(path) for name, path in files.items()}
    splits = {
        split: {feature: np.concatenate([read[name][feature] for name in names]) for feature in ("x", "y")}
        for split, names in _FILES.items()
    }
    return partition_dataset(splits, partition, clients=clients, seed=seed, test_fraction=test_fraction, **partition_options)


def _read(path: Path) -> dict[str, np.ndarray]:
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % _RECORD:
        raise FormatError(
            f"{path} has {len(content)} bytes, which is not a multiple of {_RECORD}: it is cut off, or not a file of CIFAR-10."
        )
    records = content.reshape(-1, _RECORD)
    try:
        y = labels(path.name, "label", records[:, 0], 10)
    except ValueError as error:
        raise FormatError(f"{path}: {error}".replace("client ", "file ")) from None
    return {"x": np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), "y": y}
