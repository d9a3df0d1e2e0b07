"""Runs that several processes share, on one or on several hosts: how they start, and what they agree on.

All processes run the same program, and each has devices of its own. Executions such as `fedsim.Auto` divide a cohort over the
devices of all processes. JAX is what connects them, see `jax.distributed`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedsim import checks

T = TypeVar("T")

_heartbeat_seconds = 30
_MESSAGE_BYTES = 256  # of the first part of a message, which has its length


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = _heartbeat_seconds,
) -> None:
    """Connects this process with the others of a run. Call it before JAX is first used, in every process.

    Under SLURM, Open MPI, on GKE and on TPU pods, JAX detects all arguments. Elsewhere, all three are given. It is
    `jax.distributed.initialize` with shorter timeouts: if a process is killed, all others end after about
    ``heartbeat_seconds``, with a message that has its number.

    Args:
      coordinator_address: host and port of process 0, such as ``"node-1:1234"``.
      num_processes: the number of processes.
      process_id: the number of this process, from 0.
      heartbeat_seconds: after this time without a sign of a process, the others end.

    Raises:
      ValueError: an argument is wrong, or cannot be detected.
      RuntimeError: JAX was used before, or the other processes cannot be reached.

    >>> initialize("node-1:1234", num_processes=2, process_id=2)
    Traceback (most recent call last):
    ...
    ValueError: Expected process_id < num_processes, got process_id=2, num_processes=2: processes are counted from 0.
    """
    checks.whole(1, or_none=True, num_processes=num_processes, remedy="None detects it")
    checks.whole(0, or_none=True, process_id=process_id, remedy="None detects it")
    checks.whole(1, heartbeat_seconds=heartbeat_seconds)
    if num_processes is not None and process_id is not None and process_id >= num_processes:
        raise ValueError(
            f"Expected process_id < num_processes, got process_id={process_id}, num_processes={num_processes}: processes are "
            "counted from 0."
        )
    global _heartbeat_seconds
    _heartbeat_seconds = heartbeat_seconds
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=heartbeat_seconds,
        )
    except (ValueError, TypeError) as error:
        if None not in (coordinator_address, num_processes, process_id):
            raise
        raise ValueError(
            f"The processes of this run cannot be detected ({error}): give coordinator_address, num_processes and process_id, "
            "or start them with SLURM, Open MPI or on a TPU pod."
        ) from error


@contextlib.contextmanager
def losses_named(how_to_resume: Callable[[], str]) -> Iterator[None]:
    """A context in which the error of a message between processes waits until JAX has named the process that was lost.

    JAX then ends this process, with ``tasks are unhealthy`` and the numbers of the lost processes.

    Args:
      how_to_resume: returns a sentence that is printed first.

    >>> with losses_named(lambda: ""):
    ...     pass
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() > 1:
            first_line = str(error).partition("\n")[0]
            print(f"\nA message between processes failed ({first_line}). {how_to_resume()}", file=sys.stderr, flush=True)
            time.sleep(2 * _heartbeat_seconds)
        raise


def is_first() -> bool:
    """Returns whether this is process 0, which writes files and shows progress.

    >>> is_first()
    True
    """
    return jax.process_index() == 0


def from_first(value: T) -> T:
    """Returns in every process what process 0 gives, a value that JSON can hold. All processes have to call it.

    >>> from_first({"length": 3})
    {'length': 3}
    """
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if is_first() else b""
    first = multihost_utils.broadcast_one_to_all(_padded(text, _MESSAGE_BYTES))
    if (length := _length(first)) > _MESSAGE_BYTES - 4:
        first = multihost_utils.broadcast_one_to_all(_padded(text, length + 4))
    return json.loads(_text(first))


def of_all(value: T) -> list[T]:
    """Returns the values of all processes, which JSON can hold, in the order of the processes. All have to call it.

    >>> of_all(7)
    [7]
    """
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    messages = multihost_utils.process_allgather(_padded(text, _MESSAGE_BYTES))
    if (longest := max(map(_length, messages))) > _MESSAGE_BYTES - 4:
        messages = multihost_utils.process_allgather(_padded(text, longest + 4))
    return [json.loads(_text(message)) for message in messages]


def in_first(work: Callable[[], T]) -> T | None:
    """Calls ``work`` in process 0, and returns None in the others. All processes have to call it.

    Raises:
      ValueError: ``work`` raised an error, in process 0 itself that error.

    >>> in_first(lambda: 3)
    3
    """
    result, error = None, None
    if is_first():
        try:
            result = work()
        except Exception as raised:
            error = raised
    text = from_first(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if text is not None:
        raise ValueError(f"Process 0 ended with an error. {text}")
    return result


def _padded(text: bytes, size: int) -> np.ndarray:
    """Returns the length of a text and its beginning, ``uint8 [size]``."""
    message = len(text).to_bytes(4, "big") + text
    return np.frombuffer(message[:size].ljust(size, b"\0"), np.uint8)


def _length(message: np.ndarray) -> int:
    return int.from_bytes(message[:4].tobytes(), "big")


def _text(message: np.ndarray) -> bytes:
    return message[4 : 4 + _length(message)].tobytes()


def check_alike(values: Mapping[str, Any], what: str) -> None:
    """Raises ``ValueError`` in every process if these values are not the same in all of them. All have to call it.

    Args:
      values: by name; JSON can hold them.
      what: which is named in the error, such as ``"configuration"``.

    >>> check_alike({"seed": 3}, "configuration")
    """
    first, *others = of_all(dict(values))
    differences = [
        f"  {name}: {json.dumps(first.get(name))} in process 0, {json.dumps(other.get(name))} in process {number}"
        for number, other in enumerate(others, 1)
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    ]
    if differences:
        raise ValueError(
            f"The processes of this run have different {what}s:\n" + "\n".join(differences) + "\nStart all with the same."
        )


def on_host(values: Any) -> Any:
    """Returns all arrays of a pytree on the host, as `jax.device_get` does, also if processes have parts of them.

    If there are such arrays, all processes have to call it.

    >>> on_host({"w": jax.numpy.ones(2)})
    {'w': array([1., 1.], dtype=float32)}
    """
    return jax.device_get(joined(values))


def joined(values: Any) -> Any:
    """Returns a pytree in which arrays are on the host of which other processes have parts; all processes have to call it.

    >>> joined({"w": jax.numpy.ones(2)})["w"].tolist()
    [1.0, 1.0]
    """

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(whole, values)
