"""`stages`: a federated program taken apart into what the server does, what it sends, and what each client does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from fedsim.primitives._placed import Placed
from fedsim.primitives._placement import Placement
from fedsim.primitives._primitives import bind_map

T = TypeVar("T")

# Equations whose inner jaxpr is evaluated as if it stood in their place.
_INLINED = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"}
# Equations that JAX adds between values of clients, and that work client by client.
_CLIENT_BY_CLIENT = {"add_any", "sharding_constraint"}
# JAX's and fedsim's own functions between the user's code and an equation.
_LIBRARIES = (str(Path(jax.__file__).parent), str(Path(__file__).parent), str(Path(__file__).parents[1] / "execution"))


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


class _Value:
    """A value in a program: an input or the result of an operation."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


class _Operation(NamedTuple):
    """An equation of a jaxpr, with values in place of its variables."""

    equation: Any
    inputs: list[Any]  # of `_Value` or `Literal`
    outputs: list[_Value]

    @property
    def kind(self) -> str:
        if "placement" not in self.equation.params:
            return "server"
        return {"broadcast": "broadcast", "map": "clients"}.get(self.equation.primitive.name, "reduction")

    @property
    def values(self) -> list[_Value]:
        """The inputs that are not literals."""
        return [x for x in self.inputs if isinstance(x, _Value)]

    def run(self, inputs: Sequence[Any], together: bool = False) -> list[Any]:
        """Runs the operation, with one client's work after another as calls of their own, or all ``together``."""
        primitive, params = self.equation.primitive, self.equation.params
        if primitive.name == "map" and not together:
            return _client_by_client(inputs, **params)
        bound = primitive.get_bind_params(params)
        subfunctions, params = bound if isinstance(bound, tuple) else ((), bound)
        outputs = primitive.bind(*subfunctions, *inputs, **params)
        return outputs if primitive.multiple_results else [outputs]


