"""Rules of the repository about imports between modules, documentation, the content of the wheel, and the version."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import jax
import pytest
from affected import PACKAGE, ROOT, component_of, imported_components, modules

import fedsim

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Layers of modules and subpackages, the lowest first. A module imports only from lower layers and from its own subpackage.
# "fedsim" is the __init__ of the package.
LAYERS: list[set[str]] = [
    {"_version", "checks"},
    {"descriptions", "distributed", "durable_files", "names", "rng", "run_files", "tree"},
    {"augmentations", "metrics", "primitives"},
    {"model", "data", "compressors"},
    {"text_files"},
    {"aggregators", "formats", "saved_arrays", "text", "transfer"},
    {"attacks", "heterogeneity", "partitioners", "pinned_files", "samplers"},
    {"systems"},
    {"plots"},
    {"comparison"},
    {"rounds"},
    {"execution"},
    {"algorithm"},
    {"differentiation", "evaluation", "planning", "privacy"},
    {"algorithms"},
    {"decentralized"},
    {"vertical"},
    {"models", "datasets"},
    {"configuration"},
    {"experiment"},
    {"sweeps"},
    {"deployment"},
    {"fedsim"},
    {"reproductions"},  # above "fedsim", which therefore does not import it
    {"commands"},
    {"__main__"},
]
EXCEPTIONS: dict[str, list[str]] = {}  # no exception may be added
LAYER = {component: number for number, components in enumerate(LAYERS) for component in components}

# So many imports are of a private module of another package. The number may only fall: export the name from the package's
# __init__, with an example, or move the code to where it belongs.
MOST_PRIVATE_IMPORTS = 9

PUBLIC_MODULES = [
    "fedsim",
    "fedsim.aggregators",
    "fedsim.algorithms",
    "fedsim.attacks",
    "fedsim.augmentations",
    "fedsim.commands",
    "fedsim.comparison",
    "fedsim.compressors",
    "fedsim.configuration",
    "fedsim.data",
    "fedsim.datasets",
    "fedsim.decentralized",
    "fedsim.decentralized.costs",
    "fedsim.deployment",
    "fedsim.differentiation",
    "fedsim.distributed",
    "fedsim.evaluation",
    "fedsim.execution",
    "fedsim.experiment",
    "fedsim.experiment.driving",
    "fedsim.formats",
    "fedsim.heterogeneity",
    "fedsim.metrics",
    "fedsim.model",
    "fedsim.models",
    "fedsim.partitioners",
    "fedsim.planning",
    "fedsim.plots",
    "fedsim.primitives",
    "fedsim.reproductions",
    "fedsim.privacy",
    "fedsim.privacy.attacks",
    "fedsim.rng",
    "fedsim.rounds",
    "fedsim.text",
    "fedsim.samplers",
    "fedsim.sweeps",
    "fedsim.systems",
    "fedsim.transfer",
    "fedsim.tree",
    "fedsim.vertical",
]

# Public names without their own example. No name may be added.
WITHOUT_EXAMPLE: set[str] = {
    # Records, protocols, errors and base classes: the examples are those of the functions that return or accept them.
    "fedsim.Batch",
    "fedsim.aggregators.Groups",
    "fedsim.aggregators.Member",
    "fedsim.aggregators.Sent",
    "fedsim.aggregators.SumAggregator",
    "fedsim.algorithms.ServerState",
    "fedsim.algorithms.Shared",
    "fedsim.compressors.Compressor",
    "fedsim.compressors.Size",
    "fedsim.compressors.Transmission",
    "fedsim.compressors.VectorCompressor",
    "fedsim.configuration.Experiment",
    "fedsim.configuration.Published",
    "fedsim.data.FormatError",
    "fedsim.datasets.Description",
    "fedsim.datasets.DownloadError",
    "fedsim.datasets.FederatedSplits",
    "fedsim.experiment.Result",
    "fedsim.privacy.Aggregated",
    "fedsim.reproductions.Curve",
    "fedsim.reproductions.Reproduction",
    "fedsim.reproductions.reproduce",
    "fedsim.samplers.Sampler",
    "fedsim.systems.Dispatch",
    "fedsim.systems.Law",
    "fedsim.systems.Server",
    "fedsim.systems.ServerSteps",
    "fedsim.systems.Timeline",
    "fedsim.systems.Totals",
    "fedsim.systems.Updates",
}

# An algorithm derives from `fedsim.Algorithm` over at most one class in between. What others share is a value or a function.
DEEPEST = 2

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


def upward_imports(component: str, source: str, package: str) -> list[str]:
    return [other for other in imported_components(source, package) if other != component and LAYER[other] >= LAYER[component]]


def test_modules_import_only_from_lower_layers():
    assert {component_of(path) for path in modules()} - set(LAYER) == set(), "add the new component to LAYERS"
    found = {}
    for path in modules():
        package = ".".join(path.relative_to(ROOT).parts[:-1])
        upward = upward_imports(component_of(path), path.read_text(encoding="utf-8"), package)
        if upward:
            found[path.relative_to(ROOT).as_posix()] = upward
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    ("component", "package", "source"),
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
def test_upward_import_is_found(component, package, source):
    assert upward_imports(component, source, package)


def test_downward_and_type_checking_imports_are_allowed():
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedsim.data import Batch\n"
    assert upward_imports("model", guarded, "fedsim") == []
    assert upward_imports("execution", "import jax\nfrom fedsim import tree\nfrom . import _plan", "fedsim.execution") == []


def test_reproductions_are_imported_by_their_command_alone():
    """`import fedsim` and all other commands start without them."""
    found = {
        component_of(path)
        for path in modules()
        if "reproductions" in imported_components(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parts[:-1]))
    }
    assert found == {"reproductions", "commands"}
    loaded = "import sys, fedsim, fedsim.commands; sys.exit('fedsim.reproductions' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=ROOT).returncode == 0


def test_no_import_cycles():
    """Imports for type checkers and inside functions count; the ``__init__`` of a package does not."""
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
        assert name not in path, f"an import cycle: {[*path[path.index(name) :], name]}"
        if name not in done:
            path.append(name)
            for other in imports[name]:
                visit(other)
            done.add(path.pop())

    for name in names:
        visit(name)


def private_imports(module: str, source: str) -> list[str]:
    """Returns the private modules and names of other packages that a module imports, once for each import."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        else:
            continue
        paths = set()
        for name in names:
            owner, _, private = name.partition("._")
            if private and owner.startswith("fedsim.") and not f"{module}.".startswith(f"{owner}."):
                paths.add(f"{owner}._{private.partition('.')[0]}")
        found += sorted(paths)
    return found


