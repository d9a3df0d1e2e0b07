"""Parties, their alignment by id, and their division from one table."""

import dataclasses
import gzip
import hashlib
import hmac
import os
from pathlib import Path

import haiku as hk
import jax
import numpy as np
import pytest

import fedsim
from fedsim import vertical
from fedsim.vertical import Party

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "tabular_vfl"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder")


def test_rows_belong_together_and_their_order_depends_on_ids_and_secret_only():
    draw = np.random.default_rng(0)
    ids, values = np.array([f"person {i}" for i in range(50)]), np.arange(50.0)

    def aligned(secret="s"):
        bank, shop = draw.permutation(50)[:40], draw.permutation(50)[:45]
        parties = {
            "bank": Party(ids=ids[bank].tolist(), columns={"a": values[bank]}, labels=bank % 3),
            "shop": Party(ids=ids[shop].tolist(), columns={"b": 2 * values[shop]}),
        }
        data = vertical.align(parties, secret=secret)
        assert set(data.ids) == set(ids[bank]) & set(ids[shop])
        return data

    data = aligned()
    people = np.array([int(each.split()[1]) for each in data.ids])
    np.testing.assert_array_equal(data.features["bank"][:, 0], people)
    np.testing.assert_array_equal(data.features["shop"][:, 0], 2 * people)
    np.testing.assert_array_equal(data.labels, people % 3)
    hashes = [hmac.new(b"s", each.encode(), hashlib.sha256).digest() for each in data.ids]
    assert hashes == sorted(hashes) and list(data.ids) != sorted(data.ids)
    again = aligned()  # other rows in another order
    both = [each for each in data.ids if each in again.ids]
    assert both == [each for each in again.ids if each in data.ids]
    other = aligned("another secret")
    assert [each for each in data.ids if each in other.ids] != [each for each in other.ids if each in data.ids]


def test_a_number_and_its_digits_are_the_same_id():
    data = vertical.align(
        {"a": Party(ids=[7, 12], columns={"x": [1, 2]}), "b": Party(ids=["12", "7", "07"], labels=[0, 1, 2])}, secret=b"key"
    )
    assert sorted(zip(data.ids, data.labels.tolist(), strict=True)) == [("12", 0), ("7", 1)]
    assert data.labels_at == "b" and list(data.features) == ["a"]


def bank(**changes):
    return Party(**({"ids": ["ann", "bob"], "columns": {"income": [3, 2]}, "labels": [1, 0]} | changes))


def shop(**changes):
    return Party(**({"ids": ["ann", "bob"], "columns": {"visits": [3, 2]}} | changes))


@pytest.mark.parametrize(
    ("parties", "message"),
    [
        (
            {"bank": bank(), "shop": shop(columns={"income": [1, 2]})},
            "Expected every column at one party, got 'income' at 'bank' and 'shop': leave it out at one of them",
        ),
        ({"bank": bank(labels=None), "shop": shop()}, "Expected a party with labels, got none of bank, shop"),
        ({"bank": bank(), "shop": shop(labels=[0, 1])}, "Expected labels at one party, got them at bank and shop"),
        ({"bank": bank(), "shop": shop(ids=["Ann", "Bob"])}, "got no id in common of bank, shop: check that their ids"),
        ({"bank": bank(columns={})}, "Expected a party with columns, got only labels"),
        ({"bank": bank(), "y": shop()}, "Expected parties to have names other than 'y'"),
    ],
)
def test_parties_that_cannot_be_aligned_are_refused(parties, message):
    with pytest.raises(ValueError, match=message):
        vertical.align(parties, secret="s")


