"""`program`: a federated program in as few passes over the clients as possible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fedsim.primitives._primitives import MapOptions, bind_map
from fedsim.primitives._trace import Operation, Trace, Value

T = TypeVar("T")


def program(function: Callable[..., T], *, recompute: bool = True) -> Callable[..., T]:
    """Returns a federated program that runs in as few passes over the clients as possible, with the same results.

    All work between a broadcast and a reduction is one `map`. It reads what was broadcast without a copy for each client, and
    sums and means are added up client by client, so that memory does not grow with the number of clients. The function
    composes with JAX's transformations like any other.

    Args:
      function: a function of values of the server and of clients. Federated operations within its loops and conditions are not
        possible; put the loop around the program.
      recompute: whether a backward pass computes each client's work again, so that nothing of it is stored in between. False
        stores the intermediate values of all clients, and derivatives no longer consist of federated operations.

    Raises:
      ValueError: when it is called, if a federated operation lies within a loop, a condition or a function with a custom
        derivative.

    >>> from fedsim import primitives as fed
    >>> clients = fed.Placement("clients", 3)
    >>> @program
    ... def step(params, x):
    ...     own = fed.map(lambda p, x: p - 0.5 * (p - x), fed.broadcast(params, clients), x)
    ...     return fed.mean(own)
    >>> step(jnp.zeros(2), fed.place(jnp.arange(6.0).reshape(3, 2), clients)).tolist()
    [1.0, 1.5]
    """

    @functools.wraps(function)
    def run(*args: Any) -> T:
        return _run(Trace(function, args), args, recompute)

    return run


def _run(trace: Trace, args: Sequence[Any], recompute: bool) -> Any:
    values = trace.values(args)
    sources: dict[Value, Any] = {}  # what was broadcast, until someone needs the copies
    totals: set[Value] = set()  # results of clients whose sum is known instead
    users: dict[Value, list[Operation]] = {}
    for operation in trace.operations:
        for value in operation.values:
            users.setdefault(value, []).append(operation)
    results = {value for value in trace.outputs if isinstance(value, Value)}

    def read(x: Any) -> Any:
        if not isinstance(x, Value):
            return x.val
        if x not in values:
            source, operation = sources[x]
            (copies,) = operation.run([source])
            values[x] = operation.params["placement"].shown(copies)
        return values[x]

    def is_only_summed(x: Value) -> bool:
        names = [user.name for user in users.get(x, []) if user.kind == "reduction"]
        # Half precision is rounded once, at the end, only if the values themselves are summed.
        is_wide = x.aval.dtype.itemsize >= 4
        return is_wide and x not in results and len(names) == len(users.get(x, [])) and set(names) <= {"sum", "mean"}

    for kind, group in trace.groups:
        if kind == "clients":
            inside = {value for operation in group for value in operation.outputs}
            members = {id(operation) for operation in group}
            wanted = [
                value
                for operation in group
                for value in operation.outputs
                if value in results or any(id(user) not in members for user in users.get(value, []))
            ]
            sums = {value for operation in group for value in operation.summed}
            new = {value for value in wanted if value not in sums and is_only_summed(value)}
            marks = [value in sums | new for value in wanted]
            done = _one_function(group, inside, wanted, marks, read, sources, recompute)
            values |= dict(zip(wanted, done, strict=True))
            totals |= new
            continue
        for operation in group:
            if kind == "broadcast":
                sources[operation.outputs[0]] = read(operation.inputs[0]), operation
            elif kind == "reduction" and totals.intersection(operation.values):
                total, size = read(operation.inputs[0]), operation.params["placement"].size
                is_mean = operation.name == "mean"
                values[operation.outputs[0]] = total / jnp.asarray(max(size, 1), total.dtype) if is_mean else total
            else:
                outputs = operation.run([read(x) for x in operation.inputs])
                values |= dict(zip(operation.outputs, outputs, strict=True))
    return trace.result([read(x) for x in trace.outputs])


def _one_function(
    group: Sequence[Operation], inside: set[Value], wanted: Sequence[Value], summed: Sequence[bool], read: Any, sources: Any,
    recompute: bool,
) -> list[Any]:  # fmt: skip
    """Runs all maps of a stage as one, which gets what was broadcast without copies and sums results on the way."""
    operands: dict[tuple[Any, bool], Any] = {}
    for operation in group:
        for x, whole in zip(operation.inputs, operation.params["shared"], strict=True):
            if not isinstance(x, Value) or x in inside:
                continue
            if not whole and x in sources:
                operands[x, False] = sources[x][0], True
            else:
                operands[x, whole] = read(x), whole
    keys = list(operands)

    def work(*own: Any) -> list[Any]:
        known = dict(zip(keys, own, strict=True))
        for operation in group:
            marks = operation.params["shared"]
            args = [known[x, mark] if isinstance(x, Value) else x.val for x, mark in zip(operation.inputs, marks, strict=True)]
            for value, result in zip(operation.outputs, jaxpr_as_fun(operation.params["jaxpr"])(*args), strict=True):
                known[value, False] = result
        return [known[value, False] for value in wanted]

    marks = [whole for _, whole in operands.values()]
    placement = group[0].params["placement"]
    ways = {operation.params["options"].side_by_side for operation in group} - {None}
    options = MapOptions(ways.pop() if len(ways) == 1 else None, recompute)  # no choice if two maps have different ones
    done = bind_map(work, [jnp.asarray(x) for x, _ in operands.values()], placement, marks, summed, options)
    return [placement.shown(x) for x in done]
