"""Checkpoints and resuming: after any interruption, a run continues and ends with the same bits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.experiment import Checkpoints, best_round, read_config, read_metrics, restore, run
from fedsim.experiment._metrics_file import MetricsFile
from fedsim.saved_arrays import checkpoint_folder, write_arrays


class KilledError(Exception):
    """Simulates that the process is killed: no code catches this exception or saves anything because of it."""


def _die_after(round):
    def die(line, state):
        if line["round"] >= round:
            raise KilledError

    return die


def _rounds(lines, key="loss"):
    return [line["round"] for line in lines if key in line]


def test_resumed_run_equals_an_uninterrupted_one(arguments, unbroken, bits, tmp_path):
    for death in (5, 9):
        with pytest.raises(KilledError):
            run(**arguments, folder=tmp_path / "r", checkpoint_every=2, callbacks=[_die_after(death)], rounds_per_dispatch=1)
    result = run(**arguments, folder=tmp_path / "r", checkpoint_every=2)
    assert bits(result.state) == unbroken
    assert _rounds(result.history) == list(range(1, 13)) == _rounds(read_metrics(tmp_path / "r/metrics.jsonl"))
    assert _rounds(result.history, "test_accuracy") == [4, 8, 12]


@pytest.mark.slow
def test_a_resumed_run_of_varying_cohorts_equals_an_uninterrupted_one(make_algorithm, data, bits, tmp_path):
    algorithm, sampler = make_algorithm(), federation.SAMPLERS["PoissonSampler"](data, 4)
    whole = run(algorithm, sampler, rounds=6, progress=False)
    lines = []

    def stop(line, state):
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            algorithm,
            sampler,
            rounds=6,
            folder=tmp_path / "r",
            checkpoint_every=1,
            callbacks=[stop],
            rounds_per_dispatch=1,
            progress=False,
        )
    again = run(algorithm, sampler, rounds=6, folder=tmp_path / "r", checkpoint_every=1, rounds_per_dispatch=1, progress=False)
    assert bits(again.state) == bits(whole.state)
    assert [line["round"] for line in again.history] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_without_a_server_equals_an_uninterrupted_one(model, data, bits, tmp_path):
    settings = dict(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), execution=fedsim.Jit())
    ring = fedsim.decentralized.ring(data.num_clients)
    algorithm = fedsim.decentralized.GradientTracking(**settings, topology=ring, message_loss=0.2)
    sampler = fedsim.UniformSampler(data, clients=data.num_clients, seed=7)
    given = dict(rounds=7, test_data=data, evaluate_every=3, progress=False, checkpoint_every=2, rounds_per_dispatch=1)
    whole = run(algorithm, sampler, **given)
    with pytest.raises(KilledError):
        run(algorithm, sampler, **given, folder=tmp_path / "r", callbacks=[_die_after(5)])
    again = run(algorithm, sampler, **given, folder=tmp_path / "r")
    assert bits(again.state) == bits(whole.state) and _rounds(again.history) == list(range(1, 8))
    assert [line["consensus_distance"] for line in again.history if "loss" in line][-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rounds_per_dispatch", [1, 4])
def test_rounds_per_dispatch_does_not_change_the_result(algorithm, sampler, bits, rounds_per_dispatch):
    auto = run(algorithm, sampler, rounds=9, progress=False)
    fixed = run(algorithm, sampler, rounds=9, progress=False, rounds_per_dispatch=rounds_per_dispatch)
    assert bits(fixed.state) == bits(auto.state)


def test_resuming_a_finished_run_returns_its_state(arguments, unbroken, bits, tmp_path, monkeypatch):
    first = run(**arguments, folder=tmp_path / "r")
    monkeypatch.setattr(fedsim.algorithms.FedAvg, "apply_rounds", lambda *_, **__: pytest.fail("trained again"))
    again = run(**arguments, folder=tmp_path / "r")
    assert bits(again.state) == bits(first.state) == unbroken and again.round == 12
    assert again.history == first.history and again.evaluation.overall == first.evaluation.overall


@pytest.mark.slow
def test_truncated_newest_checkpoint_is_skipped_with_a_warning(arguments, unbroken, bits, tmp_path):
    with pytest.raises(KilledError):
        run(**arguments, folder=tmp_path / "r", checkpoint_every=2, callbacks=[_die_after(7)], rounds_per_dispatch=1)
    newest = max((tmp_path / "r/checkpoints").iterdir())
    assert newest.name == "00000006"
    for file in newest.rglob("*"):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(file.read_bytes()[:50])
    with pytest.warns(UserWarning, match="The checkpoint of round 6 is damaged and skipped"):
        result = run(**arguments, folder=tmp_path / "r", checkpoint_every=2)
    assert bits(result.state) == unbroken and _rounds(result.history) == list(range(1, 13))


def test_every_truncated_changed_or_missing_file_is_detected(tmp_path):
    state = {"w": jnp.arange(300.0).reshape(3, 100), "n": jnp.int32(3)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size]
    for file in files:
        whole = file.read_bytes()
        for damage in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
            file.write_bytes(damage)
            with pytest.raises(ValueError):  # noqa: PT011 - damage in the list of files raises a JSON error
                checkpoints.load(1, state)
        if file.name != "files.json":
            file.unlink()
            with pytest.raises(ValueError, match="is missing"):
                checkpoints.load(1, state)
        file.write_bytes(whole)
    np.testing.assert_array_equal(checkpoints.load(1, state)["w"], state["w"])


def test_files_of_others_in_the_folder_of_a_checkpoint_are_ignored(tmp_path, monkeypatch):
    def synchronized(folder):
        (folder / ".nfs0001").touch()  # the rest of a deleted file, until no process has it open

    monkeypatch.setattr("fedsim.saved_arrays.sync_files", synchronized)
    checkpoints, path = Checkpoints(tmp_path), tmp_path / "00000001"
    checkpoints.save(1, {"w": jnp.arange(3.0)})
    written = (path / "files.json").stat().st_mtime_ns
    (path / ".nfs0001").unlink()
    for name in (".DS_Store", "d/.DS_Store", "Thumbs.db"):
        (path / name).write_bytes(b"foreign")
    state, round = checkpoints.newest({"w": jnp.zeros(3)})
    assert state["w"].tolist() == [0.0, 1.0, 2.0] and round == 1
    checkpoints.save(1, {"w": jnp.arange(3.0)})  # It is complete, and not written again.
    assert (path / "files.json").stat().st_mtime_ns == written


def test_an_unfinished_checkpoint_is_ignored(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.ones(2)})
    checkpoints.save(2, {"w": jnp.zeros(2)})
    (tmp_path / "00000002/files.json").unlink()
    assert checkpoints.rounds() == [1] and checkpoints.newest({"w": jnp.ones(2)})[1] == 1
    checkpoints.save(2, {"w": jnp.full(2, 5.0)})
    assert checkpoints.load(2, {"w": jnp.ones(2)})["w"].tolist() == [5.0, 5.0]


def test_when_all_checkpoints_are_damaged_there_is_an_error(algorithm, arguments, tmp_path):
    run(**arguments, folder=tmp_path / "r", checkpoint_every=6)
    for folder in (tmp_path / "r/checkpoints").iterdir():
        for file in folder.rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match="All checkpoints in .* are damaged"):
        run(**arguments, folder=tmp_path / "r")


def test_an_incomplete_last_line_of_the_metrics_is_deleted(arguments, unbroken, bits, tmp_path):
    with pytest.raises(KilledError):
        run(**arguments, folder=tmp_path / "r", checkpoint_every=4, callbacks=[_die_after(6)], rounds_per_dispatch=1)
    with (tmp_path / "r/metrics.jsonl").open("a") as file:
        file.write('{"round": 7, "lo')
    result = run(**arguments, folder=tmp_path / "r", checkpoint_every=4)
    lines = [json.loads(text) for text in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert lines == result.history and _rounds(lines) == list(range(1, 13)) and bits(result.state) == unbroken


def _without_times(lines):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def _all_of(stretches):
    for stretch in stretches.split(", "):
        first, _, last = stretch.partition(" to ")
        yield from range(int(first), int(last or first) + 1)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("damage", "unreadable", "missing"),
    [
        (lambda lines: [lines[0], lines[1].replace(b"loss", b"l\xffss"), *lines[2:]], "2", "2"),
        (lambda lines: None, "", "1 to 8"),
        (lambda lines: [*lines[:-2], lines[-2][:20]], "", "8"),  # The last row that the checkpoint covers is torn.
        (lambda lines: [*lines[:3], b"\0" * 400, *lines[7:]], "4", "4 to 6"),  # three rows and an evaluation
        (lambda lines: [lines[0], b"[1]", b'{"round": "3"}', *lines[3:]], "2 to 3", "2 to 3"),
        (lambda lines: [b"{" + lines[0], *lines[1:4], lines[4][:-1], *lines[5:]], "1, 5", "1"),
    ],
)
def test_damaged_metrics_lose_no_other_row(damage, unreadable, missing, arguments, unbroken, bits, tmp_path):
    whole = run(**arguments).history
    with pytest.raises(KilledError):  # The checkpoint of round 8 exists, and round 9 has a row.
        run(**arguments, folder=tmp_path / "r", checkpoint_every=4, callbacks=[_die_after(9)], rounds_per_dispatch=1)
    path, copy = tmp_path / "r/metrics.jsonl", tmp_path / "r/metrics.jsonl.damaged"
    lines = damage(path.read_bytes().split(b"\n")[:-2])
    content = b"" if lines is None else b"\n".join(lines)
    path.unlink() if lines is None else path.write_bytes(content)
    with pytest.warns(UserWarning, match="lacks the rows") as caught:
        result = run(**arguments, folder=tmp_path / "r", checkpoint_every=4)
    (message,) = [str(warning.message) for warning in caught]
    assert f"{path} lacks the rows of these finished rounds: {missing}." in message
    assert (f"cannot be read and are left out: {unreadable}." in message) == bool(unreadable)
    assert copy.exists() == (lines is not None) == (str(copy) in message) and (lines is None or copy.read_bytes() == content)
    lost, kept = set(_all_of(missing)), _without_times(read_metrics(path))
    expected = [line for line in _without_times(whole) if "loss" in line and line["round"] not in lost]
    assert [line for line in kept if "loss" in line] == expected and kept == _without_times(result.history)
    assert bits(result.state) == unbroken


def test_reading_damaged_metrics_gives_the_rows_behind_the_damage_and_says_which_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"round": 1}\n{"round": \xff2}\n\n{"round": 4}\n{"round": 5')
    with pytest.warns(UserWarning, match="metrics.jsonl is damaged.*left out: 2 to 3"):
        assert read_metrics(path) == [{"round": 1}, {"round": 4}]


def test_each_damaged_file_of_metrics_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for number, name in enumerate(["damaged", "damaged2", "damaged3"]):
        path.write_text(f'{{"round": 1, "seconds": 1}}\n{number}\n')
        with pytest.warns(UserWarning, match=f"kept as {path}.{name}[.]"):
            assert MetricsFile(path, keep_rounds=1).history == [{"round": 1, "seconds": 1}]
        assert (tmp_path / f"metrics.jsonl.{name}").read_text().splitlines()[1] == str(number)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the path of a file descriptor is read from /proc")
def test_metrics_and_the_files_of_a_checkpoint_are_on_the_disk_before_it_appears(arguments, tmp_path, monkeypatch):
    synced, renamed, fsync, replace = {}, [], os.fsync, os.replace

    def record_sync(descriptor):
        fsync(descriptor)
        path = os.path.realpath(f"/proc/self/fd/{descriptor}")
        synced[path] = None if os.path.isdir(path) else os.fstat(descriptor).st_size

    def is_synced(path):
        return synced.get(str(path)) == path.stat().st_size

    def record_rename(path, target):
        path, target = Path(path), Path(target)
        if tmp_path not in target.parents:
            return replace(path, target)
        assert is_synced(path)
        if target.name == "files.json":
            metrics, round = tmp_path / "r/metrics.jsonl", int(target.parent.name)
            assert is_synced(metrics) and _rounds(read_metrics(metrics))[-1] == round
            files = [file for file in target.parent.rglob("*") if file.is_file()]
            assert len(files) > 2 and all(map(is_synced, files))
        synced.pop(str(target.parent), None)
        renamed.append(target)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    run(**arguments, folder=tmp_path / "r", checkpoint_every=4, rounds_per_dispatch=1)
    names = [target.name for target in renamed]
    # The configuration says in the end how the run ended.
    assert names == ["config.json", "metrics.jsonl", "files.json", "files.json", "files.json", "clients.csv", "config.json"]
    assert {str(target.parent) for target in renamed if target.parent.exists()} <= set(synced)


def test_a_run_killed_before_the_first_checkpoint_starts_again(arguments, unbroken, bits, tmp_path):
    with pytest.raises(KilledError):
        run(**arguments, folder=tmp_path / "r", checkpoint_every=6, callbacks=[_die_after(2)], rounds_per_dispatch=1)
    assert bits(run(**arguments, folder=tmp_path / "r", checkpoint_every=6).state) == unbroken


@pytest.mark.slow
def test_speed_only_settings_may_differ(arguments, make_algorithm, bits, unbroken, tmp_path):
    with pytest.raises(KilledError):
        run(**arguments, folder=tmp_path / "r", checkpoint_every=2, callbacks=[_die_after(5)], rounds_per_dispatch=1)
    arguments["algorithm"] = make_algorithm(execution=fedsim.Jit(memory="stream"))
    result = run(**arguments, folder=tmp_path / "r", rounds_per_dispatch=3)
    for ours, theirs in zip(bits(result.state), unbroken, strict=True):
        np.testing.assert_allclose(np.frombuffer(ours, np.float32), np.frombuffer(theirs, np.float32), rtol=1e-5)


class Before(NamedTuple):
    params: dict
    count: jax.Array
    key: jax.Array


class After(NamedTuple):
    params: dict
    count: jax.Array
    key: jax.Array


def test_checkpoint_survives_renaming_a_state_class(tmp_path):
    state = Before({"linear": {"w": jnp.ones([2, 3], jnp.bfloat16), "b": jnp.zeros(0)}}, jnp.int32(4), jax.random.key(5))
    Checkpoints(tmp_path).save(8, state)
    like = jax.eval_shape(
        lambda: After({"linear": {"w": jnp.zeros([2, 3], jnp.bfloat16), "b": jnp.zeros(0)}}, jnp.int32(0), jax.random.key(0))
    )
    restored, round = Checkpoints(tmp_path).newest(like)
    assert type(restored) is After and round == 8 and restored.params["linear"]["w"].dtype == jnp.bfloat16
    assert jax.random.key_data(restored.key).tolist() == jax.random.key_data(state.key).tolist() and int(restored.count) == 4


@pytest.mark.parametrize("name", ["vector", "number", "key"])
def test_a_state_that_is_one_array_is_restored(tmp_path, name):
    state = {"vector": jnp.arange(3.0), "number": jnp.float32(2), "key": jax.random.key(5)}[name]
    Checkpoints(tmp_path).save(1, state)
    restored, _ = Checkpoints(tmp_path).newest(jax.eval_shape(lambda: state))
    assert restored.dtype == state.dtype and jnp.array_equal(restored, state)


@pytest.mark.parametrize("state", [{}, {"w": np.zeros((0, 2))}], ids=str)
def test_a_state_without_numbers_is_restored(tmp_path, state):
    like = jax.eval_shape(lambda: state)
    Checkpoints(tmp_path / "new").save(1, state)
    write_arrays(checkpoint_folder(tmp_path / "old", 1), {"": np.zeros(1)})  # what earlier versions wrote for no array
    for folder in ("new", "old"):
        restored, round = Checkpoints(tmp_path / folder).newest(like)
        assert round == 1 and jax.eval_shape(lambda restored=restored: restored) == like


def test_checkpoint_of_another_structure_is_refused_by_name(tmp_path):
    Checkpoints(tmp_path).save(1, {"w": jnp.ones(3), "old": jnp.ones(())})
    with pytest.raises(ValueError, match=r"lacks \[\"\['new'\]\"\] and has the additional \[\"\['old'\]\"\]"):
        Checkpoints(tmp_path).newest({"w": jnp.ones(3), "new": jnp.ones(())})
    with pytest.raises(ValueError, match=r"\['w'\] is float32\[3\] in the checkpoint and float32\[4\] in this run"):
        Checkpoints(tmp_path).newest({"w": jnp.ones(4), "old": jnp.ones(())})


def test_the_last_two_and_the_best_are_kept(arguments, algorithm, tmp_path):
    scores = {4: 0.5, 8: 0.9, 12: 0.7, 16: 0.8, 20: 0.6}
    arguments |= dict(rounds=20, evaluate=lambda state: {"accuracy": scores[int(state.round)]}, test_data=None)
    result = run(**arguments, folder=tmp_path / "r", checkpoint_every=4)
    assert Checkpoints(tmp_path / "r/checkpoints").rounds() == [8, 16, 20] and best_round(result.history) == 8
    best, round = restore(tmp_path / "r", algorithm, "best")
    assert round == 8 == int(best.round)
    last, round = restore(tmp_path / "r", algorithm)
    assert round == 20 == int(last.round)


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("name", "score", "kept"),
    [
        ("cross_entropy", lambda value: value, [4, 5]),  # nothing says which values are better, so none is the best
        ("cross_entropy", lambda value: fedsim.metrics.Score(value, better="lower"), [1, 4, 5]),
        ("gain", lambda value: fedsim.metrics.Score(value, better="higher"), [2, 4, 5]),
        ("loss", lambda value: value, [1, 4, 5]),
        ("loss_of_the_best", lambda value: fedsim.metrics.Score(value, better="higher"), [2, 4, 5]),
    ],
)
def test_the_best_is_judged_by_what_the_metric_says(arguments, algorithm, tmp_path, capsys, name, score, kept):
    values = {1: 1.0, 2: 1.9, 3: 1.5, 4: 1.6, 5: 1.2}
    arguments |= dict(rounds=5, evaluate=lambda state: {name: score(values[int(state.round)])}, evaluate_every=1, progress=True)
    result = run(**arguments | {"test_data": None}, folder=tmp_path / "r", checkpoint_every=1)
    assert Checkpoints(tmp_path / "r/checkpoints").rounds() == kept
    assert (
        best_round(read_metrics(tmp_path / "r/metrics.jsonl")) == best_round(result.history) == (kept[0] if kept[2:] else None)
    )
    assert ("(the last two and the best)" in capsys.readouterr().out) == (len(kept) == 3)
    if not kept[2:]:
        with pytest.raises(ValueError, match="There is no best checkpoint in"):
            restore(tmp_path / "r", algorithm, "best")


def test_a_metric_s_direction_is_in_the_lines_and_in_the_table_of_clients(
    arguments, algorithm, model, make_algorithm, tmp_path
):
    per_example = fedsim.metrics.per_example
    metrics = {
        "margin": lambda e, out: per_example(jnp.max(out, axis=1), better="higher"),
        "nll": lambda e, out: fedsim.metrics.cross_entropy(e, out),  # the model's loss
        "size": lambda e, out: jnp.max(jnp.abs(out), axis=1),
    }
    algorithm = make_algorithm(model=dataclasses.replace(model, metrics=metrics))
    result = run(**arguments | dict(algorithm=algorithm, rounds=2, evaluate_every=1), folder=tmp_path / "r")
    line = read_metrics(tmp_path / "r/metrics.jsonl")[-1]
    assert line["better"] == {"test_margin": "higher", "test_nll": "lower"}
    values = {name: np.sort(result.evaluation.clients[name].result()) for name in metrics}
    assert line["test_margin_clients_worst10"] == pytest.approx(values["margin"][0])
    assert line["test_nll_clients_worst10"] == pytest.approx(values["nll"][-1])
    assert "test_size_clients_worst10" not in line and line["test_size_clients_mean"] == pytest.approx(values["size"].mean())


def test_test_data_without_examples_is_refused(arguments):
    test_data = arguments["test_data"]
    empty = fedsim.FederatedData.from_arrays({name: column[:0] for name, column in test_data.columns.items()}, sizes=[0, 0])
    with pytest.raises(ValueError, match="Expected test_data with examples, got 2 clients without any"):
        run(**arguments | {"test_data": empty})


def test_restoring_from_an_empty_folder_is_an_error(algorithm, tmp_path):
    with pytest.raises(ValueError, match="There is no best checkpoint in"):
        restore(tmp_path, algorithm, "best")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_the_run_saves_and_prints_how_to_resume(arguments, unbroken, bits, tmp_path, capsys, number):
    def send_signal(line, state):
        if line["round"] == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result = run(**arguments, folder=tmp_path / "r", callbacks=[send_signal], rounds_per_dispatch=1)
    assert result.interrupted == number and 3 <= result.round <= 5
    assert signal.getsignal(number) is before
    text = capsys.readouterr().err
    assert f"{number.name}: stopped after round {result.round} of 12" in text and f"folder='{tmp_path / 'r'}'" in text
    resumed = run(**arguments, folder=tmp_path / "r")
    assert resumed.interrupted is None and bits(resumed.state) == unbroken
    assert _rounds(resumed.history) == list(range(1, 13))


def test_a_second_ctrl_c_aborts_at_once(arguments, tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore the signal

    lines = []

    def send_signal(line, state):
        lines.append(line)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(**arguments, folder=tmp_path / "r", callbacks=[send_signal], rounds_per_dispatch=2)
    assert len(lines) == 2


def test_config_json_records_versions_and_settings(arguments, tmp_path):
    settings = fedsim.experiment.Settings(lanes=2)
    run(**arguments, folder=tmp_path / "r", config={"x": (1, 2)}, settings=settings)
    run(**arguments, folder=tmp_path / "r", config={"x": [1, 2]}, settings=settings)
    stored = read_config(tmp_path / "r")
    assert stored["config"] == {"x": [1, 2], "rounds": 12, "evaluate_every": 4, "root_key": [0, 7]}
    assert stored["settings"]["lanes"] == 2
    assert {"fedsim", "jax", "jaxlib", "numpy", "optax", "python"} <= stored["versions"].keys()


def test_a_checkpoint_that_cannot_be_read_now_is_not_deleted(arguments, algorithm, tmp_path, monkeypatch):
    """A temporary error of the file system loses nothing."""
    run(**arguments, folder=tmp_path / "r", checkpoint_every=4)
    checkpoints = Checkpoints(tmp_path / "r/checkpoints")
    before = checkpoints.rounds()
    with monkeypatch.context() as patch:
        patch.setattr("fedsim.saved_arrays._checksums", lambda path, names: dict.fromkeys(names, 0))
        with pytest.warns(UserWarning, match="damaged"), pytest.raises((ValueError, KeyError)):
            restore(tmp_path / "r", algorithm)
    assert checkpoints.rounds() == before
    assert restore(tmp_path / "r", algorithm)[1] == 12


@pytest.mark.parametrize("field", [{"execution": "pmpa"}, {"example_storage": "disk"}, {"lanes": 0}])
def test_settings_that_do_not_exist_are_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        fedsim.experiment.Settings(**field)
    with pytest.raises(ValueError, match="There is no client schedule 'cosin'. Did you mean 'cosine'"):
        fedsim.experiment.RunConfig(client_schedule="cosin")
    with pytest.raises(ValueError, match="execution='debug' does not take devices"):
        fedsim.experiment.Settings(execution="debug", lanes=2).executor()
