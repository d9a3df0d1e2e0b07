"""`fedsim reproduce`: its lists and errors, curves, files of rows, and each experiment in a tiny setting."""

from __future__ import annotations

import functools
import gzip
import json
import struct

import h5py
import jax
import numpy as np
import optax
import pytest

import fedsim
from fedsim import reproductions
from fedsim.commands import main
from fedsim.reproductions import Extent, Request, Row, _random_quadratics, rounds_to_target
from fedsim.reproductions import _attacks_and_defenses as attacked
from fedsim.reproductions import _diloco as language
from fedsim.reproductions import _fedprox_stragglers as stragglers
from fedsim.reproductions import _flute_shakespeare as roles
from fedsim.reproductions import _qffl_fairness as fairness
from fedsim.reproductions import _scaffold_emnist as drift
from fedsim.reproductions import _scaffold_quadratics as two_functions
from fedsim.reproductions import _unus_dssgd as selective
from fedsim.reproductions import _unus_faults as faulty
from fedsim.reproductions import _unus_staleness as stale
from fedsim.reproductions._clock import SPEEDS, Task, TimedCurve, train_on_clock
from fedsim.reproductions._curve import Curve
from fedsim.reproductions._fedavg_mnist import CASES
from fedsim.reproductions._tables import markdown_table
from fedsim.samplers import UniformSampler
from fedsim.systems import Policy, StaleSynchronous, schedule

