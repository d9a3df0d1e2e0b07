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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # NumPy raises the error of a message as a ValueError.
        if jax.process_count() > 1 and (isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)):
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
    return of_all(value if is_first() else None)[0]  # type: ignore[return-value]


def of_all(value: T) -> list[T]:
    """Returns the values of all processes, which JSON can hold, in the order of the processes. All have to call it.

    >>> of_all(7)
    [7]
    """
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    messages = arrays_of_all(_padded(text, _MESSAGE_BYTES))
    if (longest := max(map(_length, messages))) > _MESSAGE_BYTES - 4:
        messages = arrays_of_all(_padded(text, longest + 4))
    return [json.loads(_text(message)) for message in messages]


def arrays_of_all(array: np.ndarray) -> np.ndarray:
    """Returns the arrays of all processes, ``[processes, ...]``, bit for bit; their shapes and dtypes are equal.

    All processes have to call it.

    >>> arrays_of_all(np.array([1, 2])).tolist()
    [[1, 2]]
    """
    if jax.process_count() == 1:
        return array[None]
    content = np.frombuffer(array.tobytes(), np.uint8)  # JAX would narrow int64, for example.
    # A single device of each process: otherwise each of its devices would get a copy.
    mesh = Mesh(np.array([jax.local_devices(process)[0] for process in range(jax.process_count())]), ("processes",))
    own = jax.device_put(content[None], jax.local_devices()[0])
    shape, divided = (jax.process_count(), content.size), NamedSharding(mesh, P("processes"))
    whole = jax.make_array_from_single_device_arrays(shape, divided, [own])
    everywhere = jax.jit(_unchanged, out_shardings=NamedSharding(mesh, P()))(whole)
    return np.asarray(everywhere.addressable_data(0)).view(array.dtype).reshape(-1, *array.shape)


def _unchanged(array: jax.Array) -> jax.Array:
    return array


def owners(positions: np.ndarray, processes: int | None = None) -> np.ndarray:
    """Returns for clients at these positions of a population which process keeps their memories, ``int [n]``.

    Args:
      positions: ``int [n]``.
      processes: how many share the run; None: as many as now.

    >>> owners(np.array([0, 5]), processes=3).tolist()
    [0, 2]
    """
    return positions % (jax.process_count() if processes is None else processes)


def entries_of_owners(entries: np.ndarray) -> np.ndarray:
    """Returns an array ``[clients, ...]`` whose entry of each client is that of its owner. All processes have to call it.

    >>> entries_of_owners(np.array([7, 8])).tolist()
    [7, 8]
    """
    own = entries[jax.process_index() :: jax.process_count()]
    padding = -(-len(entries) // jax.process_count()) - len(own)
    of_all = arrays_of_all(np.pad(own, [(0, padding), *[(0, 0)] * (entries.ndim - 1)]))
    return np.swapaxes(of_all, 0, 1).reshape(-1, *entries.shape[1:])[: len(entries)]


def in_all(work: Callable[[], T]) -> T:
    """Calls ``work`` in all processes, and returns its result when all have finished. All have to call it.

    Raises:
      ValueError: ``work`` raised an error in another process; in the processes where it did, that error.

    >>> in_all(lambda: 3)
    3
    """
    result, error = attempted_in_all(work, Exception)
    if isinstance(error, str):
        raise ValueError(error)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def attempted_in_all(work: Callable[[], T], *errors: type[Exception]) -> tuple[T | None, Exception | str | None]:
    """Calls ``work`` in all processes; returns its result and None, or None and an error if ``work`` raised one in any process.

    All have to call it. The error is a text if it was raised in another process.

    >>> attempted_in_all(lambda: 3, OSError)
    (3, None)
    >>> attempted_in_all(lambda: 1 // 0, ArithmeticError)
    (None, ZeroDivisionError('integer division or modulo by zero'))
    """
    result, error = None, None
    try:
        result = work()
    except errors as raised:
        error = raised
    texts = of_all(None if error is None else f"{type(error).__name__}: {error}")
    elsewhere = next((f"Process {number} ended with an error. {text}" for number, text in enumerate(texts) if text), None)
    return (None, error or elsewhere) if elsewhere else (result, None)


def in_first(work: Callable[[], T]) -> T | None:
    """Calls ``work`` in process 0, and returns None in the others. All processes have to call it.

    Raises:
      ValueError: ``work`` raised an error, in process 0 itself that error.

    >>> in_first(lambda: 3)
    3
    """
    return in_all(lambda: work() if is_first() else None)


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

    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True) if is_divided(x) else x, values)


def is_divided(value: Any) -> bool:
    """Returns whether a value is an array of which other processes have parts.

    >>> is_divided(jax.numpy.ones(2))
    False
    """
    return isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated)
