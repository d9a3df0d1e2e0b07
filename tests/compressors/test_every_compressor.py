"""Properties of every compressor."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federation import assert_trees_close, assert_trees_equal

from fedsim import compressors
from fedsim.compressors import (
    QSGD,
    Cast,
    Drive,
    Eden,
    ErrorFeedback,
    Identity,
    IntegerQuantizer,
    MagnitudePruning,
    PowerSGD,
    RandomK,
    RotatedUniformQuantizer,
    ScaledSign,
    TernGrad,
    TopK,
    UniformQuantizer,
)

EVERY = {
    "Identity": Identity(),
    "Cast": Cast(),
    "Cast float16": Cast(dtype="float16"),
    "UniformQuantizer": UniformQuantizer(levels=5),
    "UniformQuantizer 8 bits, whole": UniformQuantizer(levels=256, per_tensor=False),
    "UniformQuantizer 10 bits": UniformQuantizer(levels=1024),
    "IntegerQuantizer": IntegerQuantizer(bits=3),
    "RotatedUniformQuantizer": RotatedUniformQuantizer(levels=6),
    "RotatedUniformQuantizer per tensor": RotatedUniformQuantizer(levels=16, per_tensor=True),
    "QSGD": QSGD(levels=3),
    "TernGrad": TernGrad(),
    "TernGrad clipped": TernGrad(clip=2.5),
    "ScaledSign": ScaledSign(),
    "Drive": Drive(),
    "Drive biased": Drive(unbiased=False),
    "Eden": Eden(),
    "Eden 4 bits": Eden(bits=4, per_tensor=True),
    "Eden biased": Eden(bits=3, unbiased=False),
    "TopK": TopK(fraction=0.1),
    "TopK mask": TopK(fraction=0.3, layout="mask", per_tensor=True),
    "TopK places": TopK(fraction=0.3, layout="places"),
    "RandomK": RandomK(fraction=0.3),
    "RandomK per tensor": RandomK(fraction=0.1, unbiased=False, per_tensor=True),
    "MagnitudePruning": MagnitudePruning(threshold=1.0),
    "PowerSGD": PowerSGD(rank=1),
    "ErrorFeedback of TopK": ErrorFeedback(TopK(fraction=0.1)),
    "ErrorFeedback of PowerSGD": ErrorFeedback(PowerSGD(rank=2)),
}
# Compressors that ignore the key.
DETERMINISTIC = {
    *("Identity", "Cast", "Cast float16", "IntegerQuantizer", "ScaledSign", "TopK", "TopK mask", "TopK places"),
    *("MagnitudePruning", "PowerSGD", "ErrorFeedback of TopK", "ErrorFeedback of PowerSGD"),
}


def value(seed=0, size=12):
    draw = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(draw.normal(size=(size, 7)), jnp.float32),
        "b": (jnp.asarray(draw.normal(size=5), jnp.float32), jnp.float32(draw.normal())),
        "half": jnp.asarray(draw.normal(size=(3, 4, 5)), jnp.bfloat16),
        "one": jnp.asarray(draw.normal(size=1), jnp.float32),
        "none": jnp.zeros((0, 3)),
        "count": jnp.asarray(draw.integers(0, 100, 3), jnp.int32),
    }


def shapes_of(x):
    return jax.eval_shape(lambda: x)


def filled(number):
    return jax.tree.map(lambda x: jnp.full_like(x, number), value())


@functools.cache
def compiled(compressor):
    """Returns `transmit`, compiled once for all tests, with arguments value, key and memory."""
    return jax.jit(compressor.transmit)


@functools.cache
def encoder(compressor):
    return jax.jit(compressor.encode)


def send(compressor, x, seed=0):
    return compiled(compressor)(x, jax.random.key(seed), compressor.init(x))


# Variants of a compressor, whose names have several words, are left to `make test-all`.
@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (" " in name)) for name in EVERY], name="compressor")
def _compressor(request):
    return EVERY[request.param]


def all_finite(x):
    return all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(x))


def test_the_table_has_every_compressor():
    public = {thing for thing in vars(compressors).values() if isinstance(thing, type) and thing is not Any}
    bases = {compressors.Compressor, compressors.VectorCompressor, compressors.Size, compressors.Transmission}
    assert {type(each) for each in EVERY.values()} == public - bases


@pytest.mark.first(4)
def test_decoded_values_have_structure_shapes_and_dtypes(compressor):
    sent = send(compressor, value())
    assert_same_form(sent.value, value())
    np.testing.assert_array_equal(sent.value["count"], value()["count"])
    assert all_finite(sent)
    assert (sent.bits.shape, sent.bits.dtype) == ((), jnp.uint32)
    assert (sent.entropy_bits.shape, sent.entropy_bits.dtype) == ((), jnp.float32)


def assert_same_form(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.first(3)
def test_transmit_is_encode_decode_and_size(compressor):
    """The receiver uses only the message, the key and the shapes, and nothing else that depends on the value."""
    x, key = value(), jax.random.key(1)
    sent = send(compressor, x, 1)
    message, kept = encoder(compressor)(x, key, compressor.init(x))
    message = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), message)
    shapes = shapes_of(x)
    arrived, size = jax.jit(lambda m, key: (compressor.decode(m, key, shapes), compressor.size(m, shapes)))(message, key)
    assert_trees_close(arrived, sent.value)
    assert_trees_close(kept, sent.memory)
    assert size.bits == sent.bits
    np.testing.assert_allclose(size.entropy_bits, sent.entropy_bits, rtol=1e-6)


@pytest.mark.first(12)
def test_bits_are_the_size_of_the_message(compressor):
    """The size counts the words of all arrays of the message, without padding and without values outside a mask."""
    x = value()
    message, _ = encoder(compressor)(x, jax.random.key(0), compressor.init(x))
    bits = int(send(compressor, x).bits)
    if isinstance(compressor, MagnitudePruning):
        message = [[each._replace(values=each.values[each.values != 0]) for each in message[0]], message[1]]
    leaves = jax.tree.leaves(message)
    capacity = sum(8 * leaf.size * leaf.dtype.itemsize for leaf in leaves)
    planes = sum(leaf.shape[0] for leaf in leaves if leaf.dtype == jnp.uint32 and leaf.ndim == 2)
    assert capacity - 31 * planes <= bits <= capacity


def test_an_entropy_coder_is_never_worse(compressor):
    for x in (value(), filled(0), filled(3)):
        sent = send(compressor, x)
        assert 0 <= float(sent.entropy_bits) <= int(sent.bits)


@pytest.mark.slow
def test_vmap_equals_a_loop(compressor):
    values, keys = [value(seed) for seed in range(3)], [jax.random.key(seed) for seed in range(3)]
    memory = compressor.init(values[0])
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *values)
    mapped = jax.jit(jax.vmap(compressor.transmit, in_axes=(0, 0, None)))(stacked, jnp.stack(keys), memory)
    for i in range(3):
        assert_nearly_all_close(jax.tree.map(lambda x, i=i: x[i], mapped), compiled(compressor)(values[i], keys[i], memory))


def assert_nearly_all_close(a, b):
    """Allows a few values to differ, because a number between two codes may be rounded to either."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    far = []
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        far.append(np.abs(x - y).reshape(-1) > 1e-5 + 1e-5 * np.abs(y).reshape(-1))
    assert np.mean(np.concatenate(far)) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", ["UniformQuantizer", "QSGD", "Eden", "TopK", "RandomK", "ErrorFeedback of PowerSGD"])