DRAW = np.random.default_rng(0)


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Creates a folder with a subfolder for each dataset; the datasets are small and consist of noise."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "mnist").mkdir()
    for split, count in (("train", 400), ("t10k", 200)):
        images, labels = DRAW.integers(256, size=(count, 28, 28)).astype(np.uint8), np.arange(count, dtype=np.uint8) % 10
        (folder / "mnist" / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / "mnist" / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    images, labels = DRAW.integers(256, size=(300, 28, 28)).astype(np.uint8), (np.arange(300) % 62).astype(np.uint8)
    (folder / "emnist_byclass").mkdir()
    np.savez(folder / "emnist_byclass" / "emnist_byclass_test.npz", x=images, y=labels)
    (folder / "vehicle_sensor").mkdir()
    x, y = DRAW.normal(size=(240, 100)).astype(np.float32), DRAW.choice([-1, 1], 240)
    np.savez(folder / "vehicle_sensor" / "vehicle_train_part.npz", x=x, y=y, client=np.arange(240) % 12)
    (folder / "femnist").mkdir()
    for split, count in (("train", 6), ("test", 2)):
        with h5py.File(folder / "femnist" / f"femnist_{split}.h5", "w") as file:
            for writer in range(12):
                file[f"examples/w{writer}/pixels"] = DRAW.integers(256, size=(count, 28, 28)).astype(np.uint8)
                file[f"examples/w{writer}/label"] = DRAW.integers(62, size=count).astype(np.int32)
    tables = folder / "tabular_vfl"
    tables.mkdir()
    draw = np.random.default_rng(1)
    for party, (names, labels) in {"guest": ("x0,x1", "y,"), "host": ("x0,x1,x2", "")}.items():
        rows = [[i, *([i % 2] if labels else []), *draw.normal(size=len(names.split(",")))] for i in draw.permutation(40)]
        lines = [f"id,{labels}{names}", *(",".join(map(str, row)) for row in rows)]
        (tables / f"breast_hetero_{party}.csv").write_text("\n".join(lines))
    for split in ("data", "test"):
        labels = np.where(np.arange(60) % 3, "<=50K", ">50K")[:, None]
        cells = [draw.normal(size=[60, 7]).round(2).astype(str), draw.choice(["Doctorate", "B", "?"], [60, 7]), labels]
        names = [*"abcdefg", "education", *"ijklmn", "classification"]
        rows = map(", ".join, np.concatenate(cells, axis=1).tolist())
        (tables / f"adult.{split}").write_text("\n".join([", ".join(names), *rows]))
    for name in ("a9a", "a9a.t"):
        lines = [f"{1 if i % 3 else -1} {1 + i % 67}:1 {68 + i % 56}:1 \n" for i in range(60)]
        (tables / f"{name}.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (folder / "stackexchange").mkdir()
    (folder / "stackexchange" / "posts.word_count").write_text("".join(f"w{i} {9000 - i}\n" for i in range(language.WORDS)))
    users = []
    for user in range(80):  # of ten sites: site 0 has the longest paragraphs
        texts = [{"tokens": " ".join(f"w{i}" for i in draw.integers(3000, size=90 - 8 * (user % 10)))} for _ in range(22)]
        users.append(json.dumps({"client_id": f"site{user % 10}:{user}", "train": texts[:20], "test": texts[20:]}))
    (folder / "stackexchange" / "posts.jsonl.gz").write_bytes(gzip.compress("\n".join(users).encode()))
    (folder / "shakespeare_tff").mkdir()
    for split, count in (("train", 3), ("test", 1)):
        with h5py.File(folder / "shakespeare_tff" / f"shakespeare_{split}.h5", "w") as file:
            for role in range(4):
                speeches = ["".join(draw.choice(list("abc "), 70)) for _ in range(count)]
                file[f"examples/PLAY_{role}/snippets"] = np.array(speeches, h5py.string_dtype())
    return folder


def test_the_list_has_every_name_and_its_duration(capsys):
    assert main(["reproduce"]) == 0
    out = capsys.readouterr().out
    for name, reproduction in reproductions.REPRODUCTIONS.items():
        assert f"{name} " in out and reproduction.title in out and f"takes {reproduction.duration}" in out


@pytest.mark.parametrize("name", reproductions.REPRODUCTIONS)
def test_cases_are_listed_without_data(name, capsys):
    assert main(["reproduce", name, "--cases"]) == 0
    cases = capsys.readouterr().out.split()
    assert cases == list(reproductions.get(name).cases(Request()))
    assert main(["reproduce", name, "--cases", "--only", cases[-1]]) == 0
    assert capsys.readouterr().out.split() == cases[-1:]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fedavgg"], "There is no reproduction 'fedavgg'. Did you mean 'fedavg' or 'unus_fedavg'?"),
        (["fedavg", "--seeds", "0"], "Expected seeds >= 1, or None, got seeds=0: give a positive whole number."),
        (["fedavg", "--rounds", "-3"], "Expected rounds >= 1, or None, got rounds=-3: give a positive whole number."),
        (
            ["fedavg", "--data", "/nowhere"],
            "There is no folder /nowhere. With --data, give the folder that has a folder for each dataset.",
        ),
        (["fedavg", "--only", "cnn-idd-b10"], "fedavg has no case 'cnn-idd-b10'. Did you mean 'cnn-iid-b10'"),
    ],
)
def test_wrong_input_prints_one_line_and_exits_with_status_2(arguments, expected, capsys, tmp_path):
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "out.json")]) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("fedsim: error: ") and expected in error and "Traceback" not in error
    assert not (tmp_path / "out.json").exists()


def test_unknown_option(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "fedavg", "--sedes", "3"])
    assert stop.value.code == 2 and "--sedes" in capsys.readouterr().err


