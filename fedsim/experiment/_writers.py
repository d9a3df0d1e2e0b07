"""Writers of metrics besides ``metrics.jsonl``: TensorBoard files, Weights & Biases and MLflow.

All of them get the configuration as the parameters of the run, the numbers of the metrics by round, named ``test/accuracy`` and
``train/loss``, and what the run has cost so far: megabytes, and simulated seconds if there is a virtual clock.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import socket
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.configuration import WRITERS, writer_names
from fedsim.durable_files import replace_text, sync_file, writing
from fedsim.experiment._lines import Line, split_and_metric
from fedsim.run_files import megabytes_of, simulated_seconds_of

_MOST_ENTRIES = 32
_SECONDS_PER_SYNC = 10.0
# MLflow accepts as many values, parameters or metrics, in one call.
_MLFLOW_BATCH, _MLFLOW_LENGTH = 100, 6000


class Writer:
    """Writes the lines of a run. Lines of rounds that an earlier process has written are not written again.

    Args:
      folder: the run folder.
      config: the configuration of the run, by name.
      history: the lines of the finished rounds, when the run continues.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], history: Sequence[Line]) -> None:
        self.folder, self.config = folder, config
        self._megabytes = self._simulated_seconds = 0.0

    def write(self, lines: Sequence[Line]) -> None:
        """Writes lines, at once or when `sync` is called."""
        raise NotImplementedError

    def sync(self) -> None:
        """Writes what waits to be written."""
        raise NotImplementedError

    def close(self, is_finished: bool) -> None:
        """Ends the writing, after the last round of the run or before it."""

    def _costs(self, lines: Sequence[Line]) -> list[dict[str, float]]:
        """Returns what the run has cost until each line; simulated seconds are 0 without a virtual clock."""
        costs = [
            {"megabytes": self._megabytes + more, "simulated_seconds": max(self._simulated_seconds, seconds)}
            for more, seconds in zip(megabytes_of(lines), simulated_seconds_of(lines), strict=True)
        ]
        if costs:
            self._megabytes, self._simulated_seconds = costs[-1].values()
        return costs


def open_writers(names: str | None, folder: Path, config: Mapping[str, Any], history: Sequence[Line]) -> dict[str, Writer]:
    """Returns the writers by name.

    Args:
      names: separated by commas, or ``"none"``; None is TensorBoard if tensorboardX is installed.
      folder, config, history: see `Writer`.

    Raises:
      ValueError: there is no such writer.
      ImportError: the library of a writer is not installed.

    >>> open_writers("none", Path("r"), {}, [])
    {}
    """
    if names is None:
        names = "tensorboard" if importlib.util.find_spec("tensorboardX") else "none"
    writers: dict[str, Writer] = {}
    for name in writer_names(names):
        try:
            importlib.import_module(_MODULES[name])
        except ModuleNotFoundError as error:
            raise ImportError(
                f"Expected writers that are installed, got {name!r} in writers={names!r}: pip install "
                f"'fedsim-jax[{WRITERS[name]}]', or leave it out."
            ) from error
        writers[name] = _WRITERS[name](folder, config, history)
    return writers


