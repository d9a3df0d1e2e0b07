"""The README is correct: its Python blocks run, its commands and options exist, and its links have targets."""

import contextlib
import itertools
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

import fedsim
from benchmarks import readme
from fedsim import commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for kind, text in fenced if kind == language]


@pytest.fixture(scope="module")
def namespace():
    jax.devices()  # starts JAX, so that use_all_cores in the quickstart does not change the devices of other tests
    return {"__name__": "readme"}


@pytest.mark.filterwarnings("ignore:JAX had already started")
def test_quickstart_runs_and_is_short(namespace, capsys):
    quickstart = blocks("python")[0]
    assert len(quickstart.strip().splitlines()) <= 15
    exec(quickstart, namespace)
    assert eval(capsys.readouterr().out)["accuracy"] >= 0.95


@pytest.mark.filterwarnings("ignore:JAX had already started")
def test_the_other_python_blocks_run(namespace, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for the plot of tuned rates
    code = [block.replace("digits_dense()", "digits_logistic()") for block in blocks("python")]  # which compiles faster
    if "data" not in namespace:  # the test of the quickstart did not run before this test
        exec(code[0].replace("rounds(100)", "rounds(1)"), namespace)
    for block in code[1:]:
        exec(block, namespace)
    data, batches = namespace["data"].train, fedsim.Batches(size=10)
    cohort = fedsim.Cohort.of(data, data.client_ids[:5])

    prox = namespace["FedProx"](
        model=fedsim.models.digits_logistic(), client_optimizer=namespace["optax"].sgd(0.1), batches=batches
    )
    state, _ = prox.apply(prox.init(jax.random.key(0)), cohort)
    assert int(state.round) == 1

    mean = namespace["MeanPixel"](batches=batches)
    all_clients = fedsim.Cohort.of(data, data.client_ids)
    state, _ = mean.apply(mean.init(jax.random.key(0)), all_clients)
    assert float(state) == pytest.approx(data.columns["x"].mean(), rel=1e-5)

    count = namespace["CountLabels"](batches=batches)
    state, info = count.apply(count.init(jax.random.key(0)), cohort)
    expected = sum(np.bincount(dataset["y"], minlength=10) for _, dataset, _ in cohort)
    np.testing.assert_array_equal(state, expected)
    assert int(info["examples"]) == expected.sum()


def test_commands_and_options_exist(capsys):
    """Every line that starts with ``fedsim`` has a command and options of the command line."""
    lines = [
        shlex.split(line, comments=True) for block in blocks("") for line in block.splitlines() if line.startswith("fedsim ")
    ]
    assert len(lines) >= 5
    for _, command, *arguments in lines:
        if command != "run":
            names = [word for word in arguments[:1] if command == "datasets"]
            with contextlib.suppress(SystemExit):
                assert commands.main([command, *names, "--help"]) == 0
            shown = capsys.readouterr().out
            for option in (word for word in arguments if word.startswith("--")):
                assert option in shown, shlex.join(arguments)
            continue
        given = dict(itertools.pairwise(arguments))
        if given.get("--dataset", "").endswith(".csv"):  # There is no such file.
            del given["--dataset"]
        choice = [word for name in ("--dataset", "--algorithm") if name in given for word in (name, given[name])]
        with pytest.raises(SystemExit) as exit_:
            commands.main(["run", *choice, "--help"])
        assert exit_.value.code == 0
        shown = capsys.readouterr().out
        for option in (word for word in arguments if word.startswith("--") and word != "--help"):
            assert option in shown, shlex.join(arguments)


def test_the_run_with_traces_and_faults_reads_the_files_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for language, file in (("csv", "phones.csv"), ("json", "faults.json")):
        (text,) = blocks(language)
        Path(file).write_text(text)
    (command,) = [line for block in blocks("") for line in block.splitlines() if "phones.csv" in line]
    assert commands.main([*shlex.split(command)[1:], "--rounds", "3", "--folder", "run"]) == 0
    assert "simulated" in capsys.readouterr().out


def test_links_and_paths_exist():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith(("http", "#"))]
    targets += re.findall(r"`((?:fedsim|examples|colab|docs|benchmarks)/[\w./]*)`", README)
    targets += re.findall(r"blob/main/(colab/\w+\.ipynb)", README)
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_module_is_in_the_table_of_paths():
    modules = {path.name for path in (ROOT / "fedsim").iterdir() if not path.name.startswith(("_", "py.typed"))}
    named = {Path(path).name for path in re.findall(r"`fedsim/([\w./]+)`", README)}
    assert modules - named == set()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)|`make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE)


@pytest.mark.parametrize(("page", "name"), readme.PAGES)
def test_measured_times_are_those_of_the_committed_results(page, name):
    """The section of the page equals the output of ``python -m benchmarks.readme``."""
    assert readme.section(page, name).group() == readme.PAGES[page, name]()