def test_the_error_about_missing_data_names_the_folder_and_files(tmp_path, capsys):
    (tmp_path / "something").write_text("")
    assert main(["reproduce", "fedavg", "--only", "2nn-iid-b10", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert f"No 'mnist' in {tmp_path}, which holds something" in error and "train-images-idx3-ubyte.gz" in error


def test_a_file_may_be_in_its_folder_or_in_the_data_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Cannot download letters. Give --data DIR with a file DIR/a/b\*.npz"):
        Request().file("a", "b*.npz", "letters")
    with pytest.raises(FileNotFoundError, match=r"Expected one file b\*.npz with letters in .*, which has no files"):
        Request(data=tmp_path).file("a", "b*.npz", "letters")
    (tmp_path / "b1.npz").write_text("")
    assert Request(data=tmp_path).file("a", "b*.npz", "letters") == tmp_path / "b1.npz"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b2.npz").write_text("")
    assert Request(data=tmp_path).file("a", "b*.npz", "letters") == tmp_path / "a" / "b2.npz"


@pytest.mark.parametrize(
    ("scores", "target", "expected"),
    [
        # The best scores so far are 0.2, 0.6, 0.6, 0.9; 0.75 is halfway between rounds 3 and 4, although round 3 has score 0.1.
        ([0.2, 0.6, 0.1, 0.9], 0.75, 3.5),
        ([0.2, 0.6, 0.1, 0.9], 0.6, 2.0),
        ([0.2, 0.6, 0.1, 0.9], 0.1, 1.0),
        ([0.2, 0.6, 0.1, 0.9], 0.91, None),
        ([float("nan"), 0.6, 0.8, 0.9], 0.5, 2.0),
        ([float("nan"), 0.4, 0.8, 0.9], 0.6, 2.5),
        ([], 0.5, None),
    ],
)
def test_rounds_to_target(scores, target, expected):
    rounds = list(range(1, len(scores) + 1))
    assert rounds_to_target(rounds, scores, target) == (expected if expected is None else pytest.approx(expected))
    longer = rounds_to_target([5 * r for r in rounds], scores, target)
    assert longer == (expected if expected is None else pytest.approx(5 * expected))


@pytest.mark.slow
def test_training_stops_at_the_target_and_evaluates_at_the_interval(data):
    splits = fedsim.datasets.load("mnist", data=data / "mnist", clients=10)
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.logistic((28, 28, 1), 10), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10)
    )
    sampler = UniformSampler(splits.train, clients=2, seed=3)
    curve = reproductions.train(algorithm, sampler, rounds=120, every=60, score=lambda state: float(state.round))
    assert (curve.rounds, curve.scores, int(curve.state.round)) == ([60, 120], [60.0, 120.0], 120)
    stopped = reproductions.train(algorithm, sampler, rounds=120, score=lambda state: float(state.round), until=2.0)
    assert stopped.rounds == [1, 2] and stopped.rounds_to_target(1.5) == 1.5
    run = fedsim.experiment.run(algorithm, sampler, rounds=2, progress=False)
    for ours, theirs in zip(jax.tree.leaves(stopped.state), jax.tree.leaves(run.state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def row(case, **fields):
    return Row(**{"case": case, "measure": "rounds", "paper": "87", "ours": "90", "seeds": 3, "seconds": 1.0} | fields)


def made(rows_of, name="made"):
    about = {"title": "a title", "paper": "a paper", "duration": "no time", "required_data": "nothing", "notes": "all"}
    return reproductions.Reproduction(name=name, cases=lambda request: rows_of, **about)


def test_new_rows_replace_those_of_their_case_unless_they_are_reduced(tmp_path):
    out = tmp_path / "folder" / "made.json"
    both = made({"a": lambda: [row("A")], "b": lambda: [row("B", note="why")]})
    assert [record["id"] for record in reproductions.reproduce(both, Request(), only=["b"], out=out)] == ["b"]
    reproductions.reproduce(both, Request(), only=["a"], out=out)
    stored = json.loads(out.read_text())
    assert [record["case"] for record in stored["rows"]] == ["A", "B"]  # in the order of the cases
    assert stored["rows"][0].keys() >= {"date", "cpu", "cores", "commit", "versions", "settings", "values"}
    quick, messages = made({"a": lambda: [row("A", ours="1", reduced="1 of 3 seeds")], "b": lambda: [row("B", ours="70")]}), []
    reproductions.reproduce(quick, Request(log=messages.append), out=out)
    assert [record["ours"] for record in reproductions.read(out)] == ["90", "70"]
    assert messages == [f"The old rows of a remain in {out}, because they have more seeds or are less reduced."]


def test_rows_of_another_process_remain(tmp_path):
    out = tmp_path / "made.json"

    def meanwhile():
        reproductions.reproduce(made({"b": lambda: [row("B")]}), Request(), out=out)
        return [row("A")]

    reproductions.reproduce(made({"a": meanwhile}), Request(), out=out)
    assert sorted(record["case"] for record in reproductions.read(out)) == ["A", "B"]
    assert list(tmp_path.iterdir()) == [out]


def test_rows_before_an_error_are_written(tmp_path):
    def fails():
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        reproductions.reproduce(made({"a": lambda: [row("A")], "b": fails}), Request(), out=tmp_path / "o.json")
    assert [record["case"] for record in reproductions.read(tmp_path / "o.json")] == ["A"]


def test_another_file_is_not_overwritten(tmp_path):
    out = tmp_path / "o.json"
    reproductions.reproduce(made({"a": lambda: [row("A")]}), Request(), out=out)
    with pytest.raises(ValueError, match="belongs to the reproduction 'made', not 'other'. Choose another file with --out"):
        reproductions.reproduce(made({"a": lambda: [row("A")]}, "other"), Request(), out=out)
    for text in ("[1, 2]", '{"name": "made", "rows": 3}', '{"name": "made", "rows": [3]}', '{"name": "made", "rows": [{}]}'):
        out.write_text(text)
        with pytest.raises(ValueError, match="is not a file of a reproduction. Choose another file with --out"):
            reproductions.reproduce(made({"a": lambda: [row("A")]}), Request(), out=out)
        assert out.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    def ran():
        raise AssertionError("ran first")

    (tmp_path / "file").touch()
    for out, reason in ((tmp_path, "it is a folder"), (tmp_path / "file/rows.json", "File exists")):
        with pytest.raises(ValueError, match=rf"Cannot write {out} \({reason}.*Choose another file with --out"):
            reproductions.reproduce(made({"a": ran}), Request(), out=out)


def test_the_table_says_how_a_run_is_reduced():
    extent = Request(rounds=5, seeds=2).extent(seeds=3, rounds=200)
    assert extent == Extent(range(2), 5, 3, 200) and extent.reduced() == "2 of 3 seeds, 5 of 200 rounds"
    assert Request(quick=True).extent(seeds=3, rounds=200, quick_rounds=4) == Extent(range(1), 4, 3, 200)
    assert Request(seeds=5).extent(seeds=3, rounds=200).reduced() == ""
    record = {**row("A", reduced=extent.reduced(), note="why").__dict__}
    assert "REDUCED: 2 of 3 seeds, 5 of 200 rounds. why" in reproductions.text_table([record])
    assert "| REDUCED: 2 of 3 seeds, 5 of 200 rounds. why |" in markdown_table([record])


def test_clients_have_two_digits_and_sizes_follow_a_power_law():
    labels = DRAW.integers(10, size=60_000)
    parts = stragglers.two_digits(labels, clients=1000, seed=0)
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows) > 58_000
    assert all(set(labels[part]) == {client % 10, (client + 1) % 10} for client, part in enumerate(parts))
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() >= 10 and np.median(sizes) < sizes.mean() / 1.5


def test_statistics_over_devices():
    found = fairness.accuracy_statistics(np.array([0.0, 0.1] + [0.5] * 16 + [0.9, 1.0]))
    expected = [50.0, 5.0, 95.0, np.var([0, 10, *[50] * 16, 90, 100])]
    assert list(found.values()) == pytest.approx(expected)


def test_a_linear_svm_learns_linearly_separable_data(data):
    train_data, test_data = fairness.vehicle(Request(data=data), seed=1)
    assert train_data.num_clients == 12 and set(test_data.sizes) == {5} and set(train_data.sizes) == {15}
    x = train_data.columns["x"]
    labels = np.where(x[:, 0] + x[:, 1] > 0, 1, -1).astype(np.float32)
    separable = fedsim.FederatedData.from_arrays({"x": x, "y": labels}, sizes=train_data.sizes)
    model = fairness.svm(100, 1 / 64)
    algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.5), batches=fedsim.Batches(size=5))
    result = fedsim.experiment.run(
        algorithm, UniformSampler(separable, clients=12, seed=0), rounds=30, test_data=separable, progress=False
    )
    assert result.evaluation.overall["accuracy"] > 0.9


