"""`Cohort`: who takes part in a round, and with which randomness."""

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

    Iterating gives ``(client_id, dataset, key)`` for each, where ``key`` is the client's own key in this round.

    Attributes:
      data: the population.
      clients: ``int32 [n]``, positions in the population, no client twice.
      round: the round's number, from 0; it enters every key.
      key: the run's root key.
      work: ``float32 [n]`` in [0, 1], the share of its steps that each client manages this round, rounded up to whole steps
        (stragglers); None: all of them.
      attack: what attackers do, a `fedsim.attacks.Attack`; None: nobody attacks, and nothing is compiled for it.
      attackers: ``bool [n]``, who attacks; given with ``attack`` and only then.
      slots: room for this many clients, at least n and at most the population; 0: n. Cohorts of equal ``slots`` share
        one compiled program, however many clients they have: none at all is fine, too, if ``slots`` is given.

    Raises:
      ValueError: positions outside the population or one twice, a cohort that is empty without ``slots``, ``slots`` or ``work``
        out of its range, ``attackers`` that are not one truth value per client, a round out of [0, 2**31).

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
            raise ValueError(f"Expected 0 <= round < 2**31, got round={self.round}.")
        object.__setattr__(self, "slots", operator.index(self.slots) or len(clients))
        if not self.slots:
            raise ValueError("The cohort is empty: expected at least one client, or slots=... for a round without any.")
        if not len(clients) <= self.slots <= self.data.num_clients:
            raise ValueError(
                f"Expected {len(clients)} (the cohort) <= slots <= {self.data.num_clients} (the population), "
                f"got slots={self.slots}."
            )
        if len(clients) and (clients.min() < 0 or clients.max() >= self.data.num_clients):
            raise ValueError(f"Expected clients in [0, {self.data.num_clients}), got {clients.min()} to {clients.max()}.")
        if len(np.unique(clients)) != len(clients):
            raise ValueError("A client occurs more than once in the cohort; each may take part once a round.")
        if self.work is not None:
            work = np.asarray(self.work, np.float32)
            object.__setattr__(self, "work", work)
            if work.shape != clients.shape or not np.all((work >= 0) & (work <= 1)):
                raise ValueError(f"Expected work in [0, 1], one number per client of {len(clients)}, got work={self.work!r}.")

        if (self.attack is None) != (self.attackers is None):
            raise ValueError("Expected attack and attackers together, or neither: what is done, and by whom.")
        if self.attackers is not None:
            attackers = np.asarray(self.attackers)
            object.__setattr__(self, "attackers", attackers)
            if attackers.shape != clients.shape or attackers.dtype != bool:
                raise ValueError(
                    f"Expected attackers bool [{len(clients)}], one per client, got {attackers.dtype} {list(attackers.shape)}."
                )

    @classmethod
    def of(cls, data: FederatedData, client_ids: Sequence[str], *, round: int = 0, seed: int | jax.Array = 0) -> Cohort:
        """A cohort of named clients.

        Raises:
          KeyError: a name that the population lacks.
          ValueError: no names, or one twice.
        """
        return cls(data, np.array([data.index(i) for i in client_ids], np.int32), round, rng.root(seed))

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def client_ids(self) -> list[str]:
        """Names, in cohort order."""
        return [self.data.client_ids[int(i)] for i in self.clients]

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, ``int64 [n]``."""
        return self.data.sizes[self.clients]

    def num_steps(self, batches: Batches) -> np.ndarray:
        """How many steps each client takes, ``int64 [n]``: what ``batches`` says, or the share of it that it manages."""
        steps = batches.num_steps(self.sizes)
        if self.work is None:
            return steps
        # 0.35 of 60 is 21, also where a float has it a little above.
        return np.ceil(steps * self.work.astype(np.float64) - 1e-4).astype(np.int64)

    def keys(self) -> jax.Array:
        """Each client's key of this round, ``[n]``."""
        return rng.client_keys(self.key, self.round, self.clients)

    def __iter__(self) -> Iterator[tuple[str, ClientDataset, jax.Array]]:
        keys = self.keys()
        for i, client in enumerate(self.clients):
            dataset = self.data.client(int(client))
            yield dataset.client_id, dataset, keys[i]
