"""Aggregators: how clients transform their updates before they send them, and how the server combines what it receives."""

from fedsim.aggregators._aggregator import Accumulator as Accumulator
from fedsim.aggregators._aggregator import Aggregator as Aggregator
from fedsim.aggregators._aggregator import Mean as Mean
from fedsim.aggregators._aggregator import Memory as Memory
from fedsim.aggregators._aggregator import Sent as Sent
from fedsim.aggregators._aggregator import Sum as Sum
from fedsim.aggregators._aggregator import SumAggregator as SumAggregator
from fedsim.aggregators._aggregator import Update as Update
from fedsim.aggregators._aggregator import Wrapper as Wrapper
from fedsim.aggregators._aggregator import accumulation_dtype as accumulation_dtype
from fedsim.aggregators._aggregator import widened as widened
from fedsim.aggregators._aux_mean import AuxMean as AuxMean
from fedsim.aggregators._aux_mean import WithAux as WithAux
from fedsim.aggregators._aux_mean import with_aux_of as with_aux_of
from fedsim.aggregators._aux_mean import with_empty_aux as with_empty_aux
from fedsim.aggregators._bucketing import Bucketing as Bucketing
from fedsim.aggregators._bulyan import Bulyan as Bulyan
from fedsim.aggregators._centred_clipping import CentredClipping as CentredClipping
from fedsim.aggregators._clipped import Clipped as Clipped
from fedsim.aggregators._compressed import Compressed as Compressed
from fedsim.aggregators._coordinate_median import CoordinateMedian as CoordinateMedian
from fedsim.aggregators._distributed_mechanism import DistributedMechanism as DistributedMechanism
from fedsim.aggregators._divide_and_conquer import DivideAndConquer as DivideAndConquer
from fedsim.aggregators._flame import FLAME as FLAME
from fedsim.aggregators._fltrust import FLTrust as FLTrust
from fedsim.aggregators._fools_gold import FoolsGold as FoolsGold
from fedsim.aggregators._fools_gold import WithHistory as WithHistory
from fedsim.aggregators._gaussian_mechanism import AdaptiveClip as AdaptiveClip
from fedsim.aggregators._gaussian_mechanism import GaussianMechanism as GaussianMechanism
from fedsim.aggregators._gaussian_mechanism import WithShortness as WithShortness
from fedsim.aggregators._geometric_median import GeometricMedian as GeometricMedian
from fedsim.aggregators._grouped import Grouped as Grouped
from fedsim.aggregators._grouped import Groups as Groups
from fedsim.aggregators._grouped import Member as Member
from fedsim.aggregators._krum import Krum as Krum
from fedsim.aggregators._locally_noised import LocallyNoised as LocallyNoised
from fedsim.aggregators._matrix_mechanism import MatrixMechanism as MatrixMechanism
from fedsim.aggregators._min_norm import MinNorm as MinNorm
from fedsim.aggregators._noise_matrix import BandedToeplitz as BandedToeplitz
from fedsim.aggregators._noise_matrix import BinaryTree as BinaryTree
from fedsim.aggregators._noise_matrix import BufferedToeplitz as BufferedToeplitz
from fedsim.aggregators._noise_matrix import NoiseMatrix as NoiseMatrix
from fedsim.aggregators._noise_matrix import matrix_factorization as matrix_factorization
from fedsim.aggregators._partly_uniform import PartlyUniform as PartlyUniform
from fedsim.aggregators._rows import squared_distances as squared_distances
from fedsim.aggregators._secure_mean import SecureMean as SecureMean
from fedsim.aggregators._stack import StackAggregator as StackAggregator
from fedsim.aggregators._trimmed_mean import TrimmedMean as TrimmedMean
from fedsim.names import by_name

# Aggregators that can be chosen by name. FLTrust needs the server's own update in a round, so it is not listed, and neither are
# wrappers that clients apply: they are options of their own (clip, compressor). The noise of GaussianMechanism and
# MatrixMechanism follows from a privacy budget.
AGGREGATORS: dict[str, type[Aggregator]] = by_name(
    Mean,
    PartlyUniform,
    Sum,
    CoordinateMedian,
    TrimmedMean,
    GeometricMedian,
    Krum,
    Bulyan,
    DivideAndConquer,
    FoolsGold,
    FLAME,
    CentredClipping,
    MinNorm,
    Bucketing,
    SecureMean,
)
