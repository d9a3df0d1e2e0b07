"""Published hyperparameters, compared with the tables in the repository of arXiv 2003.00295."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsim
from fedsim import algorithms, datasets, models
from fedsim.configuration import algorithm_hyperparameters
from fedsim.experiment import RunConfig, algorithm_class, published

# Copied from optimization/docs/hyperparameters.md of google-research/federated.
RATES = """
cifar100_image        | -1      | -1.5 | -1.5 | -1.5 | -1    | -1      | 0    | 0    | 0    | 0.5  | -2      | -1   | -1
emnist_autoencoder    | 1.5     | 1    | 1    | 0.5  | 1     | -1.5    | -1.5 | -1.5 | 0    | 0    | -3      | -3   | -3
emnist_character      | -1.5    | -1.5 | -1.5 | -1.5 | -1    | -1      | -2.5 | -2.5 | -0.5 | 0    | -2      | -4   | -4
shakespeare_character | 0       | 0    | 0    | 0    | 0     | -0.5    | -2   | -2   | -0.5 | 0    | -1      | -3   | -3
stackoverflow_word    | -0.5    | -0.5 | -0.5 | -0.5 | -0.5  | -1.5    | -2   | -2   | 0    | 0    | -4      | -5   | -5
stackoverflow_tag     | 2       | 2    | 2    | 2    | 2     | 1       | -0.5 | -0.5 | 0    | 0    | -2      | -5   | -5
"""
SETUPS = """
cifar100_image        | 10                | 20         | 4000
emnist_autoencoder    | 10                | 20         | 3000
emnist_character      | 10                | 20         | 1500
shakespeare_character | 10                | 4          | 1200
stackoverflow_word    | 50                | 16         | 1500
stackoverflow_tag     | 10                | 100        | 1500
"""
TASKS = {
    "cifar100_image": ("cifar100", None),
    "emnist_autoencoder": ("emnist62", "emnist_autoencoder"),
    "emnist_character": ("emnist62", None),
    "shakespeare_character": ("shakespeare", None),
    "stackoverflow_word": ("stackoverflow_word", None),
    "stackoverflow_tag": ("stackoverflow_tag", None),
}
COLUMNS = ["fedadagrad", "fedadam", "fedyogi", "fedavgm", "fedavg"]


def rows(table):
    for line in table.strip().splitlines():
        name, *numbers = line.split("|")
        yield name.strip(), [float(number) for number in numbers]


@pytest.mark.parametrize(("task", "powers"), list(rows(RATES)), ids=[name for name, _ in rows(RATES)])
def test_learning_rates_are_those_of_the_paper(task, powers):
    dataset, model = TASKS[task]
    for column, algorithm in enumerate(COLUMNS):
        result = published(f"{dataset}()", algorithm, model)
        assert result.source.startswith("Reddi et al. 2021 (")
        assert math.log10(result.values["client_learning_rate"]) == pytest.approx(powers[column])
        assert math.log10(result.values["server_learning_rate"]) == pytest.approx(powers[5 + column])
        if column < 3:
            assert math.log10(result.values["tau"]) == pytest.approx(powers[10 + column])
        else:
            assert "tau" not in result.values


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("name", "option"), [("fedprox", "mu"), ("feddc", "alpha"), ("feddyn", "alpha"), ("ditto", "lam")])
def test_a_proximal_term_does_not_overshoot(task, name, option):
    """A step moves the parameters towards the centre by the rate times the strength, and beyond it from 1 on."""
    dataset, model = TASKS[task]
    values = published(dataset, name, model).values
    strength = values.get(option, algorithm_hyperparameters(algorithm_class(name))[option][1])
    assert values["client_learning_rate"] * strength < 1


def test_the_autoencoder_minimizes_the_sum_over_a_batch_of_20():
    model = models.emnist_autoencoder()
    x = np.random.default_rng(0).integers(0, 256, (20, 28, 28, 1)).astype(np.uint8)
    params = model.init(jax.random.key(0))
    outputs = np.asarray(model.apply_for_eval(params, {"x": x}), np.float64)
    errors = np.mean((outputs - x.reshape(20, -1) / 255) ** 2, axis=1)
    batch = fedsim.Batch(examples={"x": jnp.asarray(x)}, mask=jnp.ones(20, bool), key=jax.random.key(0), step=0)
    assert model.train_loss(params, batch) == pytest.approx(errors.sum(), rel=1e-5)
    data = fedsim.FederatedData.from_arrays({"x": x}, sizes=[20])
    assert fedsim.evaluate(model, params, data).overall["loss"] == pytest.approx(errors.mean(), rel=1e-5)


@pytest.mark.parametrize(("task", "numbers"), list(rows(SETUPS)), ids=[name for name, _ in rows(SETUPS)])
def test_training_settings_are_those_of_the_paper(task, numbers):
    values = published(TASKS[task][0], "fedavg", TASKS[task][1]).values
    assert [values[name] for name in ("clients", "batch_size", "rounds")] == numbers


def test_every_value_belongs_to_an_existing_field():
    general = {field.name for field in dataclasses.fields(RunConfig)}
    for dataset in datasets.names():
        for algorithm, cls in algorithms.ALGORITHMS.items():
            values = published(dataset, algorithm).values
            own = set(algorithm_hyperparameters(cls))
            assert set(values) <= general | own, (dataset, algorithm)
            RunConfig(**{name: value for name, value in values.items() if name in general})


def test_unpublished_values_are_marked():
    assert published("digits", "fedavg").source == published("emnist62", "fedprox").source
    assert "not published" in published("emnist62", "fedsgd").source and "not published" in published("mnist", "fedadam").source
    assert published("mine.py:load(size=3)", "fedavg").values == {}
