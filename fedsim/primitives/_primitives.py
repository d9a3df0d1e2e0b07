"""The JAX primitives behind `fedsim.primitives`, on arrays ``[size, ...]`` with one entry per client.

They are closed under differentiation: derivatives consist of the same primitives.

| primitive | result | derivative | its transpose |
| --- | --- | --- | --- |
| ``broadcast`` | n copies | ``broadcast`` | ``sum`` |
| ``sum`` | sum over clients | ``sum`` | ``broadcast`` |
| ``mean`` | mean over clients | ``mean`` | ``broadcast`` of 1/n |
| ``max``, ``min`` | of each element | mean over the clients that attain it | |
| ``map`` | each client's own function | ``map`` of the function's derivative | ``map`` of that derivative's transpose |
| ``reduce`` | another function of all clients' values | that of the function | its transpose |

A ``map`` has two kinds of arguments: those with one entry per client, and those that are ``shared``, which every client gets as
a whole. It has two kinds of results: those with one entry per client, and those that are ``summed`` over the clients. In a
transpose, the cotangent of a shared argument is a summed result, and that of a summed result is a shared argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from fedsim import tree
from fedsim.primitives._closed import closed, with_axes, zeros
from fedsim.primitives._placement import Placement, on_mesh

Arrays = list[Any]

# A function with one of these runs for one client after another on a CPU. Others are cheap, and XLA fuses them across clients.
_EXPENSIVE = {"dot_general", "conv_general_dilated", "while", "scan", "bounded_loop", "bounded_loop_tangent", "map", "sort"}

# A plain sum of so many float32 terms, one after another, can be wrong in the fourth digit.
_MANY_TERMS = 1000

# How JAX says that an array that a function closes over has a type of another mesh than the function's.
_OTHER_MESH = ("aval mesh", "mesh of sharding")


def _primitive(name: str, run: Callable[..., Any], avals: Callable[..., Any], batch: Callable[..., Any]) -> Primitive:
    """Returns a JAX primitive that is computed by ``run``, a function of arrays and of the primitive's static parameters."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    # Outside of jit, calls with the same parameters share a program.
    compiled = functools.lru_cache(maxsize=64)(lambda **static: jax.jit(functools.partial(run, **static)))
    primitive.def_impl(lambda *args, **static: compiled(**static)(*args))

    def types(*args: Any, **static: Any) -> tuple[Arrays, Any]:
        out, effects = avals(*args, **static)
        if static["placement"].is_explicit or any(x.sharding.mesh.explicit_axes for x in args):
            # The types say how arrays are divided. That is what the computation gives.
            out = [x.update(weak_type=False) for x in jax.make_jaxpr(functools.partial(run, **static))(*args).out_avals]
        return out, effects

    primitive.def_effectful_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))

    def batch_if_needed(axis: Any, args: Sequence[Any], dims: Sequence[Any], **static: Any) -> Any:
        if all(dim is None for dim in dims):
            done = primitive.bind(*args, **static)
            return done, [None] * len(done)
        return batch(primitive, axis, args, dims, **static)

    batching.fancy_primitive_batchers[primitive] = batch_if_needed
    return primitive


def _shaped(shape: Sequence[int], aval: Any) -> Any:
    return jax.core.ShapedArray(tuple(shape), aval.dtype)


