"""Hugging Face datasets that their own library creates."""

import io

import numpy as np
import pytest
from PIL import Image

datasets = pytest.importorskip("datasets")

from formats.clients import contents  # noqa: E402

from fedsim.data import FormatError  # noqa: E402
from fedsim.formats import read_huggingface  # noqa: E402


def dataset(**columns):
    return datasets.Dataset.from_dict({"writer_id": ["bob", "ann", "bob"], **columns})


def test_clients_are_in_order_of_first_appearance_and_keep_their_row_order():
    read = read_huggingface(dataset(y=[1, 2, 3], words=["to", "né", "or"], x=[[0.0, 1], [2, 3], [4, 5]]), "writer_id")
    assert read.num_clients == 2
    expected = {
        "bob": {"y": ("int64", (), [1, 3]), "words": ("object", (), [b"to", b"or"]), "x": ("float64", (2,), [[0, 1], [4, 5]])},
        "ann": {"y": ("int64", (), [2]), "words": ("object", (), ["né".encode()]), "x": ("float64", (2,), [[2, 3]])},
    }
    assert contents(read) == contents(read) == expected


def test_many_rows_filtered_and_shuffled_are_grouped_as_by_a_loop():
    random = np.random.default_rng(0)
    users = random.integers(7, size=500)
    whole = datasets.Dataset.from_dict({"user": users, "y": np.arange(500)}).shuffle(seed=0)
    whole = whole.select(range(0, 500, 2))
    expected = {}
    for row in whole:
        expected.setdefault(str(row["user"]), []).append(row["y"])
    assert {c.client_id: c["y"].tolist() for c in read_huggingface(whole, "user")} == expected


def test_images_labels_and_arrays_keep_their_types():
    def png(shade):
        content = io.BytesIO()
        Image.fromarray(np.full((2, 3), shade, np.uint8)).save(content, "png")
        return {"bytes": content.getvalue(), "path": None}

    features = datasets.Features(
        writer_id=datasets.Value("int32"),
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["a", "b"]),
        grid=datasets.Array2D((2, 2), "int8"),
    )
    grids = [[[i, 1], [2, 3]] for i in range(3)]
    columns = {"writer_id": [5, 6, 5], "image": [png(i) for i in range(3)], "label": [0, 1, 1], "grid": grids}
    read = read_huggingface(datasets.Dataset.from_dict(columns, features=features), "writer_id").load()
    assert {name: (str(column.dtype), column.shape) for name, column in read["5"].examples.items()} == {
        "image": ("uint8", (2, 2, 3)),
        "label": ("int64", (2,)),
        "grid": ("int8", (2, 2, 2)),
    }
    assert read["5"]["image"][:, 0, 0].tolist() == [0, 2]
    assert read["5"]["grid"].tolist() == [grids[0], grids[2]]


def test_features_can_be_chosen_and_narrowed():
    (bob, _) = read_huggingface(dataset(y=[1, 2, 3], z=[0, 0, 0]), "writer_id", {"y": ((), np.uint8)})
    assert {name: column.dtype for name, column in bob.examples.items()} == {"y": np.uint8}


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (dict(y=[1, None, 3]), {}, "client 'ann': Feature 'y' has no value"),
        (dict(y=[[1], [2], [3, 4]]), {}, "client 'bob': Feature 'y' has lists of 1 to 2 values"),
        (dict(y=[1, 2, 3]), dict(client="user"), r"client= must be one of the columns \['writer_id', 'y'\]"),
        (dict(y=[1, 2, 3]), dict(features=["z"]), "Feature 'z' is missing"),
        (dict(y=[{"a": 1}] * 3), {}, "Feature 'y' has type struct"),
    ],
)
def test_invalid_datasets_are_refused(columns, options, message):
    with pytest.raises(ValueError, match=message):
        read_huggingface(dataset(**columns), **{"client": "writer_id", **options}).load()


def test_images_of_different_sizes_are_refused():
    images = [Image.new("L", (size, 2)) for size in (2, 2, 3)]
    with pytest.raises(FormatError, match="client 'bob': Feature 'image' has images of shapes"):
        read_huggingface(dataset(image=images), "writer_id").load()


def test_all_splits_at_once_are_refused():
    with pytest.raises(ValueError, match=r"Expected one split of the dataset, got the splits \['train'\]"):
        read_huggingface(datasets.DatasetDict(train=dataset()), "writer_id")