class TensorBoard(Writer):
    """Writes ``FOLDER/tensorboard``. Opening it hides the rounds after those of ``history``, of an earlier process.

    Evaluations are also written against bytes and simulated time: TensorBoard's axis has whole numbers, so the steps of
    ``by_bytes/`` are bytes, and those of ``by_simulated_milliseconds/`` milliseconds. They are folders of their own because
    what is hidden depends on the step.

    tensorboardX encodes the events. They are not written by its `SummaryWriter`, because its thread ends when the disk is full,
    and the run would then wait for it forever.

    A vector of at most 32 entries is one scalar per entry: ``test/f1_per_class/0`` and so on. Longer vectors and matrices are
    left out; the metrics file has them.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], history: Sequence[Line]) -> None:
        super().__init__(folder, config, history)
        from tensorboardX.summary import hparams, scalar

        self._scalar = scalar
        self._costs(history)
        self._by_round = _EventFile(folder / "tensorboard", start=history[-1]["round"] + 1 if history else 1)
        self._by_cost: dict[str, _EventFile] = {}
        # Without a description of the experiment, TensorBoard finds parameters and metrics in the runs that it shows together.
        self._by_round.write([(0, hparams(_parameters(config), {})[1])])

    def write(self, lines: Sequence[Line]) -> None:
        before = self._whole({"megabytes": self._megabytes, "simulated_seconds": self._simulated_seconds})
        by_round: list[tuple[int, Any]] = []
        by_cost: dict[str, list[tuple[int, Any]]] = {}
        for line, costs in zip(lines, self._costs(lines), strict=True):
            for name, value in named_scalars(line).items():
                by_round.append((line["round"], self._scalar(name, value)))
                split, _, metric = name.partition("/")
                for of, step in self._whole(costs).items() if "seconds" not in line else ():
                    by_cost.setdefault(of, []).append((step, self._scalar(f"{split}_by_{of}/{metric}", value)))
        self._by_round.write(by_round)
        for of, steps in by_cost.items():
            if of not in self._by_cost:
                self._by_cost[of] = _EventFile(self.folder / "tensorboard" / f"by_{of}", start=before.get(of, 0) + 1)
            self._by_cost[of].write(steps)

    def sync(self) -> None:
        for file in (self._by_round, *self._by_cost.values()):
            file.sync()

    @staticmethod
    def _whole(costs: Mapping[str, float]) -> dict[str, int]:
        """Returns costs as whole numbers, without those that are 0."""
        whole = {
            "bytes": round(costs["megabytes"] * 1e6),
            "simulated_milliseconds": round(costs["simulated_seconds"] * 1e3),
        }
        return {name: value for name, value in whole.items() if value}


class _EventFile:
    """A new file of events in a folder. Steps from ``start`` on that older files of the folder have are hidden."""

    def __init__(self, folder: Path, start: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event = Event
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        with writing(self._path):
            self._path.parent.mkdir(exist_ok=True)
        self._append(
            [
                Event(wall_time=time.time(), file_version="brain.Event:2"),
                Event(wall_time=time.time(), step=start, session_log=SessionLog(status=SessionLog.START)),
            ]
        )

    def write(self, summaries: Sequence[tuple[int, Any]]) -> None:
        """Writes summaries, each with its step."""
        now = time.time()
        self._append([self._event(wall_time=now, step=step, summary=summary) for step, summary in summaries])

    def sync(self) -> None:
        """Synchronizes the events to the disk."""
        with writing(self._path):
            sync_file(self._path)

    def _append(self, events: list[Any]) -> None:
        records = b"".join(_record(event.SerializeToString()) for event in events)
        with writing(self._path), self._path.open("ab") as file:
            file.write(records)


class _Tracker(Writer):
    """Sends a row per round to a run of a tracker, about every ten seconds and with every checkpoint.

    ``FOLDER/NAME/fedsim.json`` has the id of the tracker's run and the last round that was sent. A process that continues the
    run goes on after that round: what it computes once more has the same bits, and is not sent again. A round is therefore sent
    when its evaluation, which follows it, cannot be missing: with it, when a later round begins, or at the end of the run. A
    process that continues the run has the others in its history, or computes them again.
    """

    name: str

    def __init__(self, folder: Path, config: Mapping[str, Any], history: Sequence[Line]) -> None:
        super().__init__(folder, config, history)
        self._file = folder / self.name / "fedsim.json"
        known: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        with writing(self._file):
            self._file.parent.mkdir(exist_ok=True)
        self._round: int = known.get("round", 0)
        self._rows: dict[int, dict[str, float]] = {}
        self._is_evaluated = False  # whether the last row has its evaluation
        self._sent_at = time.monotonic()
        self._id = self._open(known.get("id"))
        self._record()
        self.write(history)

    def write(self, lines: Sequence[Line]) -> None:
        is_due = time.monotonic() - self._sent_at > _SECONDS_PER_SYNC
        if is_due and lines and self._rows and lines[0]["round"] > max(self._rows):
            self._send_until(max(self._rows))
        for line, costs in zip(lines, self._costs(lines), strict=True):
            if line["round"] > self._round:
                spent = {f"total/{name}": value for name, value in costs.items() if value}
                self._rows.setdefault(line["round"], {}).update(named_scalars(line) | spent)
                self._is_evaluated = "seconds" not in line

    def sync(self) -> None:
        if self._rows:
            self._send_until(max(self._rows) - (not self._is_evaluated))

    def close(self, is_finished: bool) -> None:
        self._is_evaluated |= is_finished
        self.sync()
        self._end(is_finished)

    def _send_until(self, round: int) -> None:
        if rows := {number: row for number, row in self._rows.items() if number <= round}:
            self._send(rows)
            self._round = max(rows)
            self._rows = {number: row for number, row in self._rows.items() if number > round}
            self._record()
        self._sent_at = time.monotonic()

    def _record(self) -> None:
        replace_text(self._file, json.dumps({"id": self._id, "round": self._round}) + "\n")

    def _open(self, id: str | None) -> str:
        """Begins a run, or continues the one with this id; returns its id."""
        raise NotImplementedError

    def _send(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Sends the numbers of rounds."""
        raise NotImplementedError

    def _end(self, is_finished: bool) -> None:
        """Closes the tracker's run."""
        raise NotImplementedError


