"""The matrix mechanism: its noise against NumPy, in any execution and after a break, and broken mechanisms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sums_of_rows import EXECUTIONS, JIT, population, rounds_of, send_rows

import fedsim
from fedsim.aggregators import AdaptiveClip, BandedToeplitz, BinaryTree, BufferedToeplitz, GaussianMechanism, MatrixMechanism

ROUNDS = 6
MATRICES = {
    "tree": BinaryTree(rounds=ROUNDS),
    "efficient tree": BinaryTree(rounds=ROUNDS, efficient=True),
    "banded": BandedToeplitz(rounds=ROUNDS, coefficients=(1.0, 0.6, 0.1)),
    "independent": BandedToeplitz(rounds=ROUNDS, coefficients=(1.0,)),
    "buffered": BufferedToeplitz(rounds=ROUNDS, decays=(0.9, 0.3), scales=(0.2, 0.3)),
}
# C, written from the papers' definitions.
TREE = np.array(
    [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
)
COEFFICIENTS = {
    "banded": [1, 0.6, 0.1, 0, 0, 0],
    "independent": [1, 0, 0, 0, 0, 0],
    "buffered": [1, *(0.2 * 0.9**k + 0.3 * 0.3**k for k in range(5))],
}
PLAIN = {"clip": 0.5, "denominator": 10}


def all_nodes():
    """Returns the sums of all nodes of a binary tree as rows, and Honaker's estimates of the prefix sums from them.

    A node's estimate is the mean of its own noisy sum, of variance 1, and of the sum of the estimates of its children, with
    weights that are inverse to the variances. A prefix sum adds the nodes of the binary digits of its length.
    """
    places = [(level, i) for level in range(ROUNDS.bit_length()) for i in range(ROUNDS >> level)]
    sums = np.array([[i << level <= t < (i + 1) << level for t in range(ROUNDS)] for level, i in places], float)

    def estimate(level, i):
        own = np.eye(len(places))[places.index((level, i))]
        if level == 0:
            return own
        below = estimate(level - 1, 2 * i) + estimate(level - 1, 2 * i + 1)
        return (own + below / (below @ below)) / (1 + 1 / (below @ below))

    digits = [[level for level in range(3) if t >> level & 1] for t in range(1, ROUNDS + 1)]
    prefixes = [sum(estimate(k, (t >> k) - 1) for k in levels) for t, levels in enumerate(digits, 1)]
    return sums, np.array(prefixes)


def dense(name):
    if name == "tree":
        return TREE
    if name == "efficient tree":
        sums, prefixes = all_nodes()
        np.testing.assert_allclose(prefixes @ sums, np.tri(ROUNDS), atol=1e-12)
        # The noise of the prefix sums is normal, so its covariance is all that matters.
        return np.linalg.solve(np.linalg.cholesky(prefixes @ prefixes.T), np.tri(ROUNDS))
    return np.array([[COEFFICIENTS[name][i - j] if i >= j else 0 for j in range(ROUNDS)] for i in range(ROUNDS)])


@functools.cache
def independent():
    """Returns the noise of the rounds of the Gaussian mechanism, ``[rounds, size]``."""
    return rounds_of(send_rows(GaussianMechanism(2.0, **PLAIN)), population(np.zeros(8)), ROUNDS)[1]


def check_noise(mechanism, name, execution=JIT):
    """Raises ``AssertionError`` unless C times the mechanism's noise is the independent noise of the same rounds."""
    _, noise = rounds_of(send_rows(mechanism, execution), population(np.zeros(8)), ROUNDS)
    np.testing.assert_allclose(dense(name) @ noise, independent(), rtol=1e-4, atol=1e-6)
    return noise


@pytest.mark.first(3)
@pytest.mark.parametrize("name", MATRICES)
def test_the_matrix_times_the_noise_is_independent_noise(name):
    np.testing.assert_allclose(MATRICES[name].dense(ROUNDS), dense(name), atol=1e-12)
    check_noise(MatrixMechanism(2.0, matrix=MATRICES[name], **PLAIN), name)


@pytest.mark.first(1)
@pytest.mark.parametrize("execution", ["eight devices", "lanes", "plain Python"])
def test_the_noise_is_the_same_in_every_execution(execution):
    check_noise(MatrixMechanism(2.0, matrix=MATRICES["banded"], **PLAIN), "banded", EXECUTIONS[execution])


