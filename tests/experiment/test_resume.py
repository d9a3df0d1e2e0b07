"""Checkpoints and resumption: whatever happens to a run, it goes on, and ends with the same bits."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.aggregators import CentredClipping, Compressed, Mean, TrimmedMean
from fedsim.experiment import Checkpoints, best_round, read_config, read_metrics, restore, run
from fedsim.experiment._identity import describe


class KilledError(Exception):
    """Stands for the death of the process: nothing catches it, nothing is saved because of it."""


def _die_after(round):
    def die(line, state):
        if line["round"] >= round:
            raise KilledError

    return die


def _rounds(lines, key="loss"):
    return [line["round"] for line in lines if key in line]


@pytest.fixture
def arguments(algorithm, sampler, data):
    return dict(algorithm=algorithm, sampler=sampler, rounds=12, test_data=data, evaluate_every=4, progress=False)


@pytest.fixture
def unbroken(arguments, bits):
    return bits(run(**arguments).state)


def test_resumed_run_equals_an_unbroken_one(arguments, unbroken, bits, tmp_path):
    for death in (5, 9):
        with pytest.raises(KilledError):
            run(**arguments, folder=tmp_path / "r", checkpoint_every=2, callbacks=[_die_after(death)], rounds_per_dispatch=1)
    result = run(**arguments, folder=tmp_path / "r", checkpoint_every=2)
    assert bits(result.state) == unbroken
    assert _rounds(result.history) == list(range(1, 13)) == _rounds(read_metrics(tmp_path / "r/metrics.jsonl"))
    assert _rounds(result.history, "test_accuracy") == [4, 8, 12]


def test_resuming_a_finished_run_returns_its_state(arguments, unbroken, bits, tmp_path, monkeypatch):
    first = run(**arguments, folder=tmp_path / "r")
    monkeypatch.setattr(fedsim.algorithms.FedAvg, "apply_rounds", lambda *_, **__: pytest.fail("trained again"))
    again = run(**arguments, folder=tmp_path / "r")
    assert bits(again.state) == bits(first.state) == unbroken and again.round == 12
    assert again.history == first.history and again.evaluation.overall == first.evaluation.overall


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


def test_every_truncated_changed_or_missing_file_is_noticed(tmp_path):
    state = {"w": jnp.arange(300.0).reshape(3, 100), "n": jnp.int32(3)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size]
    for file in files:
        whole = file.read_bytes()
        for damage in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
            file.write_bytes(damage)
            with pytest.raises(ValueError):  # noqa: PT011 - in the list of files it is a JSON error
                checkpoints.load(1, state)
        if file.name != "files.json":
            file.unlink()
            with pytest.raises(ValueError, match="is missing"):
                checkpoints.load(1, state)
        file.write_bytes(whole)
    np.testing.assert_array_equal(checkpoints.load(1, state)["w"], state["w"])


def test_an_unfinished_checkpoint_is_not_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.ones(2)})
    checkpoints.save(2, {"w": jnp.zeros(2)})
    (tmp_path / "00000002/files.json").unlink()
    assert checkpoints.rounds() == [1] and checkpoints.newest({"w": jnp.ones(2)})[1] == 1
    checkpoints.save(2, {"w": jnp.full(2, 5.0)})
    assert checkpoints.load(2, {"w": jnp.ones(2)})["w"].tolist() == [5.0, 5.0]


def test_when_all_checkpoints_are_damaged_it_says_so(algorithm, arguments, tmp_path):
    run(**arguments, folder=tmp_path / "r", checkpoint_every=6)
    for folder in (tmp_path / "r/checkpoints").iterdir():
        for file in folder.rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match="All checkpoints in .* were damaged"):
        run(**arguments, folder=tmp_path / "r")


def test_half_a_last_line_of_the_metrics_is_cut_off(arguments, unbroken, bits, tmp_path):
    with pytest.raises(KilledError):
        run(**arguments, folder=tmp_path / "r", checkpoint_every=4, callbacks=[_die_after(6)], rounds_per_dispatch=1)
    with (tmp_path / "r/metrics.jsonl").open("a") as file:
        file.write('{"round": 7, "lo')
    result = run(**arguments, folder=tmp_path / "r", checkpoint_every=4)
    lines = [json.loads(text) for text in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert lines == result.history and _rounds(lines) == list(range(1, 13)) and bits(result.state) == unbroken


def test_killed_before_the_first_checkpoint(arguments, unbroken, bits, tmp_path):
    with pytest.raises(KilledError):
        run(**arguments, folder=tmp_path / "r", checkpoint_every=6, callbacks=[_die_after(2)], rounds_per_dispatch=1)
    assert bits(run(**arguments, folder=tmp_path / "r", checkpoint_every=6).state) == unbroken


def test_another_configuration_is_refused_naming_the_differences(arguments, tmp_path):
    run(**arguments, folder=tmp_path / "r", config={"dataset": "digits", "alpha": 0.3})
    before = (tmp_path / "r/config.json").read_text()
    with pytest.raises(ValueError, match="another configuration") as error:
        run(**{**arguments, "rounds": 13}, folder=tmp_path / "r", config={"dataset": "emnist62", "beta": 1})
    text = str(error.value)
    assert 'dataset: "emnist62" here, "digits" there' in text and "rounds: 13 here, 12 there" in text
    assert "alpha: nothing here, 0.3 there" in text and "beta: 1 here, nothing there" in text and "seed" not in text
    assert (tmp_path / "r/config.json").read_text() == before


def test_without_a_config_what_can_be_told_from_the_arguments_is_compared(arguments, make_algorithm, tmp_path):
    run(**arguments, folder=tmp_path / "r")
    sampler = fedsim.UniformSampler(arguments["sampler"].data, clients=3, seed=8)
    other = {**arguments, "algorithm": make_algorithm(weighting="uniform"), "sampler": sampler}
    with pytest.raises(
        ValueError, match=r'(?s)root_key: \[0, 8\] here, \[0, 7\] there.*weighting: "uniform" here, "examples" there'
    ):
        run(**other, folder=tmp_path / "r")


def _of(data, **changes):
    """The same population, with other names, columns or sizes."""
    given = dict(columns=dict(data.columns), sizes=data.sizes, client_ids=data.client_ids)
    return fedsim.FederatedData.from_arrays(**{**given, **changes})


def _attacked(sampler, *, seed=1, **changes):
    return fedsim.samplers.Attacked(sampler, fedsim.attacks.SignFlip(**changes), seed=seed)


_TOP_K = fedsim.compressors.TopK(fraction=0.25)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"aggregator": TrimmedMean(trim=0.3)}, 'aggregator: "TrimmedMean(trim=0.3)" here, "Mean()" there'),
        (
            {"aggregator": Compressed(_TOP_K)},
            {"aggregator": Compressed(_TOP_K, inner=CentredClipping(2.0))},
            "inner=CentredClipping(radius=2.0)",
        ),
        ({"downlink": _TOP_K}, {}, 'downlink: null here, "TopK('),
        ({"downlink": _TOP_K}, {"downlink": fedsim.compressors.TopK(fraction=0.5)}, "fraction=0.25"),
        ({}, {"batches": fedsim.Batches(size=4, shuffle=False)}, "shuffle=False"),
        ({}, {"averaging": 0.5}, "averaging: 0.5 here, null there"),
    ],
)
def test_another_part_of_the_algorithm_is_refused_naming_both(arguments, make_algorithm, tmp_path, before, after, expected):
    arguments |= dict(rounds=1, test_data=None, folder=tmp_path / "r")
    one, other = (make_algorithm(**fields, execution=fedsim.Jit()) for fields in (before, after))
    run(**{**arguments, "algorithm": one})
    with pytest.raises(ValueError, match="another configuration") as error:
        run(**{**arguments, "algorithm": other})
    assert expected in str(error.value) and str(error.value).count(" here, ") == 1
    assert "Choose another folder, or the same configuration and population." in str(error.value)
    assert len(run(**{**arguments, "algorithm": one}).history) == 1


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            lambda s: s,
            lambda s: fedsim.samplers.ShuffledSampler(s.data, clients=3, seed=7),
            '"ShuffledSampler(clients=3)" here, "Uniform',
        ),
        (lambda s: s, lambda s: _attacked(s), "nothing there"),
        (lambda s: _attacked(s), lambda s: _attacked(s, scale=2.0), "SignFlip(scale=2.0)"),
        (lambda s: _attacked(s), lambda s: _attacked(s, seed=2), "cohorts (hash)"),
        (
            lambda s: fedsim.samplers.Stragglers(s, epochs=5),
            lambda s: fedsim.samplers.Stragglers(s, epochs=9),
            "Stragglers(sampler=UniformSampler(clients=3), fraction=0.5, epochs=9, drop=False)",
        ),
        (
            lambda s: fedsim.samplers.WeightedSampler(s.data, clients=3, seed=7),
            lambda s: fedsim.samplers.WeightedSampler(s.data, clients=3, seed=7, weights=np.arange(1, 13)),
            "cohorts (hash)",
        ),
    ],
)
def test_another_sampler_is_refused_naming_both(arguments, tmp_path, before, after, expected):
    arguments |= dict(rounds=5, test_data=None)
    one, other = before(arguments["sampler"]), after(arguments["sampler"])
    run(**{**arguments, "sampler": one}, folder=tmp_path / "r")
    with pytest.raises(ValueError, match="another configuration") as error:
        run(**{**arguments, "sampler": other}, folder=tmp_path / "r")
    assert expected in str(error.value)
    run(**{**arguments, "sampler": before(arguments["sampler"])}, folder=tmp_path / "r")


@pytest.mark.parametrize("config", [None, {"dataset": "mine"}, fedsim.experiment.RunConfig(rounds=1)])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"client_ids": list("abcdefghijkl")}, "population, client ids and sizes (hash): "),
        ({"sizes": [16, 4] * 6}, "population, client ids and sizes (hash): "),
        ({"columns": {"z": np.zeros(120)}}, 'population, features: ["x", "y", "z"] here, ["x", "y"] there'),
    ],
)
def test_another_population_is_refused_naming_both(arguments, data, tmp_path, config, changes, expected):
    arguments |= dict(rounds=1, test_data=None, folder=tmp_path / "r", config=config)
    run(**arguments)
    if "columns" in changes:
        changes = {"columns": {**data.columns, **changes["columns"]}}
    other = {**arguments, "sampler": fedsim.UniformSampler(_of(data, **changes), clients=3, seed=7)}
    with pytest.raises(ValueError, match="another configuration") as error:
        run(**other)
    assert expected in str(error.value) and str(error.value).count(" here, ") == 1
    data.save(tmp_path / "same.h5")
    same = fedsim.UniformSampler(fedsim.FederatedData.open(tmp_path / "same.h5"), clients=3, seed=7)
    assert run(**{**arguments, "sampler": same}).round == 1


def test_a_folder_that_does_not_say_whose_run_it_is_is_refused(arguments, tmp_path):
    run(**arguments, folder=tmp_path / "r")
    stored = read_config(tmp_path / "r")
    del stored["population"], stored["config"]["aggregator"]
    (tmp_path / "r/config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="An earlier version of fedsim wrote it") as error:
        run(**arguments, folder=tmp_path / "r")
    assert 'aggregator: "Mean()" here, nothing there' in str(error.value)
    assert "population, clients: 12 here, nothing there" in str(error.value)


@dataclasses.dataclass(frozen=True, eq=False)
class Mine(Mean):
    """An aggregator with fields of all kinds."""

    start: np.ndarray
    big: jax.Array
    sizes: tuple[float, ...]
    rule: Callable[[float], float]


def test_what_is_told_of_a_run_is_the_same_when_all_is_made_anew(sampler, model):
    """Objects that differ in their addresses alone are the same run; those that differ in a number are not."""

    def made(start):
        return fedsim.algorithms.FedAvg(
            model=model,
            client_optimizer=lambda round: optax.sgd(0.1 / (1 + round)),
            batches=fedsim.Batches(size=4),
            aggregator=Mine(start=np.full(3, start), big=jnp.full(100, start), sizes=(1, start), rule=lambda x: x),
        )

    one, same, other = (describe(made(start), sampler, None, rounds=3) for start in (1.0, 1.0, 2.0))
    assert one == same and "0x" not in str(one)
    assert {name for name in one if one[name] != other[name]} == {"aggregator"}
    assert "start=float64 [1.0, 1.0, 1.0], big=float32 [100] (hash " in one["aggregator"]
    assert "sizes=(1, 1.0)" in one["aggregator"] and "rule" not in one["aggregator"]


def test_a_folder_in_which_no_round_was_run_is_free(arguments, make_algorithm, bits, unbroken, tmp_path):
    refused = {**arguments, "algorithm": make_algorithm(aggregator=fedsim.aggregators.Krum(attackers=5))}
    with pytest.raises(ValueError, match="Krum withstands attackers=5 in cohorts of at least .* = 13"):
        run(**refused, folder=tmp_path / "r")
    assert "Krum" in read_config(tmp_path / "r")["config"]["aggregator"]
    assert bits(run(**arguments, folder=tmp_path / "r").state) == unbroken
    assert read_config(tmp_path / "r")["config"]["aggregator"] == "Mean()"
    with pytest.raises(ValueError, match="another configuration"):
        run(**refused, folder=tmp_path / "r")


def test_what_clients_kept_of_a_run_without_rounds_is_in_nobody_s_way(arguments, model, bits, tmp_path):
    def remembering(cls, **fields):
        given = dict(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
        return {**arguments, "test_data": None, "algorithm": cls(**given, execution=fedsim.Jit(memory="stream"), **fields)}

    krum = fedsim.aggregators.Krum(attackers=5)
    with pytest.raises(ValueError, match="Krum withstands"):
        run(**remembering(fedsim.algorithms.APFL, aggregator=krum), folder=tmp_path / "r")
    after = run(**remembering(fedsim.algorithms.SCAFFOLD), folder=tmp_path / "r").state
    expected = run(**remembering(fedsim.algorithms.SCAFFOLD)).state
    assert bits(after.params) == bits(expected.params)


@pytest.mark.parametrize("left", ["metrics", "checkpoint"])
def test_a_folder_with_a_round_in_it_is_not_free(arguments, make_algorithm, tmp_path, left):
    run(**arguments, folder=tmp_path / "r", checkpoint_every=4)
    if left == "metrics":
        shutil.rmtree(tmp_path / "r/checkpoints")
    else:
        (tmp_path / "r/metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="another configuration"):
        run(**{**arguments, "algorithm": make_algorithm(weighting="uniform")}, folder=tmp_path / "r")


def test_a_folder_whose_run_is_in_its_first_round_is_not_free(arguments, make_algorithm, tmp_path):
    other = {**arguments, "algorithm": make_algorithm(weighting="uniform")}

    class Meanwhile(fedsim.UniformSampler):
        def cohort(self, round):
            if (tmp_path / "r/metrics.jsonl").exists() and round == 0:
                with pytest.raises(ValueError, match="is in use by another run"):
                    run(**other, folder=tmp_path / "r")
                refused.append(read_config(tmp_path / "r")["config"]["weighting"])
            return super().cohort(round)

    refused = []
    run(**{**arguments, "sampler": Meanwhile(arguments["sampler"].data, clients=3, seed=7)}, folder=tmp_path / "r")
    assert refused == ["examples"]


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


def test_checkpoint_of_another_structure_is_refused_by_name(tmp_path):
    Checkpoints(tmp_path).save(1, {"w": jnp.ones(3), "old": jnp.ones(())})
    with pytest.raises(ValueError, match=r"lacks \[\"\['new'\]\"\] and also has \[\"\['old'\]\"\]"):
        Checkpoints(tmp_path).newest({"w": jnp.ones(3), "new": jnp.ones(())})
    with pytest.raises(ValueError, match=r"\['w'\] is float32\[3\] there and float32\[4\] here"):
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


def test_restoring_from_an_empty_folder_is_an_error(algorithm, tmp_path):
    with pytest.raises(ValueError, match="holds no best checkpoint"):
        restore(tmp_path, algorithm, "best")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_resume(arguments, unbroken, bits, tmp_path, capsys, number):
    def strike(line, state):
        if line["round"] == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result = run(**arguments, folder=tmp_path / "r", callbacks=[strike], rounds_per_dispatch=1)
    assert result.interrupted == number and 3 <= result.round <= 5
    assert signal.getsignal(number) is before
    said = capsys.readouterr().err
    assert f"{number.name}: stopped after round {result.round} of 12" in said and f"folder='{tmp_path / 'r'}'" in said
    resumed = run(**arguments, folder=tmp_path / "r")
    assert resumed.interrupted is None and bits(resumed.state) == unbroken
    assert _rounds(resumed.history) == list(range(1, 13))


def test_a_second_ctrl_c_aborts_at_once(arguments, tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored

    def strike(line, state):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(**arguments, folder=tmp_path / "r", callbacks=[strike], rounds_per_dispatch=2)


def test_config_json_notes_versions_and_settings(arguments, tmp_path):
    settings = fedsim.experiment.Settings(lanes=2)
    run(**arguments, folder=tmp_path / "r", config={"x": (1, 2)}, settings=settings)
    run(**arguments, folder=tmp_path / "r", config={"x": [1, 2]}, settings=settings)
    stored = read_config(tmp_path / "r")
    assert stored["config"] == {"x": [1, 2], "rounds": 12, "evaluate_every": 4, "root_key": [0, 7]}
    assert stored["settings"]["lanes"] == 2 and set(stored["versions"]) == {"fedsim", "jax", "python"}


def test_a_checkpoint_that_cannot_be_read_now_is_not_deleted(arguments, algorithm, tmp_path, monkeypatch):
    """A file system that fails for a moment costs nothing; a damaged checkpoint is written anew when its round comes."""
    run(**arguments, folder=tmp_path / "r", checkpoint_every=4)
    checkpoints = Checkpoints(tmp_path / "r/checkpoints")
    before = checkpoints.rounds()
    with monkeypatch.context() as patch:
        patch.setattr("fedsim.experiment._checkpoint._checksums", lambda path: {"never": 0})
        with pytest.warns(UserWarning, match="damaged"), pytest.raises((ValueError, KeyError)):
            restore(tmp_path / "r", algorithm)
    assert checkpoints.rounds() == before
    assert restore(tmp_path / "r", algorithm)[1] == 12


@pytest.mark.parametrize("field", [{"execution": "pmpa"}, {"memory": "disk"}, {"lanes": 0}])
def test_settings_that_do_not_exist_are_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        fedsim.experiment.Settings(**field)
    with pytest.raises(ValueError, match="There is no choice of client_schedule 'cosin'. Did you mean 'cosine'"):
        fedsim.experiment.RunConfig(client_schedule="cosin")
    with pytest.raises(ValueError, match="execution='debug' has no devices"):
        fedsim.experiment.Settings(execution="debug", lanes=2).executor()
