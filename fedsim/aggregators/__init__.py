"""Aggregators: what clients send of their updates, and how these are folded into one."""

from fedsim.aggregators._aggregator import Aggregator as Aggregator
from fedsim.aggregators._aggregator import Mean as Mean
from fedsim.aggregators._aggregator import Sent as Sent
from fedsim.aggregators._aggregator import Sum as Sum
from fedsim.aggregators._aggregator import SumAggregator as SumAggregator
from fedsim.aggregators._aggregator import Wrapper as Wrapper
from fedsim.aggregators._side_by_side import SideBySide as SideBySide
