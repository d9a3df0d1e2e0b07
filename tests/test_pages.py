"""The Python blocks of pages in docs/ run and print what their comments say; the names in their tables exist and are used."""

import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path

import jax
import pytest

import fedsim

ROOT = Path(__file__).parents[1]
PAGES = ["primitives", "migration", "systems", "decentralized", "vertical", "few_labels", "models", "privacy"]
# Pages with so many blocks.
SHORT = {
    "comparison": 1, "deployment": 0, "four_ways": 1, "hooks": 4, "quickstart": 3, "runs_in_python": 4, "scale": 5,
    "partitions": 1, "compression_and_attacks": 1, "sweeps": 1, "own_algorithm": 3, "tuning": 1, "migration_frameworks": 1,
    "evaluation": 5,
}  # fmt: skip


def page(name):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    return text, re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_blocks(blocks, capsys):
    namespace = {"__name__": "page"}
    for block in blocks:
        capsys.readouterr()
        with jax.numpy_dtype_promotion("standard"):  # which readers have, and optax.adam requires
            exec(block, namespace)
        comments = re.findall(r"^ *print\(.*\)  # (.+)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == comments, block
        assert len(comments) == block.count("print("), block


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_print_what_their_comments_say(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    _, blocks = page(name)
    assert len(blocks) >= 5
    run_blocks(blocks, capsys)
    drawn = {picture.name for picture in tmp_path.glob("*.png")}
    assert drawn == {picture.name for picture in (ROOT / "docs" / name).glob("*.png")}


@pytest.mark.first(3)
@pytest.mark.filterwarnings("ignore:JAX had already started")
@pytest.mark.parametrize(("name", "count"), SHORT.items())
def test_the_blocks_of_a_short_page_print_what_their_comments_say(name, count, capsys):
    jax.devices()  # starts JAX, so that use_all_cores on a page does not change the devices of other tests
    _, blocks = page(name)
    assert len(blocks) == count
    run_blocks(blocks, capsys)


# What differs between machines: the devices, their memory, and times.
VARIES = r"\d+ CPU devices|[\d.]+ \wB (?:per device|free)|[\d.]+ m?s\b|(?<=0\.4857) +[\d.]+$"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), {"comparison": 1, "plans": 1, "systems": 2}.items())
def test_commands_of_a_page_print_what_it_shows(name, count, tmp_path):
    """In a block, a line ``$ COMMAND`` is followed by what the command prints, if anything is shown of it."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}  # the options of users
    compared = 0
    for block in re.findall(r"^```\n(\$ .*?)^```$", page(name)[0], re.MULTILINE | re.DOTALL):
        for command, shown in re.findall(r"^\$ (.*)\n((?:[^$\n].*\n|\n)*)", block, re.MULTILINE):
            run = subprocess.run(
                [sys.executable, "-m", *shlex.split(command)],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                encoding="utf-8",
            )
            assert run.returncode == 0, run.stderr
            if shown:
                expected, printed = (re.sub(VARIES, "N", text, flags=re.MULTILINE) for text in (shown, run.stdout))
                assert OutputChecker().check_output(expected, printed, ELLIPSIS | NORMALIZE_WHITESPACE), run.stdout
                compared += 1
    assert compared == count


def counterparts(name="migration"):
    """Returns the names of fedsim in the second columns of the tables of a page on migration."""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|$", page(name)[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"fedsim(?:\.\w+)+", row)}


def test_every_counterpart_of_the_frameworks_exists():
    names = counterparts("migration_frameworks")
    assert len(names) > 30
    for name in names:
        functools.reduce(getattr, name.split(".")[1:], fedsim)


def test_every_counterpart_exists_and_is_used_in_a_block():
    names = counterparts()
    assert len(names) > 60
    code = "\n".join(page("migration")[1])
    for name in sorted(names):
        value = fedsim
        for part in name.split(".")[1:]:
            value = getattr(value, part)
        assert re.search(rf"\b{name.split('.')[-1]}\b", code), f"{name} is not used in any block"


def test_every_function_of_primitives_is_on_its_page():
    text, _ = page("primitives")
    public = [name for name in vars(fedsim.primitives) if not name.startswith("_")]
    assert [name for name in public if f"`{name}" not in text] == []


def test_the_page_on_primitives_lists_what_is_not_differentiable():
    table = page("primitives")[0].split("| part | reason |")[1].split("\n\n")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`([A-Z]\w+)`", row)}
    modules = fedsim.aggregators, fedsim.compressors, fedsim.algorithms
    bases = fedsim.aggregators.Aggregator, fedsim.compressors.Compressor, fedsim.Algorithm
    classes = {cls for module in modules for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, bases)}
    inherited = [base.not_differentiable for base in bases]
    assert listed == {cls.__name__ for cls in classes if cls.not_differentiable not in inherited}


def bare(name):
    """Returns the letters of the name of an algorithm, which a page may write as q-FedAvg and the code as QFedAvg."""
    return re.sub(r"[^a-z\d]", "", name.lower())


def with_a_model(algorithms):
    return {bare(name): cls for name, cls in algorithms.items() if "model" in {field.name for field in dataclasses.fields(cls)}}


def test_the_page_on_models_lists_which_algorithms_refuse_which_parts():
    parts = {
        "all parts": {"frozen", "kept", "statistics", "own_statistics"},
        "`kept`": {"kept"},
        "statistics that change": {"statistics", "own_statistics"},
        '`statistics="average"`': {"statistics"},
        '`statistics="client"`': {"own_statistics"},
    }
    text = page("models")[0].split("| algorithm | refuses | because |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.splitlines()[2:]]
    listed = {}
    for names, refused in rows:
        for name in names.split(", "):
            listed.setdefault(bare(name), set()).update(*(parts[part] for part in refused.split(", ")))
    without_server = listed.pop(bare("algorithms without a server"))
    del listed[bare("FixMatch with `server_examples`")]  # FixMatch without them refuses nothing.
    algorithms = with_a_model(fedsim.algorithms.ALGORITHMS)
    refusing = {name: set(cls.capabilities.refused_parts) for name, cls in algorithms.items()}
    for name, cls in with_a_model(fedsim.decentralized.ALGORITHMS).items():
        refusing[name] = set(cls.capabilities.refused_parts) - without_server
        assert without_server <= set(cls.capabilities.refused_parts)
    assert listed == {name: refused for name, refused in refusing.items() if refused}
    for name, cls in algorithms.items():
        assert cls.capabilities.model_parts or refusing[name] >= parts["`kept`"] | parts["statistics that change"]


def test_pages_list_which_algorithms_refuse_scaled_updates_and_microbatches():
    algorithms = with_a_model(fedsim.algorithms.ALGORITHMS)

    def listed(name, begin, end):
        text = " ".join(page(name)[0].split(begin)[1].split(end)[0].split())
        return {bare(word) for word in re.split(r", | and ", text)} & algorithms.keys()

    several_calls = {"mime", "scaffnew"}
    fixed = {name for name, cls in algorithms.items() if not cls.capabilities.scalable} - several_calls
    assert listed("systems", "multiply an update by its staleness weight. ", " use an update in other ways") == fixed
    whole = {name for name, cls in algorithms.items() if not cls.capabilities.microbatches}
    assert listed("scale", "compute gradients in their own way (", ") refuse it") == whole
