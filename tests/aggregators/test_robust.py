"""Robust aggregators, compared with NumPy implementations of the papers, and under attack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from fedsim import aggregators
from fedsim.aggregators._rows import inner_products, sort_rows, squared_distances

SHAPES = {"w": (3, 4), "b": (), "e": (0, 2)}
SIZE = 13


def tree(flat):
    """Returns rows ``[n, 13]`` as a tree of rows."""
    flat = np.asarray(flat, np.float32)
    return {"w": jnp.asarray(flat[:, :12].reshape(-1, 3, 4)), "b": jnp.asarray(flat[:, 12]), "e": jnp.zeros((len(flat), 0, 2))}


def flat(update):
    return np.concatenate([np.ravel(update["w"]), np.ravel(update["b"])])


def combine(aggregator, rows, weights):
    return flat(jax.jit(aggregator.combine)(tree(rows), jnp.asarray(weights, jnp.float32)))


def numpy_median(x, weights):
    return np.median(x, axis=0)


def numpy_trimmed(x, weights, trim=0.2):
    cut = int(np.floor(trim * len(x) + 1e-9))
    order = np.argsort(x, axis=0)[cut : len(x) - cut]
    return np.average(np.take_along_axis(x, order, 0), axis=0, weights=weights[order])


def numpy_krum_scores(x, f):
    distances = np.square(x[:, None] - x[None]).sum(-1)
    return np.array(
        [np.sort(np.delete(row, i))[: max(len(x) - f - 2, min(2, len(x) - 1))].sum() for i, row in enumerate(distances)]
    )


def numpy_krum(x, weights, f=2, m=1):
    return x[np.argsort(numpy_krum_scores(x, f))[:m]].mean(0)


def numpy_bulyan(x, weights, f=2):
    left, chosen = list(range(len(x))), []
    while len(chosen) < len(x) - 2 * f:
        chosen.append(left.pop(int(np.argmin(numpy_krum_scores(x[left], f)))))
    x, kept = x[chosen], len(chosen) - 2 * f
    nearest = np.argsort(np.abs(x - np.median(x, 0)), axis=0)[:kept]
    return np.take_along_axis(x, nearest, 0).mean(0)


def numpy_geometric(x, weights):
    def objective(v):
        return np.sum(weights * np.linalg.norm(x - v, axis=1))

    return scipy.optimize.minimize(objective, np.median(x, 0), method="BFGS", options={"gtol": 1e-9}).x


AGGREGATORS = {
    "median": (aggregators.CoordinateMedian(), numpy_median),
    "trimmed": (aggregators.TrimmedMean(0.2), numpy_trimmed),
    "krum": (aggregators.Krum(attackers=2), numpy_krum),
    "multi-krum": (aggregators.Krum(attackers=2, selected=5), lambda x, weights: numpy_krum(x, weights, 2, 5)),
    "bulyan": (aggregators.Bulyan(attackers=2), numpy_bulyan),
    "geometric": (aggregators.GeometricMedian(), numpy_geometric),
}


def population(n, seed):
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, SIZE)), draw.uniform(0.5, 3, n), draw


@pytest.fixture(params=AGGREGATORS)
def name(request):
    return request.param


@pytest.mark.first(10)
@pytest.mark.parametrize("n", [11, 12, 17])
def test_against_numpy(name, n):
    aggregator, reference = AGGREGATORS[name]
    x, weights, _ = population(n, seed=n)
    tolerance = 2e-4 if name == "geometric" else 1e-5  # the accuracy of BFGS
    np.testing.assert_allclose(combine(aggregator, x, weights), reference(x, weights), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("smoothing", [1e-18, 1e18])
def test_the_geometric_median_of_equal_updates_is_finite_for_any_smoothing(smoothing):
    median = aggregators.GeometricMedian(smoothing=smoothing)
    for x in (np.full((5, 2), 1.5, np.float32), np.full((5, 2), 1e18, np.float32)):
        np.testing.assert_allclose(median.combine(x, jnp.ones(5)), x[0], rtol=1e-6)


@pytest.mark.first(3)
def test_rows_of_weight_zero_have_no_effect(name):
    aggregator, reference = AGGREGATORS[name]
    x, weights, draw = population(16, seed=1)
    weights[[0, 5, 15]] = 0
    x[[0, 5, 15]] = 1e6 * draw.normal(size=(3, SIZE))
    there = weights > 0
    tolerance = 2e-4 if name == "geometric" else 1e-5
    expected = reference(x[there], weights[there])
    np.testing.assert_allclose(combine(aggregator, x, weights), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(combine(aggregator, x, 0 * weights), np.zeros(SIZE))
    alone = np.where(np.arange(16) == 3, 2.0, 0.0)
    np.testing.assert_allclose(combine(aggregator, x, alone), x[3], rtol=1e-6)


def test_the_order_of_clients_does_not_matter(name):
    x, weights, draw = population(13, seed=2)
    order = draw.permutation(13)
    first, second = (combine(AGGREGATORS[name][0], *these) for these in [(x, weights), (x[order], weights[order])])
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)


def test_the_aggregate_of_equal_updates_is_their_mean(name):
    x, weights, _ = population(11, seed=3)
    x[:] = x[0]
    np.testing.assert_allclose(combine(AGGREGATORS[name][0], x, weights), x[0], rtol=1e-6)


def assert_within(result, honest):
    """Every coordinate must lie between two honest ones, up to rounding."""
    slack = 1e-6 * np.abs(honest).max()
    assert np.all(result >= honest.min(0) - slack) and np.all(result <= honest.max(0) + slack)


FAR = {
    "above": lambda draw: np.full((2, SIZE), 1e6),
    "around": lambda draw: 1e6 * draw.normal(size=(2, SIZE)),
    "at the end of float32": lambda draw: np.array([[3e18], [-2e18]]),
}


@pytest.mark.first(15)
@pytest.mark.parametrize("where", FAR)
def test_two_distant_attackers_of_eleven_have_a_bounded_effect(name, where):
    x, _, draw = population(11, seed=4)
    x[:2] = FAR[where](draw)
    result, honest = combine(AGGREGATORS[name][0], x, np.ones(11)), x[2:]
    assert_within(result, honest)
    if name == "krum":
        assert any(np.array_equal(result, row) for row in honest.astype(np.float32))
    with pytest.raises(AssertionError):  # the negative control
        assert_within(x.mean(0), honest)


def test_attackers_that_differ_in_one_coordinate_deceive_krum_and_not_bulyan():
    """The attack of El Mhamdi et al.: close to all other updates except for one coordinate."""
    x, _, _ = population(11, seed=4)
    x[:, np.arange(SIZE) != 5] *= 5
    x[:2] = x[2:].mean(0)
    x[:2, 5] = 3.0
    honest = x[2:]
    for name in ("median", "trimmed", "bulyan"):
        assert_within(combine(AGGREGATORS[name][0], x, np.ones(11)), honest)
    assert combine(AGGREGATORS["krum"][0], x, np.ones(11))[5] == 3.0 > honest[:, 5].max()


def test_more_attackers_than_the_breakdown_point_have_an_unbounded_effect():
    x, _, _ = population(11, seed=5)
    x[:6] = 1e6
    assert combine(aggregators.CoordinateMedian(), x, np.ones(11)).min() == 1e6
    assert combine(aggregators.TrimmedMean(0.4), x, np.ones(11)).max() > 1e5
    assert combine(aggregators.Krum(attackers=2), x, np.ones(11)).min() == 1e6
    assert combine(aggregators.GeometricMedian(), x, np.ones(11)).min() > 1e5


def test_without_attackers_they_are_the_mean():
    x, weights, _ = population(9, seed=6)
    np.testing.assert_allclose(
        combine(aggregators.TrimmedMean(0.0), x, weights), np.average(x, axis=0, weights=weights), rtol=1e-5, atol=1e-6
    )
    for aggregator in (aggregators.Bulyan(attackers=0), aggregators.Krum(attackers=0, selected=9)):
        np.testing.assert_allclose(combine(aggregator, x, weights), x.mean(0), rtol=1e-5, atol=1e-6)


def test_trimming_reduces_the_weight_of_equal_values_equally():
    """From [0, 0, 0, 1, 5] with weights 1 to 5, one value is trimmed at each end, so two of the three zeros remain."""
    rows = {"x": jnp.array([0.0, 5.0, 0.0, 1.0, 0.0])}
    weights = jnp.array([1.0, 5.0, 2.0, 4.0, 3.0])
    result = aggregators.TrimmedMean(0.2).combine(rows, weights)["x"]
    assert float(result) == pytest.approx(4 / (4 + 6 * 2 / 3))
    both = aggregators.TrimmedMean(0.2).combine({"x": jnp.array([2.0, 2.0, 2.0, 2.0, 7.0])}, weights)["x"]
    assert float(both) == 2.0


def test_trim_counts_exactly():
    x = np.arange(100.0)[:, None] ** 2 * np.ones(SIZE)
    expected = np.sort(x, axis=0)[29:71].mean(0)
    np.testing.assert_allclose(combine(aggregators.TrimmedMean(0.29), x, np.ones(100)), expected, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 23, 64, 100])
def test_order_statistics_against_sort(n):
    draw = np.random.default_rng(n)
    x = draw.integers(-3, 3, (n, 40)).astype(np.float32)
    exists = draw.random(n) < 0.8
    expected = np.sort(np.where(exists[:, None], x, np.inf), axis=0)
    np.testing.assert_array_equal(sort_rows(jnp.asarray(x), jnp.asarray(exists)), expected)


@pytest.mark.parametrize("columns", [4096, 4097, 9000])
def test_order_of_more_coordinates_than_are_sorted_together(columns):
    x = np.random.default_rng(columns).normal(size=(5, 1, columns)).astype(np.float32)
    np.testing.assert_array_equal(sort_rows(jnp.asarray(x), jnp.ones(5, bool)), np.sort(x, axis=0))


def test_order_is_correct_by_the_zero_one_principle():
    """A network that sorts every sequence of zeros and ones sorts everything (Knuth, 5.3.4, theorem Z)."""
    for n in range(1, 11):
        x = (np.arange(2**n)[None] >> np.arange(n)[:, None] & 1).astype(np.float32)
        np.testing.assert_array_equal(sort_rows(jnp.asarray(x), jnp.ones(n, bool)), np.sort(x, axis=0))


def test_distances_are_accurate_with_a_common_offset_and_outliers():
    """With an offset of 1,000 times the spread and attackers at 1e6, the error of the plain formula exceeds the distances."""
    draw = np.random.default_rng(7)
    x = (100 + 0.1 * draw.normal(size=(8, 500))).astype(np.float32)
    x[6:] = 1e6 * draw.normal(size=(2, 500))
    exact = np.square(x[:, None].astype(np.float64) - x[None]).sum(-1)
    ours = np.asarray(squared_distances({"x": jnp.asarray(x)}, jnp.ones(8, bool), lambda sums: sums))
    off = ~np.eye(8, dtype=bool)
    np.testing.assert_allclose(ours[off], exact[off], rtol=1e-3)
    assert np.all(np.isinf(ours[~off]))
    products = x @ x.T
    plain = np.diag(products)[:, None] + np.diag(products)[None] - 2 * products
    assert np.abs(plain[:6, :6] - exact[:6, :6]).max() > 0.05 * exact[:6, :6][off[:6, :6]].min()


@pytest.mark.parametrize("columns", [16_385, 32_768, 40_000])
def test_inner_products_of_long_rows_include_all_columns(columns):
    """A CPU multiplies columns in blocks, and the last block may be smaller."""
    x = np.random.default_rng(3).normal(size=(5, columns)).astype(np.float32)
    x[:, -1] = 100 * np.arange(5)  # Without the last column, only the first row's products would be correct.
    ours = inner_products({"a": jnp.asarray(x.reshape(5, -1, 1)), "b": jnp.asarray(x[:, -3:])}, lambda rows: rows - rows[:1])
    centered = np.concatenate([x, x[:, -3:]], axis=1).astype(np.float64)
    centered -= centered[:1]
    np.testing.assert_allclose(ours, centered @ centered.T, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aggregators.TrimmedMean(0.5), r"Expected 0 <= trim < 0.5, got trim=0.5"),
        (lambda: aggregators.TrimmedMean(-0.1), r"Expected 0 <= trim < 0.5"),
        (lambda: aggregators.Krum(attackers=-1), r"Expected attackers >= 0, got attackers=-1"),
        (lambda: aggregators.Krum(attackers=1, selected=0), r"Expected selected >= 1, got selected=0"),
        (lambda: aggregators.Bulyan(attackers=-1), r"Expected attackers >= 0"),
        (lambda: aggregators.GeometricMedian(iterations=0), r"Expected iterations >= 1"),
        (lambda: aggregators.GeometricMedian(smoothing=0.0), r"Expected 1e-18 <= smoothing <= 1e\+18, got smoothing=0.0"),
        (lambda: aggregators.GeometricMedian(smoothing=1e-20), r"Expected 1e-18 <= smoothing <= 1e\+18"),
        (lambda: aggregators.GeometricMedian(tolerance=1.0), r"Expected 0 <= tolerance < 1"),
        (lambda: aggregators.Clipped(0.0), r"Expected norm > 0 and finite, got norm=0.0"),
        (lambda: aggregators.Clipped(float("nan")), r"Expected norm > 0 and finite"),
        (lambda: aggregators.CentredClipping(0.0), r"Expected radius > 0 and finite, got radius=0.0"),
    ],
)
def test_arguments_out_of_range_raise_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("aggregator", "slots", "message"),
    [
        (aggregators.Krum(attackers=4), 10, r"Krum\(attackers=4\) needs cohorts of at least 2 \* 4 \+ 3 = 11 .* most 3"),
        (aggregators.Krum(attackers=4), 11, None),
        (aggregators.Krum(attackers=3, selected=8), 10, r"Expected selected <= 7"),
        (aggregators.Krum(attackers=3, selected=7), 10, None),
        (aggregators.Krum(attackers=0), 2, r"Use larger cohorts"),
        (
            aggregators.Bulyan(attackers=2),
            10,
            r"Bulyan\(attackers=2\) needs cohorts of at least 4 \* 2 \+ 3 = 11 .* most 1",
        ),
        (aggregators.Bulyan(attackers=2), 11, None),
    ],
)
def test_cohorts_that_are_too_small_raise_an_error(aggregator, slots, message):
    update = {"w": jax.ShapeDtypeStruct((10,), jnp.float32)}
    if message is None:
        aggregator.check(update, slots)
    else:
        with pytest.raises(ValueError, match=message):
            aggregator.check(update, slots)


@pytest.mark.parametrize("wrapper", [aggregators.Clipped(1.0), aggregators.CentredClipping(1.0)])
def test_integers_cannot_be_clipped(wrapper):
    with pytest.raises(ValueError, match="needs floats, got an array of int32"):
        wrapper.check({"n": jax.ShapeDtypeStruct((), jnp.int32)}, 3)


@pytest.mark.first(2)
def test_integers_and_half_precision_are_aggregated_in_float32(name):
    x = np.random.default_rng(8).integers(-5, 5, (11, 3))
    weights = np.ones(11)
    wide, half, whole = (
        AGGREGATORS[name][0].combine({"x": jnp.asarray(x, dtype)}, jnp.asarray(weights, jnp.float32))["x"]
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int8)
    )
    assert half.dtype == whole.dtype == jnp.float32
    np.testing.assert_array_equal(wide, half)
    np.testing.assert_array_equal(wide, whole)


def test_an_update_of_weight_zero_does_not_change_a_row():
    aggregator = aggregators.TrimmedMean(0.0)
    fold = aggregator.accumulate(aggregator.zero(jnp.zeros(2), 2), jnp.array([1.0, 2.0]), jnp.float32(1), jnp.int32(0))
    fold = aggregator.accumulate(fold, jnp.array([9.0, 9.0]), jnp.float32(0), jnp.int32(0))
    assert aggregator.finish(fold).tolist() == [1.0, 2.0]


def fold(aggregator, x, weights, memory=None, key=None):
    """Runs one round of an aggregator by hand: `send`, `accumulate` and `finish_round`."""
    like = jax.tree.map(lambda rows: rows[0], tree(x))
    memory = aggregator.init(like) if memory is None else memory
    accumulator = aggregator.zero(like, len(x))
    for slot, weight in enumerate(weights):
        update = jax.tree.map(lambda rows, slot=slot: rows[slot], tree(x))
        sent = aggregator.send(update, memory, aggregator.client_memory(like), jax.random.key(slot))
        accumulator = aggregator.accumulate(accumulator, sent.update, jnp.float32(weight), jnp.int32(slot))
    return aggregator.finish_round(accumulator, memory, jax.random.key(9) if key is None else key)


@pytest.mark.parametrize("inner", [aggregators.Mean(), aggregators.CoordinateMedian()])
def test_clipping_bounds_the_norm_over_all_leaves(inner):
    x, weights, _ = population(5, seed=9)
    x[0] *= 1e5
    x[1] *= 1e-3
    clipped = x * np.minimum(1, 2.0 / np.linalg.norm(x, axis=1, keepdims=True))
    update, _ = fold(aggregators.Clipped(2.0, inner=inner), x, weights)
    expected = np.median(clipped, 0) if isinstance(inner, aggregators.CoordinateMedian) else np.average(clipped, 0, weights)
    np.testing.assert_allclose(flat(update), expected, rtol=1e-5, atol=1e-7)


def test_clipping_leaves_short_updates_and_zeros_as_they_are():
    clipped = aggregators.Clipped(5.0)
    for update in ({"w": jnp.array([3.0, 4.0])}, {"w": jnp.zeros(2)}):
        np.testing.assert_array_equal(clipped.send(update, (), (), jax.random.key(0)).update["w"], update["w"])


def test_centred_clipping_follows_the_paper():
    aggregator, radius = aggregators.CentredClipping(3.0), 3.0
    memory, v = None, np.zeros(SIZE)
    for round in range(4):
        x, weights, draw = population(7, seed=10 + round)
        x += 2.0
        x[0] = 1e6 * draw.normal(size=SIZE)
        update, memory = fold(aggregator, x, weights, memory)
        before, away = v, x - v
        v = v + np.average(away * np.minimum(1, radius / np.linalg.norm(away, axis=1, keepdims=True)), 0, weights)
        np.testing.assert_allclose(flat(update), v, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(flat(memory), flat(update))
        assert np.linalg.norm(flat(update) - before) <= radius * 1.0001


def test_centred_clipping_keeps_its_centre_where_nobody_contributes():
    """A round of two calls, of which the other one has clients, is no empty round, so its memories are kept."""
    x, weights, _ = population(7, seed=21)
    _, memory = fold(aggregators.CentredClipping(3.0), x, weights)
    update, after = fold(aggregators.CentredClipping(3.0), x, 0 * weights, memory)
    assert np.any(flat(memory)) and not np.any(flat(update))
    np.testing.assert_array_equal(flat(after), flat(memory))


def test_centred_clipping_beyond_all_distances_is_the_mean():
    x, weights, _ = population(7, seed=20)
    memory = jax.tree.map(lambda rows: rows[3], tree(x))
    update, _ = fold(aggregators.CentredClipping(1e30), x, weights, memory)
    np.testing.assert_allclose(flat(update), np.average(x, 0, weights), rtol=1e-5, atol=1e-6)


def test_a_trimmed_mean_that_trims_nobody_says_so():
    with pytest.warns(UserWarning, match=r"removes floor\(0.1 \* 9\) = 0 of 9 updates at each end.*give trim >= 0.111"):
        aggregators.TrimmedMean(0.1).check(jnp.zeros(3), 9)
    for trim, slots in ((0.1, 10), (0.112, 9), (0.0, 9), (0.29, 100)):
        aggregators.TrimmedMean(trim).check(jnp.zeros(3), slots)
