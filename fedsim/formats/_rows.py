"""A reader for files with an example per row, of which the caller says what are features, labels and clients."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from csv import reader as rows_of_csv
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FederatedData, FormatError
from fedsim.formats._convert import read, recognize
from fedsim.formats._image_folder import image_files, read_images
from fedsim.formats._leaf import leaf_files, read_leaf
from fedsim.formats._source import DAMAGE_ERRORS, StrPath, check_exists, locating_errors, open_decompressed, suffix_of
from fedsim.formats._table import (
    arrow_column,
    arrow_errors,
    check_separator,
    delimiter_of,
    lengths_checked,
    place_in_table,
    pyarrow_module,
)
from fedsim.text_files import is_number

_SPLITS = ("train", "test")
_VALIDATION = ("validation", "val", "dev")  # names of a third part, of which a file may have one
_SUFFIXES = {".csv", ".tsv", ".parquet", ".json", ".jsonl", ".ndjson", ".npz", ".h5", ".hdf5", ".sqlite"}
# Arrow infers the types of columns from the first block, so that a file of up to this size is one block.
_MAX_BLOCK = (1 << 31) - 2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The examples of a file, one per row.

    Attributes:
      columns: name of each column to its values ``[n, ...]``, numbers or truth values, or texts as an object array of ``str``.
      missing: name of each column that lacks values to ``bool [n]``, where they are missing. Such numbers are NaN, and such
        texts are empty.
      unsupported: name of each column that cannot be used to its type.
      clients: the client of each row, an object array ``[n]`` of ``str``; None if the format does not state clients.
      test: ``bool [n]``, the rows of a published test split; None if there is none.
      validation: ``bool [n]``, the rows of a published validation split; None if there is none.
      place: returns the place of a row in the file, such as ``"line 7"``.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/a.csv").write_text("user,x\\nbob,1\\nann,\\n")
    ...     rows = read_rows(f"{folder}/a.csv")
    ...     [rows.place(row) for row in np.flatnonzero(rows.missing["x"])], len(rows)
    (['line 3'], 2)
    """

    columns: dict[str, np.ndarray]
    missing: dict[str, np.ndarray]
    unsupported: dict[str, str]
    clients: np.ndarray | None
    test: np.ndarray | None
    place: Callable[[int], str]
    validation: np.ndarray | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


def read_rows(path: StrPath, *, text_columns: Sequence[str] = (), header: bool | None = None) -> Rows:
    """Reads a whole file with an example per row into memory.

    The format is recognized by the content: a table (CSV, also ``.tsv`` and ``.gz``; Parquet; JSON lines with an object per
    example), arrays of equal lengths (``.npz``), a dataset that Hugging Face's ``save_to_disk`` has written, a folder of
    images, or any format of `fedsim.formats.read` that states the clients. A folder of LEAF's files, of images or of a dataset
    of Hugging Face may have the parts ``train`` and ``test``, and then also ``validation``, ``val`` or ``dev``. The columns of
    images are ``image`` and the folders: ``folder``, or ``folder_1``, ``folder_2`` if there are several levels.

    A field without a character is missing, and so is NaN. In a column of numbers, so are ``NA`` and ``null``.

    Args:
      path: the file or folder.
      text_columns: columns of a table that are read as text, such as the ids of clients: in CSV all (``07`` is not ``7``), and
        in other tables those of whole numbers, which would become floats, and be rounded, if one is missing.
      header: whether the first line of a CSV file has the names of the columns, which otherwise are ``column_1``, ``column_2``,
        ...; None: yes, and a first line with a number is refused.

    Raises:
      ImportError: a library that the format needs is not installed.
      FileNotFoundError: there is no such file.
      FormatError: the format is unknown, the file is damaged or has no rows, or it seems to have no header; the message has the
        file and, if it is a text, the line.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(f"{folder}/a.jsonl").write_text('{"x": 1.5, "city": "Bern"}\\n{"x": 2, "city": "Basel"}\\n')
    ...     {name: column.tolist() for name, column in read_rows(f"{folder}/a.jsonl").columns.items()}
    {'x': [1.5, 2.0], 'city': ['Bern', 'Basel']}
    """
    source = check_exists(path, folder=True)
    kind = _kind(source)
    if header is not None and kind != "csv":
        raise FormatError(f"{source} is no CSV file, so it takes no header={header}: leave it out.")
    with locating_errors("" if kind in ("csv", "parquet", "rows", "arrow") else os.fspath(source), *DAMAGE_ERRORS):
        if kind == "csv":
            rows = _read_csv(source, text_columns, header)
        elif kind == "parquet":
            rows = _read_parquet(source, text_columns)
        elif kind == "rows":
            rows = _read_json(source, text_columns)
        elif kind == "arrow":
            rows = _joined({name: _read_arrow(part, text_columns) for name, part in _parts(source).items()})
        elif kind == "npz":
            rows = _read_npz(source)
        elif kind == "images":
            rows = _joined({name: _read_images(part) for name, part in _parts(source).items()})
        elif kind == "leaf" and source.is_dir():
            rows = _joined(
                {name: _of_clients(read_leaf(part, floats=np.float64).load()) for name, part in _parts(source).items()}
            )
        else:
            rows = _joined({name: _of_clients(part) for name, part in _populations(source, kind).items()})
    if not len(rows):
        raise FormatError(f"{source} has no rows: expected an example per row.")
    return rows


