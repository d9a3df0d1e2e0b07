"""Secure aggregation: its sum is that of the integers for any drop-outs that the threshold allows, and shows nothing else."""

import itertools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim.aggregators import (
    AuxMean,
    Bucketing,
    Clipped,
    Compressed,
    CoordinateMedian,
    Grouped,
    Krum,
    Mean,
    SecureMean,
    TrimmedMean,
)
from fedsim.privacy import SecureAggregation
from fedsim.privacy._secure_aggregation import _Client, _divided, _reconstructed

KEY = jax.random.key(3)


def vectors(clients=12, size=40, bits=32):
    return np.random.default_rng(1).integers(0, 2**bits, (clients, size), dtype=np.uint32)


@pytest.mark.parametrize("protocol", [SecureAggregation(threshold=4), SecureAggregation(threshold=2, neighbors=6)], ids=str)
@pytest.mark.parametrize(
    "dropped",
    [
        {},
        {"keys": [0]},
        {"shares": [1, 5]},
        {"vector": [2, 3]},
        {"unmasking": [0, 7]},
        {"keys": [11], "shares": [4], "vector": [6], "unmasking": [8]},
    ],
    ids=str,
)
def test_the_sum_is_that_of_the_vectors_that_arrived(protocol, dropped):
    x = vectors()
    result = protocol.run(x, KEY, dropped=dropped)
    missing = {i for step in ("keys", "shares", "vector") for i in dropped.get(step, [])}
    assert result.counted == sorted(set(range(12)) - missing)
    np.testing.assert_array_equal(result.sum, x[result.counted].astype(np.uint64).sum(0) % 2**32)


def test_the_sum_is_taken_modulo_the_given_power_of_two():
    x = vectors(bits=11)
    result = SecureAggregation(threshold=3, modulus_bits=13).run(x, KEY, dropped={"vector": [5]})
    np.testing.assert_array_equal(result.sum, np.delete(x, 5, axis=0).sum(0) % 2**13)
    assert result.received.max() < 2**13


def test_a_seed_gives_what_its_key_gives():
    x, protocol = vectors(), SecureAggregation(threshold=4)
    one, other, third = (protocol.run(x, seed).received for seed in (3, KEY, 4))
    np.testing.assert_array_equal(one, other)
    assert (one != third).any()


@pytest.mark.parametrize("name", ["krum", "trimmed_mean", "coordinate_median"])
def test_the_audit_tells_robust_aggregators_from_a_norm_that_clients_keep(name):
    robust = {"krum": Krum(attackers=1), "trimmed_mean": TrimmedMean(0.2), "coordinate_median": CoordinateMedian()}[name]
    seen = str(fedsim.audit(fedavg(robust, fedsim.Jit()), federation.cohort()))
    assert "needs every client's update" in seen and "no more than the sum" not in seen
    bounded = Clipped(1.0, inner=SecureMean(max_weight=12.0, minimum=4))
    seen = str(fedsim.audit(fedavg(bounded, fedsim.Jit()), federation.cohort()))
    assert "no more than the sum of at least 4" in seen and "needs every" not in seen


def test_a_norm_that_clients_keep_bounds_what_one_of_them_changes():
    """Of the mean of four equal weights, a quarter of the norm; without it, the clipping of single values allows far more."""
    changes = []
    for aggregator in (Clipped(1.0, inner=SecureMean(max_weight=1.0, minimum=2)), SecureMean(max_weight=1.0, minimum=2)):
        means = []
        for own in (jnp.zeros(40), jnp.full(40, -5.0)):
            total = aggregator.zero(jnp.zeros(40), 4)
            for slot, update in enumerate([own, *jnp.eye(3, 40)]):
                sent = aggregator.send(update, (), (), jax.random.key(slot)).update
                total = aggregator.accumulate(total, sent, jnp.float32(1), slot)
            means.append(aggregator.finish(total))
        changes.append(float(jnp.linalg.norm(means[1] - means[0])))
    assert changes == pytest.approx([1 / 4, 5 * np.sqrt(40) / 4], rel=1e-4)


def test_bytes_are_those_of_the_messages():
    """Two keys up and those of the 6 neighbours down; an encrypted pair of shares for each; the vector; one share for each."""
    result = SecureAggregation(threshold=2, neighbors=6).run(vectors(), KEY)
    assert set(result.bytes_up) == {2 * 32 + 6 * 64 + 40 * 4 + 6 * 32}
    assert set(result.bytes_down) == {6 * 64 + 6 * 64 + 1}


