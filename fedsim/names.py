"""Registered names: look-up with suggestions, options in call syntax, and imports from a user's file."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import types
import typing
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# What `import_reference` imports, and therefore what counts as a name of code.
_REFERENCE = re.compile(r"(?:.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*", re.DOTALL)
# Where Python and fedsim are.
_INSTALLED = [Path(__file__).resolve().parent, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))]
_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}


def better_by_name(metric: str) -> typing.Literal["higher", "lower"] | None:
    """Returns which values of a metric are better, as far as its name says it.

    >>> better_by_name("personal_accuracy"), better_by_name("loss"), better_by_name("entropy")
    ('higher', 'lower', None)
    """
    named: dict[str, typing.Literal["higher", "lower"]] = {"loss": "lower", "accuracy": "higher"}
    return named.get(metric.removeprefix("personal_"))


def look_up(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Returns ``known[name]``.

    Raises:
      ValueError: there is no such name. The message suggests the most similar names.

    >>> look_up("model", "emnist_cn", {"emnist_cnn": 1, "logistic": 2})
    Traceback (most recent call last):
    ...
    ValueError: There is no model 'emnist_cn'. Did you mean 'emnist_cnn'?
    """
    if name not in known:
        hint = did_you_mean(name, known) or f" There are {', '.join(sorted(known))}."
        hint = f" For an object in a file, give {name}:NAME." if name.endswith(".py") else hint
        raise ValueError(f"There is no {kind} {name!r}.{hint}")
    return known[name]


def by_name(*classes: type[T]) -> dict[str, type[T]]:
    """Returns classes by their names in snake case.

    >>> class TrimmedMean: ...
    >>> class QSGD: ...
    >>> list(by_name(TrimmedMean, QSGD))
    ['trimmed_mean', 'qsgd']
    """
    boundary = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return {re.sub(boundary, "_", cls.__name__).lower(): cls for cls in classes}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the most similar names, or an empty string if no name is similar.

    >>> did_you_mean("fedporx", ["fedprox", "fedavg"])
    " Did you mean 'fedprox'?"
    """
    similar = difflib.get_close_matches(name, list(known), n=2)
    return f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parses ``name`` or ``name(option=literal, ...)`` and returns the name and the options.

    Raises:
      ValueError: the text has another form. The message quotes the wrong part.

    >>> parse_call("synthetic(alpha=1, beta=0.5)")
    ('synthetic', {'alpha': 1, 'beta': 0.5})
    >>> parse_call("my folder (2)/mine.py:load")
    ('my folder (2)/mine.py:load', {})
    >>> parse_call("mnist(partition=shards)")
    Traceback (most recent call last):
    ...
    ValueError: In 'mnist(partition=shards)', partition=shards is not a literal: quote it, partition='shards'.
    """
    text = text.strip()
    if not text.endswith(")"):
        if "(" in text and "/" not in text and "\\" not in text:
            raise ValueError(f"{text!r} is not closed by a parenthesis: write name(option=value, ...).")
        return text, {}
    # A path may contain parentheses, too, so the options begin at the first parenthesis after which the rest parses as a call.
    calls = ((text[: match.start()], _call(text[match.start() :])) for match in re.finditer(r"\(", text))
    name, call = next(((name, call) for name, call in calls if call is not None), ("", None))
    if call is None or not name:
        raise ValueError(f"Cannot read the options of {text!r}: write name(option=value, ...).")
    if call.args:
        raise ValueError(
            f"In {text!r}, the value {ast.unparse(call.args[0])} has no option name: write name(option=value, ...)."
        )
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        value = ast.unparse(keyword.value)
        if keyword.arg is None:
            raise ValueError(f"In {text!r}, **{value} is not a literal: write name(option=value, ...).")
        if keyword.arg in options:
            raise ValueError(f"In {text!r}, {keyword.arg} is given twice: keep one.")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            remedy = f"quote it, {keyword.arg}={value!r}" if isinstance(keyword.value, ast.Name) else "write the value out"
            raise ValueError(f"In {text!r}, {keyword.arg}={value} is not a literal: {remedy}.") from None
    return name.strip(), options


