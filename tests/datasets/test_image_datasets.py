"""Tests of `mnist`, `fashion_mnist` and `cifar10`, on files that the tests write with every partition, and on real MNIST."""

import gzip
import hashlib
import os
import struct
from pathlib import Path

import jax
import numpy as np
import pytest
from fuzz import mutations

import fedsim
from fedsim import datasets, heterogeneity
from fedsim.data import FormatError
from fedsim.datasets import _cifar10, _download, _mnist
from fedsim.datasets._archive import read_arrays

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "mnist"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")

DRAW = np.random.default_rng(0)
LABELS = {"train": np.arange(200, dtype=np.uint8) % 10, "test": np.arange(100, dtype=np.uint8) % 10}
IMAGES = {split: DRAW.integers(256, size=(len(y), 28, 28)).astype(np.uint8) for split, y in LABELS.items()}


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for split, file in (("train", "train"), ("test", "t10k")):
        (folder / f"{file}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(IMAGES[split])))
        (folder / f"{file}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS[split])))
    return folder


def rows(population):
    """Returns every example as bytes of image and label, sorted, because a partition must not lose or repeat an example."""
    return sorted(x.tobytes() + bytes([y]) for x, y in zip(population.columns["x"], population.columns["y"], strict=True))


PARTITIONS = ["iid", "dirichlet", "dirichlet(alpha=0.1)", "dirichlet_balanced", "shards", "classes_per_client(classes=3)"]
PARTITIONS += ["quantity_skew(sigma=1)"]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_partition_keeps_every_image_with_its_label(partition, folder):
    name, options = fedsim.names.parse_call(partition)
    splits = datasets.load("mnist", data=folder, partition=name, clients=10, **options)
    for split, population in (("train", splits.train), ("test", splits.test)):
        assert population.num_clients == 10
        assert {n: (c.dtype, c.shape[1:]) for n, c in population.columns.items()} == {
            "x": (np.uint8, (28, 28, 1)),
            "y": (np.int32, ()),
        }
        assert rows(population) == sorted(x.tobytes() + bytes([y]) for x, y in zip(IMAGES[split], LABELS[split], strict=True))
    fedsim.models.get(splits.description.default_model).check(splits.train)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("test_fraction", [None, 0.3])
def test_clients_are_tested_on_the_labels_they_train_on(partition, test_fraction, folder):
    """Each label has the same number of examples in both splits, so each client's label shares are equal before rounding."""
    name, options = fedsim.names.parse_call(partition)
    splits = datasets.load("mnist", data=folder, partition=name, clients=5, test_fraction=test_fraction, **options)
    assert splits.train.client_ids == splits.test.client_ids
    assert heterogeneity.split_distance(splits.train, splits.test) < 0.4
    everything = sorted(rows(splits.train) + rows(splits.test))
    assert everything == sorted(
        x.tobytes() + bytes([y]) for split in LABELS for x, y in zip(IMAGES[split], LABELS[split], strict=True)
    )
    if test_fraction:
        both = splits.train.sizes + splits.test.sizes
        assert np.all(np.abs(splits.test.sizes - 0.3 * both) <= 0.5 + 1e-9)
    separately = fedsim.partitioners.dirichlet(LABELS["test"], clients=5, alpha=0.1, seed=0)
    drawn_twice = fedsim.FederatedData.from_partition({"y": LABELS["test"].astype(np.int32)}, separately)
    skewed = datasets.load("mnist(partition='dirichlet', alpha=0.1, clients=5)", data=folder)
    assert heterogeneity.split_distance(skewed.train, drawn_twice) > 0.8


def test_evaluation_uses_every_test_image_once(folder):
    splits = datasets.load("mnist(partition='dirichlet', alpha=0.1, clients=20)", data=folder)
    assert splits.test.sizes.min() == 0  # an empty client does not affect the averages
    model = fedsim.models.mnist_2nn()
    evaluation = fedsim.evaluate(model, model.init(jax.random.key(0)), splits.test)
    centrally = fedsim.FederatedData.from_arrays(
        {"x": IMAGES["test"][..., None], "y": LABELS["test"].astype(np.int32)}, sizes=[100]
    )
    expected = fedsim.evaluate(model, model.init(jax.random.key(0)), centrally)
    assert evaluation.overall["accuracy"] == expected.overall["accuracy"]


def test_a_user_s_arrays_are_partitioned_with_one_call():
    columns = {"x": np.arange(1000), "y": np.arange(1000) % 10}
    fractions = {"train": 0.7, "validation": 0.1, "test": 0.2}
    splits = datasets.partition_and_split(columns, "dirichlet", clients=10, alpha=0.3, seed=0, fractions=fractions)
    assert list(splits) == list(fractions)
    assert sorted(np.concatenate([split.columns["x"] for split in splits.values()])) == list(range(1000))
    assert heterogeneity.split_distance(splits["train"], splits["validation"]) < 0.3  # fractions of ten examples
    both = datasets.partition_splits({"train": columns, "validation": columns, "test": columns}, "shards", clients=10, seed=0)
    assert all(heterogeneity.split_distance(both["train"], both[split]) < 1e-12 for split in ("validation", "test"))
    numbers = {"x": np.arange(20), "y": np.linspace(0, 1, 20)}
    assert datasets.partition_splits({"a": numbers, "b": numbers}, "iid", clients=4, seed=0)["b"].sizes.tolist() == [5] * 4
    by_size = datasets.partition_and_split(numbers, "iid", clients=4, seed=0, fractions={"train": 0.6, "test": 0.4})
    assert by_size["test"].sizes.tolist() == [2] * 4
    with pytest.raises(ValueError, match=r"split 'test' has no column 'label', only \['y'\]"):
        datasets.partition_splits({"test": {"y": [1]}}, "iid", clients=1, seed=0, labels="label")
    with pytest.raises(ValueError, match="no column 'label'"):
        datasets.partition_and_split(columns, "iid", clients=1, seed=0, labels="label", fractions=fractions)


def test_options_are_passed_to_the_partitioner(folder):
    def spread(name):
        return heterogeneity.label_emd(datasets.load(name, data=folder).train)

    assert spread("mnist(partition='dirichlet', alpha=0.05, clients=10)") > 1.2
    assert spread("mnist(partition='dirichlet', alpha=100, clients=10)") < 0.6
    classes = datasets.load("mnist(partition='classes_per_client', classes=3, clients=10)", data=folder).train
    assert {len(set(client["y"])) for client in classes} == {3}
    by_seed = [datasets.load("mnist", data=folder, clients=10, seed=seed).train.columns["y"].tolist() for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1] != by_seed[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("partition='dirichlt'", "There is no partition 'dirichlt'. Did you mean 'dirichlet'"),
        ("partition='iid', alpha=1", "The partition 'iid' has no option 'alpha'. It has no options."),
        ("partition='dirichlet', alhpa=1", "no option 'alhpa'. Did you mean 'alpha'"),
        ("partition='dirichlet', alpha=-1", "Expected alpha > 0"),
        ("clients=1000", "1000"),
        ("clients=1.5", "Expected clients >= 1, or None, got clients=1.5: give a positive whole number"),
        ("test_fraction=1", "Expected 0 < test_fraction < 1, or None, got test_fraction=1"),
        ("partition='writers', test_fraction=0.3", "takes no test_fraction"),
    ],
)
def test_invalid_partitions_are_refused(options, message, folder):
    with pytest.raises(ValueError, match=message):
        datasets.load(f"mnist({options})", data=folder)


def test_files_may_be_decompressed_and_have_a_dot_in_their_name(folder):
    for path in list(folder.iterdir()):
        name = path.name.removesuffix(".gz").replace("-idx", ".idx" if "images" in path.name else "-idx")
        (folder / name).write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert datasets.load("fashion_mnist", data=folder, clients=10).train.num_examples == 200


def test_writers_are_clients(folder):
    writers = {"train": np.arange(200) // 50 + 7, "test": np.arange(100) // 50}
    with pytest.raises(FileNotFoundError, match=r"needs .*mnist_writer_ids.npz, with arrays train_writer"):
        datasets.load("mnist(partition='writers')", data=folder)
    np.savez(folder / "mnist_writer_ids.npz", train_writer=writers["train"], test_writer=writers["test"])
    splits = datasets.load("mnist(partition='writers')", data=folder)
    assert splits.train.sizes.tolist() == [50] * 4 and splits.test.num_clients == 2
    assert list(splits.test.client_ids) == ["0", "1"]
    assert datasets.load("mnist(partition='writers', clients=2)", data=folder).train.num_clients == 2
    np.testing.assert_array_equal(splits.train["8"]["x"][..., 0], IMAGES["train"][50:100])
    np.savez(folder / "mnist_writer_ids.npz", train_writer=writers["train"] - 7, test_writer=writers["test"])
    numbered = datasets.load("mnist(partition='writers')", data=folder).test  # Both parts have writers from 0, who are others.
    assert list(numbered.client_ids) == ["test_0", "test_1"] and rows(numbered) == rows(splits.test)
    np.savez(folder / "mnist_writer_ids.npz", train_writer=writers["test"], test_writer=writers["test"])
    with pytest.raises(ValueError, match=r"mnist_writer_ids.npz: train_writer has shape \[100\]: expected \[200\]"):
        datasets.load("mnist(partition='writers')", data=folder)
    (folder / "mnist_writer_ids.npz").write_bytes(b"no archive")
    with pytest.raises(fedsim.data.FormatError, match=r"mnist_writer_ids.npz does not hold the arrays"):
        datasets.load("mnist(partition='writers')", data=folder)


def test_inconsistent_files_are_refused(folder):
    path = folder / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(LABELS["test"][:-1])))
    with pytest.raises(fedsim.data.FormatError, match=r"t10k-images-idx3-ubyte.gz has 100 images and .* 99 labels"):
        datasets.load("mnist", data=folder)
    path.write_bytes(gzip.compress(idx(LABELS["test"] + 1)))
    with pytest.raises(fedsim.data.FormatError, match=r"data: Feature 'labels' of split 'test' has values from 1 to 10"):
        datasets.load("mnist", data=folder)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(fedsim.data.FormatError, match=r"t10k-labels-idx1-ubyte.gz"):
        datasets.load("mnist", data=folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"No 'mnist' in .*: expected idx files \(train-images-idx3-ubyte.gz, "):
        datasets.load("mnist", data=folder)


