"""Clients that follow each other in time."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from fedsim.partitioners._draw import check_clients, cut, even_sizes


def temporal(timestamps: Any, *, clients: int, equal: Literal["examples", "time"] = "examples") -> list[np.ndarray]:
    """Each client is a contiguous block of time, the first the oldest.

    Args:
      timestamps: ``[n]``, numbers or ``datetime64``. Examples of one moment keep their order.
      clients: number of clients.
      equal: ``"examples"``: blocks of equally many examples; ``"time"``: blocks equally long, which may hold nothing.

    Returns:
      One sorted ``int64`` index array per client.

    Guarantees:
      - Every example goes to exactly one client.
      - No example of a client is later than any of the next client's.
      - By ``"examples"``, sizes differ by at most 1. By ``"time"``, examples of one moment have one client.

    Raises:
      ValueError: timestamps that are not one number or moment per example, NaN or NaT among them, ``clients`` not positive,
        more clients than examples, an ``equal`` that is neither.

    >>> [rows.tolist() for rows in temporal([30, 10, 20, 90], clients=2)]
    [[1, 2], [0, 3]]
    >>> [rows.tolist() for rows in temporal([30, 10, 20, 90], clients=2, equal="time")]
    [[0, 1, 2], [3]]
    """
    times = np.asarray(timestamps)
    if times.ndim != 1 or times.dtype.kind not in "iufM":
        raise ValueError(f"Expected one number or datetime64 per example, got {times.dtype} {list(times.shape)}.")
    if times.dtype.kind in "fM" and not np.all(np.isfinite(times)):
        raise ValueError(f"Example {int(np.flatnonzero(~np.isfinite(times))[0])} has no time (NaN, NaT or infinite): drop it.")
    if equal not in ("examples", "time"):
        raise ValueError(f"Expected equal to be 'examples' or 'time', got equal={equal!r}.")
    check_clients(clients, len(times), 1 if equal == "examples" else 0)
    order = np.argsort(times, kind="stable")
    if equal == "examples":
        return cut(order, even_sizes(len(times), clients))
    first = times.min() if len(times) else 0
    since = times.astype(np.float64) - float(first) if times.dtype.kind == "u" else (times - first).astype(np.float64)
    block = np.minimum((since / max(since.max(initial=0), 1e-300) * clients).astype(np.int64), clients - 1)
    return cut(order, np.bincount(block, minlength=clients))
