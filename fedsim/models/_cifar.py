"""Models for small photographs: CIFAR-100 and CIFAR-10.

Features: ``x: uint8 [32, 32, 3]`` (or floats); ``y: int32 []``, the class. In training, a random window of 24 by 24
pixels is cropped from each image and flipped with probability 1/2; in evaluation, the central window is cropped. Each crop is
then standardized. This is the preprocessing of S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
https://arxiv.org/abs/2003.00295, appendix C, and of their code (google-research/federated, utils/datasets/cifar100_dataset.py).
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.model import Model
from fedsim.models._convolution import Conv2D
from fedsim.models._group_norm import GroupNorm
from fedsim.models._photographs import classifier
from fedsim.models._pooling import max_pool

_WINDOW = 24


def cifar100_logistic(num_classes: int = 100) -> Model:
    """Multinomial logistic regression on the 24 by 24 crop: 172,900 parameters with 100 classes.

    Raises:
      ValueError: ``num_classes`` is not positive.

    >>> cifar100_logistic().features["x"][0].shape
    (32, 32, 3)
    """
    return classifier(lambda x, training: x.reshape(x.shape[0], -1), num_classes, window=_WINDOW)


def cifar10_cnn(num_classes: int = 10) -> Model:
    """A network of two convolutions and two hidden layers for CIFAR-10: 1,068,298 parameters.

    The convolutions have 5 by 5 pixels and 64 channels, and each is followed by max pooling; the hidden layers have 384 and 192
    units.

    The network for CIFAR-10 of B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", AISTATS 2017, https://arxiv.org/abs/1602.05629, section 3, which took it from TensorFlow's tutorial. It differs:
    pooling windows do not overlap (2 by 2 instead of 3 by 3 with stride 2), there is no local response normalization,
    brightness and contrast are not changed, and initial weights are Haiku's.

    Raises:
      ValueError: ``num_classes`` is not positive.

    >>> model = cifar10_cnn()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    1068298
    """

    def body(x: jax.Array, training: bool) -> jax.Array:
        x = max_pool(jax.nn.relu(Conv2D(64, 5)(x)), 2)
        x = max_pool(jax.nn.relu(Conv2D(64, 5)(x)), 2)
        x = x.reshape(x.shape[0], -1)
        x = jax.nn.relu(hk.Linear(384)(x))
        return jax.nn.relu(hk.Linear(192)(x))

    return classifier(body, num_classes, window=_WINDOW)


def cifar100_resnet18(num_classes: int = 100, *, groups: int = 2, downsample: bool = False) -> Model:
    """ResNet-18 with group normalization: 11,227,812 parameters with 100 classes.

    Residual blocks with normalization before each convolution: K. He, X. Zhang, S. Ren and J. Sun, "Identity Mappings in
    Deep Residual Networks", ECCV 2016, https://arxiv.org/abs/1603.05027. Group instead of batch normalization is the
    recommendation of K. Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020,
    https://arxiv.org/abs/1910.00189. It is the network of Reddi et al. (2021) as in their code (google-research/federated,
    utils/models/resnet_models.py): a convolution of 7 by 7 and max pooling of 3 by 3, both with stride 2, then stages of 64,
    128, 256 and 512 channels. In their code the stages do not reduce the size of the images, which stays 6 by 6. A standard
    ResNet halves it at each stage, as ``downsample`` does, with the same number of parameters and a tenth of the operations.
    There is no weight decay; it is an option of the optimizer.

    Args:
      num_classes: labels are in ``[0, num_classes)``.
      groups: the number of groups of each normalization, 2 in the paper.
      downsample: whether stages 2 to 4 halve the height and width of the images.

    Raises:
      ValueError: ``num_classes`` is not positive, or ``groups`` does not divide 64.

    >>> model = cifar100_resnet18()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    11227812
    """
    checks.whole(1, groups=groups, remedy="give a divisor of 64")
    checks.truth(downsample=downsample)
    if 64 % groups:
        raise ValueError(f"Expected groups to divide 64, got groups={groups}.")
    he_normal = hk.initializers.VarianceScaling(2.0, "fan_in", "truncated_normal")

    def convolve(x: jax.Array, channels: int, kernel: int, stride: int) -> jax.Array:
        return Conv2D(channels, kernel, stride, with_bias=False, w_init=he_normal)(x)

    def normalize(x: jax.Array) -> jax.Array:
        return GroupNorm(groups, eps=1e-3)(x)

    def block(x: jax.Array, channels: int, stride: int, *, first: bool) -> jax.Array:
        residual = convolve(x if first else jax.nn.relu(normalize(x)), channels, 3, stride)
        residual = convolve(jax.nn.relu(normalize(residual)), channels, 3, 1)
        if x.shape[-1] != channels:
            x = normalize(convolve(x, channels, 1, stride))
        return x + residual

    def body(x: jax.Array, training: bool) -> jax.Array:
        x = _overlapping_max_pool(jax.nn.relu(normalize(convolve(x, 64, 7, 2))))
        for stage, channels in enumerate((64, 128, 256, 512)):
            for number in range(2):
                halve = downsample and stage > 0 and number == 0
                x = block(x, channels, 2 if halve else 1, first=stage == number == 0)
        return jnp.mean(jax.nn.relu(normalize(x)), (1, 2))

    return classifier(body, num_classes, window=_WINDOW, w_init=hk.initializers.RandomNormal(0.01))


def _overlapping_max_pool(x: jax.Array) -> jax.Array:
    """Max pooling of 3 by 3 with stride 2, for images of even size. The last window of a row or column has only two pixels.

    It is the maximum of pairs and of the first pixel of the next pair, by reshapes, because the transpose of a strided slice is
    slow.
    """
    for axis in (1, 2):
        x = jnp.moveaxis(x, axis, 1)
        pairs = x.reshape(x.shape[0], x.shape[1] // 2, 2, *x.shape[2:])
        after = jnp.concatenate([pairs[:, 1:, 0], pairs[:, -1:, 1]], axis=1)
        x = jnp.moveaxis(jnp.maximum(pairs.max(axis=2), after), 1, axis)
    return x
