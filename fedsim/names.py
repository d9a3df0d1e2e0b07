"""Things by name: looked up with a hint, given options in call syntax, or imported from a user's own file."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def look_up(kind: str, name: str, known: Mapping[str, T]) -> T:
    """``known[name]``.

    Raises:
      ValueError: there is no such name; the message has the nearest ones.

    >>> look_up("model", "emnist_cn", {"emnist_cnn": 1, "logistic": 2})
    Traceback (most recent call last):
    ...
    ValueError: There is no model 'emnist_cn'. Did you mean 'emnist_cnn'?
    """
    if name not in known:
        hint = did_you_mean(name, known) or f" There are {', '.join(sorted(known))}."
        hint = f" Of a file, name what is in it, too: {name}:NAME." if name.endswith(".py") else hint
        raise ValueError(f"There is no {kind} {name!r}.{hint}")
    return known[name]


def by_name(*classes: type[T]) -> dict[str, type[T]]:
    """Classes by their names in snake case.

    >>> class TrimmedMean: ...
    >>> class QSGD: ...
    >>> list(by_name(TrimmedMean, QSGD))
    ['trimmed_mean', 'qsgd']
    """
    boundary = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return {re.sub(boundary, "_", cls.__name__).lower(): cls for cls in classes}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence, with a space before it, that names the nearest; empty if nothing is near.

    >>> did_you_mean("fedporx", ["fedprox", "fedavg"])
    " Did you mean 'fedprox'?"
    """
    near = difflib.get_close_matches(name, list(known), n=2)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """A name and its options, written as a call whose values are literals; a plain name has none.

    Raises:
      ValueError: not of the form ``name(option=literal, ...)``; the message has the part that is not.

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
            raise ValueError(f"{text!r} is not closed: write name(option=value, ...).")
        return text, {}
    # A path may hold parentheses too, so the options begin at the first one from which the rest is a call.
    calls = ((text[: at.start()], _call(text[at.start() :])) for at in re.finditer(r"\(", text))
    name, call = next(((name, call) for name, call in calls if call is not None), ("", None))
    if call is None or not name:
        raise ValueError(f"Cannot read the options of {text!r}: write name(option=value, ...).")
    if call.args:
        raise ValueError(f"In {text!r}, {ast.unparse(call.args[0])} has no name: write name(option=value, ...).")
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
    """Sees that ``function`` takes these keyword options, with values of the kind that its defaults have.

    Args:
      kind: what ``name`` is a name of.
      name: what the user calls it.
      function: the parameters of which are the options,
      options: as given.
      reserved: except these, which are not for users to give.

    Raises:
      ValueError: an option that it has not (the message has those it has), or a value of another type than the default's.

    >>> check_options("dataset", "synthetic", lambda *, alpha=1.0, beta=1.0: 0, {"alhpa": 2})
    Traceback (most recent call last):
    ...
    ValueError: The dataset 'synthetic' has no option 'alhpa'. Did you mean 'alpha'? It has: alpha, beta.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p.default for p in parameters if p.name not in reserved and p.kind not in VARIABLE}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option, value in options.items():
        if option not in known and (option in reserved or not takes_any):
            has = f"It has: {', '.join(known)}." if known else "It has none."
            raise ValueError(f"The {kind} {name!r} has no option {option!r}.{did_you_mean(option, known)} {has}")
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


def make(kind: str, text: str, known: Mapping[str, Callable[..., T]], **options: Any) -> T:
    """Calls the factory that ``text`` names, with options in parentheses or without: a known one, or an imported one.

    Raises:
      ValueError: there is no such factory; it has no such option, or needs one that is not given.

    >>> make("size", "mean(first=1)", {"mean": lambda first, second=3: (first + second) / 2})
    2.0
    """
    name, given = parse_call(text)
    options = given | options
    factory = import_reference(name) if ":" in name else look_up(kind, name, known)
    check_options(kind, name, factory, options)
    if missing := sorted(required(factory) - set(options)):
        raise ValueError(f"The {kind} {name!r} needs arguments: give them in parentheses, {name}({missing[0]}=...).")
    return factory(**options)


def required(function: Callable[..., Any]) -> set[str]:
    """Names of the parameters that have no default.

    >>> sorted(required(lambda a, b, c=0, *more: 0))
    ['a', 'b']
    """
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in VARIABLE}


def import_reference(reference: str) -> Any:
    """What ``FILE.py:NAME`` or ``MODULE:NAME`` names.

    Raises:
      ValueError: there is no such file, module or name in it, or the file is no Python.

    >>> import_reference("fedsim.names:look_up") is look_up
    True
    """
    source, _, attribute = reference.rpartition(":")
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


def absolute(reference: str) -> str:
    """``FILE.py:NAME`` with the file's absolute path, so that it means the same anywhere; other names as they are.

    >>> absolute("emnist62"), absolute("/a/../b.py:load(size=3)")
    ('emnist62', '/b.py:load(size=3)')
    """
    file, found, rest = reference.partition(".py:")
    return f"{Path(file).expanduser().resolve()}.py:{rest}" if found else reference


def _call(text: str) -> ast.Call | None:
    try:
        parsed = ast.parse(f"f{text}", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return parsed if isinstance(parsed, ast.Call) and isinstance(parsed.func, ast.Name) else None


def _load_file(path: Path) -> types.ModuleType:
    name = f"fedsim_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up there
    spec.loader.exec_module(module)
    return module