def test_few_modules_import_what_is_private_in_another_package():
    found = [
        f"{name} imports {path}"
        for file in modules()
        for name in [".".join(file.relative_to(ROOT).with_suffix("").parts)]
        for path in private_imports(name, file.read_text(encoding="utf-8"))
    ]
    assert len(found) <= MOST_PRIVATE_IMPORTS, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("fedsim.data._packed", "from fedsim.execution._layout import Layout, Group", 1),
        ("fedsim.data._packed", "from fedsim.execution import _plan, _call, Jit", 2),
        ("fedsim.data._packed", "import fedsim.execution._layout", 1),
        ("fedsim.tree", "def late():\n    from fedsim.data._batching import Batch", 1),
        ("fedsim.decentralized.costs._ring", "from fedsim.decentralized._mixer import Mixer", 0),
        ("fedsim.decentralized._mixer", "from fedsim.decentralized.costs._ring import Ring", 1),
        ("fedsim.commands", "from fedsim import checks, data\nfrom fedsim._version import __version__", 0),
    ],
)
def test_private_imports_are_found(module, source, count):
    assert len(private_imports(module, source)) == count


def bare_keys(source: str) -> list[int]:
    """Returns the lines that make a key of JAX's default implementation, unless it serves `jax.eval_shape` alone."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    of_shapes = {id(node) for call in calls if ast.unparse(call.func).endswith("eval_shape") for node in ast.walk(call)}
    return [
        call.lineno
        for call in calls
        if re.search(r"(^|\.)random\.(key|PRNGKey)$", ast.unparse(call.func)) and id(call) not in of_shapes
        if "impl" not in {keyword.arg for keyword in call.keywords}
    ]


def test_keys_have_the_implementation_of_fedsim_whatever_jax_default_prng_impl_says():
    """Under `jax.vmap`, draws from keys of another one depend on the clients that run beside a client."""
    assert bare_keys("jax.random.key(seed)\nrandom.PRNGKey(0)\njax.eval_shape(init, jax.random.key(0))") == [1, 2]
    assert bare_keys("jax.random.key(0, impl=rng.IMPLEMENTATION)") == []
    found = [f"{path.relative_to(ROOT)}:{line}" for path in modules() for line in bare_keys(path.read_text(encoding="utf-8"))]
    assert found == [], "add impl=rng.IMPLEMENTATION, or use fedsim.rng.root"


def depth(cls: type) -> int:
    """Returns how many classes a class is below `fedsim.Algorithm`, on the longest way; mixins do not count."""
    if cls is fedsim.Algorithm:
        return 0
    return 1 + max(depth(base) for base in cls.__bases__ if issubclass(base, fedsim.Algorithm))


@pytest.mark.parametrize("name", [*fedsim.algorithms.ALGORITHMS, *fedsim.decentralized.ALGORITHMS])
def test_no_algorithm_is_deep_below_algorithm(name):
    assert depth((fedsim.algorithms.ALGORITHMS | fedsim.decentralized.ALGORITHMS)[name]) <= DEEPEST


def tracked() -> list[Path]:
    """Returns the files that git tracks or would track; skips the test if there is no git."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_has_a_meaningless_name():
    banned = {"util", "utils", "helper", "helpers", "misc", "common", "manager", "managers"}
    named = [str(path) for path in tracked() if path.stem.strip("_").removeprefix("test_").lower() in banned]
    assert named == []


