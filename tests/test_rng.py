"""Tests of `fedsim.rng`: permutations are bijective, uniform and the same in NumPy and JAX; keys are derived as documented."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fedsim
from fedsim import rng
from fedsim.aggregators._distributed_mechanism import rotate
from fedsim.compressors import MagnitudePruning, PowerSGD
from fedsim.decentralized import costs

SIZES = sorted({*range(1, 301), *(2**k + d for k in range(2, 15) for d in (-1, 0, 1))})


def words(seed):
    return np.asarray(rng.words(rng.root(seed)))


def permutation(seed, epoch, size):
    return rng.permute(words(seed), epoch, size, np.arange(size, dtype=np.int32), np)


def position_p_value(rows, size):
    """Chi-square test that, over permutations ``rows [n, size]``, each index goes to each position equally often."""
    counts = np.zeros((size, size))
    for index in range(size):
        counts[index] = np.bincount(rows[:, index], minlength=size)
    expected = len(rows) / size
    # Every row and column of the counts sums to n, hence (size - 1) ** 2 degrees of freedom.
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), (size - 1) ** 2)


def pair_p_value(rows, size):
    """Chi-square test that indices 0 and 1 go to each ordered pair of positions equally often."""
    counts = np.bincount(rows[:, 0] * size + rows[:, 1], minlength=size * size).reshape(size, size)
    assert not np.diagonal(counts).any()
    return stats.chisquare(counts[~np.eye(size, dtype=bool)]).pvalue


def many_permutations(size, count):
    """The permutations of ``count`` epochs, ``[count, size]``, in one call."""
    epoch = np.repeat(np.arange(count, dtype=np.int32), size)
    index = np.tile(np.arange(size, dtype=np.int32), count)
    return rng.permute(words(3), epoch, size, index, np).reshape(count, size)


@pytest.mark.parametrize("seed", [0, 1])
def test_permute_is_a_bijection_for_every_size(seed):
    for size in SIZES:
        np.testing.assert_array_equal(np.sort(permutation(seed, size % 7, size)), np.arange(size), err_msg=str(size))


def test_permute_gives_the_same_numbers_in_numpy_and_jax():
    compiled = jax.jit(lambda words, epoch, size, index: rng.permute(words, epoch, size, index))
    for size in [0, 1, 2, 3, 5, 64, 65, 127, 128, 300, 4097, 10**6, 2**31 - 1]:
        index = np.arange(64, dtype=np.int32) % max(size, 1)
        for epoch in [0, 5]:
            expected = rng.permute(words(9), epoch, size, index, np)
            actual = compiled(words(9), np.int32(epoch), np.int32(size), index)
            assert actual.dtype == expected.dtype == np.int32
            np.testing.assert_array_equal(actual, expected, err_msg=str(size))


def test_permute_takes_an_epoch_per_index():
    epoch = np.array([0, 1, 2, 0], np.int32)
    index = np.array([3, 3, 3, 4], np.int32)
    expected = [permutation(4, e, 11)[i] for e, i in zip(epoch, index, strict=True)]
    np.testing.assert_array_equal(rng.permute(words(4), epoch, 11, index, np), expected)


def test_permute_treats_size_zero_as_one():
    assert rng.permute(words(0), 0, 0, np.zeros(3, np.int32), np).tolist() == [0, 0, 0]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 40])
def test_permute_sends_every_index_to_every_position_equally_often(size):
    rows = many_permutations(size, 20_000)
    assert position_p_value(rows, size) > 1e-4
    if size > 2:
        assert pair_p_value(rows, size) > 1e-4


def test_permute_is_also_uniform_over_clients():
    """The first epoch of each of 20,000 clients; here the words vary, and not the epoch."""
    keys = rng.client_keys(rng.root(3), 0, np.arange(20_000))
    client_words = jax.vmap(lambda key: rng.words(rng.stream(key, "shuffle")))(keys)
    rows = jax.vmap(lambda w: rng.permute(w, 0, 7, jnp.arange(7)))(client_words)
    assert position_p_value(np.asarray(rows), 7) > 1e-4
    assert pair_p_value(np.asarray(rows), 7) > 1e-4


@pytest.mark.parametrize("size", [3, 5, 13])
def test_position_statistics_detect_a_shuffle_of_too_few_half_rounds(size, monkeypatch):
    """Negative control: with one pair of half-rounds instead of four, the tests must reject."""
    monkeypatch.setattr(rng, "_HALF_ROUNDS", 2)
    assert min(position_p_value(rows := many_permutations(size, 20_000), size), pair_p_value(rows, size)) < 1e-4


@pytest.mark.parametrize("size", [3, 5, 13])
def test_position_statistics_detect_a_rotation(size):
    """Negative control: a random rotation sends each index to each position equally often, but neighbours stay together."""
    rows = (np.arange(size) + np.random.default_rng(0).integers(size, size=(20_000, 1))) % size
    assert position_p_value(rows, size) > 1e-4
    assert pair_p_value(rows, size) < 1e-4


def test_permutations_differ_between_seeds_epochs_and_both_words():
    base = permutation(0, 0, 100)
    one_word = words(0) + np.array([1, 0], np.uint32), words(0) + np.array([0, 1], np.uint32)
    others = [permutation(1, 0, 100), permutation(0, 1, 100)]
    others += [rng.permute(w, 0, 100, np.arange(100, dtype=np.int32), np) for w in one_word]
    for other in others:
        # Two unrelated permutations agree in one position on average; in more than seven with probability 1e-5.
        assert np.sum(base == other) <= 7


def test_permutations_of_neighbouring_epochs_are_unrelated():
    """The rank correlation of consecutive epochs' permutations is that of independent ones."""
    rows = many_permutations(50, 4000).astype(float)
    rows -= rows.mean()
    correlation = (rows[:-1] * rows[1:]).mean(1) / rows.var()
    # Each correlation is approximately N(0, 1 / 49).
    assert abs(correlation.mean()) < 4 / np.sqrt(49 * len(correlation))


