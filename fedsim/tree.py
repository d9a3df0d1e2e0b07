"""Arithmetic on pytrees of arrays, as far as federated algorithms need it."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

Tree = Any

_SMALL = 2**16  # the largest number of elements of a leaf that `psum` joins with others in one process


def add(a: Tree, b: Tree) -> Tree:
    """Returns ``a + b``, leaf by leaf.

    >>> add({"w": 1.0}, {"w": 2.0})
    {'w': 3.0}
    """
    return jax.tree.map(lambda x, y: x + y, a, b)


def compensated_add(rounded: jax.Array, lost: jax.Array, term: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds a term to a sum of floats that consists of its rounded value and of what rounding lost. Returns the new two.

    The result is as precise as a float of twice the precision. The algorithm is that of T. J. Dekker, "A floating-point
    technique for extending the available precision", Numerische Mathematik 18, 1971. A sum that is not finite loses nothing.

    >>> rounded, lost = compensated_add(jnp.float32(2**24), jnp.float32(0), jnp.float32(1))
    >>> float(rounded), float(lost)
    (16777216.0, 1.0)
    """
    total = rounded + term
    of_term = total - rounded
    is_finite = jnp.isfinite(total)
    lost = jnp.where(is_finite, lost + ((rounded - (total - of_term)) + (term - of_term)), 0)
    rounded = total + lost
    return rounded, jnp.where(is_finite, lost - (rounded - total), 0)


class Total(NamedTuple):
    """A sum of many pytrees of floats, whose error does not grow with the number of terms (compensated summation).

    Attributes:
      rounded: the sum so far, rounded.
      lost: what the rounding lost.

    >>> plain, total = jnp.float32(2**24), Total.of(jnp.float32(2**24))
    >>> for _ in range(3):
    ...     plain, total = plain + 1, total.add(jnp.float32(1))
    >>> float(plain) - 2**24, float(total.value()) - 2**24
    (0.0, 4.0)
    """

    rounded: Tree
    lost: Tree

    @classmethod
    def of(cls, first: Tree) -> Total:
        """Returns the sum of one term, for example of zeros."""
        return cls(first, jax.tree.map(jnp.zeros_like, first))

    def add(self, term: Tree) -> Total:
        """Returns the sum with one more term, of the same structure, shapes and dtypes."""
        both = jax.tree.map(lambda a, b, c: compensated_add(a, b, c.astype(a.dtype)), self.rounded, self.lost, term)
        return Total(*jax.tree.transpose(jax.tree.structure(term), jax.tree.structure((0, 0)), both))

    def merge(self, other: Total) -> Total:
        """Returns the sum of the terms of both."""
        return self.add(other.rounded).add(other.lost)

    def value(self) -> Tree:
        """Returns the sum, rounded once."""
        return add(self.rounded, self.lost)


def subtract(a: Tree, b: Tree) -> Tree:
    """Returns ``a - b``, leaf by leaf.

    >>> subtract({"w": 1.0}, {"w": 2.0})
    {'w': -1.0}
    """
    return jax.tree.map(lambda x, y: x - y, a, b)


def scale(a: Tree, factor: jax.Array | float) -> Tree:
    """Returns ``factor * a``, leaf by leaf, in each leaf's dtype.

    >>> scale({"w": jnp.array([3.0])}, 2)["w"].tolist()
    [6.0]
    """
    return jax.tree.map(lambda x: x * jnp.asarray(factor, jnp.result_type(x)), a)


def add_proximal_gradient(gradient: Tree, strength: jax.Array | float, a: Tree, b: Tree) -> Tree:
    """Returns ``gradient + strength * (a - b)``: the gradient at ``a`` of a loss plus ``strength / 2 * ||a - b||²``.

    Leaves keep their dtypes. This compiles to one pass over the parameters; differentiating the penalty itself takes two, for
    the difference and for its norm.

    >>> float(add_proximal_gradient({"w": 1.0}, 0.5, {"w": 6.0}, {"w": 2.0})["w"])
    3.0
    """
    return add(gradient, scale(subtract(a, b), strength))