class WeightsAndBiases(_Tracker):
    """Writes ``FOLDER/wandb``, without a network unless the environment variable ``WANDB_MODE`` is ``online``.

    ``wandb sync --append`` uploads it later; a run that was continued has a folder ``offline-run-*`` for each process, and
    all have its id. Project and entity are those of ``WANDB_PROJECT`` (default: fedsim) and ``WANDB_ENTITY``.
    """

    name = "wandb"

    def _open(self, id: str | None) -> str:
        import wandb

        id = id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            id=id,
            name=self.folder.name,
            dir=self.folder,
            project=os.environ.get("WANDB_PROJECT", "fedsim"),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=json.loads(json.dumps(dict(self.config), default=str)),
            allow_val_change=True,
            resume="allow",
            reinit="create_new",  # The runs of a sweep are open at the same time.
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="round")
        return id

    def _send(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        for round, row in rows.items():
            self._run.log({"round": round, **row}, step=round)

    def _end(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MLflow(_Tracker):
    """Writes ``FOLDER/mlflow/mlflow.db``, or to the server in the environment variable ``MLFLOW_TRACKING_URI``.

    ``mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow/mlflow.db`` shows it. The experiment is that of
    ``MLFLOW_EXPERIMENT_NAME`` (default: fedsim). MLflow's parameters cannot change; if the run continues with other values,
    such as another number of rounds, these are tags.
    """

    name = "mlflow"

    def _open(self, id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        path = self._file.parent.resolve()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{path}/mlflow.db"))
        if id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedsim")
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
            id = str(self._client.create_run(experiment, run_name=self.folder.name).info.run_id)
        else:
            self._client.update_run(id, "RUNNING")
        params = {_mlflow_name(name): str(value)[:_MLFLOW_LENGTH] for name, value in _parameters(self.config).items()}
        known = self._client.get_run(id).data.params
        new = [Param(name, value) for name, value in params.items() if name not in known]
        for start in range(0, len(new), _MLFLOW_BATCH):
            self._client.log_batch(id, params=new[start : start + _MLFLOW_BATCH])
        for name, value in params.items():
            if known.get(name, value) != value:
                self._client.set_tag(id, name, value)
        return id

    def _send(self, rows: Mapping[int, Mapping[str, float]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), value, now, round) for round, row in rows.items() for name, value in row.items()]
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MLFLOW_BATCH])

    def _end(self, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")


_WRITERS: dict[str, type[Writer]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
_MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def named_scalars(line: Line) -> dict[str, float]:
    """Returns the finite numbers of a line as ``SPLIT/METRIC``, with a key for each entry of a short vector, without its round.

    >>> named_scalars({"round": 1, "test_f1": [0.5, 1.0], "test_confusion": [[1, 0], [0, 1]]})
    {'test/f1/0': 0.5, 'test/f1/1': 1.0}
    >>> named_scalars({"round": 1, "loss": 0.5, "test_loss": None})
    {'train/loss': 0.5}
    """
    scalars: dict[str, float] = {}
    for name, value in line.items():
        split, metric = split_and_metric(name)
        named = f"{split or 'train'}/{metric}"
        if isinstance(value, list) and len(value) <= _MOST_ENTRIES:
            scalars |= {f"{named}/{i}": entry for i, entry in enumerate(value) if isinstance(entry, int | float)}
        elif isinstance(value, int | float) and name != "round":
            scalars[named] = value
    return scalars


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with the hyperparameters of its algorithm as entries of their own; the values are simple.

    >>> _parameters({"rounds": 5, "clip": None, "hyperparameters": {"mu": 0.1}, "sizes": [1, 2]})
    {'rounds': 5, 'clip': 'None', 'sizes': '[1, 2]', 'mu': 0.1}
    """
    flat = {name: value for name, value in config.items() if name != "hyperparameters"}
    flat |= config.get("hyperparameters") or {}
    return {name: value if isinstance(value, str | int | float) else str(value) for name, value in flat.items()}


def _mlflow_name(name: str) -> str:
    """Returns a name without the characters that MLflow refuses.

    >>> _mlflow_name("cohorts (hash)")
    'cohorts _hash_'
    """
    return re.sub(r"[^\w\-. :/]", "_", name)


def _record(data: bytes) -> bytes:
    """Returns a record of a TFRecord file: the length, its checksum, the data, and their checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
