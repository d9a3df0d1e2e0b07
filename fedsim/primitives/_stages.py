"""`stages`: a federated program taken apart into what the server does, what it sends, and what each client does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fedsim.primitives._placed import Placed
from fedsim.primitives._placement import Placement
from fedsim.primitives._primitives import wide
from fedsim.primitives._trace import Operation, Trace, Value, marked, source

# Equations that JAX adds between values of clients, and that work client by client.
_CLIENT_BY_CLIENT = {"add_any", "sharding_constraint", "reshard"}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a federated program.

    Attributes:
      kind: ``"server"``, ``"broadcast"``, ``"clients"`` or ``"reduction"``.
      placement: the clients; None for the server.
      reads: the shapes and dtypes that the stage reads, for clients those of one client.
      writes: what it computes.
      name: of a reduction.

    >>> print(Stage("reduction", Placement("clients", 3), ("float32[5]",), ("float32[5]",), "mean"))
    3 clients to server, mean: float32[5] -> float32[5]
    """

    kind: str
    placement: Placement | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    name: str = ""

    def __str__(self) -> str:
        where = "server" if self.placement is None else f"{self.placement.size} {self.placement.name}"
        title = {"broadcast": f"server to {where}", "reduction": f"{where} to server, {self.name}"}.get(self.kind, where)
        return f"{title}: {_listed(self.reads)} -> {_listed(self.writes)}"


@dataclasses.dataclass(frozen=True)
class Leak:
    """A way in which values of single clients reach the server's results.

    Attributes:
      result: the path of the result.
      equation: the name of the first operation outside of clients that reads such values.
      where: the line of source of that operation.

    >>> print(Leak("result['best']", "argmax", "program.py:7"))
    result['best'] depends on values of single clients through 'argmax' at program.py:7
    """

    result: str
    equation: str
    where: str

    def __str__(self) -> str:
        return f"{self.result} depends on values of single clients through {self.equation!r} at {self.where}"


class Program:
    """A federated program in stages, see `stages`.

    Args:
      function: a function of values of the server and of clients.
      args: its arguments, or their shapes and dtypes.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._trace = Trace(function, args)
        self._placed_inputs = _placed_leaves(tuple(args))

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the order in which they run."""
        return tuple(self._stage(kind, group) for kind, group in self._trace.groups)

    @functools.cached_property
    def leaks(self) -> tuple[Leak, ...]:
        """The ways in which values of single clients reach results without a reduction."""
        return tuple(self._leaks())

    def _stage(self, kind: str, group: Sequence[Operation]) -> Stage:
        inside = {id(operation) for operation in group}
        written = {value for operation in group for value in operation.outputs}
        reads = dict.fromkeys(value for operation in group for value in operation.values if value not in written)
        needed = {value for other in self._trace.operations if id(other) not in inside for value in other.values}
        needed |= {value for value in self._trace.outputs if isinstance(value, Value)}
        of_clients = group if kind == "clients" else []
        totals = {value for operation in of_clients for value in operation.summed}
        of_server = totals | {value for operation in of_clients for value in operation.shared}

        def of_one(value: Value, stacked: bool) -> str:
            stacked &= value not in of_server
            total = "sum of " if value in totals else ""
            return f"{total}{value.aval.dtype}{list(value.aval.shape)[int(stacked) :]}"

        names = [operation.params.get("name", operation.name) for operation in group]
        return Stage(
            kind,
            group[0].params.get("placement"),
            tuple(of_one(value, kind in ("clients", "reduction")) for value in reads),
            tuple(of_one(x, kind in ("clients", "broadcast")) for o in group for x in o.outputs if x in needed),
            ", ".join(dict.fromkeys(names)) if kind == "reduction" else "",
        )

    def _leaks(self) -> Iterator[Leak]:
        # The values that depend on single clients. The entry is None as long as only that client has it, then the first
        # operation that gave it to the server or to other clients.
        of_clients: dict[Any, Any] = dict.fromkeys(marked(self._trace.inputs, self._placed_inputs))
        for operation in self._trace.operations:
            own = [value for value in operation.values if value in of_clients]
            reader = next((of_clients[value] for value in own if of_clients[value] is not None), None)
            if operation.kind == "clients":
                if of_clients.keys() & operation.shared:
                    reader = reader or operation  # every client gets the values of all
                sums = operation.summed
                of_clients |= {x: reader for x in operation.outputs if reader or x not in sums}
            elif operation.kind == "reduction":
                of_clients |= dict.fromkeys(operation.outputs, reader) if reader else {}
            elif own:
                at_clients = operation.name in _CLIENT_BY_CLIENT
                of_clients |= dict.fromkeys(operation.outputs, reader if at_clients else reader or operation)
        results = self._trace.result(self._trace.outputs)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(results)]
        for path, value, placed in zip(paths, self._trace.outputs, _placed_leaves(results), strict=True):
            if not placed and isinstance(value, Value) and value in of_clients:
                yield Leak(f"result{path}", *_first_reader(of_clients[value]))

    def __str__(self) -> str:
        return "\n".join(f"{number:>3}  {stage}" for number, stage in enumerate(self.stages, start=1))

    def to_json(self) -> dict[str, Any]:
        """Returns stages and leaks as dicts of strings and numbers, for `json.dumps`."""
        stages = [
            {
                "kind": stage.kind,
                "placement": stage.placement and {"name": stage.placement.name, "size": stage.placement.size},
                "name": stage.name,
                "reads": list(stage.reads),
                "writes": list(stage.writes),
            }
            for stage in self.stages
        ]
        return {"stages": stages, "leaks": [dataclasses.asdict(leak) for leak in self.leaks]}

    def run(self, *args: Any) -> Any:
        """Runs the program stage by stage. The work of every client is a call of its own, with only that client's values.

        Args:
          *args: like those that the program was made from.

        Raises:
          ValueError: the clients are divided over an explicit axis of a mesh.

        >>> clients = Placement("clients", 2)
        >>> from fedsim import primitives as fed
        >>> def total(x): return fed.sum(fed.map(jnp.square, x))
        >>> x = fed.place(jnp.array([3.0, 4.0]), clients)
        >>> stages(total, x).run(x).item()
        25.0
        """
        values = self._trace.values(args)

        def read(x: Any) -> Any:
            return values[x] if isinstance(x, Value) else x.val

        for kind, group in self._trace.groups:
            for operation in group:
                inputs = [read(x) for x in operation.inputs]
                outputs = _client_by_client(inputs, **operation.params) if kind == "clients" else operation.run(inputs)
                values |= dict(zip(operation.outputs, outputs, strict=True))
        return self._trace.result([read(x) for x in self._trace.outputs])


