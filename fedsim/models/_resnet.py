"""Residual networks for photographs of 32 by 32 pixels, such as CIFAR-10 and CIFAR-100.

K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, https://arxiv.org/abs/1512.03385:
section 4.2 for CIFAR-10, and table 1 for ResNet-18. As there, 4 pixels are added on each side, and a random window is cropped
and flipped in training. They differ from the paper in these points: images are standardized one by one instead of by the mean
image of the dataset; group normalization, which has no state, is in place of batch normalization (K. Hsieh et al., "The
Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020, https://arxiv.org/abs/1910.00189, section 5); and
without normalization, convolutions have biases, and the last one of each block starts at zero, so that blocks start as the
identity (H. Zhang, Y. Dauphin, T. Ma, "Fixup Initialization", ICLR 2019, https://arxiv.org/abs/1901.09321).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.model import Model
from fedsim.models._convolution import Conv2D
from fedsim.models._normalization import Norm, normalization
from fedsim.models._photographs import classifier


def resnet8(num_classes: int = 10, *, norm: Norm = "group", groups: int = 2, remat: bool = False) -> Model:
    """ResNet-8, the smallest network of the paper's kind for CIFAR-10 (n = 1): 75,290 parameters with 10 classes.

    Options and errors are those of `resnet20`.

    >>> model = resnet8()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    75290
    """
    return _resnet(num_classes, (16, 32, 64), 1, _padded, norm, groups, remat)


def resnet20(num_classes: int = 10, *, norm: Norm = "group", groups: int = 2, remat: bool = False) -> Model:
    """ResNet-20 of the paper's section 4.2 (n = 3): 269,722 parameters with 10 classes, "0.27 M" there.

    Its shortcuts have no parameters: where the number of channels doubles, zeros are added (the paper's option A). Variants
    with convolutions there, as in other libraries, have 272,474.

    Args:
      num_classes: labels are in ``[0, num_classes)``.
      norm: "group" for group normalization, "batch" for batch normalization, "none" for no normalization.
      groups: the number of groups of each normalization, which divides 16.
      remat: whether to compute the activations inside of blocks again for the gradient, instead of storing them.

    Raises:
      ValueError: ``num_classes`` is not positive, ``norm`` is another name, or ``groups`` is not a divisor.

    >>> model = resnet20()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    269722
    """
    return _resnet(num_classes, (16, 32, 64), 3, _padded, norm, groups, remat)


def resnet18(num_classes: int = 10, *, norm: Norm = "group", groups: int = 2, remat: bool = False) -> Model:
    """ResNet-18 with a first convolution of 3 by 3 and no pooling after it: 11,173,962 parameters with 10 classes.

    This is the variant for small images that is common in federated learning. `cifar100_resnet18` is another one, of S. Reddi
    et al. (2021). Options and errors are those of `resnet20`; ``groups`` divides 64.

    >>> model = resnet18()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    11173962
    """
    return _resnet(num_classes, (64, 128, 256, 512), 2, None, norm, groups, remat)


def _resnet(
    num_classes: int,
    widths: Sequence[int],
    blocks: int,
    shortcut: Callable[[jax.Array, int], jax.Array] | None,
    norm: Norm,
    groups: int,
    remat: bool,
) -> Model:
    """Returns a network with ``blocks`` blocks of each width. Without ``shortcut``, a 1 by 1 convolution changes the width."""
    checks.truth(remat=remat)
    normalize = normalization(norm, groups, widths[0])

    def convolve(x: jax.Array, training: bool, channels: int, kernel: int, stride: int, *, last: bool = False) -> jax.Array:
        zero = last and norm == "none"
        w_init = jnp.zeros if zero else hk.initializers.VarianceScaling(2.0, "fan_in", "truncated_normal")
        return normalize(Conv2D(channels, kernel, stride, with_bias=norm == "none", w_init=w_init)(x), training)

    def block(x: jax.Array, training: bool, channels: int, stride: int) -> jax.Array:
        residual = jax.nn.relu(convolve(x, training, channels, 3, stride))
        residual = convolve(residual, training, channels, 3, 1, last=True)
        if x.shape[-1] != channels:
            x = shortcut(x, channels) if shortcut else convolve(x, training, channels, 1, stride)
        return jax.nn.relu(x + residual)

    def body(x: jax.Array, training: bool) -> jax.Array:
        x = jax.nn.relu(convolve(x, training, widths[0], 3, 1))
        for stage, channels in enumerate(widths):
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                step = lambda x, channels=channels, stride=stride: block(x, training, channels, stride)  # noqa: E731
                x = hk.remat(step)(x) if remat else step(x)
        return jnp.mean(x, (1, 2))

    return classifier(body, num_classes, margin=4)


def _padded(x: jax.Array, channels: int) -> jax.Array:
    """Takes every second pixel, by a reshape because the transpose of a strided slice is slow, and adds channels of zeros."""
    n, height, width, c = x.shape
    x = x.reshape(n, height // 2, 2, width // 2, 2, c)[:, :, 0, :, 0]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, channels - c)))
