"""Long short-term memory (LSTM), with one implementation for CPUs and one for GPUs and TPUs.

S. Hochreiter, J. Schmidhuber, "Long short-term memory", Neural Computation 9(8), 1997, with the gates of W. Zaremba, I.
Sutskever, O. Vinyals, "Recurrent neural network regularization", 2014, https://arxiv.org/abs/1409.2329, as in Haiku: in the
order input, cell, forget, output, with 1 added to the forget gate.

On a GPU the products with the inputs are computed for all time steps at once, and the loop over time is unrolled: a step of the
Stack Overflow model with 16 clients took 5.5 ms on an H100 (jax 0.11.2, 2026-11-26), 8.1 ms without unrolling, and 10.1 ms with
the implementation for CPUs.

On a CPU, that implementation takes 1.4 times as long as the one for CPUs (Stack Overflow, batch 16: 66 and 47 ms; Shakespeare:
84 and 64 ms; two cores, jax 0.10.2), for two reasons. The derivative of a plain scan adds to the gradient of all weights at
every step, which takes as much memory traffic as the products. So the tangent is written by hand: the term with the weights'
tangent is computed for all steps before the scan, and JAX transposes it into one product over time and batch. It is a rule for
`jax.jvp`, so derivatives of every order work in both modes. And arrays are ``[time, features, batch]``, because XLA multiplies
a large matrix by a narrow one faster than the other way round.
"""

from __future__ import annotations

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class LSTM(hk.Module):
    """An LSTM layer over whole sequences: it maps ``x float32 [batch, time, in]`` to ``[batch, time, hidden]``.

    Every sequence starts from the zero state. The function and its parameters are those of ``hk.LSTM``, with the same names,
    order and initial distribution: ``<name>/linear`` has ``w [in + hidden, 4 * hidden]`` and ``b``. Outputs and gradients equal
    those of the unrolled ``hk.LSTM`` up to the order of float sums. Forward, reverse and repeated differentiation and
    `jax.vmap` are supported.

    Args:
      hidden_size: the number of hidden units.
      name: the name of the Haiku module.

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
        if jax.default_backend() != "cpu":
            return _unrolled(x, w, b)
        return _lstm(x.transpose(1, 2, 0), w, b).transpose(2, 0, 1)


_UNROLLED_STEPS = 20


def _unrolled(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """Maps ``x [batch, time, in]`` to ``[batch, time, hidden]``: the implementation for GPUs and TPUs."""
    fan_in, hidden = x.shape[-1], w.shape[1] // 4
    forget_bias = jnp.repeat(jnp.array([0, 0, 1, 0], b.dtype), hidden)
    z = x @ w[:fan_in] + (b + forget_bias)[None, None]

    def step(carry: tuple[jax.Array, jax.Array], z: jax.Array) -> tuple:
        h, c = carry
        i, g, f, o = jnp.split(z + h @ w[fan_in:], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[0], hidden), x.dtype)
    return lax.scan(step, (zero, zero), z.swapaxes(0, 1), unroll=min(_UNROLLED_STEPS, x.shape[1]))[1].swapaxes(0, 1)


class _Steps(NamedTuple):
    """The values of each step that the derivative uses, ``[time, ..., batch]``.

    Attributes:
      inputs: ``[in + hidden]``, the inputs of the gates.
      gates: ``[4, hidden]``, the derivatives of the cell with respect to its gates, and in the last row that of the output.
      forget: ``[hidden]``, the derivative of the cell with respect to the previous cell.
      cell: ``[hidden]``, the derivative of the output with respect to the cell.
    """

    inputs: jax.Array
    gates: jax.Array
    forget: jax.Array
    cell: jax.Array


@jax.custom_jvp
def _lstm(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """Maps ``x [time, in, batch]`` to ``[time, hidden, batch]``."""
    return _forward(x, w, b)[0]


@_lstm.defjvp
def _lstm_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    w = primals[1]
    x_dot, w_dot, b_dot = tangents
    outputs, steps = _forward(*primals)
    known = (jnp.einsum("tib,ig->tbg", steps.inputs, w_dot) + b_dot[None, None]).transpose(0, 2, 1).reshape(steps.gates.shape)

    def step(carry: tuple[jax.Array, jax.Array], at: tuple[jax.Array, jax.Array, _Steps]) -> tuple:
        h_dot, c_dot = carry
        x_dot, known, here = at
        inputs_dot = jnp.concatenate([x_dot, h_dot])
        # Its transpose then multiplies by w from the left as it is in memory; see the module docstring.
        z_dot = lax.dot_general(w, inputs_dot, (((0,), (0,)), ((), ()))).reshape(known.shape)
        i, g, f, o = here.gates * (known + z_dot)
        c_dot = here.forget * c_dot + i + g + f
        h_dot = o + here.cell * c_dot
        return (h_dot, c_dot), h_dot

    zero = jnp.zeros_like(outputs[0])
    return outputs, lax.scan(step, (zero, zero), (x_dot, known, steps))[1]


def _forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, _Steps]:
    fan_in, hidden = w.shape[0], w.shape[1] // 4
    # The transpose of w. With three axes, XLA takes half the time for it on a CPU.
    w_left = w.reshape(fan_in, 4, hidden).transpose(1, 2, 0).reshape(4 * hidden, fan_in)
    bias = b.reshape(4, hidden, 1) + jnp.array([0, 0, 1, 0], b.dtype).reshape(4, 1, 1)

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple:
        h, c = carry
        inputs = jnp.concatenate([x, h])
        i, g, f, o = (w_left @ inputs).reshape(4, hidden, -1) + bias
        i, g, f, o = jax.nn.sigmoid(i), jnp.tanh(g), jax.nn.sigmoid(f), jax.nn.sigmoid(o)
        c_next = f * c + i * g
        tanh_c = jnp.tanh(c_next)
        gates = jnp.stack([g * i * (1 - i), i * (1 - g * g), c * f * (1 - f), tanh_c * o * (1 - o)])
        h = o * tanh_c
        return (h, c_next), (h, _Steps(inputs, gates, f, o * (1 - tanh_c * tanh_c)))

    zero = jnp.zeros((hidden, x.shape[2]), x.dtype)
    return lax.scan(step, (zero, zero), x)[1]
