"""Augmentations of images: shapes and dtypes, what each may change, and that every image has its own draw."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim import augmentations

ALL = {
    "shift": functools.partial(augmentations.shift, most=2),
    "rotate": augmentations.rotate,
    "cutout": augmentations.cutout,
    "noise": augmentations.noise,
    "weak": augmentations.weak,
    "strong": augmentations.strong,
}
IMAGES = np.random.default_rng(0).integers(1, 17, (40, 16, 12, 2))


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_shapes_dtypes_and_keys(name, dtype):
    images = jnp.asarray(IMAGES.astype(dtype))
    first, again, other = (np.asarray(ALL[name](jax.random.key(seed), images)) for seed in (0, 0, 1))
    assert first.shape == images.shape and first.dtype == dtype
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    same = jnp.asarray(np.repeat(IMAGES[:1], 40, axis=0).astype(dtype))
    assert len({image.tobytes() for image in np.asarray(ALL[name](jax.random.key(0), same))}) > 5


def test_a_shift_moves_whole_images():
    moved = np.asarray(augmentations.shift(jax.random.key(0), jnp.asarray(IMAGES), most=2))
    padded = np.pad(IMAGES, ((0, 0), (2, 2), (2, 2), (0, 0)))
    places = [(i, j) for i in range(5) for j in range(5)]
    for image, source in zip(moved, padded, strict=True):
        assert sum(np.array_equal(image, source[i : i + 16, j : j + 12]) for i, j in places) == 1


def test_cutout_clears_a_square_of_at_most_its_size():
    cleared = np.asarray(augmentations.cutout(jax.random.key(0), jnp.asarray(IMAGES), size=4)) == 0
    for image in cleared:
        rows, columns, _ = np.nonzero(image)
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert height <= 4 and width <= 4 and image.sum() == 2 * height * width


def test_noise_has_the_standard_deviation_of_its_fraction():
    noisy = augmentations.noise(jax.random.key(0), jnp.full([4, 50, 50, 1], 20.0), sigma=0.2)
    assert float(noisy.std()) == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_right_angles_are_exact(turns):
    square = jnp.asarray(IMAGES[:, :12])
    turned = augmentations.rotated(square, jnp.full(40, 90.0 * turns))
    np.testing.assert_array_equal(turned, np.rot90(IMAGES[:, :12], turns, axes=(1, 2)))
