"""MNIST and Fashion-MNIST: 70,000 grey images of ten classes, divided among clients by a partitioner or by MNIST's writers.

Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", Proceedings of the
IEEE 86(11), 1998. H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", 2017, https://arxiv.org/abs/1708.07747. The default
partition of MNIST, 2 shards for each of 100 clients, is that of B. McMahan et al., "Communication-efficient learning of
deep networks from decentralized data", AISTATS 2017, https://arxiv.org/abs/1602.05629. The writers are those identified by
C. Yadav and L. Bottou, "Cold case: the lost MNIST digits", NeurIPS 2019, https://arxiv.org/abs/1905.10498.

The addresses, hashes and sizes are those that TensorFlow Datasets publishes (url_checksums/mnist.txt, fashion_mnist.txt).

Source, four idx files, compressed by gzip or not:
  images: [28, 28] uint8, 0 = background, 255 = ink.
  labels: [] uint8.

Loaded:
  x: [28, 28, 1] uint8, unchanged.
  y: [] int32.

With ``partition="writers"`` each writer is a client. This needs the file ``mnist_writer_ids.npz`` in the user's folder, with
the integer arrays ``train_writer [60000]`` and ``test_writer [10000]``. The writers of test are not those of train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import FederatedData, FormatError
from fedsim.datasets._archive import read_arrays
from fedsim.datasets._checks import images, labels
from fedsim.datasets._chosen_clients import choose_clients
from fedsim.datasets._download import Download
from fedsim.datasets._partitioned import OPTIONS, check_partition, partition_dataset
from fedsim.datasets._registry import register
from fedsim.datasets._source import Source, locate
from fedsim.formats import read_idx

_FILES = {"train": "train", "test": "t10k"}
_KINDS = {"images": "images-idx3-ubyte", "labels": "labels-idx1-ubyte"}
_WRITERS = "mnist_writer_ids.npz"

# SHA-256 and size in bytes of the images and labels of train, then of test.
_MNIST = (
    ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
    ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
    ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
    ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
)
_FASHION = (
    ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
    ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
    ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
    ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
)
_MNIST_URL = "https://storage.googleapis.com/cvdf-datasets/mnist"
_FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_FEATURES = {"x": "[28, 28, 1] uint8 image, 0 = background, 255 = ink", "y": "[] int32 class, 0-9"}
_SOURCE_FEATURES = {"images": "[28, 28] uint8 image, 0 = background, 255 = ink", "labels": "[] uint8 class, 0-9"}


def _source(url: str, known: tuple[tuple[str, int], ...]) -> Source:
    names = {f"{split} {kind}": f"{file}-{suffix}" for split, file in _FILES.items() for kind, suffix in _KINDS.items()}
    return Source(
        "idx files",
        {what: (f"{name}.gz", name, name.replace("-idx", ".idx")) for what, name in names.items()},
        downloads=[
            Download(f"{url}/{name}.gz", (f"{name}.gz",), sha256, num_bytes)
            for name, (sha256, num_bytes) in zip(names.values(), known, strict=True)
        ],
    )


def _arrays(name: str, source: Source, data: Path | None, cache: Path) -> dict[str, dict[str, np.ndarray]]:
    _, files = locate(name, data, cache, [source])
    splits = {}
    for split in _FILES:
        x, y = read_idx(files[f"{split} images"]), read_idx(files[f"{split} labels"])
        if len(x) != len(y):
            raise FormatError(f"{files[f'{split} images']} has {len(x)} images and {files[f'{split} labels']} {len(y)} labels.")
        try:
            splits[split] = {"x": images(split, "images", x, (28, 28))[..., np.newaxis], "y": labels(split, "labels", y, 10)}
        except ValueError as error:
            raise FormatError(f"{files[f'{split} images'].parent}: {error}".replace("client ", "split ")) from None
    return splits


@register(
    "mnist",
    task="classify 28 by 28 images of digits; 100 clients with 2 shards each, another partition, or the real writers",
    features=_FEATURES,
    source_features=_SOURCE_FEATURES,
    splits={"train": (100, 60_000), "test": (100, 10_000)},
    num_classes=10,
    default_model="mnist_cnn",
    options=OPTIONS
    | {
        "partition": f"{OPTIONS['partition']}; or writers, with data=DIR that holds {_WRITERS}",
        "clients": "number of clients; None: 100, or all writers, of which a smaller number is drawn at random (of test, whose "
        "writers are others, with ids that begin with test_ if their numbers occur in train, too, the same proportion)",
        "seed": "seed of the partition, or of the draw of writers",
    },
    source=f"{_MNIST_URL}/train-images-idx3-ubyte.gz and three more",
    download_bytes=sum(num_bytes for _, num_bytes in _MNIST),
    licence="CC BY-SA 3.0",
    citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-based learning applied to document recognition. "
    "Proceedings of "
    "the IEEE 86(11), 1998; B. McMahan et al. Communication-efficient learning of deep networks from decentralized "
    "data. AISTATS, "
    "2017. https://arxiv.org/abs/1602.05629 (the partition); C. Yadav, L. Bottou. Cold case: the lost MNIST digits. "
    "NeurIPS, 2019. "
    "https://arxiv.org/abs/1905.10498 (the writers)",
)
def load_mnist(
    data: Path | None,
    cache: Path,
    *,
    partition: str = "shards",
    clients: int | None = None,
    seed: int = 0,
    test_fraction: float | None = None,
    **partition_options: Any,
) -> dict[str, FederatedData]:
    """Loads train and test. Unless clients are writers, both have the same clients with the same label shares.

    Raises:
      FileNotFoundError: ``data`` lacks one of the four files, or the file of writers that the option needs.
      FormatError: a file is damaged, or does not fit the others.
      ValueError: there is no such partition, it has no such option, or ``clients`` exceeds the number of writers.
      DownloadError: the files could not be downloaded; the message says what to do instead.
    """
    checks.whole(1, or_none=True, clients=clients)
    if partition != "writers":
        check_partition(partition, partition_options, clients=clients, test_fraction=test_fraction)
    elif test_fraction is not None or partition_options:
        raise ValueError("partition='writers' takes no test_fraction and no options of a partition: leave them out.")
    splits = _arrays("mnist", _source(_MNIST_URL, _MNIST), data, cache)
    if partition == "writers":
        by_writer = _by_writer(splits, cache if data is None else data)
        return choose_clients("mnist", by_writer, clients, seed, cache, same_clients=())
    return partition_dataset(
        splits, partition, clients=clients or 100, seed=seed, test_fraction=test_fraction, **partition_options
    )


@register(
    "fashion_mnist",
    task="classify 28 by 28 images of clothing, ten classes; 100 clients, Dirichlet(0.5) label skew, or another partition",
    features=_FEATURES,
    source_features=_SOURCE_FEATURES,
    splits={"train": (100, 60_000), "test": (100, 10_000)},
    class_names=("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
    num_classes=10,
    default_model="mnist_cnn",
    options=OPTIONS,
    source=f"{_FASHION_URL}/train-images-idx3-ubyte.gz and three more",
    download_bytes=sum(num_bytes for _, num_bytes in _FASHION),
    licence="MIT",
    citation="H. Xiao, K. Rasul, R. Vollgraf. Fashion-MNIST: a novel image dataset for benchmarking machine learning "
    "algorithms. "
    "2017. https://arxiv.org/abs/1708.07747",
)
def load_fashion_mnist(
    data: Path | None,
    cache: Path,
    *,
    partition: str = "dirichlet",
    clients: int = 100,
    seed: int = 0,
    test_fraction: float | None = None,
    **partition_options: Any,
) -> dict[str, FederatedData]:
    """Loads train and test, which have the same clients with the same label shares; see `load_mnist`."""
    check_partition(partition, partition_options, clients=clients, test_fraction=test_fraction)
    splits = _arrays("fashion_mnist", _source(_FASHION_URL, _FASHION), data, cache)
    return partition_dataset(splits, partition, clients=clients, seed=seed, test_fraction=test_fraction, **partition_options)


def _by_writer(splits: dict[str, dict[str, np.ndarray]], folder: Path) -> dict[str, FederatedData]:
    path = folder / _WRITERS
    if not path.is_file():
        raise FileNotFoundError(f"partition='writers' needs {path}, with arrays train_writer [60000] and test_writer [10000].")
    writers = dict(zip(splits, read_arrays(path, *(f"{split}_writer" for split in splits)), strict=True))
    for split, columns in splits.items():
        if writers[split].shape != columns["y"].shape:
            raise FormatError(f"{path}: {split}_writer has shape {list(writers[split].shape)}: expected [{len(columns['y'])}].")
    return {split: FederatedData.from_arrays(columns, clients=writers[split]) for split, columns in splits.items()}
