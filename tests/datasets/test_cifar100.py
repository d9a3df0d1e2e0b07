"""Tests of `cifar100`, on files of both formats that the tests write."""

import h5py
import numpy as np
import pytest

from fedsim import datasets
from fedsim.data import FederatedData
from fedsim.formats import write_tff_sqlite


def clients(sizes):
    draw = np.random.default_rng(len(sizes))
    return {
        str(i): {
            "image": draw.integers(256, size=(n, 32, 32, 3)),
            "label": draw.integers(100, size=n),
            "coarse_label": draw.integers(20, size=n),
        }
        for i, n in enumerate(sizes)
    }


SPLITS = {"train": clients([3, 2, 1]), "test": clients([2, 2])}


def write_sqlite(folder, splits):
    write_tff_sqlite(
        {name: FederatedData.from_clients(content) for name, content in splits.items()}, folder / "cifar100.sqlite"
    )


def write_hdf5(folder, splits):
    for split, content in splits.items():
        with h5py.File(folder / f"fed_cifar100_{split}.h5", "w") as file:
            for client_id, features in content.items():
                file[f"examples/{client_id}/image"] = features["image"].astype(np.uint8)
                file[f"examples/{client_id}/label"] = features["label"]
                file[f"examples/{client_id}/coarse_label"] = features["coarse_label"]


@pytest.mark.parametrize("write", [write_sqlite, write_hdf5])
def test_every_format_gives_the_same_images(write, tmp_path):
    write(tmp_path, SPLITS)
    loaded = datasets.load("cifar100", data=tmp_path)
    other = {f"test_{client_id}": features for client_id, features in SPLITS["test"].items()}  # not the clients of train
    for split, content in ((loaded.train, SPLITS["train"]), (loaded.test, other)):
        assert {name: (c.dtype, c.shape[1:]) for name, c in split.columns.items()} == {
            "x": (np.uint8, (32, 32, 3)),
            "y": (np.int32, ()),
        }
        assert list(split.client_ids) == list(content)
        for client_id, features in content.items():
            np.testing.assert_array_equal(split[client_id]["x"], features["image"])
            np.testing.assert_array_equal(split[client_id]["y"], features["label"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": np.array([0, 100])}, "'label' of client '0' has values from 0 to 100: expected 0 to 99"),
        ({"image": np.full((2, 32, 32, 3), 256)}, "fed_cifar100_train.h5.*'image' of client '0' is int64"),
        ({"image": np.zeros((2, 24, 24, 3), np.uint8)}, r"\[24, 24, 3\] per example: expected .* \[32, 32, 3\]"),
        ({"image": np.zeros((2, 32, 32, 3), np.float32)}, "'image' of client '0' is float32"),
    ],
)
def test_files_that_break_the_contract_are_refused(change, message, tmp_path):
    write_hdf5(tmp_path, SPLITS)
    with h5py.File(tmp_path / "fed_cifar100_train.h5", "w") as file:
        for name, array in ({"image": np.zeros((2, 32, 32, 3), np.uint8), "label": np.zeros(2, np.int64)} | change).items():
            file[f"examples/0/{name}"] = array
    with pytest.raises(ValueError, match=message):
        datasets.load("cifar100", data=tmp_path)


def test_wrong_shapes_in_sqlite_are_refused(tmp_path):
    small = {"0": {"image": np.zeros((1, 24, 24, 3), np.int64), "label": np.zeros(1, np.int64)}}
    write_sqlite(tmp_path, {"train": small, "test": small})
    with pytest.raises(ValueError, match=r"cifar100.sqlite: .*client '0': .*image"):
        datasets.load("cifar100", data=tmp_path)
