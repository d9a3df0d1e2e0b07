"""What each client of a run is worth: the derivative of the loss after the run in the weights of the clients."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng
from fedsim.aggregators import GaussianMechanism, PartlyUniform
from fedsim.algorithm import Algorithm
from fedsim.data import FederatedData
from fedsim.differentiation._differentiable import differentiable
from fedsim.rounds import Client, ClientUpdate, is_scalable
from fedsim.samplers import Sampler, check_fits

A = TypeVar("A", bound=Algorithm)


@dataclasses.dataclass(frozen=True)
class ClientWorth:
    """The result of `client_worth`.

    Attributes:
      client_ids: the clients of the population.
      values: ``float64 [clients]``: by how much the objective falls, to first order, if the weight of a client is doubled. A
        client with a negative value does harm. It is 0 for a client that was in no cohort.
      num_examples: ``int64 [clients]``.
      objective: its value after the run.

    >>> worth = ClientWorth(["ann", "bob"], np.array([0.5, -0.25]), np.array([3, 2]), objective=1.5)
    >>> print(worth.table())
    client  examples  worth
    ann            3    0.5
    bob            2  -0.25
    """

    client_ids: Sequence[str]
    values: np.ndarray
    num_examples: np.ndarray
    objective: float

    def table(self) -> str:
        """Returns a row per client, the one that is worth most first."""
        order = np.argsort(-self.values, kind="stable")
        rows = [(self.client_ids[int(i)], f"{self.num_examples[i]:,}", f"{self.values[i]:.3g}") for i in order]
        rows.insert(0, ("client", "examples", "worth"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)

    def plot(self) -> Any:
        """Returns a matplotlib figure: the clients in the order of their worth, and their worth against their examples."""
        from fedsim.plots import plot_worth

        return plot_worth(self.client_ids, self.values, self.num_examples)


def with_client_weights(algorithm: A, weights: jax.Array) -> A:
    """Returns a copy of an algorithm in which the weight of each client's update is multiplied by a number.

    With 0 for a client, what its ``client_update`` sends does not count; with equal numbers, nothing changes. Other calls of a
    round, such as the full gradients of Mime, keep their weights.

    Args:
      algorithm: an algorithm with a ``client_update``.
      weights: ``float32 [clients of the population]``.

    Raises:
      ValueError: in the first round, ``weights`` has another length.

    >>> import optax, fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.float32([1, 2, 9])}, sizes=[1, 1, 1])
    >>> histogram = fedsim.algorithms.Histogram(bins=2, low=0, high=10)
    >>> with_client_weights(histogram, jnp.ones(3)).client_weights.tolist()
    [1.0, 1.0, 1.0]
    """
    made, cls = copy.copy(algorithm), type(algorithm)
    object.__setattr__(made, "__class__", _weighted(cls, is_scalable(algorithm)))  # type: ignore[arg-type]
    object.__setattr__(made, "client_weights", weights)
    return made


@functools.cache
def _weighted(cls: type[Any], scalable: bool) -> type[Any]:
    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Weighted(cls):
        # A class that overrides client_update must declare it again.
        capabilities = dataclasses.replace(cls.capabilities, scalable=scalable)

        client_weights: Any = None

        def check(self, data: FederatedData) -> None:
            super().check(data)
            if self.client_weights.shape != (data.num_clients,):
                raise ValueError(
                    f"Expected weights to be a number for each of the {data.num_clients} clients of the population, got shape "
                    f"{list(self.client_weights.shape)}."
                )

        def client_update(self, shared: Any, client: Client) -> ClientUpdate:
            update = super().client_update(shared, client)
            factor = self.client_weights[client.position]
            return update._replace(weight=jnp.asarray(update.weight, factor.dtype) * factor)

    Weighted.__name__ = Weighted.__qualname__ = cls.__name__
    return Weighted


def client_worth(algorithm: Algorithm, sampler: Sampler, *, rounds: int, objective: Callable[[Any], jax.Array]) -> ClientWorth:
    """Returns what each client of a run is worth: minus the derivative of an objective in the weight of its updates.

    The run is differentiated from its first to its last round, so that what a client contributes in an early round counts by
    what becomes of it. One run gives the worth of all clients, where leaving each of them out needs a run per client. It is a
    derivative, so it says what a small change of the weight does: for clients that others could replace, the loss without them
    is another question.

    Args:
      algorithm: an algorithm that `differentiable` accepts, with a ``client_update`` and weights that are averaged.
      sampler: of the cohorts; the initial state is drawn from their root key, as in `fedsim.experiment.run`.
      rounds: the number of rounds. The states of all of them are stored.
      objective: a function of the state after the last round, such as
        ``fedsim.differentiation.validation_loss(model, validation_data)``. Do not use the test data, if clients are chosen.

    Raises:
      ValueError: the algorithm cannot be differentiated or does not fit the sampler, clients have no updates with weights, the
        aggregator bounds weights (`GaussianMechanism`, `MatrixMechanism`) or ignores them for some parameters
        (`PartlyUniform`), or an update is not finite.

    >>> import optax, fedsim
    >>> data, model = fedsim.datasets.load("digits", clients=4), fedsim.models.digits_logistic()
    >>> split = fedsim.partitioners.split_within_clients(data.train, {"train": 0.8, "validation": 0.2}, seed=0)
    >>> algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=100))
    >>> objective = fedsim.differentiation.validation_loss(model, split["validation"])
    >>> sampler = fedsim.UniformSampler(split["train"], clients=4, seed=0)
    >>> worth = client_worth(algorithm, sampler, rounds=2, objective=objective)
    >>> worth.values.shape, bool(abs(worth.values.sum()) < 1e-3)  # if all weights are doubled, their mean is the same
    ((4,), True)
    """
    checks.instance(Algorithm, "fedsim.algorithms.FedAvg(...)", algorithm=algorithm)
    checks.whole(1, rounds=rounds)
    if type(algorithm).client_update is Algorithm.client_update:
        raise ValueError(
            f"Expected an algorithm whose clients send updates with weights, got {type(algorithm).__name__}, which defines no "
            "client_update: use FedAvg or another algorithm with one."
        )
    if isinstance(inner := algorithm.aggregator.innermost, (GaussianMechanism, PartlyUniform)):
        raise ValueError(
            f"Expected an aggregator that multiplies updates by their weights, got {inner}, which bounds weights or ignores "
            "them for some parameters, so that there is no derivative in them: use Mean(), or Clipped(norm) to clip updates."
        )
    check_fits(sampler, algorithm)
    cohorts = [sampler.cohort(round) for round in range(rounds)]
    data = cohorts[0].data
    key = rng.stream(cohorts[0].key, "init")

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the objective, and which updates were not finite, ``bool [rounds, slots]``."""
        weighted = differentiable(with_client_weights(algorithm, weights))
        state, info = weighted.apply_rounds(weighted.init(key), cohorts)
        return objective(state), info.clients["dropped"]

    (value, dropped), derivative = loss(jnp.ones(data.num_clients, jnp.float32))
    if np.any(dropped):
        where = np.argwhere(dropped).tolist()
        named = [f"{cohorts[round].client_ids[slot]!r} in round {round}" for round, slot in where[:5]]
        more = [] if len(where) == len(named) else ["..."]
        raise ValueError(
            f"Expected finite updates, got {len(where)} with a NaN or an infinity, whose clients would seem to be worth 0 "
            f"(client {', '.join(named + more)}): leave these clients out, or use smaller learning rates."
        )
    if not np.all(np.isfinite(derivative)):
        raise ValueError("The derivative is not finite, so the run diverges: use smaller learning rates or fewer rounds.")
    return ClientWorth(data.client_ids, -np.asarray(derivative, np.float64), np.asarray(data.sizes), float(value))
