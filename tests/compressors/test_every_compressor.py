"""What every compressor must do, whatever it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federation import assert_trees_equal

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
# Which ignore the key.
DETERMINISTIC = {
    *("Identity", "Cast", "Cast float16", "IntegerQuantizer", "ScaledSign", "TopK", "TopK mask", "TopK places"),
    *("MagnitudePruning", "PowerSGD", "ErrorFeedback of TopK", "ErrorFeedback of PowerSGD"),
}


def value(seed=0, size=6):
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


@pytest.fixture(params=EVERY, name="compressor")
def _compressor(request):
    return EVERY[request.param]


def test_the_table_has_every_compressor():
    public = {thing for thing in vars(compressors).values() if isinstance(thing, type)}
    bases = {compressors.Compressor, compressors.VectorCompressor, compressors.Size, compressors.Transmission}
    assert {type(each) for each in EVERY.values()} == public - bases


def test_what_arrives_has_structure_shapes_and_dtypes(compressor):
    sent = compressor.transmit(value(), jax.random.key(0), compressor.init(value()))
    assert shapes_of(sent.value) == shapes_of(value())
    np.testing.assert_array_equal(sent.value["count"], value()["count"])
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(sent))
    assert (sent.bits.shape, sent.bits.dtype) == ((), jnp.uint32)
    assert (sent.entropy_bits.shape, sent.entropy_bits.dtype) == ((), jnp.float32)


def test_transmit_is_encode_decode_and_size(compressor):
    """The receiver has the message, the key and the shapes: nothing that depends on the value."""
    x, key = value(), jax.random.key(1)
    memory = compressor.init(x)
    sent = compressor.transmit(x, key, memory)
    message, kept = compressor.encode(x, key, memory)
    message = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), message)
    size = compressor.size(message, shapes_of(x))
    assert_trees_equal(compressor.decode(message, key, shapes_of(x)), sent.value)
    assert_trees_equal(kept, sent.memory)
    assert (size.bits, size.entropy_bits) == (sent.bits, sent.entropy_bits)


def test_bits_are_those_of_the_message(compressor):
    """All words of all arrays of the message; but for what fills last words, and what a mask leaves out."""
    x = value(size=40)
    message, _ = compressor.encode(x, jax.random.key(1), compressor.init(x))
    bits = int(compressor.size(message, shapes_of(x)).bits)
    if isinstance(compressor, MagnitudePruning):
        message = [[each._replace(values=each.values[each.values != 0]) for each in message[0]], message[1]]
    leaves = jax.tree.leaves(message)
    room = sum(8 * leaf.size * leaf.dtype.itemsize for leaf in leaves)
    planes = sum(leaf.shape[0] for leaf in leaves if leaf.dtype == jnp.uint32 and leaf.ndim == 2)
    assert room - 31 * planes <= bits <= room


def test_an_entropy_coder_is_never_worse(compressor):
    for x in (value(), value(size=40), {"w": jnp.zeros(1000)}, {"s": jnp.float32(3)}):
        sent = compressor.transmit(x, jax.random.key(1), compressor.init(x))
        assert 0 <= sent.entropy_bits <= sent.bits


def test_jit_is_eager_and_vmap_a_loop(compressor):
    values = [value(seed) for seed in range(3)]
    keys = jax.random.split(jax.random.key(0), 3)
    memory = compressor.init(values[0])
    loop = [jax.jit(compressor.transmit)(x, key, memory) for x, key in zip(values, keys, strict=True)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *values)
    mapped = jax.jit(jax.vmap(compressor.transmit, in_axes=(0, 0, None)))(stacked, keys, memory)
    with jax.disable_jit(False):
        eager = compressor.transmit(values[1], keys[1], memory)
    for a, b, c in zip(
        jax.tree.leaves(jax.tree.map(lambda x: x[1], mapped)), jax.tree.leaves(loop[1]), jax.tree.leaves(eager), strict=True
    ):
        for x, y in ((a, b), (c, b)):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            # A number on the edge between two codes may fall to either side by the last bit; one in a hundred must not.
            assert np.mean(np.abs(x - y) > 1e-5 + 1e-5 * np.abs(y)) <= 0.01


def test_the_same_key_repeats_and_another_differs(compressor, request):
    x, memory = value(), compressor.init(value())
    first, again, other = (compressor.transmit(x, jax.random.key(seed), memory) for seed in (0, 0, 1))
    assert_trees_equal(first, again)
    same = all(bool(jnp.all(a == b)) for a, b in zip(jax.tree.leaves(first.value), jax.tree.leaves(other.value), strict=True))
    assert same == (request.node.callspec.params["compressor"] in DETERMINISTIC)


def test_zeros_arrive_as_zeros(compressor):
    x = jax.tree.map(jnp.zeros_like, value())
    sent = compressor.transmit(x, jax.random.key(0), compressor.init(x))
    assert_trees_equal(sent.value, x)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(sent.memory))


@pytest.mark.parametrize("constant", [1.0, -2.5, 1e-30, 1e30])
def test_constants_of_any_size_are_numbers(compressor, constant):
    x = {"w": jnp.full((5, 8), constant), "b": jnp.full(3, constant), "s": jnp.float32(constant)}
    sent = compressor.transmit(x, jax.random.key(0), compressor.init(x))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(sent))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (1, 1), (1, 3), (31,), (32,), (33,), (2, 3, 1)])
def test_tiny_tensors(compressor, shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    sent = compressor.transmit(x, jax.random.key(0), compressor.init(x))
    assert sent.value.shape == shape and bool(jnp.all(jnp.isfinite(sent.value)))


def test_nothing_and_integers_alone_are_sent_as_they_are(compressor):
    sent = compressor.transmit((), jax.random.key(0), compressor.init(()))
    assert sent.value == () and sent.bits == 0 and sent.entropy_bits == 0
    x = {"n": jnp.arange(3, dtype=jnp.int32), "none": jnp.zeros(0)}
    sent = compressor.transmit(x, jax.random.key(0), compressor.init(x))
    assert_trees_equal(sent.value, x)
    assert sent.bits == 96


def test_memory_keeps_its_form(compressor):
    x = value()
    memory = compressor.init(x)
    kept = compressor.transmit(x, jax.random.key(0), memory).memory
    assert shapes_of(kept) == shapes_of(memory)
    without = compressor.transmit(x, jax.random.key(0))
    assert shapes_of(without.memory) == shapes_of(memory)
    assert_trees_equal(without.memory, kept)


def test_a_value_is_not_changed_and_init_looks_at_shapes_only(compressor):
    x = value()
    before = jax.tree.map(np.array, x)
    compressor.transmit(x, jax.random.key(0), compressor.init(x))
    assert_trees_equal(x, before)
    assert_trees_equal(jax.jit(compressor.init)(x), compressor.init(shapes_of(x)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_does_not_pass_for_a_number(bad):
    """It is left out of a round before it comes here; should it come, it is not made into something harmless."""
    harmless = {"Cast", "Cast float16", "RandomK", "RandomK per tensor", "TernGrad clipped"}
    for name in set(EVERY) - harmless:
        x = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(9, 9)), jnp.float32).at[4, 4].set(bad)}
        sent = EVERY[name].transmit(x, jax.random.key(0), EVERY[name].init(x))
        assert not bool(jnp.all(jnp.isfinite(sent.value["w"]))), name


def test_a_message_of_too_many_bits_is_refused():
    with pytest.raises(ValueError, match=r"less than 2\*\*32 bits, got 4294967296"):
        jax.eval_shape(lambda x: Identity().transmit(x, jax.random.key(0)), jax.ShapeDtypeStruct((2**27,), jnp.float32))


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
        (lambda: TernGrad(clip=0.0), "clip > 0 and finite, got clip=0.0"),
        (lambda: TernGrad(clip=float("nan")), "clip=nan"),
        (lambda: Eden(bits=0), "1, 2, 3 or 4, got bits=0"),
        (lambda: Eden(bits=5), "bits=5"),
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
def test_hyperparameters_out_of_range_are_refused(construct, message):
    with pytest.raises(ValueError, match=message):
        construct()
