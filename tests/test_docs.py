"""The pages of docs/ are what their scripts write, and every mention of the repository has its address."""

import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedsim
from fedsim import aggregators, attacks, compressors, datasets
from fedsim.experiment.reproductions import REPRODUCTIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = DOCS / "datasets.md"

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
OTHER_REPOSITORIES = {"https://github.com/google/farmhash"}  # cited as a source


def repositories(text):
    """Returns the address of every Git repository that a text mentions.

    Recognized are pages of public hosts, Colab's and raw addresses of GitHub files, ``git clone`` and ``git+``.
    """
    text = re.sub(r"colab\.research\.google\.com/github/|raw\.githubusercontent\.com/", "github.com/", text)
    hosts = r"(?:git(?:hub|lab)\.com|codeberg\.org|bitbucket\.org)"
    named = re.findall(rf"\b({hosts})[/:]([\w.-]+/[\w.-]+)|git(?:\+| clone )https?://([\w.-]+)/([\w./-]+)", text)
    pairs = [(host or other_host, path or other_path) for host, path, other_host, other_path in named]
    return [f"https://{host}/{path.rstrip('.').removesuffix('.git')}" for host, path in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["datasets", "algorithms"])
def test_a_page_is_what_its_script_writes(name):
    """The script runs in its own process, because other tests register datasets."""
    code = f"import runpy, sys; sys.stdout.write(runpy.run_path('docs/write_{name}.py')['page']())"
    command = [sys.executable, "-X", "utf8", "-c", code]
    written = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, encoding="utf-8")
    assert written.stdout == (DOCS / f"{name}.md").read_text(encoding="utf-8"), f"run: python docs/write_{name}.py"


def test_page_of_algorithms_lists_all_registered_classes():
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    known = [*fedsim.algorithms.ALGORITHMS, *aggregators.AGGREGATORS, *compressors.COMPRESSORS, *attacks.ATTACKS]
    assert [name for name in known if f"| `{name}` |" not in text] == []


# Base classes and wrappers, which have no name in a registry.
WITHOUT_NAME = {
    *("Clusters", "AdaptiveFedAvg", "GradientServer", "PersonalModel", "FairServer", "Seeding", "Statistics"),
    *("Aggregator", "SumAggregator", "Wrapper", "AuxMean", "Clipped", "Compressed", "Grouped", "Noised", "StackAggregator"),
    *("Compressor", "VectorCompressor", "ErrorFeedback", "Attack", "Collusion"),
}


@pytest.mark.parametrize(
    ("package", "base", "registry"),
    [
        (fedsim.algorithms, fedsim.Algorithm, fedsim.algorithms.ALGORITHMS),
        (aggregators, aggregators.Aggregator, aggregators.AGGREGATORS),
        (compressors, compressors.Compressor, compressors.COMPRESSORS),
        (attacks, attacks.Attack, attacks.ATTACKS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_class_of_a_module_is_registered(package, base, registry):
    """Finds classes in the files, because tests and pages that use a registry do not show what is missing in it."""
    defined = set()
    for path in Path(package.__file__).parent.glob("_*.py"):
        if path.stem != "__init__":
            name = f"{package.__name__}.{path.stem}"
            values = vars(importlib.import_module(name)).values()
            defined |= {x for x in values if isinstance(x, type) and issubclass(x, base) and x.__module__ == name}
    public = {cls for cls in defined if not cls.__name__.startswith("_")}
    assert set(registry.values()) <= public
    assert {cls.__name__ for cls in public - set(registry.values())} - WITHOUT_NAME == set()


def test_page_of_reproductions_is_what_its_script_writes():
    written = runpy.run_path(str(DOCS / "write_reproductions.py"))["page"]()
    assert written == (DOCS / "reproductions.md").read_text(encoding="utf-8"), "run: python docs/write_reproductions.py"
    assert [path.stem for path in (DOCS / "reproductions").glob("*.json") if path.stem not in REPRODUCTIONS] == []


def test_page_of_datasets_has_a_section_for_each_and_links_to_it():
    text = PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"emnist62", "stackoverflow_word", "tfds:NAME"} <= set(sections) <= set(datasets.names())
    anchors = {re.sub(r"[^\w-]", "", section.lower()) for section in sections}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == anchors
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if not target.startswith("http")]
    assert targets and [target for target in targets if not (DOCS / target).exists()] == []


@pytest.mark.parametrize("words", ["1,500 | 10 | 20 | 1 | 50 | 0.03162 | 0.003162 | – | 0.0001 | 0.9 | 0.99", "max steps"])
def test_page_of_datasets_has_the_published_numbers(words):
    """The hyperparameters of FedAdam on EMNIST CR in Reddi et al.: 10^-1.5, 10^-2.5, 10^-4."""
    assert words in PAGE.read_text(encoding="utf-8")


def test_every_mention_of_the_repository_has_the_address_of_pyproject():
    """After a change of ``[project.urls]``, the failure lists every place that needs the change."""
    suffixes = {".md", ".py", ".ipynb", ".toml", ".cff", ".txt", ""}
    folders = [ROOT / name for name in (".ci", "benchmarks", "colab", "docs", "examples", "fedsim", "tests")]
    files = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    texts = [path for path in files if path.suffix in suffixes and path.is_file() and ".envs" not in path.parts]
    mentions = [
        (f"{path.relative_to(ROOT)}:{number}", address)
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for address in repositories(line)
    ]
    assert len(mentions) > 10
    wrong = [f"{place}: {address}" for place, address in mentions if address not in {REPOSITORY, *OTHER_REPOSITORIES}]
    assert not wrong, "\n".join([f"Expected {REPOSITORY}, the address in pyproject.toml, and found:", *wrong])


@pytest.mark.parametrize(
    "mention",
    [
        "see URL/ann/fed.sim.",
        "](URL/ann/fed.sim/blob/main/docs/runs.md)",
        '%pip install "fedsim-jax[run] @ git+URL/ann/fed.sim"',
        "git clone git@HOST:ann/fed.sim.git",
        "COLAB/ann/fed.sim/blob/main/colab/quickstart.ipynb",
        "RAW/ann/fed.sim/main/README.md",
    ],
)
def test_a_mention_of_a_repository_is_found(mention):
    host = "github.com"  # in two strings, so that this file mentions no other repository
    text = mention.replace("URL", f"https://{host}").replace("HOST", host)
    text = text.replace("COLAB", "https://colab.research.google.com/github").replace("RAW", "https://raw.githubusercontent.com")
    assert repositories(text) == [f"https://{host}/ann/fed.sim"]


def test_a_repository_on_a_private_host_is_found_where_it_is_installed_or_cloned():
    address = "//git.example.org/group/fedsim"
    for command in ("pip install 'fedsim-jax @ git+https:", "git clone https:"):
        assert repositories(command + address) == ["https:" + address]