def is_data_file(text: str) -> bool:
    """Returns whether a text is the path of an existing file or folder, or has the suffix of a format of `read_rows`.

    >>> is_data_file("people.csv"), is_data_file("data/people.tsv.gz"), is_data_file("mine.py:load")
    (True, True, False)
    """
    path = Path(text).expanduser()
    try:
        return suffix_of(path) in _SUFFIXES or (bool(text) and path.exists())
    except OSError:  # The text is too long for a path.
        return False


def _kind(source: Path) -> str:
    """Returns the format of a file: a name of `recognize`, or one of the formats that have no clients."""
    if source.is_dir():
        parts = _parts(source)
        if any((part / "state.json").is_file() for part in parts.values()):
            return "arrow"
        if (source / "dataset_dict.json").is_file():
            names = sorted(part.parent.name for part in source.glob("*/state.json"))
            raise FormatError(
                f"{source} is a dataset of Hugging Face with the parts {', '.join(names) or 'none'}: expected train and test; "
                "give the folder of one part, from which a test part is drawn, or rename a part."
            )
        if all(leaf_files(part) for part in parts.values()):
            return "leaf"
        if any(image_files(part) for part in parts.values()):
            return "images"
        if not (source / "dataset_info.json").is_file():
            raise FormatError(
                f"{source} is a folder without data: expected LEAF's *.json, images in folders, or what Hugging Face's "
                "save_to_disk has written, possibly in the folders train and test; or give a file."
            )
        return recognize(source)
    if source.suffix.lower() in (".xlsx", ".xls", ".ods"):
        raise FormatError(f"{source} is a spreadsheet: save it as CSV.")
    if zipfile.is_zipfile(source) and source.suffix == ".npz":
        return "npz"
    try:
        kind = recognize(source)
    except FormatError:
        if {".csv", ".tsv"}.isdisjoint(source.suffixes) or not source.stat().st_size:
            raise
        kind = "csv"  # whose texts have another encoding, perhaps, which its reader says with the line
    if kind == "csv" and ".json" in source.suffixes:
        raise FormatError(f"{source} is no JSON that can be read: write an object per line, without brackets around them.")
    return "rows" if kind == "json_lines" and not _has_client_per_line(source) else kind


def _parts(folder: Path) -> dict[str, Path]:
    """Returns the folders of the train, test and validation splits; the folder itself if it has not both of the former."""
    parts = {name: folder / name for name in _SPLITS}
    if not all(part.is_dir() for part in parts.values()):
        return {"train": folder}
    validation = next((folder / name for name in _VALIDATION if (folder / name).is_dir()), None)
    return parts if validation is None else parts | {"validation": validation}


def _populations(source: Path, kind: str) -> dict[str, FederatedData]:
    """Reads the splits train, test and validation of a file that states clients, or its only split as train."""
    if kind == "packed":
        return {"train": FederatedData.open(source)}
    # Numbers are rounded to float32 after they are standardized, because the rounding of large ones would hide differences.
    options: dict[str, Any] = {"floats": np.float64} if kind in ("leaf", "json_lines") else {}
    try:
        streams = {name: read(source, split=name, format=kind, **options) for name in _SPLITS}
    except ValueError:  # The format has no splits, or the file has others.
        streams = {"train": read(source, format=kind, **options)}
    for name in _VALIDATION if "test" in streams else ():
        try:
            streams["validation"] = read(source, split=name, format=kind, **options)
            break
        except ValueError:  # There is no such split.
            continue
    return {name: stream.load() for name, stream in streams.items()}


