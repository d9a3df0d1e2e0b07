"""Straight-through derivatives: the value of one computation with the derivative of another.

Y. Bengio, N. Léonard, A. Courville, "Estimating or propagating gradients through stochastic neurons for conditional
computation", 2013, section 4 (the straight-through estimator): https://arxiv.org/abs/1308.3432.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from fedsim import tree
from fedsim.aggregators import Aggregator, Mean, Memory, Sent, Update, Wrapper
from fedsim.compressors import Compressor, Message, Size, Transmission, Value

_MEAN = Mean()
T = TypeVar("T")


def straight_through(value: T, through: Any) -> T:
    """Returns ``value``, bit for bit, with the derivative of ``through``, which has the same structure and shapes.

    Leaves that are not floats have no derivative.

    >>> import jax.numpy as jnp
    >>> jax.value_and_grad(lambda x: straight_through(jnp.round(x), 3 * x))(0.7)
    (Array(1., dtype=float32, weak_type=True), Array(3., dtype=float32, weak_type=True))
    """
    return jax.tree.map(lambda x, y: _replaced(x, y.astype(x.dtype)) if tree.is_float(x) else x, value, through)


@jax.custom_jvp
def _replaced(value: jax.Array, through: jax.Array) -> jax.Array:
    return value


@_replaced.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class StraightThroughCompressor(Compressor):
    """Transmits what ``compressor`` transmits, with the derivative of no compression.

    Attributes:
      compressor: the compressor whose values are used.

    >>> from fedsim.compressors import ScaledSign
    >>> import jax.numpy as jnp
    >>> plain, x = ScaledSign(), jnp.array([1.0, -3.0])
    >>> through = StraightThroughCompressor(compressor=plain)
    >>> [jax.jvp(lambda x: c.transmit(x, jax.random.key(0)).value, (x,), (x,)) for c in (through,)]
    [(Array([ 2., -2.], dtype=float32), Array([ 1., -3.], dtype=float32))]
    """

    compressor: Compressor

    def init(self, value: Value) -> Memory:
        return self.compressor.init(value)

    def encode(self, value: Value, key: jax.Array, memory: Memory = ()) -> tuple[Message, Memory]:
        return self.compressor.encode(value, key, memory)

    def decode(self, message: Message, key: jax.Array, shapes: Value) -> Value:
        return self.compressor.decode(message, key, shapes)

    def size(self, message: Message, shapes: Value) -> Size:
        return self.compressor.size(message, shapes)

    def transmit(self, value: Value, key: jax.Array, memory: Memory = ()) -> Transmission:
        sent = self.compressor.transmit(jax.lax.stop_gradient(value), key, memory)
        return sent._replace(value=straight_through(sent.value, value))


class _WithMean(NamedTuple):
    """What the inner aggregator gets, and what the mean gets: their accumulators, or a client's message and its update."""

    inner: Any
    mean: Any


@dataclasses.dataclass(frozen=True, eq=False)
class StraightThroughAggregator(Wrapper):
    """Aggregates as ``inner`` does, with the derivative of the weighted mean.

    >>> from fedsim.aggregators import CoordinateMedian
    >>> import jax.numpy as jnp
    >>> def aggregate(rows):
    ...     aggregator = StraightThroughAggregator(inner=CoordinateMedian())
    ...     accumulator = aggregator.zero(rows[0], slots=3)
    ...     for slot, row in enumerate(rows):
    ...         accumulator = aggregator.accumulate(accumulator, row, jnp.float32(1), slot)
    ...     return aggregator.finish(accumulator)
    >>> aggregate(jnp.array([0.0, 1.0, 8.0])).item()
    1.0
    >>> [round(x, 2) for x in jax.grad(aggregate)(jnp.array([0.0, 1.0, 8.0])).tolist()]
    [0.33, 0.33, 0.33]
    """

    @property
    def sends_unchanged(self) -> bool:
        return self.inner.sends_unchanged

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        sent = super().send(jax.lax.stop_gradient(update), server_memory, memory, key)
        has_same_form = jax.tree.map(jnp.shape, sent.update) == jax.tree.map(jnp.shape, update)
        message = straight_through(sent.update, update) if has_same_form else _WithMean(sent.update, update)
        return sent._replace(update=message)

    def check(self, update: Update, slots: int) -> None:
        super().check(_received(update).inner, slots)

    def zero(self, update: Update, slots: int) -> _WithMean:
        received = _received(update)
        return _WithMean(super().zero(received.inner, slots), _MEAN.zero(received.mean, slots))

    def accumulate(self, accumulator: _WithMean, update: Update, weight: jax.Array, slot: jax.Array) -> _WithMean:
        received = _received(update)
        inner = super().accumulate(accumulator.inner, *jax.lax.stop_gradient((received.inner, weight)), slot)
        return _WithMean(inner, _MEAN.accumulate(accumulator.mean, received.mean, weight, slot))

    def merge(self, a: _WithMean, b: _WithMean) -> _WithMean:
        return _WithMean(super().merge(a.inner, b.inner), _MEAN.merge(a.mean, b.mean))

    def merge_stacked(self, accumulators: _WithMean) -> _WithMean:
        return _WithMean(super().merge_stacked(accumulators.inner), _MEAN.merge_stacked(accumulators.mean))

    def merge_devices(self, accumulator: _WithMean, axis: str) -> _WithMean:
        merged = _MEAN.merge_devices(accumulator.mean, axis)
        return _WithMean(super().merge_devices(accumulator.inner, axis), merged)

    def finish(self, accumulator: _WithMean) -> Update:
        return straight_through(super().finish(accumulator.inner), _MEAN.finish(accumulator.mean))

    def finish_round(self, accumulator: _WithMean, memory: Memory, key: jax.Array) -> tuple[Update, Memory]:
        update, memory = super().finish_round(accumulator.inner, memory, key)
        return straight_through(update, _MEAN.finish(accumulator.mean)), memory


def _received(update: Update) -> _WithMean:
    """Returns the message for the inner aggregator and the update for the mean, which are one if they have the same form."""
    return update if isinstance(update, _WithMean) else _WithMean(update, update)


Part = Aggregator | Compressor


def parts_in(part: Part) -> dict[str, Part]:
    """Returns the aggregators and compressors in the fields of a part, by field."""
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    held = {field.name: getattr(part, field.name) for field in fields}
    return {name: value for name, value in held.items() if isinstance(value, Aggregator | Compressor)}


def with_straight_through(part: Part) -> Any:
    """Returns a part in which every part that is not differentiable has the straight-through derivative."""
    inside = {name: with_straight_through(inner) for name, inner in parts_in(part).items()}
    if any(inside[name] is not inner for name, inner in parts_in(part).items()):
        part = dataclasses.replace(part, **inside)
    if not part.not_differentiable:
        return part
    return StraightThroughAggregator(inner=part) if isinstance(part, Aggregator) else StraightThroughCompressor(compressor=part)


def not_differentiable(part: Part, name: str) -> list[str]:
    """Describes all parts of a part that are not differentiable; ``name`` is the part's own."""
    own = [f"{name}={part}, which {part.not_differentiable}"] if part.not_differentiable else []
    return own + [text for field, inner in parts_in(part).items() for text in not_differentiable(inner, f"{name}.{field}")]
