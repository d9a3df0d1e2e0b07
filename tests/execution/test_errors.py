"""Errors before a round: accumulators too large for memory, states and memories of another form, names already in use."""

import dataclasses
import traceback

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import BATCHES, Counting, Damped, Maximum

import fedsim
from fedsim import aggregators, execution, rounds
from fedsim.algorithms import FedAvg


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Wide(fedsim.Algorithm):
    """Clients send ``size`` zeros, to one of ``groups``, if there are any."""

    size: int = 10_000
    groups: int = 0

    def init(self, key):
        return jnp.zeros(())

    def client_update(self, shared, client):
        def add(total, batch):
            return total + jnp.sum(batch.examples["x"], where=batch.mask[:, None])

        update = jnp.full(self.size, client.for_each_batch(self.batches, add, jnp.zeros(())))
        update = aggregators.Member(client.position % self.groups, update) if self.groups else update
        return fedsim.ClientUpdate(update, jnp.float32(1))

    def server_update(self, state, update, info):
        return state + jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, update))


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "devices"), [(0, 4), (0, 2), (3, 1)])
def test_accumulators_that_do_not_fit_are_rejected(groups, devices, monkeypatch):
    """One byte less than the accumulators need is rejected. They are a large part of the memory of the compiled round."""
    aggregator = aggregators.GeometricMedian()
    aggregator = aggregators.Grouped(groups=groups, inner=aggregator) if groups else aggregator
    way, slots = fedsim.Pmap(devices=devices), 10  # 8 clients have a program of 10 slots
    algorithm = Wide(batches=BATCHES, aggregator=aggregator, groups=groups, execution=way)
    state, cohort = jnp.zeros(()), federation.cohort()
    one = 4 * slots * (algorithm.size + 1) * max(1, groups) + 4 * groups
    needs = one * devices

    monkeypatch.setattr("psutil.virtual_memory", lambda: type("free", (), {"available": needs - 1}))
    with pytest.raises(ValueError, match=f"with devices={devices} 0.0 GB in total"):
        algorithm.apply(state, cohort)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("free", (), {"available": needs}))
    algorithm.apply(state, cohort)
    reserved = way.lower(algorithm, cohort, state).compile().memory_analysis().temp_size_in_bytes * devices
    assert needs <= reserved < 4 * needs


def test_updates_that_do_not_fit_at_once_are_rejected(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("free", (), {"available": 10}))
    for way in (fedsim.Jit(), fedsim.Debug()):
        algorithm = Counting(batches=BATCHES, aggregator=Maximum(), execution=way)
        with pytest.raises(
            (ValueError, fedsim.execution.StageError),
            match="Maximum needs 0.0 MB for the updates of (10|8) clients, .* are free",
        ):
            algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


def test_a_state_of_another_population_is_rejected():
    algorithm = Counting(batches=BATCHES)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    with pytest.raises(ValueError, match="memories of 2 clients, .* got one of 8 clients"):
        algorithm.apply(state, federation.cohort(federation.data(sizes=(2, 3))))


