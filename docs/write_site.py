"""Writes the sources of the documentation site, which Sphinx then builds: ``make docs``.

The pages of the repository are written for readers of the site and for readers of the files. This script copies them to one
folder, with links between them that Sphinx checks; a link to a file that is no page leads to the repository. It also writes
the first page, with the order of all pages, and a page for each public module, with every public name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]

# The order of the site: the pages of the repository below each heading.
SECTIONS: dict[str, list[str]] = {
    "Start": ["docs/install.md", "docs/quickstart.md", "docs/command_line.md", "docs/troubleshooting.md"],
    "Guides": [
        "docs/own_data.md",
        "docs/partitions.md",
        "docs/datasets.md",
        "docs/choosing.md",
        "docs/algorithms.md",
        "docs/own_algorithm.md",
        "docs/hooks.md",
        "docs/models.md",
        "docs/evaluation.md",
        "docs/compression_and_attacks.md",
        "docs/privacy.md",
        "docs/systems.md",
        "docs/decentralized.md",
        "docs/vertical.md",
        "docs/few_labels.md",
        "docs/scale.md",
        "docs/deployment.md",
        "docs/runs_in_python.md",
        "docs/sweeps.md",
        "docs/comparison.md",
        "docs/plans.md",
        "docs/tuning.md",
        "docs/primitives.md",
    ],
    "Tutorials": [
        "docs/notebooks.md",
        "colab/quickstart.ipynb",
        "colab/datasets.ipynb",
        "colab/custom_algorithm.ipynb",
        "colab/heterogeneous_clients.ipynb",
        "colab/compression_and_attacks.ipynb",
        "colab/privacy.ipynb",
        "colab/asynchronous.ipynb",
        "colab/decentralized.ipynb",
        "colab/differentiate.ipynb",
    ],
    "Coming from another library": ["docs/migration.md", "docs/migration_frameworks.md"],
    "Results": ["docs/speed.md", "docs/reproductions.md", "docs/runs.md", "docs/four_ways.md", "benchmarks/README.md"],
    "Reference": ["docs/glossary.md"],  # and the pages of the public modules
    "Project": ["docs/architecture.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}
# Pages of which another page has the order.
BELOW: dict[str, list[str]] = {
    "docs/reproductions.md": sorted(f"docs/reproductions/{path.name}" for path in (ROOT / "docs/reproductions").glob("*.md"))
}
PUBLIC_MODULES = re.findall(r"\S+", """
    fedsim fedsim.aggregators fedsim.algorithms fedsim.attacks fedsim.augmentations fedsim.commands fedsim.comparison
    fedsim.compressors fedsim.configuration fedsim.data fedsim.datasets fedsim.decentralized fedsim.decentralized.costs
    fedsim.deployment fedsim.differentiation fedsim.distributed fedsim.evaluation fedsim.execution fedsim.experiment
    fedsim.experiment.driving fedsim.formats fedsim.heterogeneity fedsim.metrics fedsim.model fedsim.models
    fedsim.partitioners fedsim.planning fedsim.plots fedsim.primitives fedsim.privacy fedsim.privacy.attacks
    fedsim.reproductions fedsim.rng fedsim.rounds fedsim.samplers fedsim.sweeps fedsim.systems
    fedsim.text fedsim.transfer fedsim.tree fedsim.vertical
""")  # fmt: skip


def pages() -> dict[str, str]:
    """Returns the place on the site of every page of the repository."""
    listed = [page for group in (*SECTIONS.values(), *BELOW.values()) for page in group]
    return {page: _place(page) for page in listed}


def _place(page: str) -> str:
    folder, _, name = page.rpartition("/")
    if name == "README.md":
        return f"{folder}.md"
    return f"tutorials/{name}" if folder == "colab" else name.lower() if not folder else page.removeprefix("docs/")


def write(out: Path) -> None:
    """Writes all sources of the site to a folder.

    Raises:
      ValueError: a page links to a file that does not exist; the message names both.
    """
    shutil.rmtree(out, ignore_errors=True)
    (out / "_static").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "conf.py", out)
    (out / "_static" / "site.css").write_text(_CSS, encoding="utf-8")
    for page, place in pages().items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).write_text(_on_site(page, out), encoding="utf-8")
    (out / "api").mkdir()
    (out / "index.md").write_text(index(out), encoding="utf-8")
    for module, text in reference().items():
        (out / "api" / f"{module}.rst").write_text(text, encoding="utf-8")
    # For conf.py, which makes links of these names in docstrings.
    (out / "names.txt").write_text(
        "".join(f"{name}\n" for module in PUBLIC_MODULES for name in exported(module)), encoding="utf-8"
    )


# The columns of numbers of long tables stay narrow, and wide tables scroll by themselves. On a narrow screen, long names,
# addresses and code in a sentence are broken.
_CSS = """\
.bd-article table { display: block; overflow-x: auto; max-width: 100%; width: max-content; font-size: 0.9em; }
.bd-article { overflow-wrap: break-word; }
.bd-article dt.sig, .bd-article dd, .bd-article :not(pre) > code { overflow-wrap: anywhere; min-width: 0; }
.bd-article table, .bd-article table code { overflow-wrap: normal; }
.bd-article .sig .pre, .bd-article :not(pre) > code .pre { white-space: normal; }
.bd-article img { background: white; }
"""


def _on_site(page: str, out: Path) -> str:
    """Returns the text of a page with links to the other pages, and copies its pictures."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".ipynb"):
        book = json.loads(text)
        for cell in book["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = _linked("".join(cell["source"]), page, out)
        return json.dumps(book)
    text = _linked(text, page, out)
    if page in BELOW:
        text += "\n```{toctree}\n:hidden:\n\n" + "".join(f"/{_place(each)}\n" for each in BELOW[page]) + "```\n"
    return text


def _linked(text: str, page: str, out: Path) -> str:
    fenced = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)

    def replaced(match: re.Match[str]) -> str:
        return f"]({_target(match[1], page, out)})"

    return "".join(part if part.startswith("```") else re.sub(r"\]\(([^)\s]+)\)", replaced, part) for part in fenced)


