"""Error feedback: residuals, and what is transmitted over several rounds."""

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
    """Returns the sum of all decoded values, and the final memory."""
    memory, total = compressor.init(values[0]), jax.tree.map(jnp.zeros_like, values[0])
    transmit = jax.jit(compressor.transmit)
    for i, x in enumerate(values):
        sent = transmit(x, jax.random.key(i), memory)
        memory, total = sent.memory, tree.add(total, sent.value)
    return total, memory


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_decoded_values_and_the_residual_add_up_to_what_was_sent(name):
    values = [value(seed) for seed in range(30)]
    total, memory = rounds(ErrorFeedback(CONTRACTIONS[name]), values)
    assert_trees_close(tree.add(total, memory.residual), jax.tree.map(lambda *x: sum(x), *values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["TopK", "PowerSGD"])
def test_residuals_in_half_precision_keep_small_values(name):
    """In bfloat16, a residual of 1 would not change by 1/1000."""
    x = {"w": jnp.full([20, 10], 1e-3, jnp.bfloat16).at[0, 0].set(1.0)}
    feedback, n = ErrorFeedback(CONTRACTIONS[name]), 1500
    memory, total = feedback.init(x), jnp.zeros([20, 10])

    def step(carry, key):
        sent = feedback.transmit(x, key, carry[0])
        assert sent.value["w"].dtype == jnp.bfloat16
        return (sent.memory, carry[1] + sent.value["w"].astype(jnp.float32)), None

    (memory, total), _ = jax.lax.scan(step, (memory, total), jax.random.split(jax.random.key(0), n))
    expected = n * np.asarray(x["w"], np.float64)
    np.testing.assert_allclose(np.asarray(total + memory.residual["w"].astype(jnp.float32), np.float64), expected, rtol=1e-3)


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_the_residual_of_a_constant_stays_small_and_its_mean_is_transmitted(name):
    """Without feedback, most of a constant is never transmitted."""
    x, n = value(0), 400
    total, memory = rounds(ErrorFeedback(CONTRACTIONS[name]), [x] * n)
    assert tree.squared_norm(memory.residual) < 40**2 * tree.squared_norm(x)
    far = tree.squared_norm(tree.subtract(tree.scale(total, 1 / n), x)) / tree.squared_norm(x)
    assert far < 0.02


@pytest.mark.parametrize("name", ["TopK", "ScaledSign", "PowerSGD"])
def test_without_feedback_the_mean_is_not_transmitted(name):
    """The negative control for the previous test."""
    x = value(0)
    total, _ = rounds(CONTRACTIONS[name], [x] * 400)
    assert tree.squared_norm(tree.subtract(tree.scale(total, 1 / 400), x)) > 0.1 * tree.squared_norm(x)


def test_error_feedback_of_the_identity_is_the_identity():
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
            jax.jit(c.transmit)(value(0), jax.random.key(3), c.init(value(0))) for c in (compressor, ErrorFeedback(compressor))
        )
        assert_trees_equal(plain.value, first.value)
        assert (plain.bits, plain.entropy_bits) == (first.bits, first.entropy_bits)


def test_the_second_transmission_contains_the_residual():
    compressor = TopK(fraction=0.1)
    feedback = ErrorFeedback(compressor)
    first = feedback.transmit(value(0), jax.random.key(0), feedback.init(value(0)))
    second = feedback.transmit(value(1), jax.random.key(1), first.memory)
    owed = tree.subtract(value(0), first.value)
    assert_trees_equal(second.value, compressor.transmit(tree.add(value(1), owed), jax.random.key(1)).value)


def test_integers_and_booleans_have_no_residual():
    feedback = ErrorFeedback(TopK(fraction=0.5))
    x = {"n": jnp.arange(3), "b": jnp.array([True, False]), "x": jnp.array([1.0, 2.0])}
    memory = feedback.init(x)
    for _ in range(2):
        sent = feedback.transmit(x, jax.random.key(0), memory)
        memory = sent.memory
        np.testing.assert_array_equal(sent.value["n"], x["n"])
        np.testing.assert_array_equal(sent.value["b"], x["b"])
        assert not memory.residual["n"].any() and not memory.residual["b"].any()


def test_signs_converge_only_with_feedback():
    """Signs depend only on the second term of e |x1 + x2| + |x1 - x2| (Karimireddy et al. 2019, counterexample 2)."""
    along, across = jnp.array([1.0, 1.0]), jnp.array([1.0, -1.0])

    def loss(x):
        return 0.5 * jnp.abs(jnp.dot(x, along)) + jnp.abs(jnp.dot(x, across))

    def end(compressor):
        def step(state, key):
            x, memory = state
            sent = compressor.transmit(jax.grad(loss)(x), key, memory)
            return (x - 2e-3 * sent.value, sent.memory), None

        start = jnp.array([1.0, 0.501])
        (x, _), _ = jax.lax.scan(step, (start, compressor.init(start)), jax.random.split(jax.random.key(0), 3000))
        return float(loss(x))

    assert end(ScaledSign()) > 0.75
    assert end(ErrorFeedback(ScaledSign())) < 0.02
