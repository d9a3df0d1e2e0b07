"""The `Sampler` protocol."""

from __future__ import annotations

from typing import Protocol

from fedsim.data import Cohort, FederatedData


class Sampler(Protocol):
    """Protocol of a sampler: it returns the cohort of any round, in any order of rounds.

    A sampler that sees values of its clients also has ``observes`` and ``observe``, see `SteeredSampler`.
    """

    data: FederatedData

    def cohort(self, round: int) -> Cohort:
        """Returns the cohort of a round; it must depend on the round and the observations only."""
        ...
