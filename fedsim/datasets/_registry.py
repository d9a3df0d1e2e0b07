"""The registry of datasets: their names, loaders and descriptions."""

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
from fedsim.formats import is_data_file
from fedsim.names import VARIABLE, check_options, did_you_mean, import_factory, import_reference, look_up, parse_call, required
from fedsim.pinned_files import pinned, unpinned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a dataset, available without loading it.

    Attributes:
      name: name of the dataset, as `load` takes it.
      task: the learning task, in one line.
      features: feature name to ``"[shape] dtype meaning"`` of one example, as loaded.
      source_features: the same for the source, before preprocessing.
      splits: split to ``(clients, examples)``, as published, or with default options if the data is generated or divided by a
        partitioner; None if a number is not known before loading.
      class_names: names of the labels 0, 1, ... in pictures; empty to show the labels.
      num_classes: labels ``y`` are in ``[0, num_classes)``; None if the task is not classification or the number is not known
        before loading. `register` also takes a function of the options, which are given by name; `describe` and `load` return
        its result.
      default_model: a name in `fedsim.models`, or a callable that returns a model; None if there is no default. In a name that
        is given to `register`, and in ``task`` and ``features``, ``{OPTION}`` stands for the value of an option of the dataset,
        such as its vocabulary.
      options: the loader's options, each with its meaning.
      defaults: the loader's options, each with its default (``inspect.Parameter.empty`` if it must be given). ``...`` stands
        for options that depend on another option.
      source: where the data comes from.
      download_bytes: size of the download at first use; 0 if nothing is ever downloaded, None if the size is not known.
      needs_data: whether the user must provide the files because the dataset cannot be downloaded.
      licence: terms of use.
      citation: what to cite.
    """

    name: str
    task: str = ""
    features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source_features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    splits: Mapping[str, tuple[int | None, int | None]] = dataclasses.field(default_factory=dict)
    class_names: Sequence[str] = ()
    num_classes: int | Callable[..., int] | None = None
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
    """The splits of a loaded dataset.

    Attributes:
      train: the training examples.
      test: the test examples. It may have other clients than ``train``, and clients without examples.
      description: description of the dataset. If it does not state the features, they are those of ``train``.
      held_out: a third split with clients that are in neither of the others (of Stack Overflow); None if there is none.
      validation: examples by which settings are chosen and runs are stopped; None if there are none.
      decode: converts one example's ``x`` or ``y`` to text if these are token ids; otherwise None.
    """

    train: FederatedData
    test: FederatedData
    description: Description
    held_out: FederatedData | None = None
    validation: FederatedData | None = None
    decode: Callable[[Any], str] | None = None


Loader = Callable[..., Mapping[str, Any]]
_Loader = TypeVar("_Loader", bound=Loader)

_LOADERS: dict[str, tuple[Loader, Description]] = {}
_FAMILY = ":NAME"
_FILE = "file:"


def register(name: str, **about: Any) -> Callable[[_Loader], _Loader]:
    """Registers a loader ``(data, cache, **options) -> {"train": ..., "test": ...}`` under a name, also for `fedsim run`.

    The loader receives ``data``, the folder that the user gave or None, and ``cache``, the dataset's own folder in the cache,
    which may not exist yet. Its further parameters are the dataset's options. Its result may also have a split ``held_out`` and
    a function ``decode``, see `FederatedSplits`, and ``about``, fields of `Description` that are known only after loading.
    Registering the same function again replaces it, for example when a notebook cell runs twice or a file is both imported and
    named by its path.

    Args:
      name: name of the dataset. ``"PREFIX:NAME"``, with these four capitals, registers a family: its loader receives what the
        user wrote after ``PREFIX:`` as the argument ``name``.
      **about: fields of `Description`.

    Raises:
      ValueError: another loader has this name, or the name has parentheses or a colon.

    >>> import numpy as np
    >>> @register("two_clients", task="no task")
    ... def two_clients(data, cache, *, size=3):
    ...     both = FederatedData.from_arrays({"y": np.arange(size + 1)}, sizes=[size, 1])
    ...     return {"train": both, "test": both}
    >>> load("two_clients").train.num_examples, load("two_clients(size=7)").train.num_examples
    (4, 8)
    """
    if "(" in name or (":" in name and not name.endswith(_FAMILY)):
        raise ValueError(f"Expected a name without parentheses and colons, got {name!r}: choose another name.")

    def decorate(loader: _Loader) -> _Loader:
        description = Description(name=name, defaults=_defaults(loader, name), **about)
        taken = _LOADERS.get(name)
        if taken is not None and not _is_same(loader, taken[0]):
            raise ValueError(f"There is already a dataset {name!r}, loaded by {_origin(taken[0])}: choose another name.")
        _LOADERS[name] = loader, description
        return loader

    return decorate


def names() -> list[str]:
    """Returns the names of all datasets, sorted.

    >>> {"digits", "emnist62"} <= set(names())
    True
    """
    return sorted(_LOADERS)


def describe(name: str) -> Description:
    """Returns the description of a dataset without loading it, except for a file of your own. Accepts the same names as `load`.

    Raises:
      ValueError: there is no such dataset (the message suggests similar names), or it has no such option; or see `load` for a
        file.

    >>> describe("digits").num_classes
    10
    >>> describe("digit")
    Traceback (most recent call last):
    ...
    ValueError: There is no dataset 'digit'. Did you mean 'digits'?
    """
    return load(name).description if is_file(name) else _find(name, {}).description


def load(
    name: str,
    *,
    data: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    **options: Any,
) -> FederatedSplits:
    """Loads a dataset.

    Args:
      name: one of `names`, or ``"FILE.py:FUNCTION"`` or ``"MODULE:FUNCTION"`` for your own loader (see `register` for its
        arguments), or a file or folder of your own data, such as ``"people.csv"``, with the options of ``file:NAME``. Each may
        be followed by options in parentheses, written as literals: ``"NAME(option=value)"``.
      data: a folder with the dataset's files; by default they are downloaded.
      cache: folder for downloaded and converted files; by default ``$FEDSIM_CACHE``, or the user's cache folder.
      **options: options of the dataset; ``fedsim datasets describe NAME`` lists them.

    Returns:
      The splits ``train`` and ``test`` (and ``held_out`` and ``validation``, if there are any), with the description.

    Raises:
      ValueError: there is no such dataset (the message suggests similar names), it has no such option or refuses the value of
        one, or ``data`` does not hold the dataset's files.
      FileNotFoundError: there is no folder ``data``.
      DownloadError: the files could not be downloaded.

    >>> digits = load("digits")
    >>> digits.train.num_clients, digits.train.num_examples + digits.test.num_examples
    (100, 1797)
    """
    loader, description, options = _find(name, options)
    name = description.name
    _check_call(name, loader, options)
    folder = None if data is None else Path(data).expanduser()
    if folder is not None and folder.is_file():
        raise ValueError(f"Expected data to be a folder with the files of {name!r}, and {folder} is a file: give its folder.")
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"No folder {folder} to read {name!r} from: check the path.")
    splits = loader(folder, dataset_folder(name, cache), **options)
    _check_splits(name, splits)
    splits = dict(splits)
    description = dataclasses.replace(description, **splits.pop("about", {}))
    if not description.features:
        shown = {name: f"{list(c.shape[1:])} {c.dtype}" for name, c in splits["train"].columns.items()}
        description = dataclasses.replace(description, features=shown)
    return FederatedSplits(**splits, description=description)


def is_family(name: str) -> bool:
    """Returns whether a name is that of a dataset of a registered family, for which nothing is imported.

    >>> is_family("tfds:mnist"), is_family("mine.py:load")
    (True, False)
    """
    prefix, colon, _ = name.partition(":")
    return bool(colon) and prefix + _FAMILY in _LOADERS


def is_file(name: str) -> bool:
    """Returns whether a name is that of a file or folder of data: an existing one, or one with the suffix of a known format.

    >>> is_file("people.csv(label='y')"), is_file("digits(seed=1)"), is_file("mine.py:load")
    (True, False, False)
    """
    base = _parse(name)[0]
    return base.startswith(_FILE) and base not in _LOADERS


def file_of(name: str) -> tuple[Path, dict[str, Any]]:
    """Returns the path of a dataset that is a file, and its options.

    >>> path, options = file_of("people.csv(label='y')")
    >>> path.name, options
    ('people.csv', {'label': 'y'})
    """
    base, options = _parse(name)
    return unpinned(base.removeprefix(_FILE)), options


def with_seed(name: str, seed: int) -> str:
    """Returns the name of a dataset with its seed, unless it has one already or the dataset has no option ``seed``.

    Args:
      name: as `load` takes it, with or without options.
      seed: the seed to add.

    Raises:
      ValueError: see `describe`.

    >>> with_seed("synthetic(alpha=0.5)", 3), with_seed("digits(seed=1)", 3)
    ('synthetic(alpha=0.5, seed=3)', 'digits(seed=1)')
    """
    _, description, options = _find(name, {})
    return name if "seed" in options or "seed" not in description.defaults else with_options(name, {"seed": seed})


def with_options(name: str, options: Mapping[str, Any]) -> str:
    """Returns the name of a dataset with these options, which replace those of the same names.

    Args:
      name: as `load` takes it, with or without options.
      options: the options to add.

    Raises:
      ValueError: the dataset has no such option.

    >>> with_options("digits(seed=1)", {"partition": "iid"})
    "digits(seed=1, partition='iid')"
    """
    if not options:
        return name
    base, given = _parse(name)
    options = given | dict(options)
    text = _call_text(base, options)
    _find(text, {})
    return text


def with_hash(name: str) -> str:
    """Returns the name of a file with its absolute path and a hash of its content, so that another content is refused.

    Args:
      name: as `load` takes it, with or without options. Other names than those of files are returned as they are.

    Raises:
      FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.csv"
    >>> _ = path.write_text("x,y\\n1,2\\n")
    >>> with_hash(f"{path}(label='y')").removeprefix(f"file:{path.resolve()}")
    "#sha256=81bf9fa83c6f7f15(label='y')"
    """
    base, options = _parse(name)
    if not base.startswith(_FILE):
        return name
    return _call_text(_FILE + pinned(base.removeprefix(_FILE), folder=True), options)


def _call_text(name: str, options: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{option}={value!r}' for option, value in options.items())})" if options else name


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of a dataset and its options; the name of a file becomes ``file:PATH``."""
    if text not in _LOADERS and not text.startswith(_FILE) and is_data_file(text):  # A path may have parentheses.
        return _FILE + text, {}
    name, options = parse_call(text)
    if name not in _LOADERS and not name.startswith(_FILE) and is_data_file(name):
        name = _FILE + name
    return name, options