def test_a_memory_of_another_structure_is_rejected():
    class Odd(Counting):
        def client_update(self, shared, client):
            return super().client_update(shared, client)._replace(memory=())

    algorithm = Odd(batches=BATCHES, execution=fedsim.Jit())
    with pytest.raises(ValueError, match="client_update keeps .* client_memory starts with"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


@pytest.mark.first(2)
@pytest.mark.parametrize("way", [fedsim.Jit(memory="stream"), fedsim.Jit(lanes=2), fedsim.Debug()])
def test_a_memory_of_another_shape_is_rejected_and_another_dtype_is_cast(way):
    class Short(Counting):
        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            return result._replace(memory=result.memory._replace(total=result.memory.total[:1]))

    class Half(Counting):
        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            return result._replace(memory=result.memory._replace(total=result.memory.total.astype(jnp.float16)))

    class Fractional(Counting):
        def client_update(self, shared, client):
            result = super().client_update(shared, client)
            return result._replace(memory=result.memory._replace(visits=client.memory.visits.astype(jnp.float32) + 0.5))

    algorithm = Short(batches=BATCHES, execution=way)
    with pytest.raises((ValueError, execution.StageError), match=r"client_update keeps \[\(\), \(1,\)\], and client_memory"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    algorithm = Fractional(batches=BATCHES, execution=way)
    with pytest.raises((ValueError, execution.StageError), match="keeps floats where client_memory starts with int32"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    algorithm = Half(batches=BATCHES, execution=way)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    rows, seen = federation.plain(state).clients
    assert rows[0].visits.dtype == np.int32 and rows[0].total.dtype == np.float32 and rows[0].visits[seen].tolist() == [1] * 7


@pytest.mark.slow
def test_a_state_of_another_algorithm_is_rejected():
    """This holds even if the rows have the same form: SCAFFOLD and Ditto both store one set of parameters per client."""
    make = dict(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    scaffold, ditto = (cls(**make) for cls in (fedsim.algorithms.SCAFFOLD, fedsim.algorithms.Ditto))
    state = scaffold.with_memory(scaffold.init(jax.random.key(0)), federation.data())
    other = r"not one of this Ditto.* it has float32\[4\] for .server.control\['linear'\]\['b'\], .* nothing"
    with pytest.raises(ValueError, match=other):
        ditto.apply(state, federation.cohort())
    apfl = fedsim.algorithms.APFL(**make)
    state = ditto.with_memory(ditto.init(jax.random.key(0)), federation.data())
    with pytest.raises(ValueError, match=r"not one of this APFL.* for .clients\[0\]"):
        apfl.apply(state, federation.cohort())
    # States of another model or aggregator are rejected, too. States of this algorithm are accepted, also on the device.
    compressed = fedsim.algorithms.Ditto(**make, aggregator=aggregators.CentredClipping(1.0))
    with pytest.raises(ValueError, match=r"nothing for \.aggregator"):
        compressed.apply(state, federation.cohort())
    on_device = dataclasses.replace(ditto, execution=fedsim.Jit(memory="resident"))
    state, _ = on_device.apply(state, federation.cohort())
    assert isinstance(state.clients, rounds.ClientTable)
    with pytest.raises(ValueError, match="not one of this APFL"):
        apfl.apply(state, federation.cohort())
    dataclasses.replace(ditto).apply(state, federation.cohort())


@pytest.mark.parametrize("way", [fedsim.Jit(), fedsim.Debug()])
@pytest.mark.parametrize(
    ("aggregator", "names", "refused"),
    [
        (aggregators.Mean(), ("weight",), "weight"),
        (aggregators.Mean(), ("attacker", "num_examples", "loss"), "attacker, num_examples"),
        (aggregators.Mean(), ("bits_down",), "bits_down"),
        (aggregators.Mean(), ("bits_up",), "bits_up"),
        (aggregators.Mean(), ("bits_up", "entropy_bits_up"), None),
        (Damped(), ("bits_up", "entropy_bits_up"), "bits_up, entropy_bits_up"),
    ],
)
def test_names_of_the_round_s_own_info_are_rejected(aggregator, names, refused, way):
    class Named(Wide):
        def client_update(self, shared, client):
            numbers = {name: jnp.float32(5) for name in names}
            return fedsim.ClientUpdate(jnp.float32(1), jnp.float32(1), numbers)

    algorithm = Named(batches=BATCHES, aggregator=aggregator, execution=way)
    if refused is None:
        _, info = algorithm.apply(jnp.zeros(()), federation.cohort())
        assert info.clients["bits_up"].tolist() == [5] * 8
    else:
        with pytest.raises((ValueError, execution.StageError), match=f"info of client_update has {refused}, and so has"):
            algorithm.apply(jnp.zeros(()), federation.cohort())


@pytest.mark.parametrize("execution", [fedsim.Jit(), fedsim.Debug()])
def test_a_server_state_of_another_structure_is_rejected(execution):
    class Renaming(FedAvg):
        def server_update(self, state, update, info):
            return {"params": state.params}

    algorithm = Renaming(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    with pytest.raises(
        ValueError, match="Expected a round of Renaming to return a server state with the structure that init returns"
    ):
        execution.run_one(algorithm, algorithm.init(jax.random.key(0)), federation.cohort())


@pytest.mark.parametrize("execution", [fedsim.Jit(), fedsim.Debug()])
def test_a_round_must_return_the_info_of_aggregate(execution):
    """Otherwise a round without updates would not be recognized, and dropped updates would not be reported."""

    class Silent(FedAvg):
        def round(self, state, clients):
            return super().round(state, clients)[0], {"seen": jnp.float32(1)}

    algorithm = Silent(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    with pytest.raises(ValueError, match="Expected Silent.round to return the info of clients.aggregate, got dict"):
        execution.run_one(algorithm, algorithm.init(jax.random.key(0)), federation.cohort())


class Changed(FedAvg):
    """FedAvg whose clients send something else."""

    def client_update(self, shared, client):
        return self.changed(super().client_update(shared, client))


class Bare(Changed):
    def changed(self, result):
        return result.update


def changed(**fields):
    def replace(result):
        return result._replace(**{name: of(result) for name, of in fields.items()})

    return type("Changed", (Changed,), {"changed": staticmethod(replace)})


def with_loss(loss):
    return dataclasses.replace(
        federation.model(), loss=lambda examples, outputs: loss(federation.model().loss(examples, outputs))
    )


class Unaveraged(FedAvg):
    def client_loss(self, shared, params, batch):
        return self.model.loss(batch.examples, self.model.apply_for_eval(params, batch.examples))


def with_params(add):
    model = federation.model()
    return dataclasses.replace(model, init=lambda key: add(model.init(key)))


def optimizer(update):
    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.first(18)
@pytest.mark.parametrize("execution", [fedsim.Jit(), fedsim.Debug()])
@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (FedAvg, {"model": with_loss(lambda x: x[:, None])}, r"number per example, shape \[4\] .* got shape \[4, 1\]"),
        (FedAvg, {"model": with_loss(jnp.mean)}, r"loss to return one number per example.* got shape \[\]"),
        (fedsim.algorithms.HypCluster, {"model": with_loss(jnp.mean)}, "one number per example"),
        (Unaveraged, {}, r"Unaveraged.client_loss to return a scalar, .* got shape \[4\]"),
        (FedAvg, {"model": with_params(lambda p: {})}, "The model has no parameters"),
        (FedAvg, {"model": with_params(lambda p: {**p, "n": jnp.int32(3)})}, r"params\['n'\] of dtype int32"),
        (changed(weight=lambda r: jnp.ones(1)), {}, r"one real number as its weight, shape \[\], got shape \[1\]"),
        (changed(weight=lambda r: None), {}, "got weight=None"),
        (changed(weight=lambda r: "examples"), {}, "got weight='examples'"),
        (changed(info=lambda r: r.info["loss"]), {}, "a dict as info"),
        (changed(info=lambda r: {"losses": [1.0, [2.0]]}), {}, r"got 'losses': \[1.0, \[2.0\]\]"),
        (changed(update=lambda r: (r.update, "text")), {}, r"got update\[1\]='text'"),
        (Bare, {}, "to return a ClientUpdate, got dict"),
        (
            FedAvg,
            {"client_optimizer": optimizer(lambda g, s, p=None: (jax.tree.leaves(g), s))},
            "update of client_optimizer to return updates with the structure",
        ),
        (
            FedAvg,
            {"server_optimizer": optimizer(lambda g, s, p=None: (jax.tree.map(lambda x: -x, g), jnp.int32(1)))},
            "update of server_optimizer to return a state with the structure",
        ),
    ],
)  # fmt: skip
def test_what_callbacks_return_is_checked_before_anything_is_compiled(execution, kind, fields, message):
    fields = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": fedsim.Batches(size=4)} | fields
    algorithm = kind(**fields)
    with pytest.raises((ValueError, fedsim.execution.StageError), match=message):
        execution.run_one(algorithm, algorithm.init(jax.random.key(0)), federation.cohort())


@pytest.mark.parametrize("call", ["apply", "apply_rounds"])
def test_names_instead_of_a_cohort_are_refused(call):
    algorithm = FedAvg(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    with pytest.raises(
        ValueError, match=r"got the (list|str) .*: expected a fedsim.Cohort, as from fedsim.Cohort.of\(data, client_ids"
    ):
        getattr(algorithm, call)(algorithm.init(jax.random.key(0)), ["0", "1"])


def test_the_traceback_of_an_error_in_a_loss_shows_the_code_of_algorithms_and_of_the_user():
    """Neither the frames of execution, nor those of JAX."""

    class Wrong(fedsim.algorithms.FedAvg):
        def client_loss(self, shared, params, batch):
            return jnp.zeros(3) + jnp.zeros(4)

    algorithm = Wrong(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), execution=fedsim.Jit()
    )
    with pytest.raises(TypeError) as caught:
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert len(names) <= 15 and {"client_loss", "client_update", "apply"} <= set(names), names