class Program:
    """A federated program in stages, see `stages`.

    Attributes:
      stages: the stages in the order in which they run.
      leaks: the ways in which values of single clients reach results without a reduction.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        out_structure = None
        leaves, structure = jax.tree.flatten(tuple(args))

        def flat(*leaves: Any) -> list[Any]:
            nonlocal out_structure
            out, out_structure = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
            return [jnp.asarray(x) for x in out]

        avals = [jax.typeof(x) if hasattr(x, "dtype") else jax.typeof(jnp.asarray(x)) for x in leaves]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
        traced = jax.make_jaxpr(flat)(*shapes)
        self._out_structure: Any = out_structure
        self._inputs = [_Value(aval) for aval in traced.in_avals]
        self._consts: dict[_Value, Any] = {}
        self._operations: list[_Operation] = []
        self._outputs = self._flatten(traced, self._inputs)
        self._leave_out_unused()
        self._groups = _grouped(self._operations, {*self._inputs, *self._consts})
        self.stages = tuple(self._stage(kind, group) for kind, group in self._groups)
        self.leaks = tuple(self._leaks(_placed_leaves(tuple(args))))

    def _flatten(self, closed: Any, inputs: Sequence[Any]) -> list[Any]:
        """Adds the operations of a closed jaxpr; those of functions that were compiled separately stand in their place."""
        jaxpr = closed.jaxpr
        consts = {_Value(jax.typeof(x)): x for x in closed.consts}
        self._consts |= consts
        values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        for equation in jaxpr.eqns:
            own = [x if isinstance(x, Literal) else values[x] for x in equation.invars]
            inner = [x for x in equation.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
            name = equation.primitive.name
            if name in _INLINED and _is_federated(inner[0]):
                outputs = self._flatten(inner[0] if hasattr(inner[0], "consts") else ClosedJaxpr(inner[0], []), own)
            elif "placement" not in equation.params and any(map(_is_federated, inner)):
                raise ValueError(
                    "Expected federated operations outside of loops, conditions and functions with a custom derivative, found "
                    f"some in {name!r} at {_source(equation)}: put these around the program."
                )
            else:
                outputs = [_Value(var.aval) for var in equation.outvars]
                self._operations.append(_Operation(equation, own, outputs))
            values |= dict(zip(equation.outvars, outputs, strict=True))
        return [x if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]

    def _leave_out_unused(self) -> None:
        used, kept = {x for x in self._outputs if isinstance(x, _Value)}, []
        for operation in reversed(self._operations):
            if used.intersection(operation.outputs) or operation.equation.effects:
                used.update(operation.values)
                kept.append(operation)
        self._operations = kept[::-1]

    def _stage(self, kind: str, group: Sequence[_Operation]) -> Stage:
        inside = {id(operation) for operation in group}
        written = {value for operation in group for value in operation.outputs}
        reads = dict.fromkeys(value for operation in group for value in operation.values if value not in written)
        needed = {value for other in self._operations if id(other) not in inside for value in other.values}
        needed |= {value for value in self._outputs if isinstance(value, _Value)}
        params = group[0].equation.params
        of_server: set[Any] = set()
        totals: set[Any] = set()
        if kind == "clients":
            for operation in group:
                of_server |= set(_only(operation.inputs, operation.equation.params["shared"]))
                totals |= set(_only(operation.outputs, operation.equation.params["summed"]))
            of_server |= totals

        def of_one(value: _Value, stacked: bool) -> str:
            stacked &= value not in of_server
            total = "sum of " if value in totals else ""
            return f"{total}{value.aval.dtype}{list(value.aval.shape)[int(stacked) :]}"

        names = [operation.equation.params.get("name", operation.equation.primitive.name) for operation in group]
        return Stage(
            kind,
            params.get("placement"),
            tuple(of_one(value, kind in ("clients", "reduction")) for value in reads),
            tuple(of_one(x, kind in ("clients", "broadcast")) for o in group for x in o.outputs if x in needed),
            ", ".join(dict.fromkeys(names)) if kind == "reduction" else "",
        )

    def _leaks(self, placed_inputs: Sequence[bool]) -> Iterator[Leak]:
        # The values that depend on single clients. The entry is None as long as only that client has it, then the first
        # operation that gave it to the server or to other clients.
        of_clients: dict[Any, Any] = dict.fromkeys(_only(self._inputs, placed_inputs))
        for operation in self._operations:
            equation = operation.equation
            own = [value for value in operation.values if value in of_clients]
            reader = next((of_clients[value] for value in own if of_clients[value] is not None), None)
            if operation.kind == "clients":
                if of_clients.keys() & _only(operation.inputs, equation.params["shared"]):
                    reader = reader or equation  # every client gets the values of all
                summed = equation.params["summed"]
                of_clients |= {x: reader for x, mark in zip(operation.outputs, summed, strict=True) if reader or not mark}
            elif operation.kind == "reduction":
                of_clients |= dict.fromkeys(operation.outputs, reader) if reader else {}
            elif own:
                at_clients = equation.primitive.name in _CLIENT_BY_CLIENT
                of_clients |= dict.fromkeys(operation.outputs, reader if at_clients else reader or equation)
        results = jax.tree.unflatten(self._out_structure, list(self._outputs))
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(results)]
        for path, value, placed in zip(paths, self._outputs, _placed_leaves(results), strict=True):
            if not placed and isinstance(value, _Value) and value in of_clients:
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

        >>> clients = Placement("clients", 2)
        >>> from fedsim import primitives as fed
        >>> def total(x): return fed.sum(fed.map(jnp.square, x))
        >>> x = fed.place(jnp.array([3.0, 4.0]), clients)
        >>> stages(total, x).run(x).item()
        25.0
        """
        values = {**self._consts, **dict(zip(self._inputs, jax.tree.leaves(args), strict=True))}

        def read(x: Any) -> Any:
            return values[x] if isinstance(x, _Value) else x.val

        for _, group in self._groups:
            for operation in group:
                outputs = operation.run([read(x) for x in operation.inputs])
                values |= dict(zip(operation.outputs, outputs, strict=True))
        return jax.tree.unflatten(self._out_structure, [read(x) for x in self._outputs])

    def run_fused(self, *args: Any) -> Any:
        """Runs the program as `program` does."""
        values = {**self._consts, **dict(zip(self._inputs, jax.tree.leaves(args), strict=True))}
        sources: dict[_Value, Any] = {}  # what was broadcast, until someone needs the copies
        totals: set[_Value] = set()  # results of clients whose sum is known instead
        users: dict[_Value, list[_Operation]] = {}
        for operation in self._operations:
            for value in operation.values:
                users.setdefault(value, []).append(operation)
        results = {value for value in self._outputs if isinstance(value, _Value)}

        def read(x: Any) -> Any:
            if not isinstance(x, _Value):
                return x.val
            if x not in values:
                source, operation = sources[x]
                (values[x],) = operation.run([source])
            return values[x]

        def is_only_summed(x: _Value) -> bool:
            names = [user.equation.primitive.name for user in users.get(x, []) if user.kind == "reduction"]
            # Half precision is rounded once, at the end, only if the values themselves are summed.
            is_wide = x.aval.dtype.itemsize >= 4
            return is_wide and x not in results and len(names) == len(users.get(x, [])) and set(names) <= {"sum", "mean"}

        for kind, group in self._groups:
            if kind == "clients":
                inside = {value for operation in group for value in operation.outputs}
                wanted = [
                    value
                    for operation in group
                    for value in operation.outputs
                    if value in results or any(user not in group for user in users.get(value, []))
                ]
                sums = {x for o in group for x in _only(o.outputs, o.equation.params["summed"])}
                new = {value for value in wanted if value not in sums and is_only_summed(value)}
                done = _one_function(group, inside, wanted, [value in sums | new for value in wanted], read, sources)
                values |= dict(zip(wanted, done, strict=True))
                totals |= new
                continue
            for operation in group:
                (first, *_) = operation.inputs or [None]
                if kind == "broadcast":
                    sources[operation.outputs[0]] = read(first), operation
                elif kind == "reduction" and first in totals:
                    total, name = values[first], operation.equation.primitive.name
                    size = operation.equation.params["placement"].size
                    values[operation.outputs[0]] = total if name == "sum" else total / jnp.asarray(max(size, 1), total.dtype)
                else:
                    outputs = operation.run([read(x) for x in operation.inputs], together=True)
                    values |= dict(zip(operation.outputs, outputs, strict=True))
        return jax.tree.unflatten(self._out_structure, [read(x) for x in self._outputs])


