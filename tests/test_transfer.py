"""Transfer of a body and a head that is trained first."""

import haiku as hk
import jax
import jax.numpy as jnp
import network_models
import numpy as np
import optax
import pytest

import fedsim
from fedsim import transfer
from fedsim.transfer import head_of, probe_then_tune, transfer_body


def trained(algorithm, rounds=4):
    states = [algorithm.init(jax.random.key(1))]
    for cohort in network_models.cohorts(network_models.federation.data(), rounds):
        states.append(algorithm.apply(states[-1], cohort)[0])
    return [jax.device_get(state.params) for state in states]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1, momentum=0.9), optax.sgd(0.3), optax.polyak_sgd(0.3)], ids=["momentum", "sgd", "polyak"]
)
def test_a_probe_leaves_the_body_as_it_is_bit_for_bit_and_then_all_is_trained(optimizer):
    model = network_models.network()
    algorithm = fedsim.algorithms.FedAvg(
        model=model, batches=network_models.BATCHES, client_optimizer=probe_then_tune(model, optimizer, rounds=2)
    )
    found = trained(algorithm)
    for round in range(4):
        assert same(found[round]["linear"], found[round + 1]["linear"]) == (round < 2)
        assert not same(found[round]["linear_1"], found[round + 1]["linear_1"])


def test_while_the_head_is_probed_gradients_of_the_body_do_not_enter_the_steps_of_an_optimizer_that_clips_all_together():
    model = network_models.network()
    params = model.init(jax.random.key(0))
    gradient = jax.tree.map(jnp.ones_like, params) | {"linear_1": {"w": jnp.zeros([5, 4]), "b": jnp.array([0.6, 0.8, 0, 0])}}
    optimizer = probe_then_tune(model, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), rounds=1)(jnp.int32(0))
    step, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(step["linear_1"]["b"], [-0.6, -0.8, 0, 0], rtol=1e-6)


def test_frozen_and_kept_parts_are_probed_and_have_rates():
    """The optimizer gets None in place of frozen parameters, and those that clients keep together with the others."""
    model = network_models.network().with_parts(frozen="linear/w", kept="linear_1/*")
    params = {**model.init(jax.random.key(0)), "linear_1": model.init_whole(jax.random.key(0))["linear_1"]}
    rates = transfer.with_rates(optax.sgd(0.1), {"linear_1/*": 0.5})
    probe = probe_then_tune(model, optax.sgd(0.1), rounds=9)
    for optimizer, expected in ((rates, (-0.1, -0.05)), (probe, (0.0, -0.1))):
        algorithm = fedsim.algorithms.FedAvg(model=model, batches=network_models.BATCHES, client_optimizer=optimizer)
        algorithm.check(network_models.federation.data())
        assert steps_of(optimizer, params) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    transferred = transfer_body(model, model.init(jax.random.key(0)), model.init_whole(jax.random.key(1)))
    assert transferred["linear"]["w"] is None


def steps_of(optimizer, params, of=lambda steps: steps):
    """Returns the first steps of the biases of both layers, for gradients of 1 in the first round."""
    optimizer = optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(jnp.int32(0))
    steps = of(optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)[0])
    return tuple(float(steps[name]["b"][0]) for name in ("linear", "linear_1"))


@pytest.mark.parametrize(
    ("cls", "fields"), [(fedsim.algorithms.APFL, ["params"]), (fedsim.algorithms.FedMatch, ["sigma", "psi"])]
)
def test_names_are_those_of_the_model_where_algorithms_train_more_than_it(cls, fields):
    model = network_models.network()
    algorithm = cls(model=model, batches=network_models.BATCHES, client_optimizer=optax.sgd(0.1))
    state = algorithm.init(jax.random.key(0))
    trained = algorithm.client_memory(algorithm.broadcast(state)) if cls is fedsim.algorithms.APFL else state.parts
    rates = transfer.with_rates(optax.sgd(0.1), {"linear_1/*": 0.5})
    probe = probe_then_tune(model, optax.sgd(0.1), rounds=9)
    for field in fields:
        assert steps_of(rates, trained, lambda steps, field=field: getattr(steps, field)) == pytest.approx((-0.1, -0.05))
        assert steps_of(probe, trained, lambda steps, field=field: getattr(steps, field)) == pytest.approx((0.0, -0.1))


