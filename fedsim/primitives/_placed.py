"""`Placed`, a value that each client of a placement has, and the functions that make and reduce such values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.primitives._placement import Placement
from fedsim.primitives._primitives import MapOptions, bind_map, bind_reduction, broadcast_p, max_p, mean_p, min_p, sum_p


class Placed(np.lib.mixins.NDArrayOperatorsMixin):
    """A value of which every client of a placement has its own.

    `place`, `broadcast` and `map` return such values, and reductions such as `mean` turn them into values of the server.
    Operators and NumPy's elementwise functions work client by client, with other values at the same placement and with Python
    numbers. With a value of the server they raise ``ValueError``, because a client has that only after a `broadcast`.

    Attributes:
      stacked: a pytree of arrays ``[size, ...]``. Whoever reads it sees the values of single clients.
      placement: the clients.

    >>> x = place(np.array([1.0, 2.0]), Placement("clients", 2))
    >>> np.exp(0 * x) + 2 * x
    Placed(float32[] at each of 2 clients)
    >>> x + jnp.zeros(3)
    Traceback (most recent call last):
    ...
    ValueError: The server's float32[3] cannot be combined with float32[] at each of 2 clients: broadcast(value, placement) \
sends it to the clients, and a reduction such as mean brings theirs to the server.
    """

    def __init__(self, stacked: Any, placement: Placement) -> None:
        self.stacked, self.placement = stacked, placement

    @property
    def of_all(self) -> Any:
        """A pytree of arrays that every client gets as a whole."""
        return ()

    def of_client(self, own: Any, of_all: Any) -> Any:
        """Returns what a function that is mapped over this value gets, from a client's slices of ``stacked`` and `of_all`."""
        return own

    def __repr__(self) -> str:
        return f"Placed({_described(self)})"

    def __bool__(self) -> bool:
        raise ValueError(f"{_described(self)} have no single truth value: reduce it first, for example with count or max.")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        _common_placement(ufunc.__name__, self, *filter(_is_placed, inputs))
        for other in inputs:
            if not _is_placed(other) and not isinstance(other, int | float | complex | np.number):
                raise ValueError(
                    f"The server's {_described(other)} cannot be combined with {_described(self)}: broadcast(value, placement) "
                    "sends it to the clients, and a reduction such as mean brings theirs to the server."
                )
        function = getattr(jnp, ufunc.__name__)

        def of_client(*own: Any) -> Any:
            rest = iter(own)
            return jax.tree.map(
                function, *[next(rest) if _is_placed(x) else jax.tree.map(lambda _, x=x: x, own[0]) for x in inputs]
            )

        return map(of_client, *[x for x in inputs if isinstance(x, Placed)])


jax.tree_util.register_pytree_with_keys(
    Placed,
    lambda value: (((jax.tree_util.GetAttrKey("stacked"), value.stacked),), value.placement),
    lambda placement, children: Placed(next(iter(children)), placement),
)


def _described(value: Any, axes: int = 0) -> str:
    """Describes a value whose arrays have ``axes`` axes of clients."""
    if isinstance(value, Placed):
        return f"{_described(value.stacked, axes + 1)} at each of {value.placement.size} {value.placement.name}"

    def leaf(x: Any) -> str:
        return _described(x, axes) if _is_placed(x) else f"{jnp.result_type(x)}{list(np.shape(x)[axes:])}"

    return str(jax.tree.map(leaf, value, is_leaf=_is_placed)).replace("'", "")


def place(stacked: Any, placement: Placement) -> Placed:
    """Returns the value of which client ``i`` has ``stacked[i]``.

    Args:
      stacked: a pytree of arrays ``[size, ...]``. It may hold `Placed` values of another placement, with arrays
        ``[size, other size, ...]``: then each client has clients of its own.
      placement: the clients.

    Raises:
      ValueError: an array does not have one entry per client.

    >>> place({"x": np.ones([3, 5])}, Placement("clients", 3))
    Placed({x: float32[5]} at each of 3 clients)
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(stacked):
        if not np.ndim(leaf) or np.shape(leaf)[0] != placement.size:
            raise ValueError(
                f"Expected arrays of shape [{placement.size}, ...] at placement={placement.name!r}, one entry per client, got "
                f"shape {list(np.shape(leaf))} at stacked{jax.tree_util.keystr(path)}. To send one value to all clients, use "
                "broadcast."
            )
    return Placed(jax.tree.map(placement.in_context().divided, stacked), placement)


def broadcast(value: Any, placement: Placement) -> Placed:
    """Sends a value of the server to every client.

    Args:
      value: a pytree of arrays, of any dtype.
      placement: the clients.

    Raises:
      ValueError: ``value`` is a value of clients already.

    >>> broadcast(jnp.ones(3), Placement("clients", 2)).stacked.tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    for leaf in jax.tree.leaves(value, is_leaf=_is_placed):
        if _is_placed(leaf):
            raise ValueError(f"Expected a value of the server, got {_described(leaf)}: reduce it first, for example with mean.")

    here = placement.in_context()

    def send(x: Any) -> Any:
        return here.shown(broadcast_p.bind(jnp.asarray(x), placement=here)[0])

    return Placed(jax.tree.map(send, value), placement)


