"""Vertical algorithms on real tables reach what scikit-learn's logistic regression reaches on all columns."""

import dataclasses
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import fedsim
from fedsim import vertical
from fedsim.reproductions import Request
from fedsim.reproductions import _vertical as tables

DATA = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_real = pytest.mark.skipif(
    not (DATA / "tabular_vfl").is_dir(), reason="real data are absent: set FEDSIM_TEST_DATA to their folder"
)


def trained(name, algorithm, steps, **options):
    """Returns the scores after training on a table, and the data."""
    task = tables._TABLES[name]
    train, test = task.load(Request(data=DATA))
    model = task.model(train)
    made = algorithm(model=model, optimizer=tables.optimizer(task, steps, len(train)), **options)
    with jax.numpy_dtype_promotion("standard"):  # which optax.adam requires
        params, _ = tables._train(made, train, task.batch_size, steps, seed=0)
        return fedsim.evaluate(model.joint, params, test.pooled()).overall, train, test


@pytest.mark.parametrize("parties", [pytest.param(("B",), marks=pytest.mark.slow), ("A", "B")], ids="+".join)
def test_one_organization_takes_the_steps_of_split_learning(parties):
    task, steps = tables._DIGITS, 3
    data = task.load(Request())[0].only(*parties)
    model = task.model(data)
    algorithm = vertical.SplitLearning(model=model, optimizer=tables.optimizer(task, steps, len(data)))
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = tables._train(algorithm, data, task.batch_size, steps, seed=1)
        found = tables._central(task, model, data, steps)(1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.slow
@needs_real
def test_split_learning_reaches_the_auc_of_both_on_a_small_table():
    scores, _, _ = trained("breast", vertical.SplitLearning, steps=400)
    assert scores["AUC"] == pytest.approx(0.99745, abs=0.002)  # scikit-learn; 0.99289 with the columns of one party


@needs_real
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected", "sizes", "widths"),
    [
        ("default_credit", {"AUC": 0.72422}, (30_000, 30_000), (13, 10)),
        ("adult", {"accuracy": 0.8531, "AUC": 0.90543}, (32_561, 16_281), (50, 58)),
        ("a9a", {"accuracy": 0.84976, "AUC": 0.90222}, (32_561, 16_281), (67, 56)),
    ],
)
@pytest.mark.parametrize("algorithm", [vertical.SplitLearning, vertical.FedBCD])
def test_vertical_algorithms_reach_the_scores_of_the_joint_model(name, expected, sizes, widths, algorithm):
    scores, train, test = trained(name, algorithm, steps=1500)
    assert (len(train), len(test)) == sizes and tuple(x.shape[1] for x in train.features.values()) == widths
    for measure, value in expected.items():
        assert scores[measure] == pytest.approx(value, abs=0.005)


@needs_real
@pytest.mark.slow
def test_logistic_regression_of_the_joint_model_is_that_of_scikit_learn():
    """The same minimizer, weight by weight, with the penalty of C = 1."""
    task = tables._TABLES["breast"]
    data, _ = task.load(Request(data=DATA))
    model = task.model(data)
    size = len(data)
    algorithm = vertical.SplitLearning(model=model, optimizer=tables.optimizer(dataclasses.replace(task, rate=0.3), 3000, size))
    with jax.numpy_dtype_promotion("standard"):
        params, _ = tables._train(algorithm, data, size, 3000, seed=0)
    found = np.concatenate([own["bottom"]["mlp/~/linear_0"]["w"][:, 0] for own in (params["A"], params["B"])])
    x = np.concatenate([data.features["A"], data.features["B"]], axis=1)
    expected = LogisticRegression(C=1.0, max_iter=10_000, tol=1e-8).fit(x, data.labels).coef_[0]
    np.testing.assert_allclose(found, expected, atol=0.01)
