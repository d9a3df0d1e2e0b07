"""The synthetic stand-ins for real datasets: client sizes, skew, caching, labels that can be learned, and clients that do
not depend on the number of clients."""

import csv
import functools
import os
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import scipy.stats

import fedsim
from fedsim import datasets
from fedsim.datasets import _emnist62_like, _stackoverflow_like, _stand_in

REAL = Path(os.environ.get("FEDSIM_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
NAMES = ["emnist62_like", "stackoverflow_like"]
MODULES = {"emnist62_like": _emnist62_like, "stackoverflow_like": _stackoverflow_like}


@functools.cache
def load(name, **options):
    return datasets.load(name, **options)


def assert_same_clients(some, others):
    for client in some.clients():
        for feature, column in client.examples.items():
            np.testing.assert_array_equal(column, others[client.client_id][feature])


@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    splits = load(name, clients=20)
    about = splits.description
    assert "stand-in" in about.task
    for data in (splits.train, splits.test):
        assert data.client_ids[7] == "client_0000007"
        for feature, column in data.columns.items():
            assert about.features[feature].startswith(f"{list(column.shape[1:])} {column.dtype}")
    if about.default_model:
        fedsim.models.get(about.default_model).check(splits.train)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_does_not_depend_on_the_number_of_clients(name):
    few, more = load(name, clients=3, max_examples=50), load(name, clients=20)
    for split in ("train", "test"):
        few_split, more_split = getattr(few, split), getattr(more, split)
        for client in few_split.clients():
            for feature, column in client.examples.items():
                np.testing.assert_array_equal(column, more_split[client.client_id][feature][: len(column)])
    last = MODULES[name].rows(np.array([999_999]), np.array([5]), split=0, seed=0, concentration=1.0)
    assert all(len(column) == 1 for column in last.values())


@pytest.mark.parametrize("name", NAMES)
def test_seeds_splits_and_clients_differ(name):
    base, other = load(name, clients=20), load(name, clients=20, seed=1)
    first = base.train.columns["x"][:50].reshape(50, -1)
    for x in (other.train.columns["x"], base.test.columns["x"], base.train.client(1)["x"]):
        x = x[:50].reshape(min(50, len(x)), -1)
        assert not (first[:, None] == x[None]).all(-1).any()
    assert not np.array_equal(base.train.sizes, other.train.sizes)


@pytest.mark.parametrize("name", NAMES)
def test_data_above_a_gigabyte_are_generated_into_the_cache_once(name, tmp_path, monkeypatch):
    options = {"clients": 30, "max_examples": 150}
    expected = load(name, **options)
    monkeypatch.setattr(_stand_in, "_IN_MEMORY", 0)
    mapped = datasets.load(name, cache=tmp_path, **options)
    for split in ("train", "test"):
        assert isinstance(getattr(mapped, split).columns["x"], np.memmap)
        np.testing.assert_array_equal(getattr(mapped, split).offsets, getattr(expected, split).offsets)
        assert_same_clients(getattr(expected, split), getattr(mapped, split))
    monkeypatch.setattr(_stand_in, "_in_memory", None)  # Generating the data again would fail.
    assert_same_clients(expected.test, datasets.load(name, cache=tmp_path, **options).test)
    with pytest.raises(TypeError):
        datasets.load(name, cache=tmp_path, **options, seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_a_million_clients(name):
    sizes = MODULES[name].sizes(1_000_000, 0, 20)
    assert len(sizes["train"]) == len(sizes["test"]) == 1_000_000
    assert sizes["train"].min() >= 16 and sizes["train"].max() == 20
    assert {2, 3} >= set(sizes["test"].tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients=0"),
        ({"clients": 10**8}, "clients=100000000"),
        ({"max_examples": 0}, "max_examples=0"),
        ({"concentration": 0}, "concentration=0"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_arguments_out_of_range_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        datasets.load(name, **{"clients": 2, "max_examples": None} | options)


def test_more_examples_than_fit_are_refused_before_any_is_generated():
    with pytest.raises(ValueError, match=r"'train' would have .* examples, more than .*: lower clients or max_examples"):
        datasets.load("stackoverflow_like(clients=10_000_000)")


def test_writers_have_the_true_sizes():
    sizes = _emnist62_like.sizes(20_000, 0, None)["train"]
    assert abs(sizes.mean() - 671_585 / 3_400) < 2
    assert (sizes.min(), sizes.max()) >= (16, 400) and sizes.max() <= 418
    path = REAL / "client_sizes" / "emnist_train_num_examples.csv"
    if path.exists():
        with open(path) as file:
            real = [int(row["num_examples"]) for row in csv.DictReader(file)]
        assert scipy.stats.ks_2samp(sizes, real).statistic < 0.02
        gauss = np.random.default_rng(0).normal(np.mean(real), np.std(real), 20_000)
        assert scipy.stats.ks_2samp(gauss, real).statistic > 0.1


def test_users_have_sizes_of_the_true_mean_and_minimum():
    sizes = _stackoverflow_like.sizes(342_477, 0, None)
    # The distribution has a heavy tail: the mean of even so many sizes deviates by a percent or two.
    assert abs(sizes["train"].mean() / (135_818_730 / 342_477) - 1) < 0.03
    assert sizes["train"].min() == 100 and 50_000 < sizes["train"].max() <= 200_000
    assert abs(np.median(sizes["train"]) - 171) <= 1
    assert abs(sizes["test"].sum() / sizes["train"].sum() - 16_586_035 / 135_818_730) < 0.002


def test_exponent_of_the_sizes_gives_the_mean_in_closed_form():
    a, low, high = _stackoverflow_like._EXPONENT, _stackoverflow_like._SMALLEST, _stackoverflow_like._LARGEST
    mean = a * low**a / (1 - (low / high) ** a) * (low ** (1 - a) - high ** (1 - a)) / (a - 1)
    # Rounding down reduces the mean by half a sentence.
    assert abs(mean - 0.5 - 135_818_730 / 342_477) < 1


def test_mixtures_have_mean_and_variance_of_a_dirichlet_distribution():
    base = np.array([0.5, 0.3, 0.15, 0.05])
    cumulative = _stand_in.dirichlet_mixes(0, "test", base, 4.0)
    shares = np.diff(cumulative, axis=1, prepend=0)
    np.testing.assert_allclose(cumulative[:, -1], 1)
    np.testing.assert_allclose(shares.mean(0), base, atol=0.015)
    variance = base * (1 - base) / (4 + 1)
    np.testing.assert_allclose(shares.var(0), variance, rtol=0.1)
    assert not np.allclose(shares.var(0), base * (1 - base) / (8 + 1), rtol=0.1)


def test_kinds_are_drawn_with_the_frequencies_of_a_mixture():
    mixes = np.cumsum([[0.1, 0.6, 0.3], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], axis=1)
    u = (np.arange(10_000) + 0.5) / 10_000
    for mix, expected in enumerate(([1_000, 6_000, 3_000], [0, 0, 10_000], [10_000, 0, 0])):
        kinds = _stand_in.pick(mixes, np.full(10_000, mix), u)
        np.testing.assert_allclose(np.bincount(kinds, minlength=3), expected, atol=1)


def test_classes_have_their_frequencies_and_concentration_says_how_much_writers_differ():
    def counts(concentration):
        client, number = np.repeat(np.arange(300), 100), np.tile(np.arange(100), 300)
        mixes = _emnist62_like._alphabet(0, concentration).mixes
        writer = _emnist62_like.streams(0, "emnist62_like writer", client)
        image = _emnist62_like.streams(0, "emnist62_like image", client, number * 2)
        mix = (_emnist62_like.bits(writer, 0) % len(mixes)).astype(np.int64)
        labels = _stand_in.pick(mixes, mix, _emnist62_like.uniform(image, 0))
        return np.array([np.bincount(each, minlength=62) for each in labels.reshape(300, 100)])

    expected = np.array(_emnist62_like._FREQUENCIES.split(), float) / 1000
    skewed, alike = counts(5.0), counts(1e5)
    for each in (skewed, alike):
        np.testing.assert_allclose(each.sum(0) / each.sum(), expected, atol=0.012)
    # Variance of Dirichlet-multinomial counts of 100: 100 p (1 - p) (100 + c) / (1 + c).
    multinomial = 100 * (expected * (1 - expected)).sum()
    assert abs(skewed.var(0).sum() / (multinomial * 105 / 6) - 1) < 0.1
    assert abs(alike.var(0).sum() / multinomial - 1) < 0.1


def test_images_have_strokes_and_writers_have_a_style():
    x = load("emnist62_like", clients=20).train.columns["x"]
    assert 0.1 < (x > 127).mean() < 0.25  # EMNIST: 0.16
    assert ((x > 0) & (x < 255)).mean() < 0.15
    assert (x.reshape(len(x), -1).max(1) == 255).mean() > 0.9
    # Writers differ in stroke strength, so writers' mean ink varies more than the mean ink of random groups of images.
    ink = [client["x"].mean((1, 2, 3)) for client in load("emnist62_like", clients=20).train.clients()]
    shuffled = np.split(np.random.default_rng(0).permutation(np.concatenate(ink)), np.cumsum([len(each) for each in ink])[:-1])
    assert np.std([each.mean() for each in ink]) > 4 * np.std([each.mean() for each in shuffled])


def test_sentences_begin_and_end_like_the_real_ones():
    data = load("stackoverflow_like", clients=20).train
    x, y = data.columns["x"].astype(int), data.columns["y"].astype(int)
    assert (x[:, 0] == 1).all()
    np.testing.assert_array_equal(x[:, 1:], np.where(y[:, :-1] == 2, 2, y[:, :-1]))
    lengths = (y > 2).sum(1)
    for row, length in zip(y[:2000], lengths[:2000], strict=True):
        assert (row[:length] > 2).all() and row.max() <= 10_002
        assert row[length:].tolist() == ([2] + [0] * (19 - length) if length < 20 else [])
    assert lengths.min() >= 2 and abs(np.median(lengths) - 12) <= 1


def test_words_follow_zipfs_law():
    counts = np.sort(np.bincount(load("stackoverflow_like", clients=200).train.columns["y"].ravel())[3:])[::-1]
    rank = np.arange(20, 500)
    slope = np.polyfit(np.log(rank), np.log(counts[rank]), 1)[0]
    assert -1.3 < slope < -0.7
    assert (counts > 0).sum() > 9_000


def test_users_of_few_topics_use_different_words():
    def own(concentration):
        """Returns how much better a user's even sentences predict the odd ones than other users' sentences do."""
        rows = _stackoverflow_like.rows(
            np.repeat(np.arange(20), 200), np.tile(np.arange(200), 20), split=0, seed=0, concentration=concentration
        )
        words = rows["y"].reshape(20, 2, -1)
        counts = np.array([[np.bincount(half, minlength=10_003)[100:] for half in user] for user in words])
        shares = np.sqrt(counts / counts.sum(-1, keepdims=True))
        likeness = shares[:, 0] @ shares[:, 1].T
        return np.diag(likeness).mean() / likeness[~np.eye(20, dtype=bool)].mean()

    assert own(0.1) > 1.5
    assert own(1000.0) < 1.1


@pytest.mark.slow
def test_a_model_learns_to_classify_the_characters():
    splits = load("emnist62_like", clients=40, max_examples=120)
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.emnist_dense(),
        client_optimizer=optax.sgd(0.1),
        server_optimizer=optax.sgd(1.0),
        batches=fedsim.Batches(size=20, epochs=3),
    )
    state = algorithm.init(jax.random.key(0))
    for cohort in fedsim.UniformSampler(splits.train, clients=10, seed=0).rounds(8):
        state, _ = algorithm.apply(state, cohort)
    result = fedsim.evaluate(algorithm.model, state.params, splits.test)
    y = splits.test.columns["y"]
    majority = np.bincount(y).max() / len(y)
    entropy = scipy.stats.entropy(np.bincount(y, minlength=62))
    assert majority < 0.12
    assert 4 * majority < result.overall["accuracy"] < 0.99
    assert result.overall["loss"] < 0.7 * entropy


def test_a_model_of_word_pairs_learns_from_sentences_and_not_from_scrambled_ones():
    """Counts of word pairs, with single words as a fallback, predict the next word better than single words do."""

    def gain(scrambled):
        splits = load("stackoverflow_like", clients=100)
        pairs = []
        for data in (splits.train, splits.test):
            x, y = data.columns["x"].astype(np.int64), data.columns["y"].astype(np.int64)
            kept = y > 2
            before, after = x[kept], y[kept]
            pairs.append((before, np.random.default_rng(0).permutation(after) if scrambled else after))
        (before, after), (test_before, test_after) = pairs
        single = (np.bincount(after, minlength=10_004) + 0.5) / (len(after) + 0.5 * 10_004)
        keys, counts = np.unique(before * 10_004 + after, return_counts=True)
        wanted = test_before * 10_004 + test_after
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        found = np.where(keys[at] == wanted, counts[at], 0) / np.maximum(np.bincount(before, minlength=10_004)[test_before], 1)
        loss = -np.log(0.4 * found + 0.6 * single[test_after]).mean()
        return -np.log(single[test_after]).mean() - loss

    assert gain(False) > 0.5
    assert gain(True) < 0.05
