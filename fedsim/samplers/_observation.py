"""`Observation`: what a sampler sees of a round's clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedsim.data import Cohort


class Observation(NamedTuple):
    """The values of the clients of one round, which steer the cohorts of later rounds, see `SteeredSampler`.

    Attributes:
      clients: ``int32 [n]``, positions in the population.
      values: by name, ``float64 [n]``, what the round's info has for each client. NaN for a client that took no step, whose
        update was dropped, or whose value is not finite.

    >>> Observation(np.array([4, 2]), {"loss": np.array([0.5, np.nan])}).to_json()
    {'clients': [4, 2], 'loss': [0.5, None]}
    """

    clients: np.ndarray
    values: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, cohort: Cohort, info: Any, names: Sequence[str]) -> Observation:
        """Returns the observation of a round.

        Args:
          cohort: the cohort of the round.
          info: its `fedsim.rounds.RoundInfo`.
          names: the entries of ``info.clients`` to observe, scalars of each client.

        Raises:
          ValueError: the info has no such entry, or one that is not a number per client.

        >>> import fedsim, types
        >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[1, 1, 1])
        >>> cohort = Cohort(data, np.array([2, 0]), round=0, key=fedsim.rng.root(0), slots=3)
        >>> entries = {"loss": [0.5, 9, 0], "num_steps": [1, 1, 0], "dropped": [False, True, False]}
        >>> Observation.of(cohort, types.SimpleNamespace(clients=entries), ["loss"]).to_json()
        {'clients': [2, 0], 'loss': [0.5, None]}
        """
        entries, n = getattr(info, "clients", {}), len(cohort)
        for name in names:
            if name not in entries or np.ndim(entries[name]) != 1:
                remedy = "give the algorithm update_norms=True" if name == "update_norm" else "use an algorithm that reports it"
                raise ValueError(
                    f"Expected {name!r}, which steers the sampler, as a number per client in the round's info, got "
                    f"{', '.join(sorted(entries)) or 'none'}: {remedy}, or another sampler."
                )
        counts = (np.asarray(entries["num_steps"])[:n] > 0) & ~np.asarray(entries["dropped"], bool)[:n] if names else True
        columns = {name: np.asarray(entries[name])[:n].astype(np.float64) for name in names}
        return cls(
            cohort.clients, {name: np.where(counts & np.isfinite(x), x, np.nan) for name, x in columns.items()}
        )  # fmt: skip

    def to_json(self) -> dict[str, list[Any]]:
        """Returns the observation as a line of ``metrics.jsonl`` has it, from which `from_json` gets the same bits."""
        values = {name: [None if np.isnan(x) else float(x) for x in values] for name, values in self.values.items()}
        return {"clients": self.clients.tolist(), **values}

    @classmethod
    def from_json(cls, columns: Mapping[str, Sequence[Any]]) -> Observation:
        """Returns the observation that `to_json` has written.

        >>> Observation.from_json({"clients": [4, 2], "loss": [0.5, None]}).values["loss"].tolist()
        [0.5, nan]
        """
        values = {name: np.array(column, np.float64) for name, column in columns.items() if name != "clients"}
        return cls(np.array(columns["clients"], np.int32), values)
