"""Aggregators: how the clients' updates are folded into one."""

from fedsim.aggregators._aggregator import Aggregator as Aggregator
from fedsim.aggregators._aggregator import Mean as Mean
