"""Checkpoints: a state as named plain arrays on disk, written whole or not at all, and checked when read."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

State = Any
Leaves = dict[str, np.ndarray]

_FILES = "files.json"


class Checkpoints:
    """The checkpoints of one run: ``FOLDER/<round>/``, each an orbax directory of plain arrays.

    A leaf of the state is stored under its path (``.params['linear']['w']``), and no class is stored at all, so a class may be
    renamed or moved and its old checkpoints stay readable. Last of all a list of the files and their checksums is written:
    a directory without it is not yet a checkpoint, and one that does not agree with it is damaged.

    >>> import tempfile
    >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()))
    >>> checkpoints.save(3, {"w": jax.numpy.ones(2)})
    >>> state, round = checkpoints.newest(jax.eval_shape(lambda: {"w": jax.numpy.zeros(2)}))
    >>> round, state["w"].tolist()
    (3, [1.0, 1.0])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @staticmethod
    def available() -> bool:
        """Whether orbax is installed."""
        # find_spec("orbax.checkpoint") would import orbax, and fail if that is missing.
        return importlib.util.find_spec("orbax") is not None

    def rounds(self) -> list[int]:
        """Rounds with a checkpoint, the oldest first."""
        return sorted(int(path.parent.name) for path in self.folder.glob(f"*/{_FILES}") if path.parent.name.isdigit())

    def save(self, round: int, state: State) -> None:
        """Writes the state after ``round`` rounds; without effect if it is there already, and undamaged."""
        path = self._path(round)
        if _is_whole(path):
            return
        (path / _FILES).unlink(missing_ok=True)  # while it is overwritten it is no checkpoint
        _orbax().save(path, to_leaves(state) or {"": np.zeros(1)}, force=True)
        beside = path / f"{_FILES}.tmp"
        beside.write_text(json.dumps(_checksums(path)))
        beside.replace(path / _FILES)

    def load(self, round: int, like: State) -> State:
        """The state after ``round`` rounds, in the structure of ``like`` (arrays or ``jax.ShapeDtypeStruct``).

        Raises:
          ValueError: the state has other leaves, shapes or dtypes than ``like``; they are named.
          OSError, ValueError: the checkpoint is damaged.
        """
        return from_leaves(self._read(round), like)

    def newest(self, like: State) -> tuple[State, int] | None:
        """The newest state that can be read, and its round; None if there never was a checkpoint.

        A checkpoint that cannot be read is passed over with a warning, for the one before.

        Raises:
          ValueError: there are checkpoints and none can be read, or they hold another structure than ``like``.
        """
        rounds = self.rounds()
        for round in reversed(rounds):
            try:
                leaves = self._read(round)
            except (OSError, ValueError) as error:
                warnings.warn(f"The checkpoint of round {round} is damaged and skipped: {error}.", stacklevel=2)
                continue
            return from_leaves(leaves, like), round
        if rounds:
            raise ValueError(f"All checkpoints in {self.folder} were damaged. Start anew with another run folder.")
        return None

    def keep_only(self, rounds: set[int]) -> None:
        """Deletes all other checkpoints, and what a killed process left half-written."""
        for path in self.folder.iterdir():
            if not (path.name.isdigit() and int(path.name) in rounds):
                (path / _FILES).unlink(missing_ok=True)  # first of all it ceases to be a checkpoint
                shutil.rmtree(path, ignore_errors=True)

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
