"""`check`: whether clients reach the server through the mechanism alone; `Guarantee`: what a run then promises them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedsim import checks
from fedsim.aggregators import (
    Aggregator,
    Clipped,
    Compressed,
    DistributedMechanism,
    GaussianMechanism,
    MatrixMechanism,
    NoiseMatrix,
    Wrapper,
)
from fedsim.algorithm import Algorithm
from fedsim.data import FederatedData
from fedsim.execution import traced_rounds
from fedsim.privacy._accountant import epsilon, noise_multiplier
from fedsim.privacy._distributed_noise import distributed_epsilon, distributed_noise_multiplier
from fedsim.privacy._participation import EveryRound, Participation, Poisson, Relation, participation_of
from fedsim.rounds import are_alike
from fedsim.samplers import Sampler

_RELATIONS = {
    "add_or_remove": "a client is added or removed, with all of its examples",
    "replace_one": "a client is replaced by any other, with all of its examples",
    "zero_out": "a client sends zeros, and so nothing of its examples, in all of its rounds",
}


def check(algorithm: Algorithm, data: FederatedData) -> int:
    """Returns how many updates a client sends to the server in a round, all of them through a mechanism with noise.

    The traced program of the round is followed from the server's state after the round back to the clients, so it holds for all
    data. Apart from the noised aggregates, the state may depend on nothing that clients send or that is known of them.

    Args:
      algorithm: with a `GaussianMechanism`, `MatrixMechanism` or `DistributedMechanism` as aggregator; `Clipped` and
        `Compressed` may be around it.
      data: the population.

    Raises:
      ValueError: the state depends on clients in other ways, or the round cannot be checked. The error names the way.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits(clients=5)").train
    >>> options = dict(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10),
    ...     weighting="uniform", aggregator=GaussianMechanism(1.0, clip=0.5, denominator=2))
    >>> check(fedsim.algorithms.FedAvg(**options), data), check(fedsim.algorithms.Mime(**options), data)
    (1, 2)
    >>> check(fedsim.algorithms.SCAFFOLD(**options), data)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Expected the server of SCAFFOLD to learn of clients through GaussianMechanism alone, got ...
    """
    return len(_sizes_of_updates(algorithm, data))


def _sizes_of_updates(algorithm: Algorithm, data: FederatedData, participation: Participation | None = None) -> list[int]:
    """Returns the number of coordinates of each update that a client sends in a round, see `check`.

    With a participation, updates that depend on what clients keep are refused where sampling should hide who takes part.
    """
    name = type(algorithm).__name__
    _check_aggregator(name, algorithm.aggregator)
    mechanism = type(algorithm.aggregator.innermost).__name__
    if type(algorithm).apply is not Algorithm.apply:
        raise ValueError(f"Expected a round whose program can be checked, got {name}, which overrides apply: override round.")
    if algorithm.staleness is not None:
        raise ValueError(
            f"Expected rounds whose clients start from this round's model, got {name} with staleness={algorithm.staleness}: no "
            "accountant is known for stale updates. Run it without, and without a virtual clock."
        )
    if algorithm.nonfinite == "raise":
        raise ValueError(
            f"Expected nonfinite='drop', got nonfinite='raise' in {name}: one client's update would stop the run, and so be "
            "seen. With the fixed denominator, an update that is left out changes nothing else."
        )
    algorithm.check(data)
    program = traced_rounds(algorithm, jax.eval_shape(algorithm.init, jax.random.key(0)), data)[0].trace()
    for call in program.calls:
        if call.statistics != ():
            raise ValueError(
                f"Expected a model without running statistics, got one with them in {name}: clients send them without noise. "
                "Use GroupNorm, or keep them at the clients (statistics='client')."
            )
        if call.aggregator is not None:
            _check_aggregator(name, call.aggregator)
            if not are_alike(call.aggregator, algorithm.aggregator):
                raise ValueError(
                    f"Expected updates to be aggregated by the algorithm's own {mechanism}, got another one in the call "
                    f"{call.name!r} of {name}: its noise would not be counted. Leave the aggregator of the call out."
                )
    if ways := program.reads_of_server():
        shown = [f"{', '.join(entries)} of {'the cohort' if call == 'plan' else repr(call)}" for call, entries in ways.items()]
        raise ValueError(
            f"Expected the server of {name} to learn of clients through {mechanism} alone, got a state that also depends "
            f"on {' and on '.join(shown)}, without noise: use another algorithm, such as FedAvg."
        )
    for call in program.calls:
        if participation is not None and participation.is_hidden and call.aggregator is not None and call.reads_memory:
            raise ValueError(
                f"Expected clients to send nothing that depends on what they keep between rounds where {participation}, got "
                f"{name} with {call.aggregator}: each round would show more of the rounds in which a client took part before. "
                "Use an algorithm and a model without it, no error feedback, or let clients take turns (--sampler cyclic), "
                "which hides nothing."
            )
    updates = [call.update for call in program.calls if call.aggregator is not None]
    return [sum(leaf.size for leaf in jax.tree.leaves(update)) for update in updates]


def _check_aggregator(name: str, aggregator: Aggregator) -> None:
    inner = aggregator
    while isinstance(inner, (Clipped, Compressed)):
        inner = inner.inner
    if type(inner) not in (GaussianMechanism, MatrixMechanism, DistributedMechanism):
        raise ValueError(
            f"Expected updates to be aggregated by GaussianMechanism, got {type(inner).__name__} in {name}: what clients "
            "send besides, or what combines the updates, has no known sensitivity. Use aggregator=GaussianMechanism(...), "
            "MatrixMechanism(...) or DistributedMechanism(...), which only Clipped and Compressed may wrap, and an algorithm "
            "whose clients send nothing but an update."
        )


def calibrated(
    algorithm: Algorithm, sampler: Sampler, *, epsilon: float, delta: float, rounds: int, relation: Relation | None = None
) -> Algorithm:
    """Returns the algorithm with the noise multiplier with which a number of rounds has (ε, δ) differential privacy.

    Args:
      algorithm: with a mechanism, whose own noise multiplier is not used, see `check`.
      sampler: of the rounds, see `participation_of`.
      epsilon, delta, rounds, relation: see `noise_multiplier`.

    Raises:
      ValueError: see `check`, `participation_of`, `noise_multiplier`, and with a `DistributedMechanism` `Guarantee.of`.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits(clients=50)").train
    >>> mechanism = GaussianMechanism(1.0, clip=0.5, denominator=5)
    >>> algorithm = fedsim.algorithms.FedSGD(
    ...     model=fedsim.models.digits_logistic(), server_optimizer=optax.sgd(0.1), weighting="uniform", aggregator=mechanism)
    >>> sampler = fedsim.samplers.PoissonSampler(data, probability=0.1, seed=0)
    >>> private = calibrated(algorithm, sampler, epsilon=4.0, delta=0.01, rounds=20)
    >>> round(Guarantee.of(private, sampler, delta=0.01).epsilon(20), 3)
    4.0
    """
    participation = participation_of(sampler)
    sizes = _sizes_of_updates(algorithm, sampler.data, participation)
    mechanism = algorithm.aggregator.innermost
    if isinstance(mechanism, DistributedMechanism):
        _check_distributed(mechanism, sizes, relation, _num_active(algorithm, sampler))
        noise = distributed_noise_multiplier(epsilon, mechanism, sizes[0], participation, rounds=rounds, delta=delta)
    else:
        matrix = getattr(mechanism, "matrix", None)
        noise = noise_multiplier(epsilon, participation, rounds=rounds, delta=delta, relation=relation, matrix=matrix)
        noise *= math.sqrt(len(sizes))

    return _with_mechanism(algorithm, lambda mechanism: dataclasses.replace(mechanism, noise_multiplier=noise))


def correlated(algorithm: Algorithm, matrix: NoiseMatrix) -> Algorithm:
    """Returns the algorithm with noise that is correlated between rounds, in place of independent noise.

    Args:
      algorithm: with a `GaussianMechanism`, whose noise multiplier, fixed norm and denominator are kept; `Clipped` and
        `Compressed` may be around it.
      matrix: how the noise is correlated, see `noise_matrix`.

    Raises:
      ValueError: the aggregator is another one, or its norm is adaptive.

    >>> import optax, fedsim
    >>> mechanism = GaussianMechanism(1.0, clip=0.5, denominator=5)
    >>> algorithm = fedsim.algorithms.FedSGD(
    ...     model=fedsim.models.digits_logistic(), server_optimizer=optax.sgd(0.1), weighting="uniform", aggregator=mechanism)
    >>> type(correlated(algorithm, fedsim.aggregators.BinaryTree(rounds=100)).aggregator).__name__
    'MatrixMechanism'
    """
    _check_aggregator(type(algorithm).__name__, algorithm.aggregator)

    def change(mechanism: Any) -> MatrixMechanism:
        if isinstance(mechanism, DistributedMechanism):
            raise ValueError(
                f"Expected a GaussianMechanism for noise that is correlated between rounds, got {mechanism}: clients do not "
                "keep their noise. Use a GaussianMechanism."
            )
        names = "noise_multiplier", "clip", "denominator", "largest_weight"
        return MatrixMechanism(**{name: getattr(mechanism, name) for name in names}, matrix=matrix)

    return _with_mechanism(algorithm, change)


def with_likely_minimum(algorithm: Algorithm, sampler: Sampler, *, chance: float = 0.01) -> Algorithm:
    """Returns the algorithm with a minimum of clients for its `DistributedMechanism`, if it has none, that few rounds miss.

    The sum of fewer clients than the minimum is not revealed. Those that take no step, for example without examples, do not
    count, because they send nothing. With Poisson sampling, the number of clients in a round is random. The minimum is then the
    largest number that a round misses with a probability of at most ``chance``, and at least 2. With all clients in every
    round, it is the number of those that take a step.

    Args:
      algorithm: with a `DistributedMechanism`; `Clipped` may be around it.
      sampler: of the rounds.
      chance: the probability that a round reveals nothing, in (0, 1).

    Raises:
      ValueError: the aggregator has no `DistributedMechanism`, ``chance`` is out of its range, or see `participation_of`.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits(clients=1000)").train
    >>> mechanism = DistributedMechanism(1.0, clip=0.5, clients=100)
    >>> algorithm = fedsim.algorithms.FedSGD(
    ...     model=fedsim.models.digits_logistic(), server_optimizer=optax.sgd(0.1), weighting="uniform", aggregator=mechanism)
    >>> sampler = fedsim.samplers.PoissonSampler(data, probability=0.1, seed=0)
    >>> with_likely_minimum(algorithm, sampler).aggregator.minimum
    79
    """
    from scipy.stats import binom

    checks.number(above=0, below=1, chance=chance)
    mechanism = algorithm.aggregator.innermost
    if not isinstance(mechanism, DistributedMechanism):
        raise ValueError(f"Expected a DistributedMechanism, got {mechanism}: only its sums have a minimum of clients.")
    known = participation_of(sampler)
    if mechanism.minimum is not None or not isinstance(known, Poisson | EveryRound):
        return algorithm
    least = _num_active(algorithm, sampler)
    if isinstance(known, Poisson):
        # The smallest k for which the chance of at most k clients is no smaller; fewer than k have a smaller one.
        least = int(binom.ppf(chance, least, known.probability))
    minimum = min(max(2, least), mechanism.clients)
    if minimum == mechanism.clients:
        return algorithm
    return _with_mechanism(algorithm, lambda mechanism: dataclasses.replace(mechanism, minimum=minimum))


def _num_active(algorithm: Algorithm, sampler: Sampler) -> int:
    """Returns how many clients of the population take a step, so that they send an update."""
    return int(np.count_nonzero(algorithm.batches.num_steps(sampler.data.sizes)))


def _with_mechanism(algorithm: Algorithm, change: Callable[[Any], Aggregator]) -> Algorithm:
    """Returns the algorithm with another mechanism inside the wrappers of its aggregator."""

    def changed(aggregator: Any) -> Aggregator:
        if isinstance(aggregator, Wrapper):
            return dataclasses.replace(aggregator, inner=changed(aggregator.inner))
        return change(aggregator)

    return dataclasses.replace(algorithm, aggregator=changed(algorithm.aggregator))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What a run promises its clients: (ε, δ) differential privacy after each number of rounds.

    It is about the server's state, so about the model and all that is computed from it. Training losses, numbers of examples
    and other info of rounds in the metrics of a run are computed from clients without noise.

    Attributes:
      noise_multiplier: of a round, with all updates that a client sends in it.
      participation: how clients take part in rounds.
      delta: δ, at most one over the number of clients.
      relation: see `epsilon`; None: the default of the participation.
      matrix: of noise that is correlated between rounds, see `epsilon`; None: the noise is independent.

    Raises:
      ValueError: an attribute is out of its range.

    >>> from fedsim.privacy import Poisson
    >>> guarantee = Guarantee(noise_multiplier=1.2, participation=Poisson(120 / 3383), delta=1e-5)
    >>> print(guarantee.text(100))
    ε = 1.71 with δ = 1e-05 if a client is added or removed, with all of its examples
    """

    noise_multiplier: float
    participation: Participation
    delta: float
    relation: Relation | None = None
    matrix: NoiseMatrix | None = None

    def __post_init__(self) -> None:
        checks.number(least=0, noise_multiplier=self.noise_multiplier)
        checks.number(above=0, below=1, delta=self.delta, remedy="it should be below one over the number of clients")

    @classmethod
    def of(cls, algorithm: Algorithm, sampler: Sampler, *, delta: float, relation: Relation | None = None) -> Guarantee:
        """Returns the guarantee of an algorithm with a mechanism, see `check`, whose cohorts are those of the sampler.

        If a client sends several updates in a round, each is clipped on its own; k of them, with independent noise, have the
        privacy of one with z / √k. With a `DistributedMechanism`, the guarantee is a `DistributedGuarantee`.

        Args:
          algorithm: see `check`.
          sampler: see `participation_of`.
          delta, relation: see `epsilon`.

        Raises:
          ValueError: see `check` and `participation_of`; or ``delta`` is above one over the number of clients; or sampling
            hides who takes part, and what clients send depends on what they keep, such as parts of a model or a compressor's
            errors; or there is a `DistributedMechanism`, and a client sends several updates in a round, the relation is not
            ``"zero_out"``, or fewer clients than its minimum take a step.
        """
        clients = sampler.data.num_clients
        checks.number(
            above=0, most=1 / clients, delta=delta,
            remedy=f"with a larger one, the data of one of {clients:,} clients may be published",
        )  # fmt: skip
        participation = participation_of(sampler)
        sizes = _sizes_of_updates(algorithm, sampler.data, participation)
        mechanism = algorithm.aggregator.innermost
        guarantee: Guarantee
        if isinstance(mechanism, DistributedMechanism):
            _check_distributed(mechanism, sizes, relation, _num_active(algorithm, sampler))
            guarantee = DistributedGuarantee(participation=participation, delta=delta, mechanism=mechanism, size=sizes[0])
        else:
            assert isinstance(mechanism, GaussianMechanism)
            noise = mechanism.noise_multiplier / math.sqrt(len(sizes))
            matrix = getattr(mechanism, "matrix", None)
            guarantee = cls(noise_multiplier=noise, participation=participation, delta=delta, relation=relation, matrix=matrix)
        guarantee.epsilon(1)  # What the accountant refuses, or a missing dp-accounting, is said before the first round.
        return guarantee

    def check_run(self, algorithm: Algorithm, sampler: Sampler) -> None:
        """Raises ``ValueError`` if the guarantee is that of another algorithm or of another sampler."""
        own = Guarantee.of(algorithm, sampler, delta=self.delta, relation=self.relation)
        if own != self:
            raise ValueError(
                f"Expected the guarantee of this algorithm with this sampler, {own}, got {self}. Give "
                "Guarantee.of(algorithm, sampler, delta=...)."
            )

    def epsilon(self, rounds: int) -> float:
        """Returns ε after a number of rounds, see `fedsim.privacy.epsilon`.

        Raises:
          ValueError: the noise is correlated between fewer rounds than these.
        """
        options = {"delta": self.delta, "relation": self.relation, "matrix": self.matrix}
        return epsilon(self.noise_multiplier, self.participation, rounds=rounds, **options)  # type: ignore[arg-type]

    def epsilon_if_seen(self, sensitivity: float) -> float:
        """Returns ε of a client if it is known in which rounds it took part, beside one that sends zeros in these.

        Args:
          sensitivity: by how many norms the client changes the sums of all rounds; with independent noise the square root of
            its number of rounds.
        """
        return epsilon(self.noise_multiplier / sensitivity, EveryRound(), rounds=1, delta=self.delta) if sensitivity else 0.0

    def text(self, rounds: int) -> str:
        """Returns ε and δ after a number of rounds and the neighbouring relation, as a part of a sentence."""
        return f"ε = {self.epsilon(rounds):.3g} with δ = {self.delta:g} if {self._relation_in_words}"

    @property
    def _relation_in_words(self) -> str:
        return _RELATIONS[self.relation or self.participation.relations[0]]

    @property
    def assumptions(self) -> list[str]:
        """What the guarantee assumes, in sentences."""
        hidden = ", and nobody sees who takes part" if self.participation.is_hidden else ""
        return [
            f"Of the sampling: {self.participation}{hidden}.",
            f"Of the noise: its standard deviation is {self.noise_multiplier:.4g} times what one client can add"
            f"{self._source_of_noise}.",
            "Of the start: the initial parameters were not computed from these clients.",
            "Of what is published: the model and what is computed from it; not the losses and counts of rounds in the metrics, "
            "and not what is chosen by evaluations on the clients' own examples.",
        ]

    @property
    def _source_of_noise(self) -> str:
        correlated = f" before {type(self.matrix).__name__} correlates it between rounds" if self.matrix else ""
        return f"{correlated}, and the server that adds it is trusted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedGuarantee(Guarantee):
    """What a run with a `DistributedMechanism` promises its clients, see `distributed_epsilon`.

    Attributes:
      mechanism: the clients' noise.
      size: the number of coordinates of an update.
      participation, delta: see `Guarantee`. ``noise_multiplier`` is that of the mechanism.

    Raises:
      ValueError: an attribute is out of its range.

    >>> from fedsim.privacy import Poisson
    >>> mechanism = DistributedMechanism(1.0, clip=0.1, clients=100, bits=20)
    >>> guarantee = DistributedGuarantee(mechanism=mechanism, size=1000, participation=Poisson(0.01), delta=1e-5)
    >>> print(guarantee.text(100))
    ε = 1.35 with δ = 1e-05 if a client sends its noise alone, and so nothing of its examples, in all of its rounds
    """

    noise_multiplier: float = dataclasses.field(init=False)
    mechanism: DistributedMechanism
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", self.mechanism.noise_multiplier)
        super().__post_init__()

    def epsilon(self, rounds: int) -> float:
        """Returns ε after a number of rounds, see `distributed_epsilon`."""
        return distributed_epsilon(self.mechanism, self.size, self.participation, rounds=rounds, delta=self.delta)

    def epsilon_if_seen(self, sensitivity: float) -> float:
        """Returns ε of a client if it is known in which rounds it took part, see `Guarantee.epsilon_if_seen`."""
        rounds = round(sensitivity**2)
        return distributed_epsilon(self.mechanism, self.size, EveryRound(), rounds=rounds, delta=self.delta)

    @property
    def _relation_in_words(self) -> str:
        return "a client sends its noise alone, and so nothing of its examples, in all of its rounds"

    @property
    def _source_of_noise(self) -> str:
        least = self.mechanism.fewest_clients
        return f", all clients add their part of it, and nobody sees a sum of fewer than {least:,} clients"


def _check_distributed(mechanism: DistributedMechanism, sizes: list[int], relation: Relation | None, clients: int) -> None:
    """Raises ``ValueError`` if the accountant of a mechanism does not know such updates, or so few clients reveal no sum."""
    if len(sizes) != 1:
        raise ValueError(
            f"Expected one update of a client in a round with DistributedMechanism, got {len(sizes)}: no accountant is known "
            "for more of them. Use an algorithm such as FedAvg, or a GaussianMechanism."
        )
    if relation not in (None, "zero_out"):
        raise ValueError(
            f"Expected relation='zero_out' with DistributedMechanism, got relation={relation!r}: a client that is removed "
            "would take its noise away. Leave it out."
        )
    if clients < mechanism.fewest_clients:
        raise ValueError(
            f"Expected at least minimum={mechanism.fewest_clients} clients that take a step with DistributedMechanism, got "
            f"{clients} in the population: no sum would be revealed, and the model would not learn. Use "
            "privacy.with_likely_minimum, or give a smaller minimum."
        )
