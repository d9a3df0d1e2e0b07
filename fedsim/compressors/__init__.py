"""Compressors of pytrees of floats, which also count the bits of their messages.

``transmit(value, key, memory) -> (value, memory, bits, entropy_bits)`` calls `encode`, `decode` and `size`. To compress what
clients send, use ``fedsim.aggregators.Compressed``. To compress what the server sends, set an algorithm's ``downlink``. The
random key differs for every client and round.

====================================  =====================  =========  ==================================
compressor                            bits per coordinate    unbiased   what is compressed together
====================================  =====================  =========  ==================================
`Identity`                            32                     yes
`Cast`                                16                     no
`UniformQuantizer`                    ceil(log2 k)           yes        each tensor
`IntegerQuantizer`                    1 to 16                no         each tensor
`RotatedUniformQuantizer`             ceil(log2 k)           yes        all tensors joined, in blocks
`QSGD`                                ceil(log2(s + 1)) + 1  yes        each tensor
`TernGrad`                            2                      yes        each tensor
`ScaledSign`                          1                      no         each tensor
`Drive`                               1                      yes or no  all tensors joined, in blocks
`Eden`                                1 to 5                 yes or no  all tensors joined, in blocks
`TopK`                                k / d of 32 + indices  no         all tensors joined
`RandomK`                             k / d of 32            yes or no  all tensors joined
`MagnitudePruning`                    1, and 32 if sent      no         each tensor
`PowerSGD`                            32 rank (1/n + 1/m)    no         each tensor
====================================  =====================  =========  ==================================

Use biased compressors inside `ErrorFeedback`.
"""

from fedsim.compressors._cast import Cast as Cast
from fedsim.compressors._compressor import Compressor as Compressor
from fedsim.compressors._compressor import Message as Message
from fedsim.compressors._compressor import Size as Size
from fedsim.compressors._compressor import Transmission as Transmission
from fedsim.compressors._compressor import Value as Value
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

# Compressors by name. `ErrorFeedback` needs another compressor, so it is not listed.
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
