"""Matrices of correlated noise: sensitivities by enumeration, published losses, and the accountant with them."""

import itertools

import federation
import numpy as np
import optax
import pytest

import fedsim
from fedsim import privacy
from fedsim.aggregators import BandedToeplitz, BinaryTree, BufferedToeplitz, MatrixMechanism
from fedsim.privacy import (
    CyclicPoisson,
    Epochs,
    EveryRound,
    FixedSize,
    Guarantee,
    Poisson,
    epsilon,
    max_loss,
    noise_multiplier,
    sensitivity,
)

ROUNDS = 9
BANDED = BandedToeplitz(rounds=ROUNDS, coefficients=(1.0, 0.5, 0.4))
BUFFERED = BufferedToeplitz(rounds=ROUNDS, decays=(0.9, 0.5), scales=(0.3, 0.2))
MATRICES = {
    "banded": BANDED,
    "buffered": BUFFERED,
    "tree": BinaryTree(rounds=ROUNDS),
    "efficient tree": BinaryTree(rounds=ROUNDS, efficient=True),
}
# n = 2048, clients take part 6 times, at least 342 rounds apart. The buffers are those that jax-privacy 2.0 finds.
LONG = Epochs(342, separation=342)
PUBLISHED = BufferedToeplitz(
    rounds=2048,
    decays=(0.9999999998185432, 0.9934471387062691, 0.8088941868638116),
    scales=(0.006925828361068545, 0.1200723494199576, 0.3301780609235238),
)


def enumerated(matrix, participation, rounds):
    """Returns the largest norm of C u over all u that the participation allows."""
    c, largest = matrix.dense(matrix.rounds)[:rounds, :rounds], 0
    for chosen in itertools.product((0, 1), repeat=rounds):
        at = np.flatnonzero(chosen)
        if len(at) <= participation.most(rounds) and (len(at) < 2 or np.diff(at).min() >= participation.least_separation):
            largest = max(largest, np.linalg.norm(c @ np.array(chosen)))
    return largest


@pytest.mark.first(8)
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=list(MATRICES))
@pytest.mark.parametrize(
    "participation", [Epochs(3, separation=3), Epochs(2, separation=2), Epochs(9, separation=1), EveryRound()]
)
def test_the_sensitivity_is_that_of_the_worst_rounds(matrix, participation):
    for rounds in (1, 4, ROUNDS):
        expected = enumerated(matrix, participation, rounds)
        assert sensitivity(matrix, participation, rounds=rounds) == pytest.approx(expected, rel=1e-6)


def test_the_sensitivity_of_a_tree_in_shuffled_epochs_is_bounded():
    """A client may be last in an epoch and first in the next."""
    tree, shuffled = BinaryTree(rounds=ROUNDS), Epochs(3, separation=1)
    exact = enumerated(tree, shuffled, ROUNDS)
    assert exact * (1 - 1e-6) <= sensitivity(tree, shuffled, rounds=ROUNDS) <= 1.2 * exact
    assert exact > enumerated(tree, Epochs(3, separation=3), ROUNDS)


def test_published_losses():
    """Figures of the paper on buffered matrices; independent noise has √(n k)."""
    independent = BandedToeplitz(rounds=2048, coefficients=(1.0,))
    assert max_loss(independent, LONG) == pytest.approx(110.851, abs=5e-4)
    assert max_loss(PUBLISHED, LONG) == pytest.approx(10.746, abs=5e-4)


@pytest.mark.slow
def test_published_losses_are_found():
    banded = privacy.banded_toeplitz(2048, bands=342)
    assert max_loss(banded, LONG) == pytest.approx(10.518, abs=2e-3)
    assert np.linalg.norm(banded.coefficients) == pytest.approx(1, rel=1e-5)
    assert max_loss(privacy.banded_toeplitz(2048, bands=342, error="max"), LONG) < 10.45
    assert max_loss(privacy.buffered_toeplitz(2048, LONG), LONG) == pytest.approx(10.746, abs=2e-3)


def test_bands_are_better_than_a_tree_and_a_tree_is_better_than_none():
    participation, losses = Epochs(16, separation=16), {}
    for name, matrix in {
        "independent": BandedToeplitz(rounds=64, coefficients=(1.0,)),
        "tree": BinaryTree(rounds=64),
        "efficient": BinaryTree(rounds=64, efficient=True),
        "banded": privacy.banded_toeplitz(64, bands=16),
    }.items():
        losses[name] = max_loss(matrix, participation)
    assert losses["banded"] < 0.5 * losses["tree"] < losses["tree"] < 0.95 * losses["independent"], losses
    assert 0.5 * losses["tree"] < losses["efficient"] < 0.85 * losses["tree"], losses


