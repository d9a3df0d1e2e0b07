"""Held-out clients, feature shift, and vertical division."""

import itertools

import numpy as np
import pytest
from scipy import stats

from fedsim import augmentations, partitioners
from fedsim.data import FederatedData


def population(clients=10, shape=(4, 4, 3), dtype=np.uint8):
    draw = np.random.default_rng(0)
    sizes = draw.integers(0, 6, clients)
    x = draw.integers(0, 256, (int(sizes.sum()), *shape)).astype(dtype)
    ids = [f"client {i}" for i in range(clients)]
    return FederatedData.from_arrays({"x": x, "y": np.arange(len(x))}, sizes=sizes, client_ids=ids)


def test_every_client_is_in_training_or_held_out_with_all_its_examples():
    data = population()
    seen, out = partitioners.held_out_clients(data, clients=3, seed=0)
    assert out.num_clients == 3 and set(seen.client_ids) | set(out.client_ids) == set(data.client_ids)
    assert not set(seen.client_ids) & set(out.client_ids)
    for split in (seen, out):
        assert split.client_ids == [name for name in data.client_ids if name in split]
        for client in split.clients():
            for feature in data.columns:
                np.testing.assert_array_equal(client[feature], data[client.client_id][feature])


def test_a_larger_number_of_held_out_clients_includes_a_smaller_one():
    data = population()
    held_out = [set(partitioners.held_out_clients(data, clients=k, seed=4)[1].client_ids) for k in range(1, 10)]
    assert all(few < more for few, more in itertools.pairwise(held_out))
    again = partitioners.held_out_clients(data, clients=3, seed=4)[1].client_ids
    assert set(again) == held_out[2]
    assert set(partitioners.held_out_clients(data, clients=3, seed=5)[1].client_ids) != held_out[2]


@pytest.mark.parametrize("clients", [0, 10, -1])
def test_invalid_numbers_of_held_out_clients_are_refused(clients):
    with pytest.raises(ValueError, match=f"Expected 1 <= clients < 10, got clients={clients}"):
        partitioners.held_out_clients(population(), clients=clients, seed=0)


@pytest.mark.parametrize(("shape", "dtype"), [((4, 4, 3), np.uint8), ((5, 5), np.float32)])
def test_every_fourth_client_has_the_same_angle(shape, dtype):
    data = population(shape=shape, dtype=dtype)
    turned = partitioners.rotation(data)
    assert turned.columns["x"].dtype == dtype
    assert turned.columns["y"] is data.columns["y"] and turned.client_ids == data.client_ids
    for i, (before, after) in enumerate(zip(data.clients(), turned.clients(), strict=True)):
        for image, rotated in zip(before["x"], after["x"], strict=True):
            np.testing.assert_array_equal(rotated, np.rot90(image, i % 4))


