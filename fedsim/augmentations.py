"""Random augmentations of images inside a training step: functions ``(key, images) -> images``.

Images are ``[n, h, w, c]`` of any dtype, and the result has their shape and dtype: integers are rounded and cut to the range of
the dtype. Every image of a batch has its own draw, and the same key gives the same result. Pixels that come from outside of an
image are 0. Other options of a function: ``functools.partial(rotate, most=10.0)``.

>>> functools.partial(shift, most=2)(jax.random.key(0), jnp.ones([5, 8, 8, 1], jnp.uint8)).dtype
dtype('uint8')
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy import ndimage

Augmentation = Callable[[jax.Array, jax.Array], jax.Array]


def chain(*augmentations: Augmentation) -> Augmentation:
    """Returns the augmentation that applies these one after the other, each with its own key.

    >>> both = chain(shift, functools.partial(noise, sigma=0.0))
    >>> both(jax.random.key(0), jnp.zeros([2, 8, 8, 1])).shape
    (2, 8, 8, 1)
    """

    def chained(key: jax.Array, images: jax.Array) -> jax.Array:
        """Applies the augmentations of the chain to images ``[n, ...]``."""
        for number, augmentation in enumerate(augmentations):
            images = augmentation(jax.random.fold_in(key, number), images)
        return images

    return chained


def shift(key: jax.Array, images: jax.Array, *, most: int | None = None) -> jax.Array:
    """Moves every image by up to ``most`` whole pixels in each direction; default: a sixteenth of the height.

    FixMatch moves photographs by an eighth. The embedded digits fill their 8 by 8 pixels, and are not moved by default.

    >>> moved = shift(jax.random.key(1), jnp.arange(1.0, 5.0).reshape(1, 2, 2, 1), most=1)
    >>> moved[0, :, :, 0].tolist()
    [[2.0, 0.0], [4.0, 0.0]]
    """
    _check(images)
    n, height = images.shape[:2]
    most = height // 16 if most is None else most
    padded = jnp.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))
    corners = jax.random.randint(key, (n, 2), 0, 2 * most + 1, jnp.int32)
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), images.shape[1:]))(padded, corners)


def rotate(key: jax.Array, images: jax.Array, *, most: float = 15.0) -> jax.Array:
    """Rotates every image about its center by an angle in ``[-most, most]`` degrees, with bilinear interpolation.

    >>> bool(jnp.all(rotate(jax.random.key(0), jnp.ones([3, 8, 8, 1]), most=0.0) == 1))
    True
    """
    return rotated(images, jax.random.uniform(key, (len(images),), jnp.float32, minval=-most, maxval=most))


def cutout(key: jax.Array, images: jax.Array, *, size: int | None = None) -> jax.Array:
    """Sets a square of ``size`` pixels at a random place of every image to 0; default: a quarter of the height.

    The center of the square is anywhere in the image, so that a part of it may be outside. T. DeVries, G. W. Taylor, "Improved
    regularization of convolutional neural networks with cutout", 2017: https://arxiv.org/abs/1708.04552.

    >>> [int(image.sum()) for image in cutout(jax.random.key(0), jnp.ones([3, 4, 4, 1], jnp.int32), size=1)]
    [15, 15, 15]
    """
    _check(images)
    n, height, width, _ = images.shape
    size = height // 4 if size is None else size

    def inside(key: jax.Array, length: int) -> jax.Array:
        start = jax.random.randint(key, (n, 1), 0, length, jnp.int32) - size // 2
        place = jnp.arange(length)[None]
        return (place >= start) & (place < start + size)

    rows, columns = (inside(jax.random.fold_in(key, axis), length) for axis, length in enumerate((height, width)))
    return jnp.where((rows[:, :, None] & columns[:, None, :])[..., None], jnp.zeros_like(images), images)


def noise(key: jax.Array, images: jax.Array, *, sigma: float = 0.1) -> jax.Array:
    """Adds Gaussian noise, whose standard deviation is ``sigma`` times the largest value of the example.

    It accepts examples of any shape, ``[n, ...]``.

    >>> noisy = noise(jax.random.key(0), 10 * jnp.ones([1000, 2]), sigma=0.1)
    >>> round(float(noisy.std()), 1)
    1.0
    """
    values = images.astype(jnp.float32)
    scale = sigma * jnp.max(jnp.abs(values), axis=range(1, images.ndim), keepdims=True)
    return _as(images.dtype, values + scale * jax.random.normal(key, images.shape, jnp.float32))


weak = shift
"""A weak augmentation: `shift` with its default. Images are not flipped, which changes characters."""

strong = chain(shift, rotate, noise, cutout)
"""A strong augmentation: `shift`, `rotate`, `noise` and `cutout`, each with its defaults."""


def rotated(images: jax.Array, angles: jax.Array) -> jax.Array:
    """Returns images ``[n, h, w, c]`` rotated counter-clockwise about their center by ``angles [n]`` in degrees.

    Values between pixels are interpolated bilinearly.

    >>> image = jnp.array([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 2, 2, 1)
    >>> rotated(image, jnp.array([90.0]))[0, :, :, 0].round(5).tolist()
    [[2.0, 4.0], [1.0, 3.0]]
    """
    _check(images)
    center = [(length - 1) / 2 for length in images.shape[1:3]]
    axes = [jnp.arange(length, dtype=jnp.float32) - middle for length, middle in zip(images.shape[1:3], center, strict=True)]
    grid = jnp.meshgrid(*axes, indexing="ij")

    def one(image: jax.Array, angle: jax.Array) -> jax.Array:
        c, s = jnp.cos(jnp.deg2rad(angle)), jnp.sin(jnp.deg2rad(angle))
        row, column = c * grid[0] + s * grid[1] + center[0], c * grid[1] - s * grid[0] + center[1]
        channels = jnp.moveaxis(image.astype(jnp.float32), -1, 0)
        sample = functools.partial(ndimage.map_coordinates, coordinates=[row, column], order=1)
        return jnp.moveaxis(jax.vmap(sample)(channels), 0, -1)

    return _as(images.dtype, jax.vmap(one)(images, angles))


def _as(dtype: jnp.dtype, values: jax.Array) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.integer):
        return values.astype(dtype)
    limits = jnp.iinfo(dtype)
    return jnp.clip(jnp.round(values), limits.min, limits.max).astype(dtype)


def _check(images: jax.Array) -> None:
    if images.ndim != 4:
        raise ValueError(
            f"Expected images [n, h, w, c], got {images.dtype} {list(images.shape)}: give other augmentations, such as "
            "fedsim.augmentations.noise, for examples that are not images."
        )