def _one_function(
    group: Sequence[_Operation], inside: set[_Value], wanted: Sequence[_Value], summed: Sequence[bool], read: Any, sources: Any
) -> list[Any]:
    """Runs all maps of a stage as one, which gets what was broadcast without copies and sums results on the way."""
    operands: dict[tuple[Any, bool], Any] = {}
    for operation in group:
        for x, whole in zip(operation.inputs, operation.equation.params["shared"], strict=True):
            if not isinstance(x, _Value) or x in inside:
                continue
            if not whole and x in sources:
                operands[x, False] = sources[x][0], True
            else:
                operands[x, whole] = read(x), whole
    keys = list(operands)

    def work(*own: Any) -> list[Any]:
        known = dict(zip(keys, own, strict=True))
        for operation in group:
            marks = operation.equation.params["shared"]
            args = [known[x, mark] if isinstance(x, _Value) else x.val for x, mark in zip(operation.inputs, marks, strict=True)]
            for value, result in zip(operation.outputs, jaxpr_as_fun(operation.equation.params["jaxpr"])(*args), strict=True):
                known[value, False] = result
        return [known[value, False] for value in wanted]

    marks = [whole for _, whole in operands.values()]
    placement = group[0].equation.params["placement"]
    return bind_map(work, [jnp.asarray(x) for x, _ in operands.values()], placement, marks, summed)


