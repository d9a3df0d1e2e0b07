"""`Compressor`: what a sender writes, what a receiver reads from it, and how many bits that was."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, tree

Value = Any
Message = Any
Memory = Any
Part = jax.ShapeDtypeStruct


class Size(NamedTuple):
    """How large a message is.

    Attributes:
      bits: those of the message; ``uint32 []``, exact, below 2**32, and ``float32 []``, rounded, from there on.
      entropy_bits: ``float32 []``, an estimate for it after entropy coding.
    """

    bits: Any
    entropy_bits: Any


class Transmission(NamedTuple):
    """What arrives, what the sender keeps for the next time, and what the message cost (see `Size`)."""

    value: Value
    memory: Memory
    bits: jax.Array
    entropy_bits: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Compressor:
    """A way to send a pytree of arrays in fewer bits: pure functions, for `jax.jit` and `jax.vmap` alike.

    `transmit` is `encode`, then `decode` and `size`. The receiver has the message, the key and the shapes, and nothing else.
    A subclass says what to do with one part, an array ``float32`` with at least one element, in `start`, `encode_part`,
    `decode_part` and `size_part`. The parts of a value are its tensors of floats (see `VectorCompressor` for the whole of
    them); integers and empty tensors are sent as they are.

    Guarantees:
      - The same value, key and memory: the same transmission; parts draw from streams of their own.
      - What arrives has the structure, shapes and dtypes of what was sent.
      - ``bits`` is the exact size of the message's content; what fills its last machine word is not counted. Where it may be
        2**32 or more it is rounded, ``float32`` instead of ``uint32``; shapes alone decide this (`fedsim.tree.bits_dtype`).
      - ``entropy_bits <= bits``: symbols cost their empirical entropy, and the receiver is told their histogram
        (k log2(e (d + k) / k) bits for k symbols, theorem 4 of https://arxiv.org/abs/1611.00429); floats cost what they cost.
    """

    def init(self, value: Value) -> Memory:
        """What a sender keeps before its first transmission of something like ``value``; only shapes are looked at."""
        return _any([self.start(part) for part in self._parts(value)])

    def encode(self, value: Value, key: jax.Array, memory: Memory = ()) -> tuple[Message, Memory]:
        """The message, a pytree of packed arrays, and the sender's new memory."""
        tensors = self._split([jnp.asarray(x, jnp.float32) for x in _floats(value)])
        memory = memory if len(memory) else self.init(value)
        memories = memory if len(memory) else [()] * len(tensors)
        sent = [
            self.encode_part(x, jax.random.fold_in(key, i), memory)
            for i, (x, memory) in enumerate(zip(tensors, memories, strict=True))
        ]
        return ([message for message, _ in sent], _others(value)), _any([memory for _, memory in sent])

    def decode(self, message: Message, key: jax.Array, shapes: Value) -> Value:
        """What the message says, for the key it was written with; ``shapes`` has the value's shapes and dtypes."""
        messages, others = message
        parts = self._parts(shapes)
        tensors = [
            self.decode_part(m, jax.random.fold_in(key, i), part.shape)
            for i, (m, part) in enumerate(zip(messages, parts, strict=True))
        ]
        floats, rest = iter(self._join(tensors, _floats(shapes))), iter(others)
        leaves, structure = jax.tree.flatten(shapes)
        return jax.tree.unflatten(structure, [next(floats).astype(x.dtype) if _has_floats(x) else next(rest) for x in leaves])

    def size(self, message: Message, shapes: Value) -> Size:
        """How large the message is."""
        messages, others = message
        sizes = [self.size_part(m, part.shape) for m, part in zip(messages, self._parts(shapes), strict=True)]
        rest = sum(8 * x.size * x.dtype.itemsize for x in others)
        fixed = rest + sum(size.bits for size in sizes if isinstance(size.bits, int))
        varying = [(size.bits, m) for size, m in zip(sizes, messages, strict=True) if not isinstance(size.bits, int)]
        # No content is longer than the arrays that hold it.
        most = fixed + sum(tree.num_bits(m) for _, m in varying)
        bits = tree.add_bits(fixed, *(bits for bits, _ in varying), most=most)
        entropy_bits = sum((size.entropy_bits for size in sizes), jnp.float32(rest))
        return Size(bits, jnp.minimum(entropy_bits, bits.astype(jnp.float32)))

    def transmit(self, value: Value, key: jax.Array, memory: Memory = ()) -> Transmission:
        """Sends ``value``: what arrives, the sender's new memory, and the bits."""
        message, memory = self.encode(value, key, memory)
        shapes = jax.eval_shape(lambda: value)
        size = self.size(message, shapes)
        return Transmission(self.decode(message, key, shapes), memory, size.bits, size.entropy_bits)

    def start(self, part: Part) -> Memory:
        """The memory for one part before the first transmission."""
        return ()

    def encode_part(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        """The message for one part, and its new memory."""
        raise NotImplementedError(f"{type(self).__name__} must define encode_part.")

    def decode_part(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """What arrives of one part, ``float32``."""
        raise NotImplementedError(f"{type(self).__name__} must define decode_part.")

    def size_part(self, message: Message, shape: tuple[int, ...]) -> Size:
        """The size of one part's message; ``bits`` is an ``int`` if the shape alone decides it."""
        raise NotImplementedError(f"{type(self).__name__} must define size_part.")

    def _split(self, tensors: list[jax.Array]) -> list[jax.Array]:
        return tensors

    def _join(self, parts: list[jax.Array], shapes: list[Any]) -> list[jax.Array]:
        return parts

    def _parts(self, shapes: Value) -> list[Part]:
        return [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in _floats(shapes)]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class VectorCompressor(Compressor):
    """A compressor of vectors: of each tensor, or of all of them end to end.

    A subclass defines `encode_vector`, `decode_vector` and `size_vector`.

    Attributes:
      per_tensor: whether every tensor is a vector of its own, with its own scales, or all floats are one vector.
    """

    per_tensor: bool = True

    def __post_init__(self) -> None:
        checks.truth(per_tensor=self.per_tensor)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> Message:
        """The message for a vector ``float32 [d]``, d >= 1, which ends in zeros if `length` made it longer."""
        raise NotImplementedError(f"{type(self).__name__} must define encode_vector.")

    def decode_vector(self, message: Message, key: jax.Array, d: int) -> jax.Array:
        """What arrives: ``float32 [d]`` for a vector of ``d`` with its zeros, which are cut off afterwards."""
        raise NotImplementedError(f"{type(self).__name__} must define decode_vector.")

    def size_vector(self, message: Message, d: int) -> Size:
        """As `Compressor.size_part`; what is sent of a vector's zeros counts, too."""
        raise NotImplementedError(f"{type(self).__name__} must define size_vector.")

    def length(self, d: int) -> int:
        """``d`` or more: how long a vector of ``d`` is made, by zeros at its end, before it is encoded."""
        return d

    def encode_part(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        return self.encode_vector(x, key), memory

    def decode_part(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return self.decode_vector(message, key, *shape)

    def size_part(self, message: Message, shape: tuple[int, ...]) -> Size:
        return self.size_vector(message, *shape)

    def _vectors(self, tensors: list[Any]) -> list[list[Any]]:
        """Which tensors, or shapes, make which vector."""
        if self.per_tensor:
            return [[x] for x in tensors]
        return [tensors] if tensors else []

    def _split(self, tensors: list[jax.Array]) -> list[jax.Array]:
        return [self._vector(group) for group in self._vectors(tensors)]

    def _vector(self, tensors: list[jax.Array]) -> jax.Array:
        size = sum(x.size for x in tensors)
        whole = len(tensors) == 1 and self.length(size) == size
        return tensors[0].reshape(-1) if whole else tree.flat(tensors, self.length(size))

    def _join(self, parts: list[jax.Array], shapes: list[Any]) -> list[jax.Array]:
        tensors = []
        for vector, group in zip(parts, self._vectors(shapes), strict=True):
            tensors += tree.unflat(vector, group)
        return tensors

    def _parts(self, shapes: Value) -> list[Part]:
        sizes = [sum(math.prod(part.shape) for part in group) for group in self._vectors(super()._parts(shapes))]
        return [jax.ShapeDtypeStruct((self.length(size),), jnp.float32) for size in sizes]


def _any(memories: list[Memory]) -> Memory:
    return memories if jax.tree.leaves(memories) else ()


def _has_floats(leaf: Any) -> bool:
    return tree.is_float(leaf) and math.prod(leaf.shape) > 0


def _floats(value: Value) -> list[Any]:
    return [x for x in map(shaped, jax.tree.leaves(value)) if _has_floats(x)]


def _others(value: Value) -> list[Any]:
    return [x for x in map(shaped, jax.tree.leaves(value)) if not _has_floats(x)]


def shaped(leaf: Any) -> Any:
    """``leaf``, or an array of the number that it is: something with a shape and a dtype."""
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
