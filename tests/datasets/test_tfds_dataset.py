"""Tests of `tfds:NAME`, on a tiny dataset written by TensorFlow Datasets."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

tfds = pytest.importorskip("tensorflow_datasets")

from fedsim import datasets  # noqa: E402


def png(shade):
    content = io.BytesIO()
    Image.fromarray(np.full((4, 4), shade, np.uint8)).save(content, "png")
    content.seek(0)
    return content


class Shades(tfds.core.GeneratorBasedBuilder):
    """Twelve squares of different shades by two users."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(4, 4, 1)),
            "label": tfds.features.ClassLabel(num_classes=3),
            "user": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(12), "test": self._generate_examples(4)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"image": png(i), "label": i % 3, "user": "ann" if i % 4 else "bob"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    Shades(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def shades(population):
    return {
        client.client_id: sorted(zip(client["x"][:, 0, 0, 0].tolist(), client["y"].tolist(), strict=True))
        for client in population
    }


def test_a_dataset_by_name_with_a_partition(folder):
    loaded = datasets.load("tfds:shades(partition='iid', clients=3)", data=folder)
    assert loaded.train.sizes.tolist() == [4, 4, 4] and loaded.test.num_clients == 3
    assert {name: (c.dtype, c.shape[1:]) for name, c in loaded.train.columns.items()} == {
        "x": (np.uint8, (4, 4, 1)),
        "y": (np.int32, ()),
    }
    assert sorted(itertools.chain.from_iterable(shades(loaded.train).values())) == [(i, i % 3) for i in range(12)]
    assert loaded.description.name == "tfds:shades" and loaded.description.features["x"] == "[4, 4, 1] uint8"


def test_a_slice_of_a_split_with_classes_per_client(folder):
    loaded = datasets.load("tfds:shades(train='train[:6]', clients=3, partition='classes_per_client', classes=1)", data=folder)
    assert loaded.train.num_examples == 6
    assert all(len({y for _, y in pairs}) == 1 for pairs in shades(loaded.train).values())


def test_clients_by_a_feature_of_the_dataset(folder):
    loaded = datasets.load("tfds:shades(client='user')", data=folder)
    expected = {"ann": [(i, i % 3) for i in range(12) if i % 4], "bob": [(i, i % 3) for i in range(0, 12, 4)]}
    assert shades(loaded.train) == expected
    one = datasets.load("tfds:shades(client='user', clients=1, seed=1)", data=folder)
    assert list(one.train.client_ids) == list(one.test.client_ids) and shades(one.train).items() < expected.items()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tfds:shadez", "no dataset 'shadez'"),
        ("tfds:shades(x='imgae')", "imgae"),
        ("tfds:shades(test='validation')", "validation"),
        ("tfds:shades(partition='iid', alpha=1)", "The partition 'iid' has no option 'alpha'"),
        ("tfds:shades(clients=0)", "clients"),
        ("tfds:shades(client='user', test_fraction=0.5)", "client='user' takes no partition, .* and no test_fraction"),
        ("tfds:shades(client='user', alpha=0.1)", "client='user' takes no partition, none of its options"),
        ("tfds:shades(client='user', partition='shards')", "client='user' takes no partition"),
    ],
)
def test_missing_names_are_reported(name, message, folder):
    with pytest.raises(ValueError, match=message):
        datasets.load(name, data=folder)
