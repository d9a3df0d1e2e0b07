"""The registry: names to loaders, and what a dataset says of itself."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedsim.data import FederatedData
from fedsim.names import look_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a dataset says of itself.

    Attributes:
      name: what `load` calls it.
      task: what is to be learnt, in a line.
      features: the contract of what `load` gives: feature name to ``"[shape] dtype meaning"`` of one example.
      source_features: the same of the source, before preprocessing.
      num_classes: labels ``y`` lie in ``[0, num_classes)``; None: not a classification.
      default_model: a name of `fedsim.models`, or a callable that makes a model; None: there is none.
      source: where it comes from.
      licence: under which terms.
      citation: whom to cite.
    """

    name: str
    task: str = ""
    features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source_features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_classes: int | None = None
    default_model: str | Callable[..., Any] | None = None
    source: str = ""
    licence: str = ""
    citation: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class FederatedSplits:
    """A dataset, loaded.

    Attributes:
      train: what clients learn from.
      test: what they are measured on; it may have other clients, or empty ones.
      description: the dataset's own words.
    """

    train: FederatedData
    test: FederatedData
    description: Description


Loader = Callable[[Path | None, Path], tuple[FederatedData, FederatedData]]
_Loader = TypeVar("_Loader", bound=Loader)

_LOADERS: dict[str, tuple[Loader, Description]] = {}


def register(name: str, **about: Any) -> Callable[[_Loader], _Loader]:
    """Makes ``(data, cache) -> (train, test)`` loadable as ``name``, from Python and from the command line.

    The loader gets ``data``, the folder that the user named or None, and ``cache``, a folder of this dataset's own that
    may not exist yet. Registering the same function again (a notebook's cell run twice) replaces it.

    Args:
      name: the name.
      **about: fields of `Description`.

    Raises:
      ValueError: the name is taken.

    >>> import numpy as np
    >>> @register("two_clients", task="none at all")
    ... def two_clients(data, cache):
    ...     both = FederatedData.from_arrays({"y": np.arange(4)}, sizes=[3, 1])
    ...     return both, both
    >>> load("two_clients").train.num_examples, describe("two_clients").task
    (4, 'none at all')
    """
    description = Description(name=name, **about)

    def decorate(loader: _Loader) -> _Loader:
        taken = _LOADERS.get(name)
        if taken is not None and _origin(taken[0]) != _origin(loader):
            raise ValueError(f"There is a dataset {name!r} already, by {_origin(taken[0])}: pick another name.")
        _LOADERS[name] = loader, description
        return loader

    return decorate


def names() -> list[str]:
    """The names of all datasets, sorted.

    >>> {"digits", "emnist62"} <= set(names())
    True
    """
    return sorted(_LOADERS)


def describe(name: str) -> Description:
    """A dataset's description, without loading it.

    Raises:
      ValueError: no dataset has this name; the message has the nearest ones.

    >>> describe("digits").num_classes
    10
    >>> describe("emnist")
    Traceback (most recent call last):
    ...
    ValueError: There is no dataset 'emnist'. Did you mean 'emnist62'?
    """
    return _find(name)[1]


def load(
    name: str, *, data: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None
) -> FederatedSplits:
    """Loads a dataset.

    Args:
      name: one of `names`.
      data: a folder with the dataset's files; by default they are found, or fetched, by the dataset itself.
      cache: where fetched files are kept; by default ``$FEDSIM_CACHE``, or the user's cache folder.

    Raises:
      ValueError: no dataset has this name (the message has the nearest ones), or ``data`` holds something else.
      FileNotFoundError: no such folder ``data``.
      DownloadError: the files could not be fetched.

    >>> digits = load("digits")
    >>> digits.train.num_clients, digits.train.num_examples + digits.test.num_examples
    (100, 1797)
    """
    loader, description = _find(name)
    folder = None if data is None else Path(data).expanduser()
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"No folder {folder} to read {name!r} from.")
    train, test = loader(folder, _cache_folder(cache) / name)
    return FederatedSplits(train, test, description)


def _find(name: str) -> tuple[Loader, Description]:
    return look_up("dataset", name, _LOADERS)


def _origin(loader: Loader) -> str:
    return f"{loader.__module__}.{getattr(loader, '__qualname__', repr(loader))}"


def _cache_folder(cache: str | os.PathLike[str] | None) -> Path:
    if cache is None:
        cache = os.environ.get("FEDSIM_CACHE")
    if cache:
        return Path(cache).expanduser()
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):  # The second is Windows' own.
        if os.environ.get(variable):
            return Path(os.environ[variable]) / "fedsim"
    return Path.home() / ".cache" / "fedsim"
