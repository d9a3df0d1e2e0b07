"""`Compressor`: base class of compressors, which encode and decode messages and count their bits."""

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


class Size(NamedTuple):
    """The size of a message.

    Attributes:
      bits: number of bits. It is an exact ``uint32 []`` if the message cannot have 2**32 bits or more, otherwise a rounded
        ``float32 []``.
      entropy_bits: an estimate of the size after entropy coding, ``float32 []``.
    """

    bits: Any
    entropy_bits: Any


class Transmission(NamedTuple):
    """What the receiver decodes, the sender's memory for its next transmission, and the size of the message (see `Size`)."""

    value: Value
    memory: Memory
    bits: jax.Array
    entropy_bits: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Compressor:
    """Base class of compressors of pytrees. All methods are pure functions that work under `jax.jit` and `jax.vmap`.

    `transmit` calls `encode`, `decode` and `size`. The receiver knows only the message, the key and the shapes. Subclasses
    define `init_tensor`, `encode_tensor`, `decode_tensor` and `size_tensor` for one tensor: a ``float32`` array with at least
    one element. They are called for every tensor of floats. `VectorCompressor` can compress all of them together. Integers and
    empty arrays are sent uncompressed.

    Guarantees:
      - The same value, key and memory give the same transmission. Each tensor has a different random stream.
      - The decoded value has the structure, shapes and dtypes of the value that was sent.
      - ``bits`` is the exact size of the message, without padding of its last machine word. If it may be 2**32 or more, it is
        rounded and has dtype ``float32`` instead of ``uint32``. This depends only on shapes (`fedsim.tree.bits_dtype`).
      - ``entropy_bits <= bits``. The estimate is the empirical entropy of the symbols plus the bits for their histogram
        (k log2(e (d + k) / k) bits for k symbols, theorem 4 of https://arxiv.org/abs/1611.00429). Floats count with all their
        bits.
    """

    @property
    def not_differentiable(self) -> str:
        """What makes its derivatives zero or wrong, such as "rounds", for `fedsim.differentiable`; "" if they are right."""
        return ""

    def init(self, value: Value) -> Memory:
        """Returns the sender's memory before its first transmission. Only the shapes of ``value`` matter."""
        return _empty_if_none([self.init_tensor(tensor) for tensor in self._tensors(value)])

    def encode(self, value: Value, key: jax.Array, memory: Memory = ()) -> tuple[Message, Memory]:
        """Returns the message, a pytree of packed arrays, and the sender's new memory."""
        tensors = self._split([jnp.asarray(x, jnp.float32) for x in _floats(value)])
        memory = memory if len(memory) else self.init(value)
        memories = memory if len(memory) else [()] * len(tensors)
        sent = [
            self.encode_tensor(x, jax.random.fold_in(key, i), memory)
            for i, (x, memory) in enumerate(zip(tensors, memories, strict=True))
        ]
        return ([message for message, _ in sent], _others(value)), _empty_if_none([memory for _, memory in sent])

    def decode(self, message: Message, key: jax.Array, shapes: Value) -> Value:
        """Returns the decoded value. ``key`` must be the key of `encode`, and ``shapes`` has the value's shapes and dtypes."""
        messages, others = message
        tensors = [
            self.decode_tensor(m, jax.random.fold_in(key, i), tensor.shape)
            for i, (m, tensor) in enumerate(zip(messages, self._tensors(shapes), strict=True))
        ]
        floats, rest = iter(self._join(tensors, _floats(shapes))), iter(others)
        leaves, structure = jax.tree.flatten(shapes)
        return jax.tree.unflatten(structure, [next(floats).astype(x.dtype) if _has_floats(x) else next(rest) for x in leaves])

    def size(self, message: Message, shapes: Value) -> Size:
        """Returns the size of a message."""
        messages, others = message
        sizes = [self.size_tensor(m, tensor.shape) for m, tensor in zip(messages, self._tensors(shapes), strict=True)]
        rest = sum(8 * x.size * x.dtype.itemsize for x in others)
        fixed = rest + sum(size.bits for size in sizes if isinstance(size.bits, int))
        varying = [(size.bits, m) for size, m in zip(sizes, messages, strict=True) if not isinstance(size.bits, int)]
        # The content of a message is never larger than its arrays.
        most = fixed + sum(tree.num_bits(m) for _, m in varying)
        bits = tree.add_bits(fixed, *(bits for bits, _ in varying), most=most)
        entropy_bits = sum((size.entropy_bits for size in sizes), jnp.float32(rest))
        return Size(bits, jnp.minimum(entropy_bits, bits.astype(jnp.float32)))

    def transmit(self, value: Value, key: jax.Array, memory: Memory = ()) -> Transmission:
        """Encodes and decodes ``value``. Returns the decoded value, the sender's new memory, and the size of the message."""
        message, memory = self.encode(value, key, memory)
        shapes = jax.eval_shape(lambda: value)
        size = self.size(message, shapes)
        return Transmission(self.decode(message, key, shapes), memory, size.bits, size.entropy_bits)

    def init_tensor(self, tensor: jax.ShapeDtypeStruct) -> Memory:
        """Returns the memory for one tensor before the first transmission. By default there is none."""
        return ()

    def encode_tensor(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        """Returns the message for one tensor, and the new memory for it."""
        raise NotImplementedError(f"{type(self).__name__} must define encode_tensor.")

    def decode_tensor(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns one decoded tensor, ``float32``."""
        raise NotImplementedError(f"{type(self).__name__} must define decode_tensor.")

    def size_tensor(self, message: Message, shape: tuple[int, ...]) -> Size:
        """Returns the size of one tensor's message. ``bits`` is an ``int`` if it depends only on the shape."""
        raise NotImplementedError(f"{type(self).__name__} must define size_tensor.")

    def _split(self, tensors: list[jax.Array]) -> list[jax.Array]:
        return tensors

    def _join(self, tensors: list[jax.Array], shapes: list[Any]) -> list[jax.Array]:
        return tensors

    def _tensors(self, shapes: Value) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in _floats(shapes)]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class VectorCompressor(Compressor):
    """Base class of compressors of vectors: of each flattened tensor, or of all tensors joined to one vector.

    Subclasses define `encode_vector`, `decode_vector` and `size_vector`.

    Attributes:
      per_tensor: whether every tensor is compressed separately, or all floats are joined to one vector.

    Raises:
      ValueError: ``per_tensor`` is neither True nor False.
    """

    per_tensor: bool = True

    def __post_init__(self) -> None:
        checks.truth(per_tensor=self.per_tensor)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> Message:
        """Returns the message for a vector ``float32 [d]``, d >= 1, including the padding of `padded_length`."""
        raise NotImplementedError(f"{type(self).__name__} must define encode_vector.")

    def decode_vector(self, message: Message, key: jax.Array, d: int) -> jax.Array:
        """Returns the decoded vector, ``float32 [d]``. The padding is removed afterwards."""
        raise NotImplementedError(f"{type(self).__name__} must define decode_vector.")

    def size_vector(self, message: Message, d: int) -> Size:
        """Returns the size of a message, as `Compressor.size_tensor` does. Bits for the padding count, too."""
        raise NotImplementedError(f"{type(self).__name__} must define size_vector.")

    def padded_length(self, d: int) -> int:
        """Returns the length to which vectors of length ``d`` are padded with zeros before they are encoded."""
        return d

    def encode_tensor(self, x: jax.Array, key: jax.Array, memory: Memory) -> tuple[Message, Memory]:
        return self.encode_vector(x, key), memory

    def decode_tensor(self, message: Message, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return self.decode_vector(message, key, *shape)

    def size_tensor(self, message: Message, shape: tuple[int, ...]) -> Size:
        return self.size_vector(message, *shape)

    def _vectors(self, tensors: list[Any]) -> list[list[Any]]:
        """Returns the groups of tensors (or shapes) that are joined to one vector each."""
        if self.per_tensor:
            return [[x] for x in tensors]
        return [tensors] if tensors else []

    def _split(self, tensors: list[jax.Array]) -> list[jax.Array]:
        return [self._vector(group) for group in self._vectors(tensors)]

    def _vector(self, tensors: list[jax.Array]) -> jax.Array:
        size = sum(x.size for x in tensors)
        unpadded = len(tensors) == 1 and self.padded_length(size) == size
        return tensors[0].reshape(-1) if unpadded else tree.flat(tensors, self.padded_length(size))

    def _join(self, tensors: list[jax.Array], shapes: list[Any]) -> list[jax.Array]:
        joined = []
        for vector, group in zip(tensors, self._vectors(shapes), strict=True):
            joined += tree.unflat(vector, group)
        return joined

    def _tensors(self, shapes: Value) -> list[jax.ShapeDtypeStruct]:
        sizes = [sum(math.prod(tensor.shape) for tensor in group) for group in self._vectors(super()._tensors(shapes))]
        return [jax.ShapeDtypeStruct((self.padded_length(size),), jnp.float32) for size in sizes]


def _empty_if_none(memories: list[Memory]) -> Memory:
    return memories if jax.tree.leaves(memories) else ()


def _has_floats(leaf: Any) -> bool:
    return tree.is_float(leaf) and math.prod(leaf.shape) > 0


def _floats(value: Value) -> list[Any]:
    return [x for x in map(as_array, jax.tree.leaves(value)) if _has_floats(x)]


def _others(value: Value) -> list[Any]:
    return [x for x in map(as_array, jax.tree.leaves(value)) if not _has_floats(x)]


def as_array(leaf: Any) -> Any:
    """Converts a Python number to an array. Everything that has a dtype is returned unchanged."""
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
