"""`Cohort`: the clients of a round and the random key of the round."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import rng
from fedsim.data._batching import Batches
from fedsim.data._federated_data import ClientDataset, FederatedData


class Arrivals(NamedTuple):
    """When the clients of a cohort started, and how their updates count, in the order of the cohort.

    Attributes:
      staleness: ``int32 [n]``, how many rounds ago the server sent the model that the client starts from, at most the round.
      key_rounds: ``int32 [n]``, the rounds that determine the clients' keys. A client has another one for each of its updates.
      weights: ``float32 [n]``, factors of the clients' weights in the aggregate, at least 0.
      scales: ``float32 [n]``, factors of the updates when they arrive at the server.

    Raises:
      ValueError: an array has not one number per client, or one that is out of its range.

    >>> arrivals = Arrivals.of([0, 2], round=5)
    >>> arrivals.key_rounds.tolist(), arrivals.scales.tolist()
    ([5, 3], [1.0, 1.0])
    """

    staleness: np.ndarray
    key_rounds: np.ndarray
    weights: np.ndarray
    scales: np.ndarray

    @classmethod
    def of(
        cls,
        staleness: Sequence[int] | np.ndarray,
        *,
        round: int,
        key_rounds: Sequence[int] | np.ndarray | None = None,
        weights: Sequence[float] | np.ndarray | None = None,
        scales: Sequence[float] | np.ndarray | None = None,
    ) -> Arrivals:
        """Returns arrivals in a round, by default with the keys of the rounds in which clients started, and factors of 1."""
        staleness = np.asarray(staleness, np.int32)
        ones = np.ones(len(staleness), np.float32)
        return cls(
            staleness,
            round - staleness if key_rounds is None else np.asarray(key_rounds, np.int32),
            ones if weights is None else np.asarray(weights, np.float32),
            ones if scales is None else np.asarray(scales, np.float32),
        )

    def check(self, clients: int, round: int) -> None:
        """Raises ``ValueError`` unless these are arrivals of so many clients in a round."""
        for name, values in self._asdict().items():
            if np.shape(values) != (clients,):
                raise ValueError(
                    f"Expected {name} in arrivals to have a number for each of the {clients} clients, got shape "
                    f"{list(np.shape(values))}."
                )
        if np.any((self.staleness < 0) | (self.staleness > round)):
            raise ValueError(
                f"Expected staleness in [0, {round}] (the round) in arrivals, got {self.staleness.min()} to "
                f"{self.staleness.max()}."
            )
        if np.any(self.key_rounds < 0):
            raise ValueError(f"Expected key_rounds >= 0 in arrivals, got {self.key_rounds.min()}.")
        if not np.all(np.isfinite(self.scales) & np.isfinite(self.weights) & (self.weights >= 0)):
            raise ValueError("Expected finite weights >= 0 and finite scales in arrivals, got others.")


@dataclasses.dataclass(frozen=True, eq=False)
class Cohort:
    """The clients of one round.

    Iterating yields ``(client_id, dataset, key)`` for each client, where ``key`` is the client's key of this round.

    Attributes:
      data: the population.
      clients: ``int32 [n]``, positions in the population, without duplicates.
      round: number of the round, from 0. All keys of the round depend on it.
      key: root key of the run.
      slots: number of clients that the compiled program has space for: at least n, at most the size of the population. 0 means
        n. Cohorts with equal ``slots`` share one compiled program, whatever their n. With ``slots``, n may be 0.
      work: ``float32 [n]`` in [0, 1], the fraction of its steps that each client takes in this round, rounded up to whole steps
        (stragglers take fewer). None means all steps.
      arrivals: when the clients started, if they start from models of earlier rounds. The algorithm needs a
        `fedsim.Staleness`. None means that all clients start from this round's model.
      rows: ``int64 [n, 2]``, the first of its own examples that each client has in this round, and the one after the last, see
        `fedsim.samplers.Arriving`. The others do not exist in this round. None means that clients have all of their examples.
      attack: a `fedsim.attacks.Attack`. None means that there are no attackers, and the program contains no attack.
      attackers: ``bool [n]``, True for attackers. It must be given if ``attack`` is given, and only then.
      measures: numbers about the round by name, which are written to the round's line of the metrics.

    Raises:
      ValueError: positions that are not whole numbers or outside the population, duplicate positions, an empty cohort without
        ``slots``, ``slots``, ``work``, ``arrivals`` or ``rows`` outside their range, ``rows`` together with ``arrivals``,
        ``attackers`` that are not one bool per client, a round outside [0, 2**31), or a key of another implementation than
        "threefry2x32", see `fedsim.rng.root`.

    >>> data = FederatedData.from_clients({"a": {"x": np.zeros(2)}, "b": {"x": np.zeros(3)}})
    >>> [(client_id, len(dataset)) for client_id, dataset, key in Cohort.of(data, ["b", "a"])]
    [('b', 3), ('a', 2)]
    """

    data: FederatedData
    clients: np.ndarray
    round: int
    key: jax.Array
    slots: int = 0
    work: np.ndarray | None = None
    attack: Any = None
    attackers: np.ndarray | None = None
    arrivals: Arrivals | None = None
    rows: np.ndarray | None = None
    measures: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.key, jax.Array) and jax.dtypes.issubdtype(self.key.dtype, jax.dtypes.prng_key):
            rng.check_implementation(self.key)
        given = np.asarray(self.clients)
        if given.size and given.dtype.kind not in "iu":
            raise ValueError(
                f"Expected whole numbers in clients, positions in the population, got {given.dtype}: convert them, a mask by "
                "np.flatnonzero(mask)."
            )
        if given.size and (given.min() < 0 or given.max() >= self.data.num_clients):
            raise ValueError(
                f"Expected positions in [0, {self.data.num_clients}) in clients, got {given.min()} to {given.max()}."
            )
        clients = given.astype(np.int32)
        object.__setattr__(self, "clients", clients)
        if not 0 <= self.round < 2**31:
            raise ValueError(f"Expected 0 <= round < 2**31, got round={self.round}: count rounds from 0.")
        object.__setattr__(self, "slots", operator.index(self.slots) or len(clients))
        if not self.slots:
            raise ValueError("The cohort is empty: expected at least one client, or slots=... for a round without clients.")
        if not len(clients) <= self.slots <= self.data.num_clients:
            raise ValueError(
                f"Expected {len(clients)} (the cohort) <= slots <= {self.data.num_clients} (the population), "
                f"got slots={self.slots}: leave it out, or give a number in this range."
            )
        if len(np.unique(clients)) != len(clients):
            raise ValueError("A client occurs more than once in the cohort: list every client once per round.")
        if self.work is not None:
            work = np.asarray(self.work, np.float32)
            object.__setattr__(self, "work", work)
            if work.shape != clients.shape or not np.all((work >= 0) & (work <= 1)):
                raise ValueError(
                    f"Expected work in [0, 1], a number for each of the {len(clients)} clients, got work={self.work!r}."
                )
        if self.arrivals is not None:
            self.arrivals.check(len(clients), self.round)
        if self.rows is not None:
            self._check_rows()
        if (self.attack is None) != (self.attackers is None):
            raise ValueError("Expected both attack and attackers, or neither: give the attack and a bool per client.")
        if self.attackers is not None:
            attackers = np.asarray(self.attackers)
            object.__setattr__(self, "attackers", attackers)
            if attackers.shape != clients.shape or attackers.dtype != bool:
                raise ValueError(
                    f"Expected attackers bool [{len(clients)}], one per client, got {attackers.dtype} {list(attackers.shape)}."
                )

    def _check_rows(self) -> None:
        rows, sizes = np.asarray(self.rows), self.data.sizes[self.clients]
        if rows.shape != (len(self), 2) or rows.dtype.kind not in "iu":
            raise ValueError(
                f"Expected rows int [{len(self)}, 2], two positions for each client, got {rows.dtype} {list(rows.shape)}."
            )
        if np.any((rows[:, 0] < 0) | (rows[:, 0] > rows[:, 1]) | (rows[:, 1] > sizes)):
            raise ValueError("Expected 0 <= first <= stop <= its number of examples in rows of each client, got others.")
        if self.arrivals is not None:
            raise ValueError(
                "Expected rows or arrivals, got both: a client that starts from the model of an earlier round would read "
                "examples that it did not have then. Leave one out."
            )
        object.__setattr__(self, "rows", rows.astype(np.int64))

    @classmethod
    def of(cls, data: FederatedData, client_ids: Sequence[str], *, round: int = 0, seed: int | jax.Array = 0) -> Cohort:
        """Returns the cohort of the clients with these ids.

        Args:
          data: the population.
          client_ids: ids of the clients, without duplicates.
          round: number of the round, from 0.
          seed: the run's seed, or its root key.

        Raises:
          KeyError: the population has no client of this id.
          ValueError: no ids, or a duplicate.
        """
        return cls(data, np.array([data.index(i) for i in client_ids], np.int32), round, rng.root(seed))

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def client_ids(self) -> list[str]:
        """Ids of the clients, in the order of the cohort."""
        return [self.data.client_ids[int(i)] for i in self.clients]

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples that each client has in this round, ``int64 [n]``."""
        return self.data.sizes[self.clients] if self.rows is None else self.rows[:, 1] - self.rows[:, 0]

    @property
    def starts(self) -> np.ndarray:
        """The row of the population's columns in which the examples of each client begin, ``int64 [n]``."""
        starts = self.data.offsets[self.clients]
        return starts if self.rows is None else starts + self.rows[:, 0]

    def client(self, at: int) -> ClientDataset:
        """Returns the examples that a client has in this round.

        Args:
          at: the client's place in the cohort.
        """
        start, size = int(self.starts[at]), int(self.sizes[at])
        examples = {name: column[start : start + size] for name, column in self.data.columns.items()}
        return ClientDataset(self.data.client_ids[int(self.clients[at])], examples)

    def num_steps(self, batches: Batches) -> np.ndarray:
        """Returns the number of steps of each client, ``int64 [n]``, with ``work`` taken into account."""
        return self.partial_steps(batches.num_steps(self.sizes))

    def partial_steps(self, steps: np.ndarray) -> np.ndarray:
        """Returns the number of steps of each client, ``int64 [n]``, which would take ``steps`` if it took all of its steps."""
        if self.work is None:
            return steps
        # In floats 0.35 * 60 may be slightly larger than 21, and it must not be rounded up to 22.
        return np.ceil(steps * self.work.astype(np.float64) - 1e-4).astype(np.int64)

    def keys(self) -> jax.Array:
        """Returns the clients' keys of this round, ``[n]``."""
        rounds = self.round if self.arrivals is None else self.arrivals.key_rounds
        return rng.client_keys(self.key, rounds, self.clients)

    def __iter__(self) -> Iterator[tuple[str, ClientDataset, jax.Array]]:
        keys = self.keys()
        for i in range(len(self)):
            dataset = self.client(i)
            yield dataset.client_id, dataset, keys[i]
