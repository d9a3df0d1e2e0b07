"""Clients that run in parallel lanes give the same result, and work after the last step is not inside the loop over steps."""

import dataclasses
import warnings

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, attacks
from fedsim.execution import _execution


@dataclasses.dataclass(frozen=True, eq=False)
class Marked(aggregators.Wrapper):
    """An algorithm whose methods use operations that nothing else in the round uses."""

    def client_memory(self, update):
        return jnp.zeros(())

    def send(self, update, common, memory, key):
        return super().send(jax.tree.map(jnp.sinh, update), common, (), key)._replace(memory=memory + 1)

    def accumulate(self, accumulator, update, weight, slot):
        return super().accumulate(accumulator, jax.tree.map(jnp.cosh, update), weight, slot)


@dataclasses.dataclass(frozen=True)
class MarkedAttack(attacks.Attack):
    def corrupt(self, update, key):
        return jax.tree.map(jnp.tan, update)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Keeping(fedsim.algorithms.FedAvg):
    def client_memory(self, shared):
        return jax.tree.map(jnp.zeros_like, shared.params)

    def client_loss(self, shared, params, batch):
        return super().client_loss(shared, params, batch) + 0 * jnp.sum(jnp.asinh(params["linear"]["b"]))

    def client_update(self, shared, client):
        return super().client_update(shared, client)._replace(memory=lambda arrived: jax.tree.map(jnp.acosh, arrived))


# The number of loops around each operation: over rounds, groups and steps.
MARKS = {"asinh": 3, "tan": 2, "sinh": 2, "cosh": 2, "acosh": 2}


def depths(jaxpr, depth=0):
    """Returns the numbers of loops around each marked operation."""
    found = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name in MARKS:
            found.setdefault(equation.primitive.name, set()).add(depth)
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                for name, levels in depths(
                    inner, depth + (equation.primitive.name in ("while", "scan", "bounded_loop"))
                ).items():
                    found.setdefault(name, set()).update(levels)
    return found


@pytest.mark.parametrize("lanes", [1, 4])
def test_what_happens_once_per_client_is_not_inside_a_step(lanes):
    """This holds for sending, compression, attacks, clients' memories and the accumulation."""
    algorithm = Keeping(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        aggregator=Marked(),
        execution=fedsim.Jit(lanes=lanes, memory="resident"),
    )
    cohort = federation.cohort()
    cohort = dataclasses.replace(cohort, attack=MarkedAttack(), attackers=np.arange(8) == 2)
    state = algorithm.with_memory(algorithm.init(jax.random.key(0)), cohort.data)
    run = lambda server: algorithm.execution.run(algorithm, state._replace(server=server), [cohort])  # noqa: E731
    jaxpr = jax.make_jaxpr(run)(state.server)
    found = depths(jaxpr.jaxpr)
    assert found.keys() == MARKS.keys()
    for name, depth in MARKS.items():
        # With groups there is one loop for each width, all at one level.
        assert found[name] == {depth}, name


@pytest.mark.first(1)
@pytest.mark.parametrize("aggregator", [aggregators.Mean(), aggregators.CoordinateMedian()])
@pytest.mark.parametrize("lanes", [2, 3, 8])
def test_groups_give_the_result_of_one_client_after_another(lanes, aggregator):
    """This also holds if the accumulator is so large that updates are accumulated one by one."""
    states, infos = [], []
    for execution in (fedsim.Jit(), fedsim.Jit(lanes=lanes)):
        algorithm = fedsim.algorithms.SCAFFOLD(
            model=federation.model(),
            client_optimizer=optax.sgd(0.1),
            batches=fedsim.Batches(size=4, epochs=2),
            aggregator=aggregator,
            execution=execution,
        )
        state = algorithm.init(jax.random.key(0))
        for round in range(3):
            state, info = algorithm.apply(state, federation.cohort(round=round))
        states.append(federation.plain(state))
        infos.append(info)
    federation.assert_trees_close(*states)
    federation.assert_trees_close(*infos)


def test_a_device_that_runs_out_of_memory_gets_fewer_lanes(monkeypatch):
    """The test raises an error with XLA's message."""
    algorithm = fedsim.algorithms.FedAvg(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        execution=fedsim.Jit(lanes=8),
    )
    tried, dispatch_as = [], _execution.Jit._dispatch_as

    def limited(self, layout, *args):
        tried.append(layout.widths[0])
        if layout.widths[0] > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")
        return dispatch_as(self, layout, *args)

    monkeypatch.setattr(_execution.Jit, "_dispatch_as", limited)
    start = algorithm.init(jax.random.key(0))
    with pytest.warns(UserWarning, match="ran out of memory") as caught:
        state, _ = algorithm.apply(start, federation.cohort())
    assert [str(warning.message).split(", so")[0] for warning in caught] == [
        "The device ran out of memory with 8 clients side by side",
        "The device ran out of memory with 4 clients side by side",
    ]
    assert "runs again with 2. Set lanes=2" in str(caught[1].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm.apply(state, federation.cohort(round=1))
    assert tried == [8, 4, 2, 2]
    expected, _ = dataclasses.replace(algorithm, execution=fedsim.Jit()).apply(start, federation.cohort())
    federation.assert_trees_close(state, expected)

    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(_execution.Jit, "_dispatch_as", full)
    for fewest in (fedsim.Jit(lanes=1), fedsim.Jit(lanes=1, differentiable=True)):
        algorithm = dataclasses.replace(algorithm, execution=fewest)
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            algorithm.apply(start, federation.cohort())