def flat(a: Tree, length: int | None = None) -> jax.Array:
    """Returns the elements of all leaves in one vector ``[size]``, in the order of `jax.tree.leaves`, in their common dtype.

    If ``length`` is larger than ``size``, the vector is padded with zeros to ``[length]``.

    >>> flat({"b": jnp.array([1.0]), "w": jnp.array([[2.0], [3.0]])}, 5).tolist()
    [1.0, 2.0, 3.0, 0.0, 0.0]
    """
    leaves = [jnp.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(a)]
    dtype = jnp.result_type(*leaves) if leaves else jnp.float32
    size = sum(leaf.size for leaf in leaves)
    # This is neither a concatenation nor an update of a constant zero array: XLA would turn either into one loop, fused with
    # other operations, which reads each leaf beyond its end, masked. Where the memory ends there, such a read is fifty times as
    # slow on a CPU.
    vector = jnp.maximum(size - jnp.arange(max(size, length or 0)), 0).astype(dtype)
    at = 0
    for leaf in leaves:
        vector = jax.lax.dynamic_update_slice(vector, leaf.astype(dtype), (at,))
        at += leaf.size
    return _whole(vector)


def unflat(vector: jax.Array, like: Tree) -> Tree:
    """Returns the elements of a vector of `flat` in the structure and shapes of ``like``, in the vector's dtype.

    The leaves of ``like`` need only a shape. Further elements of the vector, such as padding, are ignored.

    >>> [leaf.tolist() for leaf in unflat(jnp.arange(4), (jnp.zeros(()), jnp.zeros([1, 2])))]
    [0, [[1, 2]]]
    """
    leaves, structure = jax.tree.flatten(like)
    vector, at = _whole(vector), 0
    for i, leaf in enumerate(leaves):
        size = math.prod(leaf.shape)
        leaves[i], at = vector[at : at + size].reshape(leaf.shape), at + size
    return jax.tree.unflatten(structure, leaves)


# Where vectors of `flat` are while a round is traced in which several devices train each client.
_WHOLE: contextvars.ContextVar[NamedSharding | None] = contextvars.ContextVar("whole", default=None)


@contextlib.contextmanager
def whole_vectors(on: NamedSharding | None) -> Iterator[None]:
    """Keeps vectors of `flat` and `unflat` whole on every device of a client, in what is traced inside.

    Otherwise XLA may divide a vector into unequal parts, if the leaves are divided. Of such a vector it returns wrong slices
    under `jax.vmap` (observed with jax 0.10.2).

    Args:
      on: the devices of a client, with no axis divided; None if each client has one device.

    >>> place = jax.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], "model"), jax.P())
    >>> with whole_vectors(place):
    ...     str(jax.make_jaxpr(flat)(jnp.ones([2, 3]))).count("sharding_constraint")
    1
    """
    token = _WHOLE.set(on)
    try:
        yield
    finally:
        _WHOLE.reset(token)


def _whole(vector: jax.Array) -> jax.Array:
    on = _WHOLE.get()
    return vector if on is None else jax.lax.with_sharding_constraint(vector, on)


