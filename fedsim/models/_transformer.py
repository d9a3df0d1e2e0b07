"""Transformer blocks, and networks of them that predict the next token of a sequence.

A. Vaswani et al., "Attention is all you need", NeurIPS 2017, https://arxiv.org/abs/1706.03762. There, normalization follows
each residual sum; with ``norm_first`` it is inside of the residual, as in vision transformers.
"""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks
from fedsim.models._dropout import dropout


def token_logits(
    num_ids: int, embedding: int, heads: int, feedforward: int, layers: int, rate: float, *, remat: bool
) -> Callable[[jax.Array, bool], jax.Array]:
    """Returns the function from ``tokens int32 [n, length]``, and whether they are of training, to logits ``[n, length, ids]``.

    A token attends to itself and to the tokens before it. Positions are fixed sinusoids, and the output layer shares the
    weights of the embedding.

    Raises:
      ValueError: a size is not positive, ``embedding`` is odd, or ``heads`` does not divide it.
    """
    checks.whole(1, embedding=embedding, heads=heads, feedforward=feedforward, layers=layers)
    checks.number(least=0, below=1, dropout=rate)
    checks.truth(remat=remat)
    if embedding % heads or embedding % 2:
        raise ValueError(
            f"Expected an even embedding that heads divides, got embedding={embedding}, heads={heads}. Use 96 and 8."
        )

    def logits(tokens: jax.Array, training: bool) -> jax.Array:
        embed = hk.Embed(num_ids, embedding, w_init=hk.initializers.RandomUniform(-0.05, 0.05))
        x = embed(tokens)
        x = x * float(np.sqrt(embedding)) + sinusoids(*x.shape[1:])[None].astype(x.dtype)
        applied = rate if training else 0.0
        x = blocks(drop(x, applied), heads, feedforward, layers, applied, remat=remat)
        return x @ embed.embeddings.T

    return logits


def blocks(
    x: jax.Array,
    heads: int,
    feedforward: int,
    layers: int,
    rate: float,
    *,
    causal: bool = True,
    norm_first: bool = False,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu,
    remat: bool = False,
) -> jax.Array:
    """Applies ``layers`` blocks to ``x float32 [n, length, width]``, which do not change the shape."""

    def hidden(x: jax.Array) -> jax.Array:
        y = activation(hk.Linear(feedforward)(x))
        return hk.Linear(x.shape[-1])(y)

    def residual(x: jax.Array, part: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return x + drop(part(normalize(x)), rate) if norm_first else normalize(x + drop(part(x), rate))

    def block(x: jax.Array) -> jax.Array:
        return residual(residual(x, lambda x: _attention(x, heads, causal)), hidden)

    for _ in range(layers):
        x = hk.remat(block)(x) if remat else block(x)
    return x


def sinusoids(length: int, width: int) -> np.ndarray:
    """Returns positions ``float32 [length, width]``: alternating sines and cosines of wavelengths from 2 pi to 20,000 pi."""
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(length, width).astype(np.float32)


def normalize(x: jax.Array) -> jax.Array:
    """Normalizes over the last axis, with a scale and an offset."""
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)


def drop(x: jax.Array, rate: float) -> jax.Array:
    """Applies dropout with the next key of Haiku, if the rate is not 0."""
    return dropout(hk.next_rng_key(), rate, x) if rate else x


def _attention(x: jax.Array, heads: int, causal: bool) -> jax.Array:
    n, length, width = x.shape
    query, key, value = (hk.Linear(width)(x).reshape(n, length, heads, width // heads) for _ in range(3))
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / float(np.sqrt(width // heads))
    if causal:
        scores = jnp.where(np.tril(np.ones((length, length), bool))[None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return hk.Linear(width)(jnp.einsum("nhqk,nkhd->nqhd", weights, value).reshape(n, length, width))
