"""Validation data: how they are set apart, what is chosen by them, and runs that end early."""

import dataclasses
import re

import numpy as np
import pytest

import fedsim
from fedsim import experiment, metrics, sweeps
from fedsim.commands import main
from fedsim.comparison import read_runs
from fedsim.configuration import RunConfig, Settings, build
from fedsim.configuration._validation import with_validation
from fedsim.experiment import best_round, read_metrics, run_experiment
from fedsim.experiment.driving import Run, arguments_of

DATASET = "digits(clients=12)"
CONFIG = RunConfig(dataset=DATASET, model="digits_logistic", clients=4, rounds=40, evaluate_every=3, validation="0.25")


def rows_of(data):
    return sorted(row.tobytes() for row in np.asarray(data.columns["x"]).reshape(data.num_examples, -1))


@pytest.mark.parametrize("validation", ["0.25", "clients(fraction=0.25)"])
def test_training_and_validation_examples_are_those_of_the_training_data(validation):
    whole = fedsim.datasets.load(DATASET).train
    made = build(RunConfig(dataset=DATASET, validation=validation, clients=2), Settings())
    train, apart = made.sampler.data, made.validation_data
    assert sorted(rows_of(train) + rows_of(apart)) == rows_of(whole)
    if validation == "0.25":
        assert train.client_ids == apart.client_ids == whole.client_ids
        np.testing.assert_allclose(apart.sizes, whole.sizes / 4, atol=1)
    else:
        assert apart.num_clients == 3 and set(train.client_ids) | set(apart.client_ids) == set(whole.client_ids)
    assert made.test_data.num_examples == fedsim.datasets.load(DATASET).test.num_examples
    other = build(RunConfig(dataset="digits(clients=12, seed=0)", validation=validation, seed=1, clients=2), Settings())
    assert rows_of(other.validation_data) != rows_of(apart)  # the run's seed draws it


def test_the_validation_part_of_a_client_is_drawn_independently_of_its_test_part():
    """Of 50 examples, 10 are the test part and 8 of the other 40 the validation part.

    The validation part's mean m follows that of the 40 examples, which is that of the test part times -1/4. With the
    variances 40 / 49 / 10 and 42 / 49 / 8 of the means, the correlation is -1/4 of the ratio of their square roots.
    """
    clients, each = 400, 50
    columns = {"position": np.tile(np.arange(each), clients)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=[each] * clients)
    parts = fedsim.partitioners.split_within_clients(data, {"train": 0.8, "test": 0.2}, seed=0, labels=None)
    whole = dataclasses.replace(fedsim.datasets.load(DATASET), train=parts["train"], test=parts["test"])
    splits = with_validation(whole, "0.2", seed=0)
    means = [part.columns["position"].reshape(clients, -1).mean(1) for part in (splits.test, splits.validation)]
    expected = -np.sqrt((40 / 10) / (42 / 8)) / 4
    assert np.corrcoef(means)[0, 1] == pytest.approx(expected, abs=4 / np.sqrt(clients))


@pytest.mark.slow
def test_both_splits_are_evaluated_and_the_best_round_is_that_of_the_validation_data(tmp_path, capsys):
    built = build(CONFIG, Settings())
    result = run_experiment(built, CONFIG, Settings(folder=str(tmp_path / "run")), progress=False, table=True)
    of_model = fedsim.evaluate(built.algorithm.model, result.state.params, built.validation_data).overall
    line = result.history[-1]
    assert line["validation_loss"] == pytest.approx(of_model["loss"], rel=1e-6)
    assert line["validation_accuracy"] == of_model["accuracy"] != line["test_accuracy"]
    scores = {line["round"]: line["validation_accuracy"] for line in result.history if "validation_accuracy" in line}
    best = max(scores, key=lambda round: (scores[round], -round))
    assert best_round(result.history) == best and f"best       round {best}, by validation" in capsys.readouterr().out
    stored = experiment.load(tmp_path / "run", which="best")
    assert stored.round == best and stored.evaluate(stored.validation_data).overall["accuracy"] == scores[best]
    assert main(["evaluate", str(tmp_path / "run"), "--split", "validation"]) == 0
    assert f"{of_model['accuracy']:.4f}" in capsys.readouterr().out


def test_the_best_round_does_not_follow_the_test_data():
    lines = [
        {"round": 1, "test_accuracy": 0.9, "validation_accuracy": 0.5},
        {"round": 2, "test_accuracy": 0.8, "validation_accuracy": 0.6},
    ]
    assert best_round(lines) == 2


def expected_stop(history, evaluations):
    losses = [(line["round"], line["validation_loss"]) for line in history if "validation_loss" in line]
    for end in range(1, len(losses) + 1):
        seen = [loss for _, loss in losses[:end]]
        if end - 1 - int(np.argmin(seen)) >= evaluations:
            return losses[end - 1][0]
    return None


