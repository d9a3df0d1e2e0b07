"""Clients with datasets of different sizes in federated programs: FedAvg written with primitives is `FedAvg`."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import primitives as fed

BATCHES = fedsim.Batches(size=4, epochs=2)
MODEL = federation.model()


def round_of(rate, params, clients):
    def train(params, client):
        def step(params, batch):
            def loss(params):
                losses = MODEL.loss(batch.examples, MODEL.apply_for_train(params, batch.examples, batch.key))
                return jnp.mean(losses, where=batch.mask)

            return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))

        return client.for_each_batch(BATCHES, step, params), client.num_examples

    trained = fed.map(train, fed.broadcast(params, clients.placement), clients)
    models, sizes = (fed.Placed(part, clients.placement) for part in trained.stacked)
    return fed.weighted_mean(models, sizes)


@pytest.mark.parametrize("devices", [1, 2])
def test_fedavg_in_ten_lines_is_fedavg(devices):
    """Also in a second round, whose parameters are on all devices."""
    algorithm = fedsim.algorithms.FedAvg(model=MODEL, client_optimizer=optax.sgd(0.1), batches=BATCHES, execution=fedsim.Jit())
    data = federation.data()
    cohorts = [fedsim.Cohort.of(data, data.client_ids[:4], round=round) for round in (3, 4)]
    state = algorithm.init(jax.random.key(0))
    params = {"jit": state.params, "program": state.params}
    ways = {"jit": jax.jit(round_of), "program": fed.program(round_of)}
    for cohort in cohorts:
        clients = fedsim.place_clients(cohort, BATCHES, devices=jax.devices()[:devices] if devices > 1 else None)
        params = {way: run(0.1, params[way], clients) for way, run in ways.items()}
        state, _ = algorithm.apply(state, cohort)
    for way in ways:
        federation.assert_trees_close(params[way], state.params)


def test_hypergradient_through_ragged_clients():
    clients = fedsim.place_clients(federation.cohort(), BATCHES)
    start = MODEL.init(jax.random.key(0))

    def objective(rate):
        return fedsim.tree.squared_norm(round_of(rate, round_of(rate, start, clients), clients))

    value, slope = jax.jit(jax.value_and_grad(objective))(jnp.float32(0.3))
    up, down = (float(jax.jit(objective)(jnp.float32(0.3 + h))) for h in (1e-2, -1e-2))
    assert float(slope) == pytest.approx((up - down) / 2e-2, rel=1e-2)
    assert float(value) == pytest.approx(float(objective(0.3)), rel=1e-5)


def test_clients_without_examples_and_empty_cohorts():
    data = fedsim.FederatedData.from_arrays({"x": np.array([1.0, 2.0, 4.0], np.float32)}, sizes=[2, 0, 1])

    def total(client):
        def add(total, batch):
            return total + jnp.sum(batch.examples["x"], where=batch.mask)

        return client.for_each_batch(fedsim.Batches(size=2), add, jnp.zeros(()))

    everyone = fedsim.place_clients(fedsim.Cohort.of(data, ["2", "1", "0"]), fedsim.Batches(size=2))
    assert fed.map(total, everyone).stacked.tolist() == [4.0, 0.0, 3.0]
    assert fed.map(lambda client: client.num_steps, everyone).stacked.tolist() == [1, 0, 1]
    assert (
        fed.sum(
            fed.map(total, fedsim.place_clients(fedsim.Cohort(data, np.zeros(0, np.int32), 0, fedsim.rng.root(0), slots=2)))
        )
        == 0
    )


def test_cohorts_that_would_be_read_wrongly_raise_an_error():
    data = fedsim.FederatedData.from_arrays({"x": np.array([2**40, 1, 2])}, sizes=[1, 2])
    cohort = fedsim.Cohort.of(data, ["0", "1"], round=3)
    with pytest.raises(ValueError, match="1099511627776"):
        fedsim.place_clients(cohort)
    attack = {"attack": fedsim.attacks.LabelFlip(num_classes=3), "attackers": np.array([True, False])}
    late = {"arrivals": fedsim.data.Arrivals.of([0, 1], round=3)}
    for changes, message in ((attack, "place_clients, got one with LabelFlip"), (late, "start in round 3 for place_clients")):
        with pytest.raises(ValueError, match=message):
            fedsim.place_clients(dataclasses.replace(cohort, **changes))


def test_clients_too_small_for_a_single_whole_batch_take_no_step():
    data = fedsim.FederatedData.from_arrays({"x": np.ones(3, np.float32)}, sizes=[2, 1])
    batches = fedsim.Batches(size=4, drop_remainder=True)
    with pytest.warns(UserWarning, match="2 of 2 clients, .* can never take a step"):
        clients = fedsim.place_clients(fedsim.Cohort.of(data, ["0", "1"]), batches)

    def total(scale, client):
        return client.for_each_batch(batches, lambda x, batch: x * jnp.sum(batch.examples["x"]), scale)

    value, slope = jax.value_and_grad(lambda scale: fed.sum(fed.map(lambda client: total(scale, client), clients)))(3.0)
    assert (value.item(), slope.item()) == (6, 2)
