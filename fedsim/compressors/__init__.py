"""Compressors: a pytree of floats in fewer bits, with the bits counted.

``transmit(value, key, memory) -> (value, memory, bits, entropy_bits)`` is `encode`, `decode` and `size` in one. Up, from
clients to the server, they stand in ``fedsim.aggregators.Compressed``; down, they are an algorithm's ``downlink``. Every
client and round has a key of its own.

====================================  =====================  =========  ==================================
compressor                            bits a coordinate      unbiased   a vector is by default
====================================  =====================  =========  ==================================
`Identity`                            32                     yes
`Cast`                                16                     no
`UniformQuantizer`                    ceil(log2 k)           yes        each tensor
`IntegerQuantizer`                    1 to 16                no         each tensor
`RotatedUniformQuantizer`             ceil(log2 k)           yes        all tensors end to end, in blocks
`QSGD`                                ceil(log2(s + 1)) + 1  yes        each tensor
`TernGrad`                            2                      yes        each tensor
`ScaledSign`                          1                      no         each tensor
`Drive`                               1                      yes or no  all tensors end to end, in blocks
`Eden`                                1 to 4                 yes or no  all tensors end to end, in blocks
`TopK`                                k / d of 32 + places   no         all tensors end to end
`RandomK`                             k / d of 32            yes or no  all tensors end to end
`MagnitudePruning`                    1, and 32 if kept      no         each tensor
`PowerSGD`                            32 rank (1/n + 1/m)    no         each tensor
====================================  =====================  =========  ==================================

`ErrorFeedback` makes use of a biased one safe.
"""

from fedsim.compressors._cast import Cast as Cast
from fedsim.compressors._compressor import Compressor as Compressor
from fedsim.compressors._compressor import Size as Size
from fedsim.compressors._compressor import Transmission as Transmission
from fedsim.compressors._compressor import VectorCompressor as VectorCompressor
from fedsim.compressors._drive import Drive as Drive
from fedsim.compressors._eden import Eden as Eden
from fedsim.compressors._error_feedback import ErrorFeedback as ErrorFeedback
from fedsim.compressors._identity import Identity as Identity
from fedsim.compressors._integer import IntegerQuantizer as IntegerQuantizer
from fedsim.compressors._power_sgd import PowerSGD as PowerSGD
from fedsim.compressors._pruning import MagnitudePruning as MagnitudePruning
from fedsim.compressors._qsgd import QSGD as QSGD
from fedsim.compressors._random_k import RandomK as RandomK
from fedsim.compressors._rotated_uniform import RotatedUniformQuantizer as RotatedUniformQuantizer
from fedsim.compressors._sign import ScaledSign as ScaledSign
from fedsim.compressors._terngrad import TernGrad as TernGrad
from fedsim.compressors._top_k import TopK as TopK
from fedsim.compressors._uniform import UniformQuantizer as UniformQuantizer
from fedsim.names import by_name

# By name; `ErrorFeedback` takes one of them.
COMPRESSORS: dict[str, type[Compressor]] = by_name(
    Identity,
    Cast,
    UniformQuantizer,
    IntegerQuantizer,
    RotatedUniformQuantizer,
    QSGD,
    TernGrad,
    ScaledSign,
    Drive,
    Eden,
    TopK,
    RandomK,
    MagnitudePruning,
    PowerSGD,
)
