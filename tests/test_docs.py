"""The pages of docs/ are what their scripts write, so no number in them is typed by hand."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fedsim
from fedsim import aggregators, attacks, compressors, datasets
from fedsim.experiment.reproductions import REPRODUCTIONS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "datasets.md"


@pytest.mark.parametrize("name", ["datasets", "algorithms"])
def test_a_page_is_what_the_registry_says(name):
    """In a process of its own, for other tests register datasets."""
    code = f"import runpy, sys; sys.stdout.write(runpy.run_path('docs/write_{name}.py')['page']())"
    command = [sys.executable, "-X", "utf8", "-c", code]
    written = subprocess.run(command, capture_output=True, check=True, cwd=DOCS.parent, encoding="utf-8")
    assert written.stdout == (DOCS / f"{name}.md").read_text(encoding="utf-8"), f"run: python docs/write_{name}.py"


def test_page_of_algorithms_lists_every_one():
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    known = [*fedsim.algorithms.ALGORITHMS, *aggregators.AGGREGATORS, *compressors.COMPRESSORS, *attacks.ATTACKS]
    assert [name for name in known if f"| `{name}` |" not in text] == []


def test_page_of_reproductions_is_what_their_records_say():
    written = runpy.run_path(str(DOCS / "write_reproductions.py"))["page"]()
    assert written == (DOCS / "reproductions.md").read_text(encoding="utf-8"), "run: python docs/write_reproductions.py"
    assert [path.stem for path in (DOCS / "reproductions").glob("*.json") if path.stem not in REPRODUCTIONS] == []


def test_page_of_datasets_has_a_section_for_each_and_links_that_lead_there():
    text = PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"emnist62", "stackoverflow_word", "tfds:NAME"} <= set(sections) <= set(datasets.names())
    anchors = {re.sub(r"[^\w-]", "", section.lower()) for section in sections}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) == anchors
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if not target.startswith("http")]
    assert targets and [target for target in targets if not (DOCS / target).exists()] == []


@pytest.mark.parametrize("words", ["1,500 | 10 | 20 | 1 | 50 | 0.03162 | 0.003162 | – | 0.0001 | 0.9 | 0.99", "max steps"])
def test_page_of_datasets_has_the_published_numbers(words):
    """Of FedAdam on EMNIST CR, as Reddi et al. have them: 10^-1.5, 10^-2.5, 10^-4."""
    assert words in PAGE.read_text(encoding="utf-8")
