"""Matrices of correlated noise: their sensitivity, their error in the sums of all rounds, and those with the smallest error.

C. A. Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach to private training", NeurIPS 2023,
for participation with a minimum separation: https://arxiv.org/abs/2306.08153. H. B. McMahan, Z. Xu, Y. Zhang, "A hassle-free
algorithm for strong differential privacy in federated learning systems", EMNLP 2024, for buffered matrices with several
participations and the loss: https://arxiv.org/abs/2408.08868. The optimizers are those of jax-privacy.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.aggregators import BandedToeplitz, BinaryTree, BufferedToeplitz, NoiseMatrix, matrix_factorization
from fedsim.durable_files import replace_text
from fedsim.privacy._participation import CyclicPoisson, Participation, participation_of
from fedsim.samplers import Sampler

Correlation = Literal["tree", "efficient_tree", "banded", "buffered"]
Values = dict[str, list[float]]


def sensitivity(matrix: NoiseMatrix, participation: Participation | Sampler, *, rounds: int) -> float:
    """Returns the largest norm of C u, where u has a one in each round in which a client takes part, and zeros.

    A client whose clipped updates have a norm of at most 1 changes C G by at most this, in the Frobenius norm, if each of the
    updates depends on all that was released before (matrices without negative entries, section 2 of the first paper).

    Args:
      matrix: C.
      participation: the sampler, or its `Participation`: `Epochs` or `EveryRound`.
      rounds: the number of rounds, at most that of the matrix.

    Returns:
      The sensitivity; an upper bound for a `BinaryTree` whose clients may take part more often than once in any epoch's length.

    Raises:
      ValueError: ``rounds`` exceeds that of the matrix, or the participation has no minimum separation.
      ImportError: jax-privacy is not installed.

    With a binary tree, each level of blocks below 8 rounds counts a client once in 8 rounds:

    >>> from fedsim.aggregators import BinaryTree
    >>> from fedsim.privacy import Epochs
    >>> round(sensitivity(BinaryTree(rounds=8), Epochs(8, separation=8), rounds=8) ** 2, 3)
    4.0
    """
    checks.whole(
        1, matrix.rounds, rounds=rounds, remedy="the noise was correlated for so many rounds; start with another matrix"
    )
    known = participation_of(participation)
    return _sensitivity(matrix, _separation(known), known.most(rounds), rounds)


def max_loss(matrix: NoiseMatrix, participation: Participation | Sampler) -> float:
    """Returns the sensitivity times the largest deviation of the noise in a sum of rounds, see `deviation_of_sums`.

    For the same privacy, it is proportional to the error of the model after the worst round, with SGD as server optimizer. That
    of independent noise is √(n k), if clients take part k times in n rounds.

    Args:
      matrix, participation: see `sensitivity`.

    Raises:
      ValueError: see `sensitivity`.

    >>> from fedsim.aggregators import BandedToeplitz
    >>> from fedsim.privacy import Epochs
    >>> independent = BandedToeplitz(rounds=100, coefficients=(1.0,))
    >>> round(max_loss(independent, Epochs(25, separation=25)), 3)  # √(100 · 4)
    20.0
    """
    return sensitivity(matrix, participation, rounds=matrix.rounds) * deviation_of_sums(matrix)


def deviation_of_sums(matrix: NoiseMatrix) -> float:
    """Returns the largest deviation of the noise in the sums of the rounds up to each one, for a noise multiplier of 1.

    With SGD as server optimizer, the error of the model after the worst round is proportional to this times the noise
    multiplier, whatever the sampler.

    >>> from fedsim.aggregators import BandedToeplitz
    >>> deviation_of_sums(BandedToeplitz(rounds=100, coefficients=(1.0,)))  # √100 for independent noise
    10.0
    """
    from scipy.linalg import solve_triangular

    n = matrix.rounds
    # B = A C⁻¹, from Cᵀ Bᵀ = Aᵀ.
    factor = solve_triangular(matrix.dense(n), np.tri(n).T, trans="T", lower=True).T
    return float(np.sqrt(np.max(np.sum(np.square(factor), axis=1))))


def banded_toeplitz(
    rounds: int, bands: int, *, error: Literal["mean", "max"] = "mean", cache: str | os.PathLike[str] | None = None
) -> BandedToeplitz:
    """Returns the matrix with so many coefficients whose error for clients that take part once is smallest (BandMF).

    It is the best one for clients whose rounds are at least ``bands`` apart, too.

    Args:
      rounds: n.
      bands: from 1, which is independent noise, to ``rounds``.
      error: the mean over rounds of the variance of the prefix sums, or the largest one.
      cache: a folder in which the coefficients are kept, because finding them takes seconds to minutes; None: only as long as
        the process lives.

    Raises:
      ValueError: an argument is out of its range.
      ImportError: jax-privacy is not installed.

    >>> banded_toeplitz(8, bands=1).coefficients
    (1.0,)
    """
    checks.whole(1, rounds=rounds)
    checks.whole(1, rounds, bands=bands)
    checks.one_of("mean", "max", error=error)
    if bands == 1:
        return BandedToeplitz(rounds=rounds, coefficients=(1.0,))

    def best() -> Values:
        reduction = jnp.mean if error == "mean" else jnp.max
        with matrix_factorization() as module:
            found = np.array(module.toeplitz.optimize_banded_toeplitz(rounds, bands, reduction_fn=reduction))
        # Coefficients that the optimizer has left in a wrong order by its rounding would have another sensitivity.
        return {"coefficients": np.minimum.accumulate(np.maximum(found, 0).astype(np.float64)).tolist()}

    values = _kept(cache, f"banded-{rounds}-{bands}-{error}", best)
    return BandedToeplitz(rounds=rounds, coefficients=tuple(values["coefficients"]))


def buffered_toeplitz(
    rounds: int, participation: Participation | Sampler, *, cache: str | os.PathLike[str] | None = None
) -> BufferedToeplitz:
    """Returns a matrix with few buffers whose largest error is small for clients that take part so often (BLT).

    A buffer is added as long as it makes the error at least 1 % smaller.

    Args:
      rounds: n, at least 2.
      participation: see `sensitivity`.
      cache: see `banded_toeplitz`.

    Raises:
      ValueError: an argument is out of its range.
      ImportError: jax-privacy is not installed.

    >>> import tempfile
    >>> from fedsim.privacy import Epochs
    >>> with tempfile.TemporaryDirectory() as folder:  # It is found there, so nothing is computed.
    ...     _ = Path(folder, "buffered-16-8-2.json").write_text('{"decays": [0.9], "scales": [0.4]}')
    ...     buffered_toeplitz(16, Epochs(8, separation=8), cache=folder).column(3).round(2).tolist()
    [1.0, 0.4, 0.36]
    """
    checks.whole(2, rounds=rounds)
    known = participation_of(participation)
    separation, most = _separation(known), known.most(rounds)

    def best() -> Values:
        with matrix_factorization() as module, jax.enable_x64():
            found = module.buffered_toeplitz.optimize(n=rounds, min_sep=separation, max_participations=most, min_buffers=1)
            return {"decays": np.array(found.buf_decay).tolist(), "scales": np.array(found.output_scale).tolist()}

    values = _kept(cache, f"buffered-{rounds}-{separation}-{most}", best)
    return BufferedToeplitz(rounds=rounds, decays=tuple(values["decays"]), scales=tuple(values["scales"]))


def noise_matrix(
    kind: Correlation, participation: Participation | Sampler, *, rounds: int, cache: str | os.PathLike[str] | None = None
) -> NoiseMatrix:
    """Returns a matrix of a kind for these rounds and clients.

    Args:
      kind: ``"tree"``, a binary tree; ``"efficient_tree"``, with more precise sums; ``"banded"``, with as many bands as a
        client's rounds are apart; or ``"buffered"``.
      participation: see `sensitivity`.
      rounds: n.
      cache: see `banded_toeplitz`.

    Raises:
      ValueError: an argument is out of its range, or the participation has no minimum separation.
      ImportError: jax-privacy is not installed.

    >>> from fedsim.privacy import Epochs
    >>> noise_matrix("tree", Epochs(10, separation=10), rounds=100)
    BinaryTree(rounds=100, efficient=False)
    """
    checks.one_of("tree", "efficient_tree", "banded", "buffered", kind=kind)
    known = participation_of(participation)
    if isinstance(known, CyclicPoisson) and kind != "banded":
        raise ValueError(
            f"Expected kind='banded' for groups that take turns with Poisson sampling, got kind={kind!r}: sampling is known to "
            "amplify the privacy of banded noise alone. Use fedsim.samplers.CyclicSampler for other matrices."
        )
    separation = known.cycle if isinstance(known, CyclicPoisson) else _separation(known)
    if kind in ("tree", "efficient_tree"):
        return BinaryTree(rounds=rounds, efficient=kind == "efficient_tree")
    if kind == "buffered":
        return buffered_toeplitz(rounds, participation, cache=cache)
    if separation == 1 and rounds > 1:
        raise ValueError(
            "Expected clients whose rounds are at least 2 apart for banded noise, got 1: its only band is independent noise. "
            "Use fedsim.samplers.CyclicSampler with fewer clients, or kind='buffered'."
        )
    return banded_toeplitz(rounds, min(separation, rounds), cache=cache)


def _separation(participation: Participation) -> int:
    """Returns how many rounds a client's rounds are at least apart. Raises ``ValueError`` if that is random."""
    if participation.least_separation is None:
        raise ValueError(
            f"Expected clients whose rounds have a minimum distance, got a participation in which {participation}: the "
            "sensitivity of noise that is correlated between rounds is not known for it. Use fedsim.samplers.CyclicSampler "
            "(--sampler cyclic). For groups with Poisson sampling, compare fedsim.privacy.noise_multiplier times "
            "fedsim.privacy.deviation_of_sums."
        )
    return participation.least_separation


