"""2-D convolution by slices and matrix products, for training loops and for many clients' weights at once.

XLA's own convolution is designed for one large call. Inside ``fori_loop`` or ``scan`` on a CPU its gradients take more than 10
times as long, and ``vmap`` over weights turns it into a grouped convolution, which on an H100 takes 2.5 times as long as this
one. Here a convolution is a product of matrices, and ``vmap`` makes it a batched product:

* *patches*: every window becomes a row (im2col), which is multiplied by the kernel as a matrix, for any kernel and stride.
* *Winograd* F(2x2, 3x3), on a CPU, for 3x3 kernels of stride 1: 16 products of transformed 4x4 tiles and kernels give 2x2
  outputs each, with 2.25 times fewer multiplications. A round of the EMNIST CNN takes 1.6 times as long without it (two cores,
  jax 0.10.2). On a GPU it is limited by memory bandwidth and slower than patches. A. Lavin and S. Gray, "Fast Algorithms for
  Convolutional Neural Networks", CVPR 2016, https://arxiv.org/abs/1509.09308, section 4.1.

On a CPU, outputs without a derivative, as in an evaluation, are XLA's unless Winograd's algorithm is faster: they take the same
time in a loop as outside. ``python -m benchmarks.convolution`` compares all of this with Haiku's layers.

Derivatives are those of the products, whose transposes are fast as well, and derivatives of every order work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fedsim import tree

Pads = Sequence[tuple[int, int]]

# With fewer input or output channels, the transforms of Winograd's tiles take longer than the products save (measured).
_WINOGRAD_MIN_CHANNELS = 16
# Where no derivative is taken, XLA's convolution is faster up to here (measured).
_WINOGRAD_MIN_CHANNELS_OF_OUTPUTS = 32
# With fewer tiles, the transform of the kernel does. These programs also take several times as long to compile.
_WINOGRAD_MIN_TILES = 512


class Conv2D(hk.Module):
    """`hk.Conv2D` with the same parameters, defaults and results, computed by `conv2d`.

    The parameters are ``w float [*kernel_shape, in_channels, output_channels]``, drawn from a truncated normal distribution of
    standard deviation ``1 / sqrt(fan_in)`` unless ``w_init`` is given, and ``b float [output_channels]``, zeros unless
    ``b_init`` is given, both of the input's dtype. Arguments are in the order of `hk.Conv2D`. Other values of ``rate``,
    ``data_format``, ``mask`` and ``feature_group_count`` than the defaults are not supported.

    Raises:
      ValueError: dilation, a mask, groups or a layout other than NHWC is requested; or see `conv2d`.

    >>> net = hk.without_apply_rng(hk.transform(lambda x: Conv2D(32, 3, padding="VALID")(x)))
    >>> params = net.init(jax.random.key(0), jnp.ones([20, 28, 28, 1]))
    >>> jax.tree.map(jnp.shape, params)
    {'conv2_d': {'b': (32,), 'w': (3, 3, 1, 32)}}
    >>> net.apply(params, jnp.ones([20, 28, 28, 1])).shape
    (20, 26, 26, 32)
    """

    def __init__(
        self,
        output_channels: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        rate: int | Sequence[int] = 1,
        padding: str = "SAME",
        with_bias: bool = True,
        w_init: hk.initializers.Initializer | None = None,
        b_init: hk.initializers.Initializer | None = None,
        data_format: str = "NHWC",
        mask: jax.Array | None = None,
        feature_group_count: int = 1,
        name: str | None = None,
    ):
        super().__init__(name=name)
        if _pair("rate", rate) != (1, 1):
            raise ValueError(f"Expected rate=1, got rate={rate}. Use hk.Conv2D for dilated kernels.")
        if data_format not in ("NHWC", "channels_last"):
            raise ValueError(f"Expected data_format='NHWC', got data_format={data_format!r}. Transpose the images first.")
        if mask is not None:
            raise ValueError("Expected mask=None, got a mask. Use hk.Conv2D for masked weights.")
        if feature_group_count != 1:
            raise ValueError(
                f"Expected feature_group_count=1, got feature_group_count={feature_group_count}. Use hk.Conv2D for groups."
            )
        self.output_channels = output_channels
        self.kernel_shape = _pair("kernel_shape", kernel_shape)
        self.stride = _pair("stride", stride)
        self.padding = _known_padding(padding)
        self.with_bias = with_bias
        self.w_init = w_init
        self.b_init = b_init or jnp.zeros

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps ``inputs float [n, h, w, c]``, or one image ``[h, w, c]``, to ``float [n, ho, wo, output_channels]``."""
        inputs = jnp.asarray(inputs)
        if inputs.ndim not in (3, 4):
            raise ValueError(f"Expected images [n, h, w, c] or [h, w, c], got shape {list(inputs.shape)}.")
        images = inputs if inputs.ndim == 4 else inputs[None]
        w_shape = (*self.kernel_shape, images.shape[-1], self.output_channels)
        w_init = self.w_init or hk.initializers.TruncatedNormal(stddev=1 / np.sqrt(np.prod(w_shape[:-1])))
        outputs = conv2d(
            images,
            hk.get_parameter("w", w_shape, inputs.dtype, init=w_init),
            stride=self.stride,
            padding=self.padding,
        )
        if self.with_bias:
            b = hk.get_parameter("b", (self.output_channels,), inputs.dtype, init=self.b_init)
            outputs = outputs + jnp.broadcast_to(b, outputs.shape)
        return outputs if inputs.ndim == 4 else outputs[0]


