"""What a run depends on besides its configuration: the user's own code, and the versions of packages."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.metadata
import inspect
import platform
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim._version import __version__
from fedsim.data import FederatedData
from fedsim.descriptions import SIMPLE, hash_of
from fedsim.names import is_installed

_PACKAGE = Path(__file__).parents[1]
_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "dm-haiku", "scipy", "networkx", "scikit-learn", "orbax-checkpoint")
_JAX_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
_OPAQUE = (str, bytes, np.ndarray, jax.Array, FederatedData)


def code_of(*values: Any) -> dict[str, str]:
    """Returns hashes of the user's own code that some objects, classes, functions or modules use: of source files, by paths.

    Code counts as the user's own if it is neither a part of Python, of an installed package nor of fedsim. A file also counts
    if another one of the user's files imports it. Of a notebook and of the script that runs, only the classes and functions
    that the objects use are hashed, by the names ``__main__.NAME``, because the rest of it does not belong to the run.

    >>> code_of(len, FederatedData)
    {}
    """
    found: dict[str, str] = {}
    pending = {value.__name__ for value in values if isinstance(value, types.ModuleType)}
    for thing in _reached(values):
        if thing.__module__ == "__main__":
            found |= _source(thing)
        elif isinstance(thing.__module__, str):
            pending.add(thing.__module__)
    while pending:
        name = pending.pop()
        path = _own_file(name)
        if path is not None and str(path) not in found:
            source = path.read_bytes()
            found[str(path)] = hash_of(source)
            pending |= _imports(source, name if path.name == "__init__.py" else name.rpartition(".")[0])
            for value in vars(sys.modules[name]).values() if name in sys.modules else ():  # what importlib has imported
                used = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
                pending |= {used} if isinstance(used, str) else set()
    return dict(sorted(found.items()))


def changed_code(stored: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the files, classes and functions whose code is another one than a run has recorded.

    Args:
      stored: what `code_of` returned when the run began.
      now: what it returns now; files that it does not contain are read.
    """

    def current(name: str) -> str | None:
        if name in now:
            return now[name]
        if name.startswith("__main__."):  # Only the notebook or the script itself can compare it.
            return stored[name] if not now else None
        # Somebody else may have written the names, and a device or a pipe has no end.
        return hash_of(Path(name).read_bytes()) if Path(name).is_file() else None

    return [name for name, known in stored.items() if current(name) != known]


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Python, fedsim and the packages that affect results, and the commit if fedsim is a checkout."""
    found = {"fedsim": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if found_commit := commit():
        found["commit"] = found_commit
    return found


def commit() -> str:
    """Returns the commit of the checkout that contains fedsim, and whether its files have changed; "" if there is none."""
    if head := _git("rev-parse", "HEAD"):
        return head + (" with changes" if _git("status", "--porcelain", "--untracked-files=no", "--", str(_PACKAGE)) else "")
    return ""


def jax_settings() -> dict[str, Any]:
    """Returns the settings of JAX that affect results."""
    return {name: getattr(jax.config, name, None) for name in _JAX_SETTINGS}


def _git(*arguments: str) -> str:
    """Returns what git says about the checkout that contains fedsim; "" if there is none."""
    if not (_PACKAGE.parent / ".git").exists():
        return ""
    # Without locks, git writes nothing, so no other command of git has to wait, and none is broken by a limit of this process.
    command = ["git", "--no-optional-locks", "-C", str(_PACKAGE.parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _own_file(name: str) -> Path | None:
    """Returns the source file of a module if it is the user's own; None for other modules. Nothing is imported."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:  # A function will import it.
        spec, parts = None, name.split(".")
        for end in range(1, len(parts) + 1):
            spec = PathFinder.find_spec(".".join(parts[:end]), spec.submodule_search_locations if spec else None)
            if spec is None or (end < len(parts) and spec.submodule_search_locations is None):
                return None
        file = spec.origin if spec else None
    if name == "__main__" or not file or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    return path if path.is_file() and not is_installed(str(path)) else None


def _imports(source: bytes, package: str) -> set[str]:
    """Returns the modules that source code imports, also in its functions. What it imports from a module may be one, too."""
    found: set[str] = set()
    try:
        nodes = ast.walk(ast.parse(source))
    except SyntaxError:  # The import will say so.
        return found
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return {".".join(name.split(".")[: end + 1]) for name in found for end in range(name.count(".") + 1)} - {""}


def _reached(values: Any) -> Iterator[Any]:
    """Yields the classes and functions that values consist of: in fields, attributes, containers, closures and defaults."""
    seen: dict[int, Any] = {}  # by id; the values are kept, so that no id is used twice
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (*_OPAQUE, SIMPLE, types.ModuleType)):
            continue
        seen[id(value)] = value
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            pending += [*value, type(value)]
        elif isinstance(value, functools.partial):
            pending += [value.func, value.args, value.keywords]
        elif isinstance(value, types.MethodType):
            pending += [value.__self__, value.__func__]
        elif isinstance(value, type):
            yield value
            pending += value.__mro__[1:-1]
            if value.__module__ == "__main__":
                pending += [inspect.unwrap(getattr(each, "__func__", each)) for each in vars(value).values() if callable(each)]
        elif isinstance(value, types.FunctionType):
            yield value
            pending += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            pending += [value.__defaults__, value.__kwdefaults__, getattr(value, "__wrapped__", None)]
            if value.__module__ == "__main__":
                pending += [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        else:
            pending.append(type(value))
            names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
            pending += [getattr(value, name, None) for name in names] or list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of global variables and attributes that a function uses, and the functions in it."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _source(thing: Any) -> dict[str, str]:
    """Returns the hash of the source of a function of a notebook or script, with the values of simple globals that it uses."""
    if not isinstance(thing, types.FunctionType):
        return {}
    try:
        lines = inspect.getsource(thing)
    except (OSError, TypeError):  # It was made by exec, as the __init__ of a dataclass.
        return {}
    used = {name: thing.__globals__.get(name) for name in sorted(_names(thing.__code__)) if name in thing.__globals__}
    simple = {name: value for name, value in used.items() if isinstance(value, SIMPLE)}
    return {f"__main__.{thing.__qualname__}": hash_of(lines.encode(), repr(simple).encode())}
