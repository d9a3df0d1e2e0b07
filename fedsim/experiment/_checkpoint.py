"""Checkpoints: a state as named arrays on disk, either complete or ignored, and verified when it is read."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import distributed
from fedsim.data import ClientRows, FormatError, is_rows
from fedsim.data._row_store import RowFile
from fedsim.durable_files import writing
from fedsim.rounds import ClientTable, FederatedState
from fedsim.saved_arrays import FILES, Leaves, checkpoint_folder, checkpoint_rounds, is_complete, read_arrays, write_arrays

State = Any

_ROWS = "clients.rows"
# The file that the folder of a deployed run has. What its clients keep is at the nodes.
DEPLOYMENT = "deployment.json"


class SavedRows(NamedTuple):
    """The form in which a checkpoint stores `ClientRows`.

    Attributes:
      index: ``int64 [num_clients]``, the number of each client's row in the row file; -1 for clients without a row.
      checksums: ``uint32 [num_clients]``, the checksum of each row; 0 for clients without a row.
      processes: ``int32 []``, the number of processes that wrote the rows, each into a file of its own; () if it was one.
    """

    index: Any
    checksums: Any
    processes: Any = ()

    def in_file(self, number: int) -> np.ndarray:
        """Returns the index with the rows in the file of one process, and -1 for clients whose row is in another file."""
        index = np.asarray(self.index, np.int64)
        return np.where(distributed.owners(np.arange(len(index)), self.num_files) == number, index, -1)

    @property
    def num_files(self) -> int:
        """The number of files that have the rows."""
        return 1 if isinstance(self.processes, tuple) else int(self.processes)


class Checkpoints:
    """The checkpoints of one run: ``FOLDER/<round>/``, each an orbax directory of plain arrays.

    A leaf of the state is stored under its path (``.params['linear']['w']``). No class is stored, so old checkpoints can be
    read after a class was renamed or moved. The list of the files and their checksums is written last: a directory without
    the list is not a checkpoint, and one whose files differ from the list is damaged. The list is written when the files are on
    the disk.

    The rows of `ClientRows` are in one file, ``FOLDER/clients.rows``. A checkpoint holds their positions and checksums. Rows
    that a checkpoint refers to are not overwritten until the checkpoint is deleted.

    If several processes share a run, each has an object of this class, and calls the same methods, on a file system that they
    share. Each writes its parts of the arrays that are divided over processes, and the rows of its own clients into a file of
    its own, ``FOLDER/clients.<process>.rows`` (of process 0 ``FOLDER/clients.rows``). Process 0 writes the list when all have
    finished. A state can be read by another number of processes; each copies the rows that it finds in the file of another one.

    Args:
      folder: the folder of the checkpoints.
      rows_identity: the algorithm and population that the rows belong to. It is written into the row file, and a file with
        another one is refused.
      keeps_memories: whether states have what clients keep, see `fedsim.execution.Execution`.

    >>> import tempfile
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()))
    >>> checkpoints.save(3, {"w": jax.numpy.ones(2)})
    >>> state, round = checkpoints.newest(jax.eval_shape(lambda: {"w": jax.numpy.zeros(2)}))
    >>> round, state["w"].tolist()
    (3, [1.0, 1.0])
    """

    def __init__(self, folder: Path, rows_identity: Mapping[str, Any] | None = None, *, keeps_memories: bool = True) -> None:
        self.folder = folder.absolute()
        self._lacks_rows = keeps_memories and (self.folder.parent / DEPLOYMENT).exists()
        self._rows_identity = rows_identity or {}
        self._file: RowFile | None = None
        # The row file frees rows to which no ClientRows refers, so these references protect the rows of the checkpoints.
        self._referenced: dict[int, list[ClientRows]] = {}
        self._num_files: dict[int, int] = {}  # how many files have the rows of each checkpoint

    @staticmethod
    def available() -> bool:
        """Returns whether orbax is installed."""
        # find_spec("orbax.checkpoint") would import orbax, and fail if that is missing.
        return importlib.util.find_spec("orbax") is not None

    def rounds(self) -> list[int]:
        """Returns the rounds that have a checkpoint, in increasing order."""
        return checkpoint_rounds(self.folder)

    def with_row_file(self, state: State) -> State:
        """Returns the state with its `ClientRows` moved into the row file of the checkpoints, where saving copies nothing.

        Raises:
          ValueError: the file holds rows of another algorithm or population, or is damaged.
        """

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, ClientRows) or leaf.store is self._file:
                return leaf
            return leaf.copied(ClientRows(self._row_file(leaf), np.full(len(leaf.index), -1)))

        return jax.tree.map(moved, state, is_leaf=is_rows)

    def save(self, round: int, state: State) -> None:
        """Writes the state after ``round`` rounds. Does nothing if an undamaged checkpoint of this round exists.

        Raises:
          OSError: a file cannot be written.
        """
        path, state = self._path(round), distributed.in_all(lambda: self.with_row_file(state))
        rows = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_rows) if is_rows(leaf)]
        has_same_rows = all(distributed.of_all(_same_rows(rows, self._referenced.get(round, []))))
        if has_same_rows and distributed.from_first(distributed.is_first() and is_complete(path)):
            return

        def prepare() -> None:
            if distributed.is_first():
                (path / FILES).unlink(missing_ok=True)  # while it is overwritten, it is not a checkpoint
                # Left by a process that was killed or found the disk full; orbax would log a warning about it.
                shutil.rmtree(path.with_name(f"{path.name}.orbax-checkpoint-tmp"), ignore_errors=True)
            if self._file and rows:
                self._file.sync()

        with writing(path):
            distributed.in_all(prepare)
            self._referenced[round], self._num_files[round] = rows, jax.process_count()
            write_arrays(path, to_leaves(jax.tree.map(_saved, state, is_leaf=is_rows)))

    def load(self, round: int, like: State, *, separate_rows: bool = False) -> State:
        """Returns the state after ``round`` rounds.

        Args:
          round: the round of the checkpoint.
          like: the structure of the state, of arrays or ``jax.ShapeDtypeStruct``.
          separate_rows: whether to copy `ClientRows` into a store of their own. Needed by callers that do not continue the
            run, because the run may write to its row file. Otherwise the rows stay in the file.

        Raises:
          ValueError: the state has other leaves, shapes or dtypes than ``like``, which are named; or the checkpoint is damaged.
          OSError: a file of the checkpoint cannot be read.
        """
        return self._restored(from_leaves(*_as_saved(self._read(round), like, round)), like, separate_rows=separate_rows)

    def newest(self, like: State, *, separate_rows: bool = False, until: int | None = None) -> tuple[State, int] | None:
        """Returns the newest state that can be read and its round; None if there is no checkpoint.

        A checkpoint that cannot be read is skipped with a warning, and the one before it is read.

        Args:
          like, separate_rows: those of `load`.
          until: the last round whose checkpoint may be read; None: any.

        Raises:
          ValueError: there are checkpoints and none can be read, or they hold another structure than ``like``.
        """
        self._open_row_file(like)
        rounds = [round for round in self.rounds() if until is None or round <= until]
        for round in reversed(rounds):
            leaves, error = distributed.attempted_in_all(functools.partial(self._read, round), OSError, ValueError)
            if leaves is None:
                warnings.warn(f"The checkpoint of round {round} is damaged and skipped: {error}.", stacklevel=2)
                continue
            saved = from_leaves(*_as_saved(leaves, like, round))
            if not separate_rows:
                self._reference_rows(saved, round)
                self._reference_rows_of({other for other in rounds if other != round}, like)
            restore = functools.partial(self._restored, saved, like, separate_rows=separate_rows)
            state, error = distributed.attempted_in_all(restore, FormatError)
            if state is None:
                warnings.warn(f"The checkpoint of round {round} is damaged and skipped: {error}", stacklevel=2)
                continue
            return state, round
        if rounds:
            raise ValueError(f"All checkpoints in {self.folder} are damaged. Start the run again in another folder.")
        return None

    def keep_only(self, rounds: set[int]) -> None:
        """Deletes other checkpoints, what a killed process left incomplete, and row files that no checkpoint refers to."""
        # Before a process overwrites the rows of a deleted checkpoint, process 0 has deleted it.
        distributed.in_first(lambda: self._delete_others(rounds))
        self._referenced = {round: rows for round, rows in self._referenced.items() if round in rounds}

    def _delete_others(self, rounds: set[int]) -> None:
        for path in self.folder.iterdir():
            if path.is_dir() and not (path.name.isdigit() and int(path.name) in rounds):
                (path / FILES).unlink(missing_ok=True)  # first, so that it is never an incomplete checkpoint
                shutil.rmtree(path, ignore_errors=True)
        if all(round in self._num_files for round in rounds):
            number = max([jax.process_count(), *(self._num_files[round] for round in rounds)])
            while (path := self._rows_path(number)).exists():
                path.unlink()
                number += 1

    def _path(self, round: int) -> Path:
        return checkpoint_folder(self.folder, round)

    def _rows_path(self, process: int) -> Path:
        return self.folder / (f"clients.{process}.rows" if process else "clients.rows")

    def _read(self, round: int) -> Leaves:
        return read_arrays(self._path(round))

    def _row_file(self, like: ClientRows) -> RowFile:
        """Returns the row file of this process, which is created if it does not exist."""
        if self._file is None:
            path = self._rows_path(jax.process_index())
            with writing(path):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = RowFile(like.store.like, path, self._rows_identity)
        return self._file

    def _open_row_file(self, like: State) -> None:
        """Opens the row file if ``like`` has rows and the file exists: a damaged file concerns all checkpoints."""
        for leaf in jax.tree.leaves(like, is_leaf=is_rows):
            if is_rows(leaf) and self._rows_path(jax.process_index()).exists():
                self._row_file(leaf)

    def _restored(self, saved: State, like: State, *, separate_rows: bool = False) -> State:
        """Converts `SavedRows` to `ClientRows`. Every row of this process is read once and compared with its checksum."""

        def restored(like: Any, saved: Any) -> Any:
            if not isinstance(saved, SavedRows):
                return saved
            if self._lacks_rows:
                raise ValueError(
                    f"What the clients of the run in {self.folder.parent} keep between rounds is at its nodes: continue it "
                    "with `fedsim resume`, or simulate it in another folder, from its first round."
                )
            clients, checksums, this = len(saved.index), np.asarray(saved.checksums), jax.process_index()
            is_own = distributed.owners(np.arange(clients)) == this
            in_files = {number: np.where(is_own, saved.in_file(number), -1) for number in range(saved.num_files)}
            in_files = {number: index for number, index in in_files.items() if np.any(index >= 0)}
            for path in map(self._rows_path, in_files):
                if not path.exists():
                    raise FormatError(f"{path} is missing.")
            rows = ClientRows.empty(like.store.like, clients)
            if not separate_rows:
                file, index = self._row_file(like), in_files.pop(this, rows.index)
                file.expect(index, checksums)
                rows = ClientRows(file, index)
            for number, index in in_files.items():
                file = RowFile(like.store.like, self._rows_path(number), self._rows_identity)
                with file.expected(index, checksums):
                    rows = ClientRows(file, index).copied(rows)
            return rows

        return jax.tree.map(restored, like, saved, is_leaf=is_rows)

    def _reference_rows(self, saved: State, round: int) -> None:
        """Protects the rows of a checkpoint in the file of this process, also those of clients that it keeps no more."""
        rows = [leaf for leaf in jax.tree.leaves(saved, is_leaf=_is_saved) if _is_saved(leaf)]
        self._num_files[round] = max([1, *(leaf.num_files for leaf in rows)])
        if self._file:
            in_file = [leaf.in_file(jax.process_index()) for leaf in rows]
            exist = [np.where(index < self._file.capacity, index, -1) for index in in_file]
            self._referenced[round] = [ClientRows(self._file, index) for index in exist]

    def _reference_rows_of(self, rounds: set[int], like: State) -> None:
        """Protects the rows of checkpoints that are not loaded."""
        for round in rounds if self._file else ():
            # If it cannot be read now but later, the checksums show which of its rows were overwritten.
            with contextlib.suppress(OSError, ValueError):
                self._reference_rows(from_leaves(*_as_saved(self._read(round), like, round)), round)


def _same_rows(some: list[ClientRows], others: list[ClientRows]) -> bool:
    return len(some) == len(others) and all(np.array_equal(a.index, b.index) for a, b in zip(some, others, strict=True))


def _saved(leaf: Any) -> Any:
    """Converts `ClientRows` to what a checkpoint holds for them, of all processes."""
    if not is_rows(leaf):
        return leaf
    index, checksums = map(distributed.entries_of_owners, (leaf.index, leaf.store.checksums(leaf.index)))
    return SavedRows(index, checksums, np.int32(jax.process_count()) if jax.process_count() > 1 else ())


def _is_saved(leaf: Any) -> bool:
    return isinstance(leaf, SavedRows)


def _as_saved(leaves: Leaves, like: State, round: int) -> tuple[Leaves, State]:
    """Returns the arguments of `from_leaves`: in ``like``, `ClientRows` become what the checkpoint holds for them.

    A run that was continued with another number of rounds may keep another number of earlier models than it did when the
    checkpoint was written.
    """

    def saved(path: Any, leaf: Any) -> Any:
        if not is_rows(leaf):
            return leaf
        name = jax.tree_util.keystr(path)
        if f"{name}.seen" in leaves:  # The run that wrote the checkpoint had a table on its devices.
            clients = len(leaves[f"{name}.seen"])
            rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((clients, *x.shape), x.dtype), leaf.store.like)
            return ClientTable(rows, jax.ShapeDtypeStruct((clients,), np.bool_))
        clients = leaves.get(f"{name}.index", leaf.index).shape[0]
        index, checksums = (jax.ShapeDtypeStruct((clients,), dtype) for dtype in (np.int64, np.uint32))
        return SavedRows(index, checksums, jax.ShapeDtypeStruct((), np.int32) if f"{name}.processes" in leaves else ())

    past = jax.tree.leaves(like.past) if isinstance(like, FederatedState) else []
    if past:
        kept = past[0].shape[0]
        leaves = {name: _with_rounds(leaf, kept, round) if name.startswith(".past") else leaf for name, leaf in leaves.items()}
    return leaves, jax.tree_util.tree_map_with_path(saved, like, is_leaf=is_rows)


def _with_rounds(past: np.ndarray, kept: int, round: int) -> np.ndarray:
    """Returns what was sent in the rounds before ``round``, as `fedsim.Staleness` keeps that of ``kept`` rounds."""
    if len(past) == kept:
        return past
    resized = np.zeros((kept, *past.shape[1:]), past.dtype)
    sent = np.arange(max(0, round - min(kept, len(past))), round)
    resized[sent % kept] = past[sent % len(past)]
    return resized


def to_leaves(state: State) -> Leaves:
    """Returns the leaves of a pytree by path. A PRNG key becomes its data, and its path names the key's kind.

    They are on the host, except arrays of which other processes have parts.
    """
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if _is_key(leaf):
            name, leaf = f"{name} ({jax.random.key_impl(leaf)} key)", jax.random.key_data(leaf)
        named[name] = leaf
    # orbax refuses arrays without elements, and their shapes are known.
    return {name: leaf if distributed.is_divided(leaf) else np.asarray(leaf) for name, leaf in named.items() if np.size(leaf)}


def from_leaves(leaves: Mapping[str, np.ndarray], like: State) -> State:
    """Returns the inverse of `to_leaves`, in the structure of ``like``."""
    keys = {name.rsplit(" (", 1)[0]: name for name in leaves if name.endswith(" key)")}
    paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    empty = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in wanted.items() if leaf.size == 0}
    if wanted.keys() == empty.keys():  # Earlier versions wrote an array with the name "" for a state without arrays.
        leaves = {name: leaf for name, leaf in leaves.items() if name}
    leaves = {**leaves, **empty}
    stored_names = {name for name in leaves if name not in keys.values()} | set(keys)
    if wanted.keys() != stored_names:
        missing, extra = sorted(wanted.keys() - stored_names), sorted(stored_names - wanted.keys())
        raise ValueError(
            f"The checkpoint belongs to another algorithm or model: it lacks {missing} and has the additional {extra}."
        )
    restored = []
    for name, leaf in wanted.items():
        if name in keys:
            implementation = keys[name].rsplit(" (", 1)[1].removesuffix(" key)")
            restored.append(jax.random.wrap_key_data(jax.numpy.asarray(leaves[keys[name]]), impl=implementation))
            continue
        stored, shape, dtype = leaves[name], np.shape(leaf), np.dtype(leaf.dtype)
        if stored.shape != shape or stored.dtype != dtype:
            raise ValueError(
                f"The checkpoint belongs to another algorithm or model: {name or 'the state'} is "
                f"{stored.dtype}{list(stored.shape)} in the checkpoint and {dtype}{list(shape)} in this run."
            )
        restored.append(jax.numpy.asarray(stored))
    return jax.tree.unflatten(treedef, restored)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
