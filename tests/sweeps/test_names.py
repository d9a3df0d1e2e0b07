"""Sweeps over names: algorithms, datasets and optimizers, whose members are the runs that one would start alone."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from fedsim.commands import main
from fedsim.commands._configuration import configured
from fedsim.configuration import RunConfig, Settings, build
from fedsim.experiment import read_sweep
from fedsim.sweeps import Range
from fedsim.sweeps._sweep import members_of

SMALL = ["--model", "digits_logistic", "--rounds", "2", "--clients", "2", "--no-progress"]


def chosen(*arguments):
    return configured(list(arguments), "fedsim run", "", {})


def test_members_have_the_configurations_of_separate_runs():
    datasets = ["digits(partition='dirichlet', alpha=0.1)", "emnist62"]
    both = chosen(
        "--dataset", datasets[0], "--dataset", datasets[1], "--algorithm=fedprox,fedavg", "--mu", "0.5", "--batch-size", "5,10"
    )
    members = members_of("s", both.config, both.varied, [0], both.differing)
    assert len(members) == 8 and len({member.folder for member, _ in members}) == 8
    for member, own in members:
        options = ["--dataset", member.setting["dataset"], "--algorithm", member.setting["algorithm"]]
        options += ["--mu", "0.5"] if member.setting["algorithm"] == "fedprox" else []
        assert own == chosen(*options, "--batch-size", str(member.setting["batch_size"])).config
    # Defaults are those of each dataset and algorithm.
    assert {own.rounds for _, own in members} == {1500, 100}
    assert {own.hyperparameters.get("mu") for _, own in members} == {0.5, None}


@pytest.mark.slow
def test_a_sweep_over_names_runs_and_is_resumed(tmp_path, capsys):
    names = ["--algorithm", "fedavg,fedprox", "--client-optimizer", "sgd(momentum=0.9)", "--client-optimizer", "rmsprop"]
    assert main(["run", *SMALL, *names, "--folder", str(tmp_path / "s")]) == 0
    table = capsys.readouterr().out
    assert all(f"{algorithm}   " in table for algorithm in ("fedavg", "fedprox")) and table.count("sgd(momentum=0.9)") >= 2
    assert main(["resume", str(tmp_path / "s"), "--rounds", "3", "--no-progress"]) == 0
    assert "4 runs of 3 rounds" in capsys.readouterr().out
    assert read_sweep(tmp_path / "s")["varied"]["client_optimizer"] == ["sgd(momentum=0.9)", "rmsprop"]


def test_a_random_search_draws_from_ranges_and_from_the_given_values():
    options = [
        "--client-learning-rate",
        "log_uniform(0.001, 1)",
        "--batch-size",
        "uniform(5, 8)",
        "--algorithm",
        "fedavg,fedprox",
    ]
    many = chosen(*options, "--samples", "200").varied
    assert many[:20] == chosen(*options, "--samples", "20").varied != chosen(*options, "--samples", "20", "--seed", "1").varied
    rates = np.log10([setting["client_learning_rate"] for setting in many])
    assert rates.min() >= -3 and rates.max() < 0 and abs(rates.mean() + 1.5) < 4 * np.sqrt(9 / 12 / 200)
    assert {setting["batch_size"] for setting in many} == {5, 6, 7, 8}
    sizes = [setting["batch_size"] for setting in chosen("--batch-size", "log_uniform(1, 3)", "--samples", "3").varied]
    assert sorted(sizes) == [1, 2, 3]
    assert abs(sum(setting["algorithm"] == "fedavg" for setting in many) - 100) < 4 * np.sqrt(50)


def test_values_of_a_range_are_in_it_and_whole_ones_are_drawn_alike():
    drawn = [Range(-3, 3, whole=True).value(at / 700) for at in range(700)]
    assert [drawn.count(value) for value in range(-3, 4)] == [100] * 7
    narrow = Range(0.99991, 0.99999)
    assert all(narrow.low <= narrow.value(share) <= narrow.high for share in (0.0, 0.3, 0.999))
    for bounds in ((4.5, 8), (4, 8.5)):
        with pytest.raises(ValueError, match="Expected whole numbers, got low=4"):
            Range(*bounds, whole=True)
    assert Range(4.5, 8).value(0.0) == 4.5


@pytest.mark.slow
def test_a_random_search_runs_and_is_resumed(tmp_path, capsys):
    search = ["--client-learning-rate", "log_uniform(0.01, 1)", "--algorithm", "fedavg,fedprox", "--samples", "3"]
    assert main(["run", *SMALL, *search, "--seeds", "2", "--folder", str(tmp_path / "s")]) == 0
    table = capsys.readouterr().out
    assert "6 runs of 2 rounds" in table and "edge" not in table
    assert main(["resume", str(tmp_path / "s"), "--rounds", "3", "--no-progress"]) == 0
    assert "6 runs of 3 rounds" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "s")]) == 0


def test_several_samplers_are_a_sweep():
    varied = chosen("--sampler", "uniform,poisson", "--sampler", "power_of_choice(candidates=30)").varied
    assert varied == {"sampler": ["uniform", "poisson", "power_of_choice(candidates=30)"]}


def test_optimizers_are_those_of_optax():
    made = build(RunConfig(client_optimizer="rmsprop(decay=0.8)", client_learning_rate=0.01), Settings()).algorithm
    params = made.model.init(jax.random.key(0))
    both = made.client_optimizer, optax.rmsprop(0.01, decay=0.8)
    ours, theirs = (jax.tree.leaves(each.update(params, each.init(params), params)[0]) for each in both)
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algorithm", "fedavg,fedavg"], "Expected different values of --algorithm"),
        (["--algorithm", "fedavg,fedporx"], "Did you mean 'fedprox'"),
        (["--algorithm", "fedavg,fedprox", "--mu", "0.1,1"], "options that all algorithms have"),
        (["--client-learning-rate", "log_uniform(0.1, 1)"], "Expected --samples with a range of --client-learning-rate"),
        (["--client-learning-rate", "log_uniform(0, 1)", "--samples", "2"], "Expected 0 < low < high"),
        (["--samples", "2"], "Expected options with several values or a range"),
        (["--batch-size", "5,10", "--samples", "3"], "of which only 2 differ"),
    ],
)
def test_what_cannot_be_right_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        chosen(*arguments)


@pytest.mark.parametrize(
    ("text", "momentum", "message"),
    [
        ("adamm", 0.0, "Did you mean 'adam'"),
        ("adam(weight_decay=1.0)", 0.0, "has no option 'weight_decay'"),
        ("adam(learning_rate=0.1)", 0.0, "give client_learning_rate"),
        ("adam", 0.9, "Expected client_optimizer or client_momentum"),
    ],
)
def test_optimizers_that_cannot_be_made_are_refused(text, momentum, message):
    with pytest.raises(ValueError, match=message):
        build(dataclasses.replace(RunConfig(), client_optimizer=text, client_momentum=momentum), Settings())
