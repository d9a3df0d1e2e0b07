"""Tests of `Batches`: the number of steps, and the examples of each step."""

import itertools

import jax
import numpy as np
import pytest

from fedsim import rng
from fedsim.data import Batches

WORDS = np.asarray(rng.words(rng.root(1)))
SIZES = (1, 2, 3, 7, 20)


def read(batches, num_examples, words=WORDS):
    """Returns the indices ``[steps, size]`` and the masks of all steps."""
    steps = range(int(batches.num_steps(num_examples)))
    pairs = [batches.indices(words, num_examples, step, np) for step in steps]
    shape = (len(pairs), batches.size)
    return np.array([i for i, _ in pairs], int).reshape(shape), np.array([m for _, m in pairs], bool).reshape(shape)


def count_steps(batches, num_examples):
    """Counts the steps by adding one example at a time to a batch."""
    if batches.steps is not None:
        steps = batches.steps if num_examples else 0
    else:
        steps, held = 0, 0
        for _ in range(num_examples * batches.epochs):
            held += 1
            if held == batches.size:
                steps, held = steps + 1, 0
        if held and not batches.drop_remainder:
            steps += 1
    return steps if batches.max_steps is None else min(steps, batches.max_steps)


SETTINGS = [
    Batches(size=size, epochs=epochs, steps=steps, max_steps=max_steps, drop_remainder=drop)
    for size, epochs, steps, max_steps, drop in itertools.product(SIZES, (1, 2, 5), (None, 1, 4), (None, 1, 3), (False, True))
    if steps is None or epochs == 1
]


def test_num_steps_agrees_with_counting_examples_one_by_one():
    for batches in SETTINGS:
        for n in (0, 1, 2, 6, 7, 8, 19, 20, 21, 40):
            assert batches.num_steps(n) == count_steps(batches, n), (batches, n)
            assert isinstance(batches.num_steps(n), int)


def test_num_steps_of_arrays_and_traced_numbers_agrees_with_integers():
    sizes = np.array([0, 1, 19, 20, 21, 400], np.int32)
    for batches in SETTINGS[::7]:
        expected = [batches.num_steps(int(n)) for n in sizes]
        on_host = batches.num_steps(sizes)
        assert isinstance(on_host, np.ndarray)
        assert on_host.tolist() == expected
        traced = jax.jit(batches.num_steps)(sizes)
        assert traced.dtype == np.int32
        assert traced.tolist() == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_examples", [1, 2, 6, 7, 20, 41])
def test_each_epoch_covers_each_example_exactly_once(size, num_examples):
    index, mask = read(Batches(size=size, epochs=3), num_examples)
    assert mask.sum() == 3 * num_examples
    assert mask.ravel()[: 3 * num_examples].all(), "only the last batch may be partial"
    for epoch in index[mask].reshape(3, num_examples):
        assert sorted(epoch) == list(range(num_examples))


def test_a_batch_may_contain_examples_of_two_epochs():
    index, mask = read(Batches(size=4, epochs=2), 6)
    assert mask.all()
    assert index.shape == (3, 4)
    order = index.ravel()
    assert sorted(order[:6]) == sorted(order[6:]) == list(range(6))


def test_padding_indices_are_in_range():
    for num_examples in (0, 1, 5):
        index, _ = Batches(size=8).indices(WORDS, num_examples, 3, np)
        assert index.min() >= 0
        assert index.max() < max(num_examples, 1)


def test_epochs_are_shuffled_differently():
    index, _ = read(Batches(size=50, epochs=2), 50)
    assert np.sum(index[0] == index[1]) <= 7


def test_without_shuffle_examples_keep_the_stored_order():
    index, mask = read(Batches(size=4, epochs=2, shuffle=False), 6)
    assert index[mask].tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_steps_are_full_batches_for_few_examples():
    index, mask = read(Batches(size=4, steps=5), 3)
    assert index.shape == (5, 4)
    assert mask.all()
    counts = np.bincount(index.ravel(), minlength=3)
    assert counts.max() - counts.min() <= 1


def test_max_steps_takes_the_first_batches():
    index, _ = read(Batches(size=4, epochs=3), 10)
    capped, _ = read(Batches(size=4, epochs=3, max_steps=2), 10)
    np.testing.assert_array_equal(capped, index[:2])


def test_drop_remainder_drops_the_partial_batch():
    index, _ = read(Batches(size=4), 10)
    dropped, mask = read(Batches(size=4, drop_remainder=True), 10)
    np.testing.assert_array_equal(dropped, index[:2])
    assert mask.all()


@pytest.mark.parametrize("batches", [Batches(size=5, epochs=3), Batches(size=5, steps=9), Batches(size=5, shuffle=False)])
def test_indices_are_equal_in_numpy_and_jax(batches):
    compiled = jax.jit(batches.indices)
    for num_examples, step in itertools.product((0, 1, 4, 23), (0, 2, 8)):
        index, mask = batches.indices(WORDS, num_examples, step, np)
        compiled_index, compiled_mask = compiled(WORDS, np.int32(num_examples), np.int32(step))
        assert compiled_index.dtype == index.dtype == np.int32
        assert compiled_mask.dtype == mask.dtype == bool
        np.testing.assert_array_equal(compiled_index, index)
        np.testing.assert_array_equal(compiled_mask, mask)


@pytest.mark.parametrize("field", ["size", "epochs", "steps", "max_steps"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3"])
def test_numbers_must_be_positive_integers(field, value):
    with pytest.raises(ValueError, match=f"{field} >= 1.*, got {field}={value!r}: give"):
        Batches(**{"size": 1, field: value})


def test_epochs_with_steps_are_refused():
    with pytest.raises(ValueError, match=r"epochs or steps, got epochs=2 and steps=3: leave out steps.*max_steps"):
        Batches(size=20, epochs=2, steps=3)