def stages(function: Callable[..., Any], *args: Any) -> Program:
    """Takes a federated program apart: server, broadcast, the clients' work, reduction, server, and so on.

    The program may be a derivative. This is the form in which platforms with real clients can run it. Loops around federated
    operations cannot be taken apart: plan one round. Values that the function closes over count as the server's, so pass values
    of clients as arguments.

    Args:
      function: a function of values of the server and of clients (`Placed`).
      *args: its arguments, or their shapes and dtypes.

    Raises:
      ValueError: a federated operation lies within a loop, a condition or a function with a custom derivative.

    >>> from fedsim import primitives as fed
    >>> clients = fed.Placement("clients", 3)
    >>> def loss(params, x): return fed.mean(fed.map(lambda p, x: (p - x) ** 2, fed.broadcast(params, clients), x))
    >>> print(stages(jax.grad(loss), jnp.float32(0), fed.place(jnp.arange(3.0), clients)))
      1  server: nothing -> float32[]
      2  server to 3 clients: 2 float32[] -> 2 float32[]
      3  3 clients: 3 float32[] -> float32[]
      4  3 clients to server, sum: float32[] -> float32[]
    """
    return Program(function, args)


def _listed(shapes: Sequence[str]) -> str:
    counts = {shape: list(shapes).count(shape) for shape in shapes}
    return ", ".join(shape if count == 1 else f"{count} {shape}" for shape, count in counts.items()) or "nothing"


def _client_by_client(
    inputs: Sequence[Any], *, jaxpr: Any, shared: Any, summed: Any, placement: Placement, options: Any
) -> list[Any]:
    if placement.is_explicit:
        raise ValueError(
            f"Expected the {placement.name} not to be divided over an explicit axis of a mesh, because clients are called one "
            "by one: make the program outside of jax.set_mesh, or the axes of the mesh jax.sharding.AxisType.Auto."
        )
    work = jax.jit(jaxpr_as_fun(jaxpr))
    results = [work(*[x if whole else x[i] for x, whole in zip(inputs, shared, strict=True)]) for i in range(placement.size)]
    if not results:
        return [
            jnp.zeros(aval.shape if mark else (0, *aval.shape), aval.dtype)
            for aval, mark in zip(jaxpr.out_avals, summed, strict=True)
        ]
    return [
        jnp.sum(jnp.stack(parts), axis=0, dtype=wide(aval.dtype)).astype(aval.dtype) if mark else jnp.stack(parts)
        for parts, aval, mark in zip(zip(*results, strict=True), jaxpr.out_avals, summed, strict=True)
    ]


def _placed_leaves(tree: Any) -> list[bool]:
    """Returns for each leaf whether it belongs to a `Placed` value."""
    marks: list[bool] = []
    for value in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Placed)):
        marks += [isinstance(value, Placed)] * len(jax.tree.leaves(value))
    return marks


def _first_reader(operation: Operation | None) -> tuple[str, str]:
    return (operation.name, source(operation.equation)) if operation is not None else ("return", "the end of the program")
