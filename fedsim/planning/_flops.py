"""The number of floating-point operations of a traced function."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import partial_eval


@functools.lru_cache(maxsize=64)  # because it compiles
def flops_of(jaxpr: Jaxpr) -> float:
    """Returns XLA's count of floating-point operations, with the body of every `jax.lax.scan` counted for all of its steps.

    XLA counts the body of a loop once. The body of a loop of unknown length is counted once here, too. What the results do not
    depend on does not count, because XLA removes it.

    >>> def steps(x): return jax.lax.scan(lambda x, _: (x @ x, None), x, length=10)[0]
    >>> 10 * 2 * 8**3 <= flops_of(jax.make_jaxpr(steps)(jax.numpy.ones([8, 8])).jaxpr) < 10 * 2 * 8**3 + 100
    True
    """
    needed = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return _counted_once(needed) + _in_further_steps(needed)


def _counted_once(jaxpr: Jaxpr) -> float:
    def run(constants: list[Any], inputs: list[Any]) -> Any:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, constants))(*inputs)

    variables: list[list[Any]] = [jaxpr.constvars, jaxpr.invars]
    shapes = ([jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in of] for of in variables)
    costs: Any = jax.jit(run).lower(*shapes).cost_analysis()
    return float((costs or {}).get("flops", 0.0))


def _in_further_steps(jaxpr: Jaxpr) -> float:
    """Returns the operations that XLA leaves out: those of every loop of known length after its first step."""
    total = 0.0
    for equation in jaxpr.eqns:
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            total += repeats * _in_further_steps(inner)
            if repeats > 1:
                total += (repeats - 1) * _counted_once(inner)
    return total
