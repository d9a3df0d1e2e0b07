"""Federated datasets by name: each with its contract, its source, and a model to start with."""

from fedsim.datasets._download import DownloadError as DownloadError
from fedsim.datasets._registry import Description as Description
from fedsim.datasets._registry import FederatedSplits as FederatedSplits
from fedsim.datasets._registry import describe as describe
from fedsim.datasets._registry import load as load
from fedsim.datasets._registry import names as names
from fedsim.datasets._registry import register as register

# Importing a dataset's file registers it.
from fedsim.datasets import _digits, _emnist, _emnist62_like, _stackoverflow_like, _synthetic, _toy_regression  # isort: skip  # noqa: F401