def test_without_noise_it_is_the_gaussian_mechanism():
    values = [0.05, -0.3, 2.0, 0.9, 0.4, -5.0]
    one, other = (
        rounds_of(send_rows(mechanism), population(values), 2)[1]
        for mechanism in (GaussianMechanism(0.0, **PLAIN), MatrixMechanism(0.0, matrix=MATRICES["tree"], **PLAIN))
    )
    np.testing.assert_allclose(one, other, rtol=1e-6)
    assert np.abs(one).max() > 0


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["efficient tree", "banded", "tree", "buffered"])
def test_after_a_break_the_noise_goes_on_with_the_same_bits(name):
    """The state goes through the host, as through a checkpoint, in the middle of the rounds; one dispatch has three rounds."""
    data, algorithm = population(np.zeros(8)), send_rows(MatrixMechanism(2.0, matrix=MATRICES[name], **PLAIN))
    cohorts = [fedsim.Cohort.of(data, data.client_ids, round=round) for round in range(ROUNDS)]
    whole = state = algorithm.init(jax.random.key(0))
    for cohort in cohorts:
        whole, _ = algorithm.apply(whole, cohort)
    state, _ = algorithm.apply_rounds(state, cohorts[:3])
    state = jax.tree.map(jnp.asarray, jax.device_get(state))
    for cohort in cohorts[3:]:
        state, _ = algorithm.apply(state, cohort)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(x, y)


def test_further_rounds_than_those_of_the_matrix_are_not_a_number():
    mechanism = MatrixMechanism(1.0, matrix=BinaryTree(rounds=2), **PLAIN)
    _, noise = rounds_of(send_rows(mechanism), population(np.zeros(2)), 3)
    assert np.isfinite(noise[:2]).all() and np.isnan(noise[2]).all()


@dataclasses.dataclass(frozen=True, eq=False)
class Forgetful(MatrixMechanism):
    """A broken mechanism: in round 3 it begins anew, as a run without the noise in its checkpoint would."""

    def finish_round(self, accumulator, memory, key):
        fresh = self.init(self.finish(accumulator))
        memory = jax.tree.map(lambda new, old: jnp.where(memory[0] == 3, new, old), fresh, memory)
        return super().finish_round(accumulator, memory, key)


@dataclasses.dataclass(frozen=True, eq=False)
class Uncorrelated(MatrixMechanism):
    """A broken mechanism: its noise is independent."""

    def finish_round(self, accumulator, memory, key):
        return GaussianMechanism(2.0, **PLAIN).finish_round(accumulator, (), key)[0], memory


@pytest.mark.first(1)
@pytest.mark.parametrize("broken", [Forgetful, Uncorrelated])
@pytest.mark.parametrize("name", ["banded", "tree", "efficient tree"])
def test_the_same_test_finds_broken_mechanisms(broken, name):
    with pytest.raises(AssertionError):
        check_noise(broken(2.0, matrix=MATRICES[name], **PLAIN), name)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (
            lambda: MatrixMechanism(1.0, matrix=BinaryTree(rounds=2), clip=AdaptiveClip(), denominator=1),
            "a number for clip with noise that is correlated between rounds, got AdaptiveClip",
        ),
        (lambda: MatrixMechanism(1.0, matrix="tree", **PLAIN), "matrix to be an instance of NoiseMatrix, such as BinaryTree"),
        (lambda: BinaryTree(rounds=0), "rounds >= 1, got rounds=0"),
        (lambda: BinaryTree(rounds=2, efficient=1), "efficient to be True or False, got"),
        (lambda: BandedToeplitz(rounds=3, coefficients=()), "coefficients that do not increase, .* got coefficients=\\(\\)"),
        (lambda: BandedToeplitz(rounds=3, coefficients=(0.5, 1.0)), "coefficients that do not increase"),
        (lambda: BandedToeplitz(rounds=3, coefficients=(1.0, -0.1)), "coefficients that do not increase"),
        (lambda: BufferedToeplitz(rounds=3, decays=(0.5,), scales=(1.5,)), "as many decays in .* got decays=\\(0.5,\\) and"),
        (lambda: BufferedToeplitz(rounds=3, decays=(0.5,), scales=(0.1, 0.1)), "as many decays in"),
    ],
)
def test_what_is_refused(misuse, message):
    with pytest.raises(ValueError, match=f"^Expected {message}"):
        misuse()
