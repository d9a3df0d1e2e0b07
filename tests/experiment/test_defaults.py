"""Every registered class learns the embedded digits with its defaults, or its error names the arguments that it needs."""

import json

import pytest

import fedsim
from fedsim import commands

# Arguments without a sensible default, the error message that names each, and a value with which training works.
NEEDS = {
    ("algorithm", "agnosticfedavg"): ("--num-domains", None),
    ("algorithm", "fedbn"): ("norm='*[Nn]orm*'", None),
    ("algorithm", "kmeans"): ("--num-features", None),
    ("algorithm", "gaussianmixture"): ("--num-features", None),
    ("algorithm", "pca"): ("--num-features", None),
    ("algorithm", "heavyhitters"): ("--num-items", None),
    ("algorithm", "feddf"): ("FedDF needs server_examples, which no option gives", None),
    ("aggregator", "krum"): ("krum(attackers=...)", "krum(attackers=2, selected=10)"),
    ("aggregator", "bulyan"): ("bulyan(attackers=...)", "bulyan(attackers=2)"),
    ("aggregator", "divide_and_conquer"): ("divide_and_conquer(attackers=...)", "divide_and_conquer(attackers=2)"),
    ("aggregator", "partly_uniform"): ("partly_uniform(names=...)", "partly_uniform(names='linear_1/*')"),
    ("aggregator", "secure_mean"): ("secure_mean(max_weight=...)", "secure_mean(max_weight=100)"),
    ("aggregator", "sum"): ("--weighting uniform --server-learning-rate 0.05", None),
}
# In a round of adpsgd ten of the hundred nodes train. The others spread models slowly: along a tree, or compressed.
ROUNDS = {"adpsgd": "600", "relaysgd": "120", "chocosgd": "120"}
STATISTICS = {"histogram", "quantiles"}  # These have no model and therefore no accuracy.
EVERYTHING = [
    *(("algorithm", name) for name in fedsim.algorithms.ALGORITHMS if name not in STATISTICS),
    *(("algorithm", name) for name in fedsim.decentralized.ALGORITHMS),
    *(("aggregator", name) for name in fedsim.aggregators.AGGREGATORS),
    *(("compressor", name) for name in fedsim.compressors.COMPRESSORS),
]


def accuracy(folder, *options):
    """Returns the test accuracy at the end, of the personal models if the algorithm has no global model."""
    rounds = ROUNDS.get(options[-1], "60")
    given = ["--rounds", rounds, "--evaluate-every", rounds, "--folder", str(folder), "--no-progress"]
    assert commands.main(["run", *options, *given]) == 0
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return last["test_accuracy"] if "test_accuracy" in last else last["test_personal_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [each for each in EVERYTHING if each not in NEEDS])
def test_training_on_the_digits_works_with_the_defaults(kind, name, tmp_path):
    assert accuracy(tmp_path / "run", f"--{kind}", name) > 0.85


@pytest.mark.parametrize(("kind", "name"), NEEDS)
def test_the_error_names_the_missing_argument(kind, name, tmp_path, capsys):
    try:
        code = commands.main(["run", f"--{kind}", name, "--folder", str(tmp_path / "run")])
    except SystemExit as end:
        code = end.code
    assert code == 2
    text = "".join(capsys.readouterr())
    assert NEEDS[kind, name][0] in " ".join(text.replace("│", " ").split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--aggregator", value] for _, value in NEEDS.values() if value]
    + [["--aggregator", "sum", "--weighting", "uniform", "--server-learning-rate", "0.05"]],
    ids=str,
)
def test_training_works_with_the_named_argument(options, tmp_path):
    assert accuracy(tmp_path / "run", *options) > 0.85
