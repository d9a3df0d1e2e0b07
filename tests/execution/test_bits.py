"""Bits of messages too large for 32-bit integers."""

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import EXECUTIONS, Variance

import fedsim
from fedsim import aggregators
from fedsim.execution import traced_rounds
from fedsim.rounds import send_down


def in_float32_from(monkeypatch, bits):
    """Makes bits of small messages be counted in float32, as those of large models are."""
    monkeypatch.setattr("fedsim.tree.bits_dtype", lambda most: jnp.uint32 if most < bits else jnp.float32)


@pytest.mark.parametrize("how", ["jit", "debug"])
def test_bits_of_all_calls_together_are_counted_in_float32(how, monkeypatch):
    in_float32_from(monkeypatch, 64)  # Each of two calls sends 32.
    algorithm = Variance(batches=fedsim.Batches(size=4), execution=EXECUTIONS[how])
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())
    assert info.clients["bits_up"].dtype == info.clients["bits_down"].dtype == jnp.float32
    assert info.clients["bits_up"].tolist() == [64 if n else 0 for n in federation.data().sizes]


def test_bits_of_a_big_model_are_those_of_a_small_one_in_float32(monkeypatch):
    pruning = aggregators.Compressed(fedsim.compressors.MagnitudePruning())
    make = dict(client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4))
    make |= dict(aggregator=pruning, downlink=fedsim.compressors.Cast(), execution=fedsim.Jit())
    sent = []
    for dtype in (jnp.uint32, jnp.float32):
        algorithm = fedsim.algorithms.FedAvg(
            **make, model=federation.model()
        )  # another model, so that it does not share a program
        clients = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[1].clients
        assert clients["bits_up"].dtype == clients["bits_down"].dtype == dtype
        sent.append((clients["bits_up"].tolist(), clients["bits_down"].tolist()))
        in_float32_from(monkeypatch, 100)
    assert sent[0] == sent[1]


@pytest.mark.parametrize(("length", "dtype"), [(2**27 - 2, jnp.uint32), (2**27 - 1, jnp.float32), (2**28, jnp.float32)])
def test_bits_of_a_member_of_a_group(length, dtype):
    # The compiler removes unused arrays, so nothing of that size is allocated.
    member = lambda: aggregators.Member(jnp.int32(1), jnp.zeros(length))  # noqa: E731
    for inner in (aggregators.Mean(), aggregators.Clipped(1.0)):
        grouped = aggregators.Grouped(groups=2, inner=inner)
        bits = jax.jit(lambda grouped=grouped: grouped.send(member(), (), (), jax.random.key(0)).bits)()
        assert bits.dtype == dtype and float(bits) == np.float32(32 * length + 32)


class Twice(fedsim.Algorithm):
    """Calls its clients twice, each with an update of 66 million floats."""

    def init(self, key):
        return jnp.float32(0)

    def round(self, state, clients):
        for name in "ab":
            update = lambda shared, client: fedsim.ClientUpdate(jnp.zeros(66_000_000), weight=1.0)  # noqa: E731
            _, info = clients.aggregate(update, state, name=name)
        return state, info


@pytest.mark.parametrize(
    ("aggregator", "dtype"),
    [
        (aggregators.Mean(), jnp.uint32),
        (aggregators.Clipped(1.0), jnp.uint32),
        (aggregators.GaussianMechanism(1.0, clip=1.0, denominator=1), jnp.uint32),
        (aggregators.Clipped(1.0, inner=aggregators.Compressed(fedsim.compressors.TopK(fraction=1.0))), jnp.float32),
    ],
)
def test_messages_that_are_larger_than_what_they_compress_do_not_overflow(aggregator, dtype):
    # 33 bits per coordinate are more than 2**32 for both messages together, and 32 bits are less.
    algorithm = Twice(batches=fedsim.Batches(size=4), aggregator=aggregator, execution=fedsim.Jit())
    state, cohort = jax.eval_shape(algorithm.init, jax.random.key(0)), federation.cohort()
    traced = traced_rounds(algorithm, state, cohort.data)[0].trace()
    assert traced.info_shapes.clients["bits_up"].dtype == dtype


@pytest.mark.parametrize(("length", "dtype"), [(130_150_524, jnp.float32), (2**26 - 8, jnp.uint32)])
def test_what_a_server_sends_may_be_larger_than_what_is_compressed(length, dtype):
    # 33 bits per parameter and a round are 2**32 + 28 in the first case.
    def bits(shared, key):
        return send_down(fedsim.compressors.TopK(fraction=1.0), shared, (), key)[2]

    shared = {"w": jax.ShapeDtypeStruct((length,), jnp.float32), "round": jax.ShapeDtypeStruct((), jnp.int32)}
    assert jax.eval_shape(bits, shared, jax.eval_shape(jax.random.key, 0)).dtype == dtype