def _joined(parts: Mapping[str, Rows]) -> Rows:
    """Returns the rows of all parts as one, with those of test and validation marked; those of train if there are no others."""
    train, *others = parts.values()
    if not others:
        return train
    for part, rows in parts.items():
        for name in {**train.columns, **rows.columns}:
            kinds = [_type(each.columns[name]) if name in each.columns else "absent" for each in (train, rows)]
            if kinds[0] != kinds[1]:
                raise FormatError(
                    f"column {name!r} is {kinds[0]} in train and {kinds[1]} in {part}: expected the same in both."
                )
    sizes = [len(rows) for rows in parts.values()]
    starts = np.cumsum([0, *sizes])
    part_of = np.repeat(list(parts), sizes)

    def missing(name: str) -> np.ndarray:
        return np.concatenate([rows.missing.get(name, np.zeros(len(rows), bool)) for rows in parts.values()])

    def place(row: int) -> str:
        at = list(parts).index(str(part_of[row]))
        return f"{parts[part_of[row]].place(row - int(starts[at]))} of {part_of[row]}"

    clients = [rows.clients for rows in parts.values() if rows.clients is not None]
    return Rows(
        columns={name: np.concatenate([rows.columns[name] for rows in parts.values()]) for name in train.columns},
        missing={name: missing(name) for name in dict.fromkeys(name for rows in parts.values() for name in rows.missing)},
        unsupported={name: kind for rows in parts.values() for name, kind in rows.unsupported.items()},
        clients=np.concatenate(clients) if len(clients) == len(parts) else None,
        test=part_of == "test",
        validation=part_of == "validation" if "validation" in parts else None,
        place=place,
    )


def _read_csv(source: Path, text_columns: Sequence[str], header: bool | None) -> Rows:
    pa = pyarrow_module()
    import pyarrow.csv as csv

    with arrow_errors(source):
        parsing = csv.ParseOptions(delimiter=delimiter_of(source), newlines_in_values=True)
        if header is not False:
            check_separator(source, parsing.delimiter)
        with open_decompressed(source) as file:
            content = file.read()
        try:
            content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise FormatError(f"line {line}: not UTF-8, got {content[error.start : error.end]!r}: save it as UTF-8.") from None
        start = io.StringIO(content[: 1 << 20].decode("utf-8-sig", "replace"), newline="")
        first = next(filter(None, rows_of_csv(start, delimiter=parsing.delimiter)), [])
        if header is not False:
            _check_header(first, header)
        if len(content) > _MAX_BLOCK:
            raise FormatError("the file has more than 2 GiB: convert it with fedsim datasets convert, and give the .h5 file.")
        # Arrow reads the names from the first row if it gets none.
        names = [f"column_{i + 1}" for i in range(len(first))] if header is False else []
        reading = csv.ReadOptions(block_size=len(content) + 1, column_names=names)

        def table(texts: Sequence[str]) -> Any:
            converting = csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()), strings_can_be_null=False)
            return csv.read_csv(pa.BufferReader(content), reading, parsing, converting)

        with lengths_checked(source):
            found = table(text_columns)
            dates = [field.name for field in found.schema if pa.types.is_temporal(field.type)]
            found = table([*text_columns, *dates]) if dates else found
        if header is not False and found.column_names != first:
            raise FormatError(
                f"line 1: cannot read the names of the columns, {found.column_names}: write them in the first line."
            )
        offset = 0 if header is not False else -1
        return _of_table(found, lambda row: place_in_table(source, row + offset), text_columns)


