"""Top-k sparsification.

S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018: https://arxiv.org/abs/1809.07599; also D.
Alistarh, T. Hoefler, M. Johansson, S. Khirirat, N. Konstantinov, C. Renggli, "The convergence of sparsified gradient
methods", NeurIPS 2018: https://arxiv.org/abs/1809.10505. There are no deviations. The papers' memory is `ErrorFeedback`.
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
from fedsim.compressors._selection import count_of, indices_of, largest


class Sparse(NamedTuple):
    """Packed positions (a mask ``uint32 [1, words]``, or indices ``uint32 [bits, words]``) and values, ``float32 [k]``."""

    planes: jax.Array
    values: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TopK(VectorCompressor):
    """Sends the k coordinates of largest magnitude. Biased: use it inside `ErrorFeedback`.

    Attributes:
      fraction: k as a fraction of the coordinates, in (0, 1], rounded up.
      layout: how positions are sent. ``"mask"`` sends one bit per coordinate. ``"places"`` sends the index of each value, of
        ceil(log2 d) bits. ``"shortest"`` uses the one that takes fewer bits.
      per_tensor: whether k coordinates are selected from each tensor, or from all coordinates, as in the papers. True with
        ``layout="mask"`` is FLSim's sparse mask channel.

    Guarantees:
      - Exactly k coordinates are sent. Among equal magnitudes, those with the smallest indices are selected.

    Raises:
      ValueError: ``fraction`` is out of range, or ``layout`` has another value.

    >>> sent = TopK(fraction=0.5).transmit(jnp.array([0.1, -3.0, 2.0, 0.0]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([0.0, -3.0, 2.0, 0.0], 68)
    """

    not_differentiable = "keeps the largest coordinates"

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
        indices = indices_of(which, k)
        bits = self._index_bits(x.shape[0])
        return Sparse(pack(indices, bits) if bits else pack(which, 1), x[indices])

    def decode_vector(self, message: Sparse, key: jax.Array, d: int) -> jax.Array:
        k = message.values.shape[0]
        if self._index_bits(d):
            indices = unpack(message.planes, k).astype(jnp.int32)
        else:
            indices = indices_of(unpack(message.planes, d) == 1, k)
        return jnp.zeros(d, jnp.float32).at[indices].set(message.values, unique_indices=True, mode="promise_in_bounds")

    def size_vector(self, message: Sparse, d: int) -> Size:
        k = message.values.shape[0]
        # The receiver knows k. An entropy coder needs the entropy of the mask, whatever the layout.
        mask = -sum(n * math.log2(n / d) for n in (k, d - k) if n)
        return Size((k * self._index_bits(d) or d) + 32 * k, jnp.float32(mask + 32 * k))

    def _index_bits(self, d: int) -> int:
        """Returns the bits per index, or 0 if a mask is sent."""
        bits = max(d - 1, 1).bit_length()
        cheaper = count_of(self.fraction, d) * bits < d
        return bits if self.layout == "places" or (self.layout == "shortest" and cheaper) else 0
