"""Files of the user's own as datasets of `fedsim run` and `fedsim datasets describe`."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fedsim
from fedsim.commands import main
from fedsim.datasets import _file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with people.csv: 6 clients with 10 examples each, of which one line has no age."""
    folder = tmp_path_factory.mktemp("own")
    draw = np.random.default_rng(0)
    ages = draw.integers(20, 70, 60).tolist()
    lines = [f"u{i % 6},{age},{draw.choice(['Bern', 'Basel'])},{'old' if age > 45 else 'young'}" for i, age in enumerate(ages)]
    (folder / "people.csv").write_text("\n".join(["user,age,city,group", *lines, "u1,,Bern,old"]))
    return folder


pytestmark = pytest.mark.filterwarnings("ignore:.*(dropped 1 of 61 rows|left out)")
OPTIONS = ["--client-column", "user", "--label", "group", "--features", "age,city", "--missing", "drop"]


@pytest.fixture(scope="module")
def run(folder):
    """The folder of a run with two rounds, before which the file is divided once."""
    seeds = []
    arguments = [
        "run",
        "--dataset",
        f"{folder}/people.csv",
        *OPTIONS,
        "--rounds",
        "2",
        "--seed",
        "3",
        "--folder",
        f"{folder}/r",
        "--no-progress",
    ]
    divided = _file._divided
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_file, "_divided", lambda *args, **options: seeds.append(options["seed"]) or divided(*args, **options))
        assert main(arguments) == 0
    assert seeds == [3]
    return folder / "r"


@pytest.mark.slow
def test_a_file_is_trained_on_and_its_run_is_loaded_resumed_and_varied(folder, run):
    config = json.loads((run / "config.json").read_text())["config"]
    given = "client='user', label='group', features='age,city', missing='drop'"
    assert config["dataset"].startswith(f"file:{folder}/people.csv#sha256=") and config["dataset"].endswith(f"({given})")
    assert config["clients"] == 6  # as many as there are, because there are fewer than 10
    stored = fedsim.experiment.load(run)
    assert stored.round == 2 and stored.train_data.num_examples + stored.test_data.num_examples == 60
    assert main(["resume", str(run), "--rounds", "3", "--no-progress"]) == 0
    assert (
        main(["run", "--from", str(run), "--split", "by_client", "--clients", "5", "--folder", f"{folder}/s", "--no-progress"])
        == 0
    )
    assert "split='by_client'" in json.loads((folder / "s" / "config.json").read_text())["config"]["dataset"]


def test_a_run_does_not_go_on_with_a_changed_file(folder, run, capsys):
    content = (folder / "people.csv").read_text()
    try:
        (folder / "people.csv").write_text(content + "\nu1,3,Bern,young")
        assert main(["resume", str(run), "--rounds", "5", "--no-progress"]) == 2
    finally:
        (folder / "people.csv").write_text(content)
    assert "people.csv has changed since the run was configured" in capsys.readouterr().err


def test_a_file_is_described_before_its_columns_are_chosen(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["datasets", "describe", f"{folder}/people.csv"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "people.csv: 61 rows",
        "age float64 1",
        "city text 2 different: B",
        "Missing in age: line 62",
        "--client-column",
    ):
        assert part in text


def test_a_file_is_described_in_a_narrow_terminal(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["datasets", "describe", f"{folder}/people.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("age") and "float64" in line for line in lines)


def test_a_file_is_described_and_drawn_as_a_run_reads_it(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    picture = folder / "people.png"
    assert main(["datasets", "describe", f"{folder}/people.csv", *OPTIONS, "--picture", str(picture)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "classification of 'group' in people.csv",
        "x [3] float32 age, city (2 categories), standardized",
        "group: 2 classes",
        "model logistic(shape=[3], num_classes=2)",
        "examples per client: 8 to 8",
    ):
        assert part in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--dataset", "nowhere.csv"], "There is no file"),
        (["run", "--dataset", "synthetic", "--task", "regression"], "The dataset 'synthetic' has no option 'task'"),
        (["run", "--dataset", "{}", "--client-column", "user", "--label", "grop"], "Did you mean 'group'?"),
        (["run", "--dataset", "{}", "--client-column", "user", "--label", "group"], "line 62 has no value of 'age'"),
        (["run", "--dataset", "{}", "--label", "group", "--partition", "iidd", "--missing", "drop"], "Did you mean 'iid'?"),
        (["datasets", "describe", "{}", "--picture", "a.png"], "Expected the label and the clients with --picture a.png"),
    ],
)
def test_errors_are_one_line_with_a_remedy(folder, arguments, expected, capsys):
    assert main([each.format(folder / "people.csv") for each in arguments]) == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_no_hyperparameter_has_the_name_of_an_option_of_data():
    from fedsim.commands._options import DataOptions
    from fedsim.configuration import algorithm_hyperparameters

    names = {"--" + name for name in DataOptions.__dataclass_fields__}
    for cls in (*fedsim.algorithms.ALGORITHMS.values(), *fedsim.decentralized.ALGORITHMS.values()):
        assert names.isdisjoint(f"--{name}" for name in algorithm_hyperparameters(cls))
