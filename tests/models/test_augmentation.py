"""Crops, flips and standardization, compared with NumPy, and the frequencies of crops with the expected ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from fedsim import models


def images(n, size=6, channels=3, seed=0):
    return np.random.default_rng(seed).permutation(n * size * size * channels).reshape(n, size, size, channels).astype("f4")


def window_of(crop, image):
    """Returns the position of the crop in the image, (top, left, mirrored). All pixels are different."""
    size = crop.shape[0]
    windows = np.moveaxis(sliding_window_view(image, (size, size), axis=(0, 1)), 2, -1)
    found = []
    for mirrored, content in ((False, crop), (True, crop[:, ::-1])):
        found += [(*place, mirrored) for place in np.argwhere((windows == content).all((2, 3, 4))).tolist()]
    (place,) = found
    return place


def test_windows_and_flips_are_drawn_for_each_image_and_equally_likely():
    x = images(900)
    crops = jax.jit(models.random_crop_and_flip, static_argnums=2)(jax.random.key(0), jnp.asarray(x), 4)
    places = [tuple(window_of(crop, image)) for crop, image in zip(np.asarray(crops), x, strict=True)]
    counts = np.array([places.count((top, left, side)) for top in range(3) for left in range(3) for side in (False, True)])
    assert counts.sum() == 900
    # 18 cells of 50 expected: the chi-square statistic has 17 degrees of freedom, and exceeds 40.8 once in 1,000.
    assert ((counts - 50) ** 2 / 50).sum() < 40.8


def test_the_same_key_gives_the_same_crops_and_another_key_others():
    x = jnp.asarray(images(20))
    one, again, other = (models.random_crop_and_flip(jax.random.key(seed), x, 4) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_vmap_over_clients_gives_the_same_crops():
    x = jnp.asarray(images(12)).reshape(3, 4, 6, 6, 3)
    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.vmap(models.random_crop_and_flip, (0, 0, None))(keys, x, 4)
    for client in range(3):
        np.testing.assert_array_equal(together[client], models.random_crop_and_flip(keys[client], x[client], 4))


def test_a_crop_of_full_size_is_the_image_or_its_mirror_image():
    x = images(50)
    crops = np.asarray(models.random_crop_and_flip(jax.random.key(0), jnp.asarray(x), 6))
    sides = {window_of(crop, image)[2] for crop, image in zip(crops, x, strict=True)}
    assert sides == {False, True}
    np.testing.assert_array_equal(models.center_crop(jnp.asarray(x), 6), x)


def test_center_crop_of_a_photograph_leaves_four_pixels_around():
    x = images(2, 32)
    np.testing.assert_array_equal(models.center_crop(jnp.asarray(x), 24), x[:, 4:28, 4:28])


def test_standardized_images_have_mean_zero_and_deviation_one():
    x = np.random.default_rng(0).normal(100, 30, [5, 24, 24, 3]).astype("f4")
    z = np.asarray(models.standardize(jnp.asarray(x)), np.float64)
    expected = (x.astype(np.float64) - x.mean((1, 2, 3), keepdims=True)) / x.std((1, 2, 3), keepdims=True, dtype=np.float64)
    np.testing.assert_allclose(z, expected, atol=1e-4)
    # An image that is nearly even is divided by 1 / sqrt(number of values) only.
    even = np.zeros([1, 2, 2, 1], "f4")
    even[0, 0, 0, 0] = 0.1
    np.testing.assert_allclose(models.standardize(jnp.asarray(even)), (even - 0.025) * 2, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "size", "message"),
    [
        (jnp.zeros([1, 4, 4, 1]), 5, r"\[4, 4\], got size=5"),
        (jnp.zeros([1, 4, 4, 1]), 0, "size=0"),
        (jnp.zeros([1, 4, 4, 1], jnp.uint8), 2, "uint8"),
        (jnp.zeros([4, 4, 1]), 2, r"\[4, 4, 1\]"),
    ],
)
def test_errors_for_bad_windows_and_images(x, size, message):
    with pytest.raises(ValueError, match=message):
        models.center_crop(x, size)
    with pytest.raises(ValueError, match=message):
        models.random_crop_and_flip(jax.random.key(0), x, size)