@pytest.mark.parametrize("neighbors", [None, 6])
def test_too_many_drop_outs_are_refused(neighbors):
    protocol = SecureAggregation(threshold=6, neighbors=neighbors)
    with pytest.raises(ValueError, match=r"at least threshold=6 neighbours of client \d+ to answer, got \d.*not revealed"):
        protocol.run(vectors(), KEY, dropped={"unmasking": [0, 1, 2], "vector": [3, 4, 5]})


def chi_square(values):
    """The statistic of the top bytes of numbers, which has mean 255 and standard deviation 22.6 if they are uniform."""
    counts = np.bincount(np.asarray(values, np.uint32).ravel() >> 24, minlength=256)
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


def test_what_the_server_receives_of_a_client_is_uniform():
    x = vectors(6, 20_000, bits=20)
    result = SecureAggregation(threshold=3).run(x, KEY)
    for own, vector in zip(result.received, x, strict=True):
        assert 150 < chi_square(own) < 360
        assert abs(np.corrcoef(own, vector)[0, 1]) < 0.03
    pairs = itertools.combinations(result.received, 2)
    assert all(150 < chi_square(a + b) < 360 for a, b in pairs)  # also of several clients, but not of all
    assert chi_square(result.sum) > 10_000


def test_vectors_without_masks_are_seen():
    """A control: without the own mask, the sum over all but one client shows the difference of two sums."""
    assert chi_square(vectors(6, 20_000, bits=20)) > 10_000


def test_secrets_need_as_many_shares_as_the_threshold():
    shares = _divided(12345, 3, range(5), np.random.default_rng(0))
    for holders in itertools.combinations(range(5), 3):
        assert _reconstructed({i: shares[i] for i in holders}, 3, owner=0) == 12345
    assert all(
        _reconstructed({i: shares[i] for i in pair}, 2, owner=0) != 12345 for pair in itertools.combinations(range(5), 2)
    )


def test_a_client_does_not_give_both_shares_of_another():
    client = _Client(SecureAggregation(threshold=2), 0, np.zeros(1, np.uint32), np.random.default_rng(0))
    with pytest.raises(ValueError, match="got .* as both: the server is not honest"):
        client.unmask(counted=[0, 1], lost=[1, 2])


def updates(clients=7):
    draw = np.random.default_rng(4)
    return [
        {"w": draw.normal(0, 3, (5, 3)).astype(np.float32), "b": draw.normal(0, 9, 4).astype(np.float32)}
        for _ in range(clients)
    ]


def test_the_mean_is_that_of_the_protocol():
    aggregator, weights = SecureMean(max_weight=10.0, clip=8.0), [1.0, 3.0, 0.0, 10.0, 25.0, 7.5, 2.0]
    accumulator, sent = aggregator.zero(jax.tree.map(jnp.asarray, updates()[0]), 7), []
    for slot, (update, weight) in enumerate(zip(updates(), weights, strict=True)):
        accumulator = aggregator.accumulate(accumulator, jax.tree.map(jnp.asarray, update), jnp.float32(weight), slot)
        leaves = jax.tree.leaves(aggregator.quantized(jax.tree.map(jnp.asarray, update), jnp.float32(weight)))
        sent.append(np.concatenate([np.ravel(leaf) for leaf in leaves]))
    expected = [np.ravel(leaf) for leaf in jax.tree.leaves((accumulator.total, accumulator.weight))]
    np.testing.assert_array_equal(SecureAggregation(threshold=3).run(np.stack(sent), KEY).sum, np.concatenate(expected))

    clipped = np.minimum(weights, 10) / 10
    for name, mean in aggregator.finish(accumulator).items():
        rows = np.stack([np.clip(update[name], -8, 8) for update in updates()]).astype(np.float64)
        exact = np.tensordot(clipped, rows, 1) / clipped.sum()
        # Rounding of 7 updates, and of the weights, to half a level each.
        np.testing.assert_allclose(mean, exact, atol=2 * 7 * 8 / (2**22 - 2) / clipped.sum(), rtol=1e-6)


def test_fewer_clients_than_the_minimum_change_nothing():
    aggregator = SecureMean(max_weight=1.0, minimum=3)
    accumulator = aggregator.zero(jnp.zeros(2), 4)
    for slot, weight in enumerate([1.0, 0.0, 1.0, 1.0]):
        accumulator = aggregator.accumulate(accumulator, jnp.ones(2), jnp.float32(weight), slot)
        expected = [1.0, 1.0] if slot == 3 else [0.0, 0.0]
        assert aggregator.finish(accumulator).tolist() == pytest.approx(expected, rel=1e-6)


def fedavg(aggregator, execution):
    return fedsim.algorithms.FedAvg(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        aggregator=aggregator,
        execution=execution,
    )


