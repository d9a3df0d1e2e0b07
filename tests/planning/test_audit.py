"""What the server learns: leaks are found and named, and programs run stage by stage."""

import dataclasses
import json
from pathlib import Path

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import primitives as fed
from fedsim.execution._federated_round import federated_round


def fedavg(cls=fedsim.algorithms.FedAvg, **options):
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)}
    return cls(**settings | {"execution": fedsim.Jit()} | options)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Favourite(fedsim.algorithms.FedAvg):
    """The server weighs the update by the weight of the cohort's first client, which it must not know."""

    def server_update(self, state, update, info):
        scaled = jax.tree.map(lambda x: x * info.clients["weight"][0], update)
        return super().server_update(state, scaled, info)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PythonLoop(fedsim.algorithms.FedAvg):
    def apply(self, state, cohort):
        return state, None


def test_a_leak_is_named_with_its_line():
    audit = fedsim.audit(fedavg(Favourite), federation.cohort())
    assert {leak.result for leak in audit.leaks} == {"state.params['linear']['b']", "state.params['linear']['w']"}
    for leak in audit.leaks:
        name, _, line = leak.where.rpartition(":")
        assert name == __file__
        assert 'info.clients["weight"][0]' in Path(name).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert str(audit).startswith("Favourite: values of single clients reach the server's state\n  state.params")


def test_a_sum_over_the_cohort_is_a_reduction():
    class Total(Favourite):
        def server_update(self, state, update, info):
            scaled = jax.tree.map(lambda x: x * info.total("weight"), update)
            return fedsim.algorithms.FedAvg.server_update(self, state, scaled, info)

    audit = fedsim.audit(fedavg(Total), federation.cohort())
    assert audit.leaks == ()
    assert audit.reported == ("dropped", "loss", "weight")


def test_an_aggregator_that_collects_updates_is_named():
    audit = fedsim.audit(fedavg(aggregator=fedsim.aggregators.CoordinateMedian()), federation.cohort())
    assert audit.leaks == ()
    assert "CoordinateMedian needs every client's update" in str(audit)
    with pytest.raises(ValueError, match="PythonLoop overrides apply with a Python loop"):
        fedsim.audit(fedavg(PythonLoop), federation.cohort())


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TwoCalls(fedsim.algorithms.FedAvg):
    """Clients also send an update by another aggregator."""

    other: fedsim.aggregators.Aggregator

    def round(self, state, clients):
        clients.aggregate(self.client_update, self.broadcast(state), name="other", aggregator=self.other)
        return super().round(state, clients)


def test_the_aggregators_of_all_calls_are_seen():
    three, five = (fedsim.aggregators.SecureMean(max_weight=12.0, minimum=minimum) for minimum in (3, 5))
    for other, minimum in ((fedsim.aggregators.Mean(), 1), (three, 3)):
        audit = fedsim.audit(fedavg(TwoCalls, aggregator=five, other=other), federation.cohort())
        assert audit.minimum == minimum and ("sees no more than the sum" in str(audit)) == (minimum > 1)
    collecting = fedsim.audit(fedavg(TwoCalls, other=fedsim.aggregators.CoordinateMedian()), federation.cohort())
    assert "CoordinateMedian needs every client's update" in str(collecting)


def test_a_client_s_stage_gets_only_its_own_data():
    """The examples of the other clients are replaced by NaN, one client after another."""
    algorithm, cohort = fedavg(), federation.cohort()
    function, args = federated_round(algorithm, algorithm.init(jax.random.key(0)), cohort)
    program = fed.stages(function, *args)
    whole = program.run(*args)[1].clients["loss"]
    numbers, state, key, columns, memories = args
    for slot in (0, 3):
        other = np.arange(cohort.slots) != slot
        spoiled = {"x": columns.stacked["x"].copy(), "y": columns.stacked["y"]}
        spoiled["x"][other] = np.nan
        changed = program.run(numbers, state, key, fed.Placed(spoiled, columns.placement), memories)[1].clients["loss"]
        np.testing.assert_array_equal(changed[slot], whole[slot])


CLIENTS = fed.Placement("clients", 3)


def program(params, x):
    own = fed.map(lambda p, x: (p - x) ** 2, fed.broadcast(params, CLIENTS), x)
    return fed.mean(own), own


def test_stages_as_text_json_and_values():
    x = fed.place(jnp.arange(3.0), CLIENTS)
    stages = fed.stages(jax.jit(program), jnp.float32(1), x)
    assert [stage.kind for stage in stages.stages] == ["broadcast", "clients", "reduction"]
    assert str(stages).splitlines()[-1] == "  3  3 clients to server, mean: float32[] -> float32[]"
    assert json.loads(json.dumps(stages.to_json()))["stages"][1] == {
        "kind": "clients",
        "placement": {"name": "clients", "size": 3},
        "name": "",
        "reads": ["float32[]", "float32[]"],
        "writes": ["float32[]"],
    }
    mean, own = stages.run(jnp.float32(1), x)
    assert (float(mean), own.stacked.tolist()) == (pytest.approx(2 / 3), [1.0, 0.0, 1.0])
    assert stages.leaks == ()


def test_stages_of_a_derivative():
    x = fed.place(jnp.arange(3.0), CLIENTS)

    def derivative(params):
        return jax.jvp(jax.grad(lambda p: program(p, x)[0] ** 2), (params,), (params,))

    stages = fed.stages(derivative, jnp.float32(3))
    # (mean (p - x)^2)^2 = (p^2 - 2p + 5/3)^2
    assert [float(y) for y in stages.run(jnp.float32(3))] == pytest.approx(
        [2 * (14 / 3) * 4, 3 * (2 * 4 * 4 + 2 * (14 / 3) * 2)]
    )
    assert {stage.kind for stage in stages.stages} == {"server", "broadcast", "clients", "reduction"}


def test_leaks_of_programs():
    x = fed.place(jnp.arange(3.0), CLIENTS)
    (leak,) = fed.stages(lambda x: x.stacked, x).leaks
    assert (leak.result, leak.equation) == ("result", "return")
    (leak,) = fed.stages(lambda x: {"best": jnp.max(x.stacked), "mean": fed.mean(x)}, x).leaks
    assert (leak.result, leak.equation) == ("result['best']", "reduce_max")
    stolen = {
        "broadcast": lambda x: fed.mean(fed.broadcast(x.stacked[0], CLIENTS)),
        "map": lambda x: fed.mean(fed.map(lambda own: x.stacked, x)),
    }
    for name, function in stolen.items():  # a value that the server has read stays one behind a reduction
        (leak,) = fed.stages(function, x).leaks
        assert leak.equation == ("slice" if name == "broadcast" else "map")
    with pytest.raises(ValueError, match="outside of loops, conditions and .* found some in 'scan'"):
        fed.stages(lambda x: jax.lax.scan(lambda c, _: (c + fed.mean(x), None), 0.0, length=2)[0], x)


def test_an_audit_makes_no_parameters():
    class OfShapes(fedsim.algorithms.FedAvg):
        def init(self, key):
            assert isinstance(key, jax.core.Tracer)
            return super().init(key)

    assert fedsim.audit(fedavg(OfShapes), federation.cohort()).leaks == ()
