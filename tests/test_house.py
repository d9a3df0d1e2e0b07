"""The house stands as its plan says: which room imports which, what is documented, what is shipped, one version."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedsim

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedsim"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Rooms from the ground up. A room imports those of lower floors and itself; "fedsim" is the package's own __init__.
FLOORS: list[set[str]] = [
    {"_version", "checks"},
    {"names", "rng", "tree"},
    {"metrics"},
    {"model", "data", "compressors"},
    {"aggregators", "formats", "text"},
    {"attacks", "heterogeneity", "partitioners", "samplers"},
    {"plots"},
    {"execution"},
    {"algorithm"},
    {"evaluation"},
    {"algorithms"},
    {"models", "datasets"},
    {"experiment"},
    {"fedsim"},
    {"_datasets_command", "_reproduce_command"},
    {"cli"},
    {"__main__"},
]
EXCEPTIONS: dict[str, list[str]] = {}  # this list only shrinks
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

PUBLIC_MODULES = [
    "fedsim",
    "fedsim.aggregators",
    "fedsim.algorithms",
    "fedsim.attacks",
    "fedsim.compressors",
    "fedsim.data",
    "fedsim.datasets",
    "fedsim.evaluation",
    "fedsim.execution",
    "fedsim.experiment",
    "fedsim.experiment.reproductions",
    "fedsim.formats",
    "fedsim.heterogeneity",
    "fedsim.metrics",
    "fedsim.models",
    "fedsim.partitioners",
    "fedsim.plots",
    "fedsim.rng",
    "fedsim.text",
    "fedsim.samplers",
    "fedsim.tree",
]

# Public names without an example of their own. This list only shrinks.
WITHOUT_EXAMPLE: set[str] = {
    # Records, protocols, errors, and bases that say nothing alone: what makes or takes them has the example.
    "fedsim.Batch",
    "fedsim.Execution",
    "fedsim.RoundInfo",
    "fedsim.aggregators.Aggregator",
    "fedsim.aggregators.Groups",
    "fedsim.aggregators.Member",
    "fedsim.aggregators.Sent",
    "fedsim.aggregators.SumAggregator",
    "fedsim.algorithms.AdaptiveFedAvg",
    "fedsim.algorithms.ServerState",
    "fedsim.algorithms.Shared",
    "fedsim.attacks.Honest",
    "fedsim.compressors.Compressor",
    "fedsim.compressors.Size",
    "fedsim.compressors.Transmission",
    "fedsim.compressors.VectorCompressor",
    "fedsim.data.FormatError",
    "fedsim.datasets.Description",
    "fedsim.datasets.DownloadError",
    "fedsim.datasets.FederatedSplits",
    "fedsim.execution.Average",
    "fedsim.execution.ClientTable",
    "fedsim.execution.FederatedState",
    "fedsim.execution.StageError",
    "fedsim.experiment.Experiment",
    "fedsim.experiment.Published",
    "fedsim.experiment.Result",
    "fedsim.experiment.reproductions.Curve",
    "fedsim.experiment.reproductions.Reproduction",
    "fedsim.experiment.reproductions.Row",
    "fedsim.experiment.reproductions.reproduce",
    "fedsim.samplers.Sampler",
}

KNOWN_DEFECTS = [
    "test_two_experiment_seeds_give_different_client_keys",
    "test_shuffle_differs_between_rounds_and_repeats_between_runs",
    "test_executor_choice_at_apply_time_is_honoured",
    "test_trace_count_independent_of_client_sizes",
    "test_resuming_a_finished_run_returns_its_state",
    "test_every_sampler_works_with_the_runner",
    "test_apply_does_not_mutate_its_input_state",
    "test_registry_and_docs_list_every_algorithm_module",
    "test_wheel_contains_only_the_package",
    "test_import_and_train_without_optional_dependencies",
    "test_checkpoint_survives_renaming_a_state_class",
    "test_aggregation_with_zero_total_weight",
]


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "fedsim" if parts == ("__init__",) else parts[0]


def imported_rooms(source: str, package: str) -> Iterator[str]:
    """Rooms that a module of ``package`` imports, at any depth of its code; not for type checkers alone."""

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
            yield parts[1] if len(parts) > 1 and parts[1] in FLOOR else "fedsim"

    yield from visit(ast.parse(source))


def upward_imports(room: str, source: str, package: str) -> list[str]:
    return [other for other in imported_rooms(source, package) if other != room and FLOOR[other] >= FLOOR[room]]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_only_go_down():
    assert {room_of(path) for path in modules()} - set(FLOOR) == set(), "give every room its floor"
    found = {}
    for path in modules():
        package = ".".join(path.relative_to(ROOT).parts[:-1])
        upward = upward_imports(room_of(path), path.read_text(encoding="utf-8"), package)
        if upward:
            found[path.relative_to(ROOT).as_posix()] = upward
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    ("room", "package", "source"),
    [
        ("data", "fedsim.data", "from fedsim.execution import Jit"),
        ("data", "fedsim.data", "from fedsim import algorithms"),
        ("data", "fedsim.data", "import fedsim.experiment as e"),
        ("data", "fedsim.data", "from ..execution._plan import Layout"),
        ("data", "fedsim.data", "def late():\n    from fedsim.model import Model"),
        ("models", "fedsim.models", "import fedsim"),
        ("datasets", "fedsim.datasets", "from fedsim import __version__"),
        ("tree", "fedsim", "if True:\n    from . import rng"),
    ],
)
def test_upward_import_is_found(room, package, source):
    assert upward_imports(room, source, package)


def test_downward_and_type_checking_imports_are_fine():
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedsim.data import Batch\n"
    assert upward_imports("model", guarded, "fedsim") == []
    assert upward_imports("execution", "import jax\nfrom fedsim import tree\nfrom . import _plan", "fedsim.execution") == []


def test_no_module_imports_itself_through_others():
    """Imports for type checkers and inside functions count. A package stands for its modules without its ``__init__``."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    imports = {}
    for name, path in names.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        imports[name] = sorted(found & names.keys() - {name})
    done, path = set(), []

    def visit(name: str) -> None:
        assert name not in path, f"a circle of imports: {[*path[path.index(name) :], name]}"
        if name not in done:
            path.append(name)
            for other in imports[name]:
                visit(other)
            done.add(path.pop())

    for name in names:
        visit(name)


