"""Checkpoints: a state as named plain arrays on disk, written whole or not at all, and checked when read."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim.data import ClientRows, FormatError
from fedsim.data._client_rows import is_rows
from fedsim.data._row_store import RowFile
from fedsim.execution import ClientTable
from fedsim.experiment._disk import writing

State = Any
Leaves = dict[str, np.ndarray]

_FILES = "files.json"
_ROWS = "clients.rows"


class SavedRows(NamedTuple):
    """What a checkpoint holds of `ClientRows`: where in the file each client's row is, -1 for none, and its checksum."""

    index: Any
    checksums: Any


class Checkpoints:
    """The checkpoints of one run: ``FOLDER/<round>/``, each an orbax directory of plain arrays.

    A leaf of the state is stored under its path (``.params['linear']['w']``), and no class is stored at all, so a class may be
    renamed or moved and its old checkpoints stay readable. Last of all a list of the files and their checksums is written:
    a directory without it is not yet a checkpoint, and one that does not agree with it is damaged.

    The rows of `ClientRows` are in one file beside, ``FOLDER/clients.rows``, and a checkpoint holds where, and their checksums.
    What a checkpoint refers to is not overwritten before that checkpoint is deleted.

    Args:
      folder: of the checkpoints.
      about: whose rows these are, written into their file: another algorithm or population is refused.

    >>> import tempfile
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()))
    >>> checkpoints.save(3, {"w": jax.numpy.ones(2)})
    >>> state, round = checkpoints.newest(jax.eval_shape(lambda: {"w": jax.numpy.zeros(2)}))
    >>> round, state["w"].tolist()
    (3, [1.0, 1.0])
    """

    def __init__(self, folder: Path, about: Mapping[str, Any] | None = None) -> None:
        self.folder = folder.absolute()
        self._about = about or {}
        self._file: RowFile | None = None
        # Rows are kept for as long as a ClientRows refers to them: these do for the checkpoints.
        self._pinned: dict[int, list[ClientRows]] = {}

    @staticmethod
    def available() -> bool:
        """Whether orbax is installed."""
        # find_spec("orbax.checkpoint") would import orbax, and fail if that is missing.
        return importlib.util.find_spec("orbax") is not None

    def rounds(self) -> list[int]:
        """Rounds with a checkpoint, the oldest first."""
        return sorted(int(path.parent.name) for path in self.folder.glob(f"*/{_FILES}") if path.parent.name.isdigit())

    def adopt(self, state: State) -> State:
        """The same state, with what clients keep in the file beside the checkpoints: only so can it be saved at no cost.

        Raises:
          ValueError: the file holds rows of another algorithm or population, or is damaged.
        """

        def adopted(leaf: Any) -> Any:
            if not isinstance(leaf, ClientRows) or leaf.store is self._file:
                return leaf
            return leaf.copied(self._rows(leaf))

        return jax.tree.map(adopted, state, is_leaf=is_rows)

    def save(self, round: int, state: State) -> None:
        """Writes the state after ``round`` rounds; without effect if it is there already, and undamaged."""
        path, state = self._path(round), self.adopt(state)
        rows = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_rows) if is_rows(leaf)]
        if _is_whole(path) and _same(rows, self._pinned.get(round, [])):
            return
        with writing(path):
            (path / _FILES).unlink(missing_ok=True)  # while it is overwritten it is no checkpoint
            self._pinned[round] = rows
            # What a process left that was killed here, or met a full disk: orbax would log that it removes it.
            shutil.rmtree(path.with_name(f"{path.name}.orbax-checkpoint-tmp"), ignore_errors=True)
            if self._file and rows:
                self._file.sync()
            _orbax().save(path, to_leaves(jax.tree.map(_saved, state, is_leaf=is_rows)) or {"": np.zeros(1)}, force=True)
            beside = path / f"{_FILES}.tmp"
            beside.write_text(json.dumps(_checksums(path)))
            beside.replace(path / _FILES)

    def load(self, round: int, like: State, *, apart: bool = False) -> State:
        """The state after ``round`` rounds, in the structure of ``like`` (arrays or ``jax.ShapeDtypeStruct``).

        What clients kept comes back as `ClientRows` in the file, or as the `ClientTable` that it was; ``apart``: as rows in a
        store of their own, for those who do not go on with the run: it may go on writing to its file.

        Raises:
          ValueError: the state has other leaves, shapes or dtypes than ``like``; they are named.
          OSError, ValueError: the checkpoint is damaged.
        """
        return self._found(from_leaves(*_as_saved(self._read(round), like)), like, apart=apart)

    def newest(self, like: State, *, apart: bool = False) -> tuple[State, int] | None:
        """The newest state that can be read, and its round; None if there never was a checkpoint. ``apart``: see `load`.

        A checkpoint that cannot be read is passed over with a warning, for the one before.

        Raises:
          ValueError: there are checkpoints and none can be read, or they hold another structure than ``like``.
        """
        self._open_rows(like)
        rounds = self.rounds()
        for round in reversed(rounds):
            try:
                leaves = self._read(round)
            except (OSError, ValueError) as error:
                warnings.warn(f"The checkpoint of round {round} is damaged and skipped: {error}.", stacklevel=2)
                continue
            saved = from_leaves(*_as_saved(leaves, like))
            try:
                state = self._found(saved, like, apart=apart)
            except FormatError as error:
                warnings.warn(f"The checkpoint of round {round} is damaged and skipped: {error}", stacklevel=2)
                continue
            if not apart:
                self._pin({other for other in rounds if other != round}, like)
            return state, round
        if rounds:
            raise ValueError(f"All checkpoints in {self.folder} were damaged. Start anew with another run folder.")
        return None

    def keep_only(self, rounds: set[int]) -> None:
        """Deletes all other checkpoints, and what a killed process left half-written."""
        for path in self.folder.iterdir():
            if path.name != _ROWS and not (path.name.isdigit() and int(path.name) in rounds):
                (path / _FILES).unlink(missing_ok=True)  # first of all it ceases to be a checkpoint
                shutil.rmtree(path, ignore_errors=True)
        self._pinned = {round: rows for round, rows in self._pinned.items() if round in rounds}

    def _path(self, round: int) -> Path:
        return self.folder / f"{round:08d}"

    def _read(self, round: int) -> Leaves:
        path = self._path(round)
        expected = json.loads((path / _FILES).read_text())
        # orbax is not asked to read damaged files: its errors are many, and some come from threads.
        for name, checksum in _checksums(path).items():
            if expected.pop(name, None) != checksum:
                raise ValueError(f"{name} is truncated or changed")
        if expected:
            raise ValueError(f"{', '.join(expected)} is missing")
        return {name: np.asarray(leaf) for name, leaf in _orbax().restore(path).items() if name}

    def _rows(self, like: ClientRows) -> RowFile:
        """The file of rows, made if it is not there."""
        if self._file is None:
            with writing(self.folder / _ROWS):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = RowFile(like.store.like, self.folder / _ROWS, self._about)
        return self._file

    def _open_rows(self, like: State) -> None:
        """Opens the file that ``like`` asks for, if it is there: what is wrong with it is wrong with all checkpoints."""
        for leaf in jax.tree.leaves(like, is_leaf=is_rows):
            if is_rows(leaf) and (self.folder / _ROWS).exists():
                self._rows(leaf)

    def _found(self, saved: State, like: State, *, apart: bool = False, read: bool = True) -> State:
        """`SavedRows` as `ClientRows`; every row is read once, be it to keep it ``apart``, and compared with its checksum."""

        def found(like: Any, saved: Any) -> Any:
            if not isinstance(saved, SavedRows):
                return saved
            self._open_rows(like)
            if self._file is None:
                raise FormatError(f"{self.folder / _ROWS} is missing.")
            index = np.asarray(saved.index, np.int64)
            checksums, rows = np.asarray(saved.checksums), ClientRows(self._file, index)
            if not apart:
                self._file.expect(index, checksums, read=read)
                return rows
            with self._file.expected(index, checksums):
                return rows.copied()

        return jax.tree.map(found, like, saved, is_leaf=is_rows)

    def _pin(self, rounds: set[int], like: State) -> None:
        """Keeps the rows of checkpoints that nobody has loaded."""
        for round in rounds if self._file else ():
            try:
                state = self._found(from_leaves(*_as_saved(self._read(round), like)), like, read=False)
            except (OSError, ValueError):
                continue  # It cannot be read now; whoever reads it later will see by the checksums what is left of its rows.
            self._pinned[round] = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_rows) if is_rows(leaf)]


