"""Which tests a change may break: ``python tests/affected.py COMMIT`` prints the test files, as arguments for pytest.

The change is everything that differs from the commit in the working tree. A changed package affects its own tests, those of
the packages that import it, and every other test file that imports it. `fedsim` itself imports all packages, so the tests of
the whole (pages, notebooks, examples) are always among them. A change of a file that belongs to no package, such as a setting
or a module that many tests import, affects all tests, and so does a commit that this clone does not have.
"""

from __future__ import annotations

import ast
import functools
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedsim"
TESTS = ROOT / "tests"
# Tests that read files or folders beside the package.
BESIDE = {
    "benchmarks": ["test_benchmarks.py", "test_readme.py", "experiment/test_client_memory.py"],
    ".github": [],
    "colab": ["test_docs.py", "test_notebooks.py", "test_site.py"],
    "docs": ["test_docs.py", "test_pages.py", "test_readme.py", "test_site.py"],
    "examples": ["test_examples.py", "sweeps/test_sweep.py"],
    "README.md": ["test_docs.py", "test_readme.py", "test_site.py"],
    "tests/affected.py": ["test_affected.py", "test_house.py"],
    ".ci/base": [],
    "CHANGELOG.md": [],
    "CITATION.cff": [],
    "CONTRIBUTING.md": ["test_site.py"],
    "LICENSE": [],
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def component_of(path: Path) -> str:
    """Returns the package or the module at the top of `fedsim` that a file belongs to; "fedsim" for its ``__init__``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "fedsim" if parts == ("__init__",) else parts[0]


@functools.cache
def components() -> frozenset[str]:
    return frozenset(component_of(path) for path in modules())


def imported_components(source: str, package: str) -> Iterator[str]:
    """Yields the components that a module of ``package`` imports anywhere, except those for type checkers only."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from resolve(alias.name)
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                yield from resolve(f"{module}.{alias.name}")
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    def resolve(name: str) -> Iterator[str]:
        parts = name.split(".")
        if parts[0] == "fedsim":
            yield parts[1] if len(parts) > 1 and parts[1] in components() else "fedsim"

    yield from visit(ast.parse(source))


@functools.cache
def importers() -> dict[str, set[str]]:
    """Returns, for each component, the components that import it."""
    found: dict[str, set[str]] = {component: set() for component in components()}
    for path in modules():
        package = ".".join(path.relative_to(ROOT).parts[:-1])
        for other in imported_components(path.read_text(encoding="utf-8"), package):
            found[other].add(component_of(path))
    return found


def all_tests() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def owner_of(test: Path) -> str:
    """Returns the component that a test file tests; "fedsim" for the tests of the whole."""
    parts = test.relative_to(TESTS).with_suffix("").parts
    name = parts[0] if len(parts) > 1 else parts[0].removeprefix("test_")
    return name if name in components() else "fedsim"


@functools.cache
def imports_of(test: Path) -> frozenset[str]:
    """Returns the components that a test file imports."""
    return frozenset(imported_components(test.read_text(encoding="utf-8"), ""))


def affected(changed: Iterable[str], seed: str = "") -> list[Path]:
    """Returns the test files that a change of these files, by their paths in the repository, may break.

    Those of what changed come first, and then those of what imports it. Within each group the order is drawn from the seed, so
    that with another commit other tests come last, for which there may be no time.
    """
    tests = all_tests()
    first: set[Path] = set()
    then: set[Path] = set()
    for path in map(Path, changed):
        beside = BESIDE.get(path.as_posix(), BESIDE.get(path.parts[0]))
        if beside is not None:
            first |= {TESTS / name for name in beside}
        elif path.parts[0] == "fedsim":
            component = component_of(ROOT / path)
            first |= {test for test in tests if owner_of(test) == component}
            owners = {"fedsim", *importers().get(component, ())}
            then |= {test for test in tests if owner_of(test) in owners or component in imports_of(test)}
        elif path.name.startswith("test_"):
            first |= {ROOT / path} & set(tests)
        elif path.parts[0] == "tests" and len(path.parts) > 2:
            first |= {test for test in tests if test.is_relative_to(TESTS / path.parts[1])}
        else:
            then |= set(tests)
    draw = random.Random(seed)
    return [test for group in (first, then - first) for test in draw.sample(sorted(group), len(group))]


def git(*command: str) -> str:
    """Returns what git prints.

    Raises:
      subprocess.CalledProcessError: git ended with an error, for example because it does not know a commit.
    """
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout


def changed_since(commit: str) -> list[str]:
    """Returns the files that differ from a commit, with those that git does not track yet."""
    different = git("diff", "--name-only", "--no-renames", "-z", commit)
    return [path for path in (different + git("ls-files", "--others", "--exclude-standard", "-z")).split("\0") if path]


if __name__ == "__main__":
    try:
        selected = affected(changed_since(sys.argv[1]), seed=git("rev-parse", "HEAD"))
    except subprocess.CalledProcessError:
        selected = all_tests()
    print(*(test.relative_to(ROOT) for test in selected))