class _Found(NamedTuple):
    loader: Loader
    description: Description
    options: dict[str, Any]


def _find(text: str, options: Mapping[str, Any]) -> _Found:
    """Finds the loader of a name, which may include options."""
    name, in_text = _parse(text)
    if twice := sorted(set(in_text) & set(options)):
        raise ValueError(f"The option {twice[0]!r} is given twice, in {text!r} and as an argument: leave one out.")
    options = in_text | dict(options)
    prefix, colon, rest = name.partition(":")
    if is_family(name):
        if not rest:
            raise ValueError(f"{text!r} has no name after the colon: write {prefix}{_FAMILY}.")
        loader, description = _LOADERS[prefix + _FAMILY]
        shown = f"{_FILE}{unpinned(rest)}" if prefix + colon == _FILE else name
        check_options("dataset", shown, loader, options, _reserved(loader, name))
        description = dataclasses.replace(_with_options(description, options), name=shown)
        return _Found(functools.partial(loader, name=rest), description, options)
    if colon:
        loader = import_reference(name)
        if callable(loader) and not any(loader is known for known, _ in _LOADERS.values()):
            loader = import_factory("dataset", name, FederatedData)
        if not _takes_folders(loader):
            raise ValueError(
                f"{name} is not a function with the parameters (data, cache, **options): see fedsim.datasets.register."
            )
        own = Description(name=name, task=(loader.__doc__ or "").strip().partition("\n")[0], defaults=_defaults(loader, name))
        description = next((about for known, about in _LOADERS.values() if known is loader), own)
    else:
        loader, description = look_up("dataset", name, _LOADERS)
    check_options("dataset", name, loader, options, _reserved(loader, name))
    return _Found(loader, _with_options(description, options), options)


