"""Which run is this: what a run folder is compared by."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedsim.algorithm import Algorithm
from fedsim.data import Cohort, FederatedData


def describe(algorithm: Algorithm, first: Cohort, config: Any, **arguments: Any) -> dict[str, Any]:
    """What identifies a run: the config if there is one, else what can be told of the arguments.

    Functions cannot be told apart, models and optimizers among them: who changes these gives a config, or another folder.

    Args:
      algorithm: its simple fields and its batches count, if there is no config.
      first: a cohort, for its slots, population and root key.
      config: a `RunConfig`, a mapping, or None.
      **arguments: of `run`: added to all but a `RunConfig`, which has them.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    words = np.asarray(jax.random.key_data(first.key)).tolist()
    if isinstance(config, Mapping):
        return {**config, **arguments, "root_key": words}
    fields = {
        field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm) if field.name != "execution"
    }
    simple = {name: value for name, value in fields.items() if isinstance(value, float | int | str | bool | None)}
    local_work = dataclasses.asdict(algorithm.batches)
    data = {"clients": first.data.num_clients, "examples": first.data.num_examples, "features": sorted(first.data.columns)}
    described = {"algorithm": type(algorithm).__name__, **simple, "batches": local_work, "clients": first.slots, "data": data}
    if first.attack is not None:
        described["attack"] = repr(first.attack)
    return described | arguments | {"root_key": words}


def about(algorithm: Algorithm, data: FederatedData) -> dict[str, Any]:
    """Whose clients keep what they keep: it is of no use to another algorithm, or to other clients."""
    names = hashlib.sha256("\0".join(data.client_ids).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return {"algorithm": type(algorithm).__name__, "clients": data.num_clients, "client ids (hash)": names}


def title(described: Mapping[str, Any]) -> str:
    """A picture's title.

    >>> title({"dataset": "digits", "algorithm": "mine.py:Mine"})
    'digits, Mine'
    """
    named = [str(described[name]).rsplit(":", 1)[-1] for name in ("dataset", "model", "algorithm") if described.get(name)]
    return ", ".join(named) or "learning curve"
