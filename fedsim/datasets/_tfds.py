"""Any dataset of TensorFlow Datasets, by its name there: split over clients by a feature that names them, or by a partitioner.

https://www.tensorflow.org/datasets/catalog lists them. They are read without TensorFlow; preparing one for the first time is
done by TensorFlow Datasets, which may need TensorFlow for it (`fedsim.formats.arrays_from_tfds` says when).

Loaded:
  x: the feature ``x``, an image by default, as it is.
  y: the feature ``y``, a label by default; whole numbers become int32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FederatedData
from fedsim.datasets._partitioned import OPTIONS, find_partitioner, partitioned
from fedsim.datasets._registry import register
from fedsim.formats import arrays_from_tfds, read_tfds


@register(
    "tfds:NAME",
    task="any dataset of TensorFlow Datasets, e.g. 'tfds:cifar10(clients=100, alpha=0.1)'; 100 clients, Dirichlet label skew",
    features={},
    source_features={"image, label": "or whatever x and y name: see the dataset's page"},
    options=OPTIONS
    | {
        "x": "the feature that becomes x",
        "y": "the feature that becomes y",
        "train": "the split to learn from, also a part of one: 'train[:1000]'",
        "test": "the split to measure on",
        "client": "the feature that names each example's client, instead of a partition",
    },
    source="https://www.tensorflow.org/datasets/catalog; data=DIR is its data_dir",
    licence="see its page",
    citation="the dataset's own; TensorFlow Datasets, a collection of ready-to-use datasets. https://www.tensorflow.org/datasets",
)
def load_tfds(
    data: Path | None,
    cache: Path,
    *,
    name: str,
    x: str = "image",
    y: str = "label",
    train: str = "train",
    test: str = "test",
    client: str = "",
    partition: str = "dirichlet",
    clients: int = 100,
    seed: int = 0,
    **partition_options: Any,
) -> dict[str, FederatedData]:
    """Two splits of the dataset ``name``.

    Raises:
      ImportError: tensorflow-datasets is not installed.
      ValueError: no such dataset, split, feature, partition or option.
      FormatError: a damaged file.
    """
    folder = cache if data is None else data
    chosen = {"train": train, "test": test}
    if client:
        streams = {split: read_tfds(name, part, [x, y], client=client, data_dir=folder) for split, part in chosen.items()}
        return {split: stream.map(lambda _, examples: _columns(examples, x, y)).load() for split, stream in streams.items()}
    find_partitioner(partition, partition_options)
    arrays = {split: arrays_from_tfds(name, part, [x, y], data_dir=folder) for split, part in chosen.items()}
    columns = {split: _columns(examples, x, y) for split, examples in arrays.items()}
    return partitioned(columns, partition, clients=clients, seed=seed, **partition_options)


def _columns(examples: dict[str, np.ndarray], x: str, y: str) -> dict[str, np.ndarray]:
    label = examples[y]
    return {"x": examples[x], "y": label.astype(np.int32) if label.dtype.kind in "iu" else label}
