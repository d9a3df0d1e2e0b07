"""Group normalization.

Y. Wu and K. He, "Group Normalization", ECCV 2018, https://arxiv.org/abs/1803.08494, equations 1 to 6.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp


class GroupNorm(hk.Module):
    """Normalizes groups of neighbouring channels of each example to mean 0 and variance 1.

    Every channel is then multiplied by its ``scale`` (initially 1), and its ``offset`` (initially 0) is added. Both have shape
    ``[channels]`` and the input's dtype. Parameters and results are those of `hk.GroupNorm`, up to a rounding error that grows
    with the mean of a group relative to its deviation, because the mean is not subtracted first.

    Args:
      groups: the number of groups, which must divide the number of channels.
      eps: a number that is added to the variance.

    Raises:
      ValueError: ``groups`` does not divide the number of channels.

    >>> net = hk.without_apply_rng(hk.transform(lambda x: GroupNorm(2)(x)))
    >>> x = jnp.array([[[[1.0, 3.0, 0.0, 20.0]]]])
    >>> net.apply(net.init(jax.random.key(0), x), x).round(3).tolist()
    [[[[-1.0, 1.0, -1.0, 1.0]]]]
    """

    def __init__(self, groups: int, *, eps: float = 1e-5, name: str | None = None):
        super().__init__(name=name)
        self.groups = groups
        self.eps = eps

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the normalized ``inputs float [n, ..., channels]``."""
        channels = inputs.shape[-1]
        if self.groups < 1 or channels % self.groups:
            raise ValueError(f"Expected groups to divide the {channels} channels, got groups={self.groups}.")
        x = inputs.reshape(inputs.shape[0], -1, self.groups, channels // self.groups)
        mean = jnp.mean(x, (1, 3), keepdims=True)
        variance = jnp.mean(jnp.square(x - mean), (1, 3), keepdims=True)
        scale = hk.get_parameter("scale", (channels,), inputs.dtype, init=jnp.ones)
        offset = hk.get_parameter("offset", (channels,), inputs.dtype, init=jnp.zeros)
        # One multiplication and one addition for each value, whose coefficients are small arrays. With (x - mean) * slope, the
        # gradient takes longer.
        slope = scale.reshape(1, 1, self.groups, -1) * jax.lax.rsqrt(variance + self.eps)
        return (x * slope + (offset.reshape(1, 1, self.groups, -1) - mean * slope)).reshape(inputs.shape)
