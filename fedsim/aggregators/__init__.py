"""Aggregators: what clients send of their updates, and how these are folded into one."""

from fedsim.aggregators._aggregator import Aggregator as Aggregator
from fedsim.aggregators._aggregator import Mean as Mean
from fedsim.aggregators._aggregator import Sent as Sent
from fedsim.aggregators._aggregator import Sum as Sum
from fedsim.aggregators._aggregator import SumAggregator as SumAggregator
from fedsim.aggregators._aggregator import Wrapper as Wrapper
from fedsim.aggregators._beside import Beside as Beside
from fedsim.aggregators._beside import Noted as Noted
from fedsim.aggregators._beside import with_notes_of as with_notes_of
from fedsim.aggregators._bulyan import Bulyan as Bulyan
from fedsim.aggregators._centred_clipping import CentredClipping as CentredClipping
from fedsim.aggregators._clipped import Clipped as Clipped
from fedsim.aggregators._compressed import Compressed as Compressed
from fedsim.aggregators._coordinate_median import CoordinateMedian as CoordinateMedian
from fedsim.aggregators._geometric_median import GeometricMedian as GeometricMedian
from fedsim.aggregators._grouped import Grouped as Grouped
from fedsim.aggregators._grouped import Groups as Groups
from fedsim.aggregators._grouped import Member as Member
from fedsim.aggregators._krum import Krum as Krum
from fedsim.aggregators._min_norm import MinNorm as MinNorm
from fedsim.aggregators._noised import Noised as Noised
from fedsim.aggregators._side_by_side import SideBySide as SideBySide
from fedsim.aggregators._trimmed_mean import TrimmedMean as TrimmedMean
from fedsim.names import by_name

# Those that stand alone, by name; wrappers take one of them as `inner`.
AGGREGATORS: dict[str, type[Aggregator]] = by_name(
    Mean, Sum, CoordinateMedian, TrimmedMean, GeometricMedian, Krum, Bulyan, CentredClipping, MinNorm
)
