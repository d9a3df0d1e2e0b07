"""Tests of datasets from files of the user's own."""

import json

import numpy as np
import pandas as pd
import pytest

import fedsim
from fedsim import datasets
from fedsim.experiment import RunConfig, Settings, build


@pytest.fixture
def table(tmp_path):
    """120 people of 6 clients, in people.csv."""
    draw = np.random.default_rng(0)
    people = pd.DataFrame(
        {
            "user": [f"u{each}" for each in draw.permutation(np.repeat(range(6), 20))],
            "age": draw.normal(40, 10, 120),
            "income": draw.normal(5e4, 1e4, 120),
            "city": draw.choice(["Bern", "Basel", "Chur"], 120),
        }
    )
    people["band"] = np.where(people.age * 1000 + people.income > 9e4, "high", "low")
    people["price"] = people.age * 3 + people.income / 1000
    people.to_csv(tmp_path / "people.csv", index=False)
    return people


def name_of(tmp_path, **options):
    return datasets.with_options(
        f"{tmp_path}/people.csv", {"client": "user", "label": "band", "features": "age,income"} | options
    )


def as_frame(data):
    columns = {f"x{i}": data.columns["x"][:, i] for i in range(data.columns["x"].shape[1])} | {"y": data.columns["y"]}
    return pd.DataFrame({"user": np.repeat(data.client_ids, data.sizes)} | columns)


def test_features_are_standardized_by_the_training_part_and_no_row_is_lost(table, tmp_path):
    splits = datasets.load(name_of(tmp_path), seed=3)
    # Independently: each training row is found again by the order of its ages, because standardization keeps it.
    both = pd.concat({name: as_frame(getattr(splits, name)) for name in ("train", "test")}, names=["part"]).reset_index("part")
    ordered, expected = both.sort_values("x0"), table.sort_values("age")
    assert ordered.user.tolist() == expected.user.tolist()
    assert ordered.y.tolist() == (expected.band == "low").astype(int).tolist()
    in_train = (ordered.part == "train").to_numpy()
    for feature, name in (("x0", "age"), ("x1", "income")):
        train = expected[name][in_train]
        np.testing.assert_allclose(ordered[feature], (expected[name] - train.mean()) / train.std(ddof=0), rtol=1e-4, atol=1e-6)
    assert splits.test.sizes.tolist() == [4] * 6
    assert splits.description.default_model == "logistic(shape=[2], num_classes=2)"
    assert splits.description.class_names == ["high", "low"]


def test_named_texts_are_categories_and_other_texts_are_left_out_with_a_warning(table, tmp_path):
    splits = datasets.load(name_of(tmp_path, features="city, a*", standardize=False))
    x = np.concatenate([splits.train.columns["x"], splits.test.columns["x"]])
    counts = table.city.value_counts().sort_index()
    np.testing.assert_array_equal(x[:, :3].sum(0), counts)
    np.testing.assert_allclose(np.sort(x[:, 3]), np.sort(table.age), rtol=1e-6)
    with pytest.warns(UserWarning, match="people.csv: left out city; texts that are categories"):
        assert datasets.load(name_of(tmp_path, features="")).train.columns["x"].shape[1] == 3


def test_a_name_with_brackets_is_no_pattern_and_row_numbers_of_pandas_are_left_out(table, tmp_path):
    table.rename(columns={"age": "age [years]"}).to_csv(tmp_path / "people.csv")
    named, others = (datasets.load(name_of(tmp_path, features=names)).train.columns["x"] for names in ("age [years]", "a*,i*"))
    np.testing.assert_array_equal(named, others[:, :1])
    with pytest.warns(UserWarning, match="left out the column without a name, city"):
        assert datasets.load(name_of(tmp_path, features="")).train.columns["x"].shape[1] == 3


def test_large_numbers_that_differ_little_are_standardized(tmp_path):
    times = 1.7e9 + np.arange(40)
    (tmp_path / "a.csv").write_text("t,one,y\n" + "".join(f"{t:.0f},0.1,{i % 2}\n" for i, t in enumerate(times)))
    x = datasets.load(f"{tmp_path}/a.csv", partition="iid", clients=2, test_fraction=0.5).train.columns["x"]
    np.testing.assert_allclose([x[:, 0].mean(), x[:, 0].std()], [0, 1], atol=1e-5)
    np.testing.assert_allclose(x[:, 1], 0, atol=1e-6)  # a constant column


