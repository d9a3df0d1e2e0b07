"""Arithmetic on pytrees of arrays, the little of it that federated algorithms need."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

_SMALL = 2**16  # elements of a leaf that `psum` sends beside others


def add(a: Tree, b: Tree) -> Tree:
    """``a + b``, leaf by leaf.

    >>> add({"w": 1.0}, {"w": 2.0})
    {'w': 3.0}
    """
    return jax.tree.map(lambda x, y: x + y, a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    """``a - b``, leaf by leaf.

    >>> subtract({"w": 1.0}, {"w": 2.0})
    {'w': -1.0}
    """
    return jax.tree.map(lambda x, y: x - y, a, b)


def scale(a: Tree, factor: jax.Array | float) -> Tree:
    """``factor * a``, leaf by leaf, in each leaf's dtype.

    >>> scale({"w": jnp.array([3.0])}, 2)["w"].tolist()
    [6.0]
    """
    return jax.tree.map(lambda x: x * jnp.asarray(factor, jnp.result_type(x)), a)


def pulled(slope: Tree, strength: jax.Array | float, a: Tree, b: Tree) -> Tree:
    """``slope + strength * (a - b)``: the gradient at ``a`` of a loss of this slope plus ``strength / 2 * ||a - b||²``.

    In each leaf's dtype, and compiled in one pass; the distance itself takes one for the difference and one for its norm.

    >>> float(pulled({"w": 1.0}, 0.5, {"w": 6.0}, {"w": 2.0})["w"])
    3.0
    """
    return add(slope, scale(subtract(a, b), strength))


def flat(a: Tree, length: int | None = None) -> jax.Array:
    """All elements of all leaves in one vector ``[size]``, in the order of `jax.tree.leaves`, in their common dtype.

    Or ``[length]``, if that is given and more: with zeros behind.

    >>> flat({"b": jnp.array([1.0]), "w": jnp.array([[2.0], [3.0]])}, 5).tolist()
    [1.0, 2.0, 3.0, 0.0, 0.0]
    """
    leaves = [jnp.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(a)]
    dtype = jnp.result_type(*leaves) if leaves else jnp.float32
    size = sum(leaf.size for leaf in leaves)
    # Not a concatenation, and no zeros to write on: XLA makes one with what comes before or after. It then reads each leaf
    # beyond its end, masked, and where memory ends there, that takes fifty times as long on a CPU.
    vector = jnp.maximum(size - jnp.arange(max(size, length or 0)), 0).astype(dtype)
    at = 0
    for leaf in leaves:
        vector = jax.lax.dynamic_update_slice(vector, leaf.astype(dtype), (at,))
        at += leaf.size
    return vector


def unflat(vector: jax.Array, like: Tree) -> Tree:
    """The elements of a vector that `flat` made, in the structure and shapes of ``like``, all in the vector's dtype.

    Leaves of ``like`` need a shape and nothing else; what the vector has behind their elements is left out.

    >>> [leaf.tolist() for leaf in unflat(jnp.arange(4), (jnp.zeros(()), jnp.zeros([1, 2])))]
    [0, [[1, 2]]]
    """
    leaves, structure = jax.tree.flatten(like)
    at = 0
    for i, leaf in enumerate(leaves):
        size = math.prod(leaf.shape)
        leaves[i], at = vector[at : at + size].reshape(leaf.shape), at + size
    return jax.tree.unflatten(structure, leaves)


def psum(a: Tree, axis: str) -> Tree:
    """Sums over the devices of ``axis``, inside a `jax.shard_map`: `jax.lax.psum`, with small leaves side by side in one.

    Leaves are numbers or arrays of any shape; those of up to 65,536 elements and one dtype travel together. Sums have their
    shapes and dtypes, but of ``bool`` they are ``int32``.

    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "devices")
    >>> total = jax.shard_map(lambda x: psum(x, "devices"), mesh=mesh, in_specs=jax.P("devices"), out_specs=jax.P())
    >>> [leaf.tolist() for leaf in total((jnp.ones(2), jnp.ones(3)))]
    [[1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    if jax.lax.axis_size(axis) == 1:
        return jax.lax.psum(a, axis)
    # A CPU's devices meet once for every array, which takes as long as adding tens of thousands of numbers.
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, a))
    small: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if leaf.size <= _SMALL:
            small.setdefault(leaf.dtype, []).append(place)
    groups = [places for places in small.values() if len(places) > 1]
    joined = [flat([leaves[place] for place in places]) for places in groups]
    alone = sorted(set(range(len(leaves))).difference(*groups))
    sums, of_alone = jax.lax.psum((joined, [leaves[place] for place in alone]), axis)
    for place, leaf in zip(alone, of_alone, strict=True):
        leaves[place] = leaf
    for places, vector in zip(groups, sums, strict=True):
        for place, leaf in zip(places, unflat(vector, [leaves[place] for place in places]), strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def dot(a: Tree, b: Tree) -> jax.Array:
    """Sum of products over all leaves, a ``float32`` scalar; ``ValueError`` where leaves are of different shapes.

    >>> float(dot({"w": jnp.array([3.0, 4.0])}, {"w": jnp.array([1.0, 2.0])}))
    11.0
    """

    def of_leaves(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
        if x.shape != y.shape:
            raise ValueError(f"Expected leaves of equal shapes, got {x.shape} and {y.shape}.")
        return jnp.vdot(x, y)

    return sum(jax.tree.leaves(jax.tree.map(of_leaves, a, b)), jnp.zeros((), jnp.float32))


def squared_norm(a: Tree) -> jax.Array:
    """Sum of squares over all leaves, a ``float32`` scalar.

    >>> float(squared_norm({"w": jnp.array([3.0, 4.0])}))
    25.0
    """
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), a)
    squares = jax.tree.map(lambda x: jnp.vdot(x, x), wide)  # `vdot` of an array with itself is the fastest way to read it once.
    return sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float32))