@pytest.mark.parametrize(("percent", "classes"), [(0, (1, 2)), (50, (20, 62)), (100, (30, 50))])
def test_the_similarity_determines_the_classes_of_a_client(percent, classes):
    labels = np.repeat(np.arange(62), 100)
    parts = drift.partition_by_similarity(labels, clients=100, percent=percent, seed=0)
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows) == len(labels) and max(map(len, parts)) - min(map(len, parts)) <= 2
    class_counts = [len(set(labels[part])) for part in parts]
    assert classes[0] <= min(class_counts) and max(class_counts) <= classes[1]


def test_a_clock_changes_no_synchronous_round_and_a_round_takes_as_long_as_its_slowest_client(data):
    algorithm, sampler, score = CASES["2nn-iid-b10"].build(Request(data=data), fedsim.models.logistic((28, 28, 1), 10), 0, 0.1)
    expected = reproductions.train(algorithm, sampler, rounds=3, score=score)
    found = train_on_clock(algorithm, sampler, updates=30, per_step=10, every=10, score=score, devices=SPEEDS)
    assert found.curve.rounds == [1, 2, 3] and found.curve.scores == expected.scores
    assert found.updates.tolist() == [10, 20, 30]
    seconds = SPEEDS.draw(sampler.data.client_ids, sampler.key).seconds_per_step  # of a step; every client takes one
    rounds = [seconds[sampler.cohort(number).clients].max() for number in range(3)]
    np.testing.assert_allclose(found.times, np.cumsum(rounds))


