"""The run folder: its files, and the check that it belongs to one configuration."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, get_args

from fedsim.configuration import How, RunConfig, Settings, Value, topology_with_seed
from fedsim.data import FormatError
from fedsim.datasets import with_seed
from fedsim.durable_files import is_full, writing
from fedsim.experiment._checkpoint import Checkpoints
from fedsim.experiment._environment import changed_code, jax_settings, versions
from fedsim.experiment._metrics_file import read_metrics
from fedsim.experiment._stop_rules import stop_rules
from fedsim.experiment._trust import rewrite, write_signed
from fedsim.text_files import read_json

_POPULATIONS = ("population", "test population", "validation population")
_SWEEP_FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of a run: ``config.json``, ``metrics.jsonl``, ``clients.csv``, ``checkpoints/``, ``tensorboard/``, and pictures.

    >>> RunFolder(Path("runs/a")).metrics.name
    'metrics.jsonl'
    """

    path: Path

    @property
    def config(self) -> Path:
        """The file of the configuration, the settings and the environment."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """The file with a line for each round and each evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def clients(self) -> Path:
        """The table of the clients' results in the last evaluation."""
        return self.path / "clients.csv"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def initialize(
        self,
        config: Mapping[str, Any],
        populations: Mapping[str, Any],
        settings: Mapping[str, Any],
        devices: str,
        code: Mapping[str, str],
    ) -> None:
        """Creates the folder and writes ``config.json``, or checks that an existing folder holds the same run.

        A folder in which no round was finished counts as new: for example, after an error in the first round. It is said if
        packages, settings of JAX or the kind of device are others than those of the rounds before.

        Args:
          config: identifies the run.
          populations: what identifies the data, by ``"population"``, ``"test population"`` and ``"validation population"``.
          settings: how the run is executed, which may change.
          devices: a text that names the devices.
          code: the hashes of the user's own code, from `code_of`.

        Raises:
          OSError: the folder cannot be written to.
          ValueError: the folder holds a sweep, or a run of another configuration, population or code (the differences are
            named), or is in use.
        """
        if is_sweep(self.path):
            raise ValueError(f"The folder {self.path} holds a sweep and not a run: choose another folder.")
        # JSON changes values (a tuple becomes a list), which must not count as a difference.
        run = json.loads(json.dumps({"config": config, **populations}, default=str))
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
        environment = {"devices": devices, "versions": versions(), "jax_settings": jax_settings()}
        stored = {**run, "settings": dict(settings), **environment, "code": dict(code), "ended": None}
        with self.lock():  # A run in its first round has finished no round, but its folder is in use.
            if self.config.exists():
                known = read_config(self.path)
                self._compare(run, known, code)
                earlier = {name: known[name] for name in environment if name in known}
                if earlier and (differences := _differences(earlier, environment)) and self._has_rounds():
                    warnings.warn(
                        f"The rounds before in {self.path} ran with {differences}. The other rounds may differ from theirs in "
                        "the last digits of their numbers.",
                        stacklevel=4,
                    )
                    stored["earlier"] = [*known.get("earlier", []), earlier]
                elif "earlier" in known:
                    stored["earlier"] = known["earlier"]
            write_signed(self.config, stored)

    def record_end(self, *, round: int, rule: str | None = None, reason: str | None = None) -> None:
        """Writes into ``config.json`` why the run has no more rounds; `initialize` deletes it.

        Args:
          round: the last one.
          rule: the rule of ``stop_when``, or ``"a callback"``; None if it was the last one of the configuration.
          reason: why the rule ended the run.
        """
        stored = read_config(self.path)
        rewrite(self.config, {**stored, "ended": {"round": round, "rule": rule, "reason": reason}}, stored)

    def lock(self) -> IO[str]:
        """Locks the folder until the returned file is closed or the process ends.

        Raises:
          ValueError: another process, or another run in this process, has locked it.
        """
        file = open(self.path / ".lock", "w")  # noqa: SIM115 (the lock lasts while it is open)
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ModuleNotFoundError:  # Windows has no flock, so nothing is locked there.
            pass
        except OSError:
            file.close()
            raise ValueError(
                f"The run folder {self.path} is in use by another run. Wait until it ends, or choose another folder."
            ) from None
        return file

    def is_finished(self, config: RunConfig) -> bool:
        """Returns whether the folder has all that a finished run of a configuration has.

        >>> RunFolder(Path("no such folder")).is_finished(RunConfig())
        False
        """
        history = read_metrics(self.metrics)
        last = history[-1]["round"] if history else 0
        # A run asks its rules after evaluations only.
        is_stopped = last % config.evaluate_every == 0 and any(rule.reason(history) for rule in stop_rules(config.stop_when))
        if not self.config.exists() or not last or (last < config.rounds and not is_stopped):
            return False
        stored = read_config(self.path)
        # Earlier versions did not record the seeds of the dataset and the topology, which were 0.
        drawn = _drawn_with_0(config.dataset, config.topology) | stored.get("population", {})
        own = json.loads(json.dumps(dataclasses.asdict(config)))
        if (stored["config"], drawn["dataset"], drawn["topology"]) != (own, config.drawn_dataset, config.drawn_topology):
            return False  # The run then raises an error that names the differences.
        saved = not Checkpoints.available() or last in Checkpoints(self.checkpoints).rounds()
        return saved and ((self.path / "learning_curve.png").exists() or importlib.util.find_spec("matplotlib") is None)

    def _compare(self, run: Mapping[str, Any], stored: Mapping[str, Any], code: Mapping[str, str]) -> None:
        """Raises ``ValueError`` if the folder holds another run; deletes the checkpoints of a run without a finished round."""
        if "population" in stored and (names := run["population"].keys() & {"dataset", "topology"}):
            # Earlier versions drew a dataset or a topology whose seed is not given with seed 0 and did not record it.
            before = _drawn_with_0(run["config"]["dataset"], run["config"]["topology"])
            stored = {**stored, "population": {name: before[name] for name in names} | stored["population"]}
        new, old = _entries(run), _entries(stored)
        # An earlier version of fedsim did not record all that identifies a population.
        added = new.keys() - old.keys() if "population" in stored else set()
        unknown = {name for name in added if name.partition(",")[0] in _POPULATIONS}
        differences = [
            f"  {name}: {_show(new, name)} in this run, {_show(old, name)} in the folder"
            for name in sorted((new.keys() | old.keys()) - unknown)
            if _show(new, name) != _show(old, name)
        ]
        if len(differences) > 1:  # Other features or clients have other examples anyway.
            differences = [line for line in differences if "examples (hash)" not in line]
        changed = code_change(self.path, stored, code)
        if not differences and not changed:
            return
        if self._has_rounds():
            if not differences:
                raise ValueError(f"{changed} Restore it, or start a new run in another folder.")
            version = (
                "" if "population" in stored else "\nAn earlier version of fedsim wrote it and did not record all of this."
            )
            if all("examples (hash)" in line for line in differences):
                where = run["config"].get("data")
                version = f"\nThe examples{f' in {where}' if where else ''} have changed since the run began: restore them."
            raise ValueError(
                f"The run folder {self.path} holds a run of another configuration:\n"
                + "\n".join(differences)
                + version
                + "\nChoose another folder, or use the same configuration and population."
            )
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def _has_rounds(self) -> bool:
        return bool(read_metrics(self.metrics) or Checkpoints(self.checkpoints).rounds())


