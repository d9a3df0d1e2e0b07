"""Tests of `emnist62`, on files in TFF's layout that the tests write themselves, and on real ones where there are."""

import hashlib
import os
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest

import fedsim
from fedsim import datasets
from fedsim.datasets import _download, _emnist62

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "femnist"


def clients(dtype=np.uint8, sizes=(3, 1)):
    random = np.random.default_rng(len(sizes))
    pixels = [random.integers(256, size=(n, 28, 28)).astype(np.uint8) for n in sizes]
    return {
        f"f{i:04d}": {
            "pixels": p if dtype == np.uint8 else (p / 255).astype(dtype),
            "label": random.integers(62, size=len(p)).astype(np.int32),
        }
        for i, p in enumerate(pixels)
    }


def write(path, content):
    with h5py.File(path, "w") as file:
        for client_id, features in content.items():
            for name, array in features.items():
                file[f"examples/{client_id}/{name}"] = array
    return path


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "fed_emnist_train.h5", clients())
    write(folder / "fed_emnist_test.h5", clients(sizes=(1, 0)))
    return folder


def test_pixels_become_ink_and_labels_stay(folder):
    splits = datasets.load("emnist62", data=folder)
    for split, source in ((splits.train, clients()), (splits.test, clients(sizes=(1, 0)))):
        assert split.client_ids == list(source)
        assert list(split.columns) == ["x", "y"]
        assert split.columns["x"].dtype == np.uint8
        assert split.columns["y"].dtype == np.int32
        for client_id, features in source.items():
            np.testing.assert_array_equal(split[client_id]["x"], 255 - features["pixels"][..., None])
            np.testing.assert_array_equal(split[client_id]["y"], features["label"])
    fedsim.models.emnist_dense().check(splits.train)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_rounded_back_to_what_they_were(folder, dtype):
    write(folder / "fed_emnist_train.h5", clients(dtype))
    expected = np.concatenate([255 - features["pixels"][..., None] for features in clients().values()])
    np.testing.assert_array_equal(datasets.load("emnist62", data=folder).train.columns["x"], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixels": np.full((2, 28, 28), 1.5)}, r"'pixels' of client 'f0000' reaches from 1.5 to 1.5"),
        ({"pixels": np.full((2, 28, 28), np.nan)}, "reaches from nan"),
        ({"pixels": np.full((2, 28, 28), 9, np.int64)}, "'pixels' of client 'f0000' is int64"),
        ({"pixels": np.zeros((2, 784), np.uint8)}, r"'f0000' has pixels \[784\] and label \[\]"),
        ({"label": np.zeros((2, 1), np.int32)}, r"pixels \[28, 28\] and label \[1\]"),
        ({"label": np.zeros(2)}, "'label' of client 'f0000' is float64"),
    ],
)
def test_files_that_break_the_contract_are_refused(folder, change, message):
    good = {"pixels": np.zeros((2, 28, 28), np.uint8), "label": np.zeros(2, np.int32)}
    write(folder / "fed_emnist_train.h5", {"f0000": good | change})
    with pytest.raises(ValueError, match=f"fed_emnist_train.h5: .*{message}"):
        datasets.load("emnist62", data=folder)


def test_a_folder_without_exactly_one_file_of_each_kind_is_refused(folder):
    (folder / "other_train.h5").touch()
    with pytest.raises(FileNotFoundError, match=r"one file \*_train.h5 in .* found 2; .*fed_emnist_train.h5, other_tr"):
        datasets.load("emnist62", data=folder)
    (folder / "other_train.h5").unlink()
    (folder / "fed_emnist_test.h5").unlink()
    with pytest.raises(FileNotFoundError, match=r"\*_test.h5 in .* found 0; the folder holds fed_emnist_train.h5"):
        datasets.load("emnist62", data=folder)


def test_a_cut_file_is_named(folder):
    path = folder / "fed_emnist_test.h5"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"fed_emnist_test.h5 is truncated or damaged"):
        datasets.load("emnist62", data=folder)


@pytest.fixture
def archive(folder, tmp_path, monkeypatch):
    """The archive, as fetched by hand into the cache."""
    path = tmp_path / "cache" / "emnist62" / "fed_emnist.tar.bz2"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:bz2") as tar:
        for file in folder.iterdir():
            tar.add(file, file.name)
    monkeypatch.setattr(_emnist62, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_an_archive_fetched_by_hand_is_checked_extracted_and_kept_as_files(archive, tmp_path):
    for _ in range(2):
        splits = datasets.load("emnist62", cache=tmp_path / "cache")
        assert splits.train.num_examples == 4
        assert not archive.exists()


def test_an_archive_with_another_hash_is_refused(archive, tmp_path):
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"fed_emnist.tar.bz2 has SHA-256 .* expected .*: delete it"):
        datasets.load("emnist62", cache=tmp_path / "cache")


def test_without_a_network_one_line_names_the_two_ways_out(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise _download.DownloadError("ADDRESS cannot be reached (Name or service not known).")

    monkeypatch.setattr(_download, "fetch", no_network)
    with pytest.raises(datasets.DownloadError) as caught:
        datasets.load("emnist62", cache=tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert "cannot be reached" in message
    assert "--data DIR" in message
    assert _emnist62.URL in message
    assert str(tmp_path / "emnist62" / "fed_emnist.tar.bz2") in message


@pytest.mark.skipif(not REAL.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")
def test_real_files_load():
    splits = datasets.load("emnist62", data=REAL)
    assert (splits.train.num_clients, splits.train.num_examples, splits.test.num_examples) == (300, 41_495, 4_763)
    with h5py.File(REAL / "femnist_train.h5") as file:
        first = next(iter(file["examples"]))
        np.testing.assert_array_equal(splits.train[first]["x"][..., 0], 255 - file["examples"][first]["pixels"][()])
    # Paper, the greater part of an image, is 0.
    assert np.median(splits.train.columns["x"]) == 0
    fedsim.models.emnist_dense().check(splits.train)
    fedsim.models.emnist_dense().check(splits.test)