@pytest.mark.slow
def test_a_clock_ends_after_a_number_of_updates(data):
    algorithm, sampler, score = CASES["2nn-iid-b10"].build(Request(data=data), fedsim.models.logistic((28, 28, 1), 10), 0, 0.1)
    model = StaleSynchronous(bound=2)
    found = train_on_clock(algorithm, sampler, updates=25, every=10, score=score, devices=SPEEDS, synchronization=model)
    counts = found.schedule.steps.updates
    assert found.updates[-1] == counts[: found.curve.rounds[-1]].sum() >= 25 > counts[: found.curve.rounds[-1] - 1].sum()


def test_participants_alone_and_pooled(data):
    digits = fedsim.datasets.load("mnist", data=data / "mnist", partition="iid", clients=100).train
    several, one, pooled = (selective._participants(digits, form) for form in ("distributed", "alone", "pooled"))
    assert (several.num_clients, one.num_clients, pooled.num_clients) == (30, 1, 1)
    assert one.client_ids == digits.client_ids[:1] and one.num_examples == 4
    np.testing.assert_array_equal(pooled.client(0)["x"], np.concatenate([client["x"] for client in several.clients()]))


def test_accuracies_on_shakespeare_are_shown_at_rounds_that_double_and_at_the_last(data, monkeypatch):
    found = iter((0, 1))

    def curve(algorithm, sampler, *, rounds, score, every):
        at, seed = [*range(every, rounds, every), rounds], next(found)
        return Curve(at, [seed + number / 10 for number in at], None, 7.0)

    monkeypatch.setattr(roles, "train", curve)
    (case,) = reproductions.get("flute_shakespeare").cases(Request(data=data, seeds=2, rounds=160)).values()
    rows = list(case())
    assert [row.case for row in rows] == ["after 25 rounds", "after 50 rounds", "after 100 rounds", "after 160 rounds"]
    assert [list(row.values) for row in rows] == [[2.5, 3.5], [5.0, 6.0], [10.0, 11.0], [16.0, 17.0]]
    assert [row.paper for row in rows] == ["", "", "", "57"] and {row.reduced for row in rows} == {"160 of 1,200 rounds"}
    assert [row.seconds for row in rows] == [14.0, 0.0, 0.0, 0.0] and "accuracy" in rows[0].details