def resume_command(folder: str | Path) -> str:
    """Returns the command that continues the run or the sweep in a folder.

    >>> resume_command("my runs/a")
    "fedsim resume 'my runs/a'"
    """
    return f"fedsim resume {shlex.quote(str(folder))}"


def read_config(folder: str | Path) -> dict[str, Any]:
    """Reads the ``config.json`` of a run folder.

    The configuration may name Python code (``FILE.py:CLASS``), which `build` runs: look at a folder that you did not write.

    Returns:
      A mapping with ``config``, ``population`` and ``test population``, ``settings``, ``devices``, ``versions`` of packages and
      the commit of fedsim, ``jax_settings``, ``code`` (hashes of the user's own files), ``earlier`` (devices, versions and
      settings of rounds that ran with others), ``ended`` (the last round and the rule that ended the run before; None while it
      has rounds left), and, if the configuration names code, ``signature``, by which ``fedsim resume``
      knows whether the same user wrote all of it.

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


def sweep_file(folder: str | Path) -> Path:
    """Returns the path of ``sweep.json``, which the folder of a sweep has.

    >>> sweep_file("sweeps/a").name
    'sweep.json'
    """
    return Path(folder) / _SWEEP_FILE


def is_sweep(folder: str | Path) -> bool:
    """Returns whether a folder is that of a sweep.

    >>> is_sweep("no such folder")
    False
    """
    return sweep_file(folder).exists()


def read_sweep(folder: str | Path) -> dict[str, Any] | None:
    """Returns the content of ``sweep.json``: config, varied, seeds, how, settings; None if the folder has none.

    Raises:
      ValueError: the file cannot be read.

    >>> read_sweep("no such folder") is None
    True
    """
    path = sweep_file(folder)
    if not is_sweep(folder):
        return None
    try:
        stored = read_objects(path, "config", "settings")
    except OSError as error:
        raise ValueError(f"There is no sweep in {folder}: cannot read {path} ({type(error).__name__}).") from error
    varied = stored.get("varied")
    if isinstance(varied, list) and varied and all(isinstance(setting, dict) for setting in varied):  # drawn settings
        varied = {f"varied[{number}]": list(setting.values()) for number, setting in enumerate(varied)}
    if not isinstance(varied, dict):
        raise FormatError(f"{path} has varied={varied!r}: expected an object. Restore it, or start a new sweep.")
    for name, values in {**varied, "seeds": stored.get("seeds")}.items():
        kind = int if name == "seeds" else Value
        if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
            raise FormatError(f"{path} has {name}={values!r}: expected a list of values. Restore it, or start a new sweep.")
    differing = stored.get("differing", [])
    pairs = [pair for pair in differing if isinstance(pair, list) and len(pair) == 2] if isinstance(differing, list) else []
    if pairs != differing or not all(isinstance(part, dict) for pair in pairs for part in pair):
        raise FormatError(f"{path} has differing={differing!r}: expected pairs of objects. Restore it, or start a new sweep.")
    if stored.get("how") not in (None, *get_args(How)):
        raise FormatError(f"{path} has how={stored['how']!r}: restore it, or start a new sweep.")
    return stored


def stored_run(folder: str | Path, stored: Mapping[str, Any]) -> tuple[RunConfig, Settings]:
    """Returns the configuration and the settings that the file of a run or a sweep holds.

    Raises:
      FormatError: this version of fedsim does not have one of the fields, or a value is out of its range.
      ValueError: the run was started in Python.

    >>> config, settings = stored_run("runs/a", {"config": {"rounds": 7, "hyperparameters": {}}, "settings": {"lanes": 2}})
    >>> config.rounds, settings.lanes
    (7, 2)
    """
    if "hyperparameters" not in stored["config"]:
        raise ValueError(
            f"The run in {folder} was started in Python, so its objects cannot be built from its configuration. To continue "
            "it, repeat the call of fedsim.experiment.run with this folder. To read its state, build the algorithm as there, "
            "and pass it to fedsim.experiment.restore."
        )
    try:
        return RunConfig.from_json(stored["config"]), Settings.from_json(stored["settings"])
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


def code_change(folder: str | Path, stored: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """Returns a sentence about the user's files that have changed since the run or sweep in a folder used them; "" if none has.

    Args:
      folder: named in the sentence.
      stored: what `read_config` or `read_sweep` returns.
      code: what `code_of` returns now. Files that it does not contain are read.

    >>> code_change("runs/a", {"code": {"mine.py": "0" * 16}}, {"mine.py": "1" * 16})
    'The code of the run in runs/a has changed since the run began: mine.py.'
    """
    changed = changed_code(stored.get("code", {}), code)
    return f"The code of the run in {folder} has changed since the run began: {', '.join(changed)}." if changed else ""


def warn_of_changed_code(folder: str | Path, stored: Mapping[str, Any]) -> None:
    """Warns if the present code is another one than that of the run in a folder.

    >>> warn_of_changed_code("runs/a", {"code": {}})
    """
    if changed := code_change(folder, stored, {}):
        warnings.warn(f"{changed} The present code is used.", stacklevel=3)


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the packages, settings and the kind of device that have changed, with their earlier and present values."""
    flat = [
        {
            "devices": run.get("devices", "").partition(" x ")[2],  # their kind; their number does not affect results
            **run.get("versions", {}),
            **run.get("jax_settings", {}),
        }
        for run in (earlier, now)
    ]
    names = [name for name, value in flat[0].items() if flat[1].get(name) != value]
    return ", ".join(f"{name} {flat[0][name]} (now {flat[1].get(name)})" for name in names)


def _drawn_with_0(dataset: str, topology: str | None) -> dict[str, str | None]:
    return {"dataset": with_seed(dataset, 0), "topology": topology and topology_with_seed(topology, 0)}


def _entries(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that identify a run, by the names under which differences are shown."""
    populations = {f"{of}, {name}": value for of in _POPULATIONS for name, value in run.get(of, {}).items()}
    return {**run["config"], **populations}


def _show(config: Mapping[str, Any], name: str) -> str:
    return json.dumps(config[name]) if name in config else "not given"