@pytest.mark.slow
def test_a_run_ends_after_the_same_round_however_it_is_dispatched_or_resumed(tmp_path):
    changes = {"client_learning_rate": 2.0, "rounds": 60}
    whole = dataclasses.replace(CONFIG, **changes)
    stop = expected_stop(run_experiment(build(whole, Settings()), whole, Settings(), progress=False).history, 2)
    assert stop is not None and stop < 57
    config = dataclasses.replace(CONFIG, **{**changes, "stop_when": "no_better(evaluations=2)"})
    ends = []
    for number, length in enumerate((1, 2, None)):
        settings = Settings(folder=str(tmp_path / str(number)), rounds_per_dispatch=length)
        result = run_experiment(build(config, settings), config, settings, progress=False)
        assert "no better validation loss in 2 evaluations" in result.stopped and result.interrupted is None
        ends.append(result.round)
        ended = experiment.read_config(settings.folder)["ended"]
        assert ended == {"round": stop, "rule": "no_better(evaluations=2)", "reason": result.stopped}
        (recorded,) = read_runs(settings.folder)
        assert recorded.is_finished and recorded.state == f"round {stop} of 60: stopped by no_better(evaluations=2)"
        again = run_experiment(build(config, settings), config, settings, progress=False)
        assert (again.round, again.stopped) == (result.round, result.stopped)
        assert len(read_metrics(tmp_path / str(number) / "metrics.jsonl")) == len(result.history)
    assert ends == [stop] * 3


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        ("fedavg", "loss, accuracy"),
        ("ditto", "loss, accuracy, personal_loss, personal_accuracy"),
        ("ifca", "personal_loss, personal_accuracy"),  # Its server has several models.
    ],
)
def test_a_rule_with_an_unknown_metric_is_refused_before_the_first_round(algorithm, names, tmp_path):
    config = RunConfig(algorithm=algorithm, validation="0.2", stop_when="reached(value=0.9, metric='acuracy')", rounds=2)
    settings = Settings(folder=str(tmp_path / "run"), execution="jit")
    with pytest.raises(ValueError, match=f"got metric='acuracy': choose one of {names}\\."):
        run_experiment(build(config, settings), config, settings, progress=False)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_rule_whose_metric_ranks_nothing_is_refused_before_the_first_round():
    made = build(dataclasses.replace(CONFIG, stop_when=None), Settings())
    own = {
        "f1": metrics.F1(),
        "f1_of_classes": metrics.F1(average=None),
        "confusion": metrics.ConfusionMatrix(),
        "entropy": lambda examples, outputs: outputs[:, 0],
    }
    model = dataclasses.replace(made.algorithm.model, metrics=made.algorithm.model.metrics | own)
    algorithm = dataclasses.replace(made.algorithm, model=model)

    def start(metric):
        given = dict(rounds=1, validation_data=made.validation_data, stop_when=f"no_better(evaluations=2, metric='{metric}')")
        return experiment.run(algorithm, made.sampler, **given, progress=False)

    for metric in ("f1_of_classes", "confusion", "entropy"):
        with pytest.raises(ValueError, match=f"with one number, .* got metric='{metric}': choose one of loss, accuracy, f1"):
            start(metric)
    lines = [{"round": round, "validation_f1": [0.5, 0.1], "better": {"validation_f1": "higher"}} for round in (1, 2)]
    for name, options in (("no_better", {"evaluations": 1}), ("reached", {"value": 0.9})):
        with pytest.raises(ValueError, match="got validation_f1, which has an array"):
            experiment.STOP_RULES[name](**options, metric="f1").reason(lines)


def test_rules_read_validation_metrics_bytes_and_simulated_seconds():
    def history(*lines):
        return [{"round": number, **line} for number, line in enumerate(lines, 1)]

    reached, better = experiment.STOP_RULES["reached"](value=0.8), experiment.STOP_RULES["no_better"](evaluations=1)
    assert reached.reason(history({"validation_accuracy": 0.79, "test_accuracy": 0.9})) is None
    assert reached.reason(history({"validation_accuracy": 0.8})) == "the validation accuracy reached 0.8"
    loss = experiment.STOP_RULES["reached"](value=0.5, metric="loss")
    assert loss.reason(history({"validation_loss": 0.6})) is None and loss.reason(history({"validation_loss": 0.5}))
    assert better.reason(history({"validation_loss": None}, {"validation_loss": 0.5})) is None
    assert "no finite value" in better.reason(history({"validation_loss": None}, {"validation_loss": None}))
    spent = experiment.STOP_RULES["spent"](seconds=10)
    clock = history({"simulated_seconds": 6.0}, {"simulated_seconds": 12.0})
    assert spent.reason(clock[:1]) is None and spent.reason(clock) == "12.0 simulated seconds"
    with pytest.raises(ValueError, match="metric='f1': choose one of accuracy"):
        experiment.STOP_RULES["reached"](value=0.5, metric="f1").reason(history({"validation_accuracy": 0.5}))


@pytest.mark.parametrize(("algorithm", "clock"), [("fedavg", ", or give the run a clock"), ("dpsgd", ".")])
def test_a_limit_of_simulated_seconds_needs_a_clock(algorithm, clock):
    def start(**options):
        config = RunConfig(algorithm=algorithm, stop_when="spent(seconds=10)", **options)
        made = build(config, Settings())
        Run(made.algorithm, made.sampler, **arguments_of(made, config, Settings()), evaluate=None, callbacks=[])

    with pytest.raises(ValueError, match=f"got one without: limit megabytes or rounds{re.escape(clock)}"):
        start()
    if algorithm == "fedavg":
        start(step_seconds="1")


