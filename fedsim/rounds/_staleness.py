"""`Staleness`: what an algorithm needs so that clients may start from models of earlier rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.aggregators import accumulation_dtype


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


# The methods that make an update a step: a class that overrides one of them may send or do something else.
_STEP = ("broadcast", "client_update", "update_of", "server_update", "round")


def is_scalable(algorithm: Any) -> bool:
    """Returns whether the algorithm's class declares that its updates may be scaled, see `fedsim.algorithm.Capabilities`.

    A base class cannot declare it for methods that a subclass overrides.
    """
    for cls in type(algorithm).__mro__:
        if "capabilities" in vars(cls):
            return bool(algorithm.capabilities.scalable)
        if any(name in vars(cls) for name in _STEP):
            return False
    return False


def check_scales(algorithm: Any, weights: np.ndarray, scales: np.ndarray) -> None:
    """Raises ``ValueError`` unless the algorithm's updates may have these factors, see `fedsim.data.Arrivals`."""
    if np.any(scales != 1) or (np.any(weights != 1) and algorithm.aggregator.innermost.adds_weights):
        check_scalable(algorithm)


def check_scalable(algorithm: Any) -> None:
    """Raises ``ValueError`` unless the algorithm's updates may be multiplied by scales, see `is_scalable`."""
    if not is_scalable(algorithm):
        name, summed = type(algorithm).__name__, algorithm.aggregator.innermost.adds_weights
        weights = "" if summed else ", or weights that are no scales (Buffered(divide_by='weights'))"
        raise ValueError(
            f"The updates of {name} cannot have scales other than 1, because {name} does not declare that half an update is "
            "half a step. If it is, declare capabilities = fedsim.Capabilities(scalable=True) in the class. Otherwise use "
            f"Synchronous(), weights without staleness (Buffered(staleness_weight='constant')){weights}."
        )
