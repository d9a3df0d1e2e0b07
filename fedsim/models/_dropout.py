"""Dropout that draws only as many random bits as its rate requires.

N. Srivastava, G. Hinton, A. Krizhevsky, I. Sutskever, R. Salakhutdinov, "Dropout: A Simple Way to Prevent Neural
Networks from Overfitting", JMLR 15, 2014, https://jmlr.org/papers/v15/srivastava14a.html; the
scaling is in training instead of evaluation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedsim import checks


def dropout(key: jax.Array, rate: float, x: jax.Array) -> jax.Array:
    """Sets each element of ``x float [...]`` to 0 with probability ``rate``, and divides the others by ``1 - rate``.

    It has the semantics of `hk.dropout`, with other random numbers: 8 random bits per element for a rate that is a multiple of
    1/256 (such as 0.25 and 0.5), 16 bits for a multiple of 1/65536, and otherwise 32. The same key, rate and shape drop the
    same elements.

    Raises:
      ValueError: ``rate`` is not in ``[0, 1)``.

    >>> dropped = dropout(jax.random.key(0), 0.25, jnp.ones([1000]))
    >>> sorted(set(dropped.tolist())), bool(0.7 < (dropped > 0).mean() < 0.8)
    ([0.0, 1.3333333730697632], True)
    """
    checks.number(least=0, below=1, rate=rate)
    if rate == 0:
        return x
    bits = next((bits for bits in (8, 16) if (rate * 2**bits).is_integer()), 32)
    threshold = min(round(rate * 2**bits), 2**bits - 1)
    # jax.random.bits draws a whole 32-bit word for an 8-bit number, so words are drawn and divided here.
    words = jax.random.bits(key, (-(-x.size * bits // 32),), jnp.uint32)
    dtype = np.dtype(f"uint{bits}")
    numbers = lax.bitcast_convert_type(words, dtype).reshape(-1)[: x.size].reshape(x.shape)
    return jnp.where(numbers >= dtype.type(threshold), x / (1 - rate), 0)