def test_eager_and_compiled_results_are_equal(name):
    x, compressor = value(), EVERY[name]
    assert_nearly_all_close(compressor.transmit(x, jax.random.key(0), compressor.init(x)), send(compressor, x))


def test_the_same_key_repeats_and_another_differs(compressor, request):
    first, again, other = (send(compressor, value(), seed) for seed in (0, 0, 1))
    assert_trees_equal(first, again)
    same = all(bool(jnp.all(a == b)) for a, b in zip(jax.tree.leaves(first.value), jax.tree.leaves(other.value), strict=True))
    assert same == (request.node.callspec.params["compressor"] in DETERMINISTIC)


def test_zeros_are_decoded_to_zeros(compressor):
    sent = send(compressor, filled(0))
    assert_trees_equal(sent.value, filled(0))
    assert all_finite(sent)


@pytest.mark.parametrize("constant", [1.0, -2.5, 1e-30, 1e30])
def test_constants_of_any_magnitude_are_decoded_to_numbers(compressor, constant):
    assert all_finite(send(compressor, filled(constant)))


SHAPES = [(), (1,), (2,), (3,), (1, 1), (1, 3), (31,), (32,), (33,), (2, 3, 1)]


@pytest.mark.slow
def test_tiny_tensors(compressor):
    draw = np.random.default_rng(0)
    x = [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in SHAPES]
    sent = send(compressor, x)
    assert [leaf.shape for leaf in sent.value] == SHAPES and all_finite(sent)


