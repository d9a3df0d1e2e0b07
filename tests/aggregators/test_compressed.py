"""Compression inside rounds: aggregates, bits, and the memory of clients."""

import functools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import rng, tree
from fedsim.aggregators import Clipped, Compressed, CoordinateMedian, Grouped, LocallyNoised, Mean, Member
from fedsim.compressors import Cast, Drive, Eden, ErrorFeedback, Identity, MagnitudePruning, PowerSGD, TopK
from fedsim.rounds._call import send_down

FLOATS = 3 * 4 + 4  # the number of parameters of the federation's model
EXECUTIONS = {
    "pmap": fedsim.Pmap(devices=8),
    "pmap, 2 lanes, streamed": fedsim.Pmap(devices=2, lanes=2, memory="stream"),
    "debug": fedsim.Debug(),
}
AGGREGATORS = {
    "eden": Compressed(Eden(bits=2)),
    "feedback": Compressed(ErrorFeedback(TopK(fraction=0.2))),
    "power": Compressed(PowerSGD(rank=1)),
    "clipped, median": Clipped(0.5, inner=Compressed(Drive(unbiased=False), inner=CoordinateMedian())),
}


def algorithm(aggregator, **options):
    settings = {"model": federation.model(), "batches": fedsim.Batches(size=4), "client_optimizer": optax.sgd(0.3)}
    return fedsim.algorithms.FedAvg(**settings, aggregator=aggregator, weighting="uniform", **options)


def run(algorithm, rounds=3):
    state, infos, population = algorithm.init(jax.random.key(1)), [], federation.data()
    for round in range(rounds):
        state, info = algorithm.apply(state, federation.cohort(population, round=round))
        infos.append(info)
    return state, infos


def test_the_identity_changes_nothing_and_counts_32_bits_per_float():
    plain, _ = run(algorithm(Mean()))
    state, infos = run(algorithm(Compressed(Identity())))
    federation.assert_trees_close(state, plain)
    took_part = np.array([size > 0 for size in federation.data().sizes])
    for info in infos:
        np.testing.assert_array_equal(info.clients["bits_up"], np.where(took_part, 32 * FLOATS, 0))
        np.testing.assert_array_equal(info.clients["entropy_bits_up"], info.clients["bits_up"])


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("compressor", "bits"),
    [
        (Cast(), 16 * FLOATS),
        (Eden(bits=2), 2 * FLOATS + 32),
        (TopK(fraction=0.1), 2 * (32 + 4)),
        (PowerSGD(rank=1), 32 * (3 + 4 + 4)),
    ],
)
def test_bits_up_are_the_compressors(compressor, bits):
    _, (info,) = run(algorithm(Compressed(compressor)), rounds=1)
    assert set(np.asarray(info.clients["bits_up"]).tolist()) == {0, bits}


def test_bits_up_may_differ_between_clients():
    _, (info,) = run(algorithm(Compressed(MagnitudePruning(threshold=1.0))), rounds=1)
    sent = np.asarray(info.clients["bits_up"])[np.asarray(federation.data().sizes) > 0]
    assert len(set(sent.tolist())) > 1 and np.all((sent - FLOATS) % 32 == 0)
    assert np.all(np.asarray(info.clients["entropy_bits_up"]) <= np.asarray(info.clients["bits_up"]))


def updates_and_keys(algorithm, state, cohort):
    """Yields the id, update and key of each client, without compression."""
    for client_id, dataset, key in cohort:
        if len(dataset):
            alone = fedsim.Cohort.of(cohort.data, [client_id], round=cohort.round, seed=0)
            after, _ = algorithm.apply(state, alone)
            yield client_id, tree.subtract(state.params, after.params), key


@pytest.mark.slow
def test_error_feedback_over_rounds_by_hand():
    """Two clients participate in turn, so each must keep its residual while the other participates."""
    compressor = ErrorFeedback(TopK(fraction=0.2))
    compressed, plain = algorithm(Compressed(compressor)), algorithm(Mean())
    population, residuals = federation.data(), {}
    state = compressed.init(jax.random.key(1))
    by_hand = plain.init(jax.random.key(1))
    for round in range(4):
        cohort = fedsim.Cohort.of(population, [["client0", "client3"], ["client0", "client5"]][round % 2], round=round)
        total = jax.tree.map(jnp.zeros_like, by_hand.params)
        for client, update, key in updates_and_keys(plain, by_hand, cohort):
            key = rng.stream(rng.stream(key, "send"), "compress")
            sent = compressor.transmit(update, key, residuals.get(client, compressor.init(update)))
            residuals[client] = sent.memory
            total = tree.add(total, tree.scale(sent.value, 0.5))
        by_hand = by_hand._replace(params=tree.subtract(by_hand.params, total))
        state, _ = compressed.apply(state, cohort)
        federation.assert_trees_close(state.params, by_hand.params)