def test_no_file_has_a_path_of_a_machine():
    machine = re.compile(rb"(?<![\w.:/-])/(?:home|Users|root|work|mnt)/[A-Za-z]")
    assert machine.search(
        b"see " + b"/home" + b"/ann/fedsim"
    )  # split into two strings, so that the search does not match this file
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
    expected = {path.relative_to(ROOT).as_posix() for path in modules()} | {"fedsim/py.typed", "fedsim/comparison/report.html"}
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


def test_constraints_are_names_and_versions_and_cover_all_dependencies():
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


def test_every_known_defect_of_earlier_versions_has_a_test():
    trees = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "tests").rglob("test_*.py")]
    there = {node.name for tree in trees for node in tree.body if is_test(node)}
    assert set(KNOWN_DEFECTS) - there == set()


def public_names(module: str) -> list[str]:
    """Returns the public names that a module's source defines or exports as ``X as X``, also those for type checkers."""
    source = Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")
    body = ast.parse(source).body
    guarded = [node for each in body if isinstance(each, ast.If) for node in each.body]
    names = []
    for node in [*body, *guarded]:
        match node:
            case ast.ImportFrom(names=aliases):
                names += [alias.name for alias in aliases if alias.asname == alias.name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
    return [name for name in names if not name.startswith("_")]


def public_objects() -> dict[str, object]:
    """Returns the public classes and functions by their first name; aliases and constants have no docstring."""
    objects: dict[int, tuple[str, object]] = {}
    for module in PUBLIC_MODULES:
        for name in public_names(module):
            definition = getattr(importlib.import_module(module), name)
            if definition is not Any and (inspect.isclass(definition) or inspect.isfunction(definition)):
                objects.setdefault(id(definition), (f"{module}.{name}", definition))
    return dict(objects.values())


PUBLIC = public_objects()


def function_of(member: object) -> object | None:
    """Returns the function of a method, property, class method or cached property; None for anything else."""
    function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
    return function if inspect.isfunction(function) else None


def test_public_names_are_found():
    """The public names are found, so the tests that iterate over them are not empty."""
    assert {"fedsim.Algorithm", "fedsim.evaluate", "fedsim.tree.add", "fedsim.algorithms.FedAvg"} <= set(PUBLIC)
    assert len(PUBLIC) > 60


def test_everything_public_has_a_docstring():
    """Modules, classes, functions and methods have docstrings; methods may inherit theirs."""
    missing = [module for module in PUBLIC_MODULES if not importlib.import_module(module).__doc__]
    for name, definition in PUBLIC.items():
        # Python uses the signature as the docstring of a dataclass or NamedTuple that has none.
        if not (definition.__doc__ or "").strip() or (definition.__doc__ or "").startswith(f"{definition.__name__}("):
            missing.append(name)
        if inspect.isclass(definition):
            for member, value in vars(definition).items():
                if function_of(value) and not member.startswith("_"):
                    inherited = (getattr(base, member, None) for base in definition.__mro__)
                    missing += [] if any(getattr(each, "__doc__", None) for each in inherited) else [f"{name}.{member}"]
    assert missing == []


def has_example(definition: object) -> bool:
    docs = [definition.__doc__ or ""]
    if inspect.isclass(definition):  # methods of the class, not values of its fields
        docs += [function.__doc__ or "" for member, value in vars(definition).items() if (function := function_of(value))]
    return any(">>> " in doc for doc in docs)


def test_everything_public_has_an_executed_example_or_is_listed():
    without = {name for name, definition in PUBLIC.items() if not has_example(definition)}
    assert without - WITHOUT_EXAMPLE == set(), "add a >>> example to these"
    assert WITHOUT_EXAMPLE - without == set(), "these have an example or no longer exist: remove them from the list"


def test_random_draws_have_a_dtype():
    """Without one, a draw has JAX's default dtype, so that other numbers are drawn if x64 is enabled."""
    positions = {}
    for name, function in vars(jax.random).items():
        parameters = list(inspect.signature(function).parameters) if inspect.isfunction(function) else []
        if {"shape", "dtype"} <= set(parameters):
            positions[f"jax.random.{name}"] = parameters.index("dtype")
    assert positions["jax.random.normal"] == 2
    without = []
    for path in modules():
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "jax.random." in source else ():
            place = positions.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            if place is not None and len(node.args) <= place and all(each.arg != "dtype" for each in node.keywords):
                without.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert without == [], "give these a dtype, such as jnp.float32"


def test_no_example_is_skipped():
    skipped = [path.relative_to(ROOT) for path in modules() if re.search(r"doctest: *\+SKIP", path.read_text("utf-8"))]
    assert skipped == []
    assert "--doctest-modules" in PROJECT["tool"]["pytest"]["ini_options"]["addopts"]
