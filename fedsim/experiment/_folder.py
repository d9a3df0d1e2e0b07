"""The run folder: which files it has, and that it belongs to one configuration."""

from __future__ import annotations

import dataclasses
import json
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jax

from fedsim._version import __version__


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

    def claim(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Makes the folder and writes ``config.json``, or finds that it is there and the same.

        Raises:
          OSError: the folder cannot be written to.
          ValueError: it holds a run of another configuration; the differences are named.
        """
        # What JSON does to a value (a tuple becomes a list) must not count as a difference.
        config = json.loads(json.dumps(config, default=str))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise OSError(
                f"Cannot write to the run folder {self.path}: {error.strerror or error}. Choose another folder."
            ) from error
        if self.config.exists():
            there = read_config(self.path)["config"]
            differences = [
                f"  {name}: {_show(config, name)} here, {_show(there, name)} there"
                for name in sorted(config.keys() | there.keys())
                if _show(config, name) != _show(there, name)
            ]
            if differences:
                raise ValueError(
                    f"The run folder {self.path} holds a run of another configuration:\n"
                    + "\n".join(differences)
                    + "\nChoose another folder, or the same configuration."
                )
        versions = {"fedsim": __version__, "jax": jax.__version__, "python": platform.python_version()}
        text = json.dumps({"config": config, "settings": dict(settings), "versions": versions}, indent=2, default=str)
        beside = self.config.with_suffix(".tmp")
        beside.write_text(text + "\n")
        beside.replace(self.config)


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
    """The ``config``, ``settings`` and ``versions`` of a run folder.

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


def _show(config: Mapping[str, Any], name: str) -> str:
    return json.dumps(config[name]) if name in config else "nothing"
