"""Which run is this: what a run folder is compared by."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedsim.algorithm import Algorithm
from fedsim.data import FederatedData
from fedsim.data._client_ids import ClientIds
from fedsim.execution import Execution
from fedsim.model import Model
from fedsim.samplers import Sampler
from fedsim.samplers._checked import checked_cohort

_SIMPLE = float | int | str | bool | None
# Cohorts, spread over all rounds, by which it is told who takes part: what a sampler keeps does not always say so.
_COHORTS = 8
# Larger arrays are told by a hash.
_FEW = 8


def describe(algorithm: Algorithm, sampler: Sampler, config: Any, *, rounds: int, **arguments: Any) -> dict[str, Any]:
    """What identifies a run: the config if there is one, else what can be told of the arguments.

    Functions cannot be told apart, models and optimizers among them: who changes these gives a config, or another folder.
    How the algorithm is executed does not count.

    Args:
      algorithm: all its fields count that can be told, if there is no config.
      sampler: so do its class, its settings, and some of its cohorts; its root key does with a mapping, too.
      config: a `RunConfig`, a mapping, or None.
      rounds: of the run.
      **arguments: others of `run`: they and ``rounds`` are added to all but a `RunConfig`, which has them.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    first = checked_cohort(sampler, 0)
    common = {"rounds": rounds, **arguments, "root_key": np.asarray(jax.random.key_data(first.key)).tolist()}
    if isinstance(config, Mapping):
        return {**config, **common}
    fields = {name: _entry(value) for name, value in _fields(algorithm).items()}
    described = {"algorithm": type(algorithm).__name__, **{name: value for name, value in fields.items() if value is not ...}}
    described |= {"clients": first.slots, "sampler": _sampler(sampler), "cohorts (hash)": _cohorts(sampler, rounds)}
    if first.attack is not None:
        described["attack"] = _told(first.attack)
    return described | common


def population(data: FederatedData) -> dict[str, Any]:
    """Whose run it is, with a config or without; the examples themselves may be too many to look at."""
    return {
        "clients": data.num_clients,
        "examples": data.num_examples,
        "features": sorted(data.columns),
        "client ids and sizes (hash)": _hash(_names(data), data.sizes.astype("<i8").tobytes()),
    }


def about(algorithm: Algorithm, data: FederatedData) -> dict[str, Any]:
    """Whose clients keep what they keep: it is of no use to another algorithm, or to other clients."""
    return {"algorithm": type(algorithm).__name__, "clients": data.num_clients, "client ids (hash)": _hash(_names(data))}


def title(described: Mapping[str, Any]) -> str:
    """A picture's title.

    >>> title({"dataset": "digits", "algorithm": "mine.py:Mine"})
    'digits, Mine'
    """
    named = [str(described[name]).rsplit(":", 1)[-1] for name in ("dataset", "model", "algorithm") if described.get(name)]
    return ", ".join(named) or "learning curve"


def _names(data: FederatedData) -> bytes:
    ids = data.client_ids
    if isinstance(ids, ClientIds):
        return b"\0".join(ids.names.tolist())
    return "\0".join(ids).encode("utf-8", "surrogatepass")


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0\0".join(parts)).hexdigest()[:16]


def _cohorts(sampler: Sampler, rounds: int) -> str:
    """A hash of who takes part, how far they get, and who of them attacks, in some rounds from the first to the last."""
    some = [checked_cohort(sampler, round) for round in sorted({(rounds - 1) * i // (_COHORTS - 1) for i in range(_COHORTS)})]
    arrays = [array for cohort in some for array in (cohort.clients, cohort.work, cohort.attackers)]
    return _hash(*(b"" if array is None else np.ascontiguousarray(array).tobytes() for array in arrays))


def _sampler(sampler: Sampler) -> str:
    """Its class, with those arguments that it keeps under their names."""
    names = inspect.signature(type(sampler).__init__).parameters
    kept = {name: getattr(sampler, name) for name in names if name not in ("self", "data", "key") and hasattr(sampler, name)}
    within = {name: _sampler(value) if hasattr(value, "cohort") else _told(value) for name, value in kept.items()}
    return _call(type(sampler), within)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if hasattr(record, field.name)}


def _entry(value: Any) -> Any:
    """A field as JSON has it, if it is simple, else in words; ``...`` if it cannot be told."""
    if isinstance(value, _SIMPLE):
        return value
    told = _told(value)
    return ... if told is None else told


def _told(value: Any) -> str | None:
    """A value in words that are the same in every process; None for what has none: functions, and what is made of them."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, jax.Array | np.ndarray):
        return _array(value)
    if type(value) is dict:
        value = tuple(value.items())
    if type(value) in (list, tuple):
        parts = [_told(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if not dataclasses.is_dataclass(value) or isinstance(value, type | Execution | Model | FederatedData):
        return None
    return _call(type(value), {name: _told(part) for name, part in _fields(value).items()})


def _array(value: Any) -> str | None:
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        return None
    values = array.tolist() if array.size <= _FEW else f"{list(array.shape)} (hash {_hash(array.tobytes())})"
    return f"{array.dtype} {values}"


def _call(cls: type, told: Mapping[str, str | None]) -> str:
    return f"{cls.__name__}({', '.join(f'{name}={text}' for name, text in told.items() if text is not None)})"
