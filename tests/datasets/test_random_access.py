"""Random numbers by position: they have published values and the right frequencies, and neighbors are independent."""

import numpy as np
import scipy.stats

from fedsim.datasets._random_access import bits, generator, normal, streams, uniform


def test_bits_are_those_of_the_published_generator():
    # The values of SplitMix64 for seed 1234567 with which its implementations are commonly tested.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    seed = np.array([1234567], np.uint64)
    assert [int(bits(seed, number)[0]) for number in range(5)] == expected


def test_draws_have_uniform_and_normal_distributions():
    rows = streams(0, "rows", np.full(20_000, 3), np.arange(20_000))
    assert scipy.stats.kstest(uniform(rows, 0), "uniform").pvalue > 0.01
    assert scipy.stats.kstest(normal(rows, 1), "norm").pvalue > 0.01
    assert scipy.stats.kstest(uniform(rows, 0) ** 1.1, "uniform").pvalue < 1e-6


def test_draws_of_neighbors_seeds_and_purposes_are_independent():
    n = np.arange(20_000)
    base = uniform(streams(0, "rows", n, 0 * n), 0)
    others = {
        "next client": uniform(streams(0, "rows", n + 1, 0 * n), 0),
        "next row": uniform(streams(0, "rows", n, 0 * n + 1), 0),
        "next draw": uniform(streams(0, "rows", n, 0 * n), 1),
        "next seed": uniform(streams(1, "rows", n, 0 * n), 0),
        "another purpose": uniform(streams(0, "sizes", n, 0 * n), 0),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / np.sqrt(len(n)), name
    swapped = uniform(streams(0, "rows", 0 * n, n), 0)
    assert len(np.intersect1d(base[1:], swapped[1:])) == 0  # the draw does not depend only on client + row


def test_the_draws_of_a_position_do_not_depend_on_other_positions():
    alone = streams(0, "rows", np.array([7]), np.array([2]))
    among = streams(0, "rows", np.arange(10), np.full(10, 2))
    assert bits(alone, 3)[0] == bits(among, 3)[7]
    assert generator(0, "sizes", 7).integers(2**60) == generator(0, "sizes", 7).integers(2**60)
    assert generator(0, "sizes", 7).integers(2**60) != generator(0, "sizes", 8).integers(2**60)
