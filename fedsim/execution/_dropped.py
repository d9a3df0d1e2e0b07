"""Reports of updates that were not finite, without making the host wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax
import numpy as np

from fedsim.data import Cohort
from fedsim.execution._state import FederatedAlgorithm, RoundInfo
from fedsim.execution._structure import kept_with


def report_dropped(algorithm: FederatedAlgorithm, info: RoundInfo, cohorts: Sequence[Cohort]) -> None:
    """Warns of the first update that was dropped, once per algorithm, or raises. It waits until ``info`` is computed.

    Args:
      algorithm: the algorithm. Its ``nonfinite`` is ``"drop"`` for a warning or ``"raise"`` for an error.
      info: of one round, or of several, stacked.
      cohorts: one per round.

    Raises:
      FloatingPointError: an update was dropped, and ``algorithm.nonfinite`` is ``"raise"``.

    >>> import types
    >>> from fedsim.data import FederatedData
    >>> cohort = Cohort.of(FederatedData.from_arrays({"x": np.zeros(1)}, sizes=[1], client_ids=["ann"]), ["ann"], round=7)
    >>> info = RoundInfo({"dropped": np.array([True])}, *np.ones(5, np.int32))
    >>> report_dropped(types.SimpleNamespace(nonfinite="raise"), info, [cohort])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    FloatingPointError: The update of client 'ann' in round 7 holds a NaN or an infinity. ...
    """
    # A sum in JAX would wait for the rounds that are under way on the devices.
    if not (count := int(np.asarray(info.num_dropped).sum())):
        return
    dropped = np.asarray(info.clients["dropped"]).reshape(len(cohorts), -1)
    row, position = map(int, np.argwhere(dropped)[0])
    client, round = cohorts[row].client_ids[position], cohorts[row].round
    if algorithm.nonfinite == "raise":
        raise FloatingPointError(
            f"The update of client {client!r} in round {round} holds a NaN or an infinity. "
            "Lower the client learning rate, or set nonfinite='drop' to leave such updates out."
        )
    if not kept_with(algorithm).get("reported dropped"):
        kept_with(algorithm)["reported dropped"] = True
        warnings.warn(
            f"{count} client update(s) held a NaN or an infinity and were left out, the first that of client {client!r} in "
            f"round {round}. Every round's info counts them in num_dropped; this is said once. A lower client learning rate "
            "may help.",
            stacklevel=4,
        )


def watch_dropped(algorithm: FederatedAlgorithm, info: RoundInfo, cohorts: Sequence[Cohort]) -> None:
    """Reports for all rounds so far whose infos have been computed, see `report_dropped`. The others wait for the next call.

    >>> import jax.numpy as jnp, types
    >>> watch_dropped(types.SimpleNamespace(nonfinite="drop"), RoundInfo({}, *jnp.zeros(5, jnp.int32)), [])
    """
    if not isinstance(info, RoundInfo) or isinstance(info.num_dropped, jax.core.Tracer):
        return None
    if algorithm.nonfinite == "raise":
        return report_dropped(algorithm, info, cohorts)
    kept = kept_with(algorithm)
    if kept.get("reported dropped"):
        return None
    unread = kept.setdefault("unread", [])
    unread.append((info, cohorts))
    while unread and unread[0][0].num_dropped.is_ready():
        earlier, of = unread.pop(0)
        report_dropped(algorithm, earlier, of)
    return None
