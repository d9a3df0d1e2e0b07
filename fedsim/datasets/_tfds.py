"""Any dataset of TensorFlow Datasets by its name, divided among clients by a feature of the data or by a partitioner.

https://www.tensorflow.org/datasets/catalog lists the datasets. They are read without TensorFlow. TensorFlow Datasets prepares a
dataset at first use and may need TensorFlow for that (see `fedsim.formats.arrays_from_tfds`).

Loaded:
  x: the feature named by the option ``x``, by default ``image``, unchanged.
  y: the feature named by the option ``y``, by default ``label``; integers become int32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.datasets._chosen_clients import choose_clients
from fedsim.datasets._partitioned import OPTIONS, check_partition, partition_dataset
from fedsim.datasets._registry import register
from fedsim.formats import arrays_from_tfds, read_tfds


@register(
    "tfds:NAME",
    task="any dataset of TensorFlow Datasets, e.g. 'tfds:cifar10(clients=100, alpha=0.1)'; 100 clients, Dirichlet label skew",
    features={},
    source_features={"image, label": "or the features that the options x and y name; see the dataset's page"},
    options=OPTIONS
    | {
        "partition": f"{OPTIONS['partition']}; default: dirichlet, unless client is given",
        "x": "feature that becomes x",
        "y": "feature that becomes y",
        "train": "split for training, or a slice of one: 'train[:1000]'",
        "test": "split for test",
        "client": "feature that names the client of each example; used instead of a partition",
        "clients": "number of clients; None: 100, or all if client is given",
        "seed": "seed of the partition, or of the draw of clients",
    },
    source="https://www.tensorflow.org/datasets/catalog; data=DIR is its data_dir",
    licence="see the dataset's page",
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
    partition: str = "",
    clients: int | None = None,
    seed: int = 0,
    test_fraction: float | None = None,
    **partition_options: Any,
) -> dict[str, FederatedData]:
    """Loads train and test of the dataset ``name``. With a partition, both have the same clients with the same label shares.

    Raises:
      ImportError: tensorflow-datasets is not installed.
      ValueError: there is no such dataset, split, feature, partition or option, or an option would have no effect.
      FormatError: a file is damaged.
    """
    checks.whole(1, or_none=True, clients=clients)
    folder = cache if data is None else data
    chosen = {"train": train, "test": test}
    if client:
        if partition or test_fraction is not None or partition_options:
            raise ValueError(
                f"client={client!r} takes no partition, none of its options and no test_fraction: leave them out, or leave out "
                "client."
            )
        streams = {split: read_tfds(name, part, [x, y], client=client, data_dir=folder) for split, part in chosen.items()}
        splits = {split: stream.map(lambda _, examples: _columns(examples, x, y)).load() for split, stream in streams.items()}
        return choose_clients(f"tfds:{name}", splits, clients, seed, cache)
    partition = partition or "dirichlet"
    check_partition(partition, partition_options, clients=clients, test_fraction=test_fraction)
    arrays = {split: arrays_from_tfds(name, part, [x, y], data_dir=folder) for split, part in chosen.items()}
    columns = {split: _columns(examples, x, y) for split, examples in arrays.items()}
    return partition_dataset(
        columns, partition, clients=clients or 100, seed=seed, test_fraction=test_fraction, **partition_options
    )


def _columns(examples: dict[str, np.ndarray], x: str, y: str) -> dict[str, np.ndarray]:
    label = examples[y]
    return {"x": examples[x], "y": label.astype(np.int32) if label.dtype.kind in "iu" else label}
