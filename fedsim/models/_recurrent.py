"""A long short-term memory that is fast inside compiled loops, and whose weights' gradient is one matrix product.

S. Hochreiter, J. Schmidhuber, "Long short-term memory", Neural Computation 9(8), 1997; with the gates of W. Zaremba,
I. Sutskever, O. Vinyals, "Recurrent neural network regularization", 2014, https://arxiv.org/abs/1409.2329, as Haiku has
them: in the order input, cell, forget, output, with 1 added to the forget gate.

Differentiated as written, a scan adds a step's share to the gradient of all weights at every step: as much memory
traffic as the products themselves. So the tangent is written by hand: what the weights' tangent contributes is known for
all steps at once, before the scan. JAX transposes that into one product over time and batch, and into a scan that carries
nothing larger than the state. It is a rule for `jax.jvp`, so every order and both modes of derivative remain.

Time comes first and the batch last inside (``[time, features, batch]``), because XLA:CPU multiplies a large matrix by a
narrow one faster than a flat one by a large (0.33 against 0.53 ms for 2680 x 670 by 670 x 16, two cores).
"""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class LSTM(hk.Module):
    """A layer of LSTM cells over whole sequences: ``x float32 [batch, time, in]`` to ``[batch, time, hidden]``.

    Every sequence starts from the state zero. The function and the parameters, down to their names, order and initial
    distribution, are those of ``hk.LSTM`` unrolled: ``<name>/linear`` has ``w [in + hidden, 4 * hidden]`` and ``b``. So
    parameters trained by one are read by the other.

    Guarantees:
      - Outputs and gradients are those of the unrolled cell, beyond float summation order.
      - Forward, reverse and repeated differentiation, and `jax.vmap`.

    >>> layer = hk.transform(lambda x: LSTM(3)(x))
    >>> params = layer.init(jax.random.key(0), jnp.zeros([2, 5, 4]))
    >>> jax.tree.map(jnp.shape, params)
    {'lstm/linear': {'b': (12,), 'w': (7, 12)}}
    >>> layer.apply(params, None, jnp.ones([2, 5, 4])).shape
    (2, 5, 3)
    """

    def __init__(self, hidden_size: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self.hidden_size = hidden_size

    def __call__(self, x: jax.Array) -> jax.Array:
        fan_in = x.shape[-1] + self.hidden_size
        with hk.name_scope("linear"):
            w = hk.get_parameter(
                "w", [fan_in, 4 * self.hidden_size], x.dtype, hk.initializers.TruncatedNormal(1 / np.sqrt(fan_in))
            )
            b = hk.get_parameter("b", [4 * self.hidden_size], x.dtype, jnp.zeros)
        return _lstm(x.transpose(1, 2, 0), w, b).transpose(2, 0, 1)


class _Steps(NamedTuple):
    """What a step leaves for its derivative, each ``[time, ..., batch]``.

    ``read [in + hidden]`` is what the gates read; ``gates [4, hidden]``, ``forget`` and ``cell [hidden]`` are the derivatives
    of the cell by its gates (the last row: of the output by the output gate), of the cell by the cell before, and of the
    output by the cell.
    """

    read: jax.Array
    gates: jax.Array
    forget: jax.Array
    cell: jax.Array


@jax.custom_jvp
def _lstm(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """``x [time, in, batch]`` to ``[time, hidden, batch]``."""
    return _forward(x, w, b)[0]


@_lstm.defjvp
def _lstm_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    w = primals[1]
    x_dot, w_dot, b_dot = tangents
    outputs, steps = _forward(*primals)
    known = (jnp.einsum("tib,ig->tbg", steps.read, w_dot) + b_dot[None, None]).transpose(0, 2, 1).reshape(steps.gates.shape)

    def step(carry: tuple[jax.Array, jax.Array], at: tuple[jax.Array, jax.Array, _Steps]) -> tuple:
        h_dot, c_dot = carry
        x_dot, known, here = at
        read_dot = jnp.concatenate([x_dot, h_dot])
        # Written so that its transpose has w, as it lies in memory, on the left: see the head of this file.
        z_dot = lax.dot_general(w, read_dot, (((0,), (0,)), ((), ()))).reshape(known.shape)
        i, g, f, o = here.gates * (known + z_dot)
        c_dot = here.forget * c_dot + i + g + f
        h_dot = o + here.cell * c_dot
        return (h_dot, c_dot), h_dot

    zero = jnp.zeros_like(outputs[0])
    return outputs, lax.scan(step, (zero, zero), (x_dot, known, steps))[1]


def _forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, _Steps]:
    fan_in, hidden = w.shape[0], w.shape[1] // 4
    # The transpose of w; by way of three axes XLA:CPU takes half the time for it.
    w_left = w.reshape(fan_in, 4, hidden).transpose(1, 2, 0).reshape(4 * hidden, fan_in)
    bias = b.reshape(4, hidden, 1) + jnp.array([0, 0, 1, 0], b.dtype).reshape(4, 1, 1)

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple:
        h, c = carry
        read = jnp.concatenate([x, h])
        i, g, f, o = (w_left @ read).reshape(4, hidden, -1) + bias
        i, g, f, o = jax.nn.sigmoid(i), jnp.tanh(g), jax.nn.sigmoid(f), jax.nn.sigmoid(o)
        c_next = f * c + i * g
        squashed = jnp.tanh(c_next)
        gates = jnp.stack([g * i * (1 - i), i * (1 - g * g), c * f * (1 - f), squashed * o * (1 - o)])
        h = o * squashed
        return (h, c_next), (h, _Steps(read, gates, f, o * (1 - squashed * squashed)))

    zero = jnp.zeros((hidden, x.shape[2]), x.dtype)
    return lax.scan(step, (zero, zero), x)[1]