@pytest.mark.slow
def test_orders_of_participants(data):
    several = selective._participants(fedsim.datasets.load("mnist", data=data / "mnist", clients=100).train, "distributed")
    planned = {}
    for order in ("round robin", "random", "asynchronous"):
        sampler, model = selective._order(several, order, 0)
        planned[order] = schedule(sampler, 600, steps=np.full(30, 2), synchronization=model, devices=SPEEDS).updates
    assert planned["round robin"].client.tolist() == [*range(30)] * 20
    assert sorted(planned["random"].client[30:60]) == [*range(30)] != planned["random"].client[30:60].tolist()
    assert planned["random"].staleness.max() == 0
    # With C clients in flight and a buffer of K, the mean staleness is (C - 1) / K in a long run; the first updates have less.
    assert 24 < planned["asynchronous"].staleness.mean() < 29 and np.all(planned["asynchronous"].scale == 1)


def test_all_bounds_of_staleness_keep_workers_together_and_larger_ones_save_time():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(20)}, sizes=[1] * 20)
    sampler, ends = UniformSampler(data, clients=20, seed=0), []
    for bound in (each for each in stale._BOUNDS if each is not None):
        made = schedule(
            sampler,
            400,
            steps=np.full(20, 5),
            synchronization=StaleSynchronous(bound=bound),
            devices=stale._LAWS["varying"][1],
        )
        done = np.zeros(20, int)
        for client in made.updates.client:
            done[client] += 1
            assert done.max() - done.min() <= bound + 1
        order = np.argsort(made.updates.stop, kind="stable")
        ends.append(made.updates.stop[order][399])
    assert ends == sorted(ends, reverse=True) and ends[-1] < ends[0] / 2


def test_faults_cost_as_many_dispatches_as_their_probabilities_say():
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(100)}, sizes=[1] * 100)
    sampler = UniformSampler(data, clients=10, seed=0)
    for (faults, policy), arrives in zip(faulty._KINDS["both"].values(), (0.7 * 0.8 * 0.7, 0.9919**2 * 0.8), strict=True):
        totals = schedule(sampler, 300, steps=np.full(100, 5), faults=faults, policy=policy).totals
        assert totals.aggregated == 3000
        assert totals.aggregated / totals.dispatched == pytest.approx(arrives, rel=0.03)
    assert Policy().retries == 0  # as the notes say


def test_rows_of_faults_are_relative_to_the_run_without():
    def timed(step, scores):
        nothing = {kind: kind(**dict.fromkeys(kind._fields, 0)) for kind in (fedsim.systems.ServerSteps, fedsim.systems.Totals)}
        steps = nothing[fedsim.systems.ServerSteps]._replace(time=step * np.arange(1, 5), updates=np.full(4, 10, np.int32))
        totals = nothing[fedsim.systems.Totals]._replace(dispatched=80, lost=40)
        return TimedCurve(
            Curve([1, 2, 3, 4], scores, None, 1.0), fedsim.systems.Schedule(None, steps, None, totals, 4.0 * step)
        )

    task = Task("made", *[None] * 4, rate=0.1)
    clean, slow = timed(1.0, [0.5, 0.5, 0.5, 0.5]), timed(4.0, [0.1, 0.3, 0.7, 0.7])
    accuracy, relative, multiple, in_time = faulty._rows(task, "bad", [clean], [slow], "")
    assert (accuracy.values, relative.values, multiple.values) == ([pytest.approx(45.0)], [pytest.approx(90.0)], [4.0])
    assert in_time.values == [pytest.approx(40.0)]  # the mean of 0.1 and 0.3, which were there at 8 seconds, over 0.5
    assert "50% of dispatches" in accuracy.note