def _same(some: list[ClientRows], others: list[ClientRows]) -> bool:
    return len(some) == len(others) and all(np.array_equal(a.index, b.index) for a, b in zip(some, others, strict=True))


def _saved(leaf: Any) -> Any:
    return SavedRows(leaf.index, leaf.store.checksums(leaf.index)) if is_rows(leaf) else leaf


def _as_saved(leaves: Leaves, like: State) -> tuple[Leaves, State]:
    """What `from_leaves` takes: ``like`` with what a checkpoint holds in the place of `ClientRows`, a table if it has that."""

    def saved(path: Any, leaf: Any) -> Any:
        if not is_rows(leaf):
            return leaf
        name = jax.tree_util.keystr(path)
        if f"{name}.seen" in leaves:
            clients = len(leaves[f"{name}.seen"])
            rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((clients, *x.shape), x.dtype), leaf.store.like)
            return ClientTable(rows, jax.ShapeDtypeStruct((clients,), np.bool_))
        clients = leaves.get(f"{name}.index", leaf.index).shape[0]
        of_each = [jax.ShapeDtypeStruct((clients,), dtype) for dtype in (np.int64, np.uint32)]
        return SavedRows(*of_each)

    return leaves, jax.tree_util.tree_map_with_path(saved, like, is_leaf=is_rows)


