"""Tests of the dataset registry."""

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
    both = FederatedData.from_arrays({"y": np.arange(3)}, sizes=[1, 2])
    return both, both


def test_unknown_names_are_refused_with_the_nearest():
    for ask in (datasets.load, datasets.describe):
        with pytest.raises(ValueError, match=r"no dataset 'emnist_62'. Did you mean 'emnist62'"):
            ask("emnist_62")
        with pytest.raises(ValueError, match=r"no dataset 'zzz'. There are digits, emnist62"):
            ask("zzz")


def test_a_loader_gets_the_folder_and_a_cache_of_its_own(tmp_path):
    calls = []

    @datasets.register("mine", num_classes=3)
    def load_mine(data, cache):
        calls.append((data, cache))
        return two_clients(data, cache)

    splits = datasets.load("mine", data=str(tmp_path), cache=tmp_path / "cache")
    datasets.load("mine", cache=str(tmp_path))
    assert calls == [(tmp_path, tmp_path / "cache" / "mine"), (None, tmp_path / "mine")]
    assert splits.train.num_clients == splits.test.num_clients == 2
    assert splits.description == datasets.describe("mine") == datasets.Description(name="mine", num_classes=3)
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
def test_the_cache_is_where_the_environment_says(monkeypatch, variables, expected):
    for name in ("FEDSIM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked = []
    datasets.register("mine")(lambda data, cache: asked.append(cache) or two_clients(data, cache))
    datasets.load("mine")
    assert asked == [Path(expected) / "mine"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No folder .*nowhere to read 'emnist62' from"):
        datasets.load("emnist62", data=tmp_path / "nowhere")


def test_a_taken_name_is_refused_and_the_same_function_again_is_not():
    datasets.register("mine")(two_clients)
    datasets.register("mine", task="again")(two_clients)
    assert datasets.describe("mine").task == "again"
    with pytest.raises(ValueError, match=r"a dataset 'digits' already, by fedsim.datasets._digits.load_digits"):
        datasets.register("digits")(two_clients)


def test_every_dataset_says_all_of_itself_and_its_model_fits():
    assert datasets.names() == ["digits", "emnist62"]
    for name in datasets.names():
        about = datasets.describe(name)
        assert about.name == name
        assert about.task
        assert about.source
        assert about.licence
        assert about.citation
        assert about.source_features
        model = fedsim.models.get(about.default_model)
        assert model.num_classes == about.num_classes
        for feature, accepted in model.features.items():
            specs = accepted if isinstance(accepted, tuple) else (accepted,)
            assert any(about.features[feature].startswith(f"{list(spec.shape)} {spec.dtype}") for spec in specs)