@pytest.mark.slow
def test_a_callback_ends_the_run_at_the_next_multiple_of_evaluate_every(tmp_path):
    lines = []

    def callback(line, state):
        lines.append(line["round"])
        return "stop" if line["round"] == 5 else None

    made = build(CONFIG, Settings())
    for length in (1, "auto"):
        given = dict(rounds=20, evaluate_every=4, callbacks=[callback], progress=False, rounds_per_dispatch=length)
        result = experiment.run(made.algorithm, made.sampler, **given, folder=tmp_path / str(length))
        assert (result.round, result.stopped) == (8, "a callback said so after round 5") and max(lines) == 8
        (recorded,) = read_runs(tmp_path / str(length))
        assert recorded.is_finished and recorded.state == "round 8 of 20: stopped by a callback"
    # The callback does not get the lines of the earlier process.
    again = experiment.run(made.algorithm, made.sampler, **given, folder=tmp_path / "auto")
    assert (again.round, again.stopped) == (20, None) and lines[-1] == 20 and lines.count(5) == 2


def test_members_of_a_sweep_end_by_themselves_and_are_chosen_by_validation_data(tmp_path):
    config = dataclasses.replace(CONFIG, rounds=30, stop_when="reached(value=0.85) or spent(megabytes=1)")
    varied = {"client_learning_rate": [0.001, 0.5]}
    result = sweeps.sweep(config, Settings(folder=str(tmp_path)), varied, 1)
    slow, fast = (member.line for member in result.members)
    assert fast["validation_accuracy"] >= 0.85 and fast["round"] < 30 and slow["validation_accuracy"] < 0.85
    assert "best  client_learning_rate=0.5: validation accuracy" in result.table() and "optimistic" not in result.table()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert sweeps.sweep(config, Settings(folder=str(tmp_path)), varied, 1).table() == result.table()
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}


def test_what_cannot_be_right_is_refused(tmp_path):
    def refused(match, **changes):
        config = RunConfig(dataset=DATASET, model="digits_logistic", rounds=2, clients=2, **changes)
        with pytest.raises(ValueError, match=match):
            run_experiment(build(config, Settings()), config, Settings(), progress=False)

    refused("Expected validation data for stop_when", stop_when="no_better(evaluations=1)")
    refused("There is no stop rule 'no_beter'. Did you mean 'no_better'", stop_when="no_beter(evaluations=1)", validation="0.1")
    refused("sets 0 of 12 clients apart", validation="clients(fraction=0.01)")
    refused("sets no example apart", validation="0.001")
    for text in ("1.5", "some", "clients(count=3)"):
        with pytest.raises(ValueError, match="a fraction of each client's examples"):
            RunConfig(validation=text)
    (tmp_path / "own.py").write_text(
        "import fedsim\n"
        "def own(data=None, cache=None):\n"
        "    train = fedsim.datasets.load('digits', clients=4).train\n"
        "    return {'train': train, 'test': train, 'validation': train}\n"
    )
    own = RunConfig(dataset=f"{tmp_path / 'own.py'}:own", model="digits_logistic", rounds=1, clients=2)
    assert build(own, Settings()).validation_data.num_clients == 4
    with pytest.raises(ValueError, match="has validation data of its own"):
        build(dataclasses.replace(own, validation="0.1"), Settings())


def test_a_run_does_not_continue_with_other_validation_data(tmp_path):
    made = build(CONFIG, Settings())

    def train(validation_data, rounds_before_stop):
        stop = lambda line, state: "stop" if line["round"] >= rounds_before_stop else None  # noqa: E731
        return experiment.run(
            made.algorithm, made.sampler, rounds=4, evaluate_every=2, folder=tmp_path / "run", progress=False,
            validation_data=validation_data, callbacks=[stop],
        )  # fmt: skip

    train(made.validation_data, 2)
    with pytest.raises(ValueError, match="validation population"):
        train(made.test_data, 4)
    assert train(made.validation_data, 4).round == 4


def test_the_best_checkpoint_of_a_run_that_gets_more_rounds_is_that_of_the_longer_run(tmp_path):
    settings = Settings(folder=str(tmp_path / "run"), checkpoint_every=100)
    config = RunConfig(model="digits_logistic", clients=2, evaluate_every=2, rounds=5)

    def train(config, scores):
        scores = iter(scores)
        built = build(config, settings)
        run_experiment(built, config, settings, progress=False, evaluate=lambda state: {"accuracy": next(scores)})

    train(config, [0.5, 0.8, 0.9])
    assert experiment.saved_round(tmp_path / "run", "best") == 5
    sweeps.change_rounds(tmp_path / "run", 10, settings)
    train(dataclasses.replace(config, rounds=10), [0.1, 0.2, 0.3])
    assert experiment.saved_round(tmp_path / "run", "best") == 4