def test_permute_never_changes():
    """Recorded values: a change would change every published run, so it needs a major version."""
    assert permutation(0, 0, 10).tolist() == [5, 4, 9, 6, 8, 0, 3, 1, 7, 2]
    assert rng.permute(words(7), 3, 3400, np.arange(5, dtype=np.int32), np).tolist() == [2480, 2150, 64, 3362, 2728]
    assert words(2**40 + 5).tolist() == [2037576988, 1684851137]
    client = rng.words(rng.client_keys(rng.root(1), 2, np.array([3])))
    assert np.asarray(client).tolist() == [[3603396838, 1521202350]]


def test_client_keys_are_folds_of_round_and_client():
    keys = rng.client_keys(rng.root(5), 17, jnp.array([4, 0, 9]))
    for key, client in zip(keys, [4, 0, 9], strict=True):
        by_hand = jax.random.fold_in(jax.random.fold_in(rng.stream(rng.root(5), "clients"), 17), client)
        assert key == by_hand


def test_client_keys_differ_between_seeds_rounds_and_clients():
    keys = [rng.client_keys(rng.root(s), r, jnp.arange(20)) for s in range(3) for r in range(3)]
    assert len(np.unique(np.concatenate([jax.random.key_data(k) for k in keys]), axis=0)) == 180


def test_streams_of_all_names_differ():
    names = ["clients", "sampling", "shuffle", "step", "init", "partition", "split"]
    data = [tuple(np.asarray(jax.random.key_data(rng.stream(rng.root(0), name))).tolist()) for name in names]
    assert len(set(data)) == len(names)


def test_root_takes_seeds_of_63_bits_and_keys():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]
    assert len({tuple(words(seed).tolist()) for seed in seeds}) == len(seeds)
    assert rng.root(np.int64(3)) == rng.root(3) == rng.root(jax.random.key(3))


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5, "a", None, [1, 2]])
def test_root_refuses_other_seeds(seed):
    with pytest.raises(ValueError, match=re.escape(f"seed={seed!r}")):
        rng.root(seed)


def test_root_of_a_tracer_raises_the_error_of_jax():
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        jax.jit(rng.root)(3)


def test_draws_do_not_depend_on_the_default_implementation_of_jax():
    with jax.default_prng_impl("rbg"):
        assert bool(rng.root(5) == jax.random.key(5, impl="threefry2x32"))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: PowerSGD(rank=1).init(jnp.zeros((3, 4))),
        lambda: rotate(jnp.arange(4.0), jnp.uint32(3)),
        lambda: jnp.float32(costs.message_bytes(100, MagnitudePruning(threshold=1.0))),
    ],
)
def test_draws_with_a_fixed_seed_do_not_depend_on_the_implementation_of_keys(draw):
    expected = draw()
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(draw(), expected)


def test_keys_whose_draws_depend_on_their_neighbours_are_refused():
    """Under `jax.vmap`, JAX 0.10 draws with the first of several "rbg" keys alone."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2)
    together, alone = jax.vmap(jax.random.bits)(keys)[1], jax.random.bits(keys[1])
    assert together != alone  # If this holds no more, such keys could be allowed.
    data = fedsim.FederatedData.from_arrays({"x": np.zeros(2)}, sizes=[1, 1])
    with pytest.raises(ValueError, match='a key of "threefry2x32", got one of "rbg"'):
        fedsim.UniformSampler(data, clients=1, seed=keys[0])
    with pytest.raises(ValueError, match='got one of "rbg"'):
        fedsim.Cohort(data, np.array([0]), 0, keys[0])
