"""Runs whose samplers see values of the rounds before: they wait for each round, and continue with the same bits."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import samplers, systems
from fedsim.commands import main
from fedsim.experiment import bisect, load, read_metrics, replay, run, simulate
from fedsim.experiment._metrics_file import MetricsFile

_MAKE = {
    "PowerOfChoice": lambda data: samplers.PowerOfChoice(data, clients=3, candidates=8, seed=7),
    "Oort": lambda data: samplers.Stragglers(samplers.Oort(data, clients=3, seed=7, exploration=0.5), epochs=2),
    "ImportanceByNorm": lambda data: samplers.ImportanceByNorm(data, clients=3, seed=7),
}


@pytest.fixture(scope="module")
def steered(make_algorithm):
    """An algorithm that reports all that samplers may observe."""
    staleness = fedsim.Staleness(bound=0)
    return make_algorithm(update_norms=True, staleness=staleness, execution=fedsim.Jit(), batches=fedsim.Batches(size=4))


def _untimed(lines):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


class KilledError(Exception):
    """Simulates that the process is killed."""


def _die_after(round):
    def die(line, state):
        if line["round"] >= round:
            raise KilledError

    return die


@pytest.mark.first(1)
@pytest.mark.parametrize("name", _MAKE)
def test_a_run_that_is_interrupted_in_each_round_equals_an_uninterrupted_one(name, steered, data, bits, tmp_path):
    """Checkpoints are older than the interruption, so lines of later rounds are cut and observed again."""
    arguments = dict(algorithm=steered, rounds=7, progress=False)
    whole = run(sampler=_MAKE[name](data), **arguments)
    for death in range(1, 7):
        options = dict(folder=tmp_path / "r", checkpoint_every=1 + death % 2, callbacks=[_die_after(death)])
        with pytest.raises(KilledError):
            run(sampler=_MAKE[name](data), **options, **arguments)
    result = run(sampler=_MAKE[name](data), folder=tmp_path / "r", **arguments)
    assert bits(result.state) == bits(whole.state)
    assert _untimed(result.history) == _untimed(whole.history) == _untimed(read_metrics(tmp_path / "r/metrics.jsonl"))
    assert len({tuple(line["observed"]["clients"]) for line in result.history}) > 4


@pytest.mark.slow
def test_a_run_on_a_virtual_clock_is_steered_and_continues(make_algorithm, data, bits, tmp_path):
    """Clients are late and replaced, and Oort measures their durations; the events are the same after each interruption."""
    algorithm, oort = make_algorithm(execution=fedsim.Jit()), samplers.Oort(data, clients=4, seed=7, exploration=0.5)
    options = dict(
        synchronization=systems.Synchronous(over_selection=1.5),
        devices=systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0)),
        rounds=6,
        progress=False,
    )
    whole = simulate(algorithm, oort, **options)
    for death in range(1, 6):
        interrupted = dict(folder=tmp_path / "r", checkpoint_every=2, callbacks=[_die_after(death)])
        with pytest.raises(KilledError):
            simulate(algorithm, oort, **interrupted, **options)
    result = simulate(algorithm, oort, folder=tmp_path / "r", **options)
    assert bits(result.state) == bits(whole.state) and _untimed(result.history) == _untimed(whole.history)
    assert result.schedule.steps.time.tolist() == [line["simulated_seconds"] for line in whole.history]
    assert any(line["updates_late"] for line in whole.history) and len(result.schedule.steps.time) == 6
    sampler = systems.ClockedSampler(oort, steps=algorithm.batches.num_steps(data.sizes), **_clock_of(options))
    client = whole.history[4]["observed"]["clients"][0]
    found = replay(tmp_path / "r", round=5, client=client, algorithm=result.algorithm, sampler=sampler)
    assert float(found.metrics["loss"]) == pytest.approx(whole.history[4]["observed"]["loss"][0], rel=1e-5)
    with pytest.raises(ValueError, match="stop_when="):
        simulate(algorithm, oort, **{**options, "rounds": None, "seconds": 60.0})
    others = {**options, "devices": systems.Devices(seconds_per_step=2.0)}
    with pytest.raises(ValueError, match="seconds_per_step"):
        simulate(algorithm, oort, folder=tmp_path / "r", **others)


def _clock_of(options):
    return {name: options[name] for name in ("synchronization", "devices")}


def test_what_is_observed_are_the_values_of_the_rounds_clients(steered, data):
    """A loop by hand observes the same; the norm is that of the client's parameters after its round, minus the server's."""
    sampler = _MAKE["ImportanceByNorm"](data)
    result = run(steered, sampler, rounds=2, progress=False)
    first = state = steered.init(fedsim.rng.stream(sampler.key, "init"))
    for line in result.history:
        cohort = sampler.cohort(line["round"] - 1)
        state, info = steered.apply(state, cohort)
        sampler = sampler.observe(samplers.Observation.of(cohort, info, sampler.observes))
        assert line["observed"] == sampler.observations[-1].to_json()
        assert line["observed"]["clients"] == cohort.clients.tolist()
    optimizer = optax.sgd(1.0)
    single = dataclasses.replace(steered, server_optimizer=optimizer, update_norms=False, staleness=None)
    start = first._replace(opt_state=optimizer.init(first.params))
    client = sampler.cohort(0).clients[0]
    after, info = single.apply(start, fedsim.Cohort(data, np.array([client]), 0, sampler.key, slots=sampler.clients))
    moved = jax.tree.map(lambda a, b: np.asarray(a - b).ravel(), after.params, first.params)
    norm = np.linalg.norm(np.concatenate(jax.tree.leaves(moved)))
    np.testing.assert_allclose(result.history[0]["observed"]["update_norm"][0], norm, rtol=1e-5)
    assert "update_norm" not in info.clients


@pytest.mark.slow
def test_clients_with_large_losses_are_chosen_more_often(steered, data):
    """The labels of client 3 are wrong, so its loss stays large."""
    columns = {"x": data.columns["x"], "y": np.array(data.columns["y"])}
    own = slice(data.offsets[3], data.offsets[4])
    columns["y"][own] = (columns["y"][own] + 1) % 3
    wrong = fedsim.FederatedData.from_arrays(columns, sizes=data.sizes)
    result = run(steered, samplers.PowerOfChoice(wrong, clients=3, candidates=12, seed=7), rounds=30, progress=False)
    chosen = np.bincount([client for line in result.history[10:] for client in line["observed"]["clients"]], minlength=12)
    assert chosen[3] == 20 and np.median(chosen) < 6  # 5 each, if they were chosen at random


@pytest.mark.slow
def test_a_finished_run_is_replayed_compared_and_made_longer(steered, data, bits, tmp_path):
    make = _MAKE["PowerOfChoice"]
    for folder in ("a", "b"):
        run(steered, make(data), rounds=4, folder=tmp_path / folder, checkpoint_every=3, progress=False)
    line = read_metrics(tmp_path / "a/metrics.jsonl")[3]
    client = line["observed"]["clients"][1]
    found = replay(tmp_path / "a", round=4, client=client, algorithm=steered, sampler=make(data))
    assert float(found.metrics["loss"]) == pytest.approx(line["observed"]["loss"][1], rel=1e-5)
    with pytest.raises(ValueError, match="was started in Python"):
        bisect(tmp_path / "a", tmp_path / "b")


def test_a_run_whose_observations_are_lost_is_refused(steered, data, tmp_path):
    sampler = _MAKE["PowerOfChoice"](data)
    run(steered, sampler, rounds=3, folder=tmp_path / "r", progress=False)
    lines = [line for line in read_metrics(tmp_path / "r/metrics.jsonl") if line["round"] != 2]
    (tmp_path / "r/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (
        pytest.warns(UserWarning, match="lacks the rows"),
        pytest.raises(ValueError, match="The values of round 2, which steer"),
    ):
        run(steered, sampler, rounds=3, folder=tmp_path / "r", progress=False)
    assert MetricsFile(tmp_path / "r/metrics.jsonl", 0).history == []  # the folder is not locked


@pytest.mark.slow
def test_what_cannot_be_right_is_refused(make_algorithm, steered, data):
    power, norms = _MAKE["PowerOfChoice"](data), _MAKE["ImportanceByNorm"](data)
    seen = power.observe(samplers.Observation(np.array([0]), {"loss": np.ones(1)}))
    clusters = samplers.ClusteredSampling(data, clients=3, seed=0)
    uniform = make_algorithm(weighting="uniform")
    for error, algorithm, sampler in (
        ("update_norms=True", make_algorithm(), norms),
        ("as it is before the first round", steered, seen),
        ("weighting='uniform' for ClusteredSampling, got weighting='examples'", steered, clusters),
        ("set staleness=fedsim.Staleness", uniform, clusters),
    ):
        with pytest.raises(ValueError, match=error):
            run(algorithm, sampler, rounds=2, progress=False)
    histogram = fedsim.algorithms.Histogram(bins=2, batches=fedsim.Batches(size=4))
    values = fedsim.FederatedData.from_arrays({"x": np.zeros(12, np.float32)}, sizes=[1] * 12)
    with pytest.raises(ValueError, match="Expected 'loss', which steers the sampler"):
        run(histogram, samplers.Oort(values, clients=3, seed=0), rounds=2, progress=False)


@pytest.mark.slow
def test_from_the_command_line_a_run_continues_and_a_sweep_equals_its_runs(tmp_path):
    options = ["--model", "digits_logistic", "--clients", "3", "--execution", "jit", "--no-progress", "--evaluate-every", "5"]
    options += ["--sampler", "power_of_choice(candidates=9)"]
    main(["run", *options, "--rounds", "2", "--folder", str(tmp_path / "r")])
    main(["resume", str(tmp_path / "r"), "--rounds", "4", "--no-progress"])
    main(["run", *options, "--rounds", "4", "--seeds", "2", "--folder", str(tmp_path / "s")])
    one, of_sweep = (load(tmp_path / name) for name in ("r", "s/seed=0"))
    assert _untimed(one.history)[3]["observed"]["clients"] == of_sweep.history[3]["observed"]["clients"]
    assert one.sampler.cohort(4).clients.tolist() == of_sweep.sampler.cohort(4).clients.tolist()
    assert bisect(tmp_path / "r", tmp_path / "s/seed=0").client is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["vmap", "devices"])
def test_members_of_a_sweep_that_run_side_by_side_have_cohorts_of_their_own(how, tmp_path):
    """They share a sampler, and their losses differ; each equals a run of its own, up to the order of sums."""
    options = ["--model", "digits_logistic", "--clients", "3", "--rounds", "5", "--no-progress", "--evaluate-every", "5"]
    options += ["--sampler", "power_of_choice(candidates=6)", "--devices", "2"]
    options += ["--step-seconds", "log_normal(sigma=1)"] if how == "devices" else []  # Otherwise members share a sampler.
    assert (
        main(["run", *options, "--client-learning-rate", "0.01,1", "--sweep-mode", how, "--folder", str(tmp_path / "s")]) == 0
    )
    observed = []
    for rate in ("0.01", "1.0"):
        assert main(["run", *options, "--client-learning-rate", rate, "--folder", str(tmp_path / rate)]) == 0
        lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in (rate, f"s/client_learning_rate={rate},seed=0")]
        clients = [[line["observed"]["clients"] for line in of if "observed" in line] for of in lines]
        assert clients[0] == clients[1] and len(clients[0]) == 5
        observed.append([line["observed"]["loss"] for line in lines[0] if "observed" in line])
    assert observed[0] != observed[1]
