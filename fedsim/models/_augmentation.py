"""Random crops and flips inside the training step, keyed, and their counterpart in evaluation.

Crops are dynamic slices of whole windows, one an image: in a compiled loop on a CPU twice as fast as gathering pixels, and
six times as fast as products with one-hot matrices (measured, also under ``vmap`` over clients).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedsim import tree


def random_crop_and_flip(key: jax.Array, images: jax.Array, size: int) -> jax.Array:
    """A window of ``size`` by ``size`` out of each image, anywhere in it, mirrored left to right half of the time.

    Every image of the batch draws its own window and side. The same key gives the same crops.

    Args:
      key: of this batch and step.
      images: ``float [n, h, w, c]``.
      size: at most ``h`` and ``w``.

    Returns:
      ``float [n, size, size, c]``.

    Raises:
      ValueError: the window does not fit into the images, or they are not floats ``[n, h, w, c]``.

    >>> image = jnp.arange(9.0).reshape(1, 3, 3, 1)
    >>> random_crop_and_flip(jax.random.key(0), image, 2)[0, :, :, 0].tolist()
    [[3.0, 4.0], [6.0, 7.0]]
    """
    _check(images, size)
    n, height, width, _ = images.shape
    rows_key, columns_key, flip_key = jax.random.split(key, 3)
    top = jax.random.randint(rows_key, (n,), 0, height - size + 1)
    left = jax.random.randint(columns_key, (n,), 0, width - size + 1)
    flip = jax.random.bernoulli(flip_key, shape=(n, 1, 1, 1))
    window = (size, size, images.shape[3])
    crops = jax.vmap(lambda image, i, j: jax.lax.dynamic_slice(image, (i, j, 0), window))(images, top, left)
    return jnp.where(flip, crops[:, :, ::-1], crops)


def center_crop(images: jax.Array, size: int) -> jax.Array:
    """The middle ``size`` by ``size`` of images ``float [n, h, w, c]``; of two middles the upper left one.

    Raises:
      ValueError: the window does not fit into the images, or they are not floats ``[n, h, w, c]``.

    >>> center_crop(jnp.arange(16.0).reshape(1, 4, 4, 1), 2)[0, :, :, 0].tolist()
    [[5.0, 6.0], [9.0, 10.0]]
    """
    _check(images, size)
    top, left = ((length - size) // 2 for length in images.shape[1:3])
    return images[:, top : top + size, left : left + size]


def standardize(images: jax.Array) -> jax.Array:
    """Each image ``float [n, h, w, c]`` less its mean, divided by its standard deviation over all pixels and channels.

    The deviation counts as ``1 / sqrt(h * w * c)`` at least, so that an even image becomes zeros: the definition of
    TensorFlow's ``per_image_standardization``.

    >>> standardize(jnp.array([[[[1.0], [3.0]]], [[[7.0], [7.0]]]]))[:, 0, :, 0].tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    axes = (1, 2, 3)
    centered = images - jnp.mean(images, axes, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(jnp.square(centered), axes, keepdims=True))
    return centered / jnp.maximum(deviation, images[0].size ** -0.5)


def _check(images: jax.Array, size: int) -> None:
    if images.ndim != 4 or not tree.is_float(images):
        raise ValueError(f"Expected float images [n, h, w, c], got {images.dtype} {list(images.shape)}: convert them first.")
    if not 0 < size <= min(images.shape[1:3]):
        raise ValueError(f"Expected a window within images of {list(images.shape[1:3])}, got size={size}.")