class DepthwiseConv2D(hk.Module):
    """`hk.DepthwiseConv2D` with one output channel for each input channel, SAME padding, and the same parameters and results.

    The parameters are ``w float [*kernel_shape, 1, channels]`` and ``b float [channels]``, as in `Conv2D`. The convolution is a
    sum of products of shifted images and weights. XLA's grouped convolution takes about 100 times as long in a compiled loop on
    a CPU (gradient steps of 6 layers of 96 channels, 24 images of 16 by 16 pixels, two cores, jax 0.10.2).

    >>> net = hk.without_apply_rng(hk.transform(lambda x: DepthwiseConv2D(3, 2)(x)))
    >>> params = net.init(jax.random.key(0), jnp.ones([20, 28, 28, 8]))
    >>> jax.tree.map(jnp.shape, params)
    {'depthwise_conv2_d': {'b': (8,), 'w': (3, 3, 1, 8)}}
    >>> net.apply(params, jnp.ones([20, 28, 28, 8])).shape
    (20, 14, 14, 8)
    """

    def __init__(
        self,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        *,
        with_bias: bool = True,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.kernel_shape = _pair("kernel_shape", kernel_shape)
        self.stride = _pair("stride", stride)
        self.with_bias = with_bias

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Maps ``inputs float [n, h, w, c]`` to ``float [n, ho, wo, c]``."""
        n, height, width, c = inputs.shape
        (kh, kw), (sh, sw) = self.kernel_shape, self.stride
        init = hk.initializers.TruncatedNormal(stddev=1 / np.sqrt(kh * kw))
        w = hk.get_parameter("w", (kh, kw, 1, c), inputs.dtype, init=init)
        pads = lax.padtype_to_pads((height, width), (kh, kw), self.stride, "SAME")
        # Padded to a multiple of the stride, a reshape takes every second pixel: the transpose of a strided slice is slow.
        ho, wo = -(-height // sh), -(-width // sw)
        rows, columns = ho + (kh - 1) // sh, wo + (kw - 1) // sw
        more = rows * sh - height - pads[0][0], columns * sw - width - pads[1][0]
        x = jnp.pad(inputs, ((0, 0), (pads[0][0], more[0]), (pads[1][0], more[1]), (0, 0)))
        x = x.reshape(n, rows, sh, columns, sw, c)
        shifted = [[x[:, i // sh : i // sh + ho, i % sh, j // sw : j // sw + wo, j % sw] for j in range(kw)] for i in range(kh)]
        outputs = sum(shifted[i][j] * w[i, j][None, None] for i in range(kh) for j in range(kw))
        if self.with_bias:
            outputs = outputs + hk.get_parameter("b", (c,), inputs.dtype, init=jnp.zeros)[None, None, None]
        return outputs


def conv2d(x: jax.Array, w: jax.Array, *, stride: int | Sequence[int] = 1, padding: str = "SAME") -> jax.Array:
    """Convolves images ``x float [n, h, w, c]`` with a kernel ``w float [kh, kw, c, o]``.

    The result equals that of ``lax.conv_general_dilated`` with NHWC and HWIO layouts up to the order of float sums. A value
    that is not finite may affect outputs one pixel further away, which belong to the same Winograd tile.

    Returns:
      The outputs, ``float [n, ho, wo, o]``.

    Raises:
      ValueError: the inputs are not floats, the numbers of channels differ, padding is not SAME or VALID, or the kernel is
        larger than the padded image.

    >>> conv2d(jnp.ones([1, 3, 3, 1]), jnp.ones([3, 3, 1, 1]))[0, :, :, 0].tolist()
    [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]
    """
    stride, kernel = _pair("stride", stride), w.shape[:2]
    if not tree.is_float(x):
        raise ValueError(f"Expected images of floats, got {x.dtype}. Convert and scale the images first.")
    if x.shape[-1] != w.shape[2]:
        raise ValueError(
            f"Expected images with the {w.shape[2]} channels of the kernel {list(w.shape)}, got {x.shape[-1]} channels."
        )
    pads = lax.padtype_to_pads(x.shape[1:3], kernel, stride, _known_padding(padding))
    size = [n + low + high for n, (low, high) in zip(x.shape[1:3], pads, strict=True)]
    if size[0] < kernel[0] or size[1] < kernel[1]:
        raise ValueError(
            f"Expected images of at least the size of the kernel, {list(kernel)}, got {size} with padding={padding!r}."
        )
    dtype = jnp.result_type(x, w)
    x, w = x.astype(dtype), w.astype(dtype)
    # Winograd's sums and differences lose a few bits of precision, which half precision cannot spare.
    if jax.default_backend() == "cpu" and jnp.finfo(x.dtype).bits >= 32:
        return _on_cpu(x, w, stride, tuple(pads))
    return _patches(_pad(x, pads), w, stride)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _on_cpu(x: jax.Array, w: jax.Array, stride: tuple[int, int], pads: Pads) -> jax.Array:
    if _is_for_winograd(x, w, stride, pads, _WINOGRAD_MIN_CHANNELS_OF_OUTPUTS):
        return _winograd(x, w, pads)

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, stride, pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    of_one = jax.custom_batching.custom_vmap(convolved)

    @of_one.def_vmap
    def _(size: int, is_batched: Sequence[bool], x: jax.Array, w: jax.Array) -> tuple[jax.Array, bool]:
        # With a kernel for each, XLA's would be a grouped convolution, which takes several times as long as products.
        if is_batched[1]:
            axes = [0 if each else None for each in is_batched]
            return jax.vmap(lambda x, w: _patches(_pad(x, pads), w, stride), axes)(x, w), True
        outputs = of_one(x.reshape(-1, *x.shape[2:]), w)
        return outputs.reshape(size, -1, *outputs.shape[1:]), True

    return of_one(x, w)


@functools.partial(_on_cpu.defjvp, symbolic_zeros=True)
def _with_derivative(stride: tuple[int, int], pads: Pads, values: tuple, tangents: tuple) -> Any:
    """Returns the outputs and their derivative by products, without those for images or a kernel that do not change."""

    def products(x: jax.Array, w: jax.Array) -> jax.Array:
        if _is_for_winograd(x, w, stride, pads, _WINOGRAD_MIN_CHANNELS):
            return _winograd(x, w, pads)
        return _patches(_pad(x, pads), w, stride)

    (x, w), (dx, dw) = values, tangents
    if isinstance(dx, SymbolicZero):
        return jax.jvp(lambda w: products(x, w), (w,), (dw,))
    if isinstance(dw, SymbolicZero):
        return jax.jvp(lambda x: products(x, w), (x,), (dx,))
    return jax.jvp(products, values, tangents)


def _is_for_winograd(x: jax.Array, w: jax.Array, stride: tuple[int, int], pads: Pads, min_channels: int) -> bool:
    height, width = (n + low + high for n, (low, high) in zip(x.shape[1:3], pads, strict=True))
    tiles = x.shape[0] * ((height - 1) // 2) * ((width - 1) // 2)
    fits = w.shape[:2] == (3, 3) and stride == (1, 1)
    return fits and tiles >= _WINOGRAD_MIN_TILES and min(w.shape[2:]) >= min_channels


def _patches(x: jax.Array, w: jax.Array, stride: tuple[int, int]) -> jax.Array:
    (kh, kw, c, o), (sh, sw) = w.shape, stride
    ho, wo = (x.shape[1] - kh) // sh + 1, (x.shape[2] - kw) // sw + 1
    patches = jnp.concatenate(
        [x[:, i : i + (ho - 1) * sh + 1 : sh, j : j + (wo - 1) * sw + 1 : sw] for i in range(kh) for j in range(kw)],
        axis=-1,
    )
    outputs = patches.reshape(-1, kh * kw * c) @ w.reshape(-1, o)
    return outputs.reshape(x.shape[0], ho, wo, o)


def _winograd(x: jax.Array, w: jax.Array, pads: Pads) -> jax.Array:
    n, c, o = x.shape[0], x.shape[3], w.shape[3]
    ho, wo = (size + low + high - 2 for size, (low, high) in zip(x.shape[1:3], pads, strict=True))
    th, tw = -(-ho // 2), -(-wo // 2)
    # Tiles give outputs in pairs. An odd size is padded by one more, and that output is removed below.
    x = _pad(x, [(low, high + odd) for (low, high), odd in zip(pads, (ho % 2, wo % 2), strict=True)])
    # Pixel (i, j) of all 4x4 tiles. A reshape separates even and odd pixels, because the transpose of a strided slice is slow.
    x = x.reshape(n, th + 1, 2, tw + 1, 2, c)
    pixels = [[x[:, i // 2 : i // 2 + th, i % 2, j // 2 : j // 2 + tw, j % 2] for j in range(4)] for i in range(4)]
    tiles = _on_both_axes(_transform_tile, pixels)
    kernels = _on_both_axes(_transform_kernel, [list(row) for row in w])
    # These are separate products because to stack the tiles for a batched one would copy them all.
    products = [[tiles[i][j].reshape(-1, c) @ kernels[i][j] for j in range(4)] for i in range(4)]
    outputs = _on_both_axes(_transform_product, products)
    rows = [jnp.stack([output.reshape(n, th, tw, o) for output in row], axis=3) for row in outputs]
    return jnp.stack(rows, axis=2).reshape(n, 2 * th, 2 * tw, o)[:, :ho, :wo]


def _transform_tile(d: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """B^T d of Lavin and Gray, equation 7."""
    return d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]


def _transform_kernel(g: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """G g."""
    return g[0], (g[0] + g[1] + g[2]) / 2, (g[0] - g[1] + g[2]) / 2, g[2]


def _transform_product(m: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """A^T m."""
    return m[0] + m[1] + m[2], m[1] - m[2] - m[3]


def _on_both_axes(transform: Callable, grid: Sequence[Sequence[jax.Array]]) -> list[tuple[jax.Array, ...]]:
    columns = zip(*[transform(row) for row in grid], strict=True)
    return list(zip(*[transform(column) for column in columns], strict=True))


def _pad(x: jax.Array, pads: Pads) -> jax.Array:
    return jnp.pad(x, ((0, 0), *pads, (0, 0))) if any(map(any, pads)) else x


def _pair(name: str, value: int | Sequence[int]) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"Expected {name} to be one or two positive integers, got {name}={value}.")
    return pair


def _known_padding(padding: str) -> str:
    if not isinstance(padding, str) or padding.upper() not in ("SAME", "VALID"):
        raise ValueError(
            f"Expected padding to be 'SAME' or 'VALID', got padding={padding!r}. Pad the images first and use VALID."
        )
    return padding.upper()
