"""Tests of `emnist62` and `emnist10`, on files of every format that the tests write, and on real files if available."""

import gzip
import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest

import fedsim
from fedsim import datasets
from fedsim.data import FederatedData
from fedsim.datasets import _download, _emnist
from fedsim.formats import write_fedjax_sqlite, write_tff_sqlite

SHARED = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
REAL = SHARED / "femnist"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")


def clients(dtype=np.uint8, sizes=(3, 1)):
    random = np.random.default_rng(len(sizes))
    pixels = [random.integers(256, size=(n, 28, 28)).astype(np.uint8) for n in sizes]
    return {
        f"f{i:04d}_00": {
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


def test_pixels_are_inverted_and_labels_are_not_changed(folder):
    splits = datasets.load("emnist62", data=folder)
    for split, source in ((splits.train, clients()), (splits.test, clients(sizes=(1, 0)))):
        assert list(split.client_ids) == list(source)
        assert list(split.columns) == ["x", "y"]
        assert split.columns["x"].dtype == np.uint8
        assert split.columns["y"].dtype == np.int32
        for client_id, features in source.items():
            np.testing.assert_array_equal(split[client_id]["x"], 255 - features["pixels"][..., None])
            np.testing.assert_array_equal(split[client_id]["y"], features["label"])
    fedsim.models.emnist_dense().check(splits.train)


def write_form(form, folder, content, split, *, digits=False):
    """Writes ``content`` in the format of FedJAX, TFF or LEAF."""
    infix = "digitsonly_" if digits else ""
    if form == "FedJAX's SQLite":
        named = {f"{hashlib.md5(name.encode()).hexdigest()[:16]}:{name}": features for name, features in content.items()}
        write_fedjax_sqlite(FederatedData.from_clients(named), folder / f"federated_emnist_{infix}{split}.sqlite")
    elif form == "TFF's HDF5":
        write(folder / f"fed_emnist_{infix}{split}.h5", content)
    elif form == "LEAF's JSON":
        (folder / split).mkdir()
        users = {
            name: {"x": features["pixels"].reshape(-1, 784).tolist(), "y": features["label"].tolist()}
            for name, features in content.items()
        }
        leaf = {"users": list(users), "num_samples": [len(user["y"]) for user in users.values()], "user_data": users}
        with gzip.open(folder / split / "all_data.json.gz", "wt") as file:
            json.dump(leaf, file)


FORMS = ["FedJAX's SQLite", "TFF's SQLite", "TFF's HDF5", "LEAF's JSON"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_images(form, tmp_path):
    splits = {"train": clients(np.float32), "test": clients(np.float32, sizes=(1, 2))}
    if form == "TFF's SQLite":
        files = {f"all_{split}": FederatedData.from_clients(content) for split, content in splits.items()}
        write_tff_sqlite(files, tmp_path / "emnist_all.sqlite")
    for split, content in splits.items():
        write_form(form, tmp_path, content, split)
    loaded = datasets.load("emnist62", data=tmp_path)
    for split, sizes in ((loaded.train, (3, 1)), (loaded.test, (1, 2))):
        assert sorted(split.client_ids) == ["f0000_00", "f0001_00"]
        for client_id, features in clients(sizes=sizes).items():
            np.testing.assert_array_equal(split[client_id]["x"], 255 - features["pixels"][..., None])
            np.testing.assert_array_equal(split[client_id]["y"], features["label"])


@pytest.mark.parametrize("form", FORMS)
def test_digits_are_read_from_their_own_files_or_selected_from_all_classes(form, tmp_path):
    everything = clients(np.float32, sizes=(40, 30))
    digits = {
        name: {f: column[features["label"] < 10] for f, column in features.items()} for name, features in everything.items()
    }
    assert all(0 < len(features["label"]) < 30 for features in digits.values())
    of_digits, of_all = tmp_path / "of_digits", tmp_path / "of_all"
    for folder, content, only in ((of_digits, digits, True), (of_all, everything, False)):
        if only and form == "LEAF's JSON":
            continue
        folder.mkdir()
        if form == "TFF's SQLite":
            prefix, data = ("digits_only" if only else "all"), FederatedData.from_clients(content)
            others = {f"{prefix}_other": data}  # a split that is not requested
            write_tff_sqlite({f"{prefix}_train": data, f"{prefix}_test": data} | others, folder / "emnist_all.sqlite")
            continue
        for split in ("train", "test"):
            write_form(form, folder, content, split, digits=only)
    for folder in (of_digits, of_all):
        if (form == "LEAF's JSON" and folder is of_digits) or (form == "TFF's SQLite" and folder is of_all):
            continue
        loaded = datasets.load("emnist10", data=folder)
        for client_id, features in digits.items():
            np.testing.assert_array_equal(loaded.train[client_id]["y"], features["label"])
            expected = 255 - np.rint(features["pixels"] * 255).astype(np.uint8)[..., None]
            np.testing.assert_array_equal(loaded.test[client_id]["x"], expected)
    if form in ("FedJAX's SQLite", "TFF's HDF5"):
        with pytest.raises(FileNotFoundError, match="No 'emnist62' in"):
            datasets.load("emnist62", data=of_digits)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_rounded_to_the_original_bytes(folder, dtype):
    write(folder / "fed_emnist_train.h5", clients(dtype))
    expected = np.concatenate([255 - features["pixels"][..., None] for features in clients().values()])
    np.testing.assert_array_equal(datasets.load("emnist62", data=folder).train.columns["x"], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixels": np.full((2, 28, 28), 1.5)}, r"'pixels' of client 'f0000' has values from 1.5 to 1.5"),
        ({"pixels": np.full((2, 28, 28), np.nan)}, "has values from nan"),
        ({"pixels": np.full((2, 28, 28), 9, np.int64)}, "'pixels' of client 'f0000' is int64"),
        ({"pixels": np.zeros((2, 784), np.uint8)}, r"'f0000' has pixels \[784\] and label \[\]"),
        ({"label": np.zeros((2, 1), np.int32)}, r"pixels \[28, 28\] and label \[1\]"),
        ({"label": np.zeros(2)}, "'label' of client 'f0000' is float64"),
        ({"label": np.array([3, 62])}, "'label' of client 'f0000' has values from 3 to 62: expected 0 to 61"),
        ({"label": np.array([-1, 3])}, "has values from -1 to 3"),
        ({"label": np.array([b"a", b"b"])}, r"'label' of client 'f0000' is (\|S1|object)"),
    ],
)
def test_files_that_break_the_contract_are_refused(folder, change, message, tmp_path):
    good = {"pixels": np.zeros((2, 28, 28), np.uint8), "label": np.zeros(2, np.int32)}
    write(folder / "fed_emnist_train.h5", {"f0000": good | change})
    with pytest.raises(ValueError, match=f"fed_emnist_train.h5: .*{message}"):
        datasets.load("emnist62", data=folder, cache=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [".lock"]


def test_a_folder_without_exactly_one_file_of_each_kind_is_refused(folder):
    (folder / "other_train.h5").touch()
    with pytest.raises(FileNotFoundError, match=r"one file \*_train.h5 in .* found 2: fed_emnist_train.h5, other_tr"):
        datasets.load("emnist62", data=folder)
    (folder / "other_train.h5").unlink()
    (folder / "fed_emnist_test.h5").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"which holds fed_emnist_train.h5: expected .*TFF's HDF5 \(\*_train.h5, \*_test.h5"
    ):
        datasets.load("emnist62", data=folder)


def test_the_error_for_a_truncated_file_names_it(folder):
    path = folder / "fed_emnist_test.h5"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"fed_emnist_test.h5 is truncated or damaged"):
        datasets.load("emnist62", data=folder)


@pytest.fixture
def archive(folder, tmp_path, monkeypatch):
    """Creates an archive that the user has downloaded into the cache."""
    path = tmp_path / "cache" / "emnist62" / "fed_emnist.tar.bz2"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:bz2") as tar:
        for file in folder.iterdir():
            tar.add(file, file.name)
    sources = _emnist._sources(False)
    known = _download.Download(sources[2].downloads[0].url, sources[2].downloads[0].files, digest(path))
    object.__setattr__(sources[2], "downloads", [known])
    monkeypatch.setattr(_emnist, "_sources", lambda digits: sources)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_manually_downloaded_archive_is_checked_and_extracted(archive, tmp_path):
    for _ in range(2):
        splits = datasets.load("emnist62", cache=tmp_path / "cache")
        assert splits.train.num_examples == 4
        assert not archive.exists()


def test_an_archive_with_another_hash_is_refused(archive, tmp_path):
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"fed_emnist.tar.bz2 has SHA-256 .* expected .*: delete it"):
        datasets.load("emnist62", cache=tmp_path / "cache")