def test_after_no_rounds_of_probing_it_is_the_optimizer_alone():
    model = network_models.network()
    made = [
        fedsim.algorithms.FedAvg(model=model, batches=network_models.BATCHES, client_optimizer=optimizer)
        for optimizer in (optax.sgd(0.3), probe_then_tune(model, optax.sgd(0.3), rounds=0))
    ]
    found, expected = (trained(algorithm, 2)[-1] for algorithm in made)
    network_models.federation.assert_trees_close(found, expected)


def test_the_body_is_copied_and_the_head_is_new():
    model = fedsim.models.digits_dense()
    new, old = (model.init(jax.random.key(seed)) for seed in (0, 1))
    found = transfer_body(model, new, old)
    assert same(found["linear"], old["linear"]) and same(found["linear_1"], old["linear_1"])
    assert same(found["linear_2"], new["linear_2"]) and not same(new["linear_2"]["w"], old["linear_2"]["w"])
    assert same(transfer_body(model, new, old, head=lambda module, name: False), old)
    biases = transfer_body(model, new, old, head=lambda module, name: name == "w")
    assert same(biases["linear"]["w"], new["linear"]["w"]) and same(biases["linear"]["b"], old["linear"]["b"])


def test_the_body_of_fedper_is_replaced():
    model = fedsim.models.digits_dense()
    algorithm = fedsim.algorithms.FedPer(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    state, old = algorithm.init(jax.random.key(0)), model.init(jax.random.key(1))
    found = transfer_body(model, state.params, old)
    assert sorted(found) == ["linear", "linear_1"] and same(found, {name: old[name] for name in found})


def test_all_that_does_not_fit_is_in_the_error():
    model = fedsim.models.digits_dense()
    other = fedsim.models.digits_dense(hidden=(128,)).init(jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"others for linear_1/b \[64\] \(there it has \[10\]\), linear_1/w \[128, 64\] \(there"
    ):
        transfer_body(model, model.init(jax.random.key(0)), other)
    with pytest.raises(ValueError, match=r"linear/b \[128\] \(there is none\)"):
        transfer_body(model, model.init(jax.random.key(0)), {})


def test_invalid_arguments_are_refused():
    model = fedsim.models.digits_dense()
    with pytest.raises(ValueError, match="Expected rounds >= 0, got rounds=-1"):
        probe_then_tune(model, optax.sgd(0.1), rounds=-1)
    with pytest.raises(ValueError, match="Expected optimizer to be an optax transformation"):
        probe_then_tune(model, optax.sgd, rounds=1)
    with pytest.raises(ValueError, match="Expected head to be a function of a module's and a parameter's name, or None"):
        head_of(model, "linear_2")


def test_the_last_module_is_that_which_the_model_creates_last():
    def network(examples):
        return hk.Linear(4, name="a")(hk.Linear(5, name="b")(examples["x"]))

    model = fedsim.Model.from_haiku(hk.transform(network), features=network_models.federation.FEATURES, num_classes=4)
    assert head_of(model)("a", "w") and not head_of(model)("b", "w")


@pytest.mark.first(1)
@pytest.mark.parametrize("cls", [fedsim.algorithms.FedAvg, fedsim.algorithms.FedProx])
def test_a_rate_of_the_body_against_an_optimizer_for_each_part(cls):
    """`optax.multi_transform` with plain gradient descent at two rates does the same."""
    model, found = network_models.network(), []
    labels = lambda params: {module: dict.fromkeys(of, module) for module, of in params.items()}  # noqa: E731
    by_part = optax.multi_transform({"linear": optax.sgd(0.02), "linear_1": optax.sgd(0.2)}, labels)
    for optimizer in (transfer.with_rates(optax.sgd(0.2), {"linear/*": 0.1}), by_part):
        algorithm = cls(model=model, batches=network_models.BATCHES, client_optimizer=optimizer)
        found.append(trained(algorithm, 2)[-1])
    network_models.federation.assert_trees_close(*found)


def test_rates_that_fit_no_parameter_are_named():
    with pytest.raises(ValueError, match=r"rates\['linear/w'\] > 0"):
        transfer.with_rates(optax.sgd(0.1), {"linear/w": 0.0})
    algorithm = fedsim.algorithms.FedAvg(
        model=network_models.network(),
        batches=network_models.BATCHES,
        client_optimizer=transfer.with_rates(optax.sgd(0.1), {"linear_2/*": 2.0}),
    )
    with pytest.raises(ValueError, match=r"no parameter 'linear_2/\*' to have a rate of its own. Did you mean"):
        trained(algorithm, 1)
