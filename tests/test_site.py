"""The documentation site: every page is on it, links have targets, and the reference has every public name."""

import importlib
import json
import re
import runpy
from pathlib import Path

import pytest
from test_house import PUBLIC, PUBLIC_MODULES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    """Returns the functions of the script that writes the site."""
    return runpy.run_path(str(ROOT / "docs" / "write_site.py"))


@pytest.fixture(scope="module")
def sources(site, tmp_path_factory):
    """Returns the folder of the site's sources; the script raises an error for a link without a target."""
    folder = tmp_path_factory.mktemp("site")
    site["write"](folder)
    return folder


def test_every_public_name_is_in_the_reference(sources):
    """The names are those of the rule that everything public has a docstring, which finds them in its own way."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in (sources / "api").glob("*.rst"))
    described = set(re.findall(r"^\.\. auto(?:class|function):: (\S+)$", text, re.MULTILINE))
    assert len(PUBLIC) > 60 and set(PUBLIC) - described == set()
    assert {page.stem for page in (sources / "api").glob("*.rst")} == set(PUBLIC_MODULES)


def test_every_name_of_the_reference_exists(sources):
    for page in (sources / "api").glob("*.rst"):
        for name in re.findall(r"^\.\. auto(?:class|function):: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            assert module == page.stem and hasattr(importlib.import_module(module), attribute), name


def test_every_page_and_notebook_is_on_the_site(site):
    written = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    written |= {f"colab/{path.name}" for path in (ROOT / "colab").glob("*.ipynb")}
    assert written - set(site["pages"]()) == set(), "add the page to SECTIONS in docs/write_site.py"


def test_every_example_is_listed():
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert len(files) > 10 and set(re.findall(r"^\| \[`([^`]+)`\]\(\.\./examples/\1\) \|", page, re.MULTILINE)) == files


def test_every_page_is_in_the_order_of_the_first_page(sources, site):
    index = (sources / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^/(\S+)$", index, re.MULTILINE))
    below = {site["_place"](page) for pages in site["BELOW"].values() for page in pages}
    assert set(site["pages"]().values()) - below <= listed
    assert all((sources / place).exists() or (sources / f"{place}.rst").exists() for place in listed)


def test_links_between_pages_have_targets(sources):
    for page in sources.rglob("*.md"):
        for target in re.findall(r"\]\((/[^)#]+)", page.read_text(encoding="utf-8")):
            assert (sources / target[1:]).exists(), f"{page.name}: {target}"


def test_a_link_without_a_target_is_an_error(site, tmp_path):
    with pytest.raises(ValueError, match=r"docs/runs\.md links to missing\.md, and there is no file docs/missing\.md"):
        site["_linked"]("see [this](missing.md)", "docs/runs.md", tmp_path)
    assert site["_linked"]("[a](models.md#parts) ```\n", "docs/runs.md", tmp_path) == "[a](/models.md#parts) ```\n"


def test_notebooks_keep_their_outputs(sources):
    for path in (ROOT / "colab").glob("*.ipynb"):
        before, after = (json.loads(file.read_text(encoding="utf-8")) for file in (path, sources / "tutorials" / path.name))
        code = [[cell for cell in book["cells"] if cell["cell_type"] == "code"] for book in (before, after)]
        assert code[0] == code[1] and any(cell["outputs"] for cell in code[1])


@pytest.mark.slow
def test_the_script_writes_the_same_site_again(sources, site, tmp_path):
    site["write"](tmp_path)
    files = sorted(path.relative_to(sources) for path in sources.rglob("*") if path.is_file())
    assert [path for path in files if (tmp_path / path).read_bytes() != (sources / path).read_bytes()] == []
