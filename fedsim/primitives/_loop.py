"""`bounded_loop`: a loop with a traced number of steps that also has reverse-mode derivatives.

`jax.lax.fori_loop` with a traced number of steps has no reverse mode, because JAX cannot reserve memory for a number of states
that it does not know. `jax.lax.scan` has one, but always takes its full length. `bounded_loop` gets two numbers: how many
steps to take, and a static bound for which memory is reserved. So every client takes exactly its own steps, also in the
backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from fedsim import tree
from fedsim.primitives._closed import closed, with_axes, zeros

T = TypeVar("T")
Arrays = list[Any]

# Up to this many steps, all states are stored for the backward pass. Beyond, about sqrt(steps) of them are.
_ALL_STATES = 32


def bounded_loop(num_steps: Any, body: Callable[[jax.Array, T], T], state: T, *, most_steps: int | None = None) -> T:
    """Returns ``state`` after ``state = body(t, state)`` for ``t = 0, ..., num_steps - 1``.

    All transformations of JAX apply. Under `jax.vmap`, lanes with different numbers of steps run in lockstep: the loop takes as
    many steps as the longest lane, and a lane that is done keeps its state. For reverse mode, the states before all steps are
    stored if there are at most 32. Otherwise about ``sqrt(most_steps)`` of them are stored and the others are computed again.
    Leaves whose values the derivative does not need, such as sums, are never stored.

    Args:
      num_steps: the number of steps, ``int32 []``, traced or not.
      body: takes the index of the step, ``int32 []``, and a state, and returns the next state.
      state: the state before the first step, a pytree of arrays. Every state has its structure, shapes and dtypes.
      most_steps: a bound on the number of steps, at least 1, which only reverse mode needs. A traced ``num_steps`` that is
        larger is cut to it.

    Raises:
      TypeError: ``body`` returns a state of another structure, shape or dtype, or ``num_steps`` is not an integer.
      ValueError: ``num_steps`` is larger than ``most_steps``, or in reverse mode, if ``most_steps`` is None.

    >>> def power(base, exponent):
    ...     return bounded_loop(exponent, lambda t, product: product * base, jnp.float32(1), most_steps=10)
    >>> [float(jax.grad(power)(jnp.float32(2), n)) for n in (0, 1, 3)]
    [0.0, 1.0, 12.0]
    """
    if not any(jnp.issubdtype(jnp.result_type(num_steps), kind) for kind in (np.integer, np.bool_)):
        raise TypeError(f"Expected num_steps to be an integer, got {num_steps} of {jnp.result_type(num_steps)}.")
    if most_steps is not None:
        if most_steps < 1:
            raise ValueError(f"Expected most_steps >= 1, got most_steps={most_steps}.")
        if not isinstance(num_steps, jax.core.Tracer) and np.max(num_steps) > most_steps:
            raise ValueError(f"Expected num_steps <= most_steps={most_steps}, got num_steps={num_steps}: use a larger bound.")
        num_steps = jnp.minimum(jnp.asarray(num_steps, jnp.int32), most_steps)
    state = tree.strong(state)
    leaves, structure = jax.tree.flatten(state)

    def step(*leaves_and_t: jax.Array) -> Arrays:
        *leaves, t = leaves_and_t
        new, new_structure = jax.tree.flatten(body(t, jax.tree.unflatten(structure, leaves)))
        if new_structure != structure:  # type: ignore[operator]
            raise TypeError(f"Expected a step to return a state like the first one, {structure}, got {new_structure}.")
        return tree.strong(new)

    jaxpr, consts = closed(step, [*leaves, jnp.int32(0)])
    for before, after, (path, _) in zip(leaves, jaxpr.out_avals, jax.tree_util.tree_leaves_with_path(state), strict=True):
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            raise TypeError(
                f"Expected a step to return a state like the first one, with state{jax.tree_util.keystr(path)} of "
                f"{before.dtype}{list(before.shape)}, got {after.dtype}{list(after.shape)}."
            )
    loop = _Loop(jaxpr, len(consts), most_steps)
    return jax.tree.unflatten(structure, loop.bind(num_steps, consts, leaves))


def _buffer(length: int, like: Any) -> jax.Array:
    """Returns memory for ``length`` values."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(like, (length, *like.shape))
    return zeros(with_axes(jax.typeof(like), length))


