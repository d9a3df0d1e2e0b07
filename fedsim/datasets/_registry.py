"""The registry: names to loaders, and what a dataset says of itself."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedsim.data import FederatedData
from fedsim.datasets._cache import dataset_folder
from fedsim.names import VARIABLE, check_options, did_you_mean, import_reference, look_up, parse_call, required


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a dataset says of itself.

    Attributes:
      name: what `load` calls it.
      task: what is to be learnt, in a line.
      features: the contract of what `load` gives: feature name to ``"[shape] dtype meaning"`` of one example.
      source_features: the same of the source, before preprocessing.
      splits: split to ``(clients, examples)``, as published or, for generated data, by default; None: not known before.
      class_names: what the labels 0, 1, ... stand for, for pictures; empty: the labels themselves.
      num_classes: labels ``y`` lie in ``[0, num_classes)``; None: not a classification, or not known before.
      default_model: a name of `fedsim.models`, or a callable that makes a model; None: there is none.
      options: the loader's options, each with its meaning.
      defaults: the loader's options, each with its default (``inspect.Parameter.empty``: it must be given); ``...`` stands for
        those that depend on others.
      source: where it comes from.
      download_bytes: how much is fetched at first; 0: nothing, ever; None: not known before.
      needs_data: it is never fetched: the user must give a folder.
      licence: under which terms.
      citation: whom to cite.
    """

    name: str
    task: str = ""
    features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source_features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    splits: Mapping[str, tuple[int | None, int | None]] = dataclasses.field(default_factory=dict)
    class_names: Sequence[str] = ()
    num_classes: int | None = None
    default_model: str | Callable[..., Any] | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    download_bytes: int | None = None
    needs_data: bool = False
    licence: str = ""
    citation: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class FederatedSplits:
    """A dataset, loaded.

    Attributes:
      train: what clients learn from.
      test: what they are measured on; it may have other clients, or empty ones.
      description: the dataset's own words; features that it does not state are those of ``train``.
      held_out: a third split, of clients in neither of the others (Stack Overflow's); None: there is none.
      decode: one example's ``x`` or ``y`` as text, for data that are token ids; None: they are not.
    """

    train: FederatedData
    test: FederatedData
    description: Description
    held_out: FederatedData | None = None
    decode: Callable[[Any], str] | None = None


Loader = Callable[..., Mapping[str, Any]]
_Loader = TypeVar("_Loader", bound=Loader)

_LOADERS: dict[str, tuple[Loader, Description]] = {}
_FAMILY = ":NAME"


def register(name: str, **about: Any) -> Callable[[_Loader], _Loader]:
    """Makes ``(data, cache, **options) -> {"train": ..., "test": ...}`` loadable as ``name``, also by `fedsim run`.

    The loader gets ``data``, the folder that the user named or None, and ``cache``, a folder of this dataset's own that
    may not exist yet. Its further parameters are the dataset's options. It may add a split ``held_out``,
    and ``decode``, see `FederatedSplits`. Registering the same function again (a notebook's cell run twice, a file that is both
    imported and named by its path) replaces it.

    Args:
      name: the name. ``"PREFIX:NAME"``, with these four capitals, stands for a family: the loader is given ``name=``, what
        the user wrote after ``PREFIX:``.
      **about: fields of `Description`.

    Raises:
      ValueError: the name is taken, or cannot be told from options or a file.

    >>> import numpy as np
    >>> @register("two_clients", task="none at all")
    ... def two_clients(data, cache, *, size=3):
    ...     both = FederatedData.from_arrays({"y": np.arange(size + 1)}, sizes=[size, 1])
    ...     return {"train": both, "test": both}
    >>> load("two_clients").train.num_examples, load("two_clients(size=7)").train.num_examples
    (4, 8)
    """
    if "(" in name or (":" in name and not name.endswith(_FAMILY)):
        raise ValueError(f"Expected a name without parentheses and colons, got {name!r}: pick another name.")

    def decorate(loader: _Loader) -> _Loader:
        description = Description(name=name, defaults=_defaults(loader, name), **about)
        taken = _LOADERS.get(name)
        if taken is not None and not _is_again(loader, taken[0]):
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
    """A dataset's description, without loading it; what `load` takes for a name, this takes too.

    Raises:
      ValueError: no dataset has this name (the message has the nearest ones), or it has not these options.

    >>> describe("digits").num_classes
    10
    >>> describe("digit")
    Traceback (most recent call last):
    ...
    ValueError: There is no dataset 'digit'. Did you mean 'digits'?
    """
    return _find(name, {}).description


