"""Trains and evaluates on real data: ``python -m benchmarks.runs --data DIR`` writes ``docs/runs.md`` and its plots."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedsim
from benchmarks import hardware
from fedsim.configuration import RunConfig, Settings, build
from fedsim.experiment import run_experiment

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"

# Title, folder below --data, and configuration. `fedsim run` with the same options gives the same run.
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "femnist-cnn": (
        "FEMNIST, 300 real writers, CNN",
        "femnist",
        dict(dataset="emnist62", model="emnist_cnn", rounds=200, evaluate_every=10, client_learning_rate=0.1),
    ),
    "femnist-dense": (
        "FEMNIST, 300 real writers, dense 200-200",
        "femnist",
        dict(dataset="emnist62", model="emnist_dense", rounds=1000, evaluate_every=20, client_learning_rate=0.1),
    ),
    "shakespeare-lstm": (
        "Shakespeare, 715 real roles, next character, two LSTM layers of 256",
        "shakespeare_tff",
        dict(
            dataset="shakespeare",
            model="shakespeare_lstm",
            rounds=100,
            batch_size=4,
            max_steps=50,
            evaluate_every=10,
            client_learning_rate=1.0,
        ),
    ),
    "stackexchange-lstm": (
        "Stack Exchange, 2,387 real users, next word, LSTM of 670",
        "stackexchange",
        dict(
            dataset="stackexchange",
            algorithm="fedadam",
            rounds=80,
            clients=20,
            batch_size=16,
            max_steps=16,
            evaluate_every=10,
            client_learning_rate=0.3,
            hyperparameters={"server_learning_rate": 0.003, "tau": 1e-4},
        ),
    ),
    "mnist-writers": (
        "MNIST by its 539 real writers, CNN",
        "mnist",
        dict(dataset="mnist(partition='writers')", model="mnist_cnn", rounds=60, evaluate_every=10, client_learning_rate=0.1),
    ),
    "mnist-shards": (
        "MNIST by shards, 100 clients of two digits each, CNN",
        "mnist",
        dict(dataset="mnist(partition='shards')", model="mnist_cnn", rounds=60, evaluate_every=10, client_learning_rate=0.05),
    ),
}


def constant_prediction(model: fedsim.Model, train: fedsim.FederatedData, test: fedsim.FederatedData) -> float:
    """Returns the test accuracy of a constant prediction: the best of the train split's eight most frequent labels."""
    counts = np.bincount(np.concatenate([np.ravel(train.gather("y", [i])) for i in range(train.num_clients)]))
    outputs = jax.eval_shape(model.apply_for_eval, jax.eval_shape(model.init, jax.random.key(0)), _one_example(model))
    size, shape = outputs.shape[-1], outputs.shape[1:]

    def constant(label: int) -> fedsim.Model:
        def logits(params: Any, examples: Any) -> jax.Array:
            return jnp.broadcast_to(jax.nn.one_hot(label, size), (len(examples["y"]), *shape))

        return dataclasses.replace(model, apply_for_eval=logits)

    candidates = np.argsort(-counts)[:8].tolist()
    return max(fedsim.evaluate(constant(label), {}, test).overall["accuracy"] for label in candidates)


def _one_example(model: fedsim.Model) -> dict[str, jax.ShapeDtypeStruct]:
    specs = {name: spec[0] if isinstance(spec, tuple) else spec for name, spec in model.features.items()}
    return {name: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype) for name, spec in specs.items()}


