"""Max pooling by reshape, which is faster than `lax.reduce_window` inside a compiled loop, mainly in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import jax


def max_pool(
    x: jax.Array, window_shape: int | Sequence[int], strides: int | Sequence[int] | None = None, padding: str = "VALID"
) -> jax.Array:
    """Returns the maximum over windows that do not overlap: ``[..., h, w, c]`` becomes ``[..., h // wh, w // ww, c]``.

    It is `hk.max_pool` over the height and the width, with ``strides`` equal to ``window_shape`` and VALID padding, which drops
    the rows and columns after the last whole window. If several values of a window are equal to the maximum, the gradient is
    divided equally among them, where ``reduce_window`` gives it to the first one. Other gradients are equal.

    Args:
      x: the images.
      window_shape: the height and width of a window, or one number for both.
      strides: None, or equal to ``window_shape``.
      padding: "VALID".

    Raises:
      ValueError: windows overlap or have gaps, or padding is not VALID (use `hk.max_pool` for these); windows are larger than
        the images; or ``x`` has fewer than three axes.

    >>> import jax.numpy as jnp
    >>> max_pool(jnp.arange(16.0).reshape(4, 4, 1), 2)[:, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    window = (window_shape,) * 2 if isinstance(window_shape, int) else tuple(window_shape)
    if len(window) != 2 or min(window) < 1:
        raise ValueError(f"Expected window_shape to be one or two positive integers, got window_shape={window_shape}.")
    steps = window if strides is None else (strides,) * 2 if isinstance(strides, int) else tuple(strides)
    if steps != window or padding != "VALID":
        raise ValueError(
            f"Expected strides equal to window_shape and padding 'VALID', got window_shape={window}, strides={steps}, "
            f"padding={padding!r}. Use hk.max_pool for other windows."
        )
    if x.ndim < 3 or x.shape[-3] < window[0] or x.shape[-2] < window[1]:
        raise ValueError(
            f"Expected images [..., h, w, c] of at least the size of a window, {list(window)}, got shape {list(x.shape)}."
        )
    *lead, h, w, c = x.shape
    ho, wo = h // window[0], w // window[1]
    whole = x[..., : ho * window[0], : wo * window[1], :]
    return whole.reshape(*lead, ho, window[0], wo, window[1], c).max(axis=(-4, -2))
