"""TernGrad.

W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, "TernGrad: Ternary gradients to reduce communication in distributed
deep learning", NIPS 2017, equations 1 to 4 and section 3.3: https://arxiv.org/abs/1705.07878. x_i is decoded as
s sign(x_i) b_i, with s = max |x|, and b_i = 1 with probability |x_i| / s, else 0. Deviations: each code takes 2 bits, although
there are three symbols (see ``entropy_bits``). Clipping uses the root mean square instead of the standard deviation, which is 0
for a constant vector. Clients do not share one s, as the paper's workers may.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.compressors._compressor import Size, VectorCompressor
from fedsim.compressors._norm import root_mean_square
from fedsim.compressors._packing import coded_bits, histogram
from fedsim.compressors._qsgd import SignedLevels, from_signed_levels, to_signed_levels


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TernGrad(VectorCompressor):
    """Stochastic, unbiased rounding to -s, 0 and s, where s = max|x|. NMSE = ||x||_1 max|x| / ||x||_2^2 - 1.

    Attributes:
      clip: c. Coordinates are first clipped to c times the root mean square of their tensor. This reduces s, but makes the
        result biased. The paper and FedJAX use 2.5. None does not clip.
      per_tensor: whether each tensor has its own s, as in the paper, or all floats have the same.

    Raises:
      ValueError: ``clip`` is not positive.

    >>> sent = TernGrad().transmit(jnp.array([0.0, -2.0, 2.0]), jax.random.key(0))
    >>> sent.value.tolist(), sent.bits.item()
    ([0.0, -2.0, 2.0], 38)
    """

    not_differentiable = "rounds"

    clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(or_none=True, clip=self.clip, remedy="None does not clip")

    def encode_vector(self, x: jax.Array, key: jax.Array) -> SignedLevels:
        if self.clip is not None:
            most = self.clip * root_mean_square(x)
            x = jnp.clip(x, -most, most)
        return to_signed_levels(x, jnp.max(jnp.abs(x)), 1, key)

    def decode_vector(self, message: SignedLevels, key: jax.Array, d: int) -> jax.Array:
        return from_signed_levels(message, 1, d)

    def size_vector(self, message: SignedLevels, d: int) -> Size:
        return Size(2 * d + 32, coded_bits(histogram(message.planes, d), d) + 32)
