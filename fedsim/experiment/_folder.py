"""The run folder: its files, and the check that it belongs to one configuration."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jax

from fedsim._version import __version__
from fedsim.data import FormatError
from fedsim.data._text_files import read_json
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._config import RunConfig, Settings, from_json
from fedsim.experiment._disk import is_full, replace_text, writing
from fedsim.experiment._trust import signature
from fedsim.experiment._writers import read_metrics


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of a run: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``tensorboard/``; pictures lie beside them.

    >>> RunFolder(Path("runs/a")).metrics.name
    'metrics.jsonl'
    """

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def initialize(
        self, config: Mapping[str, Any], population: Mapping[str, Any], settings: Mapping[str, Any], devices: str
    ) -> None:
        """Creates the folder and writes ``config.json``, or checks that an existing folder holds the same run.

        A folder in which no round was finished counts as new: for example, after an error in the first round.

        Raises:
          OSError: the folder cannot be written to.
          ValueError: the folder holds a run of another configuration or population (the differences are named), or is in use.
        """
        # JSON changes values (a tuple becomes a list), which must not count as a difference.
        run = json.loads(json.dumps({"config": config, "population": population}, default=str))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            if is_full(error):
                with writing(self.path):
                    raise
            raise OSError(
                f"Cannot write to the run folder {self.path}: {error.strerror or error}. Choose another folder."
            ) from error
        versions = {"fedsim": __version__, "jax": jax.__version__, "python": platform.python_version()}
        stored = {**run, "settings": dict(settings), "devices": devices, "versions": versions}
        if signed := signature(run["config"]):
            stored["signature"] = signed
        text = json.dumps(stored, indent=2, default=str)
        with lock(self.path):  # A run in its first round has finished no round, but its folder is in use.
            if self.config.exists():
                self._compare(run)
            replace_text(self.config, text + "\n")

    def _compare(self, run: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` if the folder holds another run; deletes the checkpoints of a run without a finished round."""
        stored = read_config(self.path)
        new, old = _entries(run), _entries(stored)
        differences = [
            f"  {name}: {_show(new, name)} in this run, {_show(old, name)} in the folder"
            for name in sorted(new.keys() | old.keys())
            if _show(new, name) != _show(old, name)
        ]
        if not differences:
            return
        if self._has_rounds():
            version = (
                "" if "population" in stored else "\nAn earlier version of fedsim wrote it and did not record all of this."
            )
            raise ValueError(
                f"The run folder {self.path} holds a run of another configuration:\n"
                + "\n".join(differences)
                + version
                + "\nChoose another folder, or use the same configuration and population."
            )
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def _has_rounds(self) -> bool:
        return bool(read_metrics(self.metrics) or Checkpoints(self.checkpoints).rounds())


def lock(path: Path) -> IO[str]:
    """Locks a run folder until the returned file is closed or the process ends.

    Raises:
      ValueError: another process, or another run in this process, has locked it.
    """
    file = open(path / ".lock", "w")  # noqa: SIM115 (the lock lasts while it is open)
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ModuleNotFoundError:  # Windows has no flock, so nothing is locked there.
        pass
    except OSError:
        file.close()
        raise ValueError(
            f"The run folder {path} is in use by another run. Wait until it ends, or choose another folder."
        ) from None
    return file


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads the ``config.json`` of a run folder.

    The configuration may name Python code (``FILE.py:CLASS``), which `build` runs: look at a folder that you did not write.

    Returns:
      A mapping with ``config``, ``population``, ``settings``, ``devices`` and ``versions``, and, if the configuration names
      code, ``signature``, by which ``fedsim resume`` knows whether the same user wrote it.

    Raises:
      ValueError: the folder has no readable ``config.json``.

    >>> read_config("no such folder")
    Traceback (most recent call last):
    ...
    ValueError: There is no run in no such folder: cannot read no such folder/config.json (FileNotFoundError).
    """
    path = RunFolder(Path(folder)).config
    try:
        return read_objects(path, "config", "settings")
    except OSError as error:
        raise ValueError(f"There is no run in {folder}: cannot read {path} ({type(error).__name__}).") from error


def stored_run(folder: str | Path, stored: Mapping[str, Any]) -> tuple[RunConfig, Settings]:
    """Returns the configuration and the settings that the file of a run or a sweep holds.

    Raises:
      FormatError: this version of fedsim does not have one of the fields, or a value is out of its range.
    """
    try:
        return from_json(RunConfig, stored["config"]), from_json(Settings, stored["settings"])
    except ValueError as error:
        raise FormatError(f"The run in {folder} cannot be continued or repeated: {error}") from error


def read_objects(path: Path, *names: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a run folder, in which each of these names has an object, too.

    Raises:
      OSError: the file is missing or cannot be read.
      FormatError: it has another form.
    """
    stored = read_json(path, '{"config": {...}, ...}')
    for name in names:
        if not isinstance(stored.get(name), dict):
            raise FormatError(
                f"{path} has {name}={json.dumps(stored.get(name))[:60]}: expected an object. Restore it, or start a new run."
            )
    return stored


def _entries(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that identify a run, by the names under which differences are shown."""
    return {**run["config"], **{f"population, {name}": value for name, value in run.get("population", {}).items()}}


def _show(config: Mapping[str, Any], name: str) -> str:
    return json.dumps(config[name]) if name in config else "not given"
