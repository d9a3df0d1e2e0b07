"""The ROC curve against scikit-learn, and lower bounds of ε for laws whose ε is known."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from fedsim.privacy import Scores


def draws(distance, count, seed):
    draw = np.random.default_rng(seed)
    return Scores(draw.normal(distance, 1, count), draw.normal(0, 1, count))


def test_the_curve_is_that_of_scikit_learn():
    draw = np.random.default_rng(0)
    scores = Scores(draw.integers(0, 9, 50), draw.integers(-3, 6, 70))  # with ties
    labels, values = np.repeat([1, 0], [50, 70]), np.concatenate([scores.inside, scores.outside])
    expected = roc_curve(labels, values, drop_intermediate=False)
    np.testing.assert_allclose(scores.roc(), expected[:2], atol=1e-12)
    assert scores.auc == pytest.approx(roc_auc_score(labels, values))
    assert scores.true_positive_rate(0.1) == pytest.approx(max(expected[1][expected[0] <= 0.1]))


def test_the_curve_of_infinite_scores_begins_at_zero_too():
    """Of the six pairs, three are in order, and two have equal scores."""
    scores = Scores([np.inf, np.inf, 1.0], [np.inf, 0.0])
    np.testing.assert_allclose(scores.roc(), [[0, 1 / 2, 1 / 2, 1], [0, 2 / 3, 1, 1]])
    assert scores.auc == pytest.approx((3 + 2 / 2) / 6)
    assert scores.true_positive_rate(0.1) == 0


def test_the_area_of_normal_scores_is_known():
    assert draws(1.0, 20_000, 0).auc == pytest.approx(stats.norm.cdf(1 / np.sqrt(2)), abs=0.01)


def test_the_estimate_is_the_tight_epsilon_of_the_gaussian_mechanism():
    """At ε, δ is the largest difference P(A) - exp(ε) Q(A), here by a sum over a fine grid."""
    quantiles = stats.norm.ppf((np.arange(400) + 0.5) / 400)
    quantiles /= quantiles.std(ddof=1)
    epsilon = Scores(quantiles + 1.5, quantiles).epsilon_estimate(1e-3)
    grid = np.linspace(-12, 14, 200_001)
    difference = stats.norm.pdf(grid, 1.5) - np.exp(epsilon) * stats.norm.pdf(grid)
    assert np.maximum(difference, 0).sum() * (grid[1] - grid[0]) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("distance", [0.5, 2.0])
def test_a_bound_is_below_epsilon_as_often_as_it_says(distance):
    bounds = np.array([draws(distance, 100, seed).epsilon_bound(1e-3, confidence=0.9) for seed in range(200)])
    exact = {0.5: 1.352, 2.0: 7.581}[distance]  # dp_accounting.get_epsilon_gaussian(1 / distance, 1e-3)
    # 20 of 200 on average; the binomial law has 33 or more with probability 0.002, and 8 or fewer with 0.002.
    assert 8 < (bounds > exact).sum() < 33


def test_bounds_without_a_law_are_smaller_and_need_jax_privacy():
    pytest.importorskip("jax_privacy", reason="the extra [privacy] has it")
    scores = draws(3.0, 500, 0)
    one_run, independent, normal = (
        scores.epsilon_bound(1e-5, method=method) for method in ("one_run", "independent", "normal")
    )
    assert 3 < one_run < 6 and 3 < independent < 6
    assert max(one_run, independent) < normal < 16.7  # dp_accounting.get_epsilon_gaussian(1 / 3, 1e-5)
    assert draws(0.0, 500, 0).epsilon_bound(1e-5, method="one_run") == 0


def test_scores_that_separate_and_scores_that_do_not():
    apart = Scores([2.0, 2.0], [1.0, 1.0])
    assert apart.auc == 1 and apart.epsilon_bound(1e-3) == np.inf
    assert Scores([1.0, 2.0], [2.0, 1.0]).epsilon_bound(1e-3) == 0
    assert draws(300.0, 50, 0).epsilon_bound(1e-3) > 10_000


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: Scores([1.0], [1.0, 2.0]), r"^Expected inside to be at least two numbers, float \[n\], got shape \[1\]: give"),
        (lambda: Scores([1.0, 2.0], [np.nan, 2.0]), r"^Expected outside .* got shape \[2\] with NaN: give a score for each"),
        (lambda: draws(1, 5, 0).true_positive_rate(2), "^Expected 0 <= false_positive_rate <= 1, got false_positive_rate=2"),
        (lambda: draws(1, 5, 0).epsilon_bound(0.0), "^Expected 0 < delta < 1, got delta=0.0"),
        (lambda: draws(1, 5, 0).epsilon_bound(0.1, confidence=1), "^Expected 0.5 <= confidence < 1, got confidence=1"),
        (lambda: draws(1, 5, 0).epsilon_bound(0.1, method="gauss"), "^Expected method to be .*, got method='gauss'"),
    ],
)
def test_arguments_that_are_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use()


def test_independent_canaries_need_a_confidence_above_a_half():
    draw = np.random.default_rng(0).normal(size=[2, 100])
    with pytest.raises(ValueError, match="Expected 0.5 < confidence < 1, got confidence=0.5"):
        Scores(draw[0] + 1, draw[1]).epsilon_bound(1e-3, confidence=0.5, method="independent")
