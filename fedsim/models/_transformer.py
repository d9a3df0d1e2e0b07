"""Causal transformer blocks with layer normalization after each residual sum."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from fedsim.models._dropout import dropout


def encode(x: jax.Array, heads: int, feedforward: int, layers: int, rate: float) -> jax.Array:
    """Adds positions to ``x float32 [n, length, width]`` and applies ``layers`` blocks, which do not change the shape."""
    x = x * np.sqrt(x.shape[-1]).astype(np.float32) + sinusoids(*x.shape[1:])[None]
    x = _drop(x, rate)
    for _ in range(layers):
        x = _norm(x + _drop(_attention(x, heads), rate))
        hidden = jax.nn.relu(hk.Linear(feedforward)(x))
        x = _norm(x + _drop(hk.Linear(x.shape[-1])(hidden), rate))
    return x


def sinusoids(length: int, width: int) -> np.ndarray:
    """Returns positions ``float32 [length, width]``: alternating sines and cosines of wavelengths from 2 pi to 20,000 pi."""
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(length, width).astype(np.float32)


def _attention(x: jax.Array, heads: int) -> jax.Array:
    n, length, width = x.shape
    query, key, value = (hk.Linear(width)(x).reshape(n, length, heads, width // heads) for _ in range(3))
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / np.sqrt(width // heads).astype(np.float32)
    visible = np.tril(np.ones((length, length), bool))[None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return hk.Linear(width)(jnp.einsum("nhqk,nkhd->nqhd", weights, value).reshape(n, length, width))


def _norm(x: jax.Array) -> jax.Array:
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)


def _drop(x: jax.Array, rate: float) -> jax.Array:
    return dropout(hk.next_rng_key(), rate, x) if rate else x
