"""Which tests the continuous integration runs for a change."""

import subprocess
import sys

import pytest
from affected import ROOT, TESTS, affected, all_tests, components, importers, owner_of


def names(*changed):
    return [test.relative_to(TESTS).as_posix() for test in affected(changed)]


def folders(*changed):
    return {name.split("/")[0] for name in names(*changed)}


def test_a_package_affects_its_tests_first_and_then_those_of_the_packages_that_import_it():
    chosen = names("fedsim/vertical/_cvfl.py")
    own = {path.relative_to(TESTS).as_posix() for path in TESTS.glob("vertical/test_*.py")}
    assert set(chosen[: len(own)]) == own and len(chosen) == len(set(chosen)) > len(own)
    # fedsim.reproductions has a reproduction of vertical learning; fedsim.compressors is what it imports.
    assert {"reproductions", "test_readme.py", "test_notebooks.py"} <= folders("fedsim/vertical/_cvfl.py")
    assert not {"compressors", "systems", "test_tree.py"} & folders("fedsim/vertical/_cvfl.py")
    assert {"aggregators", "algorithms", "test_compressors.py"} - folders("fedsim/compressors/_eden.py") == {
        "test_compressors.py"
    }


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("fedsim/tree.py", {"test_tree.py", "aggregators", "primitives", "configuration"}),
        ("fedsim/commands/_datasets.py", {"commands", "test_readme.py"}),
        ("fedsim/augmentations.py", {"algorithms", "models"}),  # tests/models has its tests
        ("fedsim/decentralized/costs/_removed.py", {"decentralized", "reproductions"}),
        ("tests/vertical/test_data.py", {"vertical"}),
        ("tests/experiment/conftest.py", {"experiment"}),
        ("colab/quickstart.ipynb", {"test_notebooks.py"}),
        ("docs/systems/timeline.png", {"test_docs.py", "test_pages.py", "test_readme.py", "test_site.py"}),
    ],
)
def test_what_changed_is_among_the_affected(changed, expected):
    assert expected <= folders(changed)


@pytest.mark.parametrize("changed", ["pyproject.toml", "conftest.py", "tests/conftest.py", "tests/federation.py", ".ci/run"])
def test_what_belongs_to_no_package_affects_all_tests(changed):
    assert sorted(affected([changed])) == all_tests()


def test_the_order_depends_on_the_seed_alone():
    one, again, other = (affected(["fedsim/tree.py"], seed) for seed in ("1", "1", "2"))
    assert one == again != other and set(one) == set(other)
    assert one[0] == other[0] == TESTS / "test_tree.py"  # what changed comes first


def test_a_text_that_no_test_reads_affects_nothing():
    assert affected(["CHANGELOG.md", ".ci/base", "tests/test_removed.py"]) == affected([]) == []


def test_every_test_is_affected_by_the_package_that_it_tests():
    assert {owner_of(test) for test in all_tests()} <= components() == importers().keys()
    assert importers()["systems"] >= {"experiment", "decentralized"} and "data" not in importers()["systems"]


def test_the_command_prints_all_tests_for_a_commit_that_is_not_there():
    command = [sys.executable, str(TESTS / "affected.py"), "0" * 40]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert printed == [test.relative_to(ROOT).as_posix() for test in all_tests()]
