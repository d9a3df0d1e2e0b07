"""Random crops and flips inside the training step, and the center crop for evaluation.

Crops are one dynamic slice per image. In a compiled loop on a CPU this was measured to be twice as fast as gathering pixels and
six times as fast as products with one-hot matrices, also under ``vmap`` over clients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedsim import tree


def random_crop_and_flip(key: jax.Array, images: jax.Array, size: int) -> jax.Array:
    """Crops a random window of each image, and flips it left to right with probability 1/2.

    The window and the flip are drawn for each image of the batch. The same key gives the same crops.

    Args:
      key: the random key of this step.
      images: the images, ``float [n, h, w, c]``.
      size: the height and width of the window, at most ``h`` and ``w``.

    Returns:
      ``float [n, size, size, c]``.

    Raises:
      ValueError: the window is larger than the images, or these are not floats ``[n, h, w, c]``.

    >>> image = jnp.arange(9.0).reshape(1, 3, 3, 1)
    >>> random_crop_and_flip(jax.random.key(0), image, 2)[0, :, :, 0].tolist()
    [[3.0, 4.0], [6.0, 7.0]]
    """
    _check(images, size)
    n, height, width, _ = images.shape
    rows_key, columns_key, flip_key = jax.random.split(key, 3)
    top = jax.random.randint(rows_key, (n,), 0, height - size + 1, jnp.int32)
    left = jax.random.randint(columns_key, (n,), 0, width - size + 1, jnp.int32)
    flip = jax.random.bernoulli(flip_key, jnp.float32(0.5), (n, 1, 1, 1))
    window = (size, size, images.shape[3])
    crops = jax.vmap(lambda image, i, j: jax.lax.dynamic_slice(image, (i, j, 0), window))(images, top, left)
    return jnp.where(flip, crops[:, :, ::-1], crops)


def center_crop(images: jax.Array, size: int) -> jax.Array:
    """Returns the central window of ``size`` by ``size`` pixels of images ``float [n, h, w, c]``.

    If it cannot be exactly central, it is half a pixel further up and to the left.

    Raises:
      ValueError: the window is larger than the images, or these are not floats ``[n, h, w, c]``.

    >>> center_crop(jnp.arange(16.0).reshape(1, 4, 4, 1), 2)[0, :, :, 0].tolist()
    [[5.0, 6.0], [9.0, 10.0]]
    """
    _check(images, size)
    top, left = ((length - size) // 2 for length in images.shape[1:3])
    return images[:, top : top + size, left : left + size]


def standardize(images: jax.Array) -> jax.Array:
    """Subtracts the mean of each image ``float [n, h, w, c]`` and divides by its standard deviation over pixels and channels.

    The standard deviation is replaced by ``1 / sqrt(h * w * c)`` if it is less, so that a uniform image becomes zeros. This is
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
        raise ValueError(f"Expected float images [n, h, w, c], got {images.dtype} {list(images.shape)}. Convert them first.")
    if not 0 < size <= min(images.shape[1:3]):
        raise ValueError(
            f"Expected 0 < size <= {min(images.shape[1:3])} for images of {list(images.shape[1:3])}, got size={size}."
        )
