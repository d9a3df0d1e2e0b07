"""TensorBoard, Weights & Biases and MLflow: what they are told of a run, read from their files."""

from __future__ import annotations

import json
import struct
import sys

import numpy as np
import pytest

from fedsim.experiment import _writers, read_metrics, run
from fedsim.experiment._writers import TensorBoard, named_scalars, open_writers


def expected(history, first=1):
    """Returns the numbers of each round from ``first`` on, and the megabytes until then."""
    rows, bits = {}, 0
    for line in history:
        bits += line.get("bits_up", 0) + line.get("bits_down", 0)
        rows.setdefault(line["round"], {}).update(named_scalars(line) | {"total/megabytes": bits / 8e6})
    return {round: row for round, row in rows.items() if round >= first}


def run_interrupted(arguments, folder, writers):
    """Runs 12 rounds by three processes: one stops with an error after round 7, before its line is written anywhere else."""

    def fail(line, state):
        if line["round"] == 7:
            raise RuntimeError("stop")

    options = {**arguments, "folder": folder, "writers": writers, "rounds_per_dispatch": 1}
    with pytest.raises(RuntimeError, match="stop"):
        run(**options, checkpoint_every=5, callbacks=[fail])
    result = run(**options)
    run(**options)
    assert [line["round"] for line in result.history if "loss" in line] == list(range(1, 13))
    return read_metrics(folder / "metrics.jsonl")


def events(folder):
    """Returns the events of the files of a folder, oldest first."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    found = []
    for path in sorted(folder.glob("events.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            found.append(event.FromString(content[at + 12 : at + 12 + size]))
            at += size + 16
    return found


def shown(folder):
    """Returns what TensorBoard shows of a folder, ``{tag: {step: value}}``: a start hides the steps from its own on."""
    values = {}
    for event in events(folder):
        if event.HasField("session_log"):
            values = {tag: {step: v for step, v in of.items() if step < event.step} for tag, of in values.items()}
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                assert event.step not in values.setdefault(value.tag, {})
                values[value.tag][event.step] = value.simple_value
    return values


def test_tensorboard_has_parameters_and_evaluations_against_bytes(arguments, tmp_path):
    folder = tmp_path / "r"
    history = run_interrupted(arguments, folder, "tensorboard")
    by_round = shown(folder / "tensorboard")
    rows = expected(history)
    for name in ("train/loss", "test/accuracy"):
        assert by_round[name] == pytest.approx({round: row[name] for round, row in rows.items() if name in row})
    by_bytes = shown(folder / "tensorboard/by_bytes")["test_by_bytes/accuracy"]
    steps = {number: round(rows[number]["total/megabytes"] * 1e6) for number in (4, 8, 12)}
    assert by_bytes == pytest.approx({step: rows[number]["test/accuracy"] for number, step in steps.items()})
    plugin = pytest.importorskip("tensorboardX.proto.plugin_hparams_pb2").HParamsPluginData
    values = [value for event in events(folder / "tensorboard") for value in event.summary.value]
    (start, *_) = [value for value in values if value.tag == "_hparams_/session_start_info"]
    told = plugin.FromString(start.metadata.plugin_data.content).session_start_info.hparams
    assert told["rounds"].number_value == 12 and told["algorithm"].string_value == "FedAvg"


def test_the_axes_of_a_virtual_clock_go_on_after_a_restart(tmp_path):
    pytest.importorskip("tensorboardX")
    lines = []
    for number in (1, 2, 3):
        lines.append({"round": number, "seconds": 9.0, "simulated_seconds": 1.5 * number, "bytes_up": 100, "bytes_down": 50})
        lines.append({"round": number, "test_loss": 1 / number})
    first = TensorBoard(tmp_path, {}, [])
    first.write(lines[:4])
    TensorBoard(tmp_path, {}, lines[:2]).write(lines[2:])
    for axis, step in (("bytes", 150), ("simulated_milliseconds", 1500)):
        values = shown(tmp_path / f"tensorboard/by_{axis}")[f"test_by_{axis}/loss"]
        assert values == pytest.approx({step: 1, 2 * step: 1 / 2, 3 * step: 1 / 3})


def test_a_writer_without_its_library_and_one_that_does_not_exist_are_refused(arguments, tmp_path, monkeypatch):
    for name in ("tensorboardX", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    assert open_writers(None, tmp_path, {}, []) == {}
    for name, extra in (("tensorboard", "run"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        with pytest.raises(ImportError, match=rf"got '{name}' in writers=.*pip install 'fedsim-jax\[{extra}\]', or leave"):
            run(**arguments, folder=tmp_path / name, writers=name)
    with pytest.raises(ValueError, match="wandb"):
        run(**arguments, folder=tmp_path / "r", writers="tensorboard,wand")


@pytest.fixture
def sent(monkeypatch):
    """The rows that a tracker gets, ``(round, row)``, and whether its processes finished; it stands for Weights & Biases."""
    rows = []

    class Recorder(_writers._Tracker):
        name = "recorder"

        def _open(self, id):
            return id or "new"

        def _send(self, some):
            rows.extend(some.items())

        def _end(self, is_finished):
            rows.append(is_finished)

    monkeypatch.setitem(_writers._WRITERS, "wandb", Recorder)
    monkeypatch.setitem(_writers._MODULES, "wandb", "json")
    return rows


def test_a_tracker_gets_an_evaluation_that_failed_at_first(arguments, tmp_path, sent):
    evaluated = []

    def evaluate(state):
        evaluated.append(len(evaluated))
        if len(evaluated) == 2:
            raise RuntimeError("stop")
        return {"accuracy": 0.5}

    options = {**arguments, "folder": tmp_path / "r", "writers": "wandb", "evaluate": evaluate, "rounds_per_dispatch": 1}
    with pytest.raises(RuntimeError, match="stop"):
        run(**options, checkpoint_every=3)
    assert sent[-1] is False and [round for round, _ in sent[:-1]] == list(range(1, 8))
    history = run(**options).history
    rows = [row for row in sent if not isinstance(row, bool)]
    assert sent[-1] is True and [round for round, _ in rows] == list(range(1, 13))
    assert [round for round, row in rows if "test/accuracy" in row] == [4, 8, 12]
    for (round, row), want in zip(rows, expected(history).values(), strict=True):
        assert row | {"train/seconds": 0} == pytest.approx(want | {"train/seconds": 0}), round  # Some rounds ran twice.


def test_a_tracker_gets_the_evaluation_of_a_run_that_ends_where_it_was_interrupted(tmp_path, sent):
    """As by `fedsim resume --rounds 2` of a run that was interrupted after two rounds of more."""
    history = [{"round": 1, "loss": 0.5, "seconds": 1}, {"round": 1, "test_loss": 0.4}, {"round": 2, "loss": 0.3, "seconds": 1}]
    for lines, known, is_finished in ((history, [], False), ([{"round": 2, "test_loss": 0.2}], history, True)):
        (writer,) = open_writers("wandb", tmp_path, {}, known).values()
        writer.write(lines)
        writer.sync()
        writer.close(is_finished)
    first, second = ({"train/loss": 0.5, "test/loss": 0.4}, {"train/loss": 0.3, "test/loss": 0.2})
    assert sent == [(1, {**first, "train/seconds": 1}), False, (2, {**second, "train/seconds": 1}), True]


def wandb_records(path):
    """Returns the records of a file of Weights & Biases, whose blocks are those of the log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := -at % 2**15) and left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.slow  # about 3 s: a process of Weights & Biases for each part of the run
