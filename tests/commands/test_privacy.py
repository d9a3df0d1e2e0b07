"""Differential privacy on the command line: ε in the metrics and tables, more rounds, and options that are refused."""

import re
import shutil

import jax
import numpy as np
import pytest
from scipy.stats import binom

import fedsim
from fedsim.aggregators import DistributedMechanism
from fedsim.commands import main
from fedsim.privacy import EveryRound

OPTIONS = [
    *("--dataset", "digits(clients=30)", "--model", "digits_logistic", "--clients", "5", "--weighting", "uniform"),
    *("--dp-delta", "0.01", "--evaluate-every", "2"),
]


def run(folder, *options):
    own = [] if "--sampler" in options else ["--sampler", "poisson"]
    return main(["run", *OPTIONS, *own, *options, "--folder", str(folder), "--no-progress"])


@pytest.mark.slow
def test_a_resumed_run_neither_repeats_nor_skips_noise(tmp_path, capsys):
    """The norm of the clipping is in the checkpoint, and the noise of a round depends on the round."""
    noise = "--dp-noise", "1", "--dp-clip", "adaptive"
    assert run(tmp_path / "one", *noise, "--rounds", "6") == 0
    whole = capsys.readouterr().out
    assert run(tmp_path / "two", *noise, "--rounds", "3") == 0
    assert main(["resume", str(tmp_path / "two"), "--rounds", "6", "--no-progress"]) == 0
    one, two = (fedsim.experiment.load(tmp_path / name) for name in ("one", "two"))
    for x, y in zip(*map(jax.tree.leaves, (one.state, two.state)), strict=True):
        np.testing.assert_array_equal(x, y)
    guarantee = one.privacy
    expected = {2: guarantee.epsilon(2), 4: guarantee.epsilon(4), 6: guarantee.epsilon(6)}
    for run_of in (one, two):
        assert {line["round"]: line["epsilon"] for line in run_of.history if "epsilon" in line} == expected
    shown = f"ε = {expected[6]:.3g} with δ = 0.01 if a client is added or removed, with all of its examples."
    assert shown in whole
    capsys.readouterr()
    assert main(["privacy", str(tmp_path / "two"), "--out", str(tmp_path / "epsilon.png")]) == 0
    text = capsys.readouterr().out
    assert "after 6 of 6 rounds" in text and shown in text and (tmp_path / "epsilon.png").exists()
    assert "every client takes part in a round with probability 0.1667" in text
    assert "If it is known who took part: ε =" in text


