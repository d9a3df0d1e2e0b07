"""How the noise of a mechanism is correlated between rounds: lower triangular matrices, multiplied round by round.

With A the matrix of prefix sums (lower triangular ones), the rounds' sums G are released as G + C⁻¹ Z, where Z is independent
noise. So the noise of a prefix sum is A C⁻¹ Z, and the privacy is that of releasing C G + Z. `BinaryTree`: P. Kairouz et al.,
"Practical and private (deep) learning without sampling or shuffling", ICML 2021: https://arxiv.org/abs/2103.00039.
`BandedToeplitz`: C. A. Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach to private
training", NeurIPS 2023: https://arxiv.org/abs/2306.08153. `BufferedToeplitz`: K. Dvijotham et al., "Efficient and near-optimal
noise generation for streaming differential privacy", FOCS 2024: https://arxiv.org/abs/2404.16706. ``efficient`` trees: J.
Honaker, "Efficient use of differentially private binary trees", TPDP 2015, estimation from below.

Deviations: the binary tree has a node for each round, those from which prefix sums are computed, so C is square. The papers
also have the right children of these nodes, which only Honaker's estimates use. With these, C is the square matrix whose prefix
sums have the same joint distribution; its sensitivity is smaller than that of all nodes of the tree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks

Noise = Any
Memory = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseMatrix:
    """Base class of the matrices C. A subclass returns C, and multiplies C⁻¹ with noise, one row after another.

    Attributes:
      rounds: n, the number of rows, for which the matrix is made.
      is_toeplitz: whether C[i, j] depends on i - j alone; then it is not negative, and does not increase with i - j.

    Raises:
      ValueError: ``rounds`` is not a positive whole number.

    >>> BinaryTree(rounds=4).rounds, BinaryTree.is_toeplitz
    (4, False)
    """

    is_toeplitz: ClassVar[bool] = False

    rounds: int

    def __post_init__(self) -> None:
        checks.whole(1, rounds=self.rounds)

    def dense(self, rounds: int) -> np.ndarray:
        """Returns the first rows and columns of C, ``float64 [rounds, rounds]``."""
        raise NotImplementedError

    def column(self, rounds: int) -> np.ndarray:
        """Returns the beginning of the first column of C, ``float64 [rounds]``, which is all of a Toeplitz matrix."""
        return self.dense(rounds)[:, 0]

    def init(self, noise: Noise) -> Memory:
        """Returns what `next` remembers before the first round. ``noise`` gives the structure, the shapes and dtypes."""
        raise NotImplementedError

    def next(self, noise: Noise, memory: Memory) -> tuple[Noise, Memory]:
        """Returns the next row of C⁻¹ times the noise of all rounds so far, and what it remembers.

        Args:
          noise: the independent noise of this round, a pytree of floats.
          memory: of the rounds before.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinaryTree(NoiseMatrix):
    """Row t of C is the sum over the last b rounds up to t, where b is the largest power of two that divides t.

    A prefix sum is the sum of at most log₂ n + 1 such rows. The memory has as many copies of the parameters.

    Attributes:
      efficient: whether each of these sums is estimated from its own node of the tree and from all nodes below it, with the
        smallest variance (Honaker's estimates from below). The sum over b = 2^(k - 1) rounds then has the variance
        1 / (2 - 2^(1 - k)) in place of 1.

    Raises:
      ValueError: ``efficient`` is neither True nor False, or see `NoiseMatrix`.

    >>> print(BinaryTree(rounds=4).dense(4).astype(int))
    [[1 0 0 0]
     [1 1 0 0]
     [0 0 1 0]
     [1 1 1 1]]
    """

    efficient: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.truth(efficient=self.efficient)

    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the deviation of new noise in the estimate of a node, by its level, and the weights of earlier estimates.

        A node of level k ends in the same round as the nodes below it on its right side. Their noise is new, and together
        normal. What remains are the nodes to the left of these, one of each level below k.
        """
        levels = self.rounds.bit_length()
        variances, weights, own = np.ones(levels), np.zeros([levels, levels]), 1.0
        for level in range(1, levels if self.efficient else 0):
            # Weights are inverse to variances, so the node's own weight is also the variance of its estimate.
            own = 2 * own / (2 * own + 1)
            variances[level] = own**2 + (1 - own) ** 2 * variances[level - 1]
            weights[level] = (1 - own) * weights[level - 1]
            weights[level, level - 1] = 1 - own
        return np.sqrt(variances), weights

    def dense(self, rounds: int) -> np.ndarray:
        last, column = np.arange(1, rounds + 1)[:, None], np.arange(1, rounds + 1)
        block = last & -last
        deviations, weights = self._weights()
        level = np.log2(block[:, 0]).astype(int)
        matrix = ((last - block < column) & (column <= last)).astype(np.float64)
        for below in range(self.rounds.bit_length()):
            left = (last - 2 ** (below + 1) < column) & (column <= last - 2**below)
            matrix -= weights[level, below][:, None] * left
        return matrix / deviations[level][:, None]

    def init(self, noise: Noise) -> Memory:
        levels = self.rounds.bit_length()
        return jnp.int32(0), jax.tree.map(lambda x: jnp.zeros((levels, *x.shape), x.dtype), noise)

    def next(self, noise: Noise, memory: Memory) -> tuple[Noise, Memory]:
        round, nodes = memory
        block = (round + 1) & -(round + 1)
        length = 2 ** jnp.arange(self.rounds.bit_length(), dtype=jnp.int32)

        def along(chosen: jax.Array, node: jax.Array) -> jax.Array:
            return chosen.reshape((-1,) + (1,) * (node.ndim - 1))

        if self.efficient:
            deviation, weights = (jnp.asarray(each)[jnp.sum(length < block)] for each in self._weights())

            def estimate(x: jax.Array, node: jax.Array) -> jax.Array:
                return deviation.astype(x.dtype) * x + jnp.sum(along(weights.astype(x.dtype), node) * node, 0)

            noise = jax.tree.map(estimate, noise, nodes)
        # The node of this round replaces the shorter ones in all later prefix sums.
        residual = jax.tree.map(lambda x, node: x - jnp.sum(jnp.where(along(length < block, node), node, 0), 0), noise, nodes)
        nodes = jax.tree.map(lambda x, node: jnp.where(along(length == block, node), x, node), noise, nodes)
        return residual, (round + 1, nodes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Toeplitz(NoiseMatrix):
    """Base class of Toeplitz matrices, which the package jax-privacy multiplies."""

    is_toeplitz: ClassVar[bool] = True

    def column(self, rounds: int) -> np.ndarray:
        """Returns the first column of C, ``float64 [rounds]``."""
        raise NotImplementedError

    def _inverse(self, module: Any) -> Any:
        """Returns C⁻¹ as a matrix of jax-privacy's module."""
        raise NotImplementedError

    def dense(self, rounds: int) -> np.ndarray:
        lag = np.arange(rounds)[:, None] - np.arange(rounds)
        return np.where(lag >= 0, self.column(rounds)[np.maximum(lag, 0)], 0)

    def init(self, noise: Noise) -> Memory:
        with matrix_factorization() as module:
            return self._inverse(module).init_multiply(noise)

    def next(self, noise: Noise, memory: Memory) -> tuple[Noise, Memory]:
        # With factors of fewer digits, the noise would not have the correlation that the accountant assumes.
        with matrix_factorization() as module, jax.default_matmul_precision("highest"):
            return self._inverse(module).multiply_next(noise, memory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedToeplitz(_Toeplitz):
    """C has the same coefficients in each column from the diagonal down, and zeros below (BandMF).

    The memory has as many copies of the parameters as there are coefficients, less one. `fedsim.privacy.banded_toeplitz` finds
    the coefficients with the smallest error.

    Attributes:
      coefficients: c₀ ≥ c₁ ≥ … ≥ 0, with c₀ > 0.

    Raises:
      ValueError: an attribute is out of its range.
      ImportError: jax-privacy is not installed (when noise is drawn).

    >>> print(BandedToeplitz(rounds=3, coefficients=(1.0, 0.5)).dense(3))
    [[1.  0.  0. ]
     [0.5 1.  0. ]
     [0.  0.5 1. ]]
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "coefficients", tuple(float(x) for x in self.coefficients))
        c = np.array(self.coefficients)
        if not (len(c) and np.isfinite(c).all() and c[0] > 0 and c[-1] >= 0 and (np.diff(c) <= 0).all()):
            raise ValueError(
                f"Expected coefficients that do not increase, from a positive one to one of at least 0, got coefficients="
                f"{self.coefficients}: the sensitivity of others is not known. Use fedsim.privacy.banded_toeplitz."
            )

    def column(self, rounds: int) -> np.ndarray:
        c = np.array(self.coefficients[:rounds])
        return np.concatenate([c, np.zeros(rounds - len(c))])

    def _inverse(self, module: Any) -> Any:
        return module.toeplitz.inverse_as_streaming_matrix(jnp.array(self.coefficients, jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferedToeplitz(_Toeplitz):
    """C has the coefficients 1 and Σᵢ scaleᵢ decayᵢᵏ⁻¹ for k = 1, 2, … (a buffered linear Toeplitz matrix, BLT).

    The memory has one copy of the parameters for each scale. `fedsim.privacy.buffered_toeplitz` finds the best ones.

    Attributes:
      decays: each in [0, 1].
      scales: as many, at least 0, with a sum of at most 1.

    Raises:
      ValueError: an attribute is out of its range.
      ImportError: jax-privacy is not installed (when noise is drawn).

    >>> BufferedToeplitz(rounds=4, decays=(0.5,), scales=(0.25,)).column(4).tolist()
    [1.0, 0.25, 0.125, 0.0625]
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("decays", "scales"):
            object.__setattr__(self, name, tuple(float(x) for x in getattr(self, name)))
        values = np.array([*self.decays, *self.scales])
        in_range = bool(((values >= 0) & (values <= 1)).all()) and math.fsum(self.scales) <= 1
        if len(self.decays) != len(self.scales) or not self.scales or not in_range:
            raise ValueError(
                "Expected as many decays in [0, 1] as scales of at least 0 with a sum of at most 1, got "
                f"decays={self.decays} and scales={self.scales}: the sensitivity of others is not known. Use "
                "fedsim.privacy.buffered_toeplitz."
            )

    def column(self, rounds: int) -> np.ndarray:
        lag = np.arange(rounds - 1)[:, None]
        return np.concatenate([[1.0], np.sum(np.array(self.scales) * np.array(self.decays) ** lag, axis=1)])

    def _inverse(self, module: Any) -> Any:
        decays, scales = (np.array(values, np.float32) for values in (self.decays, self.scales))
        return module.buffered_toeplitz.StreamingMatrixBuilder(buf_decay=decays, output_scale=scales).build_inverse()


@contextlib.contextmanager
def matrix_factorization() -> Iterator[Any]:
    """Yields the module ``jax_privacy.matrix_factorization``, and lets JAX promote shapes and dtypes, which it relies on.

    Raises:
      ImportError: it is not installed.

    >>> with matrix_factorization() as found:
    ...     found.__name__
    'jax_privacy.matrix_factorization'
    """
    try:
        import jax_privacy.matrix_factorization as found
    except ImportError as error:
        raise ImportError(
            "Toeplitz matrices of noise need jax-privacy: pip install 'fedsim-jax[privacy]'. BinaryTree needs no package."
        ) from error
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield found