def check_options(
    kind: str, name: str, function: Callable[..., Any], options: Mapping[str, Any], reserved: Collection[str] = ()
) -> None:
    """Checks that ``function`` takes the given keyword options, with values of the same types as its defaults.

    Args:
      kind: the kind of object, such as ``"dataset"``, for the error message.
      name: the object's name, for the error message.
      function: the function whose parameters are the options.
      options: the options that the user gave.
      reserved: parameters of ``function`` that users cannot give.

    Raises:
      ValueError: an option is unknown (the message lists the known ones), or its value has another type than the default.

    >>> check_options("dataset", "synthetic", lambda *, alpha=1.0, beta=1.0: 0, {"alhpa": 2})
    Traceback (most recent call last):
    ...
    ValueError: The dataset 'synthetic' has no option 'alhpa'. Did you mean 'alpha'? Its options are: alpha, beta.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p.default for p in parameters if p.name not in reserved and p.kind not in VARIABLE}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option, value in options.items():
        if option not in known and (option in reserved or not takes_any):
            listing = f"Its options are: {', '.join(known)}." if known else "It has no options."
            raise ValueError(f"The {kind} {name!r} has no option {option!r}.{did_you_mean(option, known)} {listing}")
        default = known.get(option)
        if not isinstance(default, bool | int | float | str):
            continue
        number = isinstance(value, float | int) and not isinstance(value, bool)
        fits = number if isinstance(default, float) else type(value) is type(default)
        if not fits:
            raise ValueError(
                f"The option {option} of the {kind} {name!r} is {_KINDS[type(default)]}, as its default {default!r} is: "
                f"got {option}={value!r}."
            )


def make(kind: str, text: str, known: Mapping[str, Callable[..., T]], expected: Any, **options: Any) -> T:
    """Calls the factory that ``text`` names, such as ``"name(option=value)"`` or ``"FILE.py:NAME"``, and returns the result.

    Args:
      kind: the kind of object, for error messages.
      text: the factory's name in ``known``, or a reference for `import_factory`, with or without options in parentheses.
      known: the registered factories.
      expected: the class of the result.
      **options: further options, which take precedence over those in ``text``.

    Raises:
      ValueError: there is no such factory; it makes objects of another class; an option is unknown; a required one is missing;
        or ``inner`` is not one of the registered names.

    The option ``inner`` names an object of the same kind: ``"bucketing(size=2, inner='krum(attackers=1)')"``.

    >>> sizes = {"mean": lambda first, second=3: (first + second) / 2, "twice": lambda inner: 2 * inner}
    >>> make("size", "mean(first=1)", sizes, float), make("size", "twice(inner='mean(first=1)')", sizes, float)
    (2.0, 4.0)
    """
    name, given = parse_call(text)
    options = given | options
    if "inner" in given and ":" not in name:
        inner = given["inner"]
        if not isinstance(inner, str) or ":" in parse_call(inner)[0]:
            raise ValueError(
                f"Expected inner to name a registered {kind}, in quotes, got inner={inner!r} in {text!r}: choose one of "
                f"{', '.join(known)}."
            )
        options["inner"] = make(kind, inner, known, expected)
    factory = _factory(kind, name, known, expected)
    check_options(kind, name, factory, options)
    if missing := sorted(required(factory) - set(options)):
        raise ValueError(f"The {kind} {name!r} needs the option {missing[0]}: write {name}({missing[0]}=...).")
    made = factory(**options)
    if not isinstance(made, expected):
        raise ValueError(f"The {kind} {name!r} must be a {expected.__name__}, got {type(made).__name__}: return one.")
    return made


def seeded(kind: str, text: str, known: Mapping[str, Callable[..., T]], expected: Any, seed: int) -> str:
    """Returns a text for `make` with the option ``seed``, unless it has one or its factory takes none.

    Args:
      kind, text, known, expected: see `make`.
      seed: the seed to add.

    Raises:
      ValueError: see `make`.

    >>> known = {"drawn": lambda size=3, seed=0: (size, seed), "fixed": lambda size=3: (size,)}
    >>> [seeded("pair", text, known, tuple, 7) for text in ("drawn", "drawn(size=2)", "drawn(seed=1)", "fixed")]
    ['drawn(seed=7)', 'drawn(size=2, seed=7)', 'drawn(seed=1)', 'fixed']
    """
    name, options = parse_call(text)
    if "seed" in options or "seed" not in inspect.signature(_factory(kind, name, known, expected)).parameters:
        return text
    return f"{name}({', '.join(f'{option}={value!r}' for option, value in (options | {'seed': seed}).items())})"


def _factory(kind: str, name: str, known: Mapping[str, Callable[..., T]], expected: Any) -> Callable[..., T]:
    return import_factory(kind, name, expected) if ":" in name else look_up(kind, name, known)


def required(function: Callable[..., Any]) -> set[str]:
    """Returns the names of the parameters that have no default.

    >>> sorted(required(lambda a, b, c=0, *rest: 0))
    ['a', 'b']
    """
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in VARIABLE}


def import_factory(kind: str, reference: str, expected: type) -> Callable[..., Any]:
    """Imports a class or a function that makes objects of a class, and nothing that does something else when it is called.

    A class must be a subclass of ``expected``. A function of the user's ``FILE.py`` may be any; a function of a module, and one
    of Python or of an installed package, must name ``expected`` in its return annotation, itself or as the elements of a
    mapping or sequence.

    Args:
      kind: the kind of object, for error messages.
      reference: ``FILE.py:NAME`` or ``MODULE:NAME``.
      expected: the class of what it makes.

    Raises:
      ValueError: the object does not exist, or it is none of these.

    >>> import_factory("model", "os:system", int)
    Traceback (most recent call last):
    ...
    ValueError: The model 'os:system' is no class derived from int and no function that is annotated to return one: \
