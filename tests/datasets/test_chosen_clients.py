"""Tests of the option `clients` of datasets with natural clients, on small files that the tests write."""

import gzip
import json
import re
import struct
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import fedsim
from fedsim import datasets
from fedsim.commands import main
from fedsim.configuration import build_members
from fedsim.data import FederatedData
from fedsim.datasets import _chosen_clients
from fedsim.experiment import RunConfig, Settings


def write_hdf5(path, clients):
    with h5py.File(path, "w") as file:
        for client_id, features in clients.items():
            for name, column in features.items():
                text = isinstance(column, list)
                file.create_dataset(f"examples/{client_id}/{name}", data=column, dtype=h5py.string_dtype() if text else None)


def emnist(folder, num_clients=12, per_client=3, digits=False):
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        clients = {
            f"f{i:04d}": {"pixels": draw.random((per_client, 28, 28), np.float32), "label": draw.integers(10, size=per_client)}
            for i in range(num_clients)
        }
        write_hdf5(folder / f"fed_emnist_{'digitsonly_' if digits else ''}{split}.h5", clients)


def cifar100(folder):
    draw = np.random.default_rng(0)
    for split, num_clients in (("train", 10), ("test", 5)):
        images = {"image": draw.integers(256, size=(2, 32, 32, 3)).astype(np.uint8), "label": np.arange(2)}
        write_hdf5(folder / f"fed_cifar100_{split}.h5", {str(i): images for i in range(num_clients)})


def shakespeare(folder):
    for split in ("train", "test"):
        write_hdf5(folder / f"shakespeare_{split}.h5", {f"role{i}": {"snippets": [f"ab {i} {split}"]} for i in range(10)})


def stackoverflow(folder):
    def post(i):
        return {"tokens": [f"word{i} the"], "title": ["the"], "tags": ["java"]}

    write_hdf5(folder / "stackoverflow_train.h5", {f"{i:02d}": post(i) for i in range(20) if i % 10})
    write_hdf5(folder / "stackoverflow_test.h5", {f"{i:02d}": post(i) for i in range(0, 20, 2) if i % 10})
    write_hdf5(folder / "stackoverflow_held_out.h5", {f"{i:02d}": post(i) for i in range(0, 100, 10)})


