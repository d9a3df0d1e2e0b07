"""Comparison of runs over seeds: intervals, the best setting of each group, what a target costs, and paired tests.

The metrics are read from run folders. No data and no models are built, no code that a configuration names is imported, and
JAX is loaded for figures only.
"""

from fedsim.comparison._compare import compare as compare
from fedsim.comparison._grid import edge_of_grid as edge_of_grid
from fedsim.comparison._outcome import Cost as Cost
from fedsim.comparison._outcome import Outcome as Outcome
from fedsim.comparison._report import report as report
from fedsim.comparison._result import Comparison as Comparison
from fedsim.comparison._result import GroupTest as GroupTest
from fedsim.comparison._result import SettingResult as SettingResult
from fedsim.comparison._runs import RecordedRun as RecordedRun
from fedsim.comparison._runs import read_runs as read_runs
from fedsim.comparison._runs import runs_table as runs_table
from fedsim.comparison._statistics import Interval as Interval
from fedsim.comparison._statistics import PairedTest as PairedTest
from fedsim.comparison._statistics import holm as holm
from fedsim.comparison._statistics import interval as interval
from fedsim.comparison._statistics import paired_test as paired_test
from fedsim.comparison._statistics import power_of as power_of
from fedsim.comparison._statistics import seeds_needed as seeds_needed
