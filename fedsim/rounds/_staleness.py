"""`Staleness`: what an algorithm needs so that clients may start from models of earlier rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
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
        """Returns the memory before the first round: zeros ``[bound + 1, ...]`` for each leaf of what is sent.

        Args:
          sent: what the server sends in a round, a pytree of arrays or ``jax.ShapeDtypeStruct``.
        """
        return jax.tree.map(lambda x: jnp.zeros((self.bound + 1, *x.shape), x.dtype), sent)

    def kept(self, past: Any, sent: Any, round_number: jax.Array) -> Any:
        """Returns the memory with what is sent in a round in place of what was sent ``bound + 1`` rounds before.

        Args:
          past: the memory, leaves ``[bound + 1, ...]``.
          sent: what the server sends in this round.
          round_number: of this round, ``int32 []``.

        >>> staleness = Staleness(bound=1)
        >>> past = staleness.first(jnp.float32(0))
        >>> for number, sent in enumerate([10.0, 20.0, 30.0]):
        ...     past = staleness.kept(past, jnp.float32(sent), jnp.int32(number))
        >>> staleness.started(past, jnp.int32(2), jnp.array([0, 1])).tolist()
        [30.0, 20.0]
        """
        at = round_number % (self.bound + 1)
        return jax.tree.map(lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, x, at, 0), past, sent)

    def started(self, past: Any, round_number: jax.Array, staleness: jax.Array) -> Any:
        """Returns what was sent to clients that start in earlier rounds, see `kept`.

        Args:
          past: the memory, leaves ``[bound + 1, ...]``, with what is sent in this round.
          round_number: of this round, ``int32 []``.
          staleness: how many rounds ago each client's model was sent, ``int32 []`` or ``[n]``, at most ``bound``.

        Returns:
          What was sent, with the axis of ``staleness`` before those of its leaves.
        """
        at = (round_number - staleness) % (self.bound + 1)
        return jax.tree.map(lambda rows: rows[at], past)

    def arrived(self, update: Any, scale: jax.Array, current: Any, started: Any) -> Any:
        """Returns what the server takes for an update that arrives.

        Args:
          update: as it arrives.
          scale: its factor, ``float32 []``, 0 if it does not count. Integers and booleans are not multiplied by it.
          current: what the server sends in this round.
          started: what the client started from, see `started`.

        Raises:
          ValueError: ``mixing`` is True, and the update is no difference of parameters.

        >>> Staleness(bound=3).arrived(jnp.array([2.0, 4.0]), scale=jnp.float32(0.5), current=(), started=()).tolist()
        [1.0, 2.0]
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
            return (x.astype(wide) * scale.astype(wide)).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x

        return jax.tree.map(scaled, update)


# The methods that make an update a step: a class that overrides one of them may send or do something else.
_STEP = ("broadcast", "client_update", "server_update", "round")


def is_scalable(algorithm: Any) -> bool:
    """Returns whether the algorithm's class declares that its updates may be scaled, see `fedsim.algorithm.Capabilities`.

    A base class cannot declare it for methods that a subclass overrides.

    >>> import fedsim
    >>> is_scalable(fedsim.algorithms.Histogram(bins=2))
    False
    """
    for cls in type(algorithm).__mro__:
        if "capabilities" in vars(cls):
            return bool(algorithm.capabilities.scalable)
        if any(name in vars(cls) for name in _STEP):
            return False
    return False


def check_scales(algorithm: Any, weights: np.ndarray, scales: np.ndarray) -> None:
    """Raises ``ValueError`` unless the algorithm's updates may have these factors, see `fedsim.data.Arrivals`.

    Args:
      algorithm: whose clients' updates they are.
      weights: factors of the weights, ``[n]``. In a sum, a weight multiplies the update, so such a factor is a scale, too.
      scales: factors of the updates, ``[n]``.

    Raises:
      ValueError: an update is scaled, and the class does not declare ``capabilities.scalable``; or it is scaled or mixed, and
        the aggregator is not scalable; or a weight is above 1, and the class declares that it is not ``repeatable``, see
        `fedsim.algorithm.Capabilities`.

    >>> import fedsim
    >>> histogram = fedsim.algorithms.Histogram(bins=2)
    >>> check_scales(histogram, weights=np.ones(2), scales=np.ones(2))
    >>> check_scales(histogram, weights=np.ones(2), scales=np.array([1.0, 0.5]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: The updates of Histogram cannot have scales other than 1, ...
    """
    aggregator = algorithm.aggregator.innermost
    # Mixing adds a difference of models to each message.
    mixes = algorithm.staleness is not None and algorithm.staleness.mixing
    are_scaled = np.any(scales != 1) or (np.any(weights != 1) and aggregator.adds_weights)
    if are_scaled or (mixes and not aggregator.is_scalable):
        check_scalable(algorithm)
    if np.any(weights > 1) and not algorithm.capabilities.repeatable:
        raise ValueError(
            f"Expected weights of at most 1 in arrivals for {type(algorithm).__name__}, got {weights.max():.6g}: its clients "
            "keep a memory that changes by so many times the difference to its new value, and goes beyond it. Use a sampler "
            "that draws no client twice, such as UniformSampler, or staleness weights of at most 1."
        )


def check_scalable(algorithm: Any) -> None:
    """Raises ``ValueError`` unless the algorithm's updates may be multiplied by scales.

    Its class must declare ``capabilities.scalable``, see `fedsim.algorithm.Capabilities`. A base class cannot declare it for
    methods that a subclass overrides. The aggregator must be scalable, too.

    >>> import fedsim
    >>> check_scalable(fedsim.algorithms.Histogram(bins=2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: The updates of Histogram cannot have scales other than 1, ...
    """
    aggregator = algorithm.aggregator.innermost
    weights = "" if aggregator.adds_weights else ", or weights that are no scales (Buffered(divide_by='weights'))"
    if not aggregator.is_scalable:
        factors = "scales or weights" if aggregator.adds_weights else "scales"
        raise ValueError(
            f"Messages for {type(aggregator).__name__} must not be multiplied by {factors}, or mixed into the model, because "
            "half of a message does not count as half of an update there. Use Synchronous(), another aggregator, weights "
            f"without staleness (Buffered(staleness_weight='constant')){weights}."
        )
    if not is_scalable(algorithm):
        name = type(algorithm).__name__
        raise ValueError(
            f"The updates of {name} cannot have scales other than 1, because {name} does not declare that half an update is "
            "half a step. If it is, declare capabilities = fedsim.Capabilities(scalable=True) in the class. Otherwise use "
            f"Synchronous(), weights without staleness (Buffered(staleness_weight='constant')){weights}."
        )
