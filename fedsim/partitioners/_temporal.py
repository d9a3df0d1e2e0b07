"""Partition by time."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fedsim import checks
from fedsim.partitioners._draw import check_clients, cut, even_sizes


def temporal(timestamps: Any, *, clients: int, equal: Literal["examples", "time"] = "examples") -> list[np.ndarray]:
    """Divides the examples into contiguous blocks of time, one per client; the first client has the oldest examples.

    Args:
      timestamps: ``[n]``, numbers or ``datetime64``. Examples with equal timestamps keep their order.
      clients: number of clients.
      equal: ``"examples"`` gives blocks with equal numbers of examples; ``"time"`` gives blocks of equal duration, which may be
        empty.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example is assigned to exactly one client.
      - No example of a client is later than any example of the next client.
      - With ``"examples"``, sizes differ by at most 1. With ``"time"``, examples with equal timestamps have the same client.

    Raises:
      ValueError: the timestamps are not one number or ``datetime64`` per example, or contain NaN or NaT; ``clients`` is not
        positive; there are more clients than examples (with ``"examples"``); or ``equal`` is neither of the two.

    >>> [rows.tolist() for rows in temporal([30, 10, 20, 90], clients=2)]
    [[1, 2], [0, 3]]
    >>> [rows.tolist() for rows in temporal([30, 10, 20, 90], clients=2, equal="time")]
    [[0, 1, 2], [3]]
    """
    checks.unmasked(timestamps=timestamps)
    times = np.asarray(timestamps)
    if times.ndim != 1 or times.dtype.kind not in "iufM":
        raise ValueError(f"Expected one number or datetime64 per example, got {times.dtype} {list(times.shape)}.")
    if times.dtype.kind in "fM" and not np.all(np.isfinite(times)):
        raise ValueError(
            f"Example {int(np.flatnonzero(~np.isfinite(times))[0])} has no timestamp (NaN, NaT or infinite): drop it."
        )
    if equal not in ("examples", "time"):
        raise ValueError(f"Expected equal to be 'examples' or 'time', got equal={equal!r}.")
    check_clients(clients, len(times), 1 if equal == "examples" else 0)
    order = np.argsort(times, kind="stable")
    if equal == "examples":
        return cut(order, even_sizes(len(times), clients))
    if times.dtype.kind in "iuM":
        times = times.astype(np.int64).astype(np.uint64)  # Modulo 2**64, no difference from the first overflows.
    elif times.dtype.kind == "f":
        times = times.astype(np.float64)
    since = (times - times[order[:1]]).astype(np.float64)
    block = np.minimum((since / max(since.max(initial=0), 1e-300) * clients).astype(np.int64), clients - 1)
    return cut(order, np.bincount(block, minlength=clients))
