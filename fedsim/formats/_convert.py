"""Reading files of any known format, and conversion between formats."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fedsim.data import ClientStream, FederatedData, FormatError
from fedsim.formats._fedjax_sqlite import read_fedjax_sqlite, write_fedjax_sqlite
from fedsim.formats._idx import IDX_TYPES
from fedsim.formats._json_lines import read_json_lines
from fedsim.formats._leaf import leaf_files, read_leaf, write_leaf
from fedsim.formats._source import DAMAGE_ERRORS, Clients, StrPath, check_exists, locating_errors, open_decompressed, suffix_of
from fedsim.formats._sqlite import HEADER, Database
from fedsim.formats._table import check_not_compressed, read_table, write_table
from fedsim.formats._tfds import read_tfds
from fedsim.formats._tff_hdf5 import read_tff_hdf5, write_tff_hdf5
from fedsim.formats._tff_sqlite import read_tff_sqlite, write_tff_sqlite


def _read_packed(path: StrPath) -> ClientStream:
    return ClientStream.of(FederatedData.open(path))


READERS: dict[str, Callable[..., ClientStream]] = {
    "packed": _read_packed,
    "tff_hdf5": read_tff_hdf5,
    "tff_sqlite": read_tff_sqlite,
    "fedjax_sqlite": read_fedjax_sqlite,
    "leaf": read_leaf,
    "json_lines": read_json_lines,
    "csv": read_table,
    "parquet": read_table,
    "tfds": read_tfds,
}
_WRITERS: dict[str, Callable[..., None]] = {
    "tff_hdf5": write_tff_hdf5,
    "tff_sqlite": write_tff_sqlite,
    "fedjax_sqlite": write_fedjax_sqlite,
    "leaf": write_leaf,
    "csv": write_table,
    "parquet": write_table,
}
_SUFFIXES = {".h5": "packed", ".hdf5": "packed", ".json": "leaf", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}


def read(path: StrPath, *, split: str | None = None, format: str | None = None, **options: Any) -> ClientStream:
    """Reads a file of any known format. The format is recognized by the file's content.

    Args:
      path: the file; for LEAF and TensorFlow Datasets it may be a folder.
      split: the split to read, for formats that can have several splits in one file.
      format: the name of the format; None: recognize it. Names are ``packed``, ``tff_hdf5``, ``tff_sqlite``, ``fedjax_sqlite``,
        ``leaf``, ``json_lines``, ``csv``, ``parquet`` and ``tfds``.
      **options: options of the format's ``read_...`` function, such as ``client="user"`` for tables.

    Returns:
      A stream of clients.

    Raises:
      FileNotFoundError: there is no such file or folder.
      ValueError: the format does not have an option, or requires another one.
      FormatError: the format is unknown, or the file is damaged.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/a.csv").write_text("user,y\\nann,1\\nbob,2\\nann,3\\n")
    ...     [(client.client_id, client["y"].tolist()) for client in read(f"{folder}/a.csv", client="user")]
    [('ann', [1, 3]), ('bob', [2])]
    """
    name = recognize(path) if format is None else format
    if name not in READERS:
        raise ValueError(f"Expected format= (--source-format) to be one of {', '.join(sorted(READERS))}, got {format!r}.")
    if split is not None:
        options["split"] = split
    _check_options(READERS[name], name, options, given=1)
    return READERS[name](path, **options)


def convert(
    source: StrPath,
    target: StrPath,
    *,
    split: str | None = None,
    client: str | None = None,
    source_format: str | None = None,
    target_format: str | None = None,
    progress: bool = True,
    **options: Any,
) -> None:
    """Converts a file to another format, client by client, in bounded memory.

    ``target`` is created only when the conversion is complete.

    Args:
      source: the file or folder to read; see `read`.
      target: the file to write. Without ``target_format`` its suffix determines the format: ``.h5`` is packed, ``.json`` is
        LEAF; ``.csv``, ``.tsv`` (also ``.gz``) and ``.parquet`` are tables.
      split: the split to read, for formats that can have several splits in one file.
      client: the column with client ids, for tables.
      source_format: the name of the source's format; None: recognize it.
      target_format: the name of the target's format: ``packed``, ``leaf``, ``csv``, ``parquet``, ``fedjax_sqlite``,
        ``tff_sqlite`` or ``tff_hdf5``; None: by the suffix.
      progress: whether to show a progress bar.
      **options: further options of `read`, such as ``features=["x", "y"]``.

    Raises:
      FileNotFoundError: there is no such file, or no folder to write to.
      ValueError: the target's format cannot be written, or that of a table is not the one of its suffix; the target ends in
        ``.gz`` and is no CSV file; an option does not belong to the source's format.
      FormatError: the format of ``source`` is unknown, or the file is damaged.

    >>> import tempfile
    >>> import numpy as np
    >>> data = FederatedData.from_clients({"ann": {"y": np.array([3, 4])}, "bob": {"y": np.array([5])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_leaf(data, f"{folder}/a.json")
    ...     convert(f"{folder}/a.json", f"{folder}/a.h5", progress=False)
    ...     FederatedData.open(f"{folder}/a.h5").sizes.tolist()
    [2, 1]
    """
    writable = ["packed", *_WRITERS]
    suffix = suffix_of(target)
    name = target_format or _SUFFIXES.get(suffix)
    if name not in writable:
        given = f"target_format={target_format!r}" if target_format else f"target {os.fspath(target)!r}"
        raise ValueError(
            f"Expected a target that ends in {', '.join(sorted(_SUFFIXES))}, or target_format= (--format), one of "
            f"{', '.join(sorted(writable))}; got {given}."
        )
    if name in ("csv", "parquet") and (suffix in (".csv", ".tsv")) != (name == "csv"):  # Readers go by the suffix, too.
        ending = ".csv or .tsv" if name == "csv" else ".parquet"
        raise ValueError(f"Expected a target that ends in {ending} for {name}, got target {os.fspath(target)!r}: rename it.")
    if name != "csv":
        check_not_compressed(target)
    if client is not None:
        options["client"] = client
    clients = read(source, split=split, format=source_format, **options)
    label = Path(target).name if progress else None
    if name == "packed":
        clients.save(target, progress=label)
    else:
        _WRITERS[name](_counted(clients, label), target)


def _counted(clients: ClientStream, label: str | None) -> Clients:
    return tqdm(clients, label, clients.num_clients, unit=" clients", disable=None if label else True, leave=False)


def _check_options(reader: Callable[..., Any], name: str, options: dict[str, Any], given: int) -> None:
    """Raises ``ValueError`` for unknown options of a reader, and for missing required ones."""
    parameters = list(inspect.signature(reader).parameters.values())[given:]
    unknown = sorted(set(options) - {parameter.name for parameter in parameters})
    if unknown:
        known = ", ".join(parameter.name for parameter in parameters) or "none"
        raise ValueError(f"Format {name} has no option {unknown[0]!r}. Its options are: {known}.")
    needed = [each.name for each in parameters if each.default is inspect.Parameter.empty and each.name not in options]
    if needed:
        raise ValueError(f"Format {name} needs {needed[0]}= (--{needed[0]}): the name of the column of client ids.")


def recognize(path: StrPath) -> str:
    """Returns the name of the format of a file or folder, recognized by its content.

    Raises:
      FileNotFoundError: there is no such file or folder.
      FormatError: the format is unknown. The message describes the content.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/a").write_bytes(b"PK is how ZIP archives begin")
    ...     recognize(f"{folder}/a")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedsim.data._errors.FormatError: ...a looks like a ZIP archive: unpack it first. Known formats: ...
    """
    source = check_exists(path, folder=True)
    if source.is_dir():
        if (source / "dataset_info.json").is_file():
            return "tfds"
        if leaf_files(source):
            return "leaf"
        raise _unknown(source, "a folder without LEAF's *.json and without TensorFlow Datasets' dataset_info.json")
    with locating_errors(os.fspath(source), *DAMAGE_ERRORS), open_decompressed(source) as file:
        head = file.read(1 << 16)
    if head.startswith(HEADER):
        return _recognize_sqlite(source)
    for magic, name in ((b"PAR1", "parquet"), (b"fedsim.packed", "packed"), (b"\x89HDF\r\n\x1a\n", "tff_hdf5")):
        if head.startswith(magic):
            return name
    description = _describe_foreign(head)
    if description is not None:
        raise _unknown(source, description)
    return _recognize_text(source, head)


def _recognize_sqlite(path: Path) -> str:
    database = Database(path)
    with locating_errors(os.fspath(path)), database.reading() as connection:
        names = {str(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "federated_data" in names:
        return "fedjax_sqlite"
    if {"examples", "client_metadata"} <= names:
        return "tff_sqlite"
    raise _unknown(path, f"SQLite with tables {sorted(names)}, neither FedJAX's federated_data nor TFF's examples")


def _describe_foreign(head: bytes) -> str | None:
    """Describes a file that no reader can read; None if it is text."""
    if not head:
        return "an empty file"
    if head[:2] == b"\0\0" and len(head) > 3 and head[2] in IDX_TYPES:
        return (
            "an idx file, which has no clients: read its array by read_idx, and divide it among clients by fedsim.partitioners"
        )
    if head[:2] == b"PK":
        return "a ZIP archive: unpack it first"
    if head[257:262] == b"ustar":
        return "a tar archive: unpack it first"
    if head[:6] == b"\x93NUMPY":
        return "a NumPy array, which has no clients: give it to FederatedData.from_arrays, with the clients' sizes"
    try:
        head[: max(1, len(head) - 4)].decode()
    except UnicodeDecodeError:
        return f"binary data beginning with {head[:8]!r}"
    return f"binary data beginning with {head[:8]!r}" if b"\0" in head else None


def _recognize_text(path: Path, head: bytes) -> str:
    text = head.decode("utf-8-sig", "replace").lstrip()
    if text.startswith("{"):
        key = re.match(r'\{\s*("(?:[^"\\]|\\.)*")', text)
        try:
            first = json.loads(key[1]) if key else None
        except ValueError:
            first = None
        return "leaf" if first in ("users", "num_samples", "user_data", "hierarchies") else "json_lines"
    line = text.partition("\n")[0]
    if {".csv", ".tsv"} & set(path.suffixes) or "," in line:
        return "csv"
    raise _unknown(path, f"text beginning with {line[:30]!r}")


def _unknown(path: Path, description: str) -> FormatError:
    return FormatError(f"{path} looks like {description}. Known formats: {', '.join(READERS)}.")
