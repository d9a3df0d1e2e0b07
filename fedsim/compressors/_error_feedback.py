"""Error feedback: the compression error of a transmission is added to the next one.

F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, "1-bit stochastic gradient descent and its application to data-parallel distributed
training of speech DNNs", Interspeech 2014; S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error feedback fixes
SignSGD and other gradient compression schemes", ICML 2019, Algorithm 2: https://arxiv.org/abs/1901.09847. There are no
deviations. A client keeps its residual until its next round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, tree
from fedsim.compressors._compressor import Compressor, Memory, Message, Size, Transmission, Value, as_array


class Feedback(NamedTuple):
    """The residual (the compression error so far, at least ``float32``, zero for integers), and the compressor's memory."""

    residual: Value
    inner: Memory


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorFeedback(Compressor):
    """Transmits value + residual with another compressor. The compression error is the new residual.

    Up to rounding, the sum of all decoded values plus the residual equals the sum of all values that were sent. The compressor
    must be a contraction: its error must be smaller than the value. This holds for `TopK`, `ScaledSign`, `PowerSGD`,
    ``Drive(unbiased=False)`` and ``RandomK(unbiased=False)``. The error of an unbiased compressor may be larger than the value,
    and then the residual grows without bound.

    Attributes:
      compressor: the compressor of value + residual.

    Raises:
      ValueError: ``compressor`` is not a `Compressor`.

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
        def zeros(x: Any) -> jax.Array:
            dtype = as_array(x).dtype
            return jnp.zeros(as_array(x).shape, np.promote_types(dtype, np.float32) if tree.is_float(as_array(x)) else dtype)

        return Feedback(jax.tree.map(zeros, value), self.compressor.init(value))

    def encode(self, value: Value, key: jax.Array, memory: Any = ()) -> tuple[Message, Feedback]:
        total, value, inner = self._with_residual(value, memory)
        message, inner = self.compressor.encode(value, key, inner)
        decoded = self.compressor.decode(message, key, jax.eval_shape(lambda: value))
        return message, Feedback(_error(total, decoded), inner)

    def decode(self, message: Message, key: jax.Array, shapes: Value) -> Value:
        return self.compressor.decode(message, key, shapes)

    def size(self, message: Message, shapes: Value) -> Size:
        return self.compressor.size(message, shapes)

    # Overridden so that the message is decoded only once.
    def transmit(self, value: Value, key: jax.Array, memory: Any = ()) -> Transmission:
        total, value, inner = self._with_residual(value, memory)
        sent = self.compressor.transmit(value, key, inner)
        return sent._replace(memory=Feedback(_error(total, sent.value), sent.memory))

    def _with_residual(self, value: Value, memory: Any) -> tuple[Value, Value, Memory]:
        """Returns value + residual in the residual's dtypes and in those of the value, and the inner compressor's memory."""
        residual, inner = memory or self.init(value)
        total = jax.tree.map(lambda x, r: x.astype(r.dtype) + r if tree.is_float(x) else x, value, residual)
        return total, jax.tree.map(lambda t, x: t.astype(x.dtype), total, value), inner


def _error(total: Value, decoded: Value) -> Value:
    """Returns the difference. It is zero for leaves that are not floats, which are sent unchanged."""
    return jax.tree.map(lambda x, y: x - y.astype(x.dtype) if tree.is_float(x) else jnp.zeros_like(x), total, decoded)
