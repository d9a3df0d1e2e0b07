"""Readers and writers for CSV and Parquet files with a column of client ids."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import itertools
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from csv import reader as rows_of_csv
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import ClientStream, FormatError
from fedsim.durable_files import atomic_write
from fedsim.formats._client_index import ClientIndex
from fedsim.formats._source import (
    Clients,
    Columns,
    Features,
    StrPath,
    check_exists,
    decoded,
    locating_errors,
    open_decompressed,
    selected,
    stream,
    suffix_of,
    texts,
    writable_columns,
)

Stack = Mapping[str, str | Sequence[str]]
_BUCKET_BYTES = 1 << 26
_PARQUET = b"PAR1"


def read_table(path: StrPath, client: str, features: Features = None, *, stack: Stack | None = None) -> ClientStream:
    """Reads a CSV (``.csv``, ``.tsv``, also ``.gz``) or Parquet file, with clients in the order of their first appearance.

    The rows of a client may be anywhere in the file, which is read twice. The first pass reads only the column of clients, and
    stores one integer per row. The second pass writes the rows to temporary files (in ``TMPDIR``) of about 64 MiB, one for each
    range of clients, so memory is limited to one such file or the largest client. A smaller file is grouped in memory.

    Args:
      path: the file.
      client: the column with the client ids. In CSV they are the text of the file: ``7``, ``07`` and ``7.0`` are different
        clients. In Parquet, where the column may have any type, they are the text of its values.
      features: the names of the features to read, or a mapping from names to ``(shape, dtype)``; None: every column except
        ``client``. Numbers keep their types, strings and dates become text, and lists of equal length (Parquet) become a
        further dimension.
      stack: a mapping from names of new features ``[n, k]`` to the k numeric columns that they consist of: a list of names, or
        a pattern such as ``"x*"``, whose columns are in the file's order.

    Raises:
      ImportError: pyarrow is not installed.
      FileNotFoundError: there is no such file.
      FormatError: the file is damaged, has no such column, lacks a value, or has values of different types in a column; raised
        when the file is opened or read.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/a.csv").write_text("user,x0,x1,word\\nbob,1,2,to\\nann,3,4,be\\nbob,5,6,or\\n")
    ...     data = read_table(f"{folder}/a.csv", "user", stack={"x": "x*"}).load()
    >>> {client.client_id: (client["x"].tolist(), client["word"].tolist()) for client in data}
    {'bob': ([[1, 2], [5, 6]], [b'to', b'or']), 'ann': ([[3, 4]], [b'be'])}
    """
    source = check_exists(path)
    with arrow_errors(source):
        encoded = (batch.column(0).dictionary_encode() for batch in _batches(source, client, only=True))
        client_index = ClientIndex((array.dictionary.to_pylist(), _without_nulls(array.indices)) for array in encoded)

    def read() -> Iterator[tuple[str, Columns | None]]:
        with arrow_errors(source):
            for client_id, table in _grouped(source, client, client_index, features):
                with locating_errors(f"client {client_id!r}"):
                    names = [name for name in table.column_names if name != client and _wanted(name, features, stack or {})]
                    _check_values(source, client_index, client_id, table, names)
                    columns = {name: arrow_column(name, table[name].combine_chunks()) for name in names}
                    yield client_id, selected(_stacked(columns, stack or {}), features)

    return stream(path, read, len(client_index.names))


def _batches(path: Path, client: str, features: Features = None, only: bool = False) -> Iterator[Any]:
    """Yields the rows of a file as Arrow record batches, ``only`` those of the column of clients or all columns."""
    pa = pyarrow_module()
    import pyarrow.csv as csv
    import pyarrow.parquet as parquet

    with path.open("rb") as file:
        head = file.read(4)
    if head == _PARQUET:
        # The header of a damaged file may have lists and names of any length.
        limits = {"thrift_string_size_limit": 1 << 24, "thrift_container_size_limit": 1 << 20}
        with parquet.ParquetFile(path, page_checksum_verification=True, **limits) as table:
            _check_column_names(client, table.schema_arrow.names)
            yield from table.iter_batches(1 << 14, columns=[client] if only else None)
        return
    compression = "gzip" if head[:2] == b"\x1f\x8b" else None
    reading = csv.ReadOptions(block_size=1 << 23)
    parsing = csv.ParseOptions(delimiter=delimiter_of(path), newlines_in_values=True)
    check_separator(path, parsing.delimiter)
    types = {client: pa.string()}
    if isinstance(features, Mapping):
        for name, (_, dtype) in features.items():
            types[name] = pa.string() if np.dtype(dtype).kind in "OS" else pa.from_numpy_dtype(dtype)

    def open_csv(**options: Any) -> Any:
        converting = csv.ConvertOptions(column_types=types, **options)
        return csv.open_csv(files.enter_context(pa.input_stream(str(path), compression)), reading, parsing, converting)

    with contextlib.ExitStack() as files, lengths_checked(path):
        table = open_csv()
        _check_column_names(client, table.schema.names)
        dates = {field.name: pa.string() for field in table.schema if pa.types.is_temporal(field.type)}
        types = dates | types
        yield from open_csv(include_columns=[client]) if only else open_csv() if dates else table


def delimiter_of(path: Path) -> str:
    return "\t" if suffix_of(path) == ".tsv" else ","


def check_separator(path: Path, delimiter: str) -> None:
    """Raises `FormatError` if the first line seems to have another separator, with which Arrow would report damage."""
    with open_decompressed(path) as file:
        names = file.readline(1 << 16).decode("utf-8", "replace")
    others = [other for other in (",", "\t", ";", "|") if other != delimiter and other in names]
    if others and delimiter not in names:
        expected = "commas in .csv" if delimiter == "," else "tabs in .tsv"
        raise FormatError(
            f"the file seems to be separated by {others[0]!r}, and this reader expects {expected}: convert the file"
            + (", or give it the suffix .tsv." if others[0] == "\t" else ".")
        )


def _check_values(path: Path, client_index: ClientIndex, client_id: str, table: Any, names: Sequence[str]) -> None:
    """Raises `FormatError` for a missing value of a client; the message has its line, or in Parquet its row, in the file."""
    for name in names:
        if table[name].null_count:
            row = table[name].combine_chunks().is_null().index(True).as_py()
            at = int(np.flatnonzero(client_index.rows == client_index.names.index(client_id))[row])
            raise FormatError(
                f"Feature {name!r} has no value in row {row} of the client, {place_in_table(path, at)} of the file: fill in a "
                "value or drop the row."
            )


@contextlib.contextmanager
def lengths_checked(path: Path) -> Iterator[None]:
    """Names the line in the error for a row of a CSV file that has more or fewer fields than the first line."""
    try:
        yield
    except pyarrow_module().ArrowInvalid:
        with open_decompressed(path) as file:
            lines = rows_of_csv(io.TextIOWrapper(file, "utf-8-sig", "replace", newline=""), delimiter=delimiter_of(path))
            columns = len(next(filter(None, lines), []))
            for row in lines:
                if row and len(row) != columns:
                    raise FormatError(
                        f"line {lines.line_num}: Expected {columns} columns, got {len(row)}: write a field for each column, "
                        "and quote those that contain the separator."
                    ) from None
        raise


def place_in_table(path: Path, row: int) -> str:
    """Returns the place of a row of a file; in CSV, fields and so rows may have several lines, and empty lines are no rows."""
    with open_decompressed(path) as file:
        if file.peek(4)[:4] == _PARQUET:  # type: ignore[attr-defined]
            return f"row {row}"
        lines = rows_of_csv(io.TextIOWrapper(file, "utf-8-sig", "replace", newline=""), delimiter=delimiter_of(path))
        next(itertools.islice(filter(None, lines), row + 1, None))
        return f"line {lines.line_num}"


def _without_nulls(indices: Any) -> np.ndarray:
    if indices.null_count:
        raise FormatError("some rows have no client id: fill in the ids or drop the rows")
    return indices.to_numpy()


def _check_column_names(client: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise FormatError(f"two columns have the same name, among {names}: rename one of them.")
    if client not in names:
        raise FormatError(f"the column of clients must be one of {names}, got client={client!r}.")


def _grouped(path: Path, client: str, client_index: ClientIndex, features: Features) -> Iterator[tuple[str, Any]]:
    """Yields each client's id and rows, the latter as an Arrow table."""
    with tempfile.TemporaryDirectory(prefix="fedsim-table-") as folder:
        for table in _buckets(path, client, client_index, features, folder):
            numbers = table[client].to_numpy()
            order = np.argsort(numbers, kind="stable")
            table, numbers = table.take(order), numbers[order]
            cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
            for start, stop in itertools.pairwise(cuts):
                yield client_index.names[numbers[start]], table.slice(start, stop - start)