def train(name: str, data: Path, seed: int) -> dict[str, Any]:
    """Trains one run and returns its record."""
    title, below, options = RUNS[name]
    published = {"clients": 10, "batch_size": 20, "epochs": 1}
    config = RunConfig(**(published | options), data=str(data / below), seed=seed)
    stamp = hardware.stamp("cpu")
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(folder=str(Path(folder) / "run"))
        experiment = build(config, settings)
        result = run_experiment(experiment, config, settings)
    training, test_data = experiment.sampler.data, experiment.test_data
    tested = [line for line in result.history if "test_accuracy" in line]
    return {
        "run": name,
        "title": title,
        **stamp,
        "jax": jax.__version__,
        "config": dataclasses.asdict(dataclasses.replace(config, data=below)),
        "train": [training.num_clients, training.num_examples],
        "test": [test_data.num_clients, test_data.num_examples],
        "most_frequent": round(constant_prediction(experiment.algorithm.model, training, test_data), 4),
        "last": tested[-1],
        "accuracy": {line["round"]: round(line["test_accuracy"], 4) for line in tested},
    }


def recorded() -> list[dict[str, Any]]:
    """Returns the committed results."""
    paths = [RESULTS / f"run-{name}.json" for name in RUNS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def page(records: list[dict[str, Any]]) -> str:
    """Returns the text of ``docs/runs.md``."""
    lines = [
        "# Runs on real data",
        "",
        "`python -m benchmarks.runs --data DIR` writes this page. The configuration, the machine, the date, the commit and all",
        "evaluations of each run are in `benchmarks/results/run-NAME.json`. FEMNIST and Stack Exchange are subsets of the data",
        "that papers use, and are not published: nobody else can repeat these runs exactly, and the accuracies cannot be",
        "compared with published ones. The same commands train on the full datasets (`fedsim datasets describe NAME` says",
        "where they come from). *Constant prediction* is the test accuracy of predicting the same label for every example,",
        "with the best such label.",
        "",
        "| run | seed | rounds × clients | test accuracy | clients: mean, std, worst 10 % | constant prediction |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for record in records:
        config, last = record["config"], record["last"]
        over = ", ".join(f"{last[f'test_accuracy_clients_{key}']:.3f}" for key in ("mean", "std", "worst10"))
        lines.append(
            f"| {record['title']} | {config['seed']} | {config['rounds']} × {config['clients']} | "
            f"**{last['test_accuracy']:.4f}** | {over} | {record['most_frequent']:.4f} |"
        )
    for record in records:
        config = dict(record["config"])
        published = fedsim.configuration.published(config["dataset"], config["algorithm"], config["model"]).values
        usual = dataclasses.asdict(RunConfig()) | published
        # A record of an earlier version may have an option that has another name now; none of them was given in these runs.
        config = {name: value for name, value in config.items() if name in usual and value != usual[name]}
        config |= config.pop("hyperparameters", {})
        given = " ".join(f"--{k.replace('_', '-')} {_shell(v)}" for k, v in config.items())
        lines += [
            "",
            f"## {record['title']}",
            "",
            f"`fedsim run {given}`",
            "",
            f"{record['train'][0]:,} clients with {record['train'][1]:,} training examples; {record['test'][1]:,} test "
            f"examples. {record['cpu']}, {record['cores']} cores, {record['date'][:10]}, commit {record['commit'][:7]}.",
            "",
            f"![{record['title']}: test accuracy over rounds](runs/{record['run']}.png)",
        ]
    return "\n".join(lines) + "\n"


def draw(record: dict[str, Any]) -> None:
    """Draws the test accuracy of a run into ``docs/runs/``."""
    lines = [{"round": int(number), "test_accuracy": accuracy} for number, accuracy in record["accuracy"].items()]
    (DOCS / "runs").mkdir(parents=True, exist_ok=True)
    fedsim.experiment.draw_learning_curve(lines, DOCS / "runs" / f"{record['run']}.png", record["title"])


def _shell(value: Any) -> str:
    text = str(value)
    return f'"{text}"' if "(" in text else text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runs", description=__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with one folder per dataset; without it, the page and its pictures are drawn again",
    )
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fedsim.use_all_cores()
    for name in args.only if args.data else ():
        record = train(name, args.data, args.seed)
        (RESULTS / f"run-{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    for record in recorded():
        draw(record)
    (DOCS / "runs.md").write_text(page(recorded()), encoding="utf-8")


if __name__ == "__main__":
    main()