@pytest.mark.parametrize("secret", ["", b"", None])
def test_the_secret_is_needed(secret):
    with pytest.raises(ValueError, match="Expected secret to be a text or bytes, not empty"):
        vertical.align({"bank": bank(), "shop": shop()}, secret=secret)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ["ann", "ann"]}, "Expected ids to be different, got the id 'ann' in 2 rows"),
        ({"ids": ["ann", ""]}, "Expected an id for every row, got an empty text in row 1: fill it in or drop the row"),
        ({"ids": [" ", "bob"]}, "Expected an id for every row, got an empty text in row 0"),
        ({"ids": [1.5, 2.5]}, "Expected ids to be texts or whole numbers, got 1.5"),
        ({"columns": {"income": [1, 2, 3]}}, r"Expected one value per id in column 'income', got shape \[3\] for 2 ids"),
        ({"columns": {"income": [1, np.nan]}}, "Expected finite numbers in column 'income'"),
        ({"columns": {"city": ["Bonn", "Rome"]}}, "Expected numbers in column 'city', got 'Bonn': encode other values"),
        ({"columns": {"income": [1, 1e300]}}, r"in column 'income' between .*, the range of float32, got 1e\+300 for id 'bob'"),
        ({"columns": {"income": [None, 1]}}, "Expected numbers in column 'income', got None: encode"),
        ({"labels": [2**40, 1]}, "Expected numbers in labels between -2147483648 and .*, got 1099511627776 for id 'ann'"),
        ({"labels": [[1], [2]]}, r"Expected one label per id, got labels of shape \[2, 1\]"),
        ({"columns": {}, "labels": None}, "Expected a party to have columns or labels, got neither"),
    ],
)
def test_wrong_parties_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        bank(**changes)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_overlap_is_the_share_of_people_whom_all_parties_know(share):
    x, y = np.random.default_rng(0).normal(size=(200, 6)), np.arange(200)
    blocks = {"a": [0, 1], "b": [2, 3, 4], "c": [5]}
    parties = vertical.divide_columns(x, y, blocks, labels_at="d", overlap=share, seed=1)
    knows = {name: set(party.ids) for name, party in parties.items()}
    everywhere = set.intersection(*knows.values())
    assert len(everywhere) == round(200 * share) and len(set.union(*knows.values())) == 200
    assert sum(map(len, knows.values())) == 4 * len(everywhere) + 200 - len(everywhere)  # the others are at one party each
    data = vertical.align(parties, secret="s")
    assert set(data.ids) == everywhere and data.columns == {"a": ("x0", "x1"), "b": ("x2", "x3", "x4"), "c": ("x5",)}
    rows = np.array([int(each) for each in data.ids])
    np.testing.assert_array_equal(data.labels, rows)
    for name, block in blocks.items():
        np.testing.assert_array_equal(data.features[name], x[rows][:, block].astype(np.float32))


def test_wrong_divisions_are_refused():
    for options, message in (
        ({"overlap": 1.5}, "Expected 0 <= overlap <= 1, got overlap=1.5"),
        ({"ids": [1]}, r"Expected 3 ids for x of shape \[3, 2\], got 1"),
        ({"blocks": [[0], [1]]}, "Expected blocks to be an instance of Mapping, such as dict"),
        (
            {"blocks": {"a": [0], "b": [2]}},
            r"Expected 0 <= blocks\['b'\] <= 1, got blocks\['b'\]=2: columns are numbered from 0",
        ),
        ({"blocks": {"a": [0], "b": [-1]}}, r"Expected 0 <= blocks\['b'\] <= 1, got blocks\['b'\]=-1"),
        ({"blocks": {"a": [0], "b": [0]}}, r"got blocks\['b'\]=0, which is also at 'a': leave it out"),
        ({"blocks": {"a": [0, 0]}}, r"got blocks\['a'\]=0, which is also at 'a'"),
        ({"names": ["age", "age"]}, "Expected columns to have different names, got 'age' 2 times"),
        ({"x": np.zeros([3, 2, 2])}, r"Expected x to be a table \[n, features\], got shape \[3, 2, 2\]"),
    ):
        given = {"x": np.zeros([3, 2]), "labels": [0, 1, 1], "blocks": {"a": [0], "b": [1]}, "labels_at": "a"} | options
        with pytest.raises(ValueError, match=message):
            vertical.divide_columns(**given)