def _buckets(path: Path, client: str, client_index: ClientIndex, features: Features, folder: str) -> Iterator[Any]:
    """Yields the rows of successive ranges of clients, with client numbers in the column ``client``."""
    pa = pyarrow_module()
    batches = _numbered(path, client, client_index, features)
    first = next(batches)  # There is at least one row, as ClientIndex checked.
    # The range of each client, if every row has the size of those in the first batch.
    ends = np.cumsum(np.bincount(client_index.rows, minlength=len(client_index.names)))
    bucket_of = ((ends - 1) * (first.nbytes / first.num_rows) // _BUCKET_BYTES).astype(np.int64)
    batches = itertools.chain([first], batches)
    if bucket_of[-1] == bucket_of[0]:
        yield pa.Table.from_batches(batches)
        return
    with contextlib.ExitStack() as files:
        sinks: dict[int, Any] = {}
        for batch in batches:
            bucket = bucket_of[batch.column(client).to_numpy()]
            for number in np.unique(bucket).tolist():
                if number not in sinks:
                    sinks[number] = files.enter_context(pa.ipc.new_file(f"{folder}/{number}", batch.schema))
                sinks[number].write_batch(batch.take(np.flatnonzero(bucket == number)))
    for number in sorted(sinks):
        with pa.memory_map(f"{folder}/{number}") as content:
            yield pa.ipc.open_file(content).read_all()
        os.unlink(f"{folder}/{number}")


def _numbered(path: Path, client: str, client_index: ClientIndex, features: Features) -> Iterator[Any]:
    at = 0
    for batch in _batches(path, client, features):
        numbers = client_index.rows[at : at + batch.num_rows]
        at += batch.num_rows
        if len(numbers) != batch.num_rows:
            break
        if batch.num_rows:
            yield batch.set_column(batch.schema.get_field_index(client), client, pyarrow_module().array(numbers))
    if at != len(client_index.rows):
        raise FormatError(
            f"column {client!r} has {len(client_index.rows)} rows, but the other columns have another number of rows."
        )


def arrow_column(name: str, array: Any) -> np.ndarray:
    """Converts an Arrow array to a NumPy array ``[n, ...]``, or to text ``[n]``."""
    pa = pyarrow_module()
    kind = array.type
    if pa.types.is_dictionary(kind):
        return arrow_column(name, array.dictionary_decode())
    if isinstance(kind, pa.BaseExtensionType):
        return arrow_column(name, array.storage)
    if array.null_count:
        row = array.is_null().index(True).as_py()
        raise FormatError(f"Feature {name!r} has no value in row {row} of the client: fill in a value or drop the row.")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = np.unique(array.value_lengths().to_numpy(zero_copy_only=False)) if len(array) else [0]
        if len(lengths) != 1:
            raise FormatError(
                f"Feature {name!r} has lists of {lengths[0]} to {lengths[-1]} values: expected lists of one "
                "length. Leave the feature out by features=[...]."
            )
        inner = arrow_column(name, array.flatten())
        return inner.reshape(len(array), int(lengths[0]), *inner.shape[1:])
    if pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_timestamp(kind):
        kind = pa.string()
        array = array.cast(kind)
    if any(is_text(kind) for is_text in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        array = array.cast(pa.large_binary())
    if array.type in (pa.binary(), pa.large_binary()):
        return texts(array.to_pylist())
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise FormatError(
            f"Feature {name!r} has type {kind}: expected numbers, strings, or lists of them. "
            "Leave the feature out by features=[...]."
        )
    return array.to_numpy(zero_copy_only=False)


def _wanted(name: str, features: Features, stack: Stack) -> bool:
    members = [fnmatch.fnmatchcase(name, each) if isinstance(each, str) else name in each for each in stack.values()]
    return features is None or name in features or any(members)


def _stacked(columns: dict[str, np.ndarray], stack: Stack) -> dict[str, np.ndarray]:
    for name, members in stack.items():
        chosen = [each for each in columns if fnmatch.fnmatchcase(each, members)] if isinstance(members, str) else list(members)
        absent = [member for member in chosen if member not in columns]
        if not chosen or absent:
            raise FormatError(f"stack={{{name!r}: {members!r}}} names no columns: the columns are {sorted(columns)}.")
        wrong = [member for member in chosen if columns[member].dtype == object]
        if wrong:
            raise FormatError(f"stack={{{name!r}: {members!r}}} needs numbers, but column {wrong[0]!r} is text.")
        columns[name] = np.stack([columns.pop(member) for member in chosen], axis=1)
    return columns


def write_table(clients: Clients, path: StrPath, client: str = "client_id") -> None:
    """Writes a CSV file (suffix ``.csv`` or ``.tsv``, also ``.gz``) or else a Parquet file, created only when it is complete.

    In Parquet, further dimensions are lists of fixed size. In CSV, a feature ``x [n, k]`` becomes columns ``x_0`` to
    ``x_{k-1}``. A table has one row per example, so clients without examples are left out, and a warning states their number.

    Args:
      clients: the clients to write.
      path: the file.
      client: the name of the column for the client ids.

    Raises:
      ImportError: pyarrow is not installed.
      FileNotFoundError: the folder does not exist.
      ValueError: text is not UTF-8, or a table does not support a dtype (the message names the client); a feature has the name
        of the column for client ids; the path ends in ``.gz`` and is not that of a CSV file.

    >>> import pathlib, tempfile
    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_clients({"ann": {"x": np.array([[1, 2], [3, 4]])}, "bob": {"x": np.array([[5, 6]])}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_table(data, f"{folder}/a.csv")
    ...     print(pathlib.Path(f"{folder}/a.csv").read_text())
    "client_id","x_0","x_1"
    "ann",1,2
    "ann",3,4
    "bob",5,6
    <BLANKLINE>
    """
    pa = pyarrow_module()
    import pyarrow.csv as csv
    import pyarrow.parquet as parquet

    comma_separated = suffix_of(path) in (".csv", ".tsv")
    if not comma_separated:
        check_not_compressed(path)
    with atomic_write(path) as temporary, contextlib.ExitStack() as files:
        writer: Any = None
        for table in _tables(clients, client, flat=comma_separated):
            if writer is None and comma_separated:
                sink = files.enter_context(pa.output_stream(str(temporary), "gzip" if Path(path).suffix == ".gz" else None))
                options = csv.WriteOptions(delimiter=delimiter_of(Path(path)))
                writer = files.enter_context(csv.CSVWriter(sink, table.schema, write_options=options))
            elif writer is None:
                writer = files.enter_context(parquet.ParquetWriter(temporary, table.schema, write_page_checksum=True))
            writer.write_table(table)
        if writer is None:
            raise ValueError("The population is empty: expected at least one client.")


def check_not_compressed(path: StrPath) -> None:
    """Raises ``ValueError`` if the name of a file in another format than CSV says that it is compressed."""
    if Path(path).suffix == ".gz":
        raise ValueError(f"Expected a name without .gz, which only CSV files may have, got {os.fspath(path)!r}: leave .gz out.")


def _tables(clients: Clients, client: str, flat: bool) -> Iterator[Any]:
    """Yields clients as Arrow tables of a few megabytes, so that a file of small clients has few row groups."""
    pa = pyarrow_module()
    waiting: list[Any] = []
    size = empty = 0
    for dataset in clients:
        empty += not len(dataset)
        if client in dataset.examples:
            raise ValueError(
                f"A feature is called {client!r}, like the column for client ids: give that column another name by client=."
            )
        columns: dict[str, Any] = {client: pa.array([dataset.client_id] * len(dataset), pa.string())}
        for name, array in _flattened(writable_columns(dataset), flat):
            if array.dtype == object:
                columns[name] = pa.array(decoded(dataset.client_id, name, array), pa.string())
            elif 0 in array.shape[1:]:
                raise ValueError(
                    f"Feature {name!r} has no values, as its shape per example is {list(array.shape[1:])}: leave it out."
                )
            else:
                columns[name] = _arrow(array)
        waiting.append(pa.table(columns))
        size += waiting[-1].nbytes
        if size > 1 << 24:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)
    if empty:
        warnings.warn(f"Clients without examples have no rows in a table: {empty} of them are left out.", stacklevel=4)


def _flattened(examples: Columns, flat: bool) -> Iterator[tuple[str, np.ndarray]]:
    for name, column in examples.items():
        array = np.ascontiguousarray(column)
        if flat and array.ndim > 1 and prod(array.shape[1:]):
            rows = array.reshape(len(array), prod(array.shape[1:]))
            yield from ((f"{name}_{i}", rows[:, i]) for i in range(rows.shape[1]))
        else:
            yield name, array


def _arrow(array: np.ndarray) -> Any:
    pa = pyarrow_module()
    column = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def pyarrow_module() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            "Tables (CSV, Parquet, JSON lines) and datasets of Hugging Face need pyarrow, which is not installed: "
            "pip install 'fedsim-jax[formats]'."
        ) from error
    return pyarrow


@contextlib.contextmanager
def arrow_errors(path: Path) -> Iterator[None]:
    """Converts Arrow's errors for a damaged file to `FormatError`; a full disk remains an `OSError`."""
    pa = pyarrow_module()
    try:
        with locating_errors(os.fspath(path), pa.ArrowException, UnicodeDecodeError, MemoryError):
            yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise FormatError(f"{path}: truncated or damaged, download or write it again ({error})") from error
