"""Named arrays in files: the folders of checkpoints, ``.npz`` and ``.safetensors``."""

from __future__ import annotations

import ast
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import distributed
from fedsim.data import FormatError
from fedsim.durable_files import atomic_write, replace_text, sync_files, sync_folder, writing
from fedsim.text_files import read_json

Leaves = dict[str, np.ndarray]

# The list of the files of a checkpoint.
FILES = "files.json"
# orbax refuses to write no array. The name is no path in a state: "" is that of a state that is one array.
_NONE = "(none)"
_BLOCK_BYTES = 2**24
# Of safetensors; names of JAX, which has bfloat16.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_DTYPES |= {"BOOL": "bool", **{f"{kind}{bits}": f"{name}{bits}" for kind, name in {"I": "int", "U": "uint"}.items()
                               for bits in (8, 16, 32, 64)}}  # fmt: skip


def read_params(path: str | os.PathLike[str]) -> Leaves:
    """Returns the parameters in a file or of a run, by name.

    Args:
      path: an ``.npz`` file, a ``.safetensors`` file, the folder of a run, whose last checkpoint is read, or the folder of one
        checkpoint. The parameters of a run are those that it evaluates, ``state.params``, with all parts of the model.

    Returns:
      NumPy arrays by name, such as ``"linear/w"``, for `fedsim.Model.starting_from` or for a file:
      ``safetensors.numpy.save_file(arrays, path)``, ``numpy.savez(path, **arrays)``.

    Raises:
      OSError: the file is missing or cannot be read.
      FormatError: it is no such file, or it is damaged; or the run has no checkpoint, or one of another kind of state.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.npz"
    >>> np.savez(path, **{"linear/w": np.ones([2, 3], np.float32)})
    >>> read_params(path)["linear/w"].shape
    (2, 3)
    """
    path = Path(path)
    if path.is_dir():
        return _params_of(read_arrays(newest_checkpoint(path)), path)
    readers: dict[str, Callable[[Path], Leaves]] = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise FormatError(f"Expected an .npz file, a .safetensors file or a run folder, got {path}: convert it to one of them.")
    return readers[path.suffix](path)


def write_params(path: str | os.PathLike[str], params: Any) -> None:
    """Writes parameters to a file, by name, as `read_params` reads them.

    Args:
      path: ``.npz`` or ``.safetensors``.
      params: a pytree of arrays, such as ``state.params``, or what `read_params` returns. Arrays of bfloat16 need safetensors.

    Raises:
      ValueError: the file has another suffix, or cannot hold a dtype.
      OSError: the file cannot be written.
      ImportError: safetensors is not installed.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.npz"
    >>> write_params(path, {"linear": {"w": np.ones([2, 3], np.float32)}})
    >>> read_params(path)["linear/w"].shape
    (2, 3)
    """
    path = Path(path)
    named = jax.tree_util.tree_leaves_with_path(params)
    arrays = {"/".join(_keys(jax.tree_util.keystr(at))): np.asarray(leaf, order="C") for at, leaf in named}
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"Expected a file with the suffix .npz or .safetensors, got {path}: name it so.")
    if path.suffix == ".npz" and (unknown := [name for name, array in arrays.items() if array.dtype.kind == "V"]):
        raise ValueError(
            f"Expected dtypes of NumPy for {path}, got {arrays[unknown[0]].dtype} for {unknown[0]}: write a .safetensors file."
        )
    with writing(path), atomic_write(path) as part:
        if path.suffix == ".npz":
            with part.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        else:
            try:
                from safetensors.numpy import save_file
            except ImportError as error:
                raise ImportError(f"Writing {path} needs safetensors: pip install 'fedsim-jax[run]'.") from error
            save_file(arrays, part)


def newest_checkpoint(folder: Path) -> Path:
    """Returns the folder of the last checkpoint of a run; the folder itself if it is that of a checkpoint.

    Raises:
      FormatError: there is none.

    >>> newest_checkpoint(Path("no such run"))
    Traceback (most recent call last):
    ...
    fedsim.data._errors.FormatError: Expected a run with a checkpoint, got no such run, which has none: name the folder of a \
run that has saved one.
    """
    if (folder / FILES).exists():
        return folder
    rounds = checkpoint_rounds(folder / "checkpoints")
    if not rounds:
        raise FormatError(
            f"Expected a run with a checkpoint, got {folder}, which has none: name the folder of a run that has saved one."
        )
    return checkpoint_folder(folder / "checkpoints", rounds[-1])


def checkpoint_folder(folder: Path, round: int) -> Path:
    """Returns the folder of the checkpoint of a round, in a folder of checkpoints.

    >>> checkpoint_folder(Path("checkpoints"), 12).as_posix()
    'checkpoints/00000012'
    """
    return folder / f"{round:08d}"


def checkpoint_rounds(folder: Path) -> list[int]:
    """Returns the rounds that have a checkpoint in a folder, in increasing order.

    >>> checkpoint_rounds(Path("no such folder"))
    []
    """
    return sorted(int(path.parent.name) for path in folder.glob(f"*/{FILES}") if path.parent.name.isdigit())


