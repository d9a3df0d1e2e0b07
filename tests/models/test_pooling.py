"""`fedsim.models.max_pool` against `lax.reduce_window`, which is what `hk.max_pool` calls."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.models import max_pool


def distinct(*shape):
    return jnp.asarray(np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape), jnp.float32)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("shape", "window"),
    [((2, 6, 4, 3), 2), ((2, 7, 5, 3), 2), ((2, 6, 8, 1), (3, 2)), ((1, 4, 4, 2), (1, 4)), ((2, 3, 4, 4, 3), 2)],
)
def test_values_and_gradients_equal_reduce_window(shape, window):
    x = distinct(*shape)
    full = (*(1,) * (len(shape) - 3), *((window, window) if isinstance(window, int) else window), 1)
    reference = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, full, full, "VALID")  # noqa: E731
    np.testing.assert_array_equal(max_pool(x, window), reference(x))
    weights = distinct(*reference(x).shape)
    ours, expected = (jax.grad(lambda x, f=f: jnp.sum(f(x) * weights))(x) for f in (lambda x: max_pool(x, window), reference))
    np.testing.assert_array_equal(ours, expected)


def test_equals_haiku():
    x = distinct(2, 6, 4, 3)
    np.testing.assert_array_equal(max_pool(x, 2, 2, "VALID"), hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))


def test_equal_maxima_share_the_gradient_equally():
    gradient = jax.grad(lambda x: jnp.sum(max_pool(x, 2)))(jnp.ones([2, 2, 1]))
    np.testing.assert_array_equal(gradient, np.full([2, 2, 1], 0.25))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((2, 1), "Expected strides equal to window_shape"),
        ((2, 2, "SAME"), "SAME"),
        ((0,), "positive"),
        (((2, 2, 2),), "window_shape"),
        ((9,), "at least the size of a window"),
    ],
)
def test_errors_for_what_is_not_supported(args, message):
    with pytest.raises(ValueError, match=message):
        max_pool(jnp.ones([1, 8, 8, 1]), *args)
