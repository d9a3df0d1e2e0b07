"""The command `fedsim datasets`: the table, descriptions and pictures, and conversions between file formats."""

from __future__ import annotations

import h5py
import pytest

import fedsim
from fedsim.commands import main
from fedsim.datasets import _registry


def test_datasets_are_listed_in_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["datasets"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "CLIENTS", "EXAMPLES", "SIZE", "CACHED", "LICENCE", "TASK"]
    rows = {row.split()[0]: row for row in rows if row}
    assert set(fedsim.datasets.names()) <= set(rows)
    assert "100  " in rows["digits"] and "1,439 + 358" in rows["digits"] and "CC BY 4.0" in rows["digits"]
    assert "500 + 100" in rows["cifar100"] and "153 MB" in rows["cifar100"] and " no " in rows["cifar100"]


def test_datasets_fit_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["datasets"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert set(fedsim.datasets.names()) <= set(text.splitlines())
    words = " ".join(text.split())
    assert "digits " + fedsim.datasets.describe("digits").task in words
    assert "100 clients, 1,439 + 358 examples; download: none; licence: CC BY 4.0" in words


def test_a_dataset_is_described_and_drawn(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    picture = tmp_path / "digits.png"
    assert main(["datasets", "describe", "digits", "--picture", str(picture)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    about = fedsim.datasets.describe("digits")
    for line in (about.task, about.source, about.licence, about.citation, "100 clients, 1,439 examples", "digits_dense"):
        assert line in text
    for features in (about.features, about.source_features):
        assert all(f"{name}: {meaning}" in text for name, meaning in features.items())
    assert "examples per client: 2 to 42" in text and "effective number of classes per client 4.2" in text
    assert "distance between a client's label shares in train and test 0.65" in text
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


def test_an_unavailable_dataset_is_described_without_network(capsys, monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("asked the network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    assert main(["datasets", "describe", "cifar100"]) == 0
    text = capsys.readouterr().out
    assert "The dataset is not available." in text and "153 MB, once, into the cache" in text and "Statistics" not in text


def test_a_user_s_dataset_is_described_with_its_options(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(_registry, "_LOADERS", dict(_registry._LOADERS))
    (tmp_path / "mine.py").write_text(
        "from fedsim import datasets\n"
        "@datasets.register('my_digits', task='mine', options={'clients': 'how many are kept'}, download_bytes=0)\n"
        "def load(data, cache, *, clients=100):\n"
        "    digits = datasets.load('digits')\n"
        "    ids = digits.train.client_ids[:clients]\n"
        "    train, test = digits.train.select(ids), digits.test.select(ids)\n"
        "    return {'train': train, 'test': test, 'validation': test.select(ids[:3])}\n"
    )
    assert main(["datasets", "describe", f"{tmp_path}/mine.py:load(clients=7)"]) == 0
    text = capsys.readouterr().out
    assert "clients=100: how many are kept" in text and "x: [8, 8, 1] uint8" in text
    assert "train     7 clients" in text and "validation 3 clients" in text
    # Unknown facts are omitted.
    assert "licence" not in text and "source" not in text and "\n\n\n" not in text


def test_the_printed_command_can_be_copied_into_a_shell(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("def load(data, cache):\n    'Mine.'\n")
    for name, expected in (
        ("mnist(seed=1)", 'To download and draw it: fedsim datasets describe "mnist(seed=1)" --picture FILE.png'),
        (
            f"{tmp_path}/mine.py:load",
            f"To load and draw it: fedsim datasets describe {tmp_path}/mine.py:load --picture FILE.png",
        ),
        ("tfds:NAME", "tfds:NAME is a pattern for many datasets: replace NAME by the name of one."),
    ):
        assert main(["datasets", "describe", name]) == 0
        text = capsys.readouterr().out
        assert expected in text and ("download" in text) == ("mine" not in name)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["describe", "digit"], "There is no dataset 'digit'. Did you mean 'digits'?"),
        (["describe", "shakespeare(alpha=1)"], "has no option 'alpha'"),
        (["describe", "emnist62", "--data", "/nowhere"], "No folder /nowhere"),
        (["describe", "digits", "--picture", "/nowhere/a.png"], "There is no folder /nowhere"),
        (["describe", "digits", "--picture", "digits.bmp"], "end in .png, .pdf, .svg, got 'digits.bmp'"),
        (["describe", "digits.py"], "There is no dataset 'digits.py'. For an object in a file, give digits.py:NAME."),
    ],
)
def test_wrong_names_of_datasets_print_one_line_and_exit_with_status_2(arguments, expected, capsys):
    assert main(["datasets", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedsim: error: ") and error.count("\n") == 1 and expected in error


def test_files_are_converted_to_another_format_and_back(capsys, tmp_path):
    (tmp_path / "a.csv").write_text("user,y\nann,1\nbob,2\nann,3\n")
    steps = [["a.csv", "a.h5", "--client", "user"], ["a.h5", "a.sqlite", "--format", "fedjax_sqlite"], ["a.sqlite", "b.h5"]]
    for source, target, *options in steps:
        assert main(["datasets", "convert", str(tmp_path / source), str(tmp_path / target), *options]) == 0
        assert f"Wrote {tmp_path / target}" in capsys.readouterr().out
    population = fedsim.FederatedData.open(tmp_path / "b.h5")
    assert {client.client_id: client["y"].tolist() for client in population} == {"ann": [1, 3], "bob": [2]}


def test_a_converted_file_is_verified_and_a_flipped_bit_is_found(capsys, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("user,y\nann,1\nbob,2\nann,3\n")
    packed = tmp_path / "a.h5"
    assert main(["datasets", "convert", str(tmp_path / "a.csv"), str(packed), "--client", "user"]) == 0
    capsys.readouterr()
    assert main(["datasets", "verify", str(packed)]) == 0
    assert "is intact" in capsys.readouterr().out
    content = bytearray(packed.read_bytes())
    with h5py.File(packed) as file:
        content[file["columns/y"].id.get_offset()] ^= 4
    packed.unlink()
    packed.write_bytes(content)
    monkeypatch.setattr("fedsim.data._packed.CHECKED_BYTES", 0)
    assert main(["datasets", "verify", str(packed)]) == 2
    error = capsys.readouterr().err
    assert f"{packed} is damaged: checksums differ in column 'y'. Delete it" in error and error.count("\n") == 1


def test_a_file_without_checksums_is_verified_as_far_as_possible(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(fedsim.FederatedData, "verify", lambda path: False)
    assert main(["datasets", "verify", str(tmp_path / "a.h5")]) == 1
    assert "has no checksums of its columns" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.csv", "a.h5"], "needs client="),
        (["a.csv", "a.xyz", "--client", "user"], "Expected a target that ends in .csv, .h5"),
        (["no.csv", "a.h5"], "no.csv"),
        (["b.h5", "a.h5"], "b.h5"),
    ],
)
def test_errors_of_conversions_are_one_line_and_leave_no_file(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("user,y\nann,1\n")
    (tmp_path / "b.h5").write_bytes(b"\x89HDF\r\n\x1a\n and no more")
    assert main(["datasets", "convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedsim: error: ") and error.count("\n") == 1 and expected in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.h5"]


def test_help_of_datasets(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["datasets", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "describe" in text and "convert" in text and "verify" in text
    with pytest.raises(SystemExit) as stop:
        main(["datasets", "descibe", "digits"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "Unrecognized options: descibe" in error and "list, describe, convert, verify" in error