def test_empty_values_and_integers_are_sent_unchanged(compressor):
    sent = compressor.transmit((), jax.random.key(0), compressor.init(()))
    assert sent.value == () and sent.bits == 0 and sent.entropy_bits == 0
    x = {"n": jnp.arange(3, dtype=jnp.int32), "none": jnp.zeros(0)}
    sent = compressor.transmit(x, jax.random.key(0), compressor.init(x))
    assert_trees_equal(sent.value, x)
    assert sent.bits == 96


def test_memory_keeps_its_structure_and_is_initialized_if_missing(compressor):
    x = value()
    kept = send(compressor, x).memory
    assert_same_form(kept, compressor.init(x))
    if jax.tree.leaves(kept):
        assert_trees_close(compiled(compressor)(x, jax.random.key(0)).memory, kept)


def test_init_depends_only_on_shapes(compressor):
    assert_trees_equal(jax.jit(compressor.init)(value()), compressor.init(shapes_of(value())))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_stay_not_finite(compressor, bad, request):
    """Rounds drop such updates before compression. If one is compressed anyway, the error must remain visible."""
    harmless = {"Cast", "Cast float16", "RandomK", "RandomK per tensor", "TernGrad clipped"}
    if request.node.callspec.params["compressor"] not in harmless:
        x = value() | {"w": value()["w"].at[4, 4].set(bad)}
        assert not all_finite(send(compressor, x).value["w"])


@pytest.mark.parametrize(("length", "dtype"), [(2**27 - 1, jnp.uint32), (2**27, jnp.float32)])
def test_a_message_of_many_bits_is_counted_in_float32(length, dtype):
    # The array is never allocated: the size does not depend on the values, so the compiler removes it.
    sent = jax.jit(lambda: Identity().transmit(jnp.zeros(length), jax.random.key(0))._replace(value=()))()
    assert sent.bits.dtype == dtype and float(sent.bits) == np.float32(32 * length)


def test_a_message_whose_length_varies_is_counted_in_the_dtype_of_its_longest():
    for length, dtype in [(2**20, jnp.uint32), (2**27 - 2**10, jnp.float32)]:  # 32 bits per value, and 1 for the mask
        like = jax.ShapeDtypeStruct((length,), jnp.float32)
        assert jax.eval_shape(lambda x: MagnitudePruning().transmit(x, jax.random.key(0)).bits, like).dtype == dtype


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: Cast(dtype="float8"), "dtype='float8'"),
        (lambda: UniformQuantizer(levels=1), "2 <= levels <= 65536, got levels=1"),
        (lambda: UniformQuantizer(levels=70_000), "levels=70000"),
        (lambda: RotatedUniformQuantizer(levels=0), "levels=0"),
        (lambda: IntegerQuantizer(bits=0), "1 <= bits <= 16, got bits=0"),
        (lambda: IntegerQuantizer(bits=17), "bits=17"),
        (lambda: QSGD(levels=0), "1 <= levels <= 32768, got levels=0"),
        (lambda: TernGrad(clip=0.0), "clip > 0 and finite, or None, got clip=0.0"),
        (lambda: TernGrad(clip=float("nan")), "clip=nan"),
        (lambda: Eden(bits=0), "1 <= bits <= 5, got bits=0"),
        (lambda: Eden(bits=6), "bits=6"),
        (lambda: TopK(fraction=0.0), "0 < fraction <= 1, got fraction=0.0"),
        (lambda: TopK(fraction=1.5), "fraction=1.5"),
        (lambda: TopK(layout="coo"), "layout='coo'"),
        (lambda: RandomK(fraction=-0.1), "fraction=-0.1"),
        (lambda: RandomK(fraction=float("nan")), "fraction=nan"),
        (lambda: MagnitudePruning(threshold=-1.0), "threshold >= 0 and finite, got threshold=-1.0"),
        (lambda: PowerSGD(rank=0), "rank >= 1, got rank=0"),
        (lambda: PowerSGD(rank=1.5), "rank=1.5"),
        (lambda: ErrorFeedback(None), "such as TopK"),
    ],
)
def test_hyperparameters_out_of_range_raise_an_error(construct, message):
    with pytest.raises(ValueError, match=message):
        construct()
