"""Sizes of a model of 31,594 parameters: FLSim's simple CNN for three input channels and ten classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.compressors import Cast, Drive, Eden, Identity, IntegerQuantizer, RandomK, TernGrad, TopK, UniformQuantizer

# Four convolutions of 32 channels, one group normalization that they share, and a linear layer: 5 matrices or kernels with
# 31,392 parameters in total, and 7 vectors with 202 in total.
SHAPES = {
    **{f"conv{i}/w": (3, 3, 3 if i == 1 else 32, 32) for i in (1, 2, 3, 4)},
    **{f"conv{i}/b": (32,) for i in (1, 2, 3, 4)},
    "norm/scale": (32,),
    "norm/offset": (32,),
    "linear/w": (288, 10),
    "linear/b": (10,),
}


def model():
    draw = np.random.default_rng(0)
    return {name: jnp.asarray(draw.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def size(compressor):
    sent = jax.jit(compressor.transmit)(model(), jax.random.key(0))
    return float(sent.bits) / 8, float(sent.entropy_bits) / 8


def test_the_model_has_31594_parameters():
    assert sum(x.size for x in jax.tree.leaves(model())) == 31_594


@pytest.mark.first(5)
@pytest.mark.parametrize(
    ("compressor", "expected"),
    [
        (Identity(), 126_376),
        (Cast(dtype="float16"), 63_188),
        (Cast(dtype="bfloat16"), 63_188),
        # 31,392 codes of 3 bits, 5 scales of 8 bytes and zero points of 4, 202 floats.
        (IntegerQuantizer(bits=3), 12_640),
        (IntegerQuantizer(bits=8), 31_392 + 5 * 12 + 202 * 4),
        # A bit for each parameter, and ceil(1 %) of each tensor: 9 + 3 * 93 + 29 + 7 floats.
        (TopK(fraction=0.01, layout="mask", per_tensor=True), 5_245.25),
        # 1 % of all coordinates together: 316 floats, each with an index of 15 bits.
        (TopK(fraction=0.01), 316 * (32 + 15) / 8),
        (RandomK(fraction=0.01), 316 * 4),
        # 12 tensors.
        (TernGrad(), 2 * 31_594 / 8 + 12 * 4),
        (UniformQuantizer(levels=16), 31_594 / 2 + 12 * 8),
        # 31 blocks of 1,024, each with a scale.
        (Drive(), 31 * (1024 + 32) / 8),
        (Eden(bits=3), 31 * (3 * 1024 + 32) / 8),
    ],
)
def test_bytes_of_the_model(compressor, expected):
    assert size(compressor)[0] == expected


def test_entropy_bits_of_terngrad_are_those_of_its_symbols():
    """The bits equal the entropy that NumPy computes from the decoded values."""
    x = {"w": jnp.asarray(np.random.default_rng(1).normal(size=10_000), jnp.float32)}
    sent = jax.jit(TernGrad().transmit)(x, jax.random.key(0))
    _, counts = np.unique(np.asarray(sent.value["w"]), return_counts=True)
    share = counts / 10_000
    histogram_bits = 4 * np.log2(np.e * 10_004 / 4)  # the histogram of 2-bit codes
    np.testing.assert_allclose(sent.entropy_bits, 10_000 * -np.sum(share * np.log2(share)) + histogram_bits + 32, rtol=1e-5)
    assert float(sent.entropy_bits) < 0.7 * int(sent.bits)


def test_entropy_bits_of_many_levels():
    x = jnp.asarray(np.random.default_rng(1).normal(size=5_000), jnp.float32)
    for levels in (16, 200, 256, 600):
        sent = jax.jit(UniformQuantizer(levels=levels).transmit)(x, jax.random.key(0))
        _, counts = np.unique(np.asarray(sent.value), return_counts=True)
        share, codes = counts / 5_000, 2 ** (levels - 1).bit_length()
        expected = 5_000 * -np.sum(share * np.log2(share)) + codes * np.log2(np.e * (5_000 + codes) / codes) + 64
        np.testing.assert_allclose(sent.entropy_bits, min(expected, int(sent.bits)), rtol=1e-5)
