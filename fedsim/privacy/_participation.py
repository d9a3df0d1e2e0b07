"""How clients take part in rounds, as a privacy accountant knows it; it is taken from the sampler."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from fedsim import checks
from fedsim.attacks import Attack
from fedsim.samplers import (
    Attacked,
    CyclicPoissonSampler,
    CyclicSampler,
    PoissonSampler,
    Sampler,
    ShuffledSampler,
    Stragglers,
    UniformSampler,
)

# Which populations are neighbours: one has a client that the other lacks, the examples of one client differ, or one client
# sends zeros in all of its rounds.
Relation = Literal["add_or_remove", "replace_one", "zero_out"]


@dataclasses.dataclass(frozen=True)
class Participation:
    """Base class of the assumptions of an accountant about who takes part in a round.

    Attributes:
      relations: the neighbouring relations for which dp-accounting knows the loss of privacy; the first is the default.
      methods: the accountants that know it, the best first: ``"pld"`` (privacy loss distributions), ``"rdp"`` (Rényi).
      is_hidden: whether the accountant assumes that nobody sees who takes part in a round.

    >>> Poisson(0.01).relations, FixedSize(10, 1000).relations
    (('add_or_remove',), ('replace_one',))
    """

    relations: ClassVar[tuple[Relation, ...]] = ()
    methods: ClassVar[tuple[Literal["pld", "rdp"], ...]] = ("pld", "rdp")
    is_hidden: ClassVar[bool] = True

    @property
    def least_separation(self) -> int | None:
        """How many rounds a client's rounds are at least apart; None if that is random."""
        return None

    def most(self, rounds: int) -> int:
        """Returns in how many of the first rounds a client takes part at most."""
        return rounds

    def event(self, dp: Any, noise: float) -> Any:
        """Returns the event of one round.

        Args:
          dp: the module ``dp_accounting``.
          noise: the standard deviation of the noise in units of what a client changes.
        """
        return dp.GaussianDpEvent(noise)