def sensitivity_of_a_turn(matrix: NoiseMatrix, cycle: int, *, rounds: int) -> float:
    """Returns the norm of a column of a banded matrix, where the rows of a client's turns have nothing in common."""
    checks.whole(1, matrix.rounds, rounds=rounds, remedy="the noise was correlated for so many rounds")
    column = matrix.column(rounds)
    if not matrix.is_toeplitz or np.any(column[cycle:]):
        raise ValueError(
            f"Expected a BandedToeplitz of at most {cycle} bands where groups take turns every {cycle} rounds, got {matrix}: "
            "the noise of a client's turns would depend on each other, which no accountant with sampling knows. Use "
            "noise_matrix('banded', ...)."
        )
    return float(np.linalg.norm(column))


@functools.lru_cache(maxsize=4096)
def _sensitivity(matrix: NoiseMatrix, separation: int, most: int, rounds: int) -> float:
    with matrix_factorization() as module, jax.enable_x64():
        if matrix.is_toeplitz:
            find = module.toeplitz.minsep_sensitivity_squared
            return float(np.sqrt(find(jnp.array(matrix.column(rounds)), min_sep=separation, max_participations=most)))
        if most <= -(-rounds // separation) and separation * most >= rounds:
            # All that a client can do is to begin in another round: its rounds are as far apart as they must be.
            turns = [matrix.dense(rounds)[:, first::separation].sum(axis=1) for first in range(min(separation, rounds))]
            return float(np.sqrt(np.max(np.sum(np.square(turns), axis=1))))
        find = module.sensitivity.get_min_sep_sensitivity_upper_bound
        return float(find(jnp.array(matrix.dense(rounds)), separation, most))


_FOUND: dict[str, Values] = {}


def _kept(cache: str | os.PathLike[str] | None, name: str, find: Callable[[], Values]) -> Values:
    """Returns what ``find`` returns, which is called only if the result is neither in this process nor in the folder."""
    path = None if cache is None else Path(cache) / f"{name}.json"
    if name not in _FOUND:
        _FOUND[name] = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else find()
    if path and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(_FOUND[name]))
    return _FOUND[name]
