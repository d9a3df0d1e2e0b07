"""`Trace`: a federated program as a list of operations, in an order with few stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

# Equations whose inner jaxpr is evaluated as if it stood in their place.
_INLINED = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"}
# JAX's and fedsim's own functions between the user's code and an equation.
_LIBRARIES = (str(Path(jax.__file__).parent), str(Path(__file__).parent), str(Path(__file__).parents[1] / "execution"))


class Value:
    """A value in a program: an argument, a constant or the result of an operation."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


class Operation(NamedTuple):
    """An equation of a jaxpr, with a `Value` or a literal in place of each of its variables."""

    equation: Any
    inputs: list[Any]
    outputs: list[Value]

    @property
    def kind(self) -> str:
        """``"server"``, ``"broadcast"``, ``"clients"`` or ``"reduction"``."""
        if "placement" not in self.params:
            return "server"
        return {"broadcast": "broadcast", "map": "clients"}.get(self.name, "reduction")

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def params(self) -> Any:
        return self.equation.params

    @property
    def values(self) -> list[Value]:
        """The inputs that are not literals."""
        return [x for x in self.inputs if isinstance(x, Value)]

    @property
    def shared(self) -> list[Value]:
        """What every client gets as a whole; of the work of clients only."""
        return marked(self.inputs, self.params["shared"])

    @property
    def summed(self) -> list[Value]:
        """The results that are sums over the clients; of the work of clients only."""
        return marked(self.outputs, self.params["summed"])

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results for the values of the inputs."""
        primitive = self.equation.primitive
        bound = primitive.get_bind_params(self.params)
        subfunctions, params = bound if isinstance(bound, tuple) else ((), bound)  # as this version of JAX has it
        outputs = primitive.bind(*subfunctions, *inputs, **params)
        return outputs if primitive.multiple_results else [outputs]


class Trace:
    """A traced program.

    Args:
      function: a function of values of the server and of clients.
      args: its arguments, or their shapes and dtypes.

    Attributes:
      inputs, outputs: values or literals, the leaves of the arguments and of the result.
      operations: those that the result depends on.
      groups: the same operations in the order in which they run, divided into stages of one kind.

    Raises:
      ValueError: a federated operation lies within a loop, a condition or a function with a custom derivative.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        out_structure = None
        leaves, structure = jax.tree.flatten(tuple(args))

        def flat(*leaves: Any) -> list[Any]:
            nonlocal out_structure
            out, out_structure = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
            return [jnp.asarray(x) for x in out]

        traced = jax.make_jaxpr(flat)(*map(_type_of, leaves))
        self._out_structure: Any = out_structure
        self.inputs = [Value(aval) for aval in traced.in_avals]
        self._consts: dict[Value, Any] = {}
        self._federated: set[Value] = set()  # results of federated operations
        self.operations: list[Operation] = []
        self.outputs = self._flatten(traced, self.inputs)
        self._leave_out_unused()
        self.groups = _grouped(self.operations, {*self.inputs, *self._consts})

    def values(self, args: Sequence[Any]) -> dict[Value, Any]:
        """Returns what the inputs and the constants are for these arguments."""
        return {**self._consts, **dict(zip(self.inputs, jax.tree.leaves(tuple(args)), strict=True))}

    def result(self, outputs: Sequence[Any]) -> Any:
        """Returns the leaves of a result in the structure that the function returns."""
        return jax.tree.unflatten(self._out_structure, list(outputs))

    def _flatten(self, closed: Any, inputs: Sequence[Any]) -> list[Any]:
        """Adds the operations of a closed jaxpr; those of functions that were compiled separately stand in their place."""
        jaxpr = closed.jaxpr
        consts = {Value(jax.typeof(x)): x for x in closed.consts}
        self._consts |= consts
        values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        for equation in jaxpr.eqns:
            own: list[Any] = [x if isinstance(x, Literal) else values[x] for x in equation.invars]
            inner = [x for x in equation.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
            name = equation.primitive.name
            if name == "sharding_constraint" and isinstance(own[0], Value) and own[0] in self._federated:
                outputs = own  # see `Placement.shown`
            elif name in _INLINED and _is_federated(inner[0]):
                outputs = self._flatten(inner[0] if hasattr(inner[0], "consts") else ClosedJaxpr(inner[0], []), own)
            elif "placement" not in equation.params and any(map(_is_federated, inner)):
                raise ValueError(
                    "Expected federated operations outside of loops, conditions and functions with a custom derivative, found "
                    f"some in {name!r} at {source(equation)}: put these around the program."
                )
            else:
                new = [Value(var.aval) for var in equation.outvars]
                self.operations.append(Operation(equation, own, new))
                self._federated.update(new if "placement" in equation.params else [])
                outputs = new
            values |= dict(zip(equation.outvars, outputs, strict=True))
        return [x if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]

    def _leave_out_unused(self) -> None:
        used, kept = {x for x in self.outputs if isinstance(x, Value)}, []
        for operation in reversed(self.operations):
            if used.intersection(operation.outputs) or operation.equation.effects:
                used.update(operation.values)
                kept.append(operation)
        self.operations = kept[::-1]


def marked(values: Sequence[Any], marks: Sequence[bool]) -> list[Value]:
    """Returns the values, without literals, whose mark is True."""
    return [x for x, mark in zip(values, marks, strict=True) if mark and isinstance(x, Value)]


def _type_of(x: Any) -> Any:
    """Returns the type of an argument, without a mesh whose axes are all automatic.

    Such a mesh does not say how the array is divided, and a function of clients, where an axis is manual, could not index it.
    """
    kind = jax.typeof(x if hasattr(x, "dtype") else jnp.asarray(x))
    mesh = kind.sharding.mesh
    if mesh.explicit_axes or mesh.manual_axes:
        return kind
    return jax.core.ShapedArray(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _grouped(operations: Sequence[Operation], known: set[Value]) -> list[tuple[str, list[Operation]]]:
    """Orders operations such that few stages result: each stage has all operations of its kind that can run by then."""
    pending, groups = list(operations), []
    while pending:
        for kind in ("server", "broadcast", "clients", "reduction"):
            group: list[Operation] = []
            rest: list[Operation] = []
            inside: set[Value] = set()  # results of this stage
            sums: set[Value] = set()  # those of them that are not known before all clients have finished
            placement = None
            for operation in pending:
                own = operation.params.get("placement")
                fits = operation.kind == kind and own == (placement or own) and known.issuperset(operation.values)
                if fits and kind == "clients":
                    # A client cannot read what all clients compute in the same stage.
                    fits = sums.isdisjoint(operation.values) and inside.isdisjoint(operation.shared)
                if not fits:
                    rest.append(operation)
                    continue
                placement = own
                group.append(operation)
                known.update(operation.outputs)
                inside.update(operation.outputs)
                sums.update(operation.summed if kind == "clients" else [])
            pending = rest
            groups += [(kind, group)] if group else []
    return groups


def _is_federated(jaxpr: Any) -> bool:
    equations = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return any(
        "placement" in e.params or any(_is_federated(x) for x in e.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr"))
        for e in equations
    )


def source(equation: Any) -> str:
    """Returns file and line of the code that an equation comes from, outside of JAX and of fedsim's own machinery."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES) and not frame.file_name.startswith("<frozen"):
            return f"{frame.file_name}:{frame.line_num}"
    return "an unknown line"