def _check_header(names: list[str], header: bool | None) -> None:
    """Raises `FormatError` if names occur twice or, unless ``header`` says that they are names, if one is a number."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise FormatError(f"line 1: two columns have the name {twice[0]!r}: rename one of them, or give header=False.")
    numbers = [name for name in names if is_number(name)]
    if numbers and header is None:
        raise FormatError(
            f"line 1: the file seems to have no header, because its first line has the value {numbers[0]!r} where the name of "
            "a column is expected: write a line with names above it, or give header=False (--header False), which names "
            "the columns column_1, column_2, ...; if it is a name, header=True."
        )


def _read_parquet(source: Path, text_columns: Sequence[str]) -> Rows:
    pyarrow_module()
    import pyarrow.parquet as parquet

    with arrow_errors(source):
        limits = {"thrift_string_size_limit": 1 << 24, "thrift_container_size_limit": 1 << 20}
        table = parquet.read_table(source, page_checksum_verification=True, partitioning=None, **limits)
        return _of_table(table, lambda row: f"row {row}", text_columns)


def _read_json(source: Path, text_columns: Sequence[str]) -> Rows:
    pa = pyarrow_module()
    import pyarrow.json as arrow_json

    with arrow_errors(source):
        with open_decompressed(source) as file:
            content = file.read()
        if len(content) > _MAX_BLOCK:
            raise FormatError("the file has more than 2 GiB: convert it to Parquet.")
        try:
            table = arrow_json.read_json(pa.BufferReader(content), arrow_json.ReadOptions(block_size=len(content) + 1))
        except pa.ArrowInvalid as error:
            raise FormatError(f"{_wrong_line(content) or error}") from None

    def place(row: int) -> str:
        lines = (number for number, line in enumerate(content.split(b"\n"), 1) if line.strip())
        return f"line {next(itertools.islice(lines, row, None))}"

    return _of_table(table, place, text_columns)


def _wrong_line(content: bytes) -> str | None:
    """Describes the first line that is no JSON object, or whose value is of another kind than those of the lines before."""
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            return f"line {number}: {error}: expected an object per line, {{column: value, ...}}"
        if not isinstance(entry, dict):
            return f"line {number}: Expected an object, {{column: value, ...}}, got {type(entry).__name__}"
        for name, value in entry.items():
            kind = "a number" if type(value) in (int, float) else type(value).__name__
            first, at = kinds.setdefault(name, (kind, number)) if value is not None else (kind, number)
            if kind != first:
                return f"line {number}: column {name!r} is {kind} here and {first} in line {at}: write values of one type"
    return None


def _has_client_per_line(source: Path) -> bool:
    """Whether lines have lists of examples, as `read_json_lines` expects, and are not one example each.

    The first line says it whose lists are not all empty, as those of a client without examples are.
    """
    with open_decompressed(source) as file:
        for line in filter(bytes.strip, file):
            try:
                entry = json.loads(line)
            except ValueError:
                return False
            lists = [value for value in entry.values() if isinstance(value, list)] if isinstance(entry, dict) else []
            if any(lists) or not lists:
                return any(value and isinstance(value[0], dict) for value in lists)
    return False


def _read_arrow(folder: Path, text_columns: Sequence[str]) -> Rows:
    """Reads a dataset of Hugging Face, whose files are Arrow streams that ``state.json`` lists."""
    pa = pyarrow_module()
    with arrow_errors(folder):
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            files = [folder / Path(each["filename"]).name for each in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"state.json cannot be read ({error}): write the dataset again by save_to_disk.") from None
        if state.get("_indices_data_files"):
            raise FormatError(
                "the dataset is stored with a selection of rows: write dataset.flatten_indices() by save_to_disk."
            )
        tables = []
        for file in files:
            with pa.memory_map(str(check_exists(file))) as content:
                tables.append(pa.ipc.open_stream(content).read_all())
        return _of_table(pa.concat_tables(tables), lambda row: f"row {row}", text_columns)


def _read_npz(source: Path) -> Rows:
    columns: dict[str, np.ndarray] = {}
    with np.load(source, allow_pickle=False) as arrays:
        for name in arrays.files:
            try:
                array = arrays[name]
            except ValueError as error:
                raise FormatError(
                    f"array {name!r} cannot be read ({error}): store numbers or texts, without objects."
                ) from None
            if not array.ndim:
                raise FormatError(f"array {name!r} has no rows, because it is a single value: leave it out.")
            columns[name] = array
    lengths = {name: len(array) for name, array in columns.items()}
    if len(set(lengths.values())) > 1:
        raise FormatError(f"the arrays have different lengths, {lengths}: expected a row per example in each.")
    return _of_arrays(columns, place=lambda row: f"row {row}")


def _read_images(folder: Path) -> Rows:
    files = image_files(folder)
    levels = {len(file.relative_to(folder).parts) - 1 for file in files}
    if len(levels) != 1 or levels == {0}:
        raise FormatError(
            "the images are in folders of different depths, or in none: expected one folder for each class, or for each client "
            "with a folder for each class."
        )
    (depth,) = levels
    names = ["folder"] if depth == 1 else [f"folder_{i + 1}" for i in range(depth)]
    parts = zip(*(file.relative_to(folder).parts[:-1] for file in files), strict=True)
    columns = {name: _texts(part) for name, part in zip(names, parts, strict=True)}
    images = read_images(files, list(map(str, files)))
    return _of_arrays(columns | {"image": images}, place=lambda row: str(files[row].relative_to(folder)))


def _of_clients(data: FederatedData) -> Rows:
    """Returns the examples of a population. Clients without examples have no rows."""
    owner = np.repeat(np.arange(data.num_clients), data.sizes)
    ids = _texts(list(data.client_ids))

    def place(row: int) -> str:
        return f"example {row - int(data.offsets[owner[row]])} of client {data.client_ids[owner[row]]!r}"

    columns = {name: column if isinstance(column, np.ndarray) else column[:] for name, column in data.columns.items()}
    return _of_arrays(columns, clients=ids[owner], place=place)


def _of_arrays(columns: dict[str, np.ndarray], place: Callable[[int], str], clients: np.ndarray | None = None) -> Rows:
    found, missing = {}, {}
    for name, column in columns.items():
        if column.dtype.kind in "OSU":
            column = _texts([each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in column])
            absent = column == ""
        else:
            absent = _is_nan(column)
        found[name] = column
        if absent.any():
            missing[name] = absent
    return Rows(columns=found, missing=missing, unsupported={}, clients=clients, test=None, place=place)


def _of_table(table: Any, place: Callable[[int], str], text_columns: Sequence[str]) -> Rows:
    pa = pyarrow_module()
    columns: dict[str, np.ndarray] = {}
    missing: dict[str, np.ndarray] = {}
    unsupported: dict[str, str] = {}
    for name, chunks in _named_columns(table):
        array = chunks.combine_chunks()
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if name in text_columns and pa.types.is_integer(array.type):
            array = array.cast(pa.string())
        absent = array.is_null().to_numpy(zero_copy_only=False)
        try:
            column = _filled(array, absent)
        except UnicodeDecodeError:  # bytes that are no text, such as the content of a file
            unsupported[name] = str(array.type)
            continue
        except FormatError as error:
            unsupported[name] = f"{array.type} ({error})" if _is_image(array.type) else str(array.type)
            continue
        absent = absent | (column == "" if column.dtype == object else _is_nan(column))
        columns[name] = column
        if absent.any():
            missing[name] = absent
    return Rows(columns=columns, missing=missing, unsupported=unsupported, clients=None, test=None, place=place)


def _named_columns(table: Any) -> Iterator[tuple[str, Any]]:
    names = table.column_names
    if len(set(names)) != len(names):
        raise FormatError(f"two columns have the same name, among {names}: rename one of them.")
    yield from zip(names, table.columns, strict=True)


def _filled(array: Any, absent: np.ndarray) -> np.ndarray:
    """Converts an Arrow array; instead of what is missing, numbers are NaN, so that they become floats, and texts are empty."""
    pa = pyarrow_module()
    if pa.types.is_null(array.type):  # a column without any value
        return np.full(len(array), np.nan)
    values = array.drop_null() if absent.any() else array
    if _is_image(array.type):
        contents = values.field("bytes").to_pylist()
        if None in contents:
            raise FormatError("images are stored as paths: store their content")
        present = read_images(contents, [f"image {i}" for i in range(len(contents))])
    else:
        present = arrow_column("", values)
    if present.dtype == object:
        present = _texts([each.decode() for each in present])
    if not absent.any():
        return present
    filled = np.full((len(array), *present.shape[1:]), "" if present.dtype == object else np.nan)
    filled = filled.astype(object) if present.dtype == object else filled
    filled[~absent] = present
    return filled


def _is_image(kind: Any) -> bool:
    """Returns whether an Arrow type is that of Hugging Face's images, which Parquet files may have, too."""
    pa = pyarrow_module()
    return pa.types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}


def _type(column: np.ndarray) -> str:
    """Returns the kind and shape of a column; whole numbers are floats where values are missing, so they are one kind."""
    return f"{'text' if column.dtype == object else 'of numbers'} {list(column.shape[1:])}"


def _is_nan(column: np.ndarray) -> np.ndarray:
    """Whether a number of each row is NaN, ``bool [n]``."""
    if column.dtype.kind != "f":
        return np.zeros(len(column), bool)
    return np.isnan(column).any(axis=tuple(range(1, column.ndim)))


def _texts(values: Sequence[str]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array
