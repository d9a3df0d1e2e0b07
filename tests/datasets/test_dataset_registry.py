"""Tests of the dataset registry."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import fedsim
from fedsim import datasets
from fedsim.data import FederatedData
from fedsim.datasets import _registry


@pytest.fixture(autouse=True)
def registry_of_this_test(monkeypatch):
    monkeypatch.setattr(_registry, "_LOADERS", dict(_registry._LOADERS))


def two_clients(data, cache):
    """A dataset of two clients and three examples."""
    both = FederatedData.from_arrays({"y": np.arange(3)}, sizes=[1, 2])
    return {"train": both, "test": both}


def test_the_error_for_an_unknown_name_suggests_similar_names():
    for ask in (datasets.load, datasets.describe):
        with pytest.raises(ValueError, match=r"no dataset 'emnist_62'. Did you mean 'emnist62'"):
            ask("emnist_62")
        with pytest.raises(ValueError, match=r"no dataset 'zzz'. There are .*digits, .*emnist62"):
            ask("zzz")


def test_a_loader_gets_the_folder_and_its_own_cache_folder(tmp_path):
    calls = []

    @datasets.register("mine", num_classes=3)
    def load_mine(data, cache):
        calls.append((data, cache))
        return two_clients(data, cache)

    splits = datasets.load("mine", data=str(tmp_path), cache=tmp_path / "cache")
    datasets.load("mine", cache=str(tmp_path))
    assert calls == [(tmp_path, tmp_path / "cache" / "mine"), (None, tmp_path / "mine")]
    assert splits.train.num_clients == splits.test.num_clients == 2
    assert datasets.describe("mine") == datasets.Description(name="mine", num_classes=3)
    assert splits.description == datasets.Description(name="mine", num_classes=3, features={"y": "[] int64"})
    assert "mine" in datasets.names()
    assert load_mine.__name__ == "load_mine"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FEDSIM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/fedsim"),
        ({"HOME": "/c"}, "/c/.cache/fedsim"),
        ({"FEDSIM_CACHE": "~/d", "HOME": "/c"}, "/c/d"),
    ],
)
def test_environment_variables_determine_the_cache_folder(monkeypatch, variables, expected):
    for name in ("FEDSIM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = []
    datasets.register("mine")(lambda data, cache: asked.append(cache) or two_clients(data, cache))
    datasets.load("mine")
    assert asked == [Path(expected) / "mine"]


def test_the_error_for_a_missing_folder_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No folder .*nowhere to read 'emnist62' from"):
        datasets.load("emnist62", data=tmp_path / "nowhere")


def test_a_registered_name_is_refused_unless_the_function_is_the_same():
    datasets.register("mine")(two_clients)
    datasets.register("mine", task="again")(two_clients)
    assert datasets.describe("mine").task == "again"
    with pytest.raises(ValueError, match=r"already a dataset 'digits', loaded by fedsim.datasets._digits.load_digits"):
        datasets.register("digits")(two_clients)


def test_every_dataset_is_described_completely_and_its_model_fits():
    assert {"digits", "emnist62"} <= set(datasets.names())
    for name in datasets.names():
        about = datasets.describe(name)
        assert about.name == name
        assert about.task and about.source and about.licence and about.citation and about.source_features, name
        assert set(about.options) == set(about.defaults), name
        if about.default_model is None:
            continue
        model = fedsim.models.get(about.default_model)
        assert about.num_classes in (None, model.num_classes), name
        stated = {feature: re.match(r"\[(.*?)\] (\w+) \w", text).groups() for feature, text in about.features.items()}
        columns = {
            feature: np.zeros((1, *(int(size) for size in shape.split(",") if size)), dtype)
            for feature, (shape, dtype) in stated.items()
        }
        model.check(FederatedData.from_arrays(columns, sizes=[1]))


@pytest.mark.parametrize(
    ("name", "classes", "shape"),
    [
        ("stackoverflow_word(vocabulary=20000, length=30, oov_buckets=3)", 20_006, 30),
        ("stackexchange(vocabulary=7)", 11, 20),
        ("shakespeare(length=40)", 90, 40),
        ("stackoverflow_tag(length=9, tags=5)", None, 9),
    ],
)
def test_a_description_is_that_of_the_options(name, classes, shape):
    about = datasets.describe(name)
    assert about.num_classes == classes and about.features["x"].startswith(f"[{shape}] ")
    assert not any("{" in text for text in (about.task, about.default_model, *about.features.values()))


def test_the_number_of_classes_is_not_known_without_an_option_that_must_be_given():
    def loader(data, cache, *, vocabulary, other=2):
        raise NotImplementedError

    datasets.register("needs_a_vocabulary", num_classes=lambda *, vocabulary, other: vocabulary + other)(loader)
    assert datasets.describe("needs_a_vocabulary").num_classes is None
    assert datasets.describe("needs_a_vocabulary(vocabulary=5)").num_classes == 7


def sized(data, cache, *, size=3, kind="plain", share=0.5, three=False):
    train = FederatedData.from_arrays({"x": np.zeros((size, 2), np.uint8)}, sizes=[size])
    return {"train": train, "test": train} | ({"held_out": train} if three else {})


def test_options_are_keywords_or_part_of_the_name():
    datasets.register("sized", options={"size": "how many"})(sized)
    assert datasets.load("sized").train.num_examples == 3
    assert datasets.load("sized", size=4).train.num_examples == 4
    assert datasets.load("sized(size=5, share=1)").train.num_examples == 5
    assert datasets.load("sized(size=5)", kind="other").train.num_examples == 5
    assert datasets.describe("sized(size=5)").defaults == {"size": 3, "kind": "plain", "share": 0.5, "three": False}
    assert datasets.load("sized").held_out is None
    assert datasets.load("sized(three=True)").held_out.num_examples == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "sized(siez=3)",
            r"dataset 'sized' has no option 'siez'. Did you mean 'size'\? Its options are: size, kind, share, three.",
        ),
        ("plain(alpha=1)", "dataset 'plain' has no option 'alpha'. It has no options."),
        ("sized(data='.')", "no option 'data'"),
        ("sized(size=1.5)", "option size of the dataset 'sized' is a whole number, as its default 3 is: got size=1.5"),
        ("sized(size=True)", "is a whole number"),
        ("sized(share='half')", "share .* is a number, .* got share='half'"),
        ("sized(three=1)", "three .* is True or False"),
        ("sized(kind=other)", r"kind=other is not a literal: quote it, kind='other'"),
        ("sized(size=int(3))", r"size=int\(3\) is not a literal: write the value out"),
        ("sized(size=1, size=2)", "size is given twice"),
        ("sized(3)", "the value 3 has no option name: write name"),
        ("sized(**{'size': 3})", r"is not a literal"),
        ("sized(size=)", "Cannot read the options of"),
        ("sized(size=3", "is not closed"),
        ("sized)", "Cannot read the options"),
        ("(size=3)", "Cannot read the options"),
        ("", "There is no dataset ''"),
    ],
)
def test_invalid_options_are_refused(name, message):
    datasets.register("sized")(sized)
    datasets.register("plain")(two_clients)
    for ask in (datasets.load, datasets.describe):
        with pytest.raises(ValueError, match=message):
            ask(name)


def test_an_option_given_twice_is_refused():
    datasets.register("sized")(sized)
    with pytest.raises(ValueError, match=r"'size' is given twice, in 'sized\(size=3\)' and as an argument"):
        datasets.load("sized(size=3)", size=3)


def test_a_family_gets_the_text_after_its_prefix():
    asked = []

    @datasets.register("zoo:NAME", task="animals")
    def load_zoo(data, cache, *, name, size=3):
        asked.append((name, cache.name))
        return sized(data, cache, size=size)

    assert datasets.load("zoo:cat/big(size=4)", cache="c").train.num_examples == 4
    assert asked == [("cat/big", "zoo_cat_big")]
    assert datasets.describe("zoo:cat").name == "zoo:cat" and datasets.describe("zoo:cat").defaults == {"size": 3}
    with pytest.raises(ValueError, match="no option 'name'"):
        datasets.load("zoo:cat(name='dog')")
    for name in ("a:b", "a(b)"):
        with pytest.raises(ValueError, match="without parentheses and colons"):
            datasets.register(name)


def test_a_loader_in_a_user_s_file(tmp_path):
    folder = tmp_path / "my data (2)"
    folder.mkdir()
    file = folder / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "from fedsim import FederatedData, datasets\n"
        "def load(data, cache, *, size=2):\n"
        "    'Zeros.'\n"
        "    both = FederatedData.from_arrays({'x': np.zeros((size, 3), np.float32)}, sizes=[size])\n"
        "    return {'train': both, 'test': both}\n"
        "@datasets.register('mine_registered', licence='mine')\n"
        "def registered(data, cache):\n"
        "    return load(data, cache)\n"
        "number = 3\n"
    )
    splits = datasets.load(f"{file}:load(size=5)")
    assert splits.train.num_examples == 5
    assert splits.description.task == "Zeros." and splits.description.features == {"x": "[3] float32"}
    assert datasets.load(f"{file}:load").train.num_examples == 2
    assert datasets.describe(f"{file}:registered").licence == "mine"
    assert datasets.load(f"{file}:registered").description.name == "mine_registered"
    assert datasets.load("mine_registered").train.num_examples == 2
    with pytest.raises(ValueError, match=r"has no option 'sise'. Did you mean 'size'"):
        datasets.load(f"{file}:load(sise=5)")
    with pytest.raises(ValueError, match=r"mine.py has no 'laod'. Did you mean 'load'"):
        datasets.load(f"{file}:laod")
    with pytest.raises(ValueError, match=r"is not a function with the parameters \(data, cache"):
        datasets.load(f"{file}:number")
    with pytest.raises(ValueError, match="there is no file"):
        datasets.load(f"{tmp_path}/no.py:load")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((1, 2), "'mine' returned tuple: expected {'train'"),
        ({"train": two_clients(None, None)["train"]}, r"no split 'test', only \['train'\]: return both"),
        (two_clients(None, None) | {"heldout": 1}, "returned .heldout.. Did you mean 'held_out'"),
        ({"train": 1, "test": 2}, "returned int as train: expected FederatedData"),
    ],
)
def test_the_result_of_a_loader_is_checked(returned, message):
    datasets.register("mine")(lambda data, cache: returned)
    with pytest.raises(ValueError, match=message):
        datasets.load("mine")


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "train.sqlite").touch()
    with pytest.raises(ValueError, match=r"Expected data to be a folder .*train.sqlite is a file: give its folder"):
        datasets.load("emnist62", data=tmp_path / "train.sqlite")


def test_a_loader_with_other_parameters_is_refused():
    datasets.register("nothing")(lambda: two_clients(None, None))
    with pytest.raises(ValueError, match=r"loader of 'nothing' must take \(data, cache, ...options\), and it takes \(\)"):
        datasets.load("nothing")
    datasets.register("needs")(lambda data, cache, *, size: two_clients(data, cache))
    with pytest.raises(ValueError, match=r"'needs' needs the option size: write needs\(size=...\)"):
        datasets.load("needs")
    assert datasets.load("needs(size=3)").train.num_clients == 2


def test_a_file_may_be_both_imported_and_given_by_its_path(tmp_path):
    """Its functions are the same under two module names; a function with the same name in another file is a different one."""
    source = (
        "from fedsim import datasets\n@datasets.register('both')\ndef load(data, cache):\n    return datasets.load('digits')\n"
    )
    for name in ("mine", "yours"):
        (tmp_path / f"{name}.py").write_text(source)
    runpy.run_path(str(tmp_path / "mine.py"), run_name="imported")
    assert datasets.describe(f"{tmp_path}/mine.py:load").name == "both"
    with pytest.raises(ValueError, match="There is already a dataset 'both'"):
        datasets.describe(f"{tmp_path}/yours.py:load")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def load(data): return {}", "not a function with the parameters"),
        ("def load(data, cache, *, size): return {}", r"needs the option size: write .*load\(size=...\)"),
        ("def load(data, cache): return {1: 2, 'train': 3}", "no split 'test'"),
        ("def load(data, cache)", "Cannot import .*expected ':'"),
    ],
)
def test_errors_in_a_user_s_loader_are_reported(tmp_path, body, message):
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(ValueError, match=message):
        datasets.load(f"{tmp_path}/mine.py:load")


def test_a_family_needs_a_name():
    with pytest.raises(ValueError, match="write tfds:NAME"):
        datasets.describe("tfds:")