def select(condition: jax.Array, yes: Tree, no: Tree) -> Tree:
    """``yes`` where the scalar ``condition`` holds, else ``no``; a NaN on the side not taken does no harm.

    >>> float(select(jnp.array(False), {"w": jnp.nan}, {"w": 1.0})["w"])
    1.0
    """
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def after(a: Tree, b: Tree) -> Tree:
    """``a`` as it is, to the bit, and not before ``b`` is known: for who overwrites what ``b`` is computed from.

    Both may have leaves of any shapes; those of ``a`` are numbers or arrays.

    XLA writes in place where all that reads the old value must come first, and copies that value where it only may. What must
    is a matter of data alone: on a CPU `jax.lax.optimization_barrier` is gone by then. So ``a`` asks the first number of each
    floating-point leaf of ``b`` for what none can be; all of ``b`` is then there at the same time.

    >>> float(after(jnp.float32(1), {"w": jnp.array([jnp.nan])}))
    1.0
    """
    never = jnp.bool_(False)
    for leaf in jax.tree.leaves(b):
        leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact):
            first = leaf.ravel()[0]
            never |= (first != first) & (first == first)  # XLA does not know that of a NaN.
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), a)


def is_float(leaf: Any) -> bool:
    """Whether a leaf, or its shape and dtype, is of floating-point numbers.

    >>> is_float(jnp.zeros(2, jnp.bfloat16)), is_float(jax.ShapeDtypeStruct((), jnp.int32))
    (True, False)
    """
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def num_bits(a: Tree) -> int:
    """Size of all leaves in bits, by their shapes and dtypes; a PRNG key counts for its words.

    >>> num_bits({"w": jnp.zeros([3, 4]), "b": jnp.zeros(4, jnp.bfloat16)})
    448
    """

    def bits(leaf: Any) -> int:
        words = jax.eval_shape(jax.random.key_data, leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return words.size * words.dtype.itemsize * 8

    return sum(map(bits, jax.tree.leaves(a)))


def bits_dtype(most: int) -> Any:
    """What a number of up to ``most`` bits is kept in: ``uint32``, exact, if it is below 2**32, else ``float32``, rounded.

    So a model of 134 million parameters or more is counted to seven digits, and its bits never overflow. The choice is static:
    ``most`` is told from shapes, and all that counts bits (`add_bits`) goes by it.

    >>> bits_dtype(2**32 - 1).__name__, bits_dtype(2**32).__name__
    ('uint32', 'float32')
    """
    return jnp.uint32 if most < 2**32 else jnp.float32


def add_bits(*counts: Any, most: int = 0) -> jax.Array:
    """The sum of numbers of bits, each an ``int`` or an array: in the dtype for up to ``most``, and in ``float32`` if one is.

    >>> add_bits(32, jnp.uint32(10), most=100), add_bits(2**32, jnp.uint32(10), most=2**32 + 100)
    (Array(42, dtype=uint32), Array(4.2949673e+09, dtype=float32))
    """
    rounded = any(jnp.issubdtype(x.dtype, jnp.floating) for x in counts if not isinstance(x, int))
    dtype = jnp.float32 if rounded else bits_dtype(most)
    return sum((jnp.asarray(x).astype(dtype) if hasattr(x, "dtype") else jnp.asarray(x, dtype) for x in counts), dtype(0))
