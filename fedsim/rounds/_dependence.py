"""`depends`: which results of a traced function depend on some of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

Marks = list[bool]


def depends(jaxpr: Jaxpr, marks: Sequence[bool]) -> Marks:
    """Returns for each result of a jaxpr whether it depends on a marked argument.

    States of loops are followed array by array, through any number of steps. One boolean by which whole arrays are chosen, such
    as whether an update is finite, is not followed.

    Args:
      jaxpr: without constants of its own that are marked.
      marks: for each argument, whether it is marked.

    >>> import jax
    >>> def both(x, y):
    ...     return jax.lax.fori_loop(0, 3, lambda _, state: (state[0] + 1, state[0] * state[1]), (x, y))
    >>> traced = jax.make_jaxpr(both)(1.0, 2.0).jaxpr
    >>> depends(traced, [True, False]), depends(traced, [False, True])
    ([True, True], [False, True])
    >>> def every_second(x, y, rows):
    ...     return jax.lax.scan(lambda state, row: (state[::-1], row * y), (x, y), rows)
    >>> traced = jax.make_jaxpr(every_second)(1.0, 2.0, jax.numpy.ones(4)).jaxpr
    >>> depends(traced, [True, False, False]), depends(traced, [False, False, True])
    ([True, True, False], [False, False, True])
    """
    marked = {var for var, mark in zip(jaxpr.invars, marks, strict=True) if mark}

    def are_marked(atoms: Sequence[Any]) -> Marks:
        return [not isinstance(atom, Literal) and atom in marked for atom in atoms]

    for equation in jaxpr.eqns:
        given = are_marked(equation.invars)
        if any(given):
            results = _RULES.get(equation.primitive.name, _of_function)(equation, given)
            marked |= {var for var, mark in zip(equation.outvars, results, strict=True) if mark}
    return are_marked(jaxpr.outvars)


def _of_function(equation: Any, marks: Marks) -> Marks:
    """Follows a call of one function, such as that of `jax.jit`; everything else depends on all of its arguments."""
    inner = [param for param in equation.params.values() if isinstance(param, (Jaxpr, ClosedJaxpr))]
    if len(inner) == 1:
        jaxpr = _open(inner[0])
        if (len(jaxpr.invars), len(jaxpr.outvars)) == (len(marks), len(equation.outvars)):
            return depends(jaxpr, marks)
    return [True] * len(equation.outvars)


def _of_choice(equation: Any, marks: Marks) -> Marks:
    return [any(marks if equation.invars[0].aval.shape else marks[1:])]


def _of_while(equation: Any, marks: Marks) -> Marks:
    params, results = equation.params, len(equation.outvars)
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    state = _after_steps(_open(params["body_jaxpr"]), marks[of_condition : of_condition + of_body], marks[-results:])
    if any(depends(_open(params["cond_jaxpr"]), [*marks[:of_condition], *state])):
        return [True] * results
    return state


def _of_scan(equation: Any, marks: Marks) -> Marks:
    params = equation.params
    if "num_consts" in params:
        consts, states = params["num_consts"], params["num_carry"]
    else:  # JAX 0.12
        consts, states, _ = map(len, params["ft_in"].unpack())
    state, rows = marks[consts : consts + states], marks[consts + states :]
    jaxpr = _open(params["jaxpr"])
    state = _after_steps(jaxpr, marks[:consts], state, rows)
    return [*state, *depends(jaxpr, [*marks[:consts], *state, *rows])[states:]]


def _of_cond(equation: Any, marks: Marks) -> Marks:
    if marks[0]:
        return [True] * len(equation.outvars)
    of_branches = (depends(_open(each), marks[1:]) for each in equation.params["branches"])
    return [any(of_each) for of_each in zip(*of_branches, strict=True)]


def _of_bounded_loop(equation: Any, marks: Marks) -> Marks:
    results = len(equation.outvars)
    steps, consts, state = marks[0], marks[1:-results], marks[-results:]
    return [True] * results if steps else _after_steps(_open(equation.params["jaxpr"]), consts, state, [False])


def _after_steps(step: Jaxpr, consts: Marks, state: Marks, rest: Sequence[bool] = ()) -> Marks:
    """Returns the marks of a state after any number of steps, functions of constants, the state and the rest."""
    while True:
        after = [a or b for a, b in zip(state, depends(step, [*consts, *state, *rest]), strict=False)]
        if after == state:
            return state
        state = after


def _open(jaxpr: Any) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


_RULES: dict[str, Callable[[Any, Marks], Marks]] = {
    "select_n": _of_choice,
    "while": _of_while,
    "scan": _of_scan,
    "cond": _of_cond,
    "bounded_loop": _of_bounded_loop,
}