def test_downloads_are_those_that_tensorflow_datasets_lists(folder, tmp_path, monkeypatch):
    asked = []

    def fetch(url, path, *, sha256, num_bytes):
        asked.append((url, num_bytes, sha256))
        path.write_bytes((folder / path.name).read_bytes())
        return path

    monkeypatch.setattr(_download, "fetch", fetch)
    assert datasets.load("mnist", cache=tmp_path, clients=10).train.num_examples == 200
    listed = pytest.importorskip("tensorflow_datasets").__path__[0] + "/url_checksums/mnist.txt"
    assert set(asked) == {(url, int(size), sha) for url, size, sha, _ in map(str.split, Path(listed).read_text().splitlines())}
    assert datasets.is_cached("mnist", tmp_path)
    assert [about.num_bytes for about in _mnist._source(_mnist._FASHION_URL, _mnist._FASHION).downloads] == [
        26421880,
        29515,
        4422102,
        5148,
    ]


@needs_real
def test_real_mnist_by_its_writers_and_by_shards():
    by_writer = datasets.load("mnist(partition='writers')", data=REAL)
    assert (by_writer.train.num_clients, by_writer.test.num_clients) == (539, 297)
    assert (by_writer.train.num_examples, by_writer.test.num_examples) == (60_000, 10_000)
    by_shards = datasets.load("mnist", data=REAL)
    assert by_shards.train.sizes.tolist() == [600] * 100
    assert max(len(set(client["y"])) for client in by_shards.train) <= 4
    digest = hashlib.sha256(b"".join(rows(by_writer.train))).digest()
    assert digest == hashlib.sha256(b"".join(rows(by_shards.train))).digest()
    assert np.median(by_writer.train.columns["x"]) == 0  # the background