def tracked() -> list[Path]:
    """What git tracks or would track; skipped where there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_is_named_for_what_it_is_not():
    banned = {"util", "utils", "helper", "helpers", "misc", "common", "manager", "managers"}
    named = [str(path) for path in tracked() if path.stem.strip("_").removeprefix("test_").lower() in banned]
    assert named == []


def test_no_path_of_a_machine_in_a_file():
    machine = re.compile(rb"(?<![\w.:/-])/(?:home|Users|root|work|mnt)/[A-Za-z]")
    assert machine.search(b"see " + b"/home" + b"/ann/fedsim")  # in pieces, or it would find itself
    found = [path.relative_to(ROOT) for path in tracked() if machine.search(path.read_bytes())]
    assert found == []


def test_wheel_contains_only_the_package(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"fedsim_jax-{fedsim.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if not name.startswith(f"fedsim_jax-{fedsim.__version__}.dist-info/")}
    expected = {path.relative_to(ROOT).as_posix() for path in modules()} | {"fedsim/py.typed"}
    assert inside == expected


def test_version_is_in_one_place():
    version = fedsim.__version__
    assert PROJECT["project"]["dynamic"] == ["version"] and PROJECT["tool"]["hatch"]["version"]["path"] == "fedsim/_version.py"
    assigned = [path for path in modules() if re.search(r"^(__version__|VERSION)\b.*=", path.read_text("utf-8"), re.MULTILINE)]
    assert assigned == [PACKAGE / "_version.py"]
    assert re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)[1] == version
    assert re.search(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[1] == version


def test_every_path_that_configuration_names_exists():
    tool, hatch = PROJECT["tool"], PROJECT["tool"]["hatch"]
    paths = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], hatch["version"]["path"]]
    paths += [*hatch["build"]["targets"]["wheel"]["packages"], *hatch["build"]["targets"]["sdist"]["include"]]
    paths += [*tool["mypy"]["files"], *tool["pytest"]["ini_options"]["testpaths"], *tool["pytest"]["ini_options"]["pythonpath"]]
    for file in ("Makefile", ".ci/run"):
        text = (ROOT / file).read_text("utf-8")
        paths += re.findall(r"(?<![\w/.$*-])[\w][\w./-]*\.(?:toml|txt|py|md|sh|cfg|ini)\b", text)
    assert {"constraints.txt", "fedsim", "tests"} <= set(paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for target in PROJECT["project"]["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_constraints_are_names_and_versions_and_cover_what_is_depended_on():
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()]
    pinned = [re.fullmatch(r"([A-Za-z0-9._-]+)\s*==\s*[\w.+!]+\s*(;.*)?", line) for line in lines if line]
    assert all(pinned)
    names = {re.sub(r"[-_.]+", "-", match[1].lower()) for match in pinned}
    extras = PROJECT["project"]["optional-dependencies"]
    depended = [*PROJECT["project"]["dependencies"], *extras["run"], *extras["formats"], *extras["test"]]
    wanted = {re.match(r"[\w.-]+", need)[0] for need in depended}
    assert {re.sub(r"[-_.]+", "-", name.lower()) for name in wanted} - {"fedsim-jax"} <= names


def test_every_test_file_is_collected():
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tests = [node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if is_test(node)]
        if not path.name.startswith("test_"):
            assert tests == [], f"{path.relative_to(ROOT)} has tests, and pytest collects test_*.py"
        else:
            assert tests, f"{path.relative_to(ROOT)} has no tests"
    for path in [ROOT / "conftest.py", *(ROOT / "tests").rglob("conftest.py"), *PACKAGE.rglob("conftest.py")]:
        assert "collect_ignore" not in path.read_text("utf-8")
    assert not {"ignore", "deselect"} & set(
        re.findall(r"--(\w+)", " ".join(PROJECT["tool"]["pytest"]["ini_options"]["addopts"]))
    )


def is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def test_every_known_defect_of_the_ancestors_has_its_test():
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "tests").rglob("test_*.py")]
    there = {node.name for tree in trees for node in tree.body if is_test(node)}
    assert set(KNOWN_DEFECTS) - there == set()


def public_names(module: str) -> list[str]:
    """What a module defines or re-exports as ``X as X``, from its source: a curated ``__init__`` says what is public."""
    source = Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")
    names = []
    for node in ast.parse(source).body:
        match node:
            case ast.ImportFrom(names=aliases):
                names += [alias.name for alias in aliases if alias.asname == alias.name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
    return [name for name in names if not name.startswith("_")]


def public_things() -> dict[str, object]:
    """Public classes and functions by the first name they go by; aliases and constants have no docstring to ask for."""
    things: dict[int, tuple[str, object]] = {}
    for module in PUBLIC_MODULES:
        for name in public_names(module):
            thing = getattr(importlib.import_module(module), name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                things.setdefault(id(thing), (f"{module}.{name}", thing))
    return dict(things.values())


THINGS = public_things()


def function_of(member: object) -> object | None:
    """The function behind a method, property, class method or cached property; None for anything else."""
    function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
    return function if inspect.isfunction(function) else None


def test_doc_coverage_sees_the_public_names():
    """The check below is not empty."""
    assert {"fedsim.Algorithm", "fedsim.evaluate", "fedsim.tree.add", "fedsim.algorithms.FedAvg"} <= set(THINGS)
    assert len(THINGS) > 60


def test_everything_public_has_a_docstring():
    """Modules, classes and functions; and methods, which may inherit theirs."""
    missing = [module for module in PUBLIC_MODULES if not importlib.import_module(module).__doc__]
    for name, thing in THINGS.items():
        # A dataclass or NamedTuple without a docstring gets its signature for one.
        if not (thing.__doc__ or "").strip() or (thing.__doc__ or "").startswith(f"{thing.__name__}("):
            missing.append(name)
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if function_of(value) and not member.startswith("_"):
                    inherited = (getattr(base, member, None) for base in thing.__mro__)
                    missing += [] if any(getattr(each, "__doc__", None) for each in inherited) else [f"{name}.{member}"]
    assert missing == []


def has_example(thing: object) -> bool:
    docs = [thing.__doc__ or ""]
    if inspect.isclass(thing):  # its own methods, not what fields happen to hold
        docs += [function.__doc__ or "" for member, value in vars(thing).items() if (function := function_of(value))]
    return any(">>> " in doc for doc in docs)


def test_everything_public_has_an_executed_example_or_is_listed():
    without = {name for name, thing in THINGS.items() if not has_example(thing)}
    assert without - WITHOUT_EXAMPLE == set(), "write a >>> example"
    assert WITHOUT_EXAMPLE - without == set(), "these have one by now, or are gone: take them off the list"


def test_no_example_is_skipped():
    skipped = [path.relative_to(ROOT) for path in modules() if re.search(r"doctest: *\+SKIP", path.read_text("utf-8"))]
    assert skipped == []
    assert "--doctest-modules" in PROJECT["tool"]["pytest"]["ini_options"]["addopts"]
