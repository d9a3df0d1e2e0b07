"""Checks what a sampler returns, so that a mistake in a user's sampler is reported before anything is compiled."""

from __future__ import annotations

import reprlib
from typing import Any

import jax

from fedsim.aggregators import Mean
from fedsim.data import Cohort
from fedsim.samplers._protocol import Sampler


def checked_cohort(sampler: Sampler, round: int, first: Cohort | None = None) -> Cohort:
    """Returns ``sampler.cohort(round)`` after checking it.

    Args:
      sampler: the sampler.
      round: the round.
      first: the first cohort of the run, whose population and root key all cohorts must share; None: this is the first one.

    Raises:
      ValueError: the sampler has no method ``cohort``; or it returned something other than a `Cohort`, or a cohort of another
        round, population or root key; or it could not construct the cohort. The message names the sampler's class and the
        round.

    >>> class Ids:
    ...     def cohort(self, round):
    ...         return ["ann", "bob"]
    >>> checked_cohort(Ids(), 3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Ids.cohort(3) returned the list ['ann', 'bob']: expected a fedsim.Cohort, as from fedsim.Cohort.of(data, ...
    """
    if not callable(getattr(sampler, "cohort", None)):
        raise ValueError(
            f"Expected a sampler, an object with a method cohort(round) that returns a fedsim.Cohort, got {_shown(sampler)}: "
            "give fedsim.UniformSampler(data, clients=..., seed=...), for example."
        )
    call = f"{type(sampler).__name__}.cohort({round})"
    try:
        cohort = sampler.cohort(round)
    except ValueError as error:
        if type(sampler).__module__.startswith("fedsim.samplers."):  # Their messages are complete.
            raise
        raise ValueError(f"{call} failed: {error}") from error
    check_is_cohort(cohort, f"{call} returned")
    if cohort.round != round:
        raise ValueError(
            f"{call} returned a cohort of round {cohort.round}, whose clients would use the random keys of that round: "
            f"construct it with round={round}, the argument of cohort(round)."
        )
    if first is not None and cohort.data is not first.data:
        raise ValueError(
            f"{call} returned a cohort of another population ({cohort.data.num_clients} clients) than that of round "
            f"{first.round} ({first.data.num_clients} clients): use one FederatedData object for all rounds of a run."
        )
    if first is not None and not same_key(cohort.key, first.key):
        raise ValueError(
            f"{call} returned a cohort with another root key than that of round {first.round}: use one key or seed for all "
            "rounds of a run; the round's number already makes the rounds differ."
        )
    return cohort


def check_fits(sampler: Sampler, algorithm: Any) -> None:
    """Raises ``ValueError`` unless an algorithm reports and weights what a sampler assumes.

    A sampler may have an attribute ``weighting``, the weighting of the algorithm with which its estimates are unbiased.

    >>> import types, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": [1.0, 2.0]}, sizes=[1, 1])
    >>> sampler = fedsim.samplers.ClusteredSampling(data, clients=1, seed=0)
    >>> check_fits(sampler, types.SimpleNamespace(weighting="uniform"))
    >>> check_fits(sampler, types.SimpleNamespace(weighting="examples"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Expected an algorithm with weighting='uniform' for ClusteredSampling, got weighting='examples': ...
    """
    inner: Any = sampler
    while hasattr(inner, "sampler"):
        inner = inner.sampler
    expected, got = getattr(inner, "weighting", None), getattr(algorithm, "weighting", None)
    if expected is not None and got != expected:
        raise ValueError(
            f"Expected an algorithm with weighting={expected!r} for {type(inner).__name__}, got weighting={got!r}: its updates "
            f"would not be those of the whole population on average; give weighting={expected!r}, or another sampler."
        )
    aggregator = getattr(algorithm, "aggregator", None)
    if expected is not None and aggregator is not None and type(aggregator.innermost) is not Mean:
        raise ValueError(
            f"Expected an algorithm with the aggregator Mean for {type(inner).__name__}, got aggregator={aggregator}: its "
            "scaled updates are right on average only in the mean. Give another sampler or Mean()."
        )
    capabilities = getattr(algorithm, "capabilities", None)
    if getattr(inner, "repeats", False) and capabilities is not None and not capabilities.repeatable:
        raise ValueError(
            f"{type(inner).__name__} may draw a client twice for a round, and clients of {type(algorithm).__name__} keep a "
            "memory that changes by the client's weight times its update: use another sampler, such as UniformSampler."
        )
    names = getattr(sampler, "observes", ())
    if "update_norm" in names and not getattr(algorithm, "update_norms", False):
        raise ValueError(
            f"{type(inner).__name__} needs the norms of updates, and the algorithm does not report them: give it "
            "update_norms=True."
        )


def check_is_cohort(value: Any, source: str) -> None:
    """Raises ``ValueError`` unless ``value`` is a `Cohort`; ``source`` begins the message.

    >>> check_is_cohort(None, "apply got")
    Traceback (most recent call last):
    ...
    ValueError: apply got None: expected a fedsim.Cohort, as from fedsim.Cohort.of(data, client_ids, round=round, seed=seed).
    """
    if not isinstance(value, Cohort):
        raise ValueError(
            f"{source} {_shown(value)}: expected a fedsim.Cohort, as from "
            "fedsim.Cohort.of(data, client_ids, round=round, seed=seed)."
        )


def _shown(value: Any) -> str:
    return "None" if value is None else f"the {type(value).__name__} {reprlib.repr(value)}"


def same_key(key: jax.Array, other: jax.Array) -> bool:
    """Returns whether two keys are equal.

    >>> same_key(jax.random.key(0), jax.random.key(0)), same_key(jax.random.key(0), jax.random.key(1))
    (True, False)
    """
    with jax.ensure_compile_time_eval():  # Also correct inside a trace.
        return key is other or bool(key == other)