give FILE.py:FUNCTION, or write -> int.
    """
    factory = import_reference(reference)
    function = inspect.unwrap(factory.func if isinstance(factory, functools.partial) else factory)
    if isinstance(factory, type):
        fits = issubclass(factory, expected)
    elif isinstance(function, types.FunctionType):
        of_user = reference.rpartition(":")[0].endswith(".py") and not is_installed(function.__code__.co_filename)
        fits = of_user or _says_that_it_makes(function, expected)
    else:
        fits = False
    if not fits:
        name = expected.__name__
        raise ValueError(
            f"The {kind} {reference!r} is no class derived from {name} and no function that is annotated to return one: give "
            f"FILE.py:FUNCTION, or write -> {name}."
        )
    return factory


def references(text: str) -> list[str]:
    """Returns everything in a text that `import_reference` could import: the name itself, and names in the values of options.

    >>> references("buffered(size=3, staleness_weight='mine.py:weight(a=1)')"), references("http://a"), references("tfds:mnist")
    (['mine.py:weight'], [], ['tfds:mnist'])
    """
    try:
        name, options = parse_call(text)
        names = [name]
    except (ValueError, TypeError):  # It is no call. What could be its name counts, because not everything is parsed as a call.
        names, options = [text[: match.start()] for match in re.finditer(r"\(|$", text)], {}
    found = [name for name in map(str.strip, names) if _REFERENCE.fullmatch(name)][:1]
    return found + [each for value in texts_in(options) for each in references(value)]


def texts_in(value: Any) -> list[str]:
    """Returns all texts in nested dicts, lists, tuples and sets, keys included.

    >>> texts_in({"a": ["b", {"c": 1}]})
    ['a', 'b', 'c']
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for text in texts_in(pair)]
    if isinstance(value, list | tuple | set | frozenset):
        return [text for element in value for text in texts_in(element)]
    return []


