"""Arithmetic on pytrees: tests of the functions that are longer than one line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim import tree


@pytest.mark.parametrize("small", [0, 7, 2**16])
def test_every_leaf_is_summed_over_devices(monkeypatch, small):
    monkeypatch.setattr("fedsim.tree._SMALL", small)
    draw = np.random.default_rng(0)
    leaves = {
        "scalar": draw.normal(size=2),
        "counts": draw.integers(-9, 9, (2, 3)).astype(np.int32),
        "more counts": draw.integers(-9, 9, (2,)).astype(np.int32),
        "empty": np.zeros((2, 0)),
        "matrix": draw.normal(size=(2, 4, 5)),
        "halves": draw.integers(-9, 9, (2, 2)).astype(jnp.bfloat16),
        "vector": draw.normal(size=(2, 7)),
        "flags": draw.integers(0, 2, (2, 3)).astype(bool),
        "more flags": draw.integers(0, 2, (2, 1)).astype(bool),
    }
    leaves = {name: leaf.astype(np.float32) if leaf.dtype == float else leaf for name, leaf in leaves.items()}
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")

    def total(each):
        return tree.psum(jax.tree.map(lambda leaf: leaf[0], each), "d")

    sums = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P()))(leaves)
    assert sums.keys() == leaves.keys()
    for name, leaf in leaves.items():
        leaf = leaf.astype(np.int32) if leaf.dtype == bool else leaf  # as jax.lax.psum does
        expected = leaf[0] + leaf[1]
        assert (sums[name].shape, sums[name].dtype) == (expected.shape, expected.dtype), name
        np.testing.assert_array_equal(np.asarray(sums[name]), expected, err_msg=name)


def test_many_small_leaves_are_summed_as_one_array(monkeypatch):
    def summed(a):
        mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
        return jax.shard_map(lambda x: tree.psum(x, "d"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(a)

    parameters = [jnp.ones(n) for n in range(1, 20)]
    assert _num_arrays(summed, parameters) == 1
    monkeypatch.setattr("fedsim.tree._SMALL", 10)
    # One array for all leaves of up to ten elements, and one for each of the others.
    assert _num_arrays(lambda a: summed(a), parameters) == 1 + 9


def _num_arrays(function, a):
    """Returns the number of arrays that a function sums over devices."""
    lines = str(jax.make_jaxpr(function)(a)).splitlines()
    return sum(line.split(" = ")[0].count(":f32") for line in lines if "psum" in line)


@pytest.mark.parametrize("known", [1.0, np.nan, np.inf, -np.inf])
def test_after_returns_its_argument_unchanged(known):
    values = {
        "x": jnp.array([1.5, -0.0, np.nan, np.inf], jnp.float32),
        "half": jnp.array(3, jnp.bfloat16),
        "mask": jnp.array([True, False]),
        "n": jnp.arange(3),
        "a number": 0.5,
    }
    others = {"a": jnp.full((2, 2), known), "b": jnp.zeros(0), "c": jnp.int32(5), "d": jax.random.key(0), "e": 0.5}
    for later in (tree.after(values, others), jax.jit(tree.after)(values, others), tree.after(values, ())):
        for one, other in zip(jax.tree.leaves(later), jax.tree.leaves(values), strict=True):
            assert jnp.result_type(one) == jnp.result_type(other)
            other = jnp.asarray(other)
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("known", [1.0, np.nan, np.inf])
def test_a_dot_product_includes_all_leaves(known):
    draw = np.random.default_rng(0)
    a, b = (
        {
            "matrix": draw.uniform(1, 2, size=(4, 5)).astype(np.float32),
            "halves": draw.integers(-9, 9, 7).astype(jnp.bfloat16),
            "counts": draw.integers(-9, 9, (2, 3)).astype(np.int32),
            "empty": np.zeros((2, 0), np.float32),
            "a number": draw.normal(),
        }
        for _ in range(2)
    )
    a["matrix"][1, 2] = known
    leaves = [[np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(of)] for of in (a, b)]
    expected = np.dot(*map(np.concatenate, leaves))
    assert np.isnan(expected) == np.isnan(known) and np.isinf(expected) == np.isinf(known)
    for product in (tree.dot(a, b), jax.jit(tree.dot)(a, b)):
        assert (product.shape, product.dtype) == ((), jnp.float32)
        np.testing.assert_allclose(product, expected, rtol=1e-5)
    x, y = (jax.tree.map(jnp.float32, of) for of in (a, b))
    for gradient, other in zip(jax.tree.leaves(jax.grad(tree.dot)(x, y)), jax.tree.leaves(y), strict=True):
        np.testing.assert_array_equal(gradient, other)


@pytest.mark.parametrize("shape", [(64, 64), (93, 51), (4103,), (3, 3, 32, 64), (9, 5, 128), (2048, 8)])
def test_a_dot_product_of_many_numbers_includes_each_once(shape):
    draw = np.random.default_rng(0)
    x, y = (draw.normal(size=shape).astype(np.float32) for _ in range(2))
    np.testing.assert_allclose(jax.jit(tree.dot)(x, y), np.vdot(x.astype(float), y.astype(float)), rtol=1e-4)
    for gradient, other in zip(jax.grad(tree.dot, argnums=(0, 1))(x, y), (y, x), strict=True):
        np.testing.assert_array_equal(gradient, other)
    _, gradient = jax.jvp(tree.dot, (x, y), (y, x))
    np.testing.assert_allclose(gradient, np.vdot(x, x).astype(float) + np.vdot(y, y), rtol=1e-4)
    for index in (0, x.size // 8, x.size - 1):
        x.flat[index], before = np.nan, x.flat[index]
        assert np.isnan(tree.dot(x, y))
        x.flat[index] = before


@pytest.mark.parametrize("shapes", [((3,), (1,)), ((), (3,)), ((3, 1), (3,)), ((2, 3), (3, 2))])
def test_a_dot_product_of_different_shapes_is_refused(shapes):
    with pytest.raises(ValueError, match="equal shapes"):
        tree.dot(*map(jnp.ones, shapes))


@pytest.mark.parametrize("length", [None, 0, 11, 12, 20])
def test_all_leaves_are_joined_into_one_vector(length):
    leaves = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.zeros((0, 4), np.float32),
        np.float32(7),
        np.arange(4, dtype=np.float32),
    ]
    expected = np.zeros(max(11, length or 0), np.float32)
    expected[:11] = np.concatenate([np.ravel(leaf) for leaf in leaves])
    vector = tree.flat(leaves, length)
    assert vector.dtype == jnp.float32
    np.testing.assert_array_equal(vector, expected)
    assert tree.flat([], length).tolist() == [0.0] * (length or 0)
    for leaf, again in zip(leaves, tree.unflat(vector, leaves), strict=True):
        assert again.dtype == leaf.dtype
        np.testing.assert_array_equal(again, leaf)


def test_a_total_of_many_terms_is_as_precise_as_one_rounding():
    """Added one after another in float32, 10**6 times 0.1 are 100,958."""

    def total(start, add):
        return jax.jit(lambda: jax.lax.fori_loop(0, 10**6, lambda _, so_far: add(so_far), start))()

    term = {"a": jnp.float32(0.1), "b": jnp.float32([1.0, -3e-5])}
    plain = total(jax.tree.map(jnp.zeros_like, term), lambda so_far: tree.add(so_far, term))
    found = total(tree.Total.of(jax.tree.map(jnp.zeros_like, term)), lambda so_far: so_far.add(term)).value()
    assert abs(float(plain["a"]) - 1e5) > 100
    np.testing.assert_allclose(found["a"], 1e6 * float(np.float32(0.1)), rtol=1e-7)
    np.testing.assert_allclose(found["b"], 1e6 * np.float32([1.0, -3e-5]).astype(np.float64), rtol=1e-7)


def test_totals_are_merged_and_stay_infinite():
    parts = [tree.Total.of(jnp.float32(2**24)).add(jnp.float32(1)).add(jnp.float32(1)) for _ in range(2)]
    assert float(parts[0].merge(parts[1]).value()) == 2**25 + 4
    assert float(parts[0].add(jnp.float32(jnp.inf)).add(jnp.float32(1)).value()) == np.inf


def test_a_root_has_the_bits_of_numpy_and_a_finite_derivative():
    x = np.array([0, 2e-38, 2, 7, 3e38, np.inf, np.nan, -1], np.float32)
    roots, slopes = jax.vmap(jax.value_and_grad(tree.root))(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        np.testing.assert_array_equal(roots[1:], np.sqrt(x[1:]))
        np.testing.assert_allclose(slopes[1:-2], 0.5 / np.sqrt(x[1:-2]), rtol=1e-6)
    assert roots[0] == slopes[0] == 0