@pytest.mark.parametrize("form", ["json_lines", "leaf"])
def test_large_numbers_of_files_with_clients_are_standardized_before_they_are_rounded(tmp_path, form):
    """Times in seconds, which float32 would round to multiples of 128."""
    rows = [{"t": 1.7e9 + i + 0.5, "y": i % 2} for i in range(40)]
    if form == "json_lines":
        (tmp_path / "a.jsonl").write_text(json.dumps({"client_id": "u", "train": rows, "test": rows[:10]}))
        name = f"{tmp_path}/a.jsonl"
    else:
        for part in ("train", "test"):
            (tmp_path / part).mkdir()
            columns = {"t": [row["t"] for row in rows], "y": [row["y"] for row in rows]}
            content = {"users": ["u"], "num_samples": [40], "user_data": {"u": columns}}
            (tmp_path / part / "a.json").write_text(json.dumps(content))
        name = str(tmp_path)
    x = datasets.load(f"{name}(label='y')").train.columns["x"][:, 0]
    expected = np.arange(40) - 19.5
    np.testing.assert_allclose(np.sort(x), expected / expected.std(), rtol=1e-5)


def test_splits_by_client_and_by_seed(table, tmp_path):
    name = name_of(tmp_path, split="by_client", test_fraction=0.5)
    first, again, other = (datasets.load(name, seed=seed) for seed in (0, 0, 1))
    assert first.train.num_clients == first.test.num_clients == 3
    assert not set(first.train.client_ids) & set(first.test.client_ids)
    assert list(first.train.client_ids) == list(again.train.client_ids) != list(other.train.client_ids)
    np.testing.assert_array_equal(first.train.columns["x"], again.train.columns["x"])


def test_rows_without_clients_are_divided_by_a_partition(table, tmp_path):
    name = f"{tmp_path}/people.csv(label='band', features='age', partition='dirichlet', alpha=0.1, clients=4)"
    splits = datasets.load(name)
    expected = fedsim.partitioners.dirichlet((table.band == "low").to_numpy().astype(int), clients=4, seed=0, alpha=0.1)
    assert (splits.train.sizes + splits.test.sizes).tolist() == [len(rows) for rows in expected]


def test_a_regression_learns_what_least_squares_finds(table, tmp_path):
    """The price is linear in the features, so the loss of the standardized target, the unexplained variance, becomes 0."""
    config = RunConfig(dataset=name_of(tmp_path, label="price"), epochs=5, clients=6)
    algorithm, sampler, test, *_ = build(config, Settings(execution="jit"))
    state = algorithm.init(fedsim.rng.root(0))
    for round in range(20):
        state, _ = algorithm.apply(state, sampler.cohort(round))
    assert fedsim.evaluate(algorithm.model, state.params, test).overall["loss"] < 1e-3
    # The model is that of the standardized columns, which least squares finds, too.
    x, y = (sampler.data.columns[name].astype(np.float64) for name in "xy")
    best = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
    np.testing.assert_allclose(state.params["linear"]["w"][:, 0], best[:2], atol=0.03)


def test_a_configuration_records_the_content_and_refuses_another(table, tmp_path):
    config = RunConfig(dataset=name_of(tmp_path), seed=5)
    assert f"file:{tmp_path}/people.csv#sha256=" in config.dataset and "seed=5" in config.drawn_dataset
    assert RunConfig(dataset=config.dataset, seed=5) == config
    assert datasets.load(config.drawn_dataset).train.num_examples == 96
    with (tmp_path / "people.csv").open("a") as file:
        file.write("u1,3,4,Bern,high,5\n")
    with pytest.raises(ValueError, match="people.csv has changed since the run was configured"):
        datasets.load(config.drawn_dataset)


def test_a_model_gets_its_shape_from_the_file(table, tmp_path):
    model = build(RunConfig(dataset=name_of(tmp_path), model="dense(hidden=[7])", clients=6), Settings()).algorithm.model
    shapes = {name: leaf["w"].shape for name, leaf in model.init(fedsim.rng.root(0)).items()}
    assert shapes == {"linear": (2, 7), "linear_1": (7, 2)}


