"""Vision transformers for small photographs.

A. Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, https://arxiv.org/abs/2010.11929, in the size "Ti" of H.
Touvron et al., "Training data-efficient image transformers & distillation through attention", ICML 2021,
https://arxiv.org/abs/2012.12877, table 1. Preparation of images: as for `fedsim.models.resnet20`.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.model import Model
from fedsim.models._photographs import classifier
from fedsim.models._transformer import blocks, drop, normalize

_WIDTH, _LAYERS, _HEADS = 192, 12, 3


def vit_tiny(num_classes: int = 10, *, size: int = 32, patch: int = 4, dropout: float = 0.0, remat: bool = False) -> Model:
    """ViT-Tiny, 12 blocks of width 192 with 3 heads: 5,362,762 parameters with 10 classes.

    With ``vit_tiny(1000, size=224, patch=16)`` it is the published network of 5,717,416 parameters. A learned class token and
    learned positions are added to the patches; normalization is before attention and before the hidden layer of 768 units,
    which is followed by GELU. Initial weights are Haiku's, and those of tokens and positions have the standard deviation 0.02.

    Args:
      num_classes: labels are in ``[0, num_classes)``.
      size: the height and width of the images.
      patch: those of a patch, which divide ``size``.
      dropout: the dropout rate in training, after the positions and before each residual sum.
      remat: whether to compute the activations inside of blocks again for the gradient, instead of storing them.

    Raises:
      ValueError: a size is not positive, ``patch`` does not divide ``size``, or ``dropout`` is not in ``[0, 1)``.

    >>> model = vit_tiny()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    5362762
    """
    checks.whole(1, size=size, patch=patch)
    checks.number(least=0, below=1, dropout=dropout)
    checks.truth(remat=remat)
    if size % patch:
        raise ValueError(f"Expected patch to divide size={size}, got patch={patch}.")
    side, small = size // patch, hk.initializers.TruncatedNormal(0.02)

    def body(x: jax.Array, training: bool) -> jax.Array:
        n, rate = x.shape[0], dropout if training else 0.0
        x = x.reshape(n, side, patch, side, patch, 3).swapaxes(2, 3).reshape(n, side**2, patch**2 * 3)
        x = hk.Linear(_WIDTH)(x)
        token = hk.get_parameter("token", (1, 1, _WIDTH), x.dtype, init=small)
        positions = hk.get_parameter("positions", (1, side**2 + 1, _WIDTH), x.dtype, init=small)
        x = drop(jnp.concatenate([jnp.broadcast_to(token, (n, 1, _WIDTH)), x], axis=1) + positions, rate)
        x = blocks(x, _HEADS, 4 * _WIDTH, _LAYERS, rate, causal=False, norm_first=True, activation=_gelu, remat=remat)
        return normalize(x)[:, 0]

    return classifier(body, num_classes, size=size, margin=max(1, size // 8))


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)
