"""Dropout that draws no more random bits than its rate needs.

N. Srivastava, G. Hinton, A. Krizhevsky, I. Sutskever, R. Salakhutdinov, "Dropout: A Simple Way to Prevent Neural
Networks from Overfitting", JMLR 15, 2014, https://jmlr.org/papers/v15/srivastava14a.html; scaled in training instead of
in evaluation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def dropout(key: jax.Array, rate: float, x: jax.Array) -> jax.Array:
    """``x float [...]`` with each element set to 0 with probability ``rate``, and the others divided by ``1 - rate``.

    Semantics of `hk.dropout`, other random numbers: a rate that is a multiple of 1/256 (0.25, 0.5) costs 8 random bits
    an element, a multiple of 1/65536 16 bits, any other 32. The same key, rate and shape drop the same elements.

    Raises:
      ValueError: unless ``0 <= rate < 1``.

    >>> dropped = dropout(jax.random.key(0), 0.25, jnp.ones([1000]))
    >>> sorted(set(dropped.tolist())), bool(0.7 < (dropped > 0).mean() < 0.8)
    ([0.0, 1.3333333730697632], True)
    """
    if not 0 <= rate < 1:
        raise ValueError(f"Expected a dropout rate in [0, 1), and got rate={rate}.")
    if rate == 0:
        return x
    bits = next((bits for bits in (8, 16) if (rate * 2**bits).is_integer()), 32)
    threshold = min(round(rate * 2**bits), 2**bits - 1)
    # jax.random.bits spends a whole 32-bit word on an 8-bit number, so words are drawn and taken apart here.
    words = jax.random.bits(key, (-(-x.size * bits // 32),), jnp.uint32)
    dtype = np.dtype(f"uint{bits}")
    numbers = lax.bitcast_convert_type(words, dtype).reshape(-1)[: x.size].reshape(x.shape)
    return jnp.where(numbers >= dtype.type(threshold), x / (1 - rate), 0)