@pytest.mark.slow
def test_the_noise_of_a_budget_is_that_of_the_number_of_rounds(tmp_path, capsys):
    assert main(["privacy", *OPTIONS, "--sampler", "poisson", "--rounds", "6", "--dp-epsilon", "8", "--dp-clip", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "ε = 8 with δ = 0.01" in text and re.search(r"ε( +[\d.]+){5} +(8.000|7.999)", text)
    assert run(tmp_path, "--rounds", "2", "--dp-epsilon", "8", "--dp-clip", "0.5") == 0
    assert main(["resume", str(tmp_path), "--rounds", "4", "--no-progress"]) == 2
    error = "dp_epsilon=8 is that of 2 rounds, so the 2 finished rounds had other noise than in a run of 4 rounds: start a new"
    assert error in capsys.readouterr().err


CORRELATED = ["--sampler", "cyclic", "--dp-noise", "3", "--dp-clip", "0.5", "--dp-mechanism"]


@pytest.mark.first(1)
@pytest.mark.parametrize("mechanism", ["tree", pytest.param("banded", marks=pytest.mark.slow)])
def test_correlated_noise_goes_on_after_a_break_but_not_for_other_rounds(mechanism, tmp_path, capsys, monkeypatch):
    """The memory of the matrix is in the checkpoint."""
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    options = *CORRELATED, mechanism, "--rounds", "4", "--checkpoint-every", "1"
    assert run(tmp_path / "one", *options) == 0
    whole = " ".join(capsys.readouterr().out.split())
    assert "if a client sends zeros, and so nothing of its examples, in all of its rounds." in whole
    assert run(tmp_path / "two", *options) == 0
    for newer in sorted((tmp_path / "two" / "checkpoints").iterdir())[-2:]:
        shutil.rmtree(newer) if newer.is_dir() else newer.unlink()
    assert main(["resume", str(tmp_path / "two"), "--no-progress"]) == 0
    one, two = (fedsim.experiment.load(tmp_path / name) for name in ("one", "two"))
    for x, y in zip(*map(jax.tree.leaves, (one.state, two.state)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert main(["resume", str(tmp_path / "two"), "--rounds", "6", "--no-progress"]) == 2
    error = f"dp_mechanism='{mechanism}' correlates the noise of 4 rounds, so the privacy of 6 rounds is not known: start a new"
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_noise_of_the_clients_is_accounted_for_and_goes_on_after_a_break(tmp_path, capsys):
    """The rotation of a round is in the checkpoint. Rounds of fewer than ``minimum`` clients, 1 of 100, reveal nothing."""
    noise = "--clients", "10", "--dp-noise", "1", "--dp-clip", "0.5", "--dp-mechanism", 'distributed(law="gaussian", bits=18)'
    assert run(tmp_path / "one", *noise, "--rounds", "4") == 0
    whole = " ".join(capsys.readouterr().out.split())
    assert run(tmp_path / "two", *noise, "--rounds", "2") == 0
    assert main(["resume", str(tmp_path / "two"), "--rounds", "4", "--no-progress"]) == 0
    one, two = (fedsim.experiment.load(tmp_path / name) for name in ("one", "two"))
    for x, y in zip(*map(jax.tree.leaves, (one.state, two.state)), strict=True):
        np.testing.assert_array_equal(x, y)
    minimum = next(k for k in range(31) if binom.cdf(k - 1, 30, 1 / 3) < 0.01 <= binom.cdf(k, 30, 1 / 3))
    mechanism = DistributedMechanism(1.0, clip=0.5, clients=10, minimum=minimum, bits=18, law="gaussian")
    expected = {
        rounds: fedsim.privacy.distributed_epsilon(mechanism, 650, fedsim.privacy.Poisson(1 / 3), rounds=rounds, delta=0.01)
        for rounds in (2, 4)
    }
    for run_of in (one, two):
        assert {line["round"]: line["epsilon"] for line in run_of.history if "epsilon" in line} == pytest.approx(expected)
    relation = "with δ = 0.01 if a client sends its noise alone, and so nothing of its examples, in all of its rounds."
    assert f"ε = {expected[4]:.3g} {relation}" in whole
    assert f"all clients add their part of it, and nobody sees a sum of fewer than {minimum} clients." in whole
    capsys.readouterr()
    assert main(["privacy", str(tmp_path / "two")]) == 0
    text = capsys.readouterr().out
    part = np.sum([np.isin(range(30), one.sampler.cohort(round).clients) for round in range(4)], axis=0)
    seen = fedsim.privacy.distributed_epsilon(mechanism, 650, EveryRound(), rounds=part.max(), delta=0.01)
    assert f"ε = {expected[4]:.3g} {relation[:20]}" in text
    assert f"If it is known who took part: ε = {seen:.3g} for the client whose rounds reveal most (it has {part.max()})" in text


@pytest.mark.slow
def test_mechanisms_may_vary_in_a_sweep(tmp_path):
    """Correlated noise has the ε of two rounds of a client, who takes part once, by the sensitivity of the tree."""
    options = "--sampler", "cyclic", "--dp-noise", "3", "--dp-clip", "0.5", "--dp-mechanism", "independent,efficient_tree"
    assert run(tmp_path, *options, "--rounds", "2") == 0
    found = {name: fedsim.experiment.load(tmp_path / f"dp_mechanism={name},seed=0") for name in options[-1].split(",")}
    once = fedsim.privacy.Epochs(6, separation=6)
    for name, norm in (("independent", 1.0), ("efficient_tree", 1.8**0.5)):
        expected = fedsim.privacy.epsilon(3.0 / norm, once, rounds=2, delta=0.01)
        assert found[name].history[-1]["epsilon"] == pytest.approx(expected, rel=1e-3)


NOISE = ["--dp-noise", "1", "--dp-delta", "0.01", "--dp-clip", "0.5"]
UNIFORM = [*NOISE, "--weighting", "uniform"]
DISTRIBUTED = [*UNIFORM, "--sampler", "poisson", "--dp-mechanism", "distributed"]


@pytest.mark.first(30)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--dp-noise", "1"],
            "Expected dp_epsilon or dp_noise, with dp_delta and dp_clip, got dp_noise=1.0: give, for",
        ),
        (["--dp-delta", "0.1"], "Expected dp_epsilon or dp_noise, with dp_delta and dp_clip, got dp_delta=0.1"),
        ([*NOISE, "--dp-epsilon", "1"], "Expected dp_epsilon or dp_noise, with dp_delta and dp_clip, got dp_epsilon=1.0, dp_n"),
        (
            [*NOISE, "--dp-clip", "0"],
            "Expected dp_clip > 0 and finite, got dp_clip=0.0: give a norm such as 0.5, or",
        ),
        ([*NOISE, "--dp-clip", "often"], "Expected dp_clip > 0 and finite, got dp_clip='often': give a norm"),
        (
            [*NOISE, "--aggregator", "krum(attackers=1)"],
            "Expected no aggregator with differential privacy, got aggr",
        ),
        (
            [*NOISE, "--stop-when", "spent(megabytes=1)"],
            "Expected no stop_when with differential privacy, got stop_when=",
        ),
        (NOISE, "Expected weighting='uniform' with GaussianMechanism, got weighting='examples' in FedAvg"),
        (
            [*UNIFORM, "--dp-delta", "0.2"],
            "Expected 0 < delta <= 0.1, got delta=0.2: with a larger one",
        ),
        (
            [*UNIFORM, "--dp-mechanism", "tree"],
            "Expected clients whose rounds have a minimum distance, got a participation in which 5 of 10 clients take part",
        ),
        (
            [*UNIFORM, "--dp-mechanism", "tree", "--sampler", "cyclic", "--dp-clip", "adaptive"],
            "Expected dp_epsilon or dp_noise, with dp_delta and a number for dp_clip, with dp_mechanism='tree', got dp_noise=1",
        ),
        ([*DISTRIBUTED, "--sampler", "uniform"], "Expected Poisson sampling or all clients in every round for DistributedMech"),
        (
            [*DISTRIBUTED, "--dp-clip", "adaptive"],
            "Expected dp_epsilon or dp_noise, with dp_delta and a number for dp_clip, with dp_mechanism='distributed', got",
        ),
        ([*DISTRIBUTED, "--compressor", "eden"], "Expected an aggregator other than DistributedMechanism inside Compressed"),
        ([*DISTRIBUTED, "--step-seconds", "1"], "Expected a PoissonSampler or a UniformSampler, got Sched"),
        ([*DISTRIBUTED, "--algorithm", "mime"], "Expected one update of a client in a round with DistributedMechanism, got 2"),
        ([*DISTRIBUTED, "--clients", "1"], "Expected clients >= 2, got clients=1"),
        ([*DISTRIBUTED, "--weighting", "examples"], "Expected weighting='uniform' with DistributedMechanism, got"),
        (
            [*UNIFORM, "--sampler", "poisson", "--dp-mechanism", "distributed(clients=3)"],
            "The dp_mechanism 'distributed' has no option 'clients'. Its options are: minimum, bits, law",
        ),
        (
            [*UNIFORM, "--sampler", "poisson", "--compressor", "top_k(fraction=0.1)", "--error-feedback"],
            "Expected clients to send nothing that depends on what they keep between rounds where every client takes part in",
        ),
        ([*UNIFORM, "--dp-mechanism", "tree(rounds=3)"], "Expected no options of the mechanism tree, got dp_mechanism='tree("),
        ([*UNIFORM, "--dp-mechanism", "bandet"], "There is no dp_mechanism 'bandet'. Did you mean 'banded"),
        (["--dp-mechanism", "tree"], "Expected dp_epsilon or dp_noise, with dp_delta and a number for dp_clip, with dp_mecha"),
        (
            [*UNIFORM, "--stragglers", "0.5"],
            "Expected a PoissonSampler or a UniformSampler, got Stragg",
        ),
        (
            [*UNIFORM, "--step-seconds", "1"],
            "Expected a PoissonSampler or a UniformSampler, got Sched",
        ),
        (
            [*UNIFORM, "--algorithm", "scaffold"],
            "Expected the server of SCAFFOLD to learn of clients thr",
        ),
        (
            [*NOISE, "--algorithm", "dpsgd"],
            "DPSGD aggregates updates in its own way and takes no dp_noise. Leave them out.",
        ),
        (
            ["--algorithm", "dpsgd", "--sampler", "poisson"],
            "DPSGD has no server that chooses clients, so it takes no sampler",
        ),
    ],
)
def test_options_that_are_refused(options, message, tmp_path, capsys):
    data = ["--dataset", "digits(clients=10)", "--model", "digits_logistic", "--rounds", "2", "--clients", "5"]
    assert main(["run", *data, *options, "--folder", str(tmp_path), "--no-progress"]) == 2
    assert f"fedsim: error: {message}" in capsys.readouterr().err
