"""`Cohort`: the clients of a round and the random key of the round."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fedsim import rng
from fedsim.data._batching import Batches
from fedsim.data._federated_data import ClientDataset, FederatedData


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
      attack: a `fedsim.attacks.Attack`. None means that there are no attackers, and the program contains no attack.
      attackers: ``bool [n]``, True for attackers. It must be given if ``attack`` is given, and only then.

    Raises:
      ValueError: positions outside the population, duplicate positions, an empty cohort without ``slots``, ``slots`` or
        ``work`` outside their range, ``attackers`` that are not one bool per client, or a round outside [0, 2**31).

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

    def __post_init__(self) -> None:
        clients = np.asarray(self.clients, np.int32)
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
        if len(clients) and (clients.min() < 0 or clients.max() >= self.data.num_clients):
            raise ValueError(
                f"Expected positions in [0, {self.data.num_clients}) in clients, got {clients.min()} to {clients.max()}."
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

        if (self.attack is None) != (self.attackers is None):
            raise ValueError("Expected both attack and attackers, or neither: give the attack and a bool per client.")
        if self.attackers is not None:
            attackers = np.asarray(self.attackers)
            object.__setattr__(self, "attackers", attackers)
            if attackers.shape != clients.shape or attackers.dtype != bool:
                raise ValueError(
                    f"Expected attackers bool [{len(clients)}], one per client, got {attackers.dtype} {list(attackers.shape)}."
                )

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
        """Number of examples of each client, ``int64 [n]``."""
        return self.data.sizes[self.clients]

    def num_steps(self, batches: Batches) -> np.ndarray:
        """Returns the number of steps of each client, ``int64 [n]``, with ``work`` taken into account."""
        steps = batches.num_steps(self.sizes)
        if self.work is None:
            return steps
        # In floats 0.35 * 60 may be slightly larger than 21, and it must not be rounded up to 22.
        return np.ceil(steps * self.work.astype(np.float64) - 1e-4).astype(np.int64)

    def keys(self) -> jax.Array:
        """Returns the clients' keys of this round, ``[n]``."""
        return rng.client_keys(self.key, self.round, self.clients)

    def __iter__(self) -> Iterator[tuple[str, ClientDataset, jax.Array]]:
        keys = self.keys()
        for i, client in enumerate(self.clients):
            dataset = self.data.client(int(client))
            yield dataset.client_id, dataset, keys[i]