def _target(link: str, page: str, out: Path) -> str:
    """Returns the link as it is on the site."""
    link = link.removeprefix(f"{REPOSITORY}/blob/main/") if (inside := link.startswith(f"{REPOSITORY}/blob/main/")) else link
    if link.startswith(("http:", "https:", "mailto:", "#")):
        return link
    path, hash_, anchor = link.partition("#")
    file = ROOT / path if inside else (ROOT / page).parent / path
    name = os.path.relpath(file, ROOT)
    if not file.exists():
        raise ValueError(f"{page} links to {link}, and there is no file {name}: correct the link.")
    if name == "README.md":
        return "/index.md"
    if name in pages():
        return f"/{pages()[name]}{hash_}{anchor}"
    if file.suffix in (".png", ".svg"):
        target = out / "_pictures" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
        return f"/_pictures/{name}"
    return f"{REPOSITORY}/{'tree' if file.is_dir() else 'blob'}/main/{name}"


def index(out: Path) -> str:
    """Returns the first page: README, and the order of all pages."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    orders = []
    for section, listed in SECTIONS.items():
        places = [pages()[page] for page in listed]
        if section == "Reference":
            places += [f"api/{module}" for module in PUBLIC_MODULES]
        orders.append(
            f"```{{toctree}}\n:hidden:\n:caption: {section}\n\n" + "".join(f"/{place}\n" for place in places) + "```\n"
        )
    return _linked(readme, "README.md", out) + "\n" + "\n".join(orders)


def reference() -> dict[str, str]:
    """Returns the page of each public module in reStructuredText.

    A name that several modules export is described on the page of the first one, and the others link to it.
    """
    described: dict[int, str] = {}
    return {module: _module_page(module, described) for module in PUBLIC_MODULES}


def _module_page(module: str, described: dict[int, str]) -> str:
    groups: dict[str, list[str]] = {"class": [], "function": [], "data": []}
    elsewhere, plain = [], []
    again: set[str] = set()
    for name in sorted(exported(module)):
        value = getattr(importlib.import_module(module), name)
        kind = "class" if inspect.isclass(value) and value is not Any else "function" if inspect.isroutine(value) else "data"
        if inspect.ismodule(value):
            continue
        if kind != "data" and id(value) in described:
            elsewhere.append(described[id(value)])
            continue
        # Sphinx finds a type of arguments by its last name, which several modules may have: the first one is meant.
        known = kind == "data" and any(other.endswith(f".{name}") for other in described.values())
        described[id(value)] = f"{module}.{name}"
        if known:
            again.add(f"{module}.{name}")
        (plain if kind == "data" else groups[kind]).append(f"{module}.{name}")
    lines = [module, "=" * len(module), "", f".. automodule:: {module}", "   :no-members:", ""]
    for kind, title in (("class", "Classes"), ("function", "Functions")):
        if names := groups[kind]:
            lines += [title, "-" * len(title), "", ".. autosummary::", "   :nosignatures:", ""]
            lines += [*(f"   {name.rpartition('.')[2]}" for name in names), ""]
            for name in names:
                lines += [f".. auto{kind}:: {name}", *(["   :members:"] if kind == "class" else []), ""]
    if plain:
        lines += ["Constants and types", "-" * 19, ""]
        for name in plain:
            lines += [f".. py:data:: {name.rpartition('.')[2]}", *(["   :no-index:"] if name in again else []), ""]
    if elsewhere:
        lines += ["Described on another page", "-" * 25, "", *(f"- :py:obj:`{name}`" for name in elsewhere), ""]
    return "\n".join(lines) + "\n"


def exported(module: str) -> Iterator[str]:
    """Yields the public names that a module defines, or exports as ``X as X``, also for type checkers."""
    body = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")).body
    for node in [*body, *(inner for outer in body if isinstance(outer, ast.If) for inner in outer.body)]:
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        yield from (name for name in names if not name.startswith("_"))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
