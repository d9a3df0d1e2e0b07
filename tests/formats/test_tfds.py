"""TensorFlow Datasets, on a tiny dataset that their own writer creates."""

import functools
import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fuzz import assert_only_format_errors
from PIL import Image

tfds = pytest.importorskip("tensorflow_datasets")

from fedsim.data import FormatError  # noqa: E402
from fedsim.formats import arrays_from_tfds, read, read_tfds  # noqa: E402

FEATURES = {
    "image": tfds.features.Image(shape=(4, 4, 1)),
    "label": tfds.features.ClassLabel(num_classes=3),
    "score": np.float32,
    "user": tfds.features.Text(),
    "ragged": tfds.features.Sequence(np.int32),
    "nested": {"a": np.int64},
}


def png(shade):
    content = io.BytesIO()
    Image.fromarray(np.full((4, 4), shade, np.uint8)).save(content, "png")
    content.seek(0)
    return content


def example(i):
    user = "ann" if i % 3 else "bob"
    return {
        "image": png(i), "label": i % 3, "score": i / 2, "user": user, "ragged": list(range(i % 2)), "nested": {"a": i},
    }  # fmt: skip


class Tiny(tfds.core.GeneratorBasedBuilder):
    """Ten examples of two users."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(FEATURES))

    def _split_generators(self, dl_manager):
        return {"train": ((i, example(i)) for i in range(10)), "test": ((i, example(i)) for i in range(2))}

    def _generate_examples(self):
        raise NotImplementedError


class Unreachable(Tiny):
    """A dataset whose download is unreachable."""

    def _split_generators(self, dl_manager):
        raise ConnectionError("Name or service not known\nand much more")


class Unpreparable(Tiny):
    """A dataset that needs another library for its preparation."""

    def _split_generators(self, dl_manager):
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("unreachable", OSError, r"could not be downloaded \(Name or service not known\)"),
        ("unpreparable", ImportError, "preparing it needs tensorflow, unlike reading"),
    ],
)
def test_the_error_of_a_failed_preparation_has_one_line_with_a_remedy(tmp_path, name, error, reason):
    with pytest.raises(error, match=f"{name} is not prepared in .*{reason}.* give the folder that contains it") as raised:
        arrays_from_tfds(name, data_dir=tmp_path)
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    builder = Tiny(data_dir=tmp_path_factory.mktemp("tfds"), file_format="array_record")
    builder.download_and_prepare()
    return Path(builder.data_dir)


FLAT = ["image", "label", "score", "user"]


def rows(columns):
    """Returns the examples sorted by score, because TensorFlow Datasets shuffle them."""
    return sorted(zip(*(columns[name].tolist() for name in ("score", "label", "user", "image")), strict=True))


def expected(numbers):
    return [(i / 2, i % 3, example(i)["user"].encode(), np.full((4, 4, 1), i).tolist()) for i in numbers]


def test_arrays_hold_every_example(folder):
    columns = arrays_from_tfds(folder, features=FLAT)
    assert rows(columns) == expected(range(10))
    assert {name: (str(column.dtype), column.shape) for name, column in columns.items()} == {
        "image": ("uint8", (10, 4, 4, 1)),
        "label": ("int64", (10,)),
        "score": ("float32", (10,)),
        "user": ("object", (10,)),
    }


def test_a_builder_a_slice_of_a_split_and_small_chunks_give_the_same(folder, monkeypatch):
    monkeypatch.setattr("fedsim.formats._tfds._ROWS", 3)
    builder = tfds.builder_from_directory(folder)
    assert rows(arrays_from_tfds(builder, features=FLAT)) == expected(range(10))
    assert len(arrays_from_tfds(builder, "train[:40%]", ["label"])["label"]) == 4
    assert rows(arrays_from_tfds(builder, "test", FLAT)) == expected(range(2))


def test_clients_have_their_own_examples(folder, monkeypatch):
    monkeypatch.setattr("fedsim.formats._tfds._ROWS", 3)
    clients = read_tfds(folder, "train", ["image", "label", "score"], client="user").load()
    for name, numbers in (("ann", [1, 2, 4, 5, 7, 8]), ("bob", [0, 3, 6, 9])):
        client = clients[name]
        order = np.argsort(client["score"])
        assert client["label"][order].tolist() == [i % 3 for i in numbers]
        assert client["image"][order].tolist() == [np.full((4, 4, 1), i).tolist() for i in numbers]


def test_the_folder_is_recognized(folder):
    read_ = read(folder, split="test", client="label", features={"score": ((), np.float16)})
    assert {c.client_id: c["score"].tolist() for c in read_} == {"0": [0.0], "1": [0.5]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(client="unknown"), r"client= must be one of \['image', .*, got client='unknown'"),
        (dict(client="user", split="held_out"), r"split= one of \['test', 'train'\] .* got split='held_out'"),
        (dict(client="user", features=["nothing"]), "Feature 'nothing' is missing"),
        (dict(client="user", features=["ragged"]), "Feature 'ragged' has examples of shapes"),
        (dict(client="user", features=["nested"]), "Feature 'nested' is nested"),
    ],
)
def test_invalid_arguments_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        read_tfds(folder, **options).load()


def test_unknown_datasets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no dataset 'no_such'"):
        arrays_from_tfds("no_such", data_dir=tmp_path)


def test_tensorflow_is_not_imported(folder):
    reading = f"read_tfds({str(folder)!r}, features=['image'], client='user').load()"
    script = f"import sys; from fedsim.formats import read_tfds; {reading}; assert 'tensorflow' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def read_with(skeleton, path):
    """Reads the dataset with ``path`` in place of its file of examples."""
    folder = path.parent / "tfds"
    shutil.copytree(skeleton, folder, dirs_exist_ok=True)
    (examples,) = folder.glob("*-train.array_record*")
    shutil.copy(path, examples)
    try:
        return read_tfds(folder, "train", ["label", "image"], client="user").load()
    except FormatError as error:
        raise FormatError(f"{path.name}: {error}") from None


@pytest.mark.slow
def test_damaged_examples_are_read_or_refused(folder):
    (examples,) = folder.glob("*-train.array_record*")
    assert_only_format_errors(functools.partial(read_with, folder), examples.read_bytes(), ".array_record", 500)