def _with_options(description: Description, options: Mapping[str, Any]) -> Description:
    """Returns the description with the values of the options."""
    values, model, classes = {**description.defaults, **options}, description.default_model, description.num_classes

    def filled(text: str) -> str:
        for option, value in values.items():
            text = text.replace(f"{{{option}}}", repr(value))
        return text

    if callable(classes):  # The number is not known if an option that it needs must be given and is not.
        is_known = all(value is not inspect.Parameter.empty for name, value in values.items() if name != "...")
        classes = classes(**values) if is_known else None
    return dataclasses.replace(
        description,
        task=filled(description.task),
        features={name: filled(text) for name, text in description.features.items()},
        num_classes=classes,
        default_model=filled(model) if isinstance(model, str) else model,
    )


def _takes_folders(loader: Any) -> bool:
    try:
        inspect.signature(loader).bind_partial(None, None)
    except (TypeError, ValueError):  # It has fewer parameters, is not callable, or has no signature.
        return False
    return True


def _reserved(loader: Loader, name: str) -> list[str]:
    """Returns the parameters of a loader that are not options: data, cache, and ``name`` of a family."""
    family = name.partition(":")[0] + _FAMILY in {name, *_LOADERS}
    return [*list(inspect.signature(loader).parameters)[:2], *(["name"] if family else [])]