def cifar_record(image, label):
    """A record as the dataset's web page defines it: the label, then 1024 red, 1024 green and 1024 blue values, row by row."""
    return bytes([label]) + b"".join(image[:, :, channel].tobytes() for channel in range(3))


@pytest.fixture
def cifar(tmp_path):
    folder = tmp_path / "cifar"
    folder.mkdir()
    pictures = DRAW.integers(256, size=(6, 20, 32, 32, 3)).astype(np.uint8)
    for i, name in enumerate(_cifar10._ALL):
        (folder / name).write_bytes(b"".join(cifar_record(image, j % 10) for j, image in enumerate(pictures[i])))
    return folder, pictures


def test_cifar10_has_color_channels_last(cifar):
    folder, pictures = cifar
    splits = datasets.load("cifar10(partition='iid', clients=5)", data=folder)
    there = {x.tobytes(): int(y) for x, y in zip(splits.train.columns["x"], splits.train.columns["y"], strict=True)}
    assert there == {image.tobytes(): j % 10 for part in pictures[:5] for j, image in enumerate(part)}
    assert {x.tobytes() for x in splits.test.columns["x"]} == {image.tobytes() for image in pictures[5]}
    fedsim.models.get(splits.description.default_model).check(splits.train)


def test_the_error_for_a_damaged_file_of_cifar10_names_it(cifar):
    folder, _ = cifar
    path = folder / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(fedsim.data.FormatError, match=r"data_batch_3.bin has 61459 bytes, which is not a multiple of 3073"):
        datasets.load("cifar10", data=folder)
    path.write_bytes(b"\xff" + content[1:])
    with pytest.raises(fedsim.data.FormatError, match=r"data_batch_3.bin: Feature 'label' .* has values from 0 to 255"):
        datasets.load("cifar10", data=folder)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_a_partition_is_checked_before_anything_is_downloaded(name, tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("asked the network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    with pytest.raises(ValueError, match="There is no partition 'dirichlt'"):
        datasets.load(f"{name}(partition='dirichlt')", cache=tmp_path)


def test_a_damaged_file_of_arrays_raises_only_errors_that_name_it(tmp_path):
    path = tmp_path / "whole.npz"
    np.savez_compressed(path, x=np.arange(50), y=np.ones([5, 3]))
    x, y = read_arrays(path, "x", "y")
    assert x.tolist() == list(range(50)) and y.shape == (5, 3)
    messages = []
    for damaged in [*mutations(path.read_bytes(), seed=0, count=200), b"", b"text", b"\x93NUMPY"]:
        (tmp_path / "damaged.npz").write_bytes(damaged)
        try:
            read_arrays(tmp_path / "damaged.npz", "x", "y")
        except FormatError as error:
            messages.append(str(error))
    assert len(messages) > 100 and all("damaged.npz does not hold the arrays x, y" in message for message in messages)
    with pytest.raises(FormatError, match="arrays x, z"):
        read_arrays(path, "x", "z")
