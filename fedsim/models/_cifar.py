"""Models for small photographs: CIFAR-100 and CIFAR-10.

Features: ``x: uint8 [32, 32, 3]`` (or floats); ``y: int32 []``, the class. In training, each image is cropped to a random
24 by 24 and mirrored half of the time, keyed by the step; in evaluation, its middle 24 by 24 is read. Either is then
standardized on its own. So do S. Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
https://arxiv.org/abs/2003.00295, appendix C, and their code (google-research/federated, utils/datasets/cifar100_dataset.py).
"""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.model import Examples, Model
from fedsim.models._augmentation import center_crop, random_crop_and_flip, standardize
from fedsim.models._convolution import Conv2D
from fedsim.models._dense import image_features
from fedsim.models._group_norm import GroupNorm
from fedsim.models._pooling import max_pool

_SHAPE, _CROP = (32, 32, 3), 24


def cifar100_logistic(num_classes: int = 100) -> Model:
    """Multinomial logistic regression on the 24 by 24 crop: 172,900 parameters at 100 classes.

    Raises:
      ValueError: unless ``num_classes`` is positive.

    >>> cifar100_logistic().features["x"][0].shape
    (32, 32, 3)
    """
    return _classifier(lambda x: x.reshape(x.shape[0], -1), num_classes)


def cifar10_cnn(num_classes: int = 10) -> Model:
    """Two convolutions of 5 by 5 and 64 channels, each pooled, and hidden layers of 384 and 192: 1,068,298 parameters.

    The network for CIFAR-10 of B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
    Data", AISTATS 2017, https://arxiv.org/abs/1602.05629, section 3, which took it from TensorFlow's tutorial. It differs:
    pools lie side by side (2 by 2 instead of 3 by 3, two apart), there is no local response normalization, brightness and
    contrast are left as they are, and weights start as Haiku draws them.

    Raises:
      ValueError: unless ``num_classes`` is positive.

    >>> model = cifar10_cnn()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    1068298
    """

    def body(x: jax.Array) -> jax.Array:
        x = max_pool(jax.nn.relu(Conv2D(64, 5)(x)), 2)
        x = max_pool(jax.nn.relu(Conv2D(64, 5)(x)), 2)
        x = x.reshape(x.shape[0], -1)
        x = jax.nn.relu(hk.Linear(384)(x))
        return jax.nn.relu(hk.Linear(192)(x))

    return _classifier(body, num_classes)


def cifar100_resnet18(num_classes: int = 100, *, groups: int = 2, downsample: bool = False) -> Model:
    """ResNet-18 with group normalization: 11,227,812 parameters at 100 classes.

    Residual blocks with normalization before each convolution: K. He, X. Zhang, S. Ren and J. Sun, "Identity Mappings in
    Deep Residual Networks", ECCV 2016, https://arxiv.org/abs/1603.05027. Groups instead of batches, as K. Hsieh et al.,
    "The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020, https://arxiv.org/abs/1910.00189, advise. It is
    the network of Reddi et al. (2021) as their code (google-research/federated, utils/models/resnet_models.py) builds it:
    a convolution of 7 by 7 and a pool of 3 by 3, both two apart, then stages of 64, 128, 256 and 512 channels. Their
    stages do not shrink the images, which stay 6 by 6; a textbook ResNet halves them at each stage, as ``downsample`` does
    (the same number of parameters, a tenth of the work). There is no weight decay here: it is an optimizer's business.

    Args:
      num_classes: labels lie in ``[0, num_classes)``.
      groups: of each normalization: 2 in the paper.
      downsample: whether stages 2 to 4 halve the images.

    Raises:
      ValueError: unless ``num_classes`` is positive and ``groups`` divides 64.

    >>> model = cifar100_resnet18()
    >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    11227812
    """
    if groups < 1 or 64 % groups:
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

    def body(x: jax.Array) -> jax.Array:
        x = _overlapping_max_pool(jax.nn.relu(normalize(convolve(x, 64, 7, 2))))
        for stage, channels in enumerate((64, 128, 256, 512)):
            for number in range(2):
                halve = downsample and stage > 0 and number == 0
                x = block(x, channels, 2 if halve else 1, first=stage == number == 0)
        return jnp.mean(jax.nn.relu(normalize(x)), (1, 2))

    return _classifier(body, num_classes, w_init=hk.initializers.RandomNormal(0.01))


def _classifier(
    body: Callable[[jax.Array], jax.Array], num_classes: int, *, w_init: hk.initializers.Initializer | None = None
) -> Model:
    """Logits from what ``body`` makes of standardized crops ``float32 [n, 24, 24, 3]``: ``float32 [n, features]``."""
    checks.whole(1, num_classes=num_classes)

    def logits(examples: Examples, training: bool) -> jax.Array:
        x = examples["x"].astype(jnp.float32)
        x = random_crop_and_flip(hk.next_rng_key(), x, _CROP) if training else center_crop(x, _CROP)
        x = body(standardize(x))
        return hk.Linear(num_classes, w_init=w_init)(x)

    return Model.from_haiku(
        hk.transform(logits),
        features=image_features(_SHAPE),
        num_classes=num_classes,
        train_kwargs={"training": True},
        eval_kwargs={"training": False},
    )


def _overlapping_max_pool(x: jax.Array) -> jax.Array:
    """Maximum over windows of 3 by 3, two apart, of images of even size; the last window of a row or column is cut short.

    `max_pool` of pairs and the next pair's first: reshapes, since the transpose of a strided slice is slow.
    """
    for axis in (1, 2):
        x = jnp.moveaxis(x, axis, 1)
        pairs = x.reshape(x.shape[0], x.shape[1] // 2, 2, *x.shape[2:])
        after = jnp.concatenate([pairs[:, 1:, 0], pairs[:, -1:, 1]], axis=1)
        x = jnp.moveaxis(jnp.maximum(pairs.max(axis=2), after), 1, axis)
    return x