def load(
    name: str,
    *,
    data: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> FederatedSplits:
    """Loads a dataset.

    Args:
      name: one of `names`; or ``"FILE.py:FUNCTION"`` or ``"MODULE:FUNCTION"``, a loader of your own (see `register` for its
        arguments). Any of them may carry options in parentheses, as literals: ``"NAME(option=value)"``.
      data: a folder with the dataset's files; by default they are found, or fetched, by the dataset itself.
      cache: where fetched and converted files are kept; by default ``$FEDSIM_CACHE``, or the user's cache folder.
      **options: the dataset's own; ``fedsim datasets describe NAME`` lists them.

    Raises:
      ValueError: no dataset has this name (the message has the nearest ones), it has no such option, or ``data`` holds
        something else.
      FileNotFoundError: no such folder ``data``.
      DownloadError: the files could not be fetched.

    >>> digits = load("digits")
    >>> digits.train.num_clients, digits.train.num_examples + digits.test.num_examples
    (100, 1797)
    """
    loader, description, options = _find(name, options)
    name = description.name
    _check_call(name, loader, options)
    folder = None if data is None else Path(data).expanduser()
    if folder is not None and folder.is_file():
        raise ValueError(
            f"Expected data to be a folder to read {name!r} from, and {folder} is a file: give the folder it is in."
        )
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"No folder {folder} to read {name!r} from.")
    splits = loader(folder, dataset_folder(name, cache), **options)
    _check_splits(name, splits)
    if not description.features:
        shown = {name: f"{list(c.shape[1:])} {c.dtype}" for name, c in splits["train"].columns.items()}
        description = dataclasses.replace(description, features=shown)
    return FederatedSplits(**splits, description=description)


class _Found(NamedTuple):
    loader: Loader
    description: Description
    options: dict[str, Any]


def _find(text: str, options: Mapping[str, Any]) -> _Found:
    """What a name, which may carry options itself, stands for."""
    name, carried = parse_call(text)
    if twice := sorted(set(carried) & set(options)):
        raise ValueError(f"The option {twice[0]!r} is given twice, in {text!r} and beside it: leave one out.")
    options = carried | dict(options)
    prefix, colon, rest = name.partition(":")
    if colon and prefix + _FAMILY in _LOADERS:
        if not rest:
            raise ValueError(f"{text!r} lacks a name behind the colon: write {prefix}{_FAMILY}.")
        loader, description = _LOADERS[prefix + _FAMILY]
        check_options("dataset", name, loader, options, _reserved(loader, name))
        return _Found(functools.partial(loader, name=rest), dataclasses.replace(description, name=name), options)
    if colon:
        loader = import_reference(name)
        if not _takes_folders(loader):
            raise ValueError(
                f"{name} is not a function that loads a dataset, (data, cache, **options): see fedsim.datasets.register."
            )
        own = Description(name=name, task=(loader.__doc__ or "").strip().partition("\n")[0], defaults=_defaults(loader, name))
        description = next((about for known, about in _LOADERS.values() if known is loader), own)
    else:
        loader, description = look_up("dataset", name, _LOADERS)
    check_options("dataset", name, loader, options, _reserved(loader, name))
    return _Found(loader, description, options)


def _takes_folders(loader: Any) -> bool:
    try:
        inspect.signature(loader).bind_partial(None, None)
    except (TypeError, ValueError):  # It takes fewer arguments, is not callable, or does not say what it takes.
        return False
    return True


def _reserved(loader: Loader, name: str) -> list[str]:
    """Parameters of a loader that are not options: folder, cache, and a family's ``name``."""
    family = name.partition(":")[0] + _FAMILY in {name, *_LOADERS}
    return [*list(inspect.signature(loader).parameters)[:2], *(["name"] if family else [])]


def _defaults(loader: Loader, name: str) -> dict[str, Any]:
    parameters, reserved = inspect.signature(loader).parameters.values(), _reserved(loader, name)
    found = {p.name: p.default for p in parameters if p.name not in reserved and p.kind not in VARIABLE}
    return found | ({"...": inspect.Parameter.empty} if any(p.kind is p.VAR_KEYWORD for p in parameters) else {})


def _origin(loader: Loader) -> str:
    return f"{loader.__module__}.{getattr(loader, '__qualname__', repr(loader))}"


def _is_again(loader: Loader, taken: Loader) -> bool:
    """Whether it is the same function, defined anew: of the same module, or of the same file, which may go by two modules."""
    if _origin(loader) == _origin(taken):
        return True
    codes = [getattr(each, "__code__", None) for each in (loader, taken)]
    first, second = ((code.co_filename, code.co_qualname) if code else None for code in codes)
    return first is not None and first == second


def _check_call(name: str, loader: Loader, options: Mapping[str, Any]) -> None:
    try:
        inspect.signature(loader).bind(None, None, **options)
    except TypeError:
        for option in required(loader) - {*options, *_reserved(loader, name)}:
            raise ValueError(f"The dataset {name!r} needs the option {option}: write {name}({option}=...).") from None
        takes = inspect.signature(loader)
        raise ValueError(f"The loader of {name!r} must take (data, cache, ...options), and it takes {takes}.") from None


def _check_splits(name: str, splits: Any) -> None:
    if not isinstance(splits, Mapping):
        raise ValueError(f"The loader of {name!r} returned {type(splits).__name__}: expected {{'train': ..., 'test': ...}}.")
    for split in ("train", "test"):
        if split not in splits:
            raise ValueError(f"The loader of {name!r} returned no split {split!r}, only {list(splits)}: add it.")
    known = ["train", "test", "held_out", "decode"]
    for split, data in splits.items():
        if split not in known:
            raise ValueError(
                f"The loader of {name!r} returned {split!r}.{did_you_mean(str(split), known)} There are {', '.join(known)}."
            )
        if split == "decode" and not callable(data):
            raise ValueError(f"The loader of {name!r} returned a {type(data).__name__} as decode: expected a function.")
        if split != "decode" and not isinstance(data, FederatedData):
            raise ValueError(f"The loader of {name!r} returned {type(data).__name__} as {split}: expected FederatedData.")