@dataclasses.dataclass(frozen=True)
class _Loop:
    """What is static in a loop.

    Attributes:
      jaxpr: one step, from ``(*consts, *leaves, t)`` to the next leaves of the state.
      num_consts: the number of constants: values from outside the loop.
      most_steps: a bound on the number of steps, or None.
    """

    jaxpr: ClosedJaxpr
    num_consts: int
    most_steps: int | None

    def bind(self, num_steps: Any, consts: Sequence[Any], leaves: Sequence[Any]) -> Arrays:
        return _loop_p.bind(jnp.asarray(num_steps, jnp.int32), *consts, *leaves, **vars(self))

    def split(self, values: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """Splits values into those of constants and those of leaves."""
        return list(values[: self.num_consts]), list(values[self.num_consts :])

    def step(self, t: jax.Array, consts: Sequence[Any], leaves: Sequence[Any]) -> Arrays:
        return jaxpr_as_fun(self.jaxpr)(*consts, *leaves, t)

    @property
    def avals(self) -> Arrays:
        """The shapes and dtypes of constants and leaves."""
        return [var.aval for var in self.jaxpr.jaxpr.invars[:-1]]

    @property
    def interval(self) -> int:
        """The number of steps between two states that are stored for the backward pass."""
        if self.most_steps is None:
            raise ValueError(
                "Reverse-mode derivatives of a loop need a bound on its number of steps: pass most_steps to bounded_loop, or "
                "use fedsim.differentiable(algorithm)."
            )
        return 1 if self.most_steps <= _ALL_STATES else math.isqrt(self.most_steps)

    def reached(self, marks: Sequence[bool], only: Callable[[Any], bool] = lambda aval: True) -> list[bool]:
        """Returns which leaves depend on the marked constants and leaves, after any number of steps.

        Args:
          marks: for each constant and leaf, whether it is marked.
          only: which values may carry the dependence.
        """
        jaxpr = self.jaxpr.jaxpr
        of_consts, leaves = self.split(marks)
        while True:
            marked = {var for var, mark in zip(jaxpr.invars[:-1], (*of_consts, *leaves), strict=True) if mark}
            for equation in jaxpr.eqns:
                if any(not isinstance(var, Literal) and var in marked for var in equation.invars):
                    marked.update(var for var in equation.outvars if only(var.aval))
            now = [not isinstance(var, Literal) and var in marked for var in jaxpr.outvars]
            after = [mark or new for mark, new in zip(leaves, now, strict=True)]
            if after == leaves:
                return leaves
            leaves = after

    def batched(self, axis: Any, steps_differ: bool, marks: Sequence[bool]) -> tuple[_Loop, list[bool]]:
        """Returns the loop of many lanes, and which leaves of its state have an axis of lanes, their first.

        Args:
          axis: the axis of lanes, as JAX describes it to batching rules.
          steps_differ: whether the lanes have their own numbers of steps, which then are the first constant, ``int32 [lanes]``.
          marks: for each constant and leaf, whether it has an axis of lanes.
        """
        of_consts, _ = self.split(marks)
        of_leaves = [True] * (len(marks) - len(of_consts)) if steps_differ else self.reached(marks)
        marks = *of_consts, *of_leaves

        def of_lane(t: jax.Array, own_steps: Any, *values: jax.Array) -> Arrays:
            if own_steps is None:
                return self.step(t, *self.split(values))
            runs = t < own_steps
            # A lane that is done computes a step, too, whose derivative may be infinite, and NaN where it is multiplied by 0.
            used = values if self.most_steps is None else tree.select(runs, values, jax.lax.stop_gradient(values))
            return tree.select(runs, self.step(t, *self.split(used)), self.split(values)[1])

        of_lanes = jax.vmap(
            of_lane,
            in_axes=(None, 0 if steps_differ else None, *_axes(marks)),
            out_axes=_axes(of_leaves),
            axis_size=axis.size,
            axis_name=axis.name,
            spmd_axis_name=axis.spmd_name,
        )

        def step(*values_and_t: jax.Array) -> Arrays:
            *values, t = values_and_t
            return of_lanes(t, *values) if steps_differ else of_lanes(t, None, *values)

        shapes = [with_axes(aval, axis.size) if mark else with_axes(aval) for aval, mark in zip(self.avals, marks, strict=True)]
        if steps_differ:
            shapes.insert(0, jax.ShapeDtypeStruct((axis.size,), jnp.int32))
        jaxpr = jax.make_jaxpr(step)(*shapes, jnp.int32(0))
        return _Loop(jaxpr, self.num_consts + steps_differ, self.most_steps), of_leaves


def _axes(marks: Sequence[bool]) -> list[int | None]:
    return [0 if mark else None for mark in marks]


# ---- The loop itself.

_loop_p = Primitive("bounded_loop")
_loop_p.multiple_results = True


def _run(num_steps: jax.Array, *values: jax.Array, **static: Any) -> Arrays:
    loop = _Loop(**static)
    consts, leaves = loop.split(values)
    return jax.lax.fori_loop(0, num_steps, lambda t, leaves: loop.step(t, consts, leaves), leaves)


@_loop_p.def_effectful_abstract_eval
def _loop_avals(num_steps: Any, *values: Any, **static: Any) -> tuple[Arrays, Any]:
    loop = _Loop(**static)
    return loop.split(values)[1], loop.jaxpr.effects


def _loop_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], **static: Any) -> tuple[Arrays, list[Any]]:
    (num_steps, *values), (steps_differ, *marks) = _lanes_first(args, dims)
    loop, of_leaves = _Loop(**static).batched(axis, steps_differ, marks)
    consts, leaves = _Loop(**static).split(values)
    leaves = [
        leaf if mark == now else _copies(leaf, axis)
        for leaf, mark, now in zip(leaves, marks[len(consts) :], of_leaves, strict=True)
    ]
    if steps_differ:
        num_steps, consts = jnp.max(num_steps, initial=0), [num_steps, *consts]
    return loop.bind(num_steps, consts, leaves), _axes(of_leaves)