def psum(a: Tree, axis: str) -> Tree:
    """Sums over the devices of ``axis``, inside `jax.shard_map`, like `jax.lax.psum`, but joins small leaves into one array.

    Leaves are numbers or arrays of any shape. Leaves of one dtype with up to 65,536 elements, or between processes on CPUs with
    any number, are summed as one array, unless they may be divided over further axes of the mesh: these are summed where they
    are. Sums have the shapes and dtypes of the leaves, except that sums of ``bool`` are ``int32``.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "devices")
    >>> total = jax.shard_map(lambda x: psum(x, "devices"), mesh=mesh, in_specs=jax.P("devices"), out_specs=jax.P())
    >>> [leaf.tolist() for leaf in total((jnp.ones(2), jnp.ones(3)))]
    [[1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    if jax.lax.axis_size(axis) == 1:
        return jax.lax.psum(a, axis)
    # On a CPU, each array costs a synchronization of the devices, as long as adding tens of thousands of numbers takes. Between
    # processes this takes longer than copying any array.
    largest = math.inf if _is_between_cpu_processes() else _SMALL
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, a))
    small: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.size <= largest and not _is_divided_further(axis):
            small.setdefault(leaf.dtype, []).append(index)
    groups = [indices for indices in small.values() if len(indices) > 1]
    joined = [flat([leaves[index] for index in indices]) for indices in groups]
    separate = sorted(set(range(len(leaves))).difference(*groups))
    sums, separate_sums = _all_reduced((joined, [leaves[index] for index in separate]), axis)
    for index, leaf in zip(separate, separate_sums, strict=True):
        leaves[index] = leaf
    for indices, vector in zip(groups, sums, strict=True):
        for index, leaf in zip(indices, unflat(vector, [leaves[index] for index in indices]), strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)


def _is_divided_further(axis: str) -> bool:
    """Returns whether arrays on a device of ``axis`` may be divided over further devices."""
    # A round is traced without the mesh that it runs on.
    return _WHOLE.get() is not None or jax.sharding.get_abstract_mesh().size > jax.lax.axis_size(axis)


def _is_between_cpu_processes() -> bool:
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def _all_reduced(arrays: Tree, axis: str) -> Tree:
    """`jax.lax.psum`, with the bits of one process also where CPU devices belong to several.

    Within a process, XLA's CPU devices add in the order of the devices. Between processes they add each part of an array in
    another order. So each device then adds one part of the array, in order.
    """
    if not _is_between_cpu_processes() or _is_divided_further(axis):
        return jax.lax.psum(arrays, axis)

    def in_order(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jax.lax.psum(x, axis)
        devices = jax.lax.axis_size(axis)
        parts = jnp.pad(x.ravel(), (0, -x.size % devices)).reshape(devices, -1)
        own, *others = jax.lax.all_to_all(parts, axis, 0, 0)
        for of_device in others:
            own = own + of_device
        return jax.lax.all_gather(own, axis, tiled=True)[: x.size].reshape(x.shape)

    return jax.tree.map(in_order, arrays)


def dot(a: Tree, b: Tree) -> jax.Array:
    """Returns the sum of products over all leaves, a ``float32`` scalar.

    Raises:
      ValueError: leaves have different shapes.

    >>> float(dot({"w": jnp.array([3.0, 4.0])}, {"w": jnp.array([1.0, 2.0])}))
    11.0
    """

    def of_leaves(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
        if x.shape != y.shape:
            raise ValueError(f"Expected leaves of equal shapes, got {x.shape} and {y.shape}.")
        return jnp.tensordot(x, y, x.ndim)

    return sum(jax.tree.leaves(jax.tree.map(of_leaves, a, b)), jnp.zeros((), jnp.float32))


def squared_norm(a: Tree) -> jax.Array:
    """Returns the sum of squares over all leaves, a ``float32`` scalar; of a complex number, those of both parts.

    >>> float(squared_norm({"w": jnp.array([3.0, 4.0])})), float(squared_norm(3 + 4j))
    (25.0, 25.0)
    """
    parts = jax.tree.map(lambda x: (jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else x, a)
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parts)
    # Without a reshape, an array that is divided over devices stays where it is. An array times itself is read only once.
    squares = jax.tree.map(lambda x: jnp.tensordot(x, x, x.ndim), wide)
    return sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float32))


def root(squares: jax.Array) -> jax.Array:
    """Returns the square root of each number, a float ``[...]``. Its derivative at 0 is 0 and not infinite.

    With an infinite derivative, that of whatever depends on the root would be NaN, even where the root is multiplied by 0.

    >>> jax.vmap(jax.value_and_grad(root))(jnp.array([0.0, 4.0]))
    (Array([0., 2.], dtype=float32), Array([0.  , 0.25], dtype=float32))
    """
    is_zero = squares == 0
    return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, squares)))


def clip(a: Tree, norm: float) -> Tree:
    """Returns ``a`` times min(1, norm / ‖a‖), with the Euclidean norm over all leaves, which are floats.

    Leaves keep their dtypes. Those in half precision are multiplied in ``float32`` and then rounded, which may change the norm
    by up to the rounding error of a number: 0.4 % in ``bfloat16``, 0.05 % in ``float16``.

    >>> [round(x, 4) for x in clip({"w": jnp.array([3.0, 4.0])}, 1.0)["w"].tolist()]
    [0.6, 0.8]
    """
    squares = squared_norm(a)
    length = jnp.sqrt(jnp.where(squares == 0, 1, squares))  # The derivative of the root is infinite at 0.
    factor = jnp.where((squares > 0) & (length > norm), norm / length, 1)

    def of_leaf(x: Any) -> jax.Array:  # A rounded factor would change all elements in the same direction.
        wide = jnp.asarray(x).astype(np.promote_types(jnp.result_type(x), np.float32))
        return (wide * factor.astype(wide.dtype)).astype(jnp.result_type(x))

    return jax.tree.map(of_leaf, a)


def per_row(values: jax.Array, x: jax.Array) -> jax.Array:
    """Returns values ``[n]`` as ``[n, 1, ...]`` with as many axes as x, in order to scale or choose its rows.

    >>> per_row(jnp.arange(3), jnp.zeros([3, 4, 5])).shape
    (3, 1, 1)
    """
    return values.reshape(-1, *[1] * (x.ndim - 1))


def select(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """Returns ``yes`` if the scalar ``condition`` is true, else ``no``; NaNs in the other one have no effect.

    >>> float(select(jnp.array(False), {"w": jnp.nan}, {"w": 1.0})["w"])
    1.0
    """
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def after(a: Tree, b: Tree) -> Tree:
    """Returns ``a`` unchanged, bit for bit, with a data dependency on ``b``, so that it is available only after ``b``.

    Use it before overwriting an array that ``b`` is computed from. Both may have leaves of any shapes; the leaves of ``a`` are
    numbers or arrays.

    XLA updates an array in place only if all reads of the old value must happen first, and copies it otherwise. Only data
    dependencies decide this: on a CPU, `jax.lax.optimization_barrier` is removed before. Therefore ``a`` is made to depend on a
    condition on the first number of each floating-point leaf of ``b`` that is never true but that XLA cannot simplify. All of
    ``b`` is available at the same time as these numbers.

    >>> float(after(jnp.float32(1), {"w": jnp.array([jnp.nan])}))
    1.0
    """
    never = jnp.bool_(False)
    for leaf in jax.tree.leaves(b):
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact):
            first = leaf.ravel()[0]
            never |= (first != first) & (first == first)  # XLA does not simplify this, because of NaN.
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), a)


def is_float(leaf: Any) -> bool:
    """Returns whether a leaf, or a `jax.ShapeDtypeStruct`, has a floating-point dtype.

    >>> is_float(jnp.zeros(2, jnp.bfloat16)), is_float(jax.ShapeDtypeStruct((), jnp.int32))
    (True, False)
    """
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def shapes(a: Tree) -> Tree:
    """Returns the shape and the dtype of every leaf, as `jax.ShapeDtypeStruct`.

    >>> shapes({"w": jnp.zeros(2)})
    {'w': ShapeDtypeStruct(shape=(2,), dtype=float32)}
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), a)