def test_a_model_needs_a_bottom_for_every_party_with_features():
    data = vertical.align({"bank": bank(), "shop": shop()}, secret="s")
    with pytest.raises(ValueError, match="Expected bottoms for the parties with features, bank, shop, got those of bank"):
        vertical.VerticalModel.of(data, bottoms={"bank": vertical.dense(2)}, top=vertical.concatenate(2))
    with pytest.raises(ValueError, match="Expected a party with features, got 'clinic': they are at bank, shop"):
        data.only("clinic")
    with pytest.raises(ValueError, match="Expected 1 <= size <= 2, got size=3: at most the number of people"):
        vertical.BatchSampler(data, size=3)
    with pytest.raises(ValueError, match="Expected data to be an instance of VerticalData"):
        vertical.BatchSampler(data.features, size=1)
    model = vertical.VerticalModel.of(data, bottoms=vertical.dense(2), top=vertical.concatenate(2))
    with pytest.raises(ValueError, match="Expected a party with features to be left, got all of bank, shop"):
        model.without("shop", "bank")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("id,x\n1,2\n", {"labels": "y"}, r"Expected labels to be a column of t.csv.gz, got labels='y': it has \['id', 'x'\]"),
        ("id,x\n1,blue\n", {}, "Expected numbers in column 'x' of t.csv.gz, got 'blue' for id '1'"),
        ("id,x\n1,\n", {}, "Expected numbers in column 'x' of t.csv.gz, got '' for id '1'"),
        (
            "id,x\n1,2\n\n,3\n",
            {},
            "t.csv.gz, line 4: Expected an id in column 'id' of every row, got an empty one: fill it in or drop",
        ),
        ("id,x\n1,nan\n", {}, "Expected finite numbers in column 'x'"),
        ("id,y,x\n1,3e9,2\n", {"labels": "y"}, "Expected numbers in labels between .*, got 3000000000 for id '1'"),
        ("id,y,x\n1,1e300,2\n", {"labels": "y"}, "Expected numbers in labels between .*, the range of float32, got 1e\\+300"),
        ("id,y,x\n1,inf,2\n", {"labels": "y"}, "Expected finite numbers in labels, got NaN or infinity"),
        ("id,x\n1,0\n", {"labels": "id"}, "Expected ids and labels in different columns of t.csv.gz, got 'id' for both"),
        ("id,x,x\n1,0,0\n", {}, "Expected columns of t.csv.gz to have different names, got 'x' 2 times"),
        ("id,x\n1\n", {}, "Expected t.csv.gz to have a line of names and rows with as many values"),
        ("", {}, "Expected t.csv.gz to have a line of names"),
        ("id,x\n1,2\n\n3\n", {}, "t.csv.gz, line 4: Expected t.csv.gz to have"),
        ("id,x\n1,2\n3,\n", {}, "got '' for id '3', .*t.csv.gz, line 3"),
        ("id,x\n1,2\n3,inf\n", {}, "in column 'x', got NaN or infinity for id '3', .*t.csv.gz, line 3"),
        ("id,x\n1,2\n3,4\n1,5\n", {}, "got the id '1' in the lines 2, 4 of .*t.csv.gz"),
        ("id;x\n1;2\n", {}, "t.csv.gz: Expected ids to be a column .*it seems to be separated by ';'"),
        ("id;x\n1;2,5\n", {}, "t.csv.gz, line 2: .*it seems to be separated by ';'"),
        ("id,x\n1,1e300\n", {}, "t.csv.gz: Expected numbers in column 'x' between"),
    ],
)
def test_wrong_tables_are_refused(text, options, message, tmp_path):
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ValueError, match=message):
        Party.from_csv(tmp_path / "t.csv.gz", **options)


