"""Max pooling by reshape: inside a compiled loop a good deal cheaper than `lax.reduce_window`, above all backwards."""

from __future__ import annotations

from collections.abc import Sequence

import jax


def max_pool(
    x: jax.Array, window_shape: int | Sequence[int], strides: int | Sequence[int] | None = None, padding: str = "VALID"
) -> jax.Array:
    """Maximum over windows that do not overlap: ``[..., h, w, c]`` to ``[..., h // wh, w // ww, c]``.

    `hk.max_pool` over the two axes before the last, with ``strides`` equal to ``window_shape``; rows and columns beyond
    the last whole window are dropped, as VALID does. Where several values of a window are the largest, its gradient
    is shared evenly among them (``reduce_window`` gives it to the first); elsewhere the gradients are equal.

    Raises:
      ValueError: for overlapping or spaced windows and for other paddings (use `hk.max_pool` there), for windows that
        do not fit, and for fewer than three axes.

    >>> import jax.numpy as jnp
    >>> max_pool(jnp.arange(16.0).reshape(4, 4, 1), 2)[:, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    window = (window_shape,) * 2 if isinstance(window_shape, int) else tuple(window_shape)
    if len(window) != 2 or min(window) < 1:
        raise ValueError(f"Expected window_shape to be a positive integer or two of them, and got {window_shape}.")
    steps = window if strides is None else (strides,) * 2 if isinstance(strides, int) else tuple(strides)
    if steps != window or padding != "VALID":
        raise ValueError(
            f"max_pool got window_shape={window}, strides={steps}, padding={padding!r}; it pools windows side by side "
            "(strides equal to window_shape, padding 'VALID'). Use hk.max_pool for the rest."
        )
    if x.ndim < 3 or x.shape[-3] < window[0] or x.shape[-2] < window[1]:
        raise ValueError(f"Windows of {list(window)} do not fit into images [..., h, w, c] of shape {list(x.shape)}.")
    *lead, h, w, c = x.shape
    ho, wo = h // window[0], w // window[1]
    whole = x[..., : ho * window[0], : wo * window[1], :]
    return whole.reshape(*lead, ho, window[0], wo, window[1], c).max(axis=(-4, -2))