def stackexchange(folder):
    users = [{"client_id": f"u{i}", "train": [{"tokens": "to be"}], "test": [{"tokens": "be"}]} for i in range(10)]
    lines = "".join(json.dumps(user) + "\n" for user in users)
    (folder / "stackexchange.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def mnist(folder):
    for file, n in (("train", 60), ("t10k", 20)):
        for kind, array in (
            ("images-idx3", np.zeros((n, 28, 28), np.uint8)),
            ("labels-idx1", np.arange(n, dtype=np.uint8) % 10),
        ):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{file}-{kind}-ubyte").write_bytes(head + array.tobytes())
    np.savez(folder / "mnist_writer_ids.npz", train_writer=np.arange(60) // 6, test_writer=np.arange(20) // 4)


# The dataset's name with options, the function that writes its files, and the number of clients in each split for clients=4.
NATURAL = {
    "emnist62": ("", emnist, {"train": 4, "test": 4}),
    "emnist10": ("", lambda folder: emnist(folder, digits=True), {"train": 4, "test": 4}),
    "cifar100": ("", cifar100, {"train": 4, "test": 2}),
    "shakespeare": ("length=4, ", shakespeare, {"train": 4, "test": 4}),
    "stackoverflow_word": ("vocabulary=2, length=3, ", stackoverflow, {"train": 4, "held_out": 2}),
    "stackoverflow_tag": ("vocabulary=2, tags=1, length=3, ", stackoverflow, {"train": 4, "held_out": 2}),
    "stackexchange": ("vocabulary=2, length=3, ", stackexchange, {"train": 4, "test": 4}),
    "mnist": ("partition='writers', ", mnist, {"train": 4, "test": 2}),
}


def splits_of(loaded):
    return {name: getattr(loaded, name) for name in ("train", "test", "held_out") if getattr(loaded, name) is not None}


def contents(population):
    return {client.client_id: [column.tobytes() for column in client.examples.values()] for client in population}


def test_every_natural_dataset_is_in_the_table():
    generated = {"synthetic", "synthetic_iid", "toy_regression", "emnist62_like", "stackoverflow_like"}
    partitioned = {"digits", "fashion_mnist", "cifar10", "tfds:NAME", "file:NAME"}
    assert set(datasets.names()) - generated - partitioned == set(NATURAL)


@pytest.mark.parametrize("name", NATURAL)
def test_the_seed_determines_which_clients_are_drawn(name, tmp_path):
    options, write, expected = NATURAL[name]
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder)

    def load(clients="", seed=0):
        text = f"{name}({options}{f'clients={clients}, ' if clients else ''}seed={seed})"
        return splits_of(datasets.load(text, data=folder, cache=tmp_path / "cache"))

    whole, some = load(), load(4)
    assert {split: some[split].num_clients for split in expected} == expected
    for split, population in some.items():
        everything, kept = contents(whole[split]), contents(population)
        assert kept.items() <= everything.items()
        assert list(kept) == [client_id for client_id in everything if client_id in kept]  # they keep the order of the file
        assert not isinstance(population.columns["x"], np.memmap)
    if name not in ("cifar100", "mnist"):
        both = [client_id for client_id in some["train"].client_ids if client_id in whole["test"]]
        assert list(some["test"].client_ids) == both
    assert [contents(split) for split in load(4).values()] == [contents(split) for split in some.values()]
    assert set(some["train"].client_ids) < set(load(5)["train"].client_ids)
    assert len({tuple(load(4, seed)["train"].client_ids) for seed in range(6)}) > 1
    assert contents(load(whole["train"].num_clients)["train"]) == contents(whole["train"])
    for clients in (whole["train"].num_clients + 1, 0, 1.5):
        with pytest.raises(ValueError, match=f"got clients={clients}"):
            datasets.load(f"{name}({options}clients={clients})", data=folder, cache=tmp_path / "cache")


def test_the_error_for_too_many_clients_says_how_many_there_are(tmp_path):
    emnist(tmp_path)
    with pytest.raises(ValueError, match=r"1 <= clients <= 12, got clients=13: 'emnist62' has 12 clients"):
        datasets.load("emnist62", clients=13, data=tmp_path, cache=tmp_path / "cache")


def test_a_split_without_any_drawn_client_is_an_error(tmp_path):
    stackoverflow(tmp_path)
    data = datasets.load("stackoverflow_word", vocabulary=2, data=tmp_path, cache=tmp_path / "cache")
    splits = {"train": data.train, "test": data.test}
    drawn = [
        _chosen_clients.choose_clients("mine", {"train": data.train}, 1, seed, tmp_path)["train"].client_ids[0]
        for seed in range(20)
    ]
    seed = next(seed for seed, client_id in enumerate(drawn) if client_id not in data.test)
    with pytest.raises(ValueError, match=rf"clients=1 and seed={seed} is in the split 'test' of 'mine': give more clients"):
        _chosen_clients.choose_clients("mine", splits, 1, seed, tmp_path)


def test_many_clients_are_written_to_the_cache_instead(tmp_path, monkeypatch):
    emnist(tmp_path)
    few = datasets.load("emnist62", clients=4, data=tmp_path, cache=tmp_path / "cache")
    monkeypatch.setattr(_chosen_clients, "_IN_MEMORY", 1000)
    mapped = datasets.load("emnist62", clients=4, data=tmp_path, cache=tmp_path / "cache")
    for split, other in zip(splits_of(few).values(), splits_of(mapped).values(), strict=True):
        assert contents(split) == contents(other) and isinstance(other.columns["x"], np.memmap)


def test_clients_of_data_in_memory_are_not_taken_from_the_cache(tmp_path, monkeypatch):
    """Nothing in the cache would tell data that differ from each other."""
    monkeypatch.setattr(_chosen_clients, "_IN_MEMORY", 0)
    for value in (1, 2):
        data = FederatedData.from_arrays({"x": np.full(6, value, np.int32)}, sizes=[2] * 3)
        chosen = _chosen_clients.choose_clients("mine", {"train": data}, 2, 0, tmp_path)["train"]
        assert chosen.num_clients == 2 and np.asarray(chosen.columns["x"]).tolist() == [value] * 4


def resident_bytes(path):
    """Returns how many bytes of a mapped file are in this process's memory, as the kernel reports it."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"^[0-9a-f]+-[0-9a-f]+ .* {re.escape(str(path))}\n(?:\w+:.*\n)*?Rss: +(\d+) kB", maps, re.MULTILINE)
    assert found
    return 1024 * sum(map(int, found))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")
def test_only_the_rows_of_the_drawn_clients_are_read(tmp_path):
    clients, rows = 64, 1 << 20
    columns = {"x": np.zeros((clients, rows), np.uint8), "y": np.zeros(clients, np.int32)}
    FederatedData.from_arrays(columns, sizes=[1] * clients).save(tmp_path / "train.h5")
    data = FederatedData.open(tmp_path / "train.h5")
    chosen = _chosen_clients.choose_clients("mine", {"train": data, "test": data}, 3, 0, tmp_path)
    assert chosen["train"].num_clients == 3 and chosen["train"].columns["x"].shape == (3, rows)
    assert resident_bytes(tmp_path / "train.h5") < 8 * rows  # 3 of 64 million bytes, plus the kernel's read-ahead
    assert np.asarray(data.columns["x"]).sum() == 0
    assert resident_bytes(tmp_path / "train.h5") > 60 * rows


@pytest.mark.slow
def test_a_run_with_fewer_clients(tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    emnist(folder)
    run = ["run", "--dataset", "emnist62(clients=5)", "--data", str(folder), "--model", "emnist_logistic", "--rounds", "1"]
    assert main([*run, "--clients", "2", "--folder", str(tmp_path / "run"), "--no-progress"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["dataset"] == "emnist62(clients=5)"
    assert fedsim.datasets.load(config["dataset"], data=folder).train.num_clients == 5


def test_runs_with_different_seeds_share_the_files_of_all_clients_and_not_of_drawn_ones(tmp_path):
    emnist(tmp_path)

    def populations(dataset):
        configs = [RunConfig(dataset=dataset, data=str(tmp_path), clients=2, seed=seed) for seed in (0, 1)]
        return [experiment.sampler.data for experiment in build_members(configs, Settings(execution="jit"))]

    first, second = populations("emnist62")
    assert first is second and first.num_clients == 12
    first, second = populations("emnist62(clients=5)")
    for seed, data in enumerate((first, second)):
        assert data.client_ids == fedsim.datasets.load("emnist62", data=tmp_path, clients=5, seed=seed).train.client_ids
    assert first.client_ids != second.client_ids
