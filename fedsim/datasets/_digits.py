"""Handwritten digits: the 1,797 images that come with scikit-learn, divided among 100 clients with label skew.

E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49. scikit-learn contains the repository's test images. The writers of the images are not
recorded, so the clients are made by a partitioner, by default with Dirichlet(0.3) label skew, which follows T.-M. H. Hsu, H. Qi
and M. Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
https://arxiv.org/abs/1909.06335.

Source:
  images: [8, 8] float64, whole numbers, 0 = paper to 16 = ink.
  target: [] int64, the digit.

Loaded:
  x: [8, 8, 1] uint8, 0 = paper to 16 = ink.
  y: [] int32, the digit.

Both splits have the same clients, and each client's own images are divided into train and test such that both have the
client's label shares, as closely as whole numbers allow (early versions of 0.1 divided them at random, so figures from then
differ). A client with n images uses (n + 2) // 5 of them for test by default, which leaves at least one for training; with
one or two images, it has none for test. The default clients are small, 18 images on average, so their label shares in train
and test still differ by 0.65 on average (`fedsim.heterogeneity.split_distance`). To compare personal models, use fewer
clients and more test images: ``digits(clients=50, alpha=0.1, test_fraction=0.3)``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.datasets import _checks
from fedsim.datasets._partitioned import OPTIONS, check_partition, partition_dataset
from fedsim.datasets._registry import register

_ALPHA = 0.3


@register(
    "digits",
    task="classify 8 by 8 images of handwritten digits; 100 clients, Dirichlet(0.3) label skew, or another partition",
    features={"x": "[8, 8, 1] uint8 image, 0 = paper, 16 = ink", "y": "[] int32 the digit"},
    source_features={"images": "[8, 8] float64 image, 0 = paper, 16 = ink", "target": "[] int64 the digit"},
    splits={"train": (100, 1439), "test": (100, 358)},
    num_classes=10,
    default_model="digits_dense",
    options=OPTIONS
    | {
        "test_fraction": "fraction of each client's own images used for test",
        "...": OPTIONS["..."].replace("alpha=0.5", f"alpha={_ALPHA}"),
    },
    source="sklearn.datasets.load_digits: the test images of UCI's optdigits; no download",
    download_bytes=0,
    licence="CC BY 4.0 (UCI Machine Learning Repository)",
    citation="E. Alpaydin and C. Kaynak. Optical recognition of handwritten digits. UCI Machine Learning Repository, "
    "1998. https://doi.org/10.24432/C50P49",
)
def load_digits(
    data: Path | None,
    cache: Path,
    *,
    partition: str = "dirichlet",
    clients: int = 100,
    seed: int = 0,
    test_fraction: float = 0.2,
    **partition_options: Any,
) -> dict[str, FederatedData]:
    """Loads train and test, which have the same clients with the same label shares.

    Raises:
      ValueError: a folder ``data`` is given, there is no such partition, or it has no such option.
      ImportError: scikit-learn is not installed.
    """
    del cache
    _checks.no_folder("digits", data)
    check_partition(partition, partition_options, clients=clients, test_fraction=test_fraction)
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("The dataset 'digits' comes with scikit-learn: pip install scikit-learn.") from error
    images, target = datasets.load_digits(return_X_y=True)
    columns = {"x": images.reshape(-1, 8, 8, 1).astype(np.uint8), "y": target.astype(np.int32)}
    if partition.startswith("dirichlet"):
        partition_options.setdefault("alpha", _ALPHA)
    return partition_dataset(
        {"all": columns}, partition, clients=clients, seed=seed, test_fraction=test_fraction, **partition_options
    )