def _defaults(loader: Loader, name: str) -> dict[str, Any]:
    parameters, reserved = inspect.signature(loader).parameters.values(), _reserved(loader, name)
    found = {p.name: p.default for p in parameters if p.name not in reserved and p.kind not in VARIABLE}
    return found | ({"...": inspect.Parameter.empty} if any(p.kind is p.VAR_KEYWORD for p in parameters) else {})


def _origin(loader: Loader) -> str:
    return f"{loader.__module__}.{getattr(loader, '__qualname__', repr(loader))}"


def _is_same(loader: Loader, taken: Loader) -> bool:
    """Whether both are the same function of one module or file; a file may have been imported under two module names."""
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
            raise ValueError(f"The loader of {name!r} returned no split {split!r}, only {list(splits)}: return both.")
    known = ["train", "test", "held_out", "validation", "decode", "about"]
    for split, data in splits.items():
        if split not in known:
            raise ValueError(
                f"The loader of {name!r} returned {split!r}.{did_you_mean(str(split), known)} There are {', '.join(known)}."
            )
        if split == "decode" and not callable(data):
            raise ValueError(f"The loader of {name!r} returned {type(data).__name__} as decode: expected a function.")
        if split == "about" and not isinstance(data, Mapping):
            raise ValueError(f"The loader of {name!r} returned {type(data).__name__} as about: expected a mapping.")
        if split not in ("decode", "about") and not isinstance(data, FederatedData):
            raise ValueError(f"The loader of {name!r} returned {type(data).__name__} as {split}: expected FederatedData.")
