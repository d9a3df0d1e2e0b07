"""MobileNetV2 for photographs of 32 by 32 pixels.

M. Sandler, A. Howard, M. Zhu, A. Zhmoginov, L.-C. Chen, "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018,
https://arxiv.org/abs/1801.04381, table 2. It differs in the strides of the first convolution and of the second stage, which are
1 instead of 2 because images are small, and in the normalization and the preparation of images, which are those of
`fedsim.models.resnet20`. There is no dropout.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.model import Model
from fedsim.models._convolution import Conv2D, DepthwiseConv2D
from fedsim.models._normalization import Norm, normalization
from fedsim.models._photographs import classifier

# Expansion, channels, number of blocks and stride of the first block of each stage.
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet_v2(
    num_classes: int = 10, *, width: float = 1.0, norm: Norm = "group", groups: int = 2, remat: bool = False
) -> Model:
    """MobileNetV2 for small images: 2,236,682 parameters with 10 classes, and 700,490 with half of the channels.

    Args:
      num_classes: labels are in ``[0, num_classes)``.
      width: the factor of the numbers of channels, the paper's width multiplier. They are rounded to multiples of 8.
      norm: "group" for group normalization, "batch" for batch normalization, "none" for no normalization.
      groups: the number of groups of each normalization, which divides 8.
      remat: whether to compute the activations inside of blocks again for the gradient, instead of storing them.

    Raises:
      ValueError: ``num_classes`` or ``width`` is not positive, ``norm`` is another name, or ``groups`` is not a divisor.

    >>> model = mobilenet_v2()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    2236682
    """
    checks.positive(width=width)
    checks.truth(remat=remat)
    normalize = normalization(norm, groups, 8)
    he_normal = hk.initializers.VarianceScaling(2.0, "fan_in", "truncated_normal")

    def pointwise(x: jax.Array, training: bool, channels: int) -> jax.Array:
        return normalize(Conv2D(channels, 1, with_bias=norm == "none", w_init=he_normal)(x), training)

    def block(x: jax.Array, training: bool, expansion: int, channels: int, stride: int) -> jax.Array:
        y = jax.nn.relu6(pointwise(x, training, expansion * x.shape[-1])) if expansion > 1 else x
        y = jax.nn.relu6(normalize(DepthwiseConv2D(3, stride, with_bias=norm == "none")(y), training))
        y = pointwise(y, training, channels)
        return x + y if x.shape == y.shape else y

    def body(x: jax.Array, training: bool) -> jax.Array:
        x = jax.nn.relu6(normalize(Conv2D(_rounded(32 * width), 3, with_bias=norm == "none", w_init=he_normal)(x), training))
        for expansion, channels, blocks, stride in _STAGES:
            for number in range(blocks):
                shape = expansion, _rounded(channels * width), 1 if number else stride
                step = lambda x, shape=shape: block(x, training, *shape)  # noqa: E731
                x = hk.remat(step)(x) if remat else step(x)
        return jnp.mean(jax.nn.relu6(pointwise(x, training, _rounded(1280 * max(1.0, width)))), (1, 2))

    return classifier(body, num_classes, margin=4)


def _rounded(channels: float) -> int:
    """Returns the nearest multiple of 8 that is not less than 90 % of ``channels``, as the authors' code rounds."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8
