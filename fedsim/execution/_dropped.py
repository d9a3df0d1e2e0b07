"""Client updates that were not finite: said once, and without making the host wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedsim.data import Cohort
from fedsim.execution._contract import RoundInfo


def report_dropped(program: Any, info: RoundInfo, cohorts: Sequence[Cohort], nonfinite: Literal["drop", "raise"]) -> None:
    """Warns of the first update that was dropped, once a program, or raises; waits until ``info`` is computed.

    Args:
      program: whose rounds these are.
      info: of one round, or of several, stacked.
      cohorts: one per round.
      nonfinite: ``"drop"`` warns, ``"raise"`` raises.

    Raises:
      FloatingPointError: an update was dropped, and ``nonfinite`` is ``"raise"``.

    >>> from fedsim.data import FederatedData
    >>> cohort = Cohort.of(FederatedData.from_arrays({"x": np.zeros(1)}, sizes=[1], client_ids=["ann"]), ["ann"], round=7)
    >>> one = np.int32(1)
    >>> info = RoundInfo({"dropped": np.array([True])}, num_dropped=one, num_aggregated=one, num_clients=one)
    >>> report_dropped(None, info, [cohort], "raise")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    FloatingPointError: The update of client 'ann' in round 7 holds a NaN or an infinity. ...
    """
    # asarray: a sum of JAX would wait behind the rounds that the devices are at.
    if not (count := int(np.asarray(info.num_dropped).sum())):
        return
    dropped = np.asarray(info.clients["dropped"]).reshape(len(cohorts), -1)
    row, position = map(int, np.argwhere(dropped)[0])
    client, round = cohorts[row].client_ids[position], cohorts[row].round
    if nonfinite == "raise":
        raise FloatingPointError(
            f"The update of client {client!r} in round {round} holds a NaN or an infinity. "
            "Lower the client learning rate, or set nonfinite='drop' to leave such updates out."
        )
    if not vars(program).get("_said_dropped"):
        vars(program)["_said_dropped"] = True
        warnings.warn(
            f"{count} client update(s) held a NaN or an infinity and were left out, the first that of client {client!r} in "
            f"round {round}. Every round's info counts them in num_dropped; this is said once. A lower client learning rate "
            "may help.",
            stacklevel=4,
        )


def watch_dropped(program: Any, info: RoundInfo, cohorts: Sequence[Cohort], nonfinite: Literal["drop", "raise"]) -> None:
    """`report_dropped` of all rounds so far whose infos have been computed; the others wait for the next call.

    >>> import jax.numpy as jnp, types
    >>> none = jnp.int32(0)
    >>> info = RoundInfo({}, num_dropped=none, num_aggregated=none, num_clients=none)
    >>> watch_dropped(types.SimpleNamespace(), info, [], "drop")
    """
    if nonfinite == "raise":
        return report_dropped(program, info, cohorts, nonfinite)
    if vars(program).get("_said_dropped"):
        return None
    unread = vars(program).setdefault("_unread", [])
    unread.append((info, cohorts))
    while unread and unread[0][0].num_dropped.is_ready():
        earlier, of = unread.pop(0)
        report_dropped(program, earlier, of, nonfinite)
    return None