def program(function: Callable[..., T]) -> Callable[..., T]:
    """Returns a federated program that runs in as few passes over the clients as possible, with the same results.

    All work between a broadcast and a reduction is one `map`. It reads what was broadcast without a copy for each client, and
    sums and means are added up client by client, so that memory does not grow with the number of clients. The function
    composes with JAX's transformations like any other.

    Args:
      function: a function of values of the server and of clients. Federated operations within its loops and conditions are not
        possible; put the loop around the program.

    Raises:
      ValueError: when it is called, if a federated operation lies within a loop or a condition.

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
        return Program(function, args).run_fused(*args)

    return run


def stages(function: Callable[..., Any], *args: Any) -> Program:
    """Takes a federated program apart: server, broadcast, the clients' work, reduction, server, and so on.

    The program may be a derivative. This is the form in which platforms with real clients can run it. Loops around federated
    operations cannot be taken apart: plan one round. Values that the function closes over count as the server's, so pass values
    of clients as arguments.

    Args:
      function: a function of values of the server and of clients (`Placed`).
      *args: its arguments, or their shapes and dtypes.

    Raises:
      ValueError: a federated operation lies within a loop or a condition.

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


def _is_federated(jaxpr: Any) -> bool:
    equations = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return any(
        "placement" in e.params or any(_is_federated(x) for x in e.params.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr"))
        for e in equations
    )


def _grouped(operations: Sequence[_Operation], known: set[Any]) -> list[tuple[str, list[_Operation]]]:
    """Orders operations such that few stages result: each stage has all operations of its kind that can run by then."""
    pending, groups = list(operations), []
    while pending:
        for kind in ("server", "broadcast", "clients", "reduction"):
            group: list[_Operation] = []
            rest: list[_Operation] = []
            placement = None
            # What clients add up, or give to all others, is not known before the end of their stage.
            later: set[Any] = set()
            for operation in pending:
                params = operation.equation.params
                own = params.get("placement")
                shared = _only(operation.inputs, params["shared"]) if operation.kind == "clients" else []
                fits = operation.kind == kind and own == (placement or own) and later.isdisjoint(operation.values)
                inside = {value for other in group for value in other.outputs}
                if fits and known.issuperset(operation.values) and inside.isdisjoint(shared if kind == "clients" else []):
                    placement = own
                    group.append(operation)
                    known.update(operation.outputs)
                    if kind == "clients":
                        later.update(_only(operation.outputs, params["summed"]))
                else:
                    rest.append(operation)
            pending = rest
            groups += [(kind, group)] if group else []
    return groups


def _only(values: Sequence[Any], marks: Sequence[bool]) -> list[Any]:
    return [x for x, mark in zip(values, marks, strict=True) if mark and isinstance(x, _Value)]


def _listed(shapes: Sequence[str]) -> str:
    counts = {shape: list(shapes).count(shape) for shape in shapes}
    return ", ".join(shape if count == 1 else f"{count} {shape}" for shape, count in counts.items()) or "nothing"


def _client_by_client(inputs: Sequence[Any], *, jaxpr: Any, shared: Any, summed: Any, placement: Placement) -> list[Any]:
    work = jax.jit(jaxpr_as_fun(jaxpr))
    results = [work(*[x if whole else x[i] for x, whole in zip(inputs, shared, strict=True)]) for i in range(placement.size)]
    if not results:
        return [
            jnp.zeros(aval.shape if mark else (0, *aval.shape), aval.dtype)
            for aval, mark in zip(jaxpr.out_avals, summed, strict=True)
        ]
    return [
        sum(parts[1:], parts[0]) if mark else jnp.stack(parts)
        for parts, mark in zip(zip(*results, strict=True), summed, strict=True)
    ]


def _placed_leaves(tree: Any) -> list[bool]:
    """Returns for each leaf whether it belongs to a `Placed` value."""
    marks: list[bool] = []
    for value in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Placed)):
        marks += [isinstance(value, Placed)] * len(jax.tree.leaves(value))
    return marks


def _first_reader(equation: Any) -> tuple[str, str]:
    return (equation.primitive.name, _source(equation)) if equation is not None else ("return", "the end of the program")


def _source(equation: Any) -> str:
    """Returns file and line of the code that an equation comes from, outside of JAX and of fedsim's own machinery."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES) and not frame.file_name.startswith("<frozen"):
            return f"{frame.file_name}:{frame.line_num}"
    return "an unknown line"