@pytest.mark.filterwarnings("ignore:In round 1, 2 client")
def test_a_round_with_fewer_clients_than_the_minimum_leaves_the_server_as_it_is():
    """The sum that the server does not see is no update of 0, of which FedDyn's parameters would move."""
    algorithm = fedsim.algorithms.FedDyn(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        aggregator=Clipped(1.0, inner=SecureMean(max_weight=1.0, minimum=3)),
    )
    data = federation.data()
    before, _ = algorithm.apply(algorithm.init(KEY), fedsim.Cohort(data, np.array([0, 1, 2, 6]), 0, KEY))
    after, info = algorithm.apply(before, fedsim.Cohort(data, np.array([0, 2]), 1, KEY, slots=4))
    assert int(info.num_aggregated) == 2
    federation.assert_trees_equal(after.server, before.server)
    assert np.abs(before.server.h["linear"]["w"]).max() > 1e-5


def test_the_parameters_have_the_same_bits_on_any_number_of_devices():
    """Sums of floats depend on their order, and so on the number of devices; sums of integers do not."""
    states = []
    for execution in (fedsim.Jit(), fedsim.Pmap(devices=8)):
        algorithm = fedavg(SecureMean(max_weight=12.0), execution)
        states.append(algorithm.apply(algorithm.init(KEY), federation.cohort())[0].params)
    federation.assert_trees_equal(*states)
    plain = fedavg(Mean(), fedsim.Jit())
    federation.assert_trees_close(plain.apply(plain.init(KEY), federation.cohort())[0].params, states[0], atol=1e-5)


def test_the_audit_names_what_the_server_sees():
    text = str(fedsim.audit(fedavg(SecureMean(max_weight=12.0, minimum=3), fedsim.Jit()), federation.cohort()))
    assert "of the clients' updates, the server sees no more than the sum of at least 3" in text
    assert "no more than" not in str(fedsim.audit(fedavg(Mean(), fedsim.Jit()), federation.cohort()))


def test_a_bound_of_weights_that_makes_most_clients_equal_is_refused():
    """The median of these clients' numbers of examples is 4."""
    with pytest.raises(ValueError, match="max_weight of at least 4, the median number of examples of a client, got 1"):
        fedavg(SecureMean(max_weight=1.0), fedsim.Jit()).check(federation.data())
    fedavg(SecureMean(max_weight=6.0), fedsim.Jit()).check(federation.data())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SecureMean(max_weight=1.0, minimum=1), "got minimum=1: with one client, the sum is its update"),
        (lambda: SecureMean(max_weight=1.0, bits=25), "bits"),
        (lambda: Compressed(fedsim.compressors.Eden(bits=1), inner=SecureMean(max_weight=1.0)), "cannot be compressed"),
        (lambda: Grouped(groups=2, inner=Clipped(1.0, inner=SecureMean(max_weight=1.0))), "the group of every client"),
        (lambda: AuxMean(inner=SecureMean(max_weight=1.0)), "running statistics, would be sent unmasked"),
        (lambda: Bucketing(2, inner=SecureMean(max_weight=1.0)), "send their updates as they are"),
        (lambda: SecureMean(max_weight=1.0).check(jnp.zeros(2), 2000), "modulus_bits of at least 33 for the sum of 2000"),
        (lambda: SecureMean(max_weight=1.0, minimum=5).check(jnp.zeros(2), 4), "at least minimum=5 clients"),
        (lambda: SecureMean(max_weight=1.0).check(jnp.zeros(2, jnp.int32), 4), "needs floats"),
        (lambda: SecureAggregation(threshold=1), "threshold"),
        (lambda: SecureAggregation(threshold=2, neighbors=5), "even number of neighbors, got 5"),
        (lambda: SecureAggregation(threshold=5, neighbors=4), "threshold of at most neighbors=4, got 5"),
        (lambda: SecureAggregation(threshold=5).run(vectors(5), KEY), "at least 6 clients"),
        (lambda: SecureAggregation(threshold=2).run(vectors().astype(np.int64), KEY), "uint32.*got int64"),
        (lambda: SecureAggregation(threshold=2, modulus_bits=8).run(vectors(), KEY), "below 2.modulus_bits = 256"),
        (
            lambda: SecureAggregation(threshold=2).run(vectors(), KEY, dropped={"vectors": [1]}),
            "keys, shares, vector, unmasking",
        ),
        (lambda: SecureAggregation(threshold=2).run(vectors(), KEY, dropped={"vector": [12]}), "from 0 to 11, got 12"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_round_that_all_clients_leave_has_no_sum():
    with pytest.raises(ValueError, match="at least threshold=2 clients to send their vectors, got none: all have dropped out"):
        SecureAggregation(threshold=2).run(np.zeros((4, 2), np.uint32), 0, dropped={"shares": range(4)})