def map(function: Callable[..., Any], *values: Placed, side_by_side: bool | None = None) -> Placed:
    """Returns each client's ``function(*own)``, where ``own`` are the client's parts of the values.

    What ``function`` closes over is sent to every client, as by `broadcast`.

    Args:
      function: one client's work, in plain JAX, which returns a pytree of arrays. It may use other placements itself.
      values: one or more values at the same placement.
      side_by_side: whether all clients of a device work at the same time (`jax.vmap`), or one after another. None chooses: on a
        CPU one after another if the function is expensive (it has matrix products or loops), otherwise side by side.

    Raises:
      ValueError: a value is not `Placed`, or the placements differ.

    >>> clients = Placement("clients", 2)
    >>> map(lambda x, y: x @ y, place(np.eye(2), clients), broadcast(jnp.array([3.0, 4.0]), clients)).stacked.tolist()
    [3.0, 4.0]
    """
    placement = _common_placement("map", *values)
    leaves, structure = jax.tree.flatten([value.stacked for value in values])
    out_structure = None

    whole, whole_structure = jax.tree.flatten([value.of_all for value in values])

    def work(*arrays: Any) -> list[Any]:
        nonlocal out_structure
        of_all = jax.tree.unflatten(whole_structure, arrays[: len(whole)])
        own = jax.tree.unflatten(structure, arrays[len(whole) :])
        done = function(*[value.of_client(*parts) for value, *parts in zip(values, own, of_all, strict=True)])
        out, out_structure = jax.tree.flatten(done)
        return [jnp.asarray(x) for x in out]

    here, args = placement.in_context(), [jnp.asarray(x) for x in (*whole, *leaves)]
    shared = [True] * len(whole) + [False] * len(leaves)
    done = bind_map(work, args, here, shared, options=MapOptions(side_by_side))
    return Placed(jax.tree.unflatten(out_structure, [here.shown(x) for x in done]), placement)


def sum(value: Placed) -> Any:
    """Returns the sum over the clients. Without clients it is 0.

    Floats keep their dtype, and those in half precision are summed in ``float32``. Integers keep their dtype; booleans are
    counted in ``int32``.

    Args:
      value: a pytree of arrays at a placement.

    >>> sum(place(jnp.array([[1, 2], [3, 4]]), Placement("clients", 2))).tolist()
    [4, 6]
    """
    return _reduced(sum_p, value, lambda x: x.astype(jnp.int32) if x.dtype == bool else x)


def mean(value: Placed) -> Any:
    """Returns the mean over the clients. Without clients it is 0.

    Floats keep their dtype, and those in half precision are summed in ``float32``. The mean of integers and booleans is
    ``float32``.

    Args:
      value: a pytree of arrays at a placement.

    >>> mean(place(jnp.array([[1, 2], [4, 4]]), Placement("clients", 2))).tolist()
    [2.5, 3.0]
    """
    return _reduced(mean_p, value, _as_float)


def weighted_mean(value: Placed, weights: Placed) -> Any:
    """Returns the sum of weight times value over the sum of the weights. If the weights sum to 0, it and its derivatives are 0.

    A client of weight 0 does not count, even if its value is infinite or NaN. The derivative by its weight is that of any
    other weight if its value is finite. The derivatives by what its value is computed from are 0 if the derivatives of that
    computation are finite. Otherwise they may be NaN, as that of 0/0 is.

    Args:
      value: a pytree of arrays at a placement; integers and booleans are converted to ``float32``.
      weights: one number per client at the same placement.

    Raises:
      ValueError: the weights are not one number per client.

    >>> clients = Placement("clients", 2)
    >>> weighted_mean(place(jnp.array([1.0, 5.0]), clients), place(jnp.array([3, 1]), clients)).item()
    2.0
    """
    _common_placement("weighted_mean", value, weights)
    if not isinstance(weights.stacked, jax.Array | np.ndarray) or np.ndim(weights.stacked) != 1:
        raise ValueError(f"Expected weights to be one number at each client, got {_described(weights)}.")

    def weigh(own: Any, weight: jax.Array) -> Any:
        def of_leaf(x: jax.Array) -> jax.Array:
            x = wide(x)
            return jnp.where((weight == 0) & ~jnp.isfinite(x), 0, x) * weight.astype(x.dtype)

        return jax.tree.map(of_leaf, own)

    def wide(x: jax.Array) -> jax.Array:
        x = _as_float(x)
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else x

    total = sum(map(lambda weight: weight.astype(jax.dtypes.canonicalize_dtype(float)), weights))
    factor = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
    sums = sum(map(weigh, value, weights))
    return jax.tree.map(lambda x, like: (x * factor.astype(x.dtype)).astype(_as_float(like).dtype), sums, value.stacked)