def write_arrays(path: Path, leaves: Mapping[str, Any]) -> None:
    """Writes arrays to a folder of orbax. The list of its files is written last, when they are on the disk.

    If several processes share a run, all have to call it. Each writes its part of the arrays that are divided over them.
    Process 0 writes everything else, and the list when all have finished.

    Raises:
      OSError: a file cannot be written.
    """

    # Otherwise process 0 writes alone, because orbax's processes wait for a lost one until JAX ends them, without an error.
    together = any(map(distributed.is_divided, leaves.values()))

    def save() -> None:
        _orbax(together=together).save(path, leaves or {_NONE: np.zeros(1)}, force=True)

    def complete() -> None:
        sync_files(path)
        sync_folder(path.parent)
        # Hidden files are not orbax's, but the system's, and may vanish.
        found = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        own = [file for file in found if not any(part.startswith(".") for part in file.parts)]
        names = sorted(file.as_posix() for file in own if not file.name.startswith(FILES))
        replace_text(path / FILES, json.dumps(_checksums(path, names)))

    distributed.in_all(save) if together else distributed.in_first(save)
    distributed.in_first(complete)


def read_arrays(path: Path) -> Leaves:
    """Returns the arrays in a folder that `write_arrays` has written. Other files in it are ignored.

    Raises:
      OSError: a file cannot be read.
      FormatError: the folder is not complete, or a file of it is damaged.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "a"
    >>> write_arrays(folder, {"w": np.ones(2)})
    >>> read_arrays(folder)["w"].tolist(), is_complete(folder)
    ([1.0, 1.0], True)
    """
    expected = read_json(path / FILES, '{"manifest.ocdbt": 123}')
    # orbax never reads damaged files: it raises many kinds of errors for them, some of them in threads.
    found = _checksums(path, expected)
    if missing := sorted(expected.keys() - found.keys()):
        raise FormatError(f"{', '.join(missing)} is missing")
    if changed := sorted(name for name in found if found[name] != expected[name]):
        raise FormatError(f"{', '.join(changed)} is truncated or changed")
    orbax, how = _orbax(), {}
    if (path / "_sharding").exists():  # Otherwise orbax looks for the devices that wrote the arrays.
        how["restore_args"] = {name: _as_numpy() for name in _names(orbax.metadata(path.absolute()))}
    return {name: np.asarray(leaf) for name, leaf in orbax.restore(path.absolute(), **how).items() if name != _NONE}


def is_complete(path: Path) -> bool:
    """Returns whether a folder has all files that `write_arrays` has written, unchanged.

    >>> is_complete(Path("no such folder"))
    False
    """
    try:
        expected = read_json(path / FILES, '{"manifest.ocdbt": 123}')
        return bool(expected == _checksums(path, expected))
    except (OSError, ValueError):
        return False


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Returns the CRC-32 of each of these files that exists."""
    return {name: _checksum(folder / name) for name in names if (folder / name).is_file()}


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _as_numpy() -> Any:
    import orbax.checkpoint as ocp

    return ocp.RestoreArgs(restore_type=np.ndarray)


def _names(metadata: Any) -> list[str]:
    """Returns the names of the arrays that orbax describes; its versions wrap the description differently."""
    metadata = getattr(metadata, "item_metadata", metadata)
    return list(getattr(metadata, "tree", metadata))


def _orbax(*, together: bool = False) -> Any:
    """Returns what writes and reads folders; if ``together``, all processes of a run do it at the same time."""
    import orbax.checkpoint as ocp  # takes half a second to import, and is optional

    if together or jax.process_count() == 1:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    # Otherwise each call would wait for the same call in all processes.
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process_{own}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _params_of(leaves: Leaves, path: Path) -> Leaves:
    """Returns the parameters of a state, whose leaves are named as in a checkpoint; see `fedsim.rounds.FederatedState`."""
    own = [start for start in (".average.params", ".server.params", ".params") if any(_is_in(name, start) for name in leaves)]
    if not own:
        raise FormatError(
            f"Expected a run whose server has parameters, got {path}, whose state has none: use a run of another algorithm, or "
            "write state.params to a file."
        )
    of_parts = {tuple(_keys(name)[:2]) for name in leaves if _is_in(name, ".parts")}
    sources = [(own[0], own[0].count("."))] + [(f".{'.'.join(part)}", 2) for part in sorted(of_parts)]
    return {
        "/".join(_keys(name)[depth:]): array
        for start, depth in sources
        for name, array in leaves.items()
        if _is_in(name, start)
    }


def _is_in(name: str, start: str) -> bool:
    return name == start or name.startswith((f"{start}[", f"{start}."))


def _keys(name: str) -> list[str]:
    """Returns the keys in the name of a leaf.

    >>> _keys(".params['linear/~/a']['w'].layers[0]")
    ['params', 'linear/~/a', 'w', 'layers', '0']
    """
    node: Any = ast.parse(f"state{name}", mode="eval").body
    keys = []
    while not isinstance(node, ast.Name):
        keys.append(node.attr if isinstance(node, ast.Attribute) else str(ast.literal_eval(node.slice)))
        node = node.value
    return keys[::-1]


def _read_npz(path: Path) -> Leaves:
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile, TypeError) as error:
        raise FormatError(f"{path} is no .npz file of arrays of numbers ({error}): write it again by numpy.savez.") from None


def _read_safetensors(path: Path) -> Leaves:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(f"Reading {path} needs safetensors: pip install 'fedsim-jax[run]'.") from error
    content = path.read_bytes()
    try:
        arrays = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise FormatError(f"{path} is no .safetensors file ({error}): restore it, or write it again.") from None
    result = {}
    for name, array in arrays:
        if array["dtype"] not in _DTYPES:
            raise FormatError(
                f"{path} has {name} of dtype {array['dtype']}, which is none of {', '.join(_DTYPES)}: convert it to F32."
            )
        # safetensors.numpy reads bfloat16 in some versions only.
        dtype = jnp.dtype(_DTYPES[array["dtype"]])
        result[name] = np.frombuffer(array["data"], dtype).reshape(array["shape"])
    return result
