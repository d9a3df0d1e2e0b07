"""The accountant of `fedsim.aggregators.DistributedMechanism`: Rényi divergences of the sum of the clients' integer noise.

P. Kairouz, Z. Liu, T. Steinke, "The distributed discrete Gaussian mechanism for federated learning with secure aggregation",
ICML 2021, proposition 14: https://arxiv.org/abs/2102.06387. N. Agarwal, P. Kairouz, Z. Liu, "The Skellam mechanism for
differentially private federated learning", NeurIPS 2021, theorem 3.5: https://arxiv.org/abs/2110.04995. Sampling amplifies it
by Y. Zhu, Y.-X. Wang, "Poisson subsampled Rényi differential privacy", ICML 2019, theorem 5.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fedsim import checks
from fedsim.aggregators import DistributedMechanism
from fedsim.privacy._accountant import _dp_accounting, check_epsilon
from fedsim.privacy._participation import EveryRound, Participation, Poisson, participation_of
from fedsim.samplers import Sampler

_ORDERS = (*range(2, 129), 256)


def distributed_epsilon(
    mechanism: DistributedMechanism, size: int, participation: Participation | Sampler, *, rounds: int, delta: float
) -> float:
    """Returns ε of (ε, δ) differential privacy of clients, if one sends its noise alone, after a number of rounds.

    Neighbouring populations differ in one client, whose updates are zeros in one of them. It adds its noise to them: clients
    add the noise, so a client that is removed would take its share of it away. The result is an upper bound. It counts the
    noise of ``minimum`` clients, which every sum that is revealed has, and the norm of rounded updates. That a sum wraps costs
    accuracy and no privacy. The number of clients in a round is taken as known, and with sampling, as in the papers, the noise
    of a sum as the same whether this client takes part or not.

    Args:
      mechanism: clients' noise.
      size: the number of coordinates of an update.
      participation: a `PoissonSampler` or a `Poisson`, or `EveryRound`.
      rounds: the number of rounds; 0 reveals nothing.
      delta: δ, in (0, 1).

    Returns:
      ε; infinity without noise.

    Raises:
      ValueError: an argument is out of its range, or no bound is known for the participation.
      ImportError: dp-accounting is not installed.

    >>> mechanism = DistributedMechanism(1.0, clip=0.1, clients=100, bits=20)
    >>> round(distributed_epsilon(mechanism, 1000, Poisson(0.01), rounds=100, delta=1e-5), 2)
    1.35
    """
    checks.instance(DistributedMechanism, "DistributedMechanism(1.0, clip=0.1, clients=100)", mechanism=mechanism)
    checks.whole(1, size=size)
    checks.whole(0, rounds=rounds)
    checks.number(above=0, below=1, delta=delta, remedy="it should be below one over the number of clients")
    known = participation_of(participation)
    if not isinstance(known, Poisson | EveryRound):
        raise ValueError(
            f"Expected Poisson sampling or all clients in every round for DistributedMechanism, got a sampler where {known}: "
            "no amplification of this noise is known for it. Use fedsim.samplers.PoissonSampler."
        )
    if rounds == 0:
        return 0.0
    if mechanism.noise_multiplier == 0:
        return math.inf
    probability = known.probability if isinstance(known, Poisson) else 1.0
    divergences = np.array([divergence(mechanism, size, order) for order in range(1, _ORDERS[-1] + 1)])
    amplified = [min(_sampled(order, probability, divergences), divergences[order - 1]) for order in _ORDERS]
    return float(_dp_accounting().rdp.compute_epsilon(_ORDERS, np.array(amplified) * rounds, delta)[0])


def distributed_noise_multiplier(
    epsilon: float,
    mechanism: DistributedMechanism,
    size: int,
    participation: Participation | Sampler,
    *,
    rounds: int,
    delta: float,
) -> float:
    """Returns the noise multiplier with which a number of rounds has (ε, δ) differential privacy, see `distributed_epsilon`.

    The scale of the integers depends on the noise, so both are found together, as TensorFlow Federated does it.

    Args:
      epsilon: ε, above 0, at most 1000, as for `noise_multiplier`.
      mechanism: clients' noise, whose own noise multiplier is not used.
      size, participation, rounds, delta: see `distributed_epsilon`.

    Returns:
      z, at most 0.01 % more than necessary, and at least 0.001.

    Raises:
      ValueError: an argument is out of its range, or no noise reaches this ε with so few bits.
      ImportError: dp-accounting is not installed.

    >>> import dataclasses
    >>> mechanism = DistributedMechanism(1.0, clip=0.1, clients=100, bits=20)
    >>> z = distributed_noise_multiplier(1.0, mechanism, 1000, Poisson(0.01), rounds=100, delta=1e-5)
    >>> mechanism = dataclasses.replace(mechanism, noise_multiplier=z)
    >>> round(distributed_epsilon(mechanism, 1000, Poisson(0.01), rounds=100, delta=1e-5), 3)
    1.0
    """
    from scipy.optimize import brentq

    check_epsilon(epsilon)
    checks.whole(1, rounds=rounds)

    def excess(log: float) -> float:
        noised = dataclasses.replace(mechanism, noise_multiplier=math.exp(log))
        found = distributed_epsilon(noised, size, participation, rounds=rounds, delta=delta)
        return min(found - epsilon, 1e6)  # An infinite value would stop the search.

    least, most = math.log(1e-3), math.log(1e4)
    if (over := excess(most)) > 0:
        raise ValueError(
            f"Expected an epsilon that noise can reach, got epsilon={epsilon}: with bits={mechanism.bits}, delta={delta} and "
            f"rounds={rounds}, the accountant proves no less than {epsilon + over:.3g} for any noise. Give a larger one, or "
            "more bits."
        )
    if excess(least) <= 0:
        return math.exp(least)
    # The search ends at most this far on either side of the solution, and the noise must suffice.
    tolerance = 1e-5
    return math.exp(brentq(excess, least, most, xtol=tolerance) + tolerance)


def divergence(mechanism: DistributedMechanism, size: int, order: int) -> float:
    """Returns a bound on the Rényi divergence of one round without sampling, for a whole order.

    Both laws have the term order Δ² / (2 σ²) of Gaussian noise, in which Δ is the norm of integers, and σ² the variance of the
    noise of ``minimum`` clients. The discrete Gaussian's has besides what a sum of such variables differs from one, τ.
    """
    n = mechanism.fewest_clients
    d, scale, l2 = size + size % 2, mechanism.scale(size), mechanism.norm_bound(size)
    l1 = l2 * min(math.sqrt(d), l2)  # The second is a bound because the coordinates are whole numbers.
    variance = (mechanism.local_deviation * scale) ** 2  # of one client
    if mechanism.law == "skellam":
        mu = n * variance
        gaussian = order * l2**2 / (2 * mu)
        return gaussian + min(((2 * order - 1) * l2**2 + 6 * l1) / (4 * mu**2), 3 * l1 / (2 * mu))
    k = np.arange(1, n)
    tau = 10 * float(np.sum(np.exp(-2 * math.pi**2 * variance * k / (k + 1))))
    ratio = l2 / math.sqrt(n * variance)
    return min(
        order / 2 * ratio**2 + tau * d,
        order / 2 * (ratio**2 + 2 * l1 / math.sqrt(n * variance) * tau + tau**2 * d),
        order / 2 * (ratio + math.sqrt(d) * tau) ** 2,
    )


def _sampled(order: int, probability: float, divergences: np.ndarray) -> float:
    """Returns the divergence of a round in which each client takes part with this probability."""
    from scipy.special import gammaln, logsumexp

    if probability == 1:
        return float(divergences[order - 1])
    q, log_q, log_rest = probability, math.log(probability), math.log1p(-probability)
    j = np.arange(2, order + 1)
    combinations = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    terms = combinations + j * log_q + (order - j) * log_rest + (j - 1) * divergences[j - 1] + np.where(j > 2, math.log(3), 0)
    none = (order - 1) * log_rest + math.log(order * q - q + 1)
    return float(logsumexp(np.append(terms, none))) / (order - 1)
