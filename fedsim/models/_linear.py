"""A linear layer whose weights' gradient is fast in small batches on a CPU.

The gradient of ``w`` in ``x @ w`` contracts the rows of ``x`` with those of what comes back. XLA:CPU gives that product to an
older library than ``x @ w``, and takes twice as long for as many operations (20 x 784 by 784 x 62: 49 against 21 us). So the
tangent is written by hand, with ``x`` transposed: JAX transposes that into a product in the plain order. It is a rule for
`jax.jvp`, so every order and both modes of derivative remain.
"""

from __future__ import annotations

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from fedsim import tree

# Where a transposition pays (measured on two cores, with each its own weights): of more rows it costs more than the product
# saves, of very few numbers XLA multiplies in a loop of its own, and of wide outputs both products are as fast.
_MOST_ROWS, _MOST_OUTPUTS, _LEAST_NUMBERS = 32, 128, 200
_BLOCK = 8  # Columns that are transposed together: by way of three axes XLA:CPU takes half the time for it.


class Linear(hk.Linear):
    """`hk.Linear` with the same parameters, arguments and results: ``float [..., in]`` to ``float [..., output_size]``.

    Parameters: ``w float [in, output_size]``, drawn from a truncated normal of standard deviation ``1 / sqrt(in)`` unless
    ``w_init`` is given, and ``b float [output_size]``, zeros unless ``b_init`` is given, both of the input's dtype.

    Guarantees:
      - Outputs are those of `hk.Linear` to the bit, gradients up to the order in which they are summed.
      - Forward, reverse and repeated differentiation, `jax.vmap`, symbolic shapes, explicit sharding, every precision.

    Haiku's policies of mixed precision are for a class and not for what inherits it: this one is to be named itself.

    Raises:
      ValueError: for an input without axes.

    >>> net = hk.without_apply_rng(hk.transform(lambda x: Linear(62)(x)))
    >>> params = net.init(jax.random.key(0), jnp.ones([20, 784]))
    >>> jax.tree.map(jnp.shape, params)
    {'linear': {'b': (62,), 'w': (784, 62)}}
    >>> net.apply(params, jnp.ones([20, 784])).shape
    (20, 62)
    """

    def __call__(self, inputs: jax.Array, *, precision: jax.lax.PrecisionLike = None) -> jax.Array:
        """``float [..., output_size]``, multiplied at this precision, by default that of `jax.default_matmul_precision`."""
        if not inputs.shape:
            raise ValueError("Expected inputs with an axis of features, got a scalar.")
        inputs = jnp.asarray(inputs)
        self.input_size = width = inputs.shape[-1]
        w_init = hk.initializers.TruncatedNormal(stddev=1 / np.sqrt(width)) if self.w_init is None else self.w_init
        w = hk.get_parameter("w", [width, self.output_size], inputs.dtype, init=w_init)
        if _pays(inputs, self.output_size):
            # A rule for derivatives is traced later, where the default may be another one.
            default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
            outputs = _product(inputs, w, default if precision is None else precision)
        else:
            outputs = jnp.dot(inputs, w, precision=precision)
        if self.with_bias:
            b = hk.get_parameter("b", [self.output_size], inputs.dtype, init=self.b_init)
            outputs = outputs + jnp.broadcast_to(b, outputs.shape)
        return outputs


def _pays(x: jax.Array, outputs: int) -> bool:
    # JAX reshapes neither a batch of unknown size nor an input whose axes are explicitly sharded.
    if x.ndim != 2 or not all(isinstance(n, int) for n in x.shape) or any(jax.typeof(x).sharding.spec):
        return False
    rows, width = x.shape
    few = rows <= _MOST_ROWS and outputs <= _MOST_OUTPUTS
    return few and rows * outputs >= _LEAST_NUMBERS and width % _BLOCK == 0


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _product(x: jax.Array, w: jax.Array, precision: Any) -> jax.Array:
    return jnp.dot(x, w, precision=precision)


def _product_jvp(precision: Any, primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    (x, w), (x_dot, w_dot) = primals, tangents
    outputs = _product(x, w, precision)
    parts = []
    if not isinstance(x_dot, SymbolicZero):
        parts.append(jnp.dot(x_dot, w, precision=precision))
    if not isinstance(w_dot, SymbolicZero):
        parts.append(jnp.tensordot(_transposed(x), w_dot, ((0,), (0,)), precision=precision))
    return outputs, sum(parts, jnp.zeros_like(outputs))


_product.defjvp(_product_jvp, symbolic_zeros=True)


def _transposed(x: jax.Array) -> jax.Array:
    def by_blocks(x: jax.Array) -> jax.Array:
        rows, width = x.shape
        blocks = x.reshape(rows, width // _BLOCK, _BLOCK).transpose(1, 2, 0)
        return tree.after(blocks.reshape(width, rows), x)  # or XLA takes the transposition back into the product

    return jax.lax.platform_dependent(x, cpu=by_blocks, default=jnp.transpose)