def num_bits(a: Tree) -> int:
    """Returns the size of all leaves in bits, from their shapes and dtypes; a PRNG key has the size of its words.

    >>> num_bits({"w": jnp.zeros([3, 4]), "b": jnp.zeros(4, jnp.bfloat16)})
    448
    """

    def bits(leaf: Any) -> int:
        words = jax.eval_shape(jax.random.key_data, leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return words.size * words.dtype.itemsize * 8

    return sum(map(bits, jax.tree.leaves(a)))


def most_bits(plain: int, *, compressed: bool) -> int:
    """Returns the largest size of a message in bits, from that of what is sent.

    A compressed message may be larger, for example with the places of all values, but for parameters of 32 bits not twice as
    large.

    >>> most_bits(96, compressed=False), most_bits(96, compressed=True)
    (96, 192)
    """
    return 2 * plain if compressed else plain


def bits_dtype(most: int) -> Any:
    """Returns the dtype for numbers of bits up to ``most``: ``uint32`` (exact) below 2**32, else ``float32`` (rounded).

    So the bits of a model with 134 million parameters or more are counted to seven digits, and never overflow. If messages are
    compressed, this holds from 67 million on, because a message may be larger than what it compresses. The choice is static,
    because ``most`` is known from shapes; `add_bits` makes the same choice.

    >>> bits_dtype(2**32 - 1).__name__, bits_dtype(2**32).__name__
    ('uint32', 'float32')
    """
    return jnp.uint32 if most < 2**32 else jnp.float32


def add_bits(*counts: Any, most: int = 0) -> jax.Array:
    """Returns the sum of numbers of bits, each an ``int`` or an array.

    The dtype is that of `bits_dtype` for ``most``, or ``float32`` if one of the arrays is ``float32``.

    >>> add_bits(32, jnp.uint32(10), most=100), add_bits(2**32, jnp.uint32(10), most=2**32 + 100)
    (Array(42, dtype=uint32), Array(4.2949673e+09, dtype=float32))
    """
    rounded = any(jnp.issubdtype(x.dtype, jnp.floating) for x in counts if not isinstance(x, int))
    dtype = jnp.float32 if rounded else bits_dtype(most)
    return sum((jnp.asarray(x).astype(dtype) if hasattr(x, "dtype") else jnp.asarray(x, dtype) for x in counts), dtype(0))


def strong(a: Tree) -> Tree:
    """Returns a pytree of arrays whose dtypes are not weak, so that a step of a loop does not change them.

    >>> jnp.asarray(1.0).weak_type, strong(jnp.asarray(1.0)).weak_type
    (True, False)
    """

    def of_leaf(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x

    return jax.tree.map(of_leaf, a)


def merge(*parts: Tree) -> Tree:
    """Returns the pytree whose leaves are those of all parts. Every part has None in place of the leaves of the others.

    >>> merge({"w": 1.0, "b": None}, {"w": None, "b": 2.0})
    {'b': 2.0, 'w': 1.0}
    """

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    return jax.tree.map(first, *parts, is_leaf=lambda x: x is None)


def add_where(a: Tree, b: Tree) -> Tree:
    """Returns ``a + b``, and ``a`` where ``b`` has None.

    >>> add_where({"w": 1.0, "b": 2.0}, {"w": 3.0, "b": None})
    {'b': 2.0, 'w': 4.0}
    """
    return jax.tree.map(lambda y, x: x if y is None else x + y, b, a, is_leaf=lambda x: x is None)


def masked(a: Tree, like: Tree, *, inverted: bool = False) -> Tree:
    """Returns ``a`` with None in place of the leaves that are None in ``like``; ``inverted``: that are not None in it.

    >>> masked({"w": 1.0, "b": 2.0}, {"w": 3.0, "b": None}), masked({"w": 1.0, "b": 2.0}, {"w": 3.0, "b": None}, inverted=True)
    ({'b': None, 'w': 1.0}, {'b': 2.0, 'w': None})
    """

    def of_leaf(mark: Any, x: Any) -> Any:
        return x if (mark is None) == inverted else None

    return jax.tree.map(of_leaf, like, a, is_leaf=lambda x: x is None)
