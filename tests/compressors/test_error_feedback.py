"""What error feedback keeps, adds and owes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federation import assert_trees_close, assert_trees_equal

from fedsim import tree
from fedsim.compressors import Drive, Eden, ErrorFeedback, Identity, PowerSGD, RandomK, ScaledSign, TopK

CONTRACTIONS = {
    "TopK": TopK(fraction=0.05),
    "RandomK": RandomK(fraction=0.05, unbiased=False),
    "ScaledSign": ScaledSign(),
    "Drive": Drive(unbiased=False),
    "Eden": Eden(bits=2, unbiased=False),
    "PowerSGD": PowerSGD(rank=1),
}


def value(seed):
    draw = np.random.default_rng(seed)
    return {"w": jnp.asarray(draw.normal(size=(20, 10)), jnp.float32), "b": jnp.asarray(draw.normal(size=7), jnp.float32)}


def rounds(compressor, values):
    """What arrived in all, and the memory at the end."""
    memory, total = compressor.init(values[0]), jax.tree.map(jnp.zeros_like, values[0])
    transmit = jax.jit(compressor.transmit)
    for i, x in enumerate(values):
        sent = transmit(x, jax.random.key(i), memory)
        memory, total = sent.memory, tree.add(total, sent.value)
    return total, memory


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_what_arrived_and_the_residual_are_what_was_sent(name):
    values = [value(seed) for seed in range(30)]
    total, memory = rounds(ErrorFeedback(CONTRACTIONS[name]), values)
    assert_trees_close(tree.add(total, memory.residual), jax.tree.map(lambda *x: sum(x), *values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_the_residual_of_a_constant_stays_small_and_its_mean_arrives(name):
    """Without feedback, most of a constant never arrives."""
    x, n = value(0), 400
    total, memory = rounds(ErrorFeedback(CONTRACTIONS[name]), [x] * n)
    assert tree.squared_norm(memory.residual) < 40**2 * tree.squared_norm(x)
    far = tree.squared_norm(tree.subtract(tree.scale(total, 1 / n), x)) / tree.squared_norm(x)
    assert far < 0.02


@pytest.mark.parametrize("name", ["TopK", "ScaledSign", "PowerSGD"])
def test_without_feedback_it_does_not(name):
    """The negative control."""
    x = value(0)
    total, _ = rounds(CONTRACTIONS[name], [x] * 400)
    assert tree.squared_norm(tree.subtract(tree.scale(total, 1 / 400), x)) > 0.1 * tree.squared_norm(x)


def test_of_the_identity_it_is_the_identity():
    feedback, x = ErrorFeedback(Identity()), value(0)
    memory = feedback.init(x)
    for seed in range(3):
        sent = feedback.transmit(value(seed), jax.random.key(0), memory)
        memory = sent.memory
        assert_trees_equal(sent.value, value(seed))
        assert all(bool(jnp.all(leaf == 0)) for leaf in jax.tree.leaves(memory))
    assert sent.bits == 32 * 207


def test_the_first_transmission_is_the_compressors_own():
    for compressor in CONTRACTIONS.values():
        plain, first = (
            c.transmit(value(0), jax.random.key(3), c.init(value(0))) for c in (compressor, ErrorFeedback(compressor))
        )
        assert_trees_equal(plain.value, first.value)
        assert (plain.bits, plain.entropy_bits) == (first.bits, first.entropy_bits)


def test_the_second_is_of_the_value_and_the_residual():
    compressor = TopK(fraction=0.1)
    feedback = ErrorFeedback(compressor)
    first = feedback.transmit(value(0), jax.random.key(0), feedback.init(value(0)))
    second = feedback.transmit(value(1), jax.random.key(1), first.memory)
    owed = tree.subtract(value(0), first.value)
    assert_trees_equal(second.value, compressor.transmit(tree.add(value(1), owed), jax.random.key(1)).value)


def test_integers_owe_nothing():
    feedback, x = ErrorFeedback(TopK(fraction=0.5)), {"n": jnp.arange(3), "x": jnp.array([1.0, 2.0])}
    memory = feedback.init(x)
    for _ in range(2):
        sent = feedback.transmit(x, jax.random.key(0), memory)
        memory = sent.memory
        np.testing.assert_array_equal(sent.value["n"], x["n"])


def test_sgd_with_scaled_signs_and_feedback_solves_what_signs_alone_do_not():
    """Least squares with directions of which signs lose sight (Karimireddy et al. 2019, section 3)."""
    draw = np.random.default_rng(0)
    a = jnp.asarray(draw.normal(size=(12, 8)) * np.logspace(0, 1.3, 8), jnp.float32)
    best = jnp.asarray(draw.normal(size=8), jnp.float32)

    def distance(compressor, steps=3000, rate=4e-5):
        def step(state, key):
            x, memory = state
            sent = compressor.transmit(a.T @ (a @ (x - best)), key, memory)
            return (x - rate * sent.value, sent.memory), None

        start = (jnp.zeros(8), compressor.init(best))
        (x, _), _ = jax.lax.scan(step, start, jax.random.split(jax.random.key(0), steps))
        return float(jnp.sum(jnp.square(a @ (x - best))))

    assert distance(ErrorFeedback(ScaledSign())) < 0.5 * distance(ScaledSign())
