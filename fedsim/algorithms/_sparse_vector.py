"""The sparse vector technique, as Shokri and Shmatikov use it (CCS 2015, figure of DSSGD with differential privacy).

C. Dwork, A. Roth, "The algorithmic foundations of differential privacy", 2014, algorithm 3: https://doi.org/10.1561/0400000042.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def above_noisy_threshold(
    values: jax.Array, clip: float, threshold: float, count: int, epsilon: float, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Selects up to ``count`` of the values ``[size]`` whose absolute value is above a threshold, with noise on both.

    Values are tested once each, in random order. Every selected value uses an equal share of the privacy budget: 8/9 of the
    share for its selection, and 2/9 (the analysis counts half of this) for its release. The sensitivity is 2 ``clip``.

    Returns:
      The noisy values ``[size]``, clipped to [-clip, clip], and which of them are selected, ``bool [size]``.

    >>> found, which = above_noisy_threshold(jnp.array([0.0, 0.9, -0.8]), 1.0, 0.5, 3, epsilon=1e9, key=jax.random.key(0))
    >>> which.tolist(), bool(jnp.all(jnp.abs(found - jnp.array([0.0, 0.9, -0.8])) < 1e-3))
    ([False, True, True], True)
    """
    of_threshold, of_test, of_value, of_order = jax.random.split(key, 4)
    selection_scale, release_scale = (2 * count * 2 * clip / (part * epsilon) for part in (8 / 9, 2 / 9))
    # Every selected value gets a new threshold. After the last one the threshold is infinite.
    thresholds = jnp.append(threshold + selection_scale * jax.random.laplace(of_threshold, (count,), jnp.float32), jnp.inf)
    tests = jnp.abs(values) + 2 * selection_scale * jax.random.laplace(of_test, values.shape, jnp.float32)
    order = jax.random.permutation(of_order, values.size)

    def test_value(count_selected: jax.Array, test: jax.Array) -> tuple[jax.Array, jax.Array]:
        passes = test >= thresholds[count_selected]
        return count_selected + passes.astype(jnp.int32), passes

    _, passes = jax.lax.scan(test_value, jnp.int32(0), tests[order])
    noisy = jnp.clip(values + release_scale * jax.random.laplace(of_value, values.shape, jnp.float32), -clip, clip)
    return noisy, jnp.zeros(values.size, bool).at[order].set(passes, unique_indices=True)
