"""`Staleness`: what an algorithm needs so that clients may start from models of earlier rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.aggregators._aggregator import accumulation_dtype


@dataclasses.dataclass(frozen=True)
class Staleness:
    """Lets the clients of a round start from what the server sent in earlier rounds, as ``Cohort.arrivals`` says.

    The server keeps what it sent in the last rounds, so the state is larger by ``bound + 1`` times that. A state must come
    from running all of these rounds. An update is multiplied by its scale when it arrives, after the aggregator's `send`.

    Attributes:
      bound: the largest staleness, in rounds.
      mixing: if True, an update that arrives is taken as a difference from the server's current parameters x_t instead of those
        that the client started from, x_tau: x_t - x_tau is added to it. With an optimizer ``optax.sgd(1.0)`` at the server, one
        client per round and a scale a, the new parameters are then (1 - a) x_t + a x, where x are the client's parameters
        (C. Xie, S. Koyejo, I. Gupta, "Asynchronous federated optimization", 2019, Algorithm 1:
        https://arxiv.org/abs/1903.03934). The update must be a difference of parameters, ``shared.params`` minus the client's.

    Raises:
      ValueError: ``bound`` is negative.

    >>> Staleness(bound=3)
    Staleness(bound=3, mixing=False)
    """

    bound: int
    mixing: bool = False

    def __post_init__(self) -> None:
        checks.whole(0, bound=self.bound, remedy="it is the largest number of rounds since a client started")
        checks.truth(mixing=self.mixing)

    def first(self, sent: Any) -> Any:
        """Returns memory for what was sent, leaves ``[bound + 1, ...]``."""
        return jax.tree.map(lambda x: jnp.zeros((self.bound + 1, *x.shape), x.dtype), sent)

    def kept(self, past: Any, sent: Any, round_number: jax.Array) -> Any:
        """Stores what is sent in a round in place of what was sent ``bound + 1`` rounds before."""
        at = round_number % (self.bound + 1)
        return jax.tree.map(lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, x, at, 0), past, sent)

    def started(self, past: Any, round_number: jax.Array, staleness: jax.Array) -> Any:
        """Returns what was sent to clients of these stalenesses ``[n]``, leaves ``[n, ...]``."""
        at = (round_number - staleness) % (self.bound + 1)
        return jax.tree.map(lambda rows: rows[at], past)

    def arrived(self, update: Any, scale: jax.Array, current: Any, started: Any) -> Any:
        """Returns what the server takes for an update that arrives.

        Args:
          update: as it arrives.
          scale: its factor, 0 if it does not count.
          current: what the server sends in this round.
          started: what the client started from.

        Raises:
          ValueError: ``mixing`` is True, and the update is no difference of parameters.
        """
        if self.mixing:
            params = getattr(current, "params", ())
            forms = [[(path, x.shape) for path, x in jax.tree_util.tree_leaves_with_path(a)] for a in (update, params)]
            if forms[0] != forms[1]:
                raise ValueError(
                    "Expected an update that is a difference of parameters, for Staleness(mixing=True) and for Asynchronous, "
                    f"got {jax.tree.map(jnp.shape, update)}: use mixing=False, Buffered in place of Asynchronous, or an "
                    "algorithm such as FedAvg."
                )
            update = jax.tree.map(lambda x, new, old: x + (new - old), update, params, started.params)

        def scaled(x: jax.Array) -> jax.Array:  # The scale is not rounded to half precision.
            wide = accumulation_dtype(x.dtype)
            return (x.astype(wide) * scale.astype(wide)).astype(x.dtype) if tree.is_float(x) else x

        return jax.tree.map(scaled, update)


def check_scalable(algorithm: Any) -> None:
    """Raises ``ValueError`` unless the algorithm's updates may be multiplied by scales, see `fedsim.algorithm.Capabilities`."""
    if not algorithm.capabilities.scalable:
        raise ValueError(
            f"The updates of {type(algorithm).__name__} cannot have scales other than 1, because its server or its clients use "
            "them in more ways than as one step: use weights instead (Buffered(divide_by='weights')), or another algorithm."
        )
