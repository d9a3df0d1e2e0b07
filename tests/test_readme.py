"""The README is correct: its Python block runs, the commands and options of all pages exist, and its links have targets."""

import itertools
import json
import re
import shlex
from pathlib import Path

import jax
import pytest

from benchmarks import readme
from fedsim import aggregators, algorithms, attacks, commands, compressors, decentralized, vertical
from fedsim.commands._configuration import configured
from fedsim.configuration import build

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


# The pages of which every line that starts with `fedsim` is checked.
WITH_COMMANDS = ["README", "command_line", "compression_and_attacks", "sweeps", "systems", "decentralized"]


def text_of(page):
    return README if page == "README" else (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def blocks(language, page="README"):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    return [text for kind, text in fenced if kind == language]


# Commands that are cut short, or need a file or another machine.
NOT_HERE = re.compile(
    r"\.\.\.|…|\b[A-Z]{2,}\b|--help|--from|--init-from|--deliveries|--coordinator-address|--distributed|\.csv|\.py|\.json"
)


def run_commands():
    """Returns the arguments of every ``fedsim run`` in the blocks and sentences of the pages and of the notebooks' texts."""
    texts = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
    for page in ROOT.glob("colab/*.ipynb"):
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        texts[page.name] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    found = {}
    for page, text in texts.items():
        text = text.replace("\\\n", " ")
        lines = re.findall(r"^(?:\$ |srun )?fedsim run (.*)$", text, re.MULTILINE)
        for line in lines + re.findall(r"`fedsim run ([^`]+)`", text):
            if not NOT_HERE.search(line):
                found[line.partition(" #")[0].strip()] = page
    return [pytest.param(line, id=f"{page}: {line}") for line, page in found.items()]


@pytest.mark.slow
@pytest.mark.parametrize("line", run_commands())
def test_runs_that_a_page_names_can_be_built(line, capsys):
    chosen = configured(shlex.split(line), "fedsim run", "", {})
    if re.fullmatch(r"digits(\(.*\))?", chosen.config.dataset) and not chosen.config.data:
        assert build(chosen.config, chosen.settings).algorithm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:JAX had already started")
def test_quickstart_runs_and_is_short(capsys):
    jax.devices()  # starts JAX, so that use_all_cores in the quickstart does not change the devices of other tests
    (quickstart,) = blocks("python")
    assert len(quickstart.strip().splitlines()) <= 15
    exec(quickstart, {"__name__": "readme"})
    assert eval(capsys.readouterr().out)["accuracy"] >= 0.95


def test_readme_is_at_most_150_lines():
    assert len(README.splitlines()) <= 150


@pytest.mark.first(1)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_and_options_exist(page, capsys):
    """Every line that starts with ``fedsim`` has a command and options of the command line."""
    lines = [
        shlex.split(line, comments=True)
        for block in blocks("", page)
        for line in block.splitlines()
        if line.startswith("fedsim ")
    ]
    assert lines
    for _, command, *arguments in lines:
        if command != "run":
            names = [word for word in arguments[:1] if command == "datasets"]
            try:
                code = commands.main([command, *names, "--help", *(["all"] if command in ("plan", "deploy") else [])])
            except SystemExit as end:
                code = end.code
            assert code == 0, shlex.join(arguments)
            assert_shows(capsys.readouterr().out, arguments)
            continue
        given = dict(itertools.pairwise(arguments))
        if given.get("--dataset", "").endswith(".csv"):  # There is no such file.
            del given["--dataset"]
        choice = [word for name in ("--dataset", "--algorithm") if name in given for word in (name, given[name])]
        with pytest.raises(SystemExit) as exit_:
            commands.main(["run", *choice, "--help", "all"])
        assert exit_.value.code == 0
        assert_shows(capsys.readouterr().out, arguments)


def assert_shows(help_text, arguments):
    """Fails if the help lacks an option, also if it has a longer one that begins with it."""
    for option in (word.partition("=")[0] for word in arguments if word.startswith("--") and word != "--help"):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", help_text), shlex.join(arguments)


@pytest.mark.slow
def test_the_run_with_traces_and_faults_reads_the_files_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for language, file in (("csv", "phones.csv"), ("json", "faults.json")):
        (text,) = blocks(language, "systems")
        Path(file).write_text(text)
    (command,) = [line for block in blocks("", "systems") for line in block.splitlines() if "phones.csv" in line]
    assert commands.main([*shlex.split(command)[1:], "--rounds", "3", "--folder", "run"]) == 0
    assert "simulated" in capsys.readouterr().out


def test_links_and_paths_exist():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith(("http", "#"))]
    targets += re.findall(r"`((?:fedsim|examples|colab|docs|benchmarks)/[\w./]*)`", README)
    targets += re.findall(r"blob/v[\d.]+/(colab/\w+\.ipynb)", README)
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_module_is_in_the_table_of_paths():
    modules = {path.name for path in (ROOT / "fedsim").iterdir() if not path.name.startswith(("_", "py.typed"))}
    named = {Path(path).name for path in re.findall(r"`fedsim/([\w./]+)`", text_of("architecture"))}
    assert modules - named == set()


def test_the_numbers_of_what_there_is_are_those_of_the_registries():
    registered = {
        "algorithms with a server": algorithms.ALGORITHMS,
        "compressors": compressors.COMPRESSORS,
        "aggregators": aggregators.AGGREGATORS,
        "attacks": attacks.ATTACKS,
        "algorithms without a server": decentralized.ALGORITHMS,
        "vertical algorithms": vertical.ALGORITHMS,
    }
    found = {words: re.search(rf"(\d+) {words}", README)[1] for words in registered}
    assert found == {words: str(len(names)) for words, names in registered.items()}


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)|`make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE)


@pytest.mark.parametrize(("page", "name"), readme.PAGES)
def test_measured_times_are_those_of_the_committed_results(page, name):
    """The section of the page equals the output of ``python -m benchmarks.readme``."""
    assert readme.section(page, name).group() == readme.PAGES[page, name]()
