"""`BatchNorm`: batch normalization over the real examples of a batch, whose padding does not enter the statistics.

S. Ioffe, C. Szegedy, "Batch normalization: accelerating deep network training by reducing internal covariate shift", ICML 2015:
https://arxiv.org/abs/1502.03167.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim.model import current_scope


class BatchNorm(hk.Module):
    """Batch normalization of the last axis, with running statistics for evaluation. Use it under ``hk.transform_with_state``.

    In training it reads which rows of a batch are padding, and leaves these out. A batch with a single real example has no
    variance if the other axes have one entry only: then the outputs are the offset, and the running variance stays.

    Args:
      decay: of the running statistics; 0.9 is a momentum of 0.1 in PyTorch.
      epsilon: is added to the variance.
      name: of the module.

    Raises:
      ValueError: the first axis of ``x`` is not that of the examples of the batch.

    >>> def network(x, is_training):
    ...     return BatchNorm(decay=0.875)(x, is_training)
    >>> normalized = hk.transform_with_state(network)
    >>> x = jnp.array([[1.0], [3.0]])
    >>> params, state = normalized.init(jax.random.key(0), x, True)
    >>> outputs, state = normalized.apply(params, state, None, x, True)
    >>> outputs.round(2).tolist(), state["batch_norm"]["mean"].item(), state["batch_norm"]["var"].item()
    ([[-1.0], [1.0]], 0.25, 1.125)
    """

    def __init__(self, decay: float = 0.9, epsilon: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name=name)
        self.decay, self.epsilon = decay, epsilon

    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        """Returns the normalized ``x``, ``[n, ..., channels]``, in its dtype.

        Raises:
          ValueError: the first axis of ``x`` is not that of the examples.
        """
        channels = x.shape[-1:]
        scale = hk.get_parameter("scale", channels, jnp.float32, jnp.ones)
        offset = hk.get_parameter("offset", channels, jnp.float32, jnp.zeros)
        mean = hk.get_state("mean", channels, jnp.float32, jnp.zeros)
        var = hk.get_state("var", channels, jnp.float32, jnp.ones)
        wide = x.reshape(len(x), -1, x.shape[-1]).astype(jnp.float32)

        def wide_of(values: jax.Array) -> jax.Array:
            return values[None, None]

        if is_training and not current_scope().frozen_statistics:
            mask = current_scope().mask
            if mask is None:  # as when the network is initialized
                mask = jnp.ones(len(x), bool)
            if len(mask) != len(x):
                raise ValueError(
                    f"Expected x [n, ..., channels] with the {len(mask)} examples of the batch as its first axis, got shape "
                    f"{list(x.shape)}: normalize before the examples are reshaped, or use GroupNorm."
                )
            real = mask[:, None, None]
            count = jnp.sum(mask, dtype=jnp.float32) * wide.shape[1]
            of_batch = jnp.sum(wide, (0, 1), where=real) / jnp.maximum(count, 1)
            spread = jnp.sum(jnp.square(wide - wide_of(of_batch)), (0, 1), where=real)
            rate = jnp.where(count > 0, 1 - self.decay, 0.0)
            # The running variance is that of the population, with n - 1, as in PyTorch.
            hk.set_state("mean", mean + rate * (of_batch - mean))
            rate = jnp.where(count > 1, rate, 0.0)  # One value has no variance.
            hk.set_state("var", var + rate * (spread / jnp.maximum(count - 1, 1) - var))
            mean, var = of_batch, spread / jnp.maximum(count, 1)
        factor = scale * jax.lax.rsqrt(var + self.epsilon)
        return ((wide - wide_of(mean)) * wide_of(factor) + wide_of(offset)).reshape(x.shape).astype(x.dtype)
