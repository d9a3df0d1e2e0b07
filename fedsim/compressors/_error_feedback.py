"""Error feedback: what a compressor leaves out is added to what is sent next.

F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-bit stochastic gradient descent and its application to data-parallel distributed
training of speech DNNs", Interspeech 2014; S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error feedback fixes
SignSGD and other gradient compression schemes", ICML 2019, Algorithm 2: https://arxiv.org/abs/1901.09847. No deviations; in a
federation a client keeps its residual until it takes part again.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.compressors._compressor import Compressor, Memory, Message, Size, Transmission, Value, shaped


class Feedback(NamedTuple):
    """What was left out so far, shaped like the value (zeros for integers), and the inner compressor's memory."""

    residual: Value
    inner: Memory


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorFeedback(Compressor):
    """Transmits value + residual with another compressor, and keeps what that lost as the new residual.

    All that arrived and the residual are all that was sent, up to rounding. The compressor has to contract, that is, to lose
    less than there was: `TopK`, `ScaledSign`, `PowerSGD`, ``Drive(unbiased=False)``, ``RandomK(unbiased=False)``. One that is
    unbiased by scaling up may lose more, and the residual then grows without end.

    Attributes:
      compressor: the other one.

    Raises:
      ValueError: ``compressor`` is none.

    >>> from fedsim.compressors import TopK
    >>> feedback, x = ErrorFeedback(TopK(fraction=0.5)), jnp.array([2.0, -3.0])
    >>> first = feedback.transmit(x, jax.random.key(0), feedback.init(x))
    >>> second = feedback.transmit(x, jax.random.key(1), first.memory)
    >>> first.value.tolist(), second.value.tolist(), second.memory.residual.tolist()
    ([0.0, -3.0], [4.0, 0.0], [0.0, -3.0])
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        checks.instance(Compressor, "TopK()", compressor=self.compressor)

    def init(self, value: Value) -> Feedback:
        residual = jax.tree.map(lambda x: jnp.zeros(shaped(x).shape, shaped(x).dtype), value)
        return Feedback(residual, self.compressor.init(value))

    def encode(self, value: Value, key: jax.Array, memory: Any = ()) -> tuple[Message, Feedback]:
        value, inner = self._due(value, memory)
        message, inner = self.compressor.encode(value, key, inner)
        arrived = self.compressor.decode(message, key, jax.eval_shape(lambda: value))
        return message, Feedback(_lost(value, arrived), inner)

    def decode(self, message: Message, key: jax.Array, shapes: Value) -> Value:
        return self.compressor.decode(message, key, shapes)

    def size(self, message: Message, shapes: Value) -> Size:
        return self.compressor.size(message, shapes)

    # As in `Compressor`, but decoded once.
    def transmit(self, value: Value, key: jax.Array, memory: Any = ()) -> Transmission:
        value, inner = self._due(value, memory)
        sent = self.compressor.transmit(value, key, inner)
        return sent._replace(memory=Feedback(_lost(value, sent.value), sent.memory))

    def _due(self, value: Value, memory: Any) -> tuple[Value, Memory]:
        """The value and what was left out before, and the inner compressor's memory."""
        residual, inner = memory or self.init(value)
        return jax.tree.map(lambda x, left: x + left if tree.is_float(x) else x, value, residual), inner


def _lost(value: Value, arrived: Value) -> Value:
    """What is not a float arrives as it is."""
    return jax.tree.map(lambda x, there: x - there if tree.is_float(x) else jnp.zeros_like(x), value, arrived)
