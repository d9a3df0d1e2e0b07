"""`fedsim.models.dropout`: statistics within five standard deviations (with a control), and `hk.dropout`'s scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.models import dropout

N = 99_999  # not a multiple of four, so a part of the last random word is unused
RATES = [0.25, 0.5, 3 / 65536, 0.1, 0.9]  # 8, 8, 16, 32 and 32 bits


def deviations(dropped, rate):
    """Returns the distance of the number of dropped elements from its expectation, in standard deviations."""
    return abs(np.sum(np.asarray(dropped) == 0) - N * rate) / np.sqrt(N * rate * (1 - rate))


@pytest.mark.parametrize("rate", RATES)
def test_drops_at_its_rate_and_scales_the_rest(rate):
    dropped = dropout(jax.random.key(0), rate, jnp.ones([N]))
    assert deviations(dropped, rate) < 5
    np.testing.assert_allclose(np.unique(dropped), [0, 1 / (1 - rate)], rtol=1e-6)


def test_the_statistic_distinguishes_rates():
    assert deviations(dropout(jax.random.key(0), 0.25, jnp.ones([N])), 0.25 + 1 / 128) > 5


@pytest.mark.parametrize("rate", RATES)
def test_the_key_determines_the_dropped_elements(rate):
    masks = [np.asarray(dropout(jax.random.key(seed), rate, jnp.ones([N]))) == 0 for seed in (0, 0, 1)]
    np.testing.assert_array_equal(masks[0], masks[1])
    both = np.sum(masks[0] & masks[2])  # independent: a fraction of rate squared
    assert abs(both - N * rate**2) < 5 * np.sqrt(N * rate**2)
    assert (masks[0] != masks[2]).any()


def test_elements_are_independent_of_their_neighbours():
    kept = np.asarray(dropout(jax.random.key(0), 0.5, jnp.ones([N]))) > 0
    for lag in range(1, 9):  # words are split into four numbers
        assert abs(np.mean(kept[lag:] == kept[:-lag]) - 0.5) < 5 * 0.5 / np.sqrt(N - lag)


def test_gradient_is_the_mask():
    x = jnp.arange(1.0, 101.0)
    key = jax.random.key(0)
    gradient = jax.grad(lambda x: jnp.sum(dropout(key, 0.5, x)))(x)
    np.testing.assert_allclose(gradient * x, dropout(key, 0.5, x))


def test_jit_and_vmap_over_keys_change_nothing():
    keys, x = jax.random.split(jax.random.key(0), 3), jnp.ones([5, 7])
    one_by_one = np.stack([dropout(key, 0.25, x) for key in keys])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda key: dropout(key, 0.25, x)))(keys), one_by_one)


def test_rate_zero_is_the_identity_and_dtypes_stay():
    x = jnp.ones([3], jnp.bfloat16)
    assert dropout(jax.random.key(0), 0, x) is x
    assert dropout(jax.random.key(0), 0.5, x).dtype == jnp.bfloat16
    assert dropout(jax.random.key(0), 0.5, jnp.ones([0, 4])).shape == (0, 4)


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, float("nan")])
def test_errors_for_other_rates(rate):
    with pytest.raises(ValueError, match="rate"):
        dropout(jax.random.key(0), rate, jnp.ones([3]))
