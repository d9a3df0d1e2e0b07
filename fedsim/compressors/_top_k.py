"""Top-k sparsification.

S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018: https://arxiv.org/abs/1809.07599; also D.
Alistarh, T. Hoefler, M. Johansson, S. Khirirat, N. Konstantinov, C. Renggli, "The convergence of sparsified gradient
methods", NeurIPS 2018: https://arxiv.org/abs/1809.10505. No deviations; the papers' memory is `ErrorFeedback`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._packing import pack, unpack
from fedsim.compressors._selection import count_of, largest, places


class Sparse(NamedTuple):
    """Where: a mask ``uint32 [1, words]`` or packed places ``uint32 [bits, words]``; and what is there, ``float32 [k]``."""

    planes: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TopK(VectorCompressor):
    """The k coordinates largest in magnitude, as they are. Biased: use it inside `ErrorFeedback`.

    Attributes:
      fraction: k as a fraction of the coordinates, in (0, 1], rounded up.
      layout: ``"mask"`` sends one bit a coordinate, ``"places"`` the number of each that is sent, ceil(log2 d) bits;
        ``"shortest"`` what takes fewer bits.
      per_tensor: False, as in the papers: the largest of all coordinates. True: of each tensor; with ``layout="mask"`` that is
        FLSim's sparse mask channel.

    Guarantees:
      - Exactly k, also where magnitudes are equal: of these, which are sent is decided by place.

    Raises:
      ValueError: ``fraction`` out of range, another ``layout``.

    >>> sent = TopK(fraction=0.5).transmit(jnp.array([0.1, -3.0, 2.0, 0.0]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([0.0, -3.0, 2.0, 0.0], 68)
    """

    fraction: float = 0.01
    layout: Literal["shortest", "mask", "places"] = "shortest"
    per_tensor: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(above=0, most=1, fraction=self.fraction)
        checks.one_of("shortest", "mask", "places", layout=self.layout)

    def encode_vector(self, x: jax.Array, key: jax.Array) -> Sparse:
        k = count_of(self.fraction, x.shape[0])
        which = largest(x, k)
        where = places(which, k)
        bits = self._place_bits(x.shape[0])
        return Sparse(pack(where, bits) if bits else pack(which, 1), x[where])

    def decode_vector(self, message: Sparse, key: jax.Array, d: int) -> jax.Array:
        k = message.values.shape[0]
        if self._place_bits(d):
            where = unpack(message.planes, k).astype(jnp.int32)
        else:
            where = places(unpack(message.planes, d) == 1, k)
        return jnp.zeros(d, jnp.float32).at[where].set(message.values, unique_indices=True, mode="promise_in_bounds")

    def size_vector(self, message: Sparse, d: int) -> Size:
        k = message.values.shape[0]
        # The receiver knows k. An entropy coder spends the entropy of the mask, whatever the layout.
        mask = -sum(n * math.log2(n / d) for n in (k, d - k) if n)
        return Size((k * self._place_bits(d) or d) + 32 * k, jnp.float32(mask + 32 * k))

    def _place_bits(self, d: int) -> int:
        """Bits of a place; 0: a mask is sent."""
        bits = max(d - 1, 1).bit_length()
        cheaper = count_of(self.fraction, d) * bits < d
        return bits if self.layout == "places" or (self.layout == "shortest" and cheaper) else 0
