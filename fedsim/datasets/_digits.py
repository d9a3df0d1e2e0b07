"""Handwritten digits, embedded: the 1,797 images that come with scikit-learn, over 100 clients with label skew.

E. Alpaydin and C. Kaynak, "Optical recognition of handwritten digits", UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49. scikit-learn carries the repository's test part. Who wrote which image is not
recorded, so the partition over clients is drawn, with alpha = 0.3, as in T.-M. H. Hsu, H. Qi and M. Brown, "Measuring
the effects of non-identical data distribution for federated visual classification", 2019,
https://arxiv.org/abs/1909.06335.

Source:
  images: [8, 8] float64, whole numbers, 0 = paper to 16 = ink.
  target: [] int64, the digit.

Loaded:
  x: [8, 8, 1] uint8, 0 = paper to 16 = ink.
  y: [] int32, the digit.

Both splits have the same 100 clients, so that a model can be measured on each client's own kind of data. A client with
n images keeps (n + 2) // 5 of them for test, which leaves at least one to train on; with one or two, it tests on none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsim import rng
from fedsim.data import FederatedData
from fedsim.datasets._registry import register
from fedsim.partitioners import dirichlet

_CLIENTS, _ALPHA, _SEED = 100, 0.3, 0


@register(
    "digits",
    task="tell which of ten digits an 8 by 8 image shows; 100 clients, Dirichlet(0.3) label skew",
    features={"x": "[8, 8, 1] uint8 image, 0 = paper, 16 = ink", "y": "[] int32 the digit"},
    source_features={"images": "[8, 8] float64 image, 0 = paper, 16 = ink", "target": "[] int64 the digit"},
    splits={"train": (100, 1439), "test": (100, 358)},
    num_classes=10,
    default_model="digits_dense",
    source="sklearn.datasets.load_digits: the test part of UCI's optdigits; no download",
    download_bytes=0,
    licence="CC BY 4.0 (UCI Machine Learning Repository)",
    citation="E. Alpaydin and C. Kaynak. Optical recognition of handwritten digits. UCI Machine Learning Repository, "
    "1998. https://doi.org/10.24432/C50P49",
)
def load_digits(data: Path | None, cache: Path) -> dict[str, FederatedData]:
    """The two splits, the same whenever they are loaded.

    Raises:
      ValueError: a folder ``data`` is given, and nothing would be read from it.
      ImportError: scikit-learn is not installed.
    """
    del cache
    if data is not None:
        raise ValueError(f"The dataset 'digits' is embedded and reads no folder, got data={str(data)!r}: leave it out.")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("The dataset 'digits' comes with scikit-learn: pip install scikit-learn.") from error
    images, target = datasets.load_digits(return_X_y=True)
    columns = {"x": images.reshape(-1, 8, 8, 1).astype(np.uint8), "y": target.astype(np.int32)}
    words = np.asarray(rng.words(rng.stream(rng.root(_SEED), "split")))
    train, test = [], []
    for client, rows in enumerate(dirichlet(columns["y"], clients=_CLIENTS, alpha=_ALPHA, seed=_SEED)):
        shuffled = rows[rng.permute(words, client, len(rows), np.arange(len(rows)), np)]
        held_out = (len(rows) + 2) // 5
        test.append(np.sort(shuffled[:held_out]))
        train.append(np.sort(shuffled[held_out:]))
    return {"train": FederatedData.from_partition(columns, train), "test": FederatedData.from_partition(columns, test)}