@dataclasses.dataclass(frozen=True)
class Poisson(Participation):
    """Every client takes part in a round with the same probability, independently of all others.

    Attributes:
      probability: above 0, at most 1.

    Raises:
      ValueError: ``probability`` is not in ``(0, 1]``.

    >>> print(Poisson(0.01))
    every client takes part in a round with probability 0.01, independently of the others (Poisson sampling)
    """

    relations = ("add_or_remove",)

    probability: float

    def __post_init__(self) -> None:
        checks.number(above=0, most=1, probability=self.probability, remedy="it is the probability that a client takes part")

    def event(self, dp: Any, noise: float) -> Any:
        return dp.PoissonSampledDpEvent(self.probability, dp.GaussianDpEvent(noise))

    def __str__(self) -> str:
        return (
            f"every client takes part in a round with probability {self.probability:.4g}, independently of the others (Poisson "
            "sampling)"
        )


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Participation):
    """Groups of clients take turns, and every client of the group takes part with the same probability, independently.

    C. A. Choquette-Choo et al., "(Amplified) banded matrix factorization: a unified approach to private training", NeurIPS
    2023, algorithm 2: https://arxiv.org/abs/2306.08153. A client that is left out keeps its place in its group. The rounds are
    then as many mechanisms with Poisson sampling as a group has turns, also if the noise is correlated between fewer rounds
    than those of a cycle.

    Attributes:
      probability: above 0, at most 1.
      cycle: the number of groups.

    Raises:
      ValueError: ``probability`` is not in ``(0, 1]``, or ``cycle`` is not a positive whole number.

    >>> print(CyclicPoisson(0.1, cycle=10))
    every client may take part every 10 rounds, each time with probability 0.1, independently (Poisson sampling of groups)
    >>> CyclicPoisson(0.1, cycle=10).most(25)
    3
    """

    relations = ("zero_out",)

    probability: float
    _: dataclasses.KW_ONLY
    cycle: int

    def __post_init__(self) -> None:
        checks.number(above=0, most=1, probability=self.probability, remedy="it is the probability that a client takes part")
        checks.whole(1, cycle=self.cycle)

    def most(self, rounds: int) -> int:
        return -(-rounds // self.cycle)

    def event(self, dp: Any, noise: float) -> Any:
        return Poisson(self.probability).event(dp, noise)

    def __str__(self) -> str:
        return (
            f"every client may take part every {self.cycle:,} rounds, each time with probability {self.probability:.4g}, "
            "independently (Poisson sampling of groups)"
        )


@dataclasses.dataclass(frozen=True)
class FixedSize(Participation):
    """A round has a fixed number of distinct clients, and all such sets are equally likely, independently between rounds.

    Y.-X. Wang, B. Balle, S. P. Kasiviswanathan, "Subsampled Rényi differential privacy and analytical moments accountant",
    AISTATS 2019, theorem 9: https://arxiv.org/abs/1808.00087. It holds if one client is replaced by another.

    Attributes:
      clients: in a round.
      population: the number of all clients, above ``clients``.

    Raises:
      ValueError: ``clients`` is not a positive whole number, or ``population`` is not larger.

    >>> print(FixedSize(10, 1000))
    10 of 1,000 clients take part in a round, all sets of this size equally likely (sampling without replacement)
    """

    relations = ("replace_one",)
    methods = ("rdp",)

    clients: int
    population: int

    def __post_init__(self) -> None:
        checks.whole(1, clients=self.clients)
        checks.whole(self.clients + 1, population=self.population, remedy="if all clients take part, use EveryRound()")

    def event(self, dp: Any, noise: float) -> Any:
        return dp.SampledWithoutReplacementDpEvent(self.population, self.clients, dp.GaussianDpEvent(noise))

    def __str__(self) -> str:
        return (
            f"{self.clients:,} of {self.population:,} clients take part in a round, all sets of this size equally likely "
            "(sampling without replacement)"
        )


@dataclasses.dataclass(frozen=True)
class EveryRound(Participation):
    """Every client takes part in every round, so sampling does not hide who took part.

    >>> print(EveryRound())
    every client takes part in every round (no amplification by sampling)
    """

    relations = ("add_or_remove", "replace_one")
    is_hidden = False

    @property
    def least_separation(self) -> int:
        return 1

    def __str__(self) -> str:
        return "every client takes part in every round (no amplification by sampling)"


@dataclasses.dataclass(frozen=True)
class Epochs(Participation):
    """Every client takes part once in an epoch of rounds; nothing about it is secret.

    A client that is left out keeps its place in the order, and sends zeros: otherwise, others would take part in other rounds.
    P. Kairouz et al., "Practical and private (deep) learning without sampling or shuffling", ICML 2021, section 2, call this
    relation zero-out: https://arxiv.org/abs/2103.00039.

    Attributes:
      length: the number of rounds of an epoch.
      separation: how many rounds a client's rounds are at least apart: ``length`` if the order is the same in all epochs, and 1
        if it is shuffled.

    Raises:
      ValueError: an attribute is out of its range.

    >>> print(Epochs(10, separation=10))
    every client takes part once in an epoch of 10 rounds, at least 10 rounds apart (no amplification by sampling)
    >>> Epochs(10, separation=10).most(25)
    3
    """

    relations = ("zero_out", "replace_one")
    is_hidden = False

    length: int
    _: dataclasses.KW_ONLY
    separation: int

    def __post_init__(self) -> None:
        checks.whole(1, length=self.length)
        checks.whole(1, self.length, separation=self.separation)

    @property
    def least_separation(self) -> int:
        return self.separation

    def most(self, rounds: int) -> int:
        return -(-rounds // self.length)

    def __str__(self) -> str:
        return (
            f"every client takes part once in an epoch of {self.length:,} rounds, at least {self.separation:,} rounds apart "
            "(no amplification by sampling)"
        )


def participation_of(sampler: Sampler | Participation) -> Participation:
    """Returns how clients take part in the rounds of a sampler.

    Attackers are clients, as long as each decides by itself: `samplers.Attacked` with the same attackers in every round, who do
    not collude. Stragglers are known where it is known who takes part: `samplers.Stragglers` of a `CyclicSampler`, for example.

    Args:
      sampler: a `PoissonSampler`, a `UniformSampler`, a `CyclicSampler`, a `ShuffledSampler` or a `CyclicPoissonSampler`; a
        `Participation` is returned as it is.

    Raises:
      ValueError: the sampler is another one, for which no accountant is known.

    >>> from fedsim.data import FederatedData
    >>> data = FederatedData.from_arrays({"x": [1.0, 2.0, 3.0, 4.0]}, sizes=[1] * 4)
    >>> [participation_of(UniformSampler(data, clients=clients, seed=0)) for clients in (3, 4)]
    [FixedSize(clients=3, population=4), EveryRound()]
    """
    if isinstance(sampler, Participation):
        return sampler
    if type(sampler) is Attacked:
        if sampler.every_round or _colludes(sampler.attack):
            raise ValueError(
                f"Expected attackers who decide by themselves, got the attack {type(sampler.attack).__name__} "
                f"{'of others in every round' if sampler.every_round else 'of clients who collude'}: what one client sends "
                "would depend on the others, which no accountant knows. Choose an attack such as sign_flip, of fixed attackers."
            )
        return participation_of(sampler.sampler)
    if type(sampler) is Stragglers:
        inner = participation_of(sampler.sampler)
        if not inner.is_hidden:
            # A client that sends zeros keeps its place in a cohort, so it does not change which others are stragglers.
            return inner if isinstance(inner, Epochs) else Epochs(1, separation=1)
    if type(sampler) is PoissonSampler:
        return EveryRound() if sampler.probability == 1 else Poisson(sampler.probability)
    if type(sampler) is CyclicPoissonSampler:
        if sampler.probability == 1:
            return Epochs(sampler.cycle, separation=sampler.cycle)
        return CyclicPoisson(sampler.probability, cycle=sampler.cycle)
    if type(sampler) is UniformSampler:
        population = sampler.data.num_clients
        return EveryRound() if sampler.clients == population else FixedSize(sampler.clients, population)
    if isinstance(sampler, CyclicSampler | ShuffledSampler) and type(sampler) in (CyclicSampler, ShuffledSampler):
        length = -(-sampler.data.num_clients // sampler.clients)
        return EveryRound() if length == 1 else Epochs(length, separation=length if type(sampler) is CyclicSampler else 1)
    raise ValueError(
        f"Expected a PoissonSampler or a UniformSampler, got {type(sampler).__name__}: who takes part in its rounds is not "
        "what a privacy accountant assumes. Use fedsim.samplers.PoissonSampler (--sampler poisson), without stragglers, "
        "arriving examples and a virtual clock."
    )


def _colludes(attack: Attack) -> bool:
    inner = getattr(attack, "inner", None)
    own = type(attack).wrap_aggregator is not Attack.wrap_aggregator
    return own or (isinstance(inner, Attack) and _colludes(inner))