def to_leaves(state: State) -> Leaves:
    """The leaves of a pytree by path, on the host; a PRNG key becomes its data, and its path says so."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if _is_key(leaf):
            name, leaf = f"{name} ({jax.random.key_impl(leaf)} key)", jax.random.key_data(leaf)
        named[name] = leaf
    # orbax refuses arrays without elements; there is nothing to keep of them either.
    return {name: np.asarray(leaf) for name, leaf in jax.device_get(named).items() if np.size(leaf)}


def from_leaves(leaves: Mapping[str, np.ndarray], like: State) -> State:
    """The inverse of `to_leaves`, in the structure of ``like``."""
    keys = {name.rsplit(" (", 1)[0]: name for name in leaves if name.endswith(" key)")}
    paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    empty = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in wanted.items() if leaf.size == 0}
    leaves = {**leaves, **empty}
    there = {name for name in leaves if name not in keys.values()} | set(keys)
    if wanted.keys() != there:
        lacking, extra = sorted(wanted.keys() - there), sorted(there - wanted.keys())
        raise ValueError(f"The checkpoint is of another algorithm or model: it lacks {lacking} and also has {extra}.")
    restored = []
    for name, leaf in wanted.items():
        if name in keys:
            implementation = keys[name].rsplit(" (", 1)[1].removesuffix(" key)")
            restored.append(jax.random.wrap_key_data(jax.numpy.asarray(leaves[keys[name]]), impl=implementation))
            continue
        stored, shape, dtype = leaves[name], np.shape(leaf), np.dtype(leaf.dtype)
        if stored.shape != shape or stored.dtype != dtype:
            raise ValueError(
                f"The checkpoint is of another algorithm or model: {name} is {stored.dtype}{list(stored.shape)} there and "
                f"{dtype}{list(shape)} here."
            )
        restored.append(jax.numpy.asarray(stored))
    return jax.tree.unflatten(treedef, restored)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _checksums(folder: Path) -> dict[str, int]:
    """The CRC-32 of each file but the list itself."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(_FILES))
    return {path.relative_to(folder).as_posix(): zlib.crc32(path.read_bytes()) for path in files}


def _is_whole(path: Path) -> bool:
    try:
        return json.loads((path / _FILES).read_text()) == _checksums(path)
    except (OSError, ValueError):
        return False


def _orbax() -> Any:
    import orbax.checkpoint as ocp  # takes half a second to import, and is optional

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