def test_rotation_does_not_change_its_argument_and_180_degrees_fit_any_shape():
    data = population(shape=(2, 5))
    before = data.columns["x"].copy()
    turned = partitioners.rotation(data, angles=[180])
    np.testing.assert_array_equal(data.columns["x"], before)
    np.testing.assert_array_equal(turned.columns["x"], before[:, ::-1, ::-1])


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (population(), {"angles": [np.inf]}, r"finite angles in degrees, got angles=\[inf\]"),
        (population(), {"angles": []}, "give one or more"),
        (population(), {"feature": "z"}, "no feature 'z'"),
        (population(), {"feature": "y"}, "expected images"),
        (population(shape=(2, 5)), {}, "Images of 2 by 5 cannot be rotated"),
    ],
)
def test_invalid_rotations_are_refused(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        partitioners.rotation(data, **arguments)


def test_rotation_by_other_angles_is_bilinear_and_the_same_for_all_clients():
    data = population(shape=(5, 5), dtype=np.float32)
    turned = partitioners.rotation(data, angles=[30])
    c, s = np.cos(np.deg2rad(30)), np.sin(np.deg2rad(30))
    image, found = data.columns["x"][0].astype(np.float64), turned.columns["x"][0]
    for i, j in ((2, 2), (1, 2), (3, 1), (2, 3)):  # within the image, before and after
        row, column = c * (i - 2) + s * (j - 2) + 2, c * (j - 2) - s * (i - 2) + 2
        top, left = int(row), int(column)
        p, q = row - top, column - left
        at = image[top : top + 2, left : left + 2] if p or q else image[top : top + 1, left : left + 1]
        weights = np.outer([1 - p, p], [1 - q, q])[: at.shape[0], : at.shape[1]]
        assert found[i, j] == pytest.approx((weights * at).sum(), rel=1e-5)
    images = augmentations.rotated(data.columns["x"][..., None], np.full(len(data.columns["x"]), 30.0, np.float32))
    inner = np.s_[:, 1:-1, 1:-1]
    np.testing.assert_allclose(np.asarray(images[..., 0])[inner], turned.columns["x"][inner], rtol=1e-4, atol=1e-4)


def test_equal_noise_has_the_same_size_at_all_clients():
    data = FederatedData.from_arrays({"x": np.zeros([40_000], np.float32)}, sizes=[10_000] * 4)
    noisy = partitioners.noise(data, sigma=0.8, seed=0, equal=True)
    assert [client["x"].std() for client in noisy.clients()] == pytest.approx([0.8] * 4, rel=0.03)


def test_noise_increases_from_client_to_client():
    x = np.zeros([40_000, 2], np.float32)
    data = FederatedData.from_arrays({"x": x}, sizes=[10_000] * 4)
    noisy = partitioners.noise(data, sigma=0.8, seed=0)
    assert noisy.columns["x"].dtype == np.float32
    for i, client in enumerate(noisy.clients()):
        assert stats.kstest(client["x"].ravel(), stats.norm(0, 0.8 * (i + 1) / 4).cdf).pvalue > 1e-3
        assert stats.kstest(client["x"].ravel(), stats.norm(0, 0.8 * (i + 1.4) / 4).cdf).pvalue < 1e-6


def test_noise_on_bytes_is_rounded_and_clipped():
    data = FederatedData.from_arrays({"x": np.repeat(np.array([0, 128, 255], np.uint8), 4000)}, sizes=[12_000])
    noisy = partitioners.noise(data, sigma=20.0, seed=0).columns["x"]
    assert noisy.dtype == np.uint8
    assert np.std(noisy[4000:8000]) == pytest.approx(20, rel=0.05)
    assert np.mean(noisy[:4000] == 0) == pytest.approx(0.51, abs=0.03)
    assert np.mean(noisy[8000:] == 255) == pytest.approx(0.51, abs=0.03)


def test_a_client_s_noise_does_not_depend_on_other_clients():
    few = FederatedData.from_arrays({"x": np.zeros(6)}, sizes=[1, 5])
    many = FederatedData.from_arrays({"x": np.zeros(16)}, sizes=[11, 5])
    noise = [partitioners.noise(data, sigma=1.0, seed=2)["1"]["x"] for data in (few, many)]
    np.testing.assert_array_equal(*noise)
    assert not np.any(noise[0] == partitioners.noise(few, sigma=1.0, seed=3)["1"]["x"])


def test_noise_of_zero_changes_nothing():
    data = population()
    np.testing.assert_array_equal(partitioners.noise(data, sigma=0, seed=0).columns["x"], data.columns["x"])


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ({"x": np.zeros(2)}, {"sigma": -1}, "Expected sigma >= 0 and finite, got sigma=-1"),
        ({"x": np.zeros(2)}, {"sigma": 1, "feature": "z"}, "no feature 'z'"),
        ({"x": np.array(["a", "b"])}, {"sigma": 1}, "noise is added to numbers"),
        ({"x": np.array([True, False])}, {"sigma": 1}, "noise is added to numbers"),
    ],
)
def test_invalid_noise_is_refused(columns, arguments, message):
    with pytest.raises(ValueError, match=message):
        partitioners.noise(FederatedData.from_arrays(columns, sizes=[1, 1]), **{"seed": 0} | arguments)


@pytest.mark.parametrize("order", ["contiguous", "random"])
@pytest.mark.parametrize("sizes", [None, [1, 4, 6]])
def test_every_feature_goes_to_exactly_one_party(order, sizes):
    blocks = partitioners.vertical(np.zeros([3, 11]), parties=3, sizes=sizes, order=order, seed=1)
    np.testing.assert_array_equal(np.sort(np.concatenate(blocks)), np.arange(11))
    assert [len(block) for block in blocks] == (sizes or [4, 4, 3])
    assert all(block.dtype == np.int64 and np.all(np.diff(block) > 0) for block in blocks)
    neighbours = all(np.all(np.diff(block) == 1) for block in blocks)
    assert neighbours is (order == "contiguous")


def test_features_may_be_given_by_number_by_name_or_by_example():
    by_number, by_name = partitioners.vertical(4, parties=2), partitioners.vertical(list("abcd"), parties=2)
    np.testing.assert_array_equal(by_number, by_name)
    np.testing.assert_array_equal(by_number, partitioners.vertical(np.zeros([9, 4]), parties=2))
    first, other = (partitioners.vertical(40, parties=2, order="random", seed=seed)[0] for seed in (0, 1))
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": 4, "parties": 0}, "Expected 1 <= parties <= 4, got parties=0"),
        ({"features": 4, "parties": 5}, "got parties=5"),
        ({"features": 4, "parties": 2, "sizes": [1, 2]}, r"2 positive sizes that sum to 4, got sizes=\[1, 2\]"),
        ({"features": 4, "parties": 2, "sizes": [4, 0]}, r"got sizes=\[4, 0\]"),
        ({"features": 4, "parties": 2, "sizes": [4]}, r"got sizes=\[4\]"),
        ({"features": 4, "parties": 2, "order": "mixed"}, "got order='mixed'"),
        ({"features": np.zeros([2, 3, 4]), "parties": 2}, r"got shape \[2, 3, 4\]: flatten"),
    ],
)
def test_invalid_divisions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        partitioners.vertical(**arguments)
