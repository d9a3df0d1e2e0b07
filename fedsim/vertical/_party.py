"""`Party`: what one organization knows of its people."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import checks
from fedsim.data import FormatError
from fedsim.text_files import first_repeated, read_table, read_text, separator_hint


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Party:
    """The ids of the people that a party knows, and its columns, the labels, or both.

    Rows are in any order. `align` brings the rows of several parties into a common order.

    Attributes:
      ids: one text or whole number per person, ``[n]``, all different. A number and its decimal digits are the same id.
      columns: numbers or arrays of numbers by name, ``[n, ...]``; stored as ``float32``. Empty for a party with labels only.
      labels: ``[n]``, or None; whole numbers are stored as ``int32``, others as ``float32``.

    Raises:
      ValueError: an id occurs twice, is empty, or is neither a text nor a whole number; a column or the labels do not have one
        finite value per id, in the range of ``float32`` or, for whole labels, ``int32``; or there are neither columns nor
        labels.

    >>> bank = Party(ids=["ann", "bob"], columns={"income": [3.1, 2.0]}, labels=[1, 0])
    >>> bank.columns["income"].dtype, bank.labels.tolist()
    (dtype('float32'), [1, 0])
    >>> Party(ids=["ann", "ann"], labels=[1, 0])
    Traceback (most recent call last):
    ...
    ValueError: Expected ids to be different, got the id 'ann' in 2 rows: keep one row per person.
    """

    ids: Sequence[str] | Sequence[int] | np.ndarray
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    labels: Any = None

    def __post_init__(self) -> None:
        ids = tuple(map(_as_id, self.ids))
        if empty := [row for row, each in enumerate(ids) if not each.strip()]:
            raise ValueError(f"Expected an id for every row, got an empty text in row {empty[0]}: fill it in or drop the row.")
        if len(set(ids)) < len(ids):
            unique, counts = np.unique(ids, return_counts=True)
            twice = str(unique[np.argmax(counts > 1)])
            raise ValueError(
                f"Expected ids to be different, got the id {twice!r} in {ids.count(twice)} rows: keep one row per person."
            )
        if not self.columns and self.labels is None:
            raise ValueError("Expected a party to have columns or labels, got neither: give columns={name: values} or labels.")
        columns = {name: _checked(f"column {name!r}", values, ids, np.float32) for name, values in self.columns.items()}
        labels = self.labels
        if labels is not None:
            whole = np.asarray(labels).dtype.kind in "iub"
            labels = _checked("labels", labels, ids, np.int32 if whole else np.float32)
            if labels.ndim != 1:
                raise ValueError(f"Expected one label per id, got labels of shape {list(labels.shape)}: give labels [n].")
        for name, value in (("ids", ids), ("columns", columns), ("labels", labels)):
            object.__setattr__(self, name, value)

    @classmethod
    def from_csv(cls, path: str | Path, *, ids: str = "id", labels: str | None = None, prefix: str = "") -> Party:
        """Reads a table of numbers with a line of names, such as those of FATE's examples.

        The file is in UTF-8, with or without a byte order mark, and may be gzipped. Empty lines are skipped.

        Args:
          path: the file.
          ids: the name of the column with ids, which are read as texts.
          labels: the name of the column with labels; None if the party has none. If all are whole numbers, they are stored as
            ``int32``.
          prefix: is put before the names of the other columns, because in FATE's files both parties have columns ``x0``, ....

        Raises:
          ValueError: there is no column ``ids`` or ``labels``, or both are the same; two columns have the same name; a row has
            more or fewer values than there are names, or an empty id; or a value is not a finite number, or too large.

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("id,y,x0\\n7,1,0.5\\n3,0,-2\\n"), file.flush()
        ...     party = Party.from_csv(file.name, labels="y", prefix="bank.")
        >>> party.ids, party.columns["bank.x0"].tolist(), party.labels.tolist()
        (('7', '3'), [0.5, -2.0], [1, 0])
        """
        path = Path(path)
        if labels == ids:
            raise ValueError(
                f"Expected ids and labels in different columns of {path.name}, got {ids!r} for both: name the other."
            )
        names, rows = read_table(read_text(path), path)
        for option, name in (("ids", ids), ("labels", labels)):
            if name is not None and name not in names:
                hint = separator_hint(names)
                raise ValueError(
                    f"{path}: Expected {option} to be a column of {path.name}, got {option}={name!r}: it has {names}{hint}."
                )
        table = dict(zip(names, zip(*(row for _, row in rows), strict=True), strict=True))
        places = [f"id {person!r}, {place}" for person, (place, _) in zip(table[ids], rows, strict=True)]
        own_ids = table.pop(ids)
        for (place, _), person in zip(rows, own_ids, strict=True):
            if not person:
                raise ValueError(
                    f"{place}: Expected an id in column {ids!r} of every row, got an empty one: fill it in or drop the row."
                )
        if twice := first_repeated(own_ids):
            lines = [place.rpartition(" ")[2] for person, (place, _) in zip(own_ids, rows, strict=True) if person == twice]
            raise ValueError(
                f"Expected ids to be different, got the id {twice!r} in the lines {', '.join(lines)} of {path}: keep one row "
                "per person."
            )
        numbers = {}
        for name, values in table.items():
            what = "labels" if name == labels else f"column {name!r}"
            numbers[name] = _numbers(f"column {name!r} of {path.name}", what, places, values)
        own_labels = numbers.pop(labels) if labels is not None else None
        if own_labels is not None and np.all((own_labels == np.round(own_labels)) & (np.abs(own_labels) < 2**63)):
            own_labels = own_labels.astype(np.int64)
        try:
            return cls(ids=own_ids, columns={f"{prefix}{name}": values for name, values in numbers.items()}, labels=own_labels)
        except ValueError as error:
            raise FormatError(f"{path}: {error}") from None

    def matrix(self) -> np.ndarray:
        """Returns all columns side by side, flattened to ``float32 [n, width]``, in the order of `columns`.

        >>> Party(ids=[1, 2], columns={"age": [30, 40], "scores": [[1, 2], [3, 4]]}).matrix().tolist()
        [[30.0, 1.0, 2.0], [40.0, 3.0, 4.0]]
        """
        return np.concatenate([column.reshape(len(column), -1) for column in self.columns.values()], axis=1)


def _as_id(value: Any) -> str:
    if isinstance(value, str | int | np.integer) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"Expected ids to be texts or whole numbers, got {value!r}: convert them, for example with str.")


def check_different(what: str, names: Sequence[str]) -> None:
    """Raises ``ValueError`` unless all names differ.

    >>> check_different("columns", ["age", "age"])
    Traceback (most recent call last):
    ...
    ValueError: Expected columns to have different names, got 'age' 2 times: rename or leave out all but one.
    """
    for name, count in collections.Counter(names).items():
        if count > 1:
            raise ValueError(
                f"Expected {what} to have different names, got {name!r} {count} times: rename or leave out all but one."
            )


def _checked(what: str, values: Any, ids: Sequence[str], dtype: Any) -> np.ndarray:
    checks.unmasked(**{what: values})
    array = np.asarray(values)
    if array.ndim == 0 or len(array) != len(ids):
        raise ValueError(f"Expected one value per id in {what}, got shape {list(array.shape)} for {len(ids)} ids.")
    if array.dtype.kind not in "iufb":
        raise ValueError(f"Expected numbers in {what}, got {array.ravel().tolist()[0]!r}: encode other values as numbers.")
    if not np.all(np.isfinite(array)):
        raise ValueError(f"Expected finite numbers in {what}, got NaN or infinity: fill in or leave out missing values.")
    limits: Any = np.iinfo(dtype) if dtype is np.int32 else np.finfo(dtype)
    outside = np.argwhere((array < limits.min) | (array > limits.max))
    if len(outside):
        at = tuple(outside[0])
        remedy = "number classes from 0" if dtype is np.int32 else "scale them"
        raise ValueError(
            f"Expected numbers in {what} between {limits.min} and {limits.max}, the range of {np.dtype(dtype)}, got "
            f"{array[at]} for id {ids[at[0]]!r}: {remedy}."
        )
    changed = np.argwhere(array != array.astype(dtype))
    if len(changed) and np.all(array == np.rint(array)):
        at = tuple(changed[0])
        raise ValueError(
            f"Expected whole numbers in {what} that {np.dtype(dtype)} has, all up to 2**24, got {array[at]} for id "
            f"{ids[at[0]]!r}: scale or renumber them, or convert them to {np.dtype(dtype)} if their rounding is meant."
        )
    return array.astype(dtype)


def _numbers(column: str, what: str, places: Sequence[str], values: Sequence[str]) -> np.ndarray:
    for place, value in zip(places, values, strict=True):
        try:
            number = float(value)
        except ValueError:
            raise ValueError(
                f"Expected numbers in {column}, got {value!r} for {place}: encode texts as numbers, and fill in missing values."
            ) from None
        if not math.isfinite(number):
            raise ValueError(
                f"Expected finite numbers in {what}, got NaN or infinity for {place}: fill in or leave out missing values."
            )
    return np.array(values, np.float64)