def import_reference(reference: str) -> Any:
    """Imports the object that ``FILE.py:NAME`` or ``MODULE:NAME`` names.

    Raises:
      ValueError: the file or module does not exist, has no such name, or is not valid Python.

    >>> import_reference("fedsim.names:look_up") is look_up
    True
    """
    source, _, attribute = reference.rpartition(":")
    if not _REFERENCE.fullmatch(reference):
        raise ValueError(f"Cannot import {reference!r}: give FILE.py:NAME or MODULE:NAME.")
    try:
        module = _load_file(Path(source).expanduser()) if source.endswith(".py") else importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise ValueError(f"Cannot import {reference!r}: {error}. Give FILE.py:NAME or MODULE:NAME.") from error
    except FileNotFoundError as error:
        raise ValueError(f"Cannot import {reference!r}: there is no file {source}.") from error
    except SyntaxError as error:
        raise ValueError(f"Cannot import {reference!r}: {error}.") from error
    if not hasattr(module, attribute):
        raise ValueError(f"Cannot import {reference!r}: {source} has no {attribute!r}.{did_you_mean(attribute, dir(module))}")
    return getattr(module, attribute)


def imported_module(reference: str) -> types.ModuleType | None:
    """Returns the module that `import_reference` has imported for a reference; None if it has imported none.

    >>> imported_module("fedsim.names:look_up").__name__
    'fedsim.names'
    """
    source = reference.rpartition(":")[0]
    return sys.modules.get(_module_name(Path(source)) if source.endswith(".py") else source)


def is_installed(file: str) -> bool:
    """Returns whether a file of code belongs to Python, to fedsim or to an installed package, and is not the user's.

    >>> is_installed(inspect.__file__), is_installed("mine.py")
    (True, False)
    """
    path = Path(file).resolve()
    in_package = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return file.startswith("<frozen ") or in_package or any(map(path.is_relative_to, _INSTALLED))


def absolute(text: str) -> str:
    """Makes the paths in all names ``FILE.py:NAME`` in a text absolute, also in the values of options.

    >>> absolute("emnist62"), absolute("/a/../b.py:load(size=3)"), absolute("buffered(staleness_weight='/a/../b.py:weight')")
    ('emnist62', '/b.py:load(size=3)', "buffered(staleness_weight='/b.py:weight')")
    """
    for name in references(text):
        file, separator, attribute = name.rpartition(".py:")
        if separator:
            text = text.replace(name, f"{Path(file).expanduser().resolve().as_posix()}.py:{attribute}")
    return text


def _says_that_it_makes(function: types.FunctionType, expected: type) -> bool:
    """Returns whether the annotation of a function's result is a class, or elements of a class, derived from ``expected``."""
    try:
        returned: Any = function.__annotations__.get("return")
        returned = eval(returned, function.__globals__) if isinstance(returned, str) else returned
    except (NameError, AttributeError, TypeError, SyntaxError):  # The name is imported only for type checkers.
        return False
    parts = (returned, typing.get_origin(returned), *typing.get_args(returned))
    return any(isinstance(part, type) and issubclass(part, expected) for part in parts)


def _call(text: str) -> ast.Call | None:
    try:
        parsed = ast.parse(f"f{text}", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return parsed if isinstance(parsed, ast.Call) and isinstance(parsed.func, ast.Name) else None


def _module_name(path: Path) -> str:
    """Returns the name of the module of a user's file; files of the same name in two folders are two modules."""
    return f"fedsim_user_{path.stem}_{zlib.crc32(os.fsencode(path.expanduser().resolve())):08x}"


def _load_file(path: Path) -> types.ModuleType:
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses and pickle look up modules here.
    spec.loader.exec_module(module)
    return module