def test_error_feedback_of_one_group_is_not_sent_to_another():
    grouped = Grouped(groups=2, inner=Compressed(ErrorFeedback(TopK(fraction=0.5))))
    memory, received = grouped.client_memory(Member(jnp.int32(0), jnp.zeros(2))), []
    for group, update in ((0, [3.0, 2.0]), (1, [0.0, 0.1]), (0, [0.0, 0.5])):
        sent = grouped.send(Member(jnp.int32(group), jnp.array(update)), (), memory, jax.random.key(0))
        memory = sent.memory
        received.append((int(sent.update.group), sent.update.update.tolist()))
    assert received == [(0, [3.0, 0.0]), (1, [0.0, pytest.approx(0.1)]), (0, [0.0, 2.5])]


@functools.cache
def reference(name):
    return run(algorithm(AGGREGATORS[name], execution=fedsim.Jit()))


@pytest.mark.slow
# Eager execution is tested only with memory or other aggregators, because compressors alone have their own eager tests.
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in AGGREGATORS for how in EXECUTIONS if how != "debug" or name in ("feedback", "clipped, median")],
)
def test_the_execution_does_not_change_the_result(name, how):
    expected, infos = reference(name)
    state, others = run(algorithm(AGGREGATORS[name], execution=EXECUTIONS[how]))
    federation.assert_trees_close(state.params, expected.params, atol=1e-5)
    for a, b in zip(infos, others, strict=True):
        np.testing.assert_array_equal(a.clients["bits_up"], b.clients["bits_up"])


def test_noise_differs_between_clients_and_rounds():
    """The same update is compressed differently by each client and in each round, and is correct on average."""
    update = {"w": jnp.asarray(np.random.default_rng(0).normal(size=512), jnp.float32)}
    keys = rng.client_keys(rng.root(0), 0, np.arange(64))
    arrived = jax.vmap(lambda key: Compressed(Drive()).send(update, (), (), key).update["w"])(keys)
    assert len(np.unique(np.asarray(arrived), axis=0)) == 64
    error = float(jnp.sum((arrived.mean(0) - update["w"]) ** 2) / jnp.sum(update["w"] ** 2))
    assert 0.3 < error * 64 / 0.5708 < 2


def test_bits_of_the_downlink_are_counted_and_clients_receive_compressed_parameters():
    plain, (uncompressed,) = run(algorithm(Mean()), rounds=1)
    state, (info,) = run(algorithm(Mean(), downlink=Cast()), rounds=1)
    took_part = np.asarray(federation.data().sizes) > 0
    down, before = (np.asarray(x.clients["bits_down"])[took_part] for x in (info, uncompressed))
    np.testing.assert_array_equal(before - down, 16 * FLOATS)
    far = tree.squared_norm(tree.subtract(state.params, plain.params))
    assert 0 < far < 1e-4


def test_nested_compression_raises_an_error():
    with pytest.raises(ValueError, match="a second one inside it, of Drive"):
        Compressed(Eden(), inner=Clipped(1.0, inner=Compressed(Drive())))


def test_noise_on_compressed_updates_is_refused():
    """Its messages would be dense, and the bits of the compressor would be counted."""
    with pytest.raises(
        ValueError, match=r"^Expected an aggregator without LocallyNoised inside Compressed, .*Write LocallyNoised"
    ):
        Compressed(Eden(), inner=Clipped(1.0, inner=LocallyNoised(1.0, clip=0.5)))
    sent = LocallyNoised(1.0, clip=0.5, inner=Compressed(TopK(fraction=0.5))).send(jnp.ones(4), (), (), jax.random.key(0))
    assert np.count_nonzero(sent.update) == 2


def test_an_object_of_another_class_raises_an_error():
    with pytest.raises(ValueError, match="such as Eden"):
        Compressed(Mean())


def test_downlink_compresses_only_the_parameters():
    """Top-k would set a single number, such as the coefficient of a proximal term, to 0."""
    prox = fedsim.algorithms.AdaptiveFedProx(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        mu=1.0,
        downlink=TopK(fraction=0.2),
    )
    shared = prox.broadcast(prox.init(jax.random.key(0)))
    received, _, bits = send_down(prox.downlink, shared, (), jax.random.key(1))
    assert float(received.mu) == 1.0 and int(received.round) == 0
    assert sum(int(np.count_nonzero(x)) for x in jax.tree.leaves(received.params)) == 4
    assert int(bits) == int(TopK(fraction=0.2).transmit(shared.params, jax.random.key(1)).bits) + 32 + 32