def test_the_variance_of_an_efficient_tree_is_the_closed_form():
    """Honaker's equation: the estimate of a node of a tree with k levels has the variance 1 / (2 (1 - 2^-k)).

    A prefix sum adds those of the blocks of its binary digits.
    """
    rounds = 100
    factor = np.tri(rounds) @ np.linalg.inv(BinaryTree(rounds=rounds, efficient=True).dense(rounds))
    digits = [[level for level in range(7) if t >> level & 1] for t in range(1, rounds + 1)]
    expected = [sum(1 / (2 * (1 - 2.0 ** -(level + 1))) for level in levels) for levels in digits]
    np.testing.assert_allclose(np.sum(factor**2, axis=1), expected, rtol=1e-12)
    plain = np.tri(rounds) @ np.linalg.inv(BinaryTree(rounds=rounds).dense(rounds))
    np.testing.assert_allclose(np.sum(plain**2, axis=1), [len(levels) for levels in digits], rtol=1e-12)


def test_the_sensitivity_of_an_efficient_tree_is_at_most_that_of_all_nodes():
    """What is published is computed from the nodes, of which a client in one round changes one of each level."""
    for rounds in (1, 2, 8, 13, 64):
        once = Epochs(rounds, separation=rounds)
        found = sensitivity(BinaryTree(rounds=rounds, efficient=True), once, rounds=rounds)
        assert 0.85 * rounds.bit_length() < found**2 <= rounds.bit_length() + 1e-9


@pytest.mark.parametrize(("concentrated", "expected"), [(0.1506840301548885, 3.4240074), (0.014342572340349278, 0.9935501)])
def test_published_budgets_of_correlated_noise(concentrated, expected):
    """The two language models of Gboard: ε of a Gaussian mechanism with this zCDP, δ = 1e-10."""
    noise = 1 / np.sqrt(2 * concentrated)
    found = epsilon(noise, Epochs(10, separation=10), rounds=10, delta=1e-10, interval=1e-4)
    assert found == pytest.approx(expected, rel=2e-3)
    column = np.array(BANDED.coefficients)
    scaled = noise * float(np.linalg.norm(column))  # With one participation, the sensitivity is that of a column.
    again = epsilon(scaled, Epochs(9, separation=9), rounds=9, delta=1e-10, interval=1e-4, matrix=BANDED)
    assert again == pytest.approx(expected, rel=2e-3)


def test_independent_noise_composes_over_the_rounds_of_a_client():
    turns, every = Epochs(5, separation=5), EveryRound()
    assert epsilon(3.0, turns, rounds=12, delta=1e-5) == epsilon(3.0, every, rounds=3, delta=1e-5)
    one = BandedToeplitz(rounds=12, coefficients=(1.0,))
    assert epsilon(3.0, turns, rounds=12, delta=1e-5, matrix=one) == pytest.approx(
        epsilon(3.0, every, rounds=3, delta=1e-5), rel=2e-3
    )
    noise = noise_multiplier(2.0, turns, rounds=9, delta=1e-5, matrix=BANDED)
    assert 1.999 < epsilon(noise, turns, rounds=9, delta=1e-5, matrix=BANDED) <= 2


def make(sampler, matrix=BANDED, noise=2.0):
    mechanism = MatrixMechanism(noise, matrix=matrix, clip=0.5, denominator=4)
    return fedsim.algorithms.FedAvg(
        model=federation.model(), client_optimizer=optax.sgd(0.1), weighting="uniform", aggregator=mechanism,
        batches=fedsim.Batches(size=4),
    )  # fmt: skip


def test_the_guarantee_is_that_of_the_sampler_and_of_the_rounds():
    data = federation.data()
    cyclic = fedsim.samplers.CyclicSampler(data, clients=3, seed=0)
    guarantee = Guarantee.of(make(cyclic), cyclic, delta=0.01)
    assert (guarantee.participation, guarantee.matrix) == (Epochs(3, separation=3), BANDED)
    assert guarantee.epsilon(3) < guarantee.epsilon(9)
    assert "if a client sends zeros" in guarantee.text(3) and "before BandedToeplitz correlates it" in guarantee.assumptions[1]
    assert "nobody sees" not in guarantee.assumptions[0]
    with pytest.raises(ValueError, match=r"^Expected 1 <= rounds <= 9, got rounds=10: the noise was correlated for so many"):
        guarantee.epsilon(10)
    private = privacy.calibrated(make(cyclic), cyclic, epsilon=2.0, delta=0.01, rounds=9)
    assert Guarantee.of(private, cyclic, delta=0.01).epsilon(9) == pytest.approx(2, rel=1e-3)
    assert type(private.aggregator) is MatrixMechanism


