"""Tests of the text datasets on small files of every format, and on real files if available."""

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from fedsim import datasets
from fedsim.data import FederatedData, FormatError
from fedsim.datasets import _download
from fedsim.formats import write_fedjax_sqlite, write_tff_sqlite

SHARED = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_real = pytest.mark.skipif(not SHARED.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")


def texts(*values):
    array = np.empty(len(values), object)
    array[:] = [value if isinstance(value, bytes) else value.encode() for value in values]
    return array


def write_fedjax(folder, name, splits):
    for split, clients in splits.items():
        named = {f"{hashlib.md5(client.encode()).hexdigest()[:16]}:{client}": features for client, features in clients.items()}
        write_fedjax_sqlite(FederatedData.from_clients(named), folder / f"{name}_{split}.sqlite")


def write_tff(folder, name, splits):
    called = {"held_out": "heldout"}
    data = {called.get(split, split): FederatedData.from_clients(clients) for split, clients in splits.items()}
    write_tff_sqlite(data, folder / f"{name}.sqlite")


def write_hdf5(folder, name, splits):
    for split, clients in splits.items():
        with h5py.File(folder / f"{name}_{split}.h5", "w") as file:
            for client, features in clients.items():
                for feature, column in features.items():
                    file.create_dataset(f"examples/{client}/{feature}", data=list(column), dtype=h5py.string_dtype())


FORMS = [write_fedjax, write_tff, write_hdf5]
PLAYS = {
    "train": {"HAMLET_GHOST": {"snippets": texts("ab", "")}, "HAMLET_QUEEN": {"snippets": texts("d\u00e9")}},
    "test": {"HAMLET_GHOST": {"snippets": texts("dh")}, "HAMLET_QUEEN": {"snippets": texts("")}},
}


@pytest.mark.parametrize("write", FORMS)
def test_shakespeare_is_the_same_from_every_format(write, tmp_path):
    write(tmp_path, "shakespeare", PLAYS)
    loaded = datasets.load("shakespeare(length=4)", data=tmp_path)
    assert sorted(loaded.train.client_ids) == ["HAMLET_GHOST", "HAMLET_QUEEN"]
    # FedJAX's encoding: bos 1, eos 2, the 86 characters from 3 on in the order of TFF's tutorial: "d" is the first, "a" the
    # 64th, "b" the 42nd; what is outside, such as each byte of "é", is 89.
    a, b = 3 + 63, 3 + 41
    ghost = loaded.train["HAMLET_GHOST"]
    assert ghost["x"].tolist() == [[1, a, b, 2], [1, 0, 0, 0]] and ghost["y"].tolist() == [[a, b, 2, 1], [2, 0, 0, 0]]
    assert loaded.train["HAMLET_QUEEN"]["x"].tolist() == [[1, 3, 89, 89]]
    assert loaded.test["HAMLET_QUEEN"]["y"].tolist() == [[2, 0, 0, 0]]
    assert loaded.train.columns["x"].dtype == np.int16
    assert loaded.decode(ghost["x"][0]) == "⊢ab⊣"


def test_text_that_is_not_utf8_is_refused_naming_file_client_and_feature(tmp_path):
    write_fedjax(tmp_path, "shakespeare", {"train": {"GHOST": {"snippets": texts(b"a\xff")}}, "test": PLAYS["test"]})
    with pytest.raises(FormatError, match=r"shakespeare_train.sqlite: Client 'GHOST', feature 'snippets': .* not UTF-8"):
        datasets.load("shakespeare", data=tmp_path)
    with pytest.raises(ValueError, match="Expected length >= 1, got length=0"):
        datasets.load("shakespeare(length=0)", data=tmp_path)


@needs_real
def test_real_shakespeare_is_encoded_as_by_fedjax():
    """The digest is of the results of ``fedjax.datasets.shakespeare.preprocess_client`` (0.0.17) for this file's clients."""
    loaded = datasets.load("shakespeare", data=SHARED / "shakespeare_tff")
    about = loaded.description.splits
    assert {
        split: (data.num_clients, data.num_examples) for split, data in (("train", loaded.train), ("test", loaded.test))
    } == about
    content = b"".join(np.asarray(loaded.train.columns[name], np.int32).tobytes() for name in ("x", "y"))
    assert hashlib.sha256(content).hexdigest() == "c7bfa8acb1c7110788f77786a1770eb92cced7682ec9b3475fad89ed92d6905d"


def post(*rows):
    return {
        feature: texts(*column) for feature, column in zip(("tokens", "title", "tags"), zip(*rows, strict=True), strict=True)
    }


POSTS = {
    "train": {
        "1": post(("how to sort", "sort a list", "python|sorting"), ("a list", "sort a list", "python|sorting")),
        "12": post(("the the the", "java", "java|vb . net")),
    },
    "test": {"1": post(("to sort the list", "t", "python"))},
    "held_out": {"10": post(("never seen", "t", "java"))},
}


def counts(folder, words="sort 9\nto 7\nlist 3\n", tags='{"java": 1, "python": 2}'):
    (folder / "stackoverflow.word_count").write_text(words)
    (folder / "stackoverflow.tag_count").write_text(tags)


@pytest.mark.parametrize("write", FORMS)
def test_stackoverflow_words_are_the_same_from_every_format(write, tmp_path):
    write(tmp_path, "stackoverflow", POSTS)
    counts(tmp_path)
    loaded = datasets.load("stackoverflow_word(vocabulary=3, length=4)", data=tmp_path)
    # sort 3, to 4, list 5, unknown 6.
    assert loaded.train["1"]["x"].tolist() == [[1, 6, 4, 3], [1, 6, 5, 0]]
    assert loaded.train["1"]["y"].tolist() == [[6, 4, 3, 2], [6, 5, 2, 0]]
    assert loaded.test["1"]["x"].tolist() == [[1, 4, 3, 6]]
    assert loaded.held_out["10"]["y"].tolist() == [[6, 6, 2, 0]]
    assert loaded.decode(loaded.train["1"]["x"][0]) == "⊢ � to sort"


@pytest.mark.parametrize("write", FORMS)
def test_stackoverflow_tags_are_the_same_from_every_format(write, tmp_path):
    write(tmp_path, "stackoverflow", POSTS)
    counts(tmp_path)
    loaded = datasets.load("stackoverflow_tag(vocabulary=3, tags=2, length=5)", data=tmp_path)
    # Words: sort 1, to 2, list 3, unknown 4, of sentence and title. Tags: python, java.
    assert loaded.train["1"]["x"].tolist() == [[4, 2, 1, 1, 4], [4, 3, 1, 4, 3]]
    assert loaded.train["1"]["y"].tolist() == [[1, 0], [1, 0]]
    assert loaded.train["12"]["y"].tolist() == [[0, 1]] and loaded.held_out["10"]["y"].tolist() == [[0, 1]]
    assert loaded.train.columns["y"].dtype == np.uint8
    assert loaded.decode(loaded.train["1"]["x"][1]) == "� list sort � list"


def test_only_the_first_examples_of_a_client_are_kept_on_demand(tmp_path):
    write_hdf5(tmp_path, "stackoverflow", POSTS)
    counts(tmp_path)
    assert datasets.load("stackoverflow_word(vocabulary=3, examples=1)", data=tmp_path).train.sizes.tolist() == [1, 1]
    assert datasets.load("stackoverflow_word(vocabulary=3)", data=tmp_path).train.sizes.tolist() == [2, 1]
    with pytest.raises(ValueError, match="Expected examples >= 0, got examples=-1"):
        datasets.load("stackoverflow_word(vocabulary=3, examples=-1)", data=tmp_path)


def test_without_counts_words_and_tags_are_counted_by_clients_of_train(tmp_path):
    write_hdf5(tmp_path, "stackoverflow", POSTS)
    loaded = datasets.load("stackoverflow_word(vocabulary=2, length=3)", data=tmp_path)
    # Each of these words occurs at one client ("the" three times): the first two in alphabetical order are "a" 3, "how" 4.
    assert loaded.train["1"]["x"].tolist() == [[1, 4, 5], [1, 3, 5]]
    tags = datasets.load("stackoverflow_tag(vocabulary=2, tags=4)", data=tmp_path)
    # java, python, sorting, "vb . net": a tag may contain spaces.
    assert tags.train["12"]["y"].tolist() == [[1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("vocabulary=4", r"stackoverflow.word_count has only 3 words, got size=4: give at most size=3"),
        ("vocabulary=0", "Expected size >= 1"),
        ("vocabulary=3, oov_buckets=0", "Expected oov_buckets >= 1"),
    ],
)
def test_an_invalid_vocabulary_is_refused(options, message, tmp_path):
    write_hdf5(tmp_path, "stackoverflow", POSTS)
    counts(tmp_path)
    with pytest.raises(ValueError, match=message):
        datasets.load(f"stackoverflow_word({options})", data=tmp_path)


def test_the_errors_for_a_missing_split_and_a_missing_feature_name_them(tmp_path):
    write_tff(tmp_path, "stackoverflow", {split: POSTS[split] for split in ("train", "test")})
    counts(tmp_path)
    with pytest.raises(ValueError, match=r"stackoverflow.sqlite.*heldout"):
        datasets.load("stackoverflow_word(vocabulary=3)", data=tmp_path)
    (tmp_path / "stackoverflow.sqlite").unlink()
    without = {split: {c: {"tokens": f["tokens"]} for c, f in clients.items()} for split, clients in POSTS.items()}
    write_fedjax(tmp_path, "stackoverflow", without)
    with pytest.raises(FormatError, match=r"stackoverflow_train.sqlite: .*client '.*1'.*title"):
        datasets.load("stackoverflow_tag(vocabulary=3, tags=2)", data=tmp_path)


def test_the_downloads_of_stackoverflow(tmp_path, monkeypatch):
    """FedJAX's three files and TFF's archives of counts are downloaded; the second call downloads nothing."""
    source, asked = tmp_path / "source", []
    source.mkdir()
    write_fedjax(source, "stackoverflow", POSTS)
    counts(source)

    def fetch(url, path, *, sha256, num_bytes):
        asked.append((url, sha256))
        if path.name.endswith(".tar.bz2"):
            with tarfile.open(path, "w:bz2") as tar:
                content = (source / path.name.removesuffix(".tar.bz2")).read_bytes()
                entry = tarfile.TarInfo(path.name.removesuffix(".tar.bz2"))
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        else:
            path.write_bytes((source / path.name).read_bytes())
        return path

    monkeypatch.setattr(_download, "fetch", fetch)
    for _ in range(2):
        loaded = datasets.load("stackoverflow_tag(vocabulary=3, tags=2)", cache=tmp_path / "cache")
        assert loaded.train.num_examples == 3
    fedjax, tff = (
        "https://storage.googleapis.com/gresearch/fedjax/stackoverflow",
        "https://storage.googleapis.com/tff-datasets-public",
    )
    assert asked == [
        (f"{fedjax}/stackoverflow_train.sqlite", None),
        (f"{fedjax}/stackoverflow_test.sqlite", None),
        (f"{fedjax}/stackoverflow_held_out.sqlite", None),
        (f"{tff}/stackoverflow.word_count.tar.bz2", "1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c"),
        (f"{tff}/stackoverflow.tag_count.tar.bz2", "6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d"),
    ]


def test_without_a_network_the_error_is_one_line_with_two_remedies(tmp_path, monkeypatch):
    def no_network(url, path, **how):
        raise _download.UnreachableError(f"{url} cannot be reached (Name or service not known).")

    monkeypatch.setattr(_download, "fetch", no_network)
    with pytest.raises(
        datasets.DownloadError, match=r"Could not download 'stackoverflow_word': .* Either give a folder .*by hand"
    ) as caught:
        datasets.load("stackoverflow_word", cache=tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "stackoverflow_word").mkdir(exist_ok=True)
    write_fedjax(tmp_path / "stackoverflow_word", "stackoverflow", POSTS)
    with pytest.raises(
        datasets.DownloadError,
        match=r"the counts for 'stackoverflow_word': .* Either give a folder .*by hand",
    ) as caught:
        datasets.load("stackoverflow_word", cache=tmp_path)
    assert "\n" not in str(caught.value)


def lines(*users):
    return "".join(
        json.dumps({"client_id": name} | {split: [{"tokens": text} for text in given] for split, given in parts.items()}) + "\n"
        for name, parts in users
    )


def test_stackexchange_is_read_from_json_lines(tmp_path):
    users = lines(("beer:1", {"train": ["to be", "or not"], "test": ["to do"]}), ("beer:2", {"train": ["to"], "test": []}))
    (tmp_path / "stackexchange.jsonl.gz").write_bytes(gzip.compress(users.encode()))
    loaded = datasets.load("stackexchange(vocabulary=2, length=3)", data=tmp_path)
    # "to" occurs at two clients; "be" is the first in alphabetical order of the words at one client.
    assert loaded.train["beer:1"]["x"].tolist() == [[1, 3, 4], [1, 5, 5]]
    assert loaded.train["beer:2"]["y"].tolist() == [[3, 2, 0]]
    assert loaded.test.sizes.tolist() == [1, 0]
    (tmp_path / "stackexchange.word_count").write_text("or 3\nnot 2\n")
    loaded = datasets.load("stackexchange(vocabulary=2, length=3)", data=tmp_path)
    assert loaded.train["beer:1"]["x"].tolist() == [[1, 5, 5], [1, 3, 4]]


def test_stackexchange_cannot_be_downloaded(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'stackexchange' cannot be downloaded: give a folder that holds JSON lines"):
        datasets.load("stackexchange", cache=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No 'stackexchange' in .*, which holds nothing: expected JSON lines"):
        datasets.load("stackexchange", data=tmp_path)


@needs_real
def test_real_stackexchange_loads():
    loaded = datasets.load("stackexchange", data=SHARED / "stackexchange")
    assert (loaded.train.num_clients, loaded.train.num_examples, loaded.test.num_examples) == (2_387, 39_157, 9_125)
    x, y = loaded.train.columns["x"], loaded.train.columns["y"]
    assert x.shape == (39_157, 20) and x.max() == 10_003 and set(np.unique(x[:, 0])) == {1}
    np.testing.assert_array_equal(x[:, 1:][y[:, 1:] > 2], y[:, :-1][y[:, 1:] > 2])
    assert (x == 10_003).mean() < 0.1  # few words are unknown
