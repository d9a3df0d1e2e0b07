"""Warnings about rounds that went wrong, without making the host wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax
import numpy as np

from fedsim.data import Cohort
from fedsim.rounds import FederatedAlgorithm, RoundInfo, kept_with


def report_problems(algorithm: FederatedAlgorithm, info: RoundInfo, cohorts: Sequence[Cohort]) -> None:
    """Reports updates that were not finite, rounds without updates, and rounds with too few to reveal their sum.

    Each of the three is a warning about its first occurrence, once per algorithm. It waits until ``info`` is computed.

    Args:
      algorithm: the algorithm. If its ``nonfinite`` is ``"raise"``, an update that was not finite is an error.
      info: of one round, or of several, stacked.
      cohorts: one per round.

    Raises:
      FloatingPointError: an update was not finite, and ``algorithm.nonfinite`` is ``"raise"``.

    >>> import types
    >>> from fedsim.data import FederatedData
    >>> cohort = Cohort.of(FederatedData.from_arrays({"x": np.zeros(1)}, sizes=[1], client_ids=["ann"]), ["ann"], round=7)
    >>> info = RoundInfo({"dropped": np.array([True])}, *np.ones(5, np.int32))
    >>> report_problems(types.SimpleNamespace(nonfinite="raise"), info, [cohort])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    FloatingPointError: The update of client 'ann' in round 7 holds a NaN or an infinity. ...
    """
    # The counts are added up on the host: a sum in JAX would wait for the rounds that the devices still run.
    if count := int(np.asarray(info.num_dropped).sum()):
        _report_problems(algorithm, info, cohorts, count)
    counts = np.atleast_1d(np.asarray(info.num_aggregated))
    if not counts.size:
        return
    aggregator = algorithm.aggregator.innermost
    idle = (counts == 0) & aggregator.skips_empty_rounds
    hidden = (counts < aggregator.fewest_clients) & ~idle & aggregator.is_secure
    if idle.any():
        _report_idle(algorithm, info, cohorts, int(np.argmax(idle)))
    if hidden.any():
        row = int(np.argmax(hidden))
        _report_hidden(algorithm, cohorts[row].round, int(counts[row]))


def watch_problems(algorithm: FederatedAlgorithm, info: RoundInfo, cohorts: Sequence[Cohort]) -> None:
    """Reports for all rounds so far whose infos are computed, see `report_problems`. The others wait for the next call.

    >>> import jax.numpy as jnp, types
    >>> watch_problems(types.SimpleNamespace(nonfinite="drop"), RoundInfo({}, *jnp.zeros([5, 0], jnp.int32)), [])
    """
    if not isinstance(info, RoundInfo) or isinstance(info.num_dropped, jax.core.Tracer):
        return None
    if algorithm.nonfinite == "raise":
        return report_problems(algorithm, info, cohorts)
    unread = kept_with(algorithm).setdefault("unread", [])
    unread.append((info, cohorts))
    while unread and unread[0][0].num_dropped.is_ready():
        report_problems(algorithm, *unread.pop(0))
    return None


def _report_problems(algorithm: FederatedAlgorithm, info: RoundInfo, cohorts: Sequence[Cohort], count: int) -> None:
    dropped = np.asarray(info.clients["dropped"]).reshape(len(cohorts), -1)
    row, position = map(int, np.argwhere(dropped)[0])
    client, round = cohorts[row].client_ids[position], cohorts[row].round
    if algorithm.nonfinite == "raise":
        raise FloatingPointError(
            f"The update of client {client!r} in round {round} holds a NaN or an infinity. "
            "Lower the client learning rate, or set nonfinite='drop' to leave such updates out."
        )
    _warn_once(
        algorithm,
        "reported dropped",
        f"{count} client update(s) held a NaN or an infinity and did not reach the server, the first from client {client!r} in "
        f"round {round}. The info of every round counts them in num_dropped. Try a lower client learning rate, or in float16 "
        "another loss_scale. This warning is shown once.",
    )


def _report_idle(algorithm: FederatedAlgorithm, info: RoundInfo, cohorts: Sequence[Cohort], row: int) -> None:
    cohort = cohorts[row]

    def count(name: str) -> int:
        values = np.asarray(info.clients[name]).reshape(len(cohorts), -1)[row, : len(cohort)]
        return int(np.count_nonzero(values))

    idle, dropped = len(cohort) - count("num_steps"), count("dropped")
    if not len(cohort):
        reason = "its cohort has no clients. Sample more clients per round"
    elif idle == len(cohort) and cohort.num_steps(algorithm.batches).any():  # They run at nodes, see fedsim.deployment.
        reason = f"no node sent a sum of its {len(cohort)} clients that counts. Another warning says why"
    elif idle == len(cohort):
        reason = (
            f"none of its {len(cohort)} clients took a step. Sample clients with more examples, or reduce the batch size or "
            "set drop_remainder=False so that fewer examples suffice for a step"
        )
    else:
        reason = (
            f"of its {len(cohort)} clients {idle} took no step, {dropped} sent an update with a NaN or an infinity, and "
            f"{len(cohort) - idle - dropped} had weight 0. Lower the client learning rate, or check the clients' weights"
        )
    _warn_once(
        algorithm,
        "reported idle",
        f"Round {cohort.round} aggregated no update and left the server's state unchanged: {reason}. This warning is shown "
        "once.",
    )


def _report_hidden(algorithm: FederatedAlgorithm, round: int, count: int) -> None:
    aggregator = algorithm.aggregator.innermost
    outcome = "the server's state is unchanged" if aggregator.skips_empty_rounds else "the aggregate was 0"
    _warn_once(
        algorithm,
        "reported hidden",
        f"In round {round}, {count} client(s) sent an update, fewer than minimum={aggregator.fewest_clients} of "
        f"{type(aggregator).__name__}, so their sum was not revealed and {outcome}. Unless such rounds are rare, "
        "sample more clients with examples, or give a smaller minimum. This warning is shown once.",
    )


def _warn_once(algorithm: FederatedAlgorithm, name: str, message: str) -> None:
    if not kept_with(algorithm).get(name):
        kept_with(algorithm)[name] = True
        warnings.warn(message, stacklevel=5)