def test_weights_and_biases_has_each_round_once(arguments, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tmp_path / "r"
    history = run_interrupted(arguments, folder, "wandb")
    rows, ids, configs, exits = [], set(), [], []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({name: json.loads(value) for name, value in items.items() if not name.startswith("_")})
            if kind == "run":
                ids.add(record.run.run_id)
                configs.append({item.key: json.loads(item.value_json) for item in record.run.config.update})
            if kind == "exit":
                exits.append(record.exit.exit_code)
    assert len(ids) == 1 and configs[0]["rounds"] == 12 and exits[0] == 1 and exits[-1] == 0
    wanted = [{"round": number, **row} for number, row in expected(history).items()]
    for row in (*rows, *wanted):  # Rounds that ran twice took another time.
        row.pop("train/seconds")
    assert [row["round"] for row in rows] == list(range(1, 13))
    for row, want in zip(rows, wanted, strict=True):
        assert row == pytest.approx(want)


@pytest.mark.slow  # about 10 s: MLflow makes the tables of its database
@pytest.mark.filterwarnings("ignore")  # of the libraries of MLflow about each other
def test_mlflow_has_each_round_once(arguments, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "r"
    history = run_interrupted(arguments, folder, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("fedsim").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["rounds"] == "12"
    rows = expected(history)
    for name in ("train/loss", "test/accuracy", "total/megabytes"):
        metrics = client.get_metric_history(found.info.run_id, name)
        wanted = {round: row[name] for round, row in rows.items() if name in row}
        assert [metric.step for metric in metrics] == list(wanted)
        np.testing.assert_allclose([metric.value for metric in metrics], list(wanted.values()))
