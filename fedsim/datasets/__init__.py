"""Federated datasets by name, each with the features it loads, its source and a default model."""

from fedsim.datasets._archive import read_arrays as read_arrays
from fedsim.datasets._cache import cache_folder as cache_folder
from fedsim.datasets._cache import is_cached as is_cached
from fedsim.datasets._download import DownloadError as DownloadError
from fedsim.datasets._partitioned import partition_and_split as partition_and_split
from fedsim.datasets._partitioned import partition_splits as partition_splits
from fedsim.datasets._registry import Description as Description
from fedsim.datasets._registry import FederatedSplits as FederatedSplits
from fedsim.datasets._registry import describe as describe
from fedsim.datasets._registry import file_of as file_of
from fedsim.datasets._registry import is_family as is_family
from fedsim.datasets._registry import is_file as is_file
from fedsim.datasets._registry import load as load
from fedsim.datasets._registry import names as names
from fedsim.datasets._registry import register as register
from fedsim.datasets._registry import with_hash as with_hash
from fedsim.datasets._registry import with_options as with_options
from fedsim.datasets._registry import with_seed as with_seed

# Importing the file of a dataset registers it.
from fedsim.datasets import (  # isort: skip
    _cifar10,  # noqa: F401
    _cifar100,  # noqa: F401
    _digits,  # noqa: F401
    _emnist,  # noqa: F401
    _emnist62_like,  # noqa: F401
    _file,  # noqa: F401
    _mnist,  # noqa: F401
    _shakespeare,  # noqa: F401
    _stackexchange,  # noqa: F401
    _stackoverflow,  # noqa: F401
    _stackoverflow_like,  # noqa: F401
    _synthetic,  # noqa: F401
    _tfds,  # noqa: F401
    _toy_regression,  # noqa: F401
)