def test_the_next_format_is_downloaded_if_the_first_is_refused(folder, tmp_path, monkeypatch):
    asked = []

    def fetch(url, path, **how):
        asked.append(url)
        if "fedjax" in url or "sqlite" in url:
            raise _download.DownloadError(f"{url} answers HTTP 404 Not Found.")
        with tarfile.open(path, "w:bz2") as tar:
            for file in folder.iterdir():
                tar.add(file, file.name)
        return path

    monkeypatch.setattr(_download, "fetch", fetch)
    assert datasets.load("emnist62", cache=tmp_path / "cache").train.num_examples == 4
    assert [url.rpartition("/")[2] for url in asked] == [
        "federated_emnist_train.sqlite",
        "emnist_all.sqlite.lzma",
        "fed_emnist.tar.bz2",
    ]


def test_without_a_network_the_error_is_one_line_with_two_remedies(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise _download.UnreachableError("ADDRESS cannot be reached (Name or service not known).")

    monkeypatch.setattr(_download, "fetch", no_network)
    with pytest.raises(datasets.DownloadError) as caught:
        datasets.load("emnist62", cache=tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.count("cannot be reached") == 1
    assert "--data DIR" in message
    assert "https://storage.googleapis.com/gresearch/fedjax/emnist/federated_emnist_train.sqlite" in message
    assert message.endswith(f"{tmp_path / 'emnist62'}.")


@needs_real
def test_real_files_load():
    splits = datasets.load("emnist62", data=REAL)
    assert (splits.train.num_clients, splits.train.num_examples, splits.test.num_examples) == (300, 41_495, 4_763)
    with h5py.File(REAL / "femnist_train.h5") as file:
        first = next(iter(file["examples"]))
        np.testing.assert_array_equal(splits.train[first]["x"][..., 0], 255 - file["examples"][first]["pixels"][()])
    # The background, which is most of an image, is 0.
    assert np.median(splits.train.columns["x"]) == 0
    fedsim.models.emnist_dense().check(splits.train)
    fedsim.models.emnist_dense().check(splits.test)


@needs_real
def test_real_files_of_fedjax_give_the_same_images_as_those_of_tff(tmp_path):
    for split in ("train", "test"):
        shutil.copy(SHARED / "formats" / "femnist_20_writers_fedjax.sqlite", tmp_path / f"federated_emnist_{split}.sqlite")
    fedjax, tff = datasets.load("emnist62", data=tmp_path).train, datasets.load("emnist62", data=REAL).train
    assert fedjax.num_clients == 20
    for client in fedjax:
        np.testing.assert_array_equal(client["x"], tff[client.client_id]["x"])
        np.testing.assert_array_equal(client["y"], tff[client.client_id]["y"])


@needs_real
def test_real_files_of_leaf_have_the_same_images_as_those_of_tff():
    """LEAF splits the images differently, so each image of a writer is searched among all images of that writer in TFF."""
    leaf, tff = datasets.load("emnist62", data=REAL / "leaf_sample"), datasets.load("emnist62", data=REAL)
    assert leaf.train.num_clients == 6
    for split in (leaf.train, leaf.test):
        for client in split:
            there = {
                (image.tobytes(), int(label))
                for part in (tff.train, tff.test)
                for image, label in zip(part[client.client_id]["x"], part[client.client_id]["y"], strict=True)
            }
            assert len(client) and {(x.tobytes(), int(y)) for x, y in zip(client["x"], client["y"], strict=True)} <= there


@needs_real
def test_real_digits_equal_those_in_the_files_with_all_classes():
    digits, everything = datasets.load("emnist10", data=REAL).train, datasets.load("emnist62", data=REAL).train
    assert digits.num_examples == (everything.columns["y"] < 10).sum() == 29_296
    assert sorted(set(np.unique(digits.columns["y"]))) == list(range(10))
