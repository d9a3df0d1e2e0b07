"""`canary_audit`: clients with random updates beside the real ones of a run, and how well the models show who took part.

G. Andrew, P. Kairouz, S. Oh, A. Oprea, H. B. McMahan, V. M. Suriyakumar, "One-shot empirical privacy estimation for federated
learning", ICLR 2024, algorithms 1 and 3: https://arxiv.org/abs/2302.03098. ``canaries`` is k.

Deviations from the paper: a canary has another direction in every round, so that canaries interfere less and noise that is used
twice is found; its score is the sum over rounds, not the largest cosine, of the movement whitened over rounds, which is the
likelihood ratio of normal noise that may be correlated between rounds; and half of the canaries, by a coin each, do not take
part, so that their scores are those that the paper derives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng, tree
from fedsim.algorithm import Algorithm
from fedsim.attacks import Attack
from fedsim.data import FederatedData
from fedsim.privacy._scores import Scores
from fedsim.samplers import Attacked, Sampler, check_fits

Update = Any


@dataclasses.dataclass(frozen=True)
class Canary(Attack):
    """A client that sends a random direction, another one in every round, in place of its update.

    Attributes:
      norm: the norm of the update, far above that to which a mechanism clips it.

    Raises:
      ValueError: ``norm`` is not positive.

    >>> update = Canary(norm=5.0).corrupt({"w": jnp.zeros([3, 2])}, jax.random.key(0))
    >>> round(float(jnp.linalg.norm(update["w"])), 3)
    5.0
    """

    norm: float = 1000.0

    def __post_init__(self) -> None:
        checks.positive(norm=self.norm)

    def corrupt(self, update: Update, key: jax.Array) -> Update:
        draw = rng.normal_like(rng.stream(key, "canary"), update)
        return tree.scale(draw, self.norm / jnp.sqrt(tree.squared_norm(draw)))


def canary_audit(
    algorithm: Algorithm,
    sampler: Callable[[FederatedData], Sampler],
    data: FederatedData,
    *,
    rounds: int,
    canaries: int,
    seed: int | jax.Array,
    canary: Canary | None = None,
) -> Scores:
    """Trains with canaries among the clients, and returns the scores of those that took part and of those that did not.

    The observer sees the server's parameters after every round, as the guarantee allows, and knows the directions of all
    canaries in every round. ``epsilon_bound`` of the result is then a lower bound of the ε that the accountant
    bounds from above. With ``"one_run"``, it holds for any algorithm; with the others, for one whose canaries hardly interfere:
    there should be fewer of them than parameters.

    Args:
      algorithm: with parameters in ``state.params``. The observer takes their change in a round for the aggregate, as it is
        with the default server optimizer of FedAvg; with another one, the audit finds less.
      sampler: returns the sampler of a population. It gets ``data`` with the canaries that take part, as further clients. Its
        seed draws the noise and the directions.
      data: the population of the real clients.
      rounds: the number of rounds.
      canaries: the number of canaries, of which about half take part; at least 10.
      seed: draws which canaries take part, and the initial parameters.
      canary: what the canaries send.

    Raises:
      ValueError: an argument is out of its range, the state has no ``params``, the sampler does not fit the algorithm, or all
        clients of ``data`` are empty.

    Without noise, all canaries are found:

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits(clients=5)").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10),
    ...     weighting="uniform", aggregator=fedsim.aggregators.GaussianMechanism(0.0, clip=1.0, denominator=10))
    >>> scores = canary_audit(
    ...     algorithm, lambda data: fedsim.UniformSampler(data, clients=data.num_clients, seed=0), data,
    ...     rounds=2, canaries=20, seed=0)
    >>> len(scores.inside), len(scores.outside), scores.auc
    (11, 9, 1.0)
    """
    checks.whole(1, rounds=rounds)
    checks.whole(10, canaries=canaries, remedy="a bound needs a few hundred")
    canary, key = canary or Canary(), rng.root(seed)
    coins = rng.generator(np.asarray(rng.words(rng.stream(key, "canaries")))).random(canaries)
    inside = int(np.sum(coins < 0.5))
    population = with_clients(data, inside)
    first, chosen = data.num_clients, sampler(population)
    check_fits(chosen, algorithm)
    attacked = Attacked(chosen, canary, attackers=list(population.client_ids[first:]), seed=key)
    state = algorithm.init(rng.stream(key, "init"))
    algorithm.check(population)
    if not hasattr(state, "params"):
        raise ValueError(
            f"Expected a state with params, got {type(state).__name__} of {type(algorithm).__name__}: audit FedAvg."
        )
    before, moved = _vector(state.params), []
    for round in range(rounds):
        state, _ = algorithm.apply(state, attacked.cohort(round))
        after = _vector(state.params)
        moved.append(before - after)
        before = after
    positions = np.arange(first, first + canaries)
    total = _along(canary, state.params, attacked.key, positions, _whitened(np.stack(moved)))
    return Scores(total[:inside], total[inside:])


def _vector(params: Update) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(params)])


def with_clients(data: FederatedData, more: int) -> FederatedData:
    """Returns the population with further clients, each with a copy of the first example, which their updates do not use.

    >>> population = with_clients(FederatedData.from_arrays({"x": np.arange(3)}, sizes=[2, 1]), 2)
    >>> population.client_ids[2:], population["canary 1"]["x"].tolist()
    (['canary 0', 'canary 1'], [0])
    """
    if not data.num_examples:
        raise ValueError("Expected a population with examples, got one without: canaries need an example each.")
    columns = {name: np.concatenate([np.asarray(x), np.repeat(np.asarray(x[:1]), more, 0)]) for name, x in data.columns.items()}
    offsets = np.concatenate([data.offsets, data.offsets[-1] + np.arange(1, more + 1)])
    return FederatedData(columns, offsets, [*data.client_ids, *(f"canary {number}" for number in range(more))])


def _whitened(moved: np.ndarray) -> np.ndarray:
    """Returns movements ``[rounds, d]`` times the inverse of their covariance between rounds, over the d parameters."""
    covariance = moved @ moved.T / moved.shape[1]
    covariance += np.eye(len(moved)) * max(1e-6 * np.trace(covariance) / len(moved), np.finfo(np.float32).tiny)
    scaled = np.linalg.solve(covariance, moved)
    return scaled / max(np.abs(scaled).max(), np.finfo(np.float64).tiny)


@functools.partial(jax.jit, static_argnums=0)
def _components(canary: Canary, like: Update, root_key: jax.Array, positions: jax.Array, moved: jax.Array) -> jax.Array:
    def of_round(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        round, movement = args

        def component(key: jax.Array) -> jax.Array:
            update = jax.tree.leaves(canary.corrupt(like, rng.stream(key, "attack")))
            return jnp.vdot(jnp.concatenate([leaf.ravel() for leaf in update]), movement) / canary.norm

        return jax.lax.map(component, rng.client_keys(root_key, round, positions), batch_size=64)

    return jax.lax.map(of_round, (jnp.arange(len(moved)), moved))


def _along(canary: Canary, like: Update, root_key: jax.Array, positions: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Returns the components of movements ``[rounds, d]`` along each canary's updates, added over rounds, ``[canaries]``."""
    components = _components(canary, like, root_key, jnp.asarray(positions), jnp.asarray(moved, jnp.float32))
    return np.asarray(components, np.float64).sum(axis=0)
