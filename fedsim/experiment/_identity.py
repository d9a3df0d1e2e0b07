"""The identity of a run: the values by which a run folder is compared with a new run."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedsim.algorithm import Algorithm
from fedsim.data import FederatedData, client_ids_hash
from fedsim.descriptions import SIMPLE, call_text, fields_of, hash_of, text_of
from fedsim.execution import Execution
from fedsim.experiment._environment import jax_settings, versions
from fedsim.model import Model
from fedsim.samplers import Sampler, checked_cohort, is_steered
from fedsim.systems import Schedule

# The attributes of a sampler do not always say which clients it samples, so this many cohorts, spread over the rounds, do.
_COHORTS = 8
# The arguments of a simulation that are part of the identity. The sampler and the key are so anyway.
_CLOCK = ("synchronization", "devices", "faults", "policy", "bytes_down", "bytes_up")
# They consist of functions, or do not belong to the identity.
_OPAQUE = (Execution, Model, FederatedData)


def process_identity(
    described: Mapping[str, Any], populations: Mapping[str, Mapping[str, Any]], code: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what has to be the same in all processes that share a run, by name.

    Args:
      described: what `describe` returns.
      populations: what identifies the data, by ``"population"`` and ``"test population"``.
      code: the hashes of the user's own code.

    >>> process_identity({"seed": 3}, {"population": {"clients": 20}}, {})["population, clients"]
    20
    """
    data = {f"{of}, {name}": value for of, values in populations.items() for name, value in values.items()}
    return json.loads(json.dumps({**described, **data, **versions(), **jax_settings(), **code}, default=str))


def describe(algorithm: Algorithm, sampler: Sampler, config: Any, *, rounds: int, **arguments: Any) -> dict[str, Any]:
    """Returns what identifies a run: the config if there is one, otherwise a description of the arguments.

    Functions cannot be compared, and neither can models and optimizers, which consist of functions: to distinguish runs that
    differ only in these, a config or another folder is necessary. The execution is not part of the identity.

    Args:
      algorithm: without a config, its fields that have a description.
      sampler: without a config, its class, its settings and a hash of some cohorts. With a mapping, its root key.
      config: a `RunConfig`, a mapping, or None.
      rounds: the number of rounds of the run.
      **arguments: other arguments of `run`. They and ``rounds`` are added, except to a `RunConfig`, which contains them.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    first = checked_cohort(sampler, 0)
    common = {"rounds": rounds, **arguments, "root_key": np.asarray(jax.random.key_data(first.key)).tolist()}
    if isinstance(config, Mapping):
        return {**config, **common}
    fields = {name: _json_value(value) for name, value in fields_of(algorithm).items()}
    described = {"algorithm": type(algorithm).__name__, **{name: value for name, value in fields.items() if value is not ...}}
    described |= {"clients": first.slots, "sampler": _sampler_text(sampler), "cohorts (hash)": _cohort_hash(sampler, rounds)}
    if first.attack is not None:
        described["attack"] = _text(first.attack)
    return described | common


def rows_identity(algorithm: Algorithm, data: FederatedData) -> dict[str, Any]:
    """Returns what identifies the rows of clients: another algorithm, or other clients, cannot use them.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": [1.0, 2.0, 3.0]}, sizes=[2, 1])
    >>> rows_identity(fedsim.algorithms.Histogram(bins=2), data)["clients"]
    2
    """
    return {"algorithm": type(algorithm).__name__, "clients": data.num_clients, "client ids (hash)": client_ids_hash(data)}


def title(described: Mapping[str, Any]) -> str:
    """Returns the title of the picture.

    >>> title({"dataset": "digits", "algorithm": "mine.py:Mine"})
    'digits, Mine'
    """
    named = [str(described[name]).rsplit(":", 1)[-1] for name in ("dataset", "model", "algorithm") if described.get(name)]
    return ", ".join(named) or "learning curve"


def _cohort_hash(sampler: Sampler, rounds: int) -> str:
    """Returns a hash of the clients, their work, the attackers and the arrived examples of some rounds."""
    last = 0 if is_steered(sampler) else rounds - 1  # Its later cohorts are known during the run.
    some = [checked_cohort(sampler, round) for round in sorted({last * i // (_COHORTS - 1) for i in range(_COHORTS)})]
    arrays = [array for cohort in some for array in (cohort.clients, cohort.work, cohort.attackers)]
    arrays += [cohort.rows for cohort in some if cohort.rows is not None]
    return hash_of(*(b"" if array is None else np.ascontiguousarray(array).tobytes() for array in arrays))


def _sampler_text(sampler: Sampler) -> str:
    """Returns the class of a sampler with those arguments that it has as attributes of the same name."""
    names = inspect.signature(type(sampler).__init__).parameters
    values = {name: getattr(sampler, name) for name in names if name not in ("self", "data", "key") and hasattr(sampler, name)}
    texts = {name: _sampler_text(value) if hasattr(value, "cohort") else _text(value) for name, value in values.items()}
    if isinstance(schedule := getattr(sampler, "schedule", None), Schedule):
        # What it was made with says more than its events; those of the aggregated updates are in the cohorts.
        texts["schedule"] = call_text(
            Schedule, {name: schedule.arguments[name] for name in _CLOCK if name in schedule.arguments}
        )
    return call_text(type(sampler), texts)


def _json_value(value: Any) -> Any:
    """Returns a simple value as it is, and the text of another one; ``...`` if it has none."""
    if isinstance(value, SIMPLE):
        return value
    text = _text(value)
    return ... if text is None else text


def _text(value: Any) -> str | None:
    return text_of(value, opaque=_OPAQUE)
