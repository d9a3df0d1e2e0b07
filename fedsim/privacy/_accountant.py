"""`epsilon` and `noise_multiplier`: the loss of privacy of a number of rounds, by the accountants of dp-accounting.

S. Meiser, E. Mohammadi, "Tight on budget?", CCS 2018, and A. Koskela, J. Jälkö, A. Honkela, "Computing tight differential
privacy guarantees using FFT", AISTATS 2020, for privacy loss distributions: https://arxiv.org/abs/1906.03049. I. Mironov,
K. Talwar, L. Zhang, "Rényi differential privacy of the sampled Gaussian mechanism", 2019: https://arxiv.org/abs/1908.10530.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

from fedsim import checks
from fedsim.aggregators import NoiseMatrix
from fedsim.privacy._factorization import sensitivity, sensitivity_of_a_turn
from fedsim.privacy._participation import (
    CyclicPoisson,
    EveryRound,
    FixedSize,
    Participation,
    Relation,
    participation_of,
)
from fedsim.samplers import Sampler

Method = Literal["pld", "rdp"]

# Losses of privacy are rounded up to multiples of this; a smaller one takes longer and gives a slightly smaller bound.
_INTERVAL = 1e-3
# Whole orders of Rényi divergences, for which the accountant is fast; for fixed sizes it has no formula for others.
_WHOLE = [*range(2, 17), 20, 24, 32, 48, 64, 96, 128]
# Above the most noise, the accountants' own errors are all that remains. Below the least, and above the most ε, there is no
# privacy left, and distributions of losses take minutes and gigabytes: their size grows with ε.
_MOST_NOISE, _LEAST_NOISE, _MOST_EPSILON = 1e5, 0.1, 1000


def epsilon(
    noise_multiplier: float,
    participation: Participation | Sampler,
    *,
    rounds: int,
    delta: float,
    relation: Relation | None = None,
    method: Method | None = None,
    interval: float = _INTERVAL,
    matrix: NoiseMatrix | None = None,
) -> float:
    """Returns ε of (ε, δ) differential privacy of clients after a number of rounds. It is an upper bound.

    Args:
      noise_multiplier: z of `fedsim.aggregators.GaussianMechanism`: the standard deviation of the noise on the sum in units of
        the norm that updates are clipped to.
      participation: the sampler of the rounds, or what an accountant knows of it, such as ``Poisson(0.01)``.
      rounds: the number of rounds; 0 reveals nothing.
      delta: δ, in (0, 1). It should be below one over the number of clients.
      relation: ``"add_or_remove"``: all populations that differ by the presence of one client are nearly indistinguishable;
        ``"replace_one"``: those in which one client is replaced by any other, which changes the sum by up to two norms;
        ``"zero_out"``: those in which a client sends zeros, also to the count of an `AdaptiveClip`, and keeps its place in the
        order of the clients.
        Default: the one that is known for this participation.
      method: ``"pld"`` composes privacy loss distributions, ``"rdp"`` Rényi divergences. Default: the better one that is known.
        Where Rényi divergences bound ε at 1,000 or more, it is this bound, which takes less memory.
      interval: for ``"pld"``, losses are rounded up to multiples of it.
      matrix: of a `fedsim.aggregators.MatrixMechanism`, whose rounds together are one Gaussian mechanism with the noise
        multiplier divided by `sensitivity`. With `CyclicPoisson`, each turn of a client's group is one mechanism, with Poisson
        sampling. None: the noise of each round is independent.

    Returns:
      ε; infinity without noise.

    Raises:
      ValueError: an argument is out of its range, or the relation or the method is not known for the participation.
      ImportError: dp-accounting is not installed.

    The tutorial of TensorFlow Federated on differential privacy, with 120 of 3,383 clients in each of 100 rounds:

    >>> from fedsim.privacy import Poisson
    >>> one = epsilon(1.2, Poisson(120 / 3383), rounds=100, delta=1e-5, method="rdp")
    >>> other = epsilon(1.2, Poisson(120 / 3383), rounds=100, delta=1e-5)
    >>> round(one, 3), round(other, 3)
    (1.986, 1.708)
    """
    checks.number(least=0, noise_multiplier=noise_multiplier)
    checks.whole(0, rounds=rounds)
    checks.number(above=0, below=1, delta=delta, remedy="it should be below one over the number of clients")
    checks.positive(interval=interval)
    known = participation_of(participation)
    relation, is_given, method = relation or known.relations[0], method is not None, method or known.methods[0]
    _check_known(known, "relation", relation, known.relations)
    _check_known(known, "method", method, known.methods)
    if rounds == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    known, scale, count = _composed(known, matrix, rounds)
    noise, others = float(noise_multiplier) / scale, (known, count, float(delta), relation)
    # Whole orders take milliseconds, and their bound is never less than that of all orders.
    if not is_given and "rdp" in known.methods and _epsilon(noise, *others, "coarse", float(interval)) >= _MOST_EPSILON:
        bound = _epsilon(noise, *others, "rdp", float(interval))
        if bound >= _MOST_EPSILON:
            return bound
    return _epsilon(noise, *others, method, float(interval))


def noise_multiplier(
    epsilon: float,
    participation: Participation | Sampler,
    *,
    rounds: int,
    delta: float,
    relation: Relation | None = None,
    matrix: NoiseMatrix | None = None,
) -> float:
    """Returns the noise multiplier with which a number of rounds has (ε, δ) differential privacy of clients.

    Args:
      epsilon: ε, above 0, at most 1000.
      participation, rounds, delta, relation, matrix: see `epsilon`.

    Returns:
      z, at most 0.01 % more than necessary, unless 0.1 (with a matrix, times its `sensitivity`) suffices: then that.

    Raises:
      ValueError: an argument is out of its range, or no noise reaches this ε.
      ImportError: dp-accounting is not installed.

    >>> from fedsim.privacy import Poisson
    >>> round(noise_multiplier(2.0, Poisson(120 / 3383), rounds=100, delta=1e-5), 2)
    1.11
    """
    from scipy.optimize import brentq

    check_epsilon(epsilon)
    checks.whole(1, rounds=rounds)
    known = participation_of(participation)

    relation = relation or known.relations[0]
    _check_known(known, "relation", relation, known.relations)
    checks.number(above=0, below=1, delta=delta)
    known, scale, count = _composed(known, matrix, rounds)

    def excess(noise: float, method: str) -> float:
        found = _epsilon(noise, known, count, float(delta), relation, method, _INTERVAL)
        return min(found - epsilon, 1e6)  # An infinite value would stop the search.

    def bracket(start: float, factor: float, method: str) -> tuple[float, float] | None:
        if excess(_MOST_NOISE, method) > 0:
            return None
        high = start
        while excess(high, method) > 0:
            high *= factor
        low = max(high / factor, _LEAST_NOISE)
        while low < high and excess(low, method) <= 0:
            low, high = max(low / factor, _LEAST_NOISE), low
        return low, high

    def solved(low: float, high: float, method: str, precision: float) -> float:
        if low == high:  # The least noise suffices.
            return high
        found = brentq(functools.partial(excess, method=method), low, high, rtol=precision, xtol=precision * low)
        while excess(found, method) > 0:  # The search ends on either side.
            found *= 1 + precision
        return found

    # Rényi divergences of whole orders are fast and need a little more noise, so they tell where the search begins. They prove
    # no small ε, where it begins anywhere.
    method, start, factor = known.methods[0], 1.0, 2.0
    if method == "pld" and (coarse := bracket(start, factor, "coarse")):
        start, factor = solved(*coarse, "coarse", 0.01), 1.1
    if found := bracket(start, factor, method):
        return solved(*found, method, 3e-5) * scale
    raise ValueError(
        f"Expected an epsilon that noise can reach, got epsilon={epsilon}: with delta={delta} and rounds={rounds}, the "
        f"accountant proves no less than {epsilon + excess(_MOST_NOISE, method):.3g} for any noise. Give a larger one."
    )


def check_epsilon(epsilon: float) -> None:
    """Raises ``ValueError`` unless ε is above 0 and at most 1000."""
    checks.positive(epsilon=epsilon, remedy="8 is a weak guarantee, 1 a strong one")
    checks.number(
        most=_MOST_EPSILON, epsilon=epsilon, remedy="a larger one protects nobody; choose the noise multiplier instead"
    )


def _composed(participation: Participation, matrix: NoiseMatrix | None, rounds: int) -> tuple[Participation, float, int]:
    """Returns the participation in mechanisms with independent noise, what a client changes in norms, and their number."""
    if isinstance(participation, CyclicPoisson):
        scale = 1.0 if matrix is None else sensitivity_of_a_turn(matrix, participation.cycle, rounds=rounds)
        return participation, scale, participation.most(rounds)
    if matrix is not None:
        return EveryRound(), sensitivity(matrix, participation, rounds=rounds), 1
    if participation.least_separation is not None:
        return EveryRound(), 1.0, participation.most(rounds)
    return participation, 1.0, rounds


def _check_known(participation: Participation, name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(
            f"Expected {name} to be {' or '.join(map(repr, known))} where {participation}, got {name}={value!r}: no other "
            f"{name} is supported there. Leave it out, or use another sampler."
        )


@functools.lru_cache(maxsize=4096)
def _epsilon(
    noise: float, participation: Participation, rounds: int, delta: float, relation: Relation, method: str, interval: float
) -> float:
    dp = _dp_accounting()
    # The accountants take the noise in units of what a client changes: a replaced one changes the sum by two norms.
    event = participation.event(dp, noise / (2 if relation == "replace_one" else 1))
    neighbours = getattr(dp.NeighboringRelation, "REPLACE_ONE" if relation == "replace_one" else "ADD_OR_REMOVE_ONE")
    if method == "pld":
        # This class of dp-accounting knows a replaced record only with its own doubling; the event has it already.
        accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
    else:
        orders = _WHOLE if method == "coarse" or isinstance(participation, FixedSize) else None
        accountant = dp.rdp.RdpAccountant(orders, neighbours)
    return float(accountant.compose(event, rounds).get_epsilon(delta))


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError("The privacy accountant needs dp-accounting: pip install 'fedsim-jax[privacy]'.") from error
    return dp_accounting