def test_arrays_keep_their_shapes_and_whole_numbers(tmp_path):
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, [40, 4, 4, 1], np.uint8), draw.integers(0, 3, 40)
    np.savez(tmp_path / "a.npz", x=images, y=labels, user=np.arange(40) % 4)
    with pytest.raises(ValueError, match=r"column 'x' has arrays \[4, 4, 1\], got client='x'.*one of y, user"):
        datasets.load(f"{tmp_path}/a.npz", client="x")
    splits = datasets.load(f"{tmp_path}/a.npz", client="user", features="x")
    both = np.concatenate([splits.train.columns["x"], splits.test.columns["x"]])
    assert both.dtype == np.uint8
    np.testing.assert_array_equal(np.unique(both, axis=0), np.unique(images, axis=0))
    assert splits.description.default_model == "dense(shape=[4, 4, 1], num_classes=3)"


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "bnd"}, r"no column 'bnd'. Did you mean 'band'\? Its columns are user, age, .*correct label= \(--label\)"),
        ({"client": "usr"}, r"no column 'usr'. Did you mean 'user'.*correct client= \(--client-column\)"),
        ({"features": "age,incme"}, r"no column 'incme'. Did you mean 'income'.*features= \(--features\)"),
        ({"client": ""}, r"does not say which client has which row.*partition= \(--partition\), such as iid"),
        ({"label": ""}, r"give the column with the labels, label= \(--label\), one of user, age"),
        ({"label": "price", "task": "classification"}, "label 'price' has fractions, got task='classification'"),
        ({"task": "regression"}, "label 'band' is text, such as '.*', got task='regression'"),
        ({"task": "clustering"}, "task='clustering'"),
        ({"partition": "iid"}, "client or partition, got client='user' and partition='iid'"),
        (
            {"client": "", "label": "price", "partition": "shards"},
            "no classes, because 'price' has none, got partition='shards'",
        ),
        ({"alpha": 0.1}, "no option 'alpha' without a partition"),
        ({"clients": 3}, "no option 'clients' without a partition: leave it out"),
        ({"features": "band"}, r"has 'band', the label or client"),
        ({"test_fraction": 0.01}, "no examples are left for test, because the 6 clients have 20.0 on average"),
    ],
)
def test_errors_name_the_column_and_the_option(table, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        datasets.load(name_of(tmp_path, **options))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("user,x,y\nann,1,0\nbob,,1\nbob,,1\n", {}, r"line 3 and 1 more rows have no value of 'x'.*\(--missing drop\)"),
        ("user,x,y\nann,1,0\nbob,?,1\nbob,2,1\n", {}, r"line 3: column 'x' has '\?' among numbers"),
        ("user,x,y\nann,1,0\nbob,?,1\nbob,2,1\n", {"features": "x"}, r"line 3: column 'x' has '\?' among numbers.*features="),
        ("user,x,y\nann,1,2\nbob,1,none\nbob,2,3\n", {}, r"line 3: column 'y' has 'none' among numbers.*task='classification'"),
        ("user,x,y\nann,1,2\nbob,1,?\nbob,2,3\n", {"task": "regression"}, r"line 3: column 'y' has '\?' among numbers"),
        ('user,x,y\nann,1,0\nbob,"1,234",1\nbob,"5,678",1\n', {"features": "x"}, "line 3: column 'x' has '1,234'.*, as 1234"),
        (
            'user,x,y\nann,1,"-1,234.5"\nbob,2,"5,678"\n',
            {},
            "line 2: column 'y' has '-1,234.5' among.*, as -1234.5, or give task",
        ),
        ("user,x,y\nann,1,0\nbob,inf,1\nbob,2,1\n", {}, "line 3 has an infinite 'x'"),
        ("user,x,y\nann,1,0\nann,2,1\nann,3,1\n", {"split": "by_client"}, "has one client, which cannot be set apart"),
        ("user,x,y\nann,1,0\nbob,2,0\n", {}, "label 'y' has one value only, 0"),
        ("user,x,y\n" + "".join(f"ann,1,{each}\n" for each in range(30)), {}, "30 different whole numbers.*task='regression'"),
    ],
)
def test_errors_name_the_line(tmp_path, content, options, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        datasets.load(f"{tmp_path}/a.csv", client="user", **options)


def test_texts_that_are_mostly_no_numbers_are_classes_and_categories(tmp_path):
    lines = [f"{client},{x},{y}" for client in ("ann", "bob") for x, y in [("a", "no"), ("b", "7"), ("3", "yes")] * 5]
    (tmp_path / "a.csv").write_text("\n".join(["user,x,y", *lines]))
    found = datasets.load(f"{tmp_path}/a.csv", client="user", features="x")
    assert found.description.class_names == ["7", "no", "yes"] and found.train.columns["x"].shape[1:] == (3,)
    codes = ["250", "401", "428", "428", "V57", "E909", "V30"] * 6
    (tmp_path / "c.csv").write_text(
        "\n".join(["user,x,y", *(f"{'ann' if i % 3 else 'bob'},{x},{i % 2}" for i, x in enumerate(codes))])
    )
    assert datasets.load(f"{tmp_path}/c.csv", client="user", features="x").train.columns["x"].shape[1:] == (6,)
    # Classes that are mostly numbers are named as such.
    (tmp_path / "b.csv").write_text(
        "\n".join(["user,x,y", *(f"ann,{x},{'other' if x == 7 else x % 3}" for x in range(40)), "bob,1,1"])
    )
    found = datasets.load(f"{tmp_path}/b.csv", client="user", task="classification", test_fraction=0.1)
    assert found.description.class_names == ["0", "1", "2", "other"]


def test_rows_without_a_value_are_dropped_on_request(tmp_path):
    lines = [f"{client},{x},{x % 2}" for client in ("ann", "bob") for x in range(10)]
    (tmp_path / "a.csv").write_text("\n".join(["user,x,y", "bob,,1", *lines, ",3,0"]))
    with pytest.warns(UserWarning, match="a.csv: dropped 2 of 22 rows, which lack a value"):
        splits = datasets.load(f"{tmp_path}/a.csv", client="user", missing="drop")
    assert (splits.train.sizes + splits.test.sizes).tolist() == [10, 10]


def test_a_file_with_a_test_part_of_its_own_takes_no_other_split(tmp_path):
    examples = [{"x": 1.0, "y": 0}, {"x": 2.0, "y": 1}]
    lines = [json.dumps({"client_id": client, "train": examples, "test": examples}) for client in "ab"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"has its own test part, got split='by_client' \(--split\): leave it out, or give a"):
        datasets.load(f"{tmp_path}/a.jsonl", split="by_client")
    splits = datasets.load(f"{tmp_path}/a.jsonl", split="by_client", test_fraction=0.5)
    assert (splits.train.num_examples, splits.test.num_examples) == (4, 4)
    assert set(splits.train.client_ids).isdisjoint(splits.test.client_ids)


@pytest.mark.parametrize("options", ["", "(partition='iid', clients=3)"])
def test_a_validation_part_of_its_own_is_kept(tmp_path, options):
    parts = {"train": [1.0, 2.0, 6.0], "test": [4.0], "val": [5.0, 3.0]}
    lines = [{"client_id": name} | {part: [{"x": x, "y": int(x) % 2} for x in parts[part]] for part in parts} for name in "ab"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    splits = datasets.load(f"{tmp_path}/a.jsonl{options}")
    assert [splits.train.num_examples, splits.test.num_examples, splits.validation.num_examples] == [6, 2, 4]
    mean, deviation = np.mean(parts["train"]), np.std(parts["train"])
    expected = (np.repeat(sorted(parts["val"]), 2) - mean) / deviation
    np.testing.assert_allclose(np.sort(splits.validation.columns["x"][:, 0]), expected, rtol=1e-6)


def test_one_client_gives_a_warning(tmp_path):
    (tmp_path / "a.csv").write_text("user,x,y\n" + "".join(f"ann,{x},{x % 2}\n" for x in range(10)))
    with pytest.warns(UserWarning, match="a.csv has one client"):
        datasets.load(f"{tmp_path}/a.csv", client="user")