def test_cases_on_femnist_are_left_out_without_data(tmp_path):
    messages = []
    request = Request(log=messages.append)
    for name in ("unus_staleness", "unus_faults"):
        assert reproductions.reproduce(reproductions.get(name), request, only=["femnist-*"], out=tmp_path / "o.json") == []
    assert set(messages) == {"The cases on FEMNIST are not run: give --data DIR."} and not (tmp_path / "o.json").exists()


TINY = [
    ("fedavg", ["2nn-iid-b10", "2nn-noniid-binf"]),
    ("fedprox", ["iid-0", "1,1-90", "mnist-90"]),
    ("qffl", ["hybrid", "vehicle"]),
    ("scaffold", ["similarity-10"]),
    ("niid_mnist", ["fednova"]),
    ("personalization", ["fedavg", "ditto"]),
    ("fedem_emnist", ["local", "fedem"]),
    ("compression", ["drive-1", "top-1-percent-feedback"]),
    ("robustness", ["mean"]),
    ("unus_fedavg", ["2nn-iid-b10", "deployed"]),
    ("unus_dssgd", ["upload-0.1", "asynchronous-0.1"]),
    ("unus_staleness", ["digits-bound-constant", "femnist-methods"]),
    ("unus_faults", ["digits-losses", "femnist-both"]),
    ("unus_peers", ["fedavg"]),
    ("random_quadratics", ["all-reduce"]),
    ("dropped_messages", ["relaysgd"]),
    ("four_ways", ["stragglers-partial", "femnist"]),
    ("data_parallel", ["slow-1"]),
    ("diloco", ["site-2"]),
    ("vertical", ["digits", "digits-overlap", "digits-missing", "breast", "adult", "a9a"]),
    ("few_labels", ["digits-clients-10", "digits-server-10"]),
    ("transfer", ["labels", "domain"]),
    ("attacks_and_defenses", ["dp-8", "secure"]),
    ("opacus_mnist", ["epsilon-1"]),
    ("dp_ftrl_femnist", ["tree"]),
    ("tff_dp_digits", ["epsilon-2"]),
    ("secagg_cost", ["clients-50"]),
    ("nmse_and_bytes", ["eden-2", "rotated-1"]),
    ("scaffold_quadratics", ["fedavg", "scaffold"]),
    ("flute_mnist", ["softmax", "sigmoid"]),
    ("flute_shakespeare", ["fedavg"]),
    ("afl_adult", ["q-ffl", "afl"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in TINY for case in cases])
def test_every_reproduction_runs_in_a_tiny_setting(name, case, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(drift, "_EPOCHS", (1, 5))  # fewer, because each is compiled with each rate
    monkeypatch.setattr(drift, "search_rate", functools.partial(drift.search_rate, search=False))
    monkeypatch.setattr(stale, "_BOUNDS", (0, None))
    monkeypatch.setattr(stale, "_RATES", (0.1,))
    monkeypatch.setattr(stale, "_MIXINGS", (0.6,))
    out = tmp_path / "o.json"
    options = ["--only", case, "--rounds", "2", "--seeds", "1", "--data", str(data), "--out", str(out)]
    with jax.numpy_dtype_promotion("standard"):  # which users have, and optax.adamw requires
        assert main(["reproduce", name, *options]) == 0
    shown = capsys.readouterr().out
    assert "REDUCED: " in shown and " 2 of " in shown and str(out) in shown
    rows = reproductions.read(out, name)
    assert rows and {record["id"] for record in rows} == {case} and all(record["reduced"] for record in rows)
    assert all(record["seeds"] == 1 for record in rows) and rows[0]["seconds"] > 0


def test_every_reproduction_has_a_tiny_setting():
    assert [name for name, _ in TINY] == list(reproductions.REPRODUCTIONS)


def test_workers_of_a_language_model_have_the_sites_or_a_share_of_every_site(data, monkeypatch):
    monkeypatch.setattr(language, "_EVALUATED", 64)
    by_site, dealt = (language.load(Request(data=data), 4, by_site=own, seed=0) for own in (True, False))
    tokens = [
        sum(int((worker["document"] > 0).sum()) for worker in map(text.train.client, range(4))) for text in (by_site, dealt)
    ]
    # 18 of 20 training paragraphs, each of its words and two ids; a paragraph of n tokens has n - 1 positions.
    assert tokens == [8 * 18 * sum(90 - 8 * site + 1 for site in range(10))] * 2
    assert (
        np.ptp(by_site.train.sizes) <= 0.2 * by_site.train.sizes.max()
        and np.ptp(dealt.train.sizes) <= 0.1 * dealt.train.sizes.max()
    )


@pytest.mark.slow
def test_random_quadratics_have_the_constants_of_the_paper_and_one_method_its_rounds():
    hessians, slopes, start = _random_quadratics.problem(nodes=12, seed=1, zeta2=0.5, r0=25.0)
    values = np.linalg.eigvalsh(hessians.mean(0).astype(np.float64))
    assert values[[0, -1]] == pytest.approx([0.5, 1.0], abs=1e-5) and start @ start == pytest.approx(25.0)
    np.testing.assert_allclose(slopes.sum(0), 0, atol=1e-5)
    assert np.square(slopes).sum(1).mean() == pytest.approx(0.5, rel=1e-5)
    # One method, against a loop in NumPy: all-reduce is gradient descent on the mean.
    (row,) = _random_quadratics._run(Request(quick=True), "all-reduce")
    fewest = []
    hessians, _, start = _random_quadratics.problem(nodes=6, seed=0, zeta2=1.0, r0=100.0)
    for rate in _random_quadratics._METHODS["all-reduce"].rates:
        x, rounds = start.astype(np.float64), 0
        while x @ x >= 1e-6 and rounds < 100:
            x, rounds = x - rate * hessians.mean(0) @ x, rounds + 1
        fewest.append(rounds)
    assert list(row.values) == [min(fewest)] and row.paper == "9"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fedavg", "scaffold", "scaffold-zero"])
def test_two_quadratic_functions_are_minimized_as_by_a_loop_in_numpy(case):
    method, rate, rounds = two_functions._CASES[case], 0.2, 6
    curvatures, g, x = np.array([0.01, 1.0]), np.full(2, 10 / 2**0.5), np.full(2, 50**0.5)
    gradients = (lambda y: 2 * curvatures * y + g, lambda y: -g)
    controls = [gradient(x) if case == "scaffold" else np.zeros(2) for gradient in gradients]
    expected = [0.5 * curvatures @ x**2] if case == "scaffold" else []
    while len(expected) < rounds + (case == "scaffold"):
        mean, ends, changed = np.mean(controls, axis=0), [], []
        for gradient, control in zip(gradients, controls, strict=True):
            y = x
            for _ in range(10):
                y = y - rate * (gradient(y) - (control - mean) * (case != "fedavg"))
            ends.append(y)
            changed.append(control - mean + (x - y) / (10 * rate))
        x, controls = np.mean(ends, axis=0), changed
        expected.append(0.5 * curvatures @ x**2)
    curve = two_functions.trained(method, two_functions.maker(method.cls, 10), two_functions.problem(10.0), rate, rounds)
    np.testing.assert_allclose(curve.scores, -np.array(expected), rtol=1e-4)


def test_a_secure_sum_has_each_of_its_clients_once():
    """Rows of the identity matrix tell the clients apart."""
    sums = attacked._DEFENCES["secure"].released(np.eye(30), rounds=40, seed=0)
    assert (np.diag(sums) == 1).all() and set(sums.ravel()) == {0.0, 1.0} and (sums.sum(1) == 25).all()