def test_a_table_may_have_a_byte_order_mark_and_empty_lines(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbfid,y,x\r\n7,16777217,0.5\r\n\r\n3,0,-2\r\n\r\n")
    party = Party.from_csv(tmp_path / "t.csv", labels="y")
    assert party.ids == ("7", "3") and party.labels.tolist() == [16777217, 0] and party.columns["x"].tolist() == [0.5, -2]


@needs_real
def test_two_files_of_fate_are_two_parties():
    one = Party.from_csv(REAL / "breast_hetero_guest.csv.gz", labels="y", prefix="one.")
    two = Party.from_csv(REAL / "breast_hetero_host.csv.gz", prefix="two.")
    data = vertical.align({"one": one, "two": two}, secret="s")
    assert len(data) == 569 and {name: x.shape[1] for name, x in data.features.items()} == {"one": 10, "two": 20}
    row = data.ids.index("133")
    assert data.features["one"][row, :2] == pytest.approx([0.254879, -1.046633])
    assert data.features["two"][row, :2] == pytest.approx([0.449512, -1.247226]) and data.labels[row] == 1
    both = {"one": one, "two": Party.from_csv(REAL / "breast_hetero_host.csv.gz", prefix="one.")}
    with pytest.raises(ValueError, match="Expected every column at one party, got 'one.x0' at 'one' and 'two'"):
        vertical.align(both, secret="s")


def test_the_pooled_data_are_those_of_one_client():
    data = vertical.align({"bank": bank(), "shop": shop()}, secret="s")
    pooled = data.pooled()
    assert isinstance(pooled, fedsim.FederatedData) and pooled.num_clients == 1
    np.testing.assert_array_equal(pooled.columns["y"], data.labels)
    assert list(data.only("shop").features) == ["shop"] and data.only("shop").labels_at == "bank"
    assert data.take([1]).ids == data.take(1).ids == data.take(-1).ids == data.take([False, True]).ids == data.ids[1:]
    assert data.take(1).features["shop"].shape == (1, 1) and data.take(1).labels.shape == (1,)
    assert len(data.take([])) == 0
    with pytest.raises(IndexError):
        data.take(2)


def test_parties_are_matched_by_name():
    parties, key = {"bank": bank(), "shop": shop()}, jax.random.key(0)
    tables = [
        vertical.align({name: parties[name] for name in names}, secret="s") for names in (("bank", "shop"), ("shop", "bank"))
    ]
    models = [vertical.VerticalModel.of(data, bottoms=vertical.dense(2), top=vertical.concatenate(2)) for data in tables]
    params = models[0].init(key)
    expected = models[0].outputs(params, tables[0].features)
    for data in tables:
        np.testing.assert_array_equal(models[1].outputs(params, data.features), expected)
        np.testing.assert_array_equal(models[1].outputs(models[1].init(key), data.features), expected)


def test_columns_are_matched_by_name():
    """A linear model of the columns c2, c10 and pair, in another order at test time, predicts what NumPy computes by name."""
    draw = np.random.default_rng(0)
    columns = {"c10": draw.normal(size=20), "pair": draw.normal(size=(20, 2)), "c2": draw.normal(size=20)}
    weights, labels = {"c10": [3.0], "pair": [-1.0, 0.5], "c2": [-2.0]}, draw.normal(size=20)

    def aligned(names, **renamed):
        own = {renamed.get(name, name): columns[name] for name in names}
        return vertical.align({"bank": Party(ids=range(20), columns=own, labels=labels)}, secret="s")

    train = aligned(["c10", "pair", "c2"])
    assert train.columns["bank"] == ("c2", "c10", "pair")
    model = vertical.VerticalModel.of(
        train, bottoms=vertical.dense(1), top=hk.transform(lambda e: e["bank"][:, 0]), loss=fedsim.metrics.squared_error
    )
    params = model.init(jax.random.key(0))
    of_columns = np.concatenate([weights[name] for name in train.columns["bank"]])[:, None].astype(np.float32)
    params = jax.tree.map(lambda leaf: of_columns if leaf.ndim == 2 else leaf, params)
    predicted = sum(columns[name].reshape(20, -1) @ weights[name] for name in columns)
    for names in (["c10", "pair", "c2"], ["c2", "c10", "pair"], ["pair", "c2", "c10"]):
        found = fedsim.evaluate(model.joint, params, aligned(names).pooled()).overall["loss"]
        assert found == pytest.approx(np.mean((predicted - labels) ** 2), rel=1e-5)
    for other in (aligned(columns, c2="c3"), dataclasses.replace(train, columns={"bank": ("c10", "c2", "pair")})):
        with pytest.raises(ValueError, match="Expected the columns of party 'bank' with which the model was made, got 'c"):
            fedsim.evaluate(model.joint, params, other.pooled())
