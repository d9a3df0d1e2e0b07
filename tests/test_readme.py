"""The README does what it says: its Python runs, top to bottom, and what it points at exists."""

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
from fedsim import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for kind, text in fenced if kind == language]


@pytest.fixture(scope="module")
def namespace():
    jax.devices()  # JAX has started, so that the quickstart's use_all_cores does not change the devices of other tests
    return {"__name__": "readme"}


@pytest.mark.filterwarnings("ignore:JAX had already started")
def test_quickstart_runs_and_is_short(namespace, capsys):
    quickstart = blocks("python")[0]
    assert len(quickstart.strip().splitlines()) <= 15
    exec(quickstart, namespace)
    assert eval(capsys.readouterr().out)["accuracy"] >= 0.95


@pytest.mark.filterwarnings("ignore:JAX had already started")
def test_algorithms_of_one_s_own_run(namespace):
    code = blocks("python")
    if "data" not in namespace:  # this test alone
        exec(code[0].replace("rounds(100)", "rounds(1)"), namespace)
    for block in code[1:]:
        exec(block, namespace)
    data, batches = namespace["data"].train, fedsim.Batches(size=10)
    cohort = fedsim.Cohort.of(data, data.client_ids[:5])

    prox = namespace["FedProx"](
        model=fedsim.models.digits_dense(), client_optimizer=namespace["optax"].sgd(0.1), batches=batches
    )
    state, _ = prox.apply(prox.init(jax.random.key(0)), cohort)
    assert int(state.round) == 1

    mean = namespace["MeanPixel"](batches=batches)
    everyone = fedsim.Cohort.of(data, data.client_ids)
    state, _ = mean.apply(mean.init(jax.random.key(0)), everyone)
    assert float(state) == pytest.approx(data.columns["x"].mean(), rel=1e-5)

    count = namespace["CountLabels"](batches=batches)
    state, info = count.apply(count.init(jax.random.key(0)), cohort)
    expected = sum(np.bincount(dataset["y"], minlength=10) for _, dataset, _ in cohort)
    np.testing.assert_array_equal(state, expected)
    assert int(info["examples"]) == expected.sum()


def test_commands_are_the_cli_s(capsys):
    """Every `fedsim ...` line has a known command and options that exist."""
    lines = [
        shlex.split(line, comments=True) for block in blocks("") for line in block.splitlines() if line.startswith("fedsim ")
    ]
    assert len(lines) >= 5
    for _, command, *arguments in lines:
        if command != "run":
            names = [word for word in arguments[:1] if command == "datasets"]
            with contextlib.suppress(SystemExit):
                assert cli.main([command, *names, "--help"]) == 0
            shown = capsys.readouterr().out
            for option in (word for word in arguments if word.startswith("--")):
                assert option in shown, shlex.join(arguments)
            continue
        known = dict(itertools.pairwise(arguments))
        choice = [word for name in ("--dataset", "--algorithm") if name in known for word in (name, known[name])]
        with pytest.raises(SystemExit) as done:
            cli.main(["run", *choice, "--help"])
        assert done.value.code == 0
        shown = capsys.readouterr().out
        for option in (word for word in arguments if word.startswith("--") and word != "--help"):
            assert option in shown, shlex.join(arguments)


def test_links_and_paths_exist():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith(("http", "#"))]
    targets += re.findall(r"`((?:fedsim|examples|colab|docs|benchmarks)/[\w./]*)`", README)
    targets += re.findall(r"blob/main/(colab/\w+\.ipynb)", README)
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_map_names_every_room():
    rooms = {path.name for path in (ROOT / "fedsim").iterdir() if not path.name.startswith(("_", "py.typed"))}
    named = {Path(room).name for room in re.findall(r"`fedsim/([\w./]+)`", README)}
    assert rooms - named == set()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)|`make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE)


def test_speeds_are_those_of_the_committed_results():
    """No number in the table is typed by hand: `python -m benchmarks.readme` writes it."""
    assert f"<!-- speeds -->\n{readme.block()}<!-- /speeds -->" in README
