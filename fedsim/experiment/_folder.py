"""The run folder: which files it has, and that it belongs to one configuration."""

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
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._disk import is_full, writing
from fedsim.experiment._trust import signature
from fedsim.experiment._writers import read_metrics


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of a run: ``config.json``, ``metrics.jsonl``, ``checkpoints/``, ``tensorboard/``, ``learning_curve.png``.

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

    @property
    def picture(self) -> Path:
        return self.path / "learning_curve.png"

    def claim(
        self, config: Mapping[str, Any], population: Mapping[str, Any], settings: Mapping[str, Any], devices: str
    ) -> None:
        """Makes the folder and writes ``config.json``, or finds that it is there and the same.

        A folder in which no round was finished is as a new one: a run that was refused before its first round holds nothing.

        Raises:
          OSError: the folder cannot be written to.
          ValueError: it holds a run of another configuration or population; the differences are named. A run is going on in it.
        """
        # What JSON does to a value (a tuple becomes a list) must not count as a difference.
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
        with lock(self.path):  # Who is in the first round has finished none, and yet the folder is not free.
            if self.config.exists():
                self._compare(run)
            with writing(self.config):
                beside = self.config.with_suffix(".tmp")
                beside.write_text(text + "\n")
                beside.replace(self.config)

    def _compare(self, run: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` if the folder holds another run; if that never began, clears what it left."""
        stored = read_config(self.path)
        here, there = _entries(run), _entries(stored)
        differences = [
            f"  {name}: {_show(here, name)} here, {_show(there, name)} there"
            for name in sorted(here.keys() | there.keys())
            if _show(here, name) != _show(there, name)
        ]
        if not differences:
            return
        if self._has_begun():
            noted = "" if "population" in stored else "\nAn earlier version of fedsim wrote it, and did not note all of this."
            raise ValueError(
                f"The run folder {self.path} holds a run of another configuration:\n"
                + "\n".join(differences)
                + noted
                + "\nChoose another folder, or the same configuration and population."
            )
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def _has_begun(self) -> bool:
        return bool(read_metrics(self.metrics) or Checkpoints(self.checkpoints).rounds())


def lock(path: Path) -> IO[str]:
    """Holds a run folder until the file that is returned is closed, or the process ends in any way.

    Raises:
      ValueError: another process, or another run of this one, holds it.
    """
    file = open(path / ".lock", "w")  # noqa: SIM115 (it stays open: that is the lock)
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ModuleNotFoundError:  # Windows has no flock; there nothing is held
        pass
    except OSError:
        file.close()
        raise ValueError(f"The run folder {path} is in use by another run: wait for it, or choose another folder.") from None
    return file


def read_config(folder: str | Path) -> dict[str, Any]:
    """The ``config``, ``population``, ``settings``, ``devices`` and ``versions`` of a run folder.

    Raises:
      ValueError: the folder holds no run.

    >>> read_config("no such folder")
    Traceback (most recent call last):
    ...
    ValueError: no such folder holds no run: no such folder/config.json cannot be read (FileNotFoundError).
    """
    path = RunFolder(Path(folder)).config
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} holds no run: {path} cannot be read ({type(error).__name__}).") from error


def _entries(run: Mapping[str, Any]) -> dict[str, Any]:
    """All that identifies a run, by names under which differences can be shown."""
    return {**run["config"], **{f"population, {name}": value for name, value in run.get("population", {}).items()}}


def _show(config: Mapping[str, Any], name: str) -> str:
    return json.dumps(config[name]) if name in config else "nothing"