def _lanes_first(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Arrays, list[bool]]:
    """Moves the axis of lanes, where there is one, to the front; returns which arguments have one."""
    marks = [dim is not None for dim in dims]
    return [jnp.moveaxis(x, dim, 0) if mark else x for x, dim, mark in zip(args, dims, marks, strict=True)], marks


def _copies(x: Any, axis: Any) -> jax.Array:
    return jnp.broadcast_to(x, (axis.size, *jnp.shape(x)))


def _loop_jvp(primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> tuple[Arrays, Arrays]:
    """Runs the loop, and then `_tangent_p`, which is linear in the tangents and reads the states that the loop stored."""
    loop = _Loop(**static)
    num_steps, *values = primals
    moves = [type(tangent) is not ad.Zero for tangent in tangents[1:]]
    consts, leaves = loop.split(values)
    of_leaves = loop.reached(moves, only=_is_inexact)
    no_tangents = [ad.Zero(jax.typeof(leaf).to_tangent_aval()) for leaf in leaves]
    if not any(of_leaves):
        return loop.bind(num_steps, consts, leaves), no_tangents
    tangent = _Tangent(loop, (*loop.split(moves)[0], *of_leaves))
    stored: Arrays = []
    if loop.most_steps is None:
        after = loop.bind(num_steps, consts, leaves)
    else:
        after, stored = tangent.run_and_store(num_steps, consts, leaves)
    moving = [ad.instantiate_zeros(dot) for dot, mark in zip(tangents[1:], tangent.marks, strict=True) if mark]
    moved = iter(tangent.bind(num_steps, values, stored, moving))
    return after, [next(moved) if mark else zero for mark, zero in zip(of_leaves, no_tangents, strict=True)]


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


_loop_p.def_impl(lambda *args, **static: jax.jit(functools.partial(_run, **static))(*args))
mlir.register_lowering(_loop_p, mlir.lower_fun(_run, multiple_results=True))
batching.fancy_primitive_batchers[_loop_p] = _loop_batch
ad.primitive_jvps[_loop_p] = _loop_jvp


# ---- Its derivative.

_tangent_p = Primitive("bounded_loop_tangent")
_tangent_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class _Tangent:
    """What is static in the derivative of a loop.

    Attributes:
      loop: the loop.
      marks: for each constant and leaf, whether it has a tangent.
    """

    loop: _Loop
    marks: tuple[bool, ...]

    def bind(self, num_steps: jax.Array, values: Sequence[Any], stored: Sequence[Any], tangents: Sequence[Any]) -> Arrays:
        return _tangent_p.bind(num_steps, *values, *stored, *tangents, loop=self.loop, marks=self.marks)

    def split(self, args: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays]:
        """Splits arguments into constants with leaves, stored states, and tangents."""
        values, num_tangents = len(self.marks), sum(self.marks)
        return list(args[:values]), list(args[values : len(args) - num_tangents]), list(args[len(args) - num_tangents :])

    @property
    def moving_leaves(self) -> list[int]:
        """The leaves that have a tangent."""
        return [i for i, mark in enumerate(self.loop.split(self.marks)[1]) if mark]

    def step(self, t: jax.Array, values: Sequence[Any], moving: Sequence[Any]) -> Arrays:
        """Returns the moving leaves after a step, as a function of the moving constants and leaves."""
        new = iter(moving)
        consts, leaves = self.loop.split([next(new) if mark else x for x, mark in zip(values, self.marks, strict=True)])
        after = self.loop.step(t, consts, leaves)
        return [after[i] for i in self.moving_leaves]

    def moving(self, values: Sequence[Any]) -> Arrays:
        return [x for x, mark in zip(values, self.marks, strict=True) if mark]

    @functools.cached_property
    def needed(self) -> list[int]:
        """The leaves whose values before a step the derivative of the step depends on, and those that determine them."""
        avals, num_consts = self.loop.avals, self.loop.num_consts
        shapes = [with_axes(aval) for aval in avals]

        def derivative(t: jax.Array, values: Arrays, tangents: Arrays) -> Arrays:
            return jax.jvp(lambda *moving: self.step(t, values, moving), tuple(self.moving(values)), tuple(tangents))[1]

        jaxpr = jax.make_jaxpr(derivative)(jnp.int32(0), shapes, self.moving(shapes))
        used = pe.dce_jaxpr(jaxpr.jaxpr, True)[1][1 + num_consts : 1 + len(avals)]
        while True:
            before = pe.dce_jaxpr(self.loop.jaxpr.jaxpr, list(used))[1][num_consts:-1]
            both = [a or b for a, b in zip(used, before, strict=True)]
            if both == list(used):
                return [i for i, mark in enumerate(both) if mark]
            used = both

    def run_and_store(self, num_steps: jax.Array, consts: Arrays, leaves: Arrays) -> tuple[Arrays, Arrays]:
        """Runs the loop; also returns the needed leaves before every ``interval``-th step, ``[most_steps / interval, ...]``."""
        loop, interval = self.loop, self.loop.interval
        assert loop.most_steps is not None
        segments = -(-loop.most_steps // interval)
        buffers = [_buffer(segments, leaves[i]) for i in self.needed]

        def segment(s: jax.Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            leaves, buffers = carry
            buffers = [buffer.at[s].set(leaves[i]) for buffer, i in zip(buffers, self.needed, strict=True)]
            first = s * interval
            return self._several(first, jnp.minimum(num_steps - first, interval), consts, leaves), buffers

        return bounded_loop(-(-num_steps // interval), segment, (leaves, buffers), most_steps=segments)

    def _several(self, first: jax.Array, count: jax.Array, consts: Arrays, leaves: Arrays) -> Arrays:
        loop = self.loop
        if loop.interval == 1:
            return loop.step(first, consts, leaves)
        return bounded_loop(count, lambda i, leaves: loop.step(first + i, consts, leaves), leaves, most_steps=loop.interval)

    def pull_back(self, num_steps: jax.Array, values: Arrays, stored: Arrays, cotangents: Arrays) -> Arrays:
        """Returns the cotangents of the moving constants and leaves."""
        loop, interval = self.loop, self.loop.interval
        assert loop.most_steps is not None
        consts, start = loop.split(values)
        Cotangents = tuple[Arrays, Arrays]  # of constants, a sum over the steps; of leaves

        def filled(needed: Arrays) -> Arrays:
            leaves = list(start)  # The values of leaves that are not needed have no effect.
            for i, leaf in zip(self.needed, needed, strict=True):
                leaves[i] = leaf
            return leaves

        def one(t: jax.Array, needed: Arrays, carry: Cotangents) -> Cotangents:
            of_consts, of_leaves = carry
            at = [*consts, *filled(needed)]
            _, transpose = jax.vjp(lambda *moving: self.step(t, at, moving), *self.moving(at))
            pulled = transpose(of_leaves)
            return tree.add(of_consts, list(pulled[: len(of_consts)])), list(pulled[len(of_consts) :])

        def segment(i: jax.Array, carry: Cotangents) -> Cotangents:
            s = num_segments - 1 - i
            first = s * interval
            needed = [buffer[s] for buffer in stored]
            if interval == 1:
                return one(first, needed, carry)
            count = jnp.minimum(num_steps - first, interval)
            buffers = [_buffer(interval, leaf) for leaf in needed]

            def store(j: jax.Array, state: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
                needed, buffers = state
                buffers = [buffer.at[j].set(leaf) for buffer, leaf in zip(buffers, needed, strict=True)]
                after = loop.step(first + j, consts, filled(needed))
                return [after[i] for i in self.needed], buffers

            _, buffers = bounded_loop(count, store, (needed, buffers), most_steps=interval)

            def back(j: jax.Array, carry: Cotangents) -> Cotangents:
                last = count - 1 - j
                return one(first + last, [buffer[last] for buffer in buffers], carry)

            return bounded_loop(count, back, carry, most_steps=interval)

        num_segments = -(-num_steps // interval)
        moving_consts = [aval for aval, mark in zip(loop.split(loop.avals)[0], self.marks, strict=False) if mark]
        start_of_sums = [zeros(aval) for aval in moving_consts]
        of_consts, of_leaves = bounded_loop(
            num_segments, segment, (start_of_sums, cotangents), most_steps=-(-loop.most_steps // interval)
        )
        return [*of_consts, *of_leaves]


def _tangent_run(num_steps: jax.Array, *args: Any, **static: Any) -> Arrays:
    tangent = _Tangent(**static)
    values, _, tangents = tangent.split(args)
    consts, leaves = tangent.loop.split(values)
    num_moving_consts = len(tangents) - len(tangent.moving_leaves)
    of_consts = tangents[:num_moving_consts]

    def step(t: jax.Array, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        leaves, dots = carry
        at = [*consts, *leaves]

        def both(*moving: Any) -> tuple[Arrays, Arrays]:
            new = iter(moving)
            now = [next(new) if mark else x for x, mark in zip(at, tangent.marks, strict=True)]
            after = tangent.loop.step(t, *tangent.loop.split(now))
            return [after[i] for i in tangent.moving_leaves], after

        _, moved, after = jax.jvp(both, tuple(tangent.moving(at)), (*of_consts, *dots), has_aux=True)
        return after, moved

    return bounded_loop(num_steps, step, (leaves, tangents[num_moving_consts:]), most_steps=tangent.loop.most_steps)[1]


@_tangent_p.def_effectful_abstract_eval
def _tangent_avals(num_steps: Any, *args: Any, **static: Any) -> tuple[Arrays, Any]:
    tangent = _Tangent(**static)
    _, _, tangents = tangent.split(args)
    return tangents[len(tangents) - len(tangent.moving_leaves) :], tangent.loop.jaxpr.effects


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> tuple[Arrays, Arrays]:
    num_linear = sum(static["marks"])
    if all(type(dot) is ad.Zero for dot in tangents[:-num_linear]):
        dots = [ad.instantiate_zeros(dot) for dot in tangents[-num_linear:]]
        return _tangent_p.bind(*primals, **static), _tangent_p.bind(*primals[:-num_linear], *dots, **static)
    moves = [type(dot) is not ad.Zero for dot in tangents]
    of_args = tuple(ad.instantiate_zeros(dot) for dot, mark in zip(tangents, moves, strict=True) if mark)

    def run(*moving: Any) -> Arrays:
        new = iter(moving)
        return _tangent_run(*[next(new) if mark else x for x, mark in zip(primals, moves, strict=True)], **static)

    return jax.jvp(run, tuple(x for x, mark in zip(primals, moves, strict=True) if mark), of_args)


def _tangent_transpose(cotangents: Sequence[Any], num_steps: jax.Array, *args: Any, **static: Any) -> list[Any]:
    tangent = _Tangent(**static)
    values, stored, tangents = tangent.split(args)
    pulled = tangent.pull_back(num_steps, values, stored, [ad.instantiate_zeros(x) for x in cotangents])
    of_tangents = [x if ad.is_undefined_primal(dot) else None for x, dot in zip(pulled, tangents, strict=True)]
    return [None] * (1 + len(values) + len(stored)) + of_tangents


def _tangent_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], **static: Any) -> tuple[Arrays, list[Any]]:
    """Gives every argument an axis of lanes."""
    tangent = _Tangent(**static)
    (num_steps, *rest), (steps_differ, *marks) = _lanes_first(args, dims)
    if not steps_differ and not any(marks):
        moved = _tangent_p.bind(*args, **static)
        return moved, [None] * len(moved)
    values, stored, tangents = tangent.split([x if mark else _copies(x, axis) for x, mark in zip(rest, marks, strict=True)])
    loop, _ = tangent.loop.batched(axis, steps_differ, [True] * len(values))
    new_marks = tangent.marks
    if steps_differ:
        num_steps, values, new_marks = jnp.max(num_steps, initial=0), [num_steps, *values], (False, *new_marks)
    batched = _Tangent(loop, new_marks)
    if loop.most_steps is not None:
        # The batched loop may need other leaves, so it stores its own.
        stored = batched.run_and_store(num_steps, *loop.split(values))[1]
    moved = batched.bind(num_steps, values, stored, tangents)
    return moved, [0] * len(moved)


_tangent_p.def_impl(lambda *args, **static: jax.jit(functools.partial(_tangent_run, **static))(*args))
mlir.register_lowering(_tangent_p, mlir.lower_fun(_tangent_run, multiple_results=True))
batching.fancy_primitive_batchers[_tangent_p] = _tangent_batch
ad.primitive_jvps[_tangent_p] = _tangent_jvp
ad.primitive_transposes[_tangent_p] = _tangent_transpose