def max(value: Placed) -> Any:
    """Returns the largest value of a client, element by element. The derivative is the mean over the clients that have it.

    Args:
      value: a pytree of arrays at a placement.

    Raises:
      ValueError: there are no clients.

    >>> max(place(jnp.array([1, 3, 2]), Placement("clients", 3))).item()
    3
    """
    return _reduced(max_p, value, lambda x: x)


def min(value: Placed) -> Any:
    """Returns the smallest value of a client, see `max`.

    >>> min(place(jnp.array([[1, 3], [2, 2]]), Placement("clients", 2))).tolist()
    [1, 2]
    """
    return _reduced(min_p, value, lambda x: x)


def reduce(function: Callable[[Any], Any], value: Placed, *, name: str) -> Any:
    """Returns ``function(value.stacked)``, a reduction of the clients' values that none of the other functions gives.

    A check of what the server learns (`fedsim.audit`) lists it under its name. Derivatives are those of the function.

    Args:
      function: takes arrays ``[size, ...]``, which no server sees outside of it.
      value: a pytree of arrays at a placement.
      name: of the reduction.

    >>> x = place(jnp.array([3.0, 1.0, 9.0]), Placement("clients", 3))
    >>> reduce(lambda x: jnp.median(x, axis=0), x, name="median").item()
    3.0
    """
    placement = _common_placement("reduce", value).in_context()
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, value.stacked))
    out_structure = None

    def flat(*leaves: Any) -> list[Any]:
        nonlocal out_structure
        out, out_structure = jax.tree.flatten(function(jax.tree.unflatten(structure, [placement.whole(x) for x in leaves])))
        return [jnp.asarray(x) for x in out]

    out = bind_reduction(flat, leaves, name, placement)
    return jax.tree.unflatten(out_structure, out)


def count(condition: Placed) -> Any:
    """Returns for how many clients ``condition`` holds, ``int32``, element by element.

    Args:
      condition: a pytree of arrays at a placement; numbers count where they are not 0.

    >>> count(place(jnp.array([True, False, True]), Placement("clients", 3))).item()
    2
    """
    return _reduced(sum_p, condition, lambda x: x.astype(bool).astype(jnp.int32))


def _reduced(primitive: Any, value: Placed, convert: Callable[[Any], Any]) -> Any:
    placement = _common_placement(primitive.name, value).in_context()
    nested = [leaf for leaf in jax.tree.leaves(value.stacked, is_leaf=_is_placed) if _is_placed(leaf)]
    if nested:
        raise ValueError(
            f"Each of the {placement.size} {placement.name} has values of its own {nested[0].placement.name}: reduce these "
            f"first, in a map over the {placement.name}."
        )
    if not placement.size and primitive in (max_p, min_p):
        raise ValueError(f"Expected at least one client for {primitive.name}, got {_described(value)}.")

    def reduce(x: Any) -> Any:
        x = jnp.asarray(x)
        wanted = jax.eval_shape(convert, jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
        if wanted.dtype != x.dtype:
            (x,) = bind_map(lambda x: [convert(x)], [x], placement)
        return primitive.bind(x, placement=placement)[0]

    return jax.tree.map(reduce, value.stacked)


def _as_float(x: Any) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _common_placement(name: str, *values: Any) -> Placement:
    """Returns the placement of the arguments of the function ``name``; raises ``ValueError`` if there is no common one."""
    if not values:
        raise ValueError(f"Expected at least one value for {name}, got none.")
    for value in values:
        if not isinstance(value, Placed):
            raise ValueError(
                f"Expected values of clients for {name}, got the server's {_described(value)}: broadcast(value, placement) "
                "sends it to the clients, and place(stacked, placement) takes one entry per client."
            )
        if value.placement != values[0].placement:
            raise ValueError(f"{_described(value)} cannot be combined with {_described(values[0])}: first reduce one of them.")
        for leaf in jax.tree.leaves(value.stacked):
            if jnp.shape(leaf)[:1] != (value.placement.size,):
                raise ValueError(
                    f"Expected one entry for each of {value.placement.size} {value.placement.name} for {name}, got shape "
                    f"{list(jnp.shape(leaf))}: let vmap and scan take and return value.stacked, along another axis."
                )
    return values[0].placement


def _is_placed(value: Any) -> bool:
    return isinstance(value, Placed)
