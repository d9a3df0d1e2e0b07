"""Pachinko allocation, compared with exact probabilities and with a loop that follows the paper."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import special, stats

from fedsim.partitioners import pachinko

# A tree of two coarse labels: 0 with fine labels 0 (one example) and 1 (four), and 1 with fine label 2 (four).
FINE = np.array([0, 1, 1, 1, 1, 2, 2, 2, 2])
COARSE = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1])


def probabilities(mixture):
    """Returns the probability of each multiset of three fine labels, drawn one after another from ``mixture(left)``."""
    result = Counter()
    for order in itertools.product(range(3), repeat=3):
        left, chance = [1, 4, 4], 1.0
        for label in order:
            chance *= mixture(left)[label]
            left[label] -= 1
        result[tuple(sorted(order))] += chance
    return {labels: chance for labels, chance in result.items() if chance > 0}


def tree(left):
    """Coarse labels are equally likely, and so are the fine labels of each; if fine 0 is exhausted, fine 1 gets its share."""
    return [0.25, 0.25, 0.5] if left[0] else [0, 0.5, 0.5]


def flat(left):
    """A wrong distribution for comparison: the remaining labels are rescaled without regard to the tree."""
    return [0.25, 0.25, 0.5] if left[0] else [0, 1 / 3, 2 / 3]


@pytest.mark.first(1)
@pytest.mark.parametrize(("mixture", "right"), [(tree, True), (flat, False)])
def test_the_share_of_an_exhausted_label_goes_to_its_siblings(mixture, right):
    """Large alpha and beta make the client's mixtures equal; the distribution without a tree is the negative control."""
    found = Counter()
    for seed in range(1500):
        (rows,) = pachinko(FINE, COARSE, clients=1, examples=3, alpha=1e8, beta=1e8, seed=seed)
        found[tuple(FINE[rows])] += 1
    expected = probabilities(mixture)
    assert set(found) <= set(expected)
    misfit = stats.chisquare([found[labels] for labels in expected], [1500 * chance for chance in expected.values()]).pvalue
    assert misfit > 1e-3 if right else misfit < 1e-6


def by_the_paper(fine, coarse, clients, examples, alpha, beta, draw):
    """Allocates one example after another, as in Reddi et al. 2021."""
    fine_of = {c: np.unique(fine[coarse == c]) for c in np.unique(coarse)}
    pool = {f: list(draw.permutation(np.flatnonzero(fine == f))) for f in np.unique(fine)}
    parts = []
    for _ in range(clients):
        of_coarse = dict(zip(fine_of, draw.dirichlet(np.full(len(fine_of), alpha)), strict=True))
        of_fine = {c: dict(zip(fine_of[c], draw.dirichlet(np.full(len(fine_of[c]), beta)), strict=True)) for c in fine_of}
        part = []
        for _ in range(examples):
            live = {c: [f for f in fine_of[c] if pool[f]] for c in fine_of}
            names = [c for c in live if live[c]]
            weights = np.array([of_coarse[c] for c in names])
            c = draw.choice(names, p=weights / weights.sum())
            below = np.array([of_fine[c][f] for f in live[c]])
            part.append(pool[draw.choice(live[c], p=below / below.sum())].pop())
        parts.append(np.array(part))
    return parts


def test_clients_are_as_skewed_as_those_of_the_paper_s_loop():
    """Mean numbers of coarse and fine labels per client are compared, over three seeds of 60 clients with 40 examples each."""
    fine = np.tile(np.arange(40), 60)
    coarse = fine // 5

    def spread(parts):
        return np.array([[len(np.unique(column[rows])) for column in (coarse, fine)] for rows in parts])

    ours = np.concatenate([spread(pachinko(fine, coarse, clients=60, alpha=0.1, beta=10, seed=s)) for s in range(3)])
    theirs = [by_the_paper(fine, coarse, 60, 40, 0.1, 10, np.random.default_rng(s)) for s in range(3)]
    theirs = np.concatenate([spread(parts) for parts in theirs])
    other = np.concatenate([spread(pachinko(fine, coarse, clients=60, alpha=0.4, beta=10, seed=s)) for s in range(3)])
    for column in (0, 1):
        assert stats.ttest_ind(ours[:, column], theirs[:, column]).pvalue > 1e-3
        assert stats.ttest_ind(other[:, column], theirs[:, column]).pvalue < 1e-6


def test_mixtures_with_tiny_probabilities_lose_no_example():
    fine = np.random.default_rng(77).integers(0, 10, 500)
    with np.errstate(all="raise", under="ignore"):
        parts = pachinko(fine, fine // 2, clients=7, alpha=1e-3, beta=1e-3, seed=5)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(500))


def test_the_shape_of_tff_s_cifar_100():
    """500 clients of 100 examples use all 50,000 examples; each client has few coarse labels."""
    fine = np.repeat(np.arange(100), 500)
    table = np.random.default_rng(0).permutation(np.repeat(np.arange(20), 5))
    parts = pachinko(fine, table[fine], seed=0)
    assert len(parts) == 500 and {len(rows) for rows in parts} == {100}
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(50_000))
    # Each coarse share is Beta(0.1, 1.9), which gives the expected number of the 20 coarse labels that 100 draws contain. The
    # last clients are excluded because they get the remaining examples.
    expected = 20 * (1 - special.beta(0.1, 1.9 + 100) / special.beta(0.1, 1.9))
    coarse = [len(np.unique(table[fine[rows]])) for rows in parts[:400]]
    assert np.mean(coarse) == pytest.approx(expected, rel=0.05)


def test_with_a_number_of_examples_the_rest_is_not_used():
    parts = pachinko(FINE.repeat(20), COARSE.repeat(20), clients=4, examples=20, seed=0)
    given = np.concatenate(parts)
    assert {len(rows) for rows in parts} == {20}
    assert len(np.unique(given)) == 80


def test_with_replacement_an_example_can_occur_twice_and_no_label_runs_out():
    parts = pachinko(FINE, COARSE, clients=40, examples=50, alpha=1e8, beta=1e8, seed=0, replace=True)
    assert {len(rows) for rows in parts} == {50}
    assert any(len(np.unique(rows)) < 50 for rows in parts)
    shares = np.bincount(FINE[np.concatenate(parts)]) / 2000
    np.testing.assert_allclose(shares, [0.25, 0.25, 0.5], atol=0.04)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coarse": COARSE[:-1]}, "9 fine and 8 coarse labels"),
        ({"coarse": [0, 0, 1, 0, 0, 1, 1, 1, 1]}, "Fine label 1 has more than one coarse label"),
        ({"examples": 5}, "9 examples are too few for clients=2 with examples=5 each: give smaller numbers, or replace=True"),
        ({"examples": 0}, "got examples=0"),
        ({"alpha": 0}, "Expected alpha > 0 and finite, got alpha=0"),
        ({"beta": float("inf")}, "Expected beta > 0 and finite, got beta=inf"),
    ],
)
def test_invalid_allocations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        pachinko(**{"fine": FINE, "coarse": COARSE, "clients": 2, "seed": 0} | change)