def _per_device(placement: Placement, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns ``run``, which each device does on its share of the clients."""
    if placement.mesh is None:
        return run
    # Some loops take another number of steps on each device, so JAX cannot prove that results are equal on all of them.
    on_devices = jax.shard_map(
        run, mesh=placement.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={placement.name}, check_vma=False
    )
    return on_mesh(placement.mesh)(on_devices)


# ---- Between the server and the clients.


def _broadcast(x: Any, *, placement: Placement) -> Arrays:
    copies = _per_device(
        placement, lambda x: jnp.broadcast_to(x, (placement.size_per_device, *x.shape)), P(), P(placement.name)
    )
    return [copies(x)]


def _reduction(of_device: Callable[[Any], Any], over_devices: Callable[[Any, str], Any]) -> Callable[..., Arrays]:
    def run(x: Any, *, placement: Placement) -> Arrays:
        def reduce(x: Any) -> Any:
            total = of_device(x.astype(wide(x.dtype)))
            return (over_devices(total, placement.name) if placement.mesh else total).astype(x.dtype)

        return [_per_device(placement, reduce, P(placement.name), P())(x)]

    return run


def _mean(x: Any, *, placement: Placement) -> Arrays:
    total = _sum(x.astype(wide(x.dtype)), placement=placement)[0]
    return [(total / max(placement.size, 1)).astype(x.dtype)]


def _broadcast_batch(primitive: Primitive, axis: Any, args: Sequence[Any], dims: Sequence[Any], **static: Any) -> Any:
    return primitive.bind(jnp.moveaxis(args[0], dims[0], 0), **static), [1]


def _reduction_batch(primitive: Primitive, axis: Any, args: Sequence[Any], dims: Sequence[Any], **static: Any) -> Any:
    return primitive.bind(jnp.moveaxis(args[0], dims[0], 1), **static), [0]


def _broadcast_avals(x: Any, *, placement: Placement) -> tuple[Arrays, Any]:
    return [_shaped((placement.size, *x.shape), x)], set()


def _reduced_avals(x: Any, *, placement: Placement) -> tuple[Arrays, Any]:
    return [_shaped(x.shape[1:], x)], set()


_sum = _reduction(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), jax.lax.psum)
broadcast_p = _primitive("broadcast", _broadcast, _broadcast_avals, _broadcast_batch)
sum_p = _primitive("sum", _sum, _reduced_avals, _reduction_batch)
mean_p = _primitive("mean", _mean, _reduced_avals, _reduction_batch)
max_p = _primitive("max", _reduction(lambda x: jnp.max(x, axis=0), jax.lax.pmax), _reduced_avals, _reduction_batch)
min_p = _primitive("min", _reduction(lambda x: jnp.min(x, axis=0), jax.lax.pmin), _reduced_avals, _reduction_batch)


def _linear(primitive: Primitive, transpose: Callable[[Any, Placement], Arrays]) -> None:
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, placement: Placement) -> tuple[Arrays, Arrays]:
        done = primitive.bind(*primals, placement=placement)
        (dot,) = tangents
        if type(dot) is ad.Zero:
            return done, [ad.Zero(jax.typeof(done[0]).to_tangent_aval())]
        return done, primitive.bind(dot, placement=placement)

    def transposed(cotangents: Sequence[Any], x: Any, *, placement: Placement) -> Arrays:
        (cotangent,) = cotangents
        return [None] if type(cotangent) is ad.Zero else transpose(cotangent, placement)

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transposed


_linear(broadcast_p, lambda cotangent, placement: sum_p.bind(cotangent, placement=placement))
_linear(sum_p, lambda cotangent, placement: broadcast_p.bind(cotangent, placement=placement))
_linear(
    mean_p,
    lambda cotangent, placement: broadcast_p.bind(
        (cotangent.astype(wide(cotangent.dtype)) / max(placement.size, 1)).astype(cotangent.dtype), placement=placement
    ),
)


def _extremum_jvp(primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], *, placement: Placement) -> Any:
    """The derivative is the mean over the clients that attain the extremum."""
    (x,), (dot,) = primals, tangents
    (extremum,) = primitive.bind(x, placement=placement)
    if type(dot) is ad.Zero:
        return [extremum], [ad.Zero(jax.typeof(extremum).to_tangent_aval())]
    (at_clients,) = broadcast_p.bind(extremum, placement=placement)
    attains = bind_map(lambda x, extremum: [(x == extremum).astype(x.dtype)], [x, at_clients], placement)[0]
    parts = bind_map(lambda attains, dot: [attains * dot], [attains, dot], placement)[0]
    (total,), (count,) = (sum_p.bind(y, placement=placement) for y in (parts, attains))
    return [extremum], [total / count]


ad.primitive_jvps[max_p] = functools.partial(_extremum_jvp, max_p)
ad.primitive_jvps[min_p] = functools.partial(_extremum_jvp, min_p)


# ---- Other reductions, which are declared by whoever writes them.


def bind_reduction(function: Callable[..., Sequence[Any]], stacked: Sequence[Any], name: str, placement: Placement) -> Arrays:
    """Runs a reduction of arrays ``[size, ...]`` to a sequence of arrays, with what it closes over as further arguments."""
    jaxpr, consts = closed(function, [with_axes(jax.typeof(x)) for x in stacked])
    return reduce_p.bind(*consts, *stacked, jaxpr=jaxpr, name=name, placement=placement)


def _reduce(*stacked: Any, jaxpr: ClosedJaxpr, name: str, placement: Placement) -> Arrays:
    return jaxpr_as_fun(jaxpr)(*stacked)


def _reduce_avals(*stacked: Any, jaxpr: ClosedJaxpr, name: str, placement: Placement) -> tuple[Arrays, Any]:
    return [_shaped(aval.shape, aval) for aval in jaxpr.out_avals], jaxpr.effects


def _reduce_batch(primitive: Primitive, axis: Any, args: Sequence[Any], dims: Sequence[Any], **static: Any) -> Any:
    out = jax.vmap(functools.partial(_reduce, **static), in_axes=list(dims), axis_size=axis.size)(*args)
    return out, [0] * len(out)


def _reduce_jvp(primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> tuple[Arrays, Arrays]:
    run = functools.partial(_reduce, **static)
    return jax.jvp(run, tuple(primals), tuple(ad.instantiate_zeros(dot) for dot in tangents))


reduce_p = _primitive("reduce", _reduce, _reduce_avals, _reduce_batch)
ad.primitive_jvps[reduce_p] = _reduce_jvp


# ---- The clients' work.


class MapOptions(NamedTuple):
    """How a `map` is run. It does not change the result.

    Attributes:
      side_by_side: whether all clients of a device work at the same time; None chooses by the device and the function.
      recompute: whether a derivative computes each client's work again. If False, the derivative is that of what runs.
    """

    side_by_side: bool | None = None
    recompute: bool = True


def bind_map(
    function: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    placement: Placement,
    shared: Sequence[bool] | None = None,
    summed: Sequence[bool] | None = None,
    options: MapOptions = MapOptions(),  # noqa: B008, a value that never changes
) -> Arrays:
    """Runs a function on every client.

    Values that the function closes over are values of the server, which every client gets.

    Args:
      function: one client's work, from arrays to a sequence of arrays.
      args: arrays, of which the function gets one client's slices.
      placement: the clients.
      shared: which arguments every client gets as a whole instead; default: none.
      summed: which results are summed over the clients; default: none.
      options: how it is run.

    Returns:
      All clients' results, ``[size, ...]``, or their sums.
    """
    shared = [False] * len(args) if shared is None else list(shared)
    one = [placement.type_in_client(x, axes=0 if whole else 1) for x, whole in zip(args, shared, strict=True)]
    try:
        with placement.of_client():
            jaxpr, consts = closed(function, one)
    except ValueError as error:
        if placement.mesh is not None and any(f"should match the {words}" in str(error) for words in _OTHER_MESH):
            raise ValueError(
                f"Expected the function of the {placement.name} to get all arrays that lie on a mesh as arguments, got one "
                "that it closes over: broadcast this and pass it to map."
            ) from error
        raise
    return map_p.bind(
        *consts,
        *args,
        jaxpr=jaxpr,
        shared=(*[True] * len(consts), *shared),
        summed=tuple(summed or [False] * len(jaxpr.out_avals)),
        placement=placement,
        options=options,
    )


def _map_run(
    *args: Any, on_cpu: bool, jaxpr: ClosedJaxpr, shared: tuple[bool, ...], summed: tuple[bool, ...],
    placement: Placement, options: MapOptions,
) -> Arrays:  # fmt: skip
    def of_device(*args: Any) -> Arrays:
        def work(*own: Any) -> Arrays:
            slices = iter(own)
            return jaxpr_as_fun(jaxpr)(*[x if whole else next(slices) for x, whole in zip(args, shared, strict=True)])

        own, size = [x for x, whole in zip(args, shared, strict=True) if not whole], placement.size_per_device
        one_by_one = on_cpu and not _is_cheap(jaxpr) if options.side_by_side is None else not options.side_by_side
        if one_by_one and size > 1:

            def step(sums: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
                out = work(*slices)
                return list(map(_plus, sums, _only(out, summed))), _only(out, [not mark for mark in summed])

            nothing: Arrays = [zeros(with_axes(aval)).astype(wide(aval.dtype)) for aval in _only(jaxpr.out_avals, summed)]
            if size > _MANY_TERMS:
                nothing = [tree.Total.of(x) if tree.is_float(x) else x for x in nothing]
            totals, out = jax.lax.scan(step, nothing, own, length=size)
            sums = iter([total.value() if isinstance(total, tree.Total) else total for total in totals])
            stacked = iter(out)
        else:
            # The work of a single client is that of the function itself, without an axis of clients.
            alone = size == 1
            out = [jnp.asarray(x)[None] for x in work(*[x[0] for x in own])] if alone else jax.vmap(work, axis_size=size)(*own)
            sums = iter([jnp.sum(x, axis=0, dtype=wide(x.dtype)) for x in _only(out, summed)])
            stacked = iter(_only(out, [not mark for mark in summed]))
        sums = iter(tree.psum(list(sums), placement.name)) if placement.mesh else sums
        return [
            next(sums).astype(aval.dtype) if mark else next(stacked) for aval, mark in zip(jaxpr.out_avals, summed, strict=True)
        ]

    per_client, same = P(placement.name), P()
    in_specs = tuple(same if whole else per_client for whole in shared)
    return _per_device(placement, of_device, in_specs, [same if mark else per_client for mark in summed])(*args)


def _plus(total: Any, term: jax.Array) -> Any:
    return total.add(term) if isinstance(total, tree.Total) else total + term.astype(total.dtype)


def _only(values: Sequence[Any], marks: Sequence[bool]) -> Arrays:
    return [x for x, mark in zip(values, marks, strict=True) if mark]


def wide(dtype: Any) -> Any:
    """Returns the dtype for sums: numbers in half precision would lose what is smaller than their last digit."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def _is_cheap(jaxpr: Any) -> bool:
    """Returns whether a function has only elementwise operations and the like, which XLA fuses across clients."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
        if equation.primitive.name in _EXPENSIVE or not all(_is_cheap(x) for x in inner if hasattr(x, "eqns")):
            return False
    return True


def _map_avals(
    *args: Any, jaxpr: ClosedJaxpr, shared: tuple[bool, ...], summed: tuple[bool, ...], placement: Placement,
    options: MapOptions,
) -> tuple[Arrays, Any]:  # fmt: skip
    return [
        _shaped(aval.shape if mark else (placement.size, *aval.shape), aval)
        for aval, mark in zip(jaxpr.out_avals, summed, strict=True)
    ], jaxpr.effects


def _map_batch(
    primitive: Primitive, axis: Any, args: Sequence[Any], dims: Sequence[Any],
    *, jaxpr: ClosedJaxpr, shared: tuple[bool, ...], summed: tuple[bool, ...], placement: Placement,
    options: MapOptions,
) -> tuple[Arrays, list[int]]:  # fmt: skip
    """Maps each client's function over the new axis, which comes after the axis of clients."""
    args = [
        x if dim is None else jnp.moveaxis(x, dim, 0 if whole else 1) for x, dim, whole in zip(args, dims, shared, strict=True)
    ]
    work = jax.vmap(
        jaxpr_as_fun(jaxpr),
        in_axes=[None if dim is None else 0 for dim in dims],
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name,
    )
    return bind_map(work, args, placement, shared, summed, options), [0 if mark else 1 for mark in summed]


def _map_jvp(
    primals: Sequence[Any], tangents: Sequence[Any],
    *, jaxpr: ClosedJaxpr, shared: tuple[bool, ...], summed: tuple[bool, ...], placement: Placement,
    options: MapOptions,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """The derivative is a second `map`. It computes each client's values again, so that the values of no client are stored.

    Without ``recompute`` it is the derivative of `_map_run`, as this runs on the default device.
    """
    static: dict[str, Any] = dict(jaxpr=jaxpr, shared=shared, summed=summed, placement=placement, options=options)
    if not options.recompute:
        run = functools.partial(_map_run, on_cpu=jax.default_backend() == "cpu", **static)
        return jax.jvp(run, tuple(primals), tuple(ad.instantiate_zeros(dot) for dot in tangents))
    out = map_p.bind(*primals, **static)
    dots = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    moves = [type(dot) is not ad.Zero for dot in tangents]
    varies = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in jaxpr.out_avals]
    if not any(moves) or not any(varies):
        return out, dots

    def derivative(*values: Any) -> Arrays:
        at, along = values[: len(primals)], values[len(primals) :]

        def moved(*moving: Any) -> Arrays:
            new = iter(moving)
            return _only(jaxpr_as_fun(jaxpr)(*[next(new) if mark else x for x, mark in zip(at, moves, strict=True)]), varies)

        return jax.jvp(moved, tuple(_only(at, moves)), along)[1]

    args = [*primals, *_only(tangents, moves)]
    marks = [*shared, *_only(shared, moves)]
    moved = iter(bind_map(derivative, args, placement, marks, _only(summed, varies), options))
    return out, [next(moved) if mark else dot for dot, mark in zip(dots, varies, strict=True)]


def _map_transpose(
    cotangents: Sequence[Any], *args: Any,
    jaxpr: ClosedJaxpr, shared: tuple[bool, ...], summed: tuple[bool, ...], placement: Placement,
    options: MapOptions,
) -> list[Any]:  # fmt: skip
    """Transposes each client's function. The cotangent of what every client got is a sum over the clients."""
    linear = [ad.is_undefined_primal(x) for x in args]
    known, given = [not mark for mark in linear], [type(cotangent) is not ad.Zero for cotangent in cotangents]
    of_client = [var.aval for var in jaxpr.jaxpr.invars]

    def transpose(*values: Any) -> Arrays:
        at, along = values[: sum(known)], values[sum(known) :]

        def function(*moving: Any) -> Arrays:
            new, old = iter(moving), iter(at)
            return _only(jaxpr_as_fun(jaxpr)(*[next(new) if mark else next(old) for mark in linear]), given)

        return list(jax.linear_transpose(function, *map(with_axes, _only(of_client, linear)))(list(along)))

    operands = [*_only(args, known), *_only(cotangents, given)]
    marks = [*_only(shared, known), *_only(summed, given)]
    pulled = iter(bind_map(transpose, operands, placement, marks, _only(shared, linear), options))
    return [next(pulled) if mark else None for mark in linear]


map_p = _primitive("map", functools.partial(_map_run, on_cpu=False), _map_avals, _map_batch)
mlir.register_lowering(map_p, mlir.lower_fun(functools.partial(_map_run, on_cpu=True), multiple_results=True), platform="cpu")
ad.primitive_jvps[map_p] = _map_jvp
ad.primitive_transposes[map_p] = _map_transpose