@pytest.mark.parametrize("participation", [Poisson(0.1), FixedSize(2, 8)])
def test_sampling_at_random_is_refused(participation):
    with pytest.raises(
        ValueError, match="^Expected clients whose rounds have a minimum distance, got a participation in which"
    ):
        epsilon(1.0, participation, rounds=5, delta=1e-5, matrix=BANDED)


def test_sampling_of_groups_amplifies_banded_noise_as_jax_privacy_says():
    """Its accountant of BandMF takes noise in units of the norm of a column, and the sizes of the batch and of a group."""
    analysis = pytest.importorskip("jax_privacy.accounting.analysis")
    accountants = pytest.importorskip("jax_privacy.accounting.accountants")
    matrix, groups = BandedToeplitz(rounds=40, coefficients=(1.0, 0.6, 0.3, 0.1)), CyclicPoisson(0.2, cycle=4)
    config = accountants.PldAccountantConfig(value_discretization_interval=1e-3)
    known = analysis.DpsgdTrainingAccountant(dp_accountant_config=config)
    params = analysis.DpParams(
        noise_multipliers=2.0, num_samples=1000, batch_size=50, delta=1e-4, cycle_length=4,
        sampling_method=analysis.SamplingMethod.POISSON,
    )  # fmt: skip
    for rounds in (4, 40):
        found = epsilon(2.0 * np.linalg.norm(matrix.coefficients), groups, rounds=rounds, delta=1e-4, matrix=matrix)
        assert found == pytest.approx(known.compute_epsilon(rounds, params), rel=1e-3)
    sampled, seen = (epsilon(2.0, way, rounds=40, delta=1e-4, matrix=matrix) for way in (groups, Epochs(4, separation=4)))
    assert sampled < 0.5 * seen
    # Without a matrix, the rounds of one group count.
    assert epsilon(2.0, groups, rounds=9, delta=1e-4) == epsilon(2.0, Poisson(0.2), rounds=3, delta=1e-4)


def test_the_guarantee_of_groups_that_take_turns():
    data = federation.data()
    sampler = fedsim.samplers.CyclicPoissonSampler(data, clients=1, cycle=3, seed=0)
    private = privacy.calibrated(make(sampler), sampler, epsilon=2.0, delta=0.01, rounds=9)
    guarantee = Guarantee.of(private, sampler, delta=0.01)
    assert guarantee.epsilon(9) == pytest.approx(2, rel=1e-3) and "if a client sends zeros" in guarantee.text(9)
    assert "(Poisson sampling of groups), and nobody sees who takes part" in guarantee.assumptions[0]


def test_a_turn_with_every_client_reveals_what_clients_in_turns_reveal():
    matrix = BandedToeplitz(rounds=12, coefficients=(1.0, 0.6, 0.3))
    certain, turns = CyclicPoisson(1.0, cycle=3), Epochs(3, separation=3)
    values = [epsilon(3.0, way, rounds=12, delta=1e-4, matrix=matrix) for way in (certain, turns)]
    assert values[0] == pytest.approx(values[1], rel=3e-3)


def test_more_bands_than_groups_are_refused():
    matrix = BandedToeplitz(rounds=12, coefficients=(1.0, 0.6, 0.3))
    with pytest.raises(ValueError, match="Expected a BandedToeplitz of at most 2 bands where groups take turns every 2 rounds"):
        epsilon(2.0, CyclicPoisson(0.1, cycle=2), rounds=12, delta=1e-4, matrix=matrix)
    with pytest.raises(ValueError, match="Expected a BandedToeplitz of at most 3 bands"):
        epsilon(2.0, CyclicPoisson(0.1, cycle=3), rounds=12, delta=1e-4, matrix=BinaryTree(rounds=12))
    for kind in ("tree", "buffered"):
        with pytest.raises(ValueError, match=f"^Expected kind='banded' for groups .* got kind='{kind}'"):
            privacy.noise_matrix(kind, CyclicPoisson(0.1, cycle=3), rounds=12)
    assert len(privacy.noise_matrix("banded", CyclicPoisson(0.1, cycle=3), rounds=12).coefficients) == 3
